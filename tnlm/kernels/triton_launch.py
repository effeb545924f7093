"""Attention by the Triton kernels: operands get the widths, strides and alignment that the kernels are compiled for."""

from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from tnlm.kernels import tiles
from tnlm.kernels.triton_kernels import dkv_kernel, dq_kernel, forward_kernel

INT32_LIMIT = 2**31
"""The kernels hold the offset of a row within its head, ``seq * stride``, in int32."""


def bilinear_forward(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Output (batch, seq_q, n_head, d_v) for inputs (batch, seq, n_head, d)."""
    return _forward("bilinear", [q1, q2], [k1, k2], v, causal, scale)


def bilinear_backward(
    grad: Tensor, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of q1, k1, q2, k2 and v, in two kernels without atomics: bit-equal on every run."""
    return _backward("bilinear", grad, [q1, q2], [k1, k2], v, causal, scale)


def squared_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Output (batch, seq_q, n_head, d_v) for inputs (batch, seq, n_head, d)."""
    return _forward("squared", [q], [k], v, causal, scale)


def squared_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, in two kernels without atomics: bit-equal on every run."""
    return _backward("squared", grad, [q], [k], v, causal, scale)


def _forward(kind: str, queries: list[Tensor], keys: list[Tensor], v: Tensor, causal: bool, scale: float) -> Tensor:
    batch, seq_q, n_head, _ = queries[0].shape
    seq_k, d_v = v.shape[1], v.shape[3]
    if 0 in (batch, seq_q, n_head, seq_k, d_v):
        return v.new_zeros(batch, seq_q, n_head, d_v)
    row, (width_qk, width_v) = _row(kind, queries[0], v)
    queries, keys, (v,) = _ready(queries, width_qk), _ready(keys, width_qk), _ready([v], width_v)
    out = torch.empty(batch, seq_q, n_head, width_v, dtype=v.dtype, device=v.device)
    grid = (batch * n_head, triton.cdiv(seq_q, row.forward.block_m))
    with torch.cuda.device_of(v):
        forward_kernel[grid](
            queries[0], keys[0], queries[-1], keys[-1], v, out, scale, n_head, seq_q, seq_k,
            *_strides(queries[0], keys[0], v, out),
            **kernel_constants(kind, row.forward, v.dtype, (width_qk, width_v), causal), **_options(row.forward),
        )  # fmt: skip
    return out[..., :d_v].contiguous()


def _backward(
    kind: str,
    grad: Tensor,
    queries: list[Tensor],
    keys: list[Tensor],
    v: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    batch, seq_q, n_head, d_qk = queries[0].shape
    seq_k, d_v = v.shape[1], v.shape[3]
    if 0 in (batch, seq_q, n_head, seq_k, d_v):
        pairs = zip(queries, keys, strict=True)
        return tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for p in (*pairs, [v]) for x in p)
    row, (width_qk, width_v) = _row(kind, queries[0], v)
    queries, keys = _ready(queries, width_qk), _ready(keys, width_qk)
    (v,), (grad,) = _ready([v], width_v), _ready([grad], width_v)
    fresh = partial(torch.empty, dtype=v.dtype, device=v.device)
    dq = [fresh(batch, seq_q, n_head, width_qk) for _ in queries]
    dk = [fresh(batch, seq_k, n_head, width_qk) for _ in keys]
    dv = fresh(batch, seq_k, n_head, width_v)
    operands = (queries[0], keys[0], queries[-1], keys[-1], v, grad)
    with torch.cuda.device_of(v):
        dq_kernel[(batch * n_head, triton.cdiv(seq_q, row.dq.block_m))](
            *operands, dq[0], dq[-1], scale, n_head, seq_q, seq_k,
            *_strides(queries[0], keys[0], v, grad, dq[0]),
            **kernel_constants(kind, row.dq, v.dtype, (width_qk, width_v), causal), **_options(row.dq),
        )  # fmt: skip
        dkv_kernel[(batch * n_head, triton.cdiv(seq_k, row.dkv.block_n))](
            *operands, dk[0], dk[-1], dv, scale, n_head, seq_q, seq_k,
            *_strides(queries[0], keys[0], v, grad, dk[0], dv),
            **kernel_constants(kind, row.dkv, v.dtype, (width_qk, width_v), causal), **_options(row.dkv),
        )  # fmt: skip
    factors = [x[..., :d_qk].contiguous() for pair in zip(dq, dk, strict=True) for x in pair]
    return *factors, dv[..., :d_v].contiguous()


def _row(kind: str, q: Tensor, v: Tensor) -> tuple[tiles.Row, tuple[int, int]]:
    """Tiles and compiled widths; a ValueError if even packed operands need offsets beyond int32."""
    row, widths = tiles.lookup(tiles.target_of(v.device), kind, v.dtype, q.shape[3], v.shape[3])
    seq, n_head = max(q.shape[1], v.shape[1]), v.shape[2]
    if seq * n_head * max(widths) >= INT32_LIMIT:
        raise ValueError(
            f"triton attention needs seq * n_head * width below {INT32_LIMIT}, "
            f'got seq={seq}, n_head={n_head}, width={max(widths)}; use "chunked"'
        )
    return row, widths


def _ready(tensors: list[Tensor], width: int) -> list[Tensor]:
    """The tensors, padded to a width with zeros, which is exact, and copied unless strides and address fit.

    The kernels are compiled for addresses divisible by 16 bytes, strides divisible by 16 elements and int32 row
    offsets; tensors of one list have the same strides.
    """
    tensors = [F.pad(x, (0, width - x.shape[3])) if x.shape[3] != width else x for x in tensors]
    aligned = all(
        x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in x.stride()[:3]) for x in tensors
    )
    near = all(x.shape[1] * x.stride(1) < INT32_LIMIT for x in tensors)
    if aligned and near and len({x.stride() for x in tensors}) == 1:
        return tensors
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Batch, seq and head strides of each tensor, in elements."""
    return tuple(s for x in tensors for s in x.stride()[:3])


def kernel_constants(
    kind: str, tile: tiles.Tile, dtype: torch.dtype, widths: tuple[int, int], causal: bool
) -> dict[str, object]:
    """The compile-time arguments of any of the three kernels."""
    width_qk, width_v = widths
    return {
        "D_QK": width_qk,
        "D_V": width_v,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "CAUSAL": causal,
        "SQUARED": kind == "squared",
        # Float32 matmuls are exact; Triton's default, tf32, would be a thousand times less precise.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


def _options(tile: tiles.Tile) -> dict[str, int]:
    """Triton's own launch options of a tile."""
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
