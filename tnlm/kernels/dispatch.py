"""The public functions: check the arguments, settle the dtype, choose an implementation."""

from typing import Literal, get_args

import torch
from jaxtyping import Inexact
from torch import Tensor

from tnlm.kernels import eager

Implementation = Literal["auto", "eager"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


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
    """Attention whose pattern is a product of two dot products, with no softmax.

    ``out_i = sum_j scale (q1_i . k1_j) (q2_i . k2_j) v_j`` over ``j <= i + seq_k - seq_q`` when causal.

    Args:
        q1, k1, q2, k2: Queries and keys of the two factors. Strided views are fine.
        v: Values; ``d_v`` may differ from ``d_qk``.
        causal: Aligned bottom-right: the last query sees every key (torch's ``is_causal`` is top-left).
        scale: Factor of every score; None is ``1 / d_qk**2``, that is ``1 / d_qk`` per dot product.
        implementation: One of `IMPLEMENTATIONS`. A named one runs or raises; only "auto" chooses.

    Returns:
        Contiguous, in the dtype of ``v`` (under autocast, in the autocast dtype). Sums are formed in float32.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, or a named implementation cannot run.
    """
    args = _settle({"q1": q1, "k1": k1, "q2": q2, "k2": k2, "v": v})
    return _run("bilinear", args, causal=causal, scale=scale, implementation=implementation)


def squared_attention(
    q: Inexact[Tensor, "batch seq_q n_head d_qk"],
    k: Inexact[Tensor, "batch seq_k n_head d_qk"],
    v: Inexact[Tensor, "batch seq_k n_head d_v"],
    *,
    causal: bool = True,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Inexact[Tensor, "batch seq_q n_head d_v"]:
    """``out_i = sum_j scale (q_i . k_j)**2 v_j``: `bilinear_attention` of ``(q, k, q, k, v)``, cheaper.

    Arguments, result and errors are those of `bilinear_attention`.
    """
    args = _settle({"q": q, "k": k, "v": v})
    return _run("squared", args, causal=causal, scale=scale, implementation=implementation)


def _run(
    kind: str, args: dict[str, Tensor], *, causal: bool, scale: float | None, implementation: str
) -> Tensor:
    """Check, choose, call; `args` ends with the values and begins with the first query."""
    _check(args)
    q, v = next(iter(args.values())), args["v"]
    if scale is None:
        scale = 1.0 / q.shape[-1] ** 2
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    function = eager.bilinear if kind == "bilinear" else eager.squared
    if not _autocast(v.device.type):
        return function(*args.values(), causal=causal, scale=scale)
    with torch.autocast(v.device.type, enabled=False):
        return function(*args.values(), causal=causal, scale=scale)


def _settle(args: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under autocast, cast every operand to its dtype: autocast reaches no custom operator by itself."""
    device = args["v"].device.type
    if not _autocast(device):
        return args
    dtype = torch.get_autocast_dtype(device)
    castable = (torch.float32, torch.float16, torch.bfloat16)
    return {name: x.to(dtype) if x.dtype in castable else x for name, x in args.items()}


def _autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _check(args: dict[str, Tensor]) -> None:
    """Shapes, dtypes and devices that must agree, each error with the name of what does not."""
    for name, x in args.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, seq, n_head, d), got shape {tuple(x.shape)}")
    first, q = next(iter(args.items()))
    v = args["v"]
    for name, x in args.items():
        if x.dtype != v.dtype:
            raise ValueError(f"{name} must have the dtype of v, got {name}={x.dtype}, v={v.dtype}; cast one")
        if x.device != v.device:
            raise ValueError(f"{name} must be on the device of v, got {name} on {x.device}, v on {v.device}")
        of, like = (first, q) if name.startswith("q") else ("v", v)
        if (x.shape[0], x.shape[2]) != (v.shape[0], v.shape[2]) or x.shape[1] != like.shape[1]:
            raise ValueError(
                f"{name} must share batch, n_head and seq with {of}, got {name}={tuple(x.shape)}, "
                f"{of}={tuple(like.shape)}"
            )
        if name != "v" and x.shape[3] != q.shape[3]:
            raise ValueError(f"{name} must have d_qk={q.shape[3]} as {first}, got {name}={tuple(x.shape)}")
    if not (v.is_floating_point() or v.is_complex()):
        raise ValueError(f"attention needs floating or complex tensors, got {v.dtype}")
    if q.shape[3] == 0:
        raise ValueError(f"d_qk must be at least 1, got {first}={tuple(q.shape)}")
