"""Attention in blocks of queries, recomputed in the backward pass, so that memory grows with ``CHUNK * seq``.

The functions compute on heads-first tensors without autograd; `tnlm.kernels.ops` makes operators of them.
On a CPU, groups of heads are shared out among threads, which wait for each other once, at the end. A parallel region
inside every product would be hundreds of barriers, and at each one every thread would wait for the slowest, which on a
busy machine may not be running.
Formulas, with ``A = scale * mask * (G V^T)``: ``dV = P^T G``, ``dS1 = A * S2``, ``dS2 = A * S1``, ``dQ = dS K``,
``dK = dS^T Q``. Keys are not coupled by a sum over the row, so backward needs nothing but the inputs. Matmuls write
into given memory (``out=``, in place), since autocast, which stays active inside an operator, does not cast those.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from tnlm.kernels.precision import accumulation_dtype, narrow

CHUNK = 128
"""Query rows per block, the fastest of 32 to 256 on a CPU at seq 1024."""
TILE_ELEMENTS = {"cpu": 2**18}
"""Scores in one tile, over all heads of a group: on a CPU 1 MiB in float32, so that a few tiles stay in cache."""
TILE_ELEMENTS_ELSEWHERE = 2**26
"""256 MiB in float32: a GPU is fastest with few large launches."""
Group = tuple[slice, slice, slice]
"""Index of some heads of some rows of the batch, at all positions: (batch, seq, n_head)."""
_OPENMP = "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()
"""Whether the number of threads that an operator uses belongs to the thread that calls it."""


class Workspace:
    """Memory for the score tiles of one thread, reused by every block: new pages would cost as much as a matmul."""

    def __init__(self, elements: int, n_tiles: int, like: Tensor) -> None:
        dtype = accumulation_dtype(like.dtype)
        self._tiles = [torch.empty(elements, dtype=dtype, device=like.device) for _ in range(n_tiles)]

    def tile(self, slot: int, heads: int, rows: int, keys: int) -> Tensor:
        """The memory of one slot as (heads, rows, keys)."""
        return self._tiles[slot][: heads * rows * keys].view(heads, rows, keys)

    def scores(self, slot: int, queries: Tensor, keys: Tensor) -> Tensor:
        """All dot products (heads, rows, keys), in the memory of one slot."""
        tile = self.tile(slot, queries.shape[0], queries.shape[1], keys.shape[1])
        return torch.bmm(queries, keys.mT, out=tile)


def bilinear_forward(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Output (batch, seq_q, n_head, d_v) for inputs (batch, seq, n_head, d)."""

    def block(work: Workspace, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, out: Tensor) -> None:
        for rows, keys, mask_ in _blocks(q1.shape[1], v.shape[1], causal):
            p = work.scores(0, q1[:, rows], k1[:, keys])
            p.mul_(work.scores(1, q2[:, rows], k2[:, keys]))
            torch.bmm(mask_(p), v[:, keys], out=out[:, rows])

    return _forward(block, (q1, k1, q2, k2, v), scale, n_tiles=2)


