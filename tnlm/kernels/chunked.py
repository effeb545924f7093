"""Blocks of queries against all their keys, recomputed in backward: memory grows with ``CHUNK * seq``.

Everything here is plain arithmetic on heads-first tensors without autograd; `tnlm.kernels.ops` makes it an operator.
Formulas, with ``A = scale * mask * (G V^T)``: ``dV = P^T G``, ``dS1 = A * S2``, ``dS2 = A * S1``, ``dQ = dS K``,
``dK = dS^T Q``. No row statistic couples the keys, so backward needs nothing but the inputs.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tnlm.kernels.precision import accumulation_dtype, narrow

CHUNK = 128
"""Query rows per block, the fastest of 32 to 256 on AVX2 at seq 1024 (``benchmarks/attention.py``)."""
TILE_ELEMENTS = 2**21
"""Scores held at once, over all heads of a group (8 MiB in float32): bounds memory whatever batch and n_head are."""


def bilinear_forward(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Output (batch, seq_q, n_head, d_v) for inputs (batch, seq, n_head, d)."""

    def block(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, out: Tensor) -> None:
        for rows, keys, mask_ in _blocks(q1.shape[1], v.shape[1], causal):
            p = torch.bmm(q1[:, rows], k1[:, keys].mT)
            p.mul_(torch.bmm(q2[:, rows], k2[:, keys].mT)).mul_(scale)
            torch.bmm(mask_(p), v[:, keys], out=out[:, rows])

    return _forward(block, (q1, k1, q2, k2, v))


def bilinear_backward(
    grad: Tensor, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of q1, k1, q2, k2 and v, each in the shape and dtype of its operand."""

    def block(g, q1, k1, q2, k2, v, dq1, dk1, dq2, dk2, dv) -> None:
        for rows, keys, mask_ in _blocks(q1.shape[1], v.shape[1], causal):
            g_rows = g[:, rows] * scale
            a = mask_(torch.bmm(g_rows, v[:, keys].mT))
            s1 = mask_(torch.bmm(q1[:, rows], k1[:, keys].mT))
            s2 = torch.bmm(q2[:, rows], k2[:, keys].mT)
            dv[:, keys].baddbmm_((s1 * s2).mT, g_rows)
            ds1, ds2 = s2.mul_(a), s1.mul_(a)
            torch.bmm(ds1, k1[:, keys], out=dq1[:, rows])
            torch.bmm(ds2, k2[:, keys], out=dq2[:, rows])
            dk1[:, keys].baddbmm_(ds1.mT, q1[:, rows])
            dk2[:, keys].baddbmm_(ds2.mT, q2[:, rows])

    return _backward(block, grad, (q1, k1, q2, k2, v))


def squared_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Output (batch, seq_q, n_head, d_v) for inputs (batch, seq, n_head, d)."""

    def block(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        for rows, keys, mask_ in _blocks(q.shape[1], v.shape[1], causal):
            s = torch.bmm(q[:, rows], k[:, keys].mT)
            torch.bmm(mask_(s.square_().mul_(scale)), v[:, keys], out=out[:, rows])

    return _forward(block, (q, k, v))


def squared_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, each in the shape and dtype of its operand."""

    def block(g, q, k, v, dq, dk, dv) -> None:
        for rows, keys, mask_ in _blocks(q.shape[1], v.shape[1], causal):
            g_rows = g[:, rows] * scale
            a = torch.bmm(g_rows, v[:, keys].mT)
            s = mask_(torch.bmm(q[:, rows], k[:, keys].mT))
            dv[:, keys].baddbmm_((s * s).mT, g_rows)
            ds = s.mul_(a).mul_(2)
            torch.bmm(ds, k[:, keys], out=dq[:, rows])
            dk[:, keys].baddbmm_(ds.mT, q[:, rows])

    return _backward(block, grad, (q, k, v))


def _blocks(seq_q: int, seq_k: int, causal: bool) -> Iterator[tuple[slice, slice, Callable[[Tensor], Tensor]]]:
    """Rows of each query block, the keys it can see, and a function masking its scores in place."""
    offset = seq_k - seq_q
    for start in range(0, seq_q, CHUNK):
        stop = min(start + CHUNK, seq_q)
        if not causal:
            yield slice(start, stop), slice(0, seq_k), lambda scores: scores
            continue
        # Keys up to `edge` are seen by every row of the block; only the columns behind it need a mask.
        edge, keys = max(start + offset, 0), max(stop + offset, 0)

        def mask_(scores: Tensor, edge: int = edge, diagonal: int = start + offset - edge) -> Tensor:
            scores[:, :, edge:].tril_(diagonal)
            return scores

        yield slice(start, stop), slice(0, keys), mask_


def _forward(block: Callable[..., None], operands: tuple[Tensor, ...]) -> Tensor:
    """Run ``block`` on groups of heads; it fills the output it is handed last."""
    q, v = operands[0], operands[-1]
    packed = [_heads_first(x) for x in operands]
    out = packed[-1].new_empty(packed[0].shape[0], q.shape[1], v.shape[3])
    for group in _groups(q, v):
        block(*(x[group] for x in packed), out[group])
    return narrow(_heads_back(out, v), v.dtype)


def _backward(block: Callable[..., None], grad: Tensor, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run ``block`` on groups of heads; it writes every dQ row once and adds into zeroed dK and dV."""
    q, v = operands[0], operands[-1]
    packed = [_heads_first(x) for x in (grad, *operands)]
    grads = [torch.zeros_like(x) for x in packed[1:]]
    for group in _groups(q, v):
        block(*(x[group] for x in packed), *(x[group] for x in grads))
    return tuple(_heads_back(x, v).to(v.dtype) for x in grads)


def _groups(q: Tensor, v: Tensor) -> Iterator[slice]:
    """Slices of the folded batch and head axis, so that one block's scores stay within TILE_ELEMENTS."""
    size = max(1, TILE_ELEMENTS // max(1, min(CHUNK, q.shape[1]) * v.shape[1]))
    return (slice(i, i + size) for i in range(0, q.shape[0] * q.shape[2], size))


def _heads_first(x: Tensor) -> Tensor:
    """(batch, seq, n_head, d) to a packed (batch * n_head, seq, d) in the accumulation dtype."""
    return x.to(accumulation_dtype(x.dtype)).transpose(1, 2).flatten(0, 1).contiguous()


def _heads_back(x: Tensor, v: Tensor) -> Tensor:
    """(batch * n_head, seq, d) to a packed (batch, seq, n_head, d)."""
    return x.unflatten(0, (v.shape[0], v.shape[2])).transpose(1, 2).contiguous()
