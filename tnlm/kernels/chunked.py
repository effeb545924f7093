"""Blocks of queries against all their keys, recomputed in backward: memory grows with ``CHUNK * seq``.

Everything here is plain arithmetic on heads-first tensors without autograd; `tnlm.kernels.ops` makes it an operator.
Formulas, with ``A = scale * mask * (G V^T)``: ``dV = P^T G``, ``dS1 = A * S2``, ``dS2 = A * S1``, ``dQ = dS K``,
``dK = dS^T Q``. No row statistic couples the keys, so backward needs nothing but the inputs. Matmuls write into given
memory (``out=``, in place), which autocast, still active inside an operator, leaves alone.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tnlm.kernels.precision import accumulation_dtype, narrow

CHUNK = 128
"""Query rows per block, the fastest of 32 to 256 on a CPU at seq 1024."""
TILE_ELEMENTS = {"cpu": 2**18}
"""Scores in one tile, over all heads of a group: on a CPU 1 MiB in float32, so that a few tiles stay in cache."""
TILE_ELEMENTS_ELSEWHERE = 2**26
"""256 MiB in float32: on a GPU, few large launches count."""


class Workspace:
    """Memory for the score tiles of one call, used again by every block: fresh pages cost as much as a matmul."""

    def __init__(self, q: Tensor, v: Tensor, n_tiles: int) -> None:
        limit = TILE_ELEMENTS.get(v.device.type, TILE_ELEMENTS_ELSEWHERE)
        tile = max(1, min(CHUNK, q.shape[1]) * v.shape[1])
        heads = q.shape[0] * q.shape[2]
        self.group = max(1, min(heads, limit // tile))
        dtype = accumulation_dtype(v.dtype)
        self._tiles = [torch.empty(self.group * tile, dtype=dtype, device=v.device) for _ in range(n_tiles)]

    def groups(self, heads: int) -> Iterator[slice]:
        """Slices of the folded batch and head axis whose tiles fit."""
        return (slice(i, i + self.group) for i in range(0, heads, self.group))

    def tile(self, slot: int, heads: int, rows: int, keys: int) -> Tensor:
        """The memory of one slot as (heads, rows, keys)."""
        return self._tiles[slot][: heads * rows * keys].view(heads, rows, keys)

    def scores(self, slot: int, queries: Tensor, keys: Tensor) -> Tensor:
        """All dot products (heads, rows, keys), in the memory of one slot."""
        tile = self.tile(slot, queries.shape[0], queries.shape[1], keys.shape[1])
        return torch.bmm(queries, keys.mT, out=tile)


def bilinear_forward(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Output (batch, seq_q, n_head, d_v) for inputs (batch, seq, n_head, d)."""
    work = Workspace(q1, v, n_tiles=2)

    def block(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, out: Tensor) -> None:
        for rows, keys, mask_ in _blocks(q1.shape[1], v.shape[1], causal):
            p = work.scores(0, q1[:, rows], k1[:, keys])
            p.mul_(work.scores(1, q2[:, rows], k2[:, keys]))
            torch.bmm(mask_(p), v[:, keys], out=out[:, rows])

    return _forward(block, work, (q1, k1, q2, k2, v), scale)


