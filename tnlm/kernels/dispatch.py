"""The public attention functions: they check arguments, cast under autocast and choose an implementation."""

import importlib.util
import os
import sys
import warnings
from functools import cache
from numbers import Real
from typing import Literal, get_args

import torch
from jaxtyping import Inexact
from torch import Tensor

from tnlm.kernels import eager, ops, recurrent, tiles
from tnlm.kernels.precision import CASTABLE, SUPPORTED, autocast_active, without_autocast
from tnlm.kernels.transforms import transformed

Implementation = Literal["auto", "eager", "chunked", "recurrent", "triton"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

EAGER_EXTRA_SEQ_Q, EAGER_SCORES = 64, 2**18
"""Limits of eager for "auto" on a CPU: ``d_qk`` plus so many queries, or so many scores over batch and heads. Up to
there the scores stay in the CPU's cache, and chunked is no faster (``docs/kernels.md``)."""
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def bilinear_attention(
    q1: Inexact[Tensor, "batch seq_q n_head d_qk"],
    k1: Inexact[Tensor, "batch seq_k n_head d_qk"],
    q2: Inexact[Tensor, "batch seq_q n_head d_qk"],
    k2: Inexact[Tensor, "batch seq_k n_head d_qk"],
    v: Inexact[Tensor, "batch seq_k n_head d_v"],
    *,
    causal: bool = True,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Inexact[Tensor, "batch seq_q n_head d_v"]:
    """Attention without softmax whose pattern is a product of two dot products.

    ``out_i = sum_j scale (q1_i . k1_j) (q2_i . k2_j) v_j`` over ``j <= i + seq_k - seq_q`` when causal.

    Args:
        q1, k1, q2, k2: Queries and keys of the two factors. Strided views are fine.
        v: Values; ``d_v`` may differ from ``d_qk``.
        causal: Aligned bottom-right: the last query sees every key (torch's ``is_causal`` is top-left).
        scale: Factor of every score; None is ``1 / d_qk**2``, that is ``1 / d_qk`` per dot product.
        implementation: "auto" chooses (see `choose`); a named one is used, or is an error that gives the reason.

    Returns:
        A contiguous tensor in the dtype of ``v`` (under autocast, in the autocast dtype). Sums of float16 and bfloat16
        are formed in float32.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, or the named implementation cannot run.
    """
    operands = _settle({"q1": q1, "k1": k1, "q2": q2, "k2": k2, "v": v})
    return _run("bilinear", operands, causal, scale, implementation)


def squared_attention(
    q: Inexact[Tensor, "batch seq_q n_head d_qk"],
    k: Inexact[Tensor, "batch seq_k n_head d_qk"],
    v: Inexact[Tensor, "batch seq_k n_head d_v"],
    *,
    causal: bool = True,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Inexact[Tensor, "batch seq_q n_head d_v"]:
    """Attention without softmax whose pattern is the square of a dot product.

    ``out_i = sum_j scale (q_i . k_j)**2 v_j``, which is `bilinear_attention` of ``(q, k, q, k, v)`` at less cost.
    Arguments, result and errors are those of `bilinear_attention`.
    """
    return _run("squared", _settle({"q": q, "k": k, "v": v}), causal, scale, implementation)


def choose(device: torch.device, dtype: torch.dtype, *, seq_q: int, d_qk: int, d_v: int, scores: int) -> str:
    """Name of the implementation that "auto" uses. It is never `recurrent`, whose rounding differs.

    1. float64 and complex (and anything inside a ``torch.func`` transform or forward-mode AD; where a compiled
       function holds a transform other than ``jvp``, name "eager" yourself): eager
    2. CUDA or ROCm with triton and a row in `tnlm.kernels.tiles` for the GPU, dtype and widths: triton
    3. other devices up to ``64 + d_qk`` queries, or up to ``2**18`` scores over batch and heads: eager
    4. everything else: chunked
    """
    if dtype not in CASTABLE:
        return "eager"
    if device.type == "cuda":
        reason = _why_not_triton(device, dtype, d_qk, d_v)
        if reason is None:
            return "triton"
        if not torch.compiler.is_compiling():
            _notice(f'attention runs chunked: implementation="triton" {reason}')
        return "chunked"
    return "eager" if seq_q <= EAGER_EXTRA_SEQ_Q + d_qk or scores <= EAGER_SCORES else "chunked"


def _run(kind: str, operands: dict[str, Tensor], causal: bool, scale: float | None, implementation: str) -> Tensor:
    """Check, choose and call; `operands` begins with the first query and ends with the values."""
    _check(operands)
    q, v = next(iter(operands.values())), operands["v"]
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    if implementation == "auto":
        scores = q.shape[0] * q.shape[2] * q.shape[1] * v.shape[1]
        sizes = {"seq_q": q.shape[1], "d_qk": q.shape[3], "d_v": v.shape[3], "scores": scores}
        implementation = "eager" if transformed(*operands.values()) else choose(v.device, v.dtype, **sizes)
    elif reason := _why_not(implementation, operands):
        raise ValueError(f'implementation="{implementation}" {reason}')
    if scale is not None and not (isinstance(scale, Real) and abs(scale) <= sys.float_info.max):
        raise ValueError(f"scale must be a finite number, or None for 1 / d_qk**2, got {scale!r}")
    scale = 1.0 / q.shape[3] ** 2 if scale is None else float(scale)
    if implementation in ("chunked", "triton"):
        op = ops.bilinear_fwd if kind == "bilinear" else ops.squared_fwd
        return op(*operands.values(), causal, scale, implementation)
    module = recurrent if implementation == "recurrent" else eager
    function = module.bilinear if kind == "bilinear" else module.squared
    with without_autocast(v.device.type):
        return function(*operands.values(), causal=causal, scale=scale)


def _why_not(implementation: str, operands: dict[str, Tensor]) -> str | None:
    """The reason why an implementation cannot take these operands, with the way out; None when it can."""
    q, v = next(iter(operands.values())), operands["v"]
    if implementation in ("eager", "recurrent"):
        return None
    if transformed(*operands.values()):
        return 'cannot run inside torch.func transforms or forward-mode AD; use "eager", or "auto"'
    if implementation == "triton":
        return _why_not_triton(v.device, v.dtype, q.shape[3], v.shape[3])
    return f'needs a real dtype, got {v.dtype}; use "eager"' if v.is_complex() else None


def _why_not_triton(device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int) -> str | None:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f'needs a CUDA tensor, got {device.type}; use "chunked", or "auto" to choose by device'
    if not TRITON_INSTALLED:
        return 'needs the package triton, which is not installed; use "chunked", or "auto"'
    if dtype not in CASTABLE:
        return f'needs float32, float16 or bfloat16, got {dtype}; use "eager"'
    return tiles.why_not(tiles.target_of(device), d_qk, d_v)


def _settle(operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """The operands, under autocast cast to its dtype: autocast does not act on custom operators by itself."""
    for name, x in operands.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor (batch, seq, n_head, d), got {type(x).__name__}")
    device = operands["v"].device.type
    if not autocast_active(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return {name: x.to(dtype) if x.dtype in CASTABLE else x for name, x in operands.items()}


@cache
def _notice(message: str) -> None:
    """Warn, once per process and message, that "auto" uses the slower implementation on a GPU."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _check(operands: dict[str, Tensor]) -> None:
    """Raise a ValueError unless shapes, dtypes and devices agree; the message names the operand."""
    for name, x in operands.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, seq, n_head, d), got shape {tuple(x.shape)}")
    first, q = next(iter(operands.items()))
    v = operands["v"]
    if v.dtype not in SUPPORTED:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED)
        raise ValueError(f"v must be one of {names}, got {v.dtype}; cast it")
    for name, x in operands.items():
        if x.dtype != v.dtype:
            raise ValueError(f"{name} must have the dtype of v, got {name}={x.dtype}, v={v.dtype}; cast one")
        if x.device != v.device:
            raise ValueError(f"{name} must be on the device of v, got {name} on {x.device}, v on {v.device}")
        of, like = (first, q) if name.startswith("q") else ("v", v)
        if (x.shape[0], x.shape[2]) != (v.shape[0], v.shape[2]) or x.shape[1] != like.shape[1]:
            raise ValueError(
                f"{name} must share batch and n_head with v and seq with {of}, "
                f"got {name}={tuple(x.shape)}, v={tuple(v.shape)}, {of}={tuple(like.shape)}"
            )
        if name != "v" and x.shape[3] != q.shape[3]:
            raise ValueError(f"{name} must have the d_qk of {first}, got {x.shape[3]} and {q.shape[3]}")
    if q.shape[3] == 0:
        raise ValueError(f"d_qk must be at least 1, got {first}={tuple(q.shape)}")