def bilinear_backward(
    grad: Tensor, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of q1, k1, q2, k2 and v, each in the shape and dtype of its operand."""

    def block(work, g, q1, k1, q2, k2, v, dq1, dk1, dq2, dk2, dv) -> None:
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

    return _backward(block, grad, (q1, k1, q2, k2, v), n_tiles=4)


def squared_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Output (batch, seq_q, n_head, d_v) for inputs (batch, seq, n_head, d)."""

    def block(work: Workspace, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        for rows, keys, mask_ in _blocks(q.shape[1], v.shape[1], causal):
            p = work.scores(0, q[:, rows], k[:, keys]).square_()
            torch.bmm(mask_(p), v[:, keys], out=out[:, rows])

    return _forward(block, (q, k, v), scale, n_tiles=1)


def squared_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, each in the shape and dtype of its operand."""

    def block(work, g, q, k, v, dq, dk, dv) -> None:
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

    return _backward(block, grad, (q, k, v), n_tiles=3)


def _blocks(seq_q: int, seq_k: int, causal: bool) -> Iterator[tuple[slice, slice, Callable[[Tensor], Tensor]]]:
    """For each block of queries: its rows, the keys that they see, and a function that masks its scores in place.

    The last rows come first, since they see every key and their block writes all of dK and dV.
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
    """Factor of what dK and dV hold before a block adds to them: 0 for the first block, which finds unset memory."""
    return 0 if rows.stop == q.shape[1] else 1


def _forward(block: Callable[..., None], operands: tuple[Tensor, ...], scale: float, n_tiles: int) -> Tensor:
    """The output of ``block`` run on groups of heads, scaled; a block fills the tensor that it gets last."""
    q, v = operands[0], operands[-1]
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=accumulation_dtype(v.dtype))

    def run(work: Workspace, group: Group) -> None:
        packed = [_heads_first(x[group]) for x in operands]
        result = packed[-1].new_empty(packed[0].shape[0], q.shape[1], v.shape[3])
        block(work, *packed, result)
        part = out[group]
        torch.mul(result.unflatten(0, (part.shape[0], part.shape[2])).transpose(1, 2), scale, out=part)

    _share(run, q, v, n_tiles)
    return narrow(out, v.dtype)


def _backward(
    block: Callable[..., None], grad: Tensor, operands: tuple[Tensor, ...], n_tiles: int
) -> tuple[Tensor, ...]:
    """The gradients that ``block`` writes on groups of heads: each row of dQ once, all of dK and dV at its first."""
    v = operands[-1]
    new = torch.empty if grad.shape[1] else torch.zeros
    grads = [
        new(x.transpose(1, 2).shape, dtype=accumulation_dtype(v.dtype), device=v.device).transpose(1, 2)
        for x in operands
    ]

    def run(work: Workspace, group: Group) -> None:
        packed = [_heads_first(x[group]) for x in (grad, *operands)]
        block(work, *packed, *(x[group].transpose(1, 2).flatten(0, 1) for x in grads))

    _share(run, grad, v, n_tiles)
    return tuple(x.to(v.dtype) for x in grads)


def _heads_first(x: Tensor) -> Tensor:
    """(batch, seq, n_head, d) to a packed (batch * n_head, seq, d) in the accumulation dtype."""
    return x.to(accumulation_dtype(x.dtype)).transpose(1, 2).flatten(0, 1).contiguous()


def _share(run: Callable[[Workspace, Group], None], q: Tensor, v: Tensor, n_tiles: int) -> None:
    """Call ``run`` once for every group of heads, on as many threads as torch uses.

    With fewer heads than threads, and on other devices, the calling thread takes the groups one after another.
    """
    batch, seq_q, n_head, _ = q.shape
    threads = torch.get_num_threads() if v.device.type == "cpu" and _OPENMP else 1
    tile = max(1, min(CHUNK, seq_q) * v.shape[1])
    limit = TILE_ELEMENTS.get(v.device.type, TILE_ELEMENTS_ELSEWHERE) // tile
    # Rounded down, so that there are as many groups as threads
    heads = max(1, min(limit, batch * n_head // threads))
    rows, heads = max(1, heads // max(1, n_head)), max(1, min(heads, n_head))
    groups: SimpleQueue[Group] = SimpleQueue()
    for i in range(0, batch, rows):
        for j in range(0, n_head, heads):
            groups.put((slice(i, i + rows), slice(None), slice(j, j + heads)))

    def work() -> None:
        # Inference mode is set per thread; without it here, tensors of a caller in that mode could not be written to
        with torch.inference_mode():
            workspace = Workspace(rows * heads * tile, n_tiles, v)
            while (group := _next(groups)) is not None:
                run(workspace, group)

    if threads == 1 or groups.qsize() < threads:
        return work()
    for done in [_pool(os.getpid(), threads).submit(work) for _ in range(threads)]:
        done.result()


def _next(groups: "SimpleQueue[Group]") -> Group | None:
    """The next group, or None when all are taken."""
    try:
        return groups.get_nowait()
    except Empty:
        return None


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """A pool of threads whose operators use one thread each, for one process: forked processes inherit no threads."""
    started = threading.Barrier(threads + 1)

    def start() -> None:
        torch.set_num_threads(1)
        # The first get_num_threads() of a thread adopts the number last set by any thread: call it before that changes
        torch.get_num_threads()
        started.wait()

    pool = ThreadPoolExecutor(threads, "tnlm-attention", initializer=start)
    try:
        for _ in range(threads):
            pool.submit(int)
        started.wait()
    except BaseException:
        started.abort()  # or, after Ctrl-C, those that wait here would keep the process from ending
        raise
    torch.set_num_threads(threads)
    return pool