def bilinear_backward(
    grad: Tensor, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of q1, k1, q2, k2 and v, each in the shape and dtype of its operand."""
    work = Workspace(q1, v, n_tiles=4)

    def block(g, q1, k1, q2, k2, v, dq1, dk1, dq2, dk2, dv) -> None:
        for rows, keys, mask_ in _blocks(q1.shape[1], v.shape[1], causal):
            beta = _beta(rows, q1)
            g_rows = g[:, rows] * scale
            a = mask_(work.scores(0, g_rows, v[:, keys]))
            s1 = mask_(work.scores(1, q1[:, rows], k1[:, keys]))
            s2 = work.scores(2, q2[:, rows], k2[:, keys])
            p = torch.mul(s1, s2, out=work.tile(3, *s1.shape))
            dv[:, keys].baddbmm_(p.mT, g_rows, beta=beta)
            ds1, ds2 = s2.mul_(a), s1.mul_(a)
            torch.bmm(ds1, k1[:, keys], out=dq1[:, rows])
            torch.bmm(ds2, k2[:, keys], out=dq2[:, rows])
            dk1[:, keys].baddbmm_(ds1.mT, q1[:, rows], beta=beta)
            dk2[:, keys].baddbmm_(ds2.mT, q2[:, rows], beta=beta)

    return _backward(block, work, grad, (q1, k1, q2, k2, v))


def squared_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Output (batch, seq_q, n_head, d_v) for inputs (batch, seq, n_head, d)."""
    work = Workspace(q, v, n_tiles=1)

    def block(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        for rows, keys, mask_ in _blocks(q.shape[1], v.shape[1], causal):
            p = work.scores(0, q[:, rows], k[:, keys]).square_()
            torch.bmm(mask_(p), v[:, keys], out=out[:, rows])

    return _forward(block, work, (q, k, v), scale)


def squared_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, each in the shape and dtype of its operand."""
    work = Workspace(q, v, n_tiles=3)

    def block(g, q, k, v, dq, dk, dv) -> None:
        for rows, keys, mask_ in _blocks(q.shape[1], v.shape[1], causal):
            beta = _beta(rows, q)
            g_rows = g[:, rows] * scale
            a = work.scores(0, g_rows, v[:, keys])
            s = mask_(work.scores(1, q[:, rows], k[:, keys]))
            p = torch.mul(s, s, out=work.tile(2, *s.shape))
            dv[:, keys].baddbmm_(p.mT, g_rows, beta=beta)
            # dS = 2 A S; the factor goes onto the narrower operands.
            ds = s.mul_(a)
            torch.bmm(ds, 2 * k[:, keys], out=dq[:, rows])
            dk[:, keys].baddbmm_(ds.mT, 2 * q[:, rows], beta=beta)

    return _backward(block, work, grad, (q, k, v))


def _blocks(seq_q: int, seq_k: int, causal: bool) -> Iterator[tuple[slice, slice, Callable[[Tensor], Tensor]]]:
    """Rows of each query block, the keys it can see, and a function masking its scores in place.

    The last rows come first: they see every key.
    """
    offset = seq_k - seq_q
    for start in reversed(range(0, seq_q, CHUNK)):
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


def _beta(rows: slice, q: Tensor) -> int:
    """What the first block adds to, unset memory, counts for nothing."""
    return 0 if rows.stop == q.shape[1] else 1


def _forward(block: Callable[..., None], work: Workspace, operands: tuple[Tensor, ...], scale: float) -> Tensor:
    """Run ``block`` on groups of heads; it fills the output it is handed last, scaled here in one pass."""
    q, v = operands[0], operands[-1]
    packed = [_heads_first(x) for x in operands]
    out = packed[-1].new_empty(packed[0].shape[0], q.shape[1], v.shape[3])
    for group in work.groups(out.shape[0]):
        block(*(x[group] for x in packed), out[group])
    scaled = out.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    return narrow(torch.mul(_heads_back(out, v), scale, out=scaled), v.dtype)


def _backward(
    block: Callable[..., None], work: Workspace, grad: Tensor, operands: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Run ``block`` on groups of heads; it writes every dQ row once, and all of dK and dV with the first rows."""
    v = operands[-1]
    packed = [_heads_first(x) for x in (grad, *operands)]
    new = torch.empty_like if grad.shape[1] else torch.zeros_like
    grads = [new(x) for x in packed[1:]]
    for group in work.groups(packed[0].shape[0]):
        block(*(x[group] for x in packed), *(x[group] for x in grads))
    return tuple(_heads_back(x, v).to(v.dtype) for x in grads)


def _heads_first(x: Tensor) -> Tensor:
    """(batch, seq, n_head, d) to a packed (batch * n_head, seq, d) in the accumulation dtype."""
    return x.to(accumulation_dtype(x.dtype)).transpose(1, 2).flatten(0, 1).contiguous()


def _heads_back(x: Tensor, v: Tensor) -> Tensor:
    """(batch * n_head, seq, d) to a (batch, seq, n_head, d) in the same memory."""
    return x.unflatten(0, (v.shape[0], v.shape[2])).transpose(1, 2)
