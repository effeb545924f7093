"""Mean cross-entropy of unembedded rows, some at a time: the logits of a batch are never all in memory."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

MIN_ROWS = 128
"""Fewer would leave a matmul idle."""
LOGITS = {"cpu": 2**17}
"""Logits at a time, if that is more rows: on a CPU 512 KiB in float32, so that they stay in cache."""
LOGITS_ELSEWHERE = 2**26


def unembedded_cross_entropy(
    x: Float[Tensor, "*rows d_model"],
    w_u: Float[Tensor, "d_vocab d_model"],
    targets: Int[Tensor, "*rows"],
    cap: float | None,
) -> Float[Tensor, ""]:
    """Mean of ``-log softmax(softcap(w_u x))[target]`` in nats; ``softcap(z) = cap tanh(z / cap)``, z without a cap.

    Forward forms the gradients of x and w_u along with the loss, so that ``2 * 128 * d_vocab`` numbers stand in for
    about four times the logits of the batch, and backward only scales them. Agrees with autograd, to any order, up to
    rounding. For float32 and float64, where :func:`tnlm.kernels.pointwise.fits` holds.
    """
    return _UnembeddedCrossEntropy.apply(x, w_u, targets, cap)


class _UnembeddedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_u: Tensor, targets: Tensor, cap: float | None) -> Tensor:
        rows, ids = x.flatten(0, -2), targets.reshape(-1, 1)
        wanted = any(ctx.needs_input_grad)
        d_rows, d_w = torch.empty_like(rows), torch.zeros_like(w_u)
        losses = rows.new_empty(ids.shape)
        for part, logits, p in _parts(rows, w_u):
            torch.mm(rows[part], w_u.mT, out=logits)
            if cap is not None:
                logits.mul_(1 / cap).tanh_()
            scale = 1 if cap is None else cap
            largest = logits.amax(-1, keepdim=True)
            total = torch.sub(logits, largest, out=p).mul_(scale).exp_().sum(-1, keepdim=True)
            losses[part] = total.log().add_(largest - logits.gather(-1, ids[part]), alpha=scale)
            if not wanted:
                continue
            p.mul_(total.mul_(ids.shape[0]).reciprocal_())
            p.scatter_add_(-1, ids[part], p.new_full((1, 1), -1 / ids.shape[0]).expand_as(ids[part]))
            if cap is not None:
                p.mul_(logits.square_().neg_().add_(1))
            torch.mm(p, w_u, out=d_rows[part])
            d_w.addmm_(p.mT, rows[part])
        ctx.save_for_backward(x, w_u, targets, d_rows.view_as(x), d_w)
        ctx.cap = cap
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w_u, targets, d_x, d_w = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return d_x * grad, d_w * grad, None, None
        inputs = [t for t in (x, w_u) if t.requires_grad]  # a second derivative is wanted: that of the formula
        found = iter(torch.autograd.grad(_formula(x, w_u, targets, ctx.cap), inputs, grad, create_graph=True))
        return *(next(found) if t.requires_grad else None for t in (x, w_u)), None, None


def _formula(x: Tensor, w_u: Tensor, targets: Tensor, cap: float | None) -> Tensor:
    z = x @ w_u.mT
    z = z if cap is None else cap * torch.tanh(z / cap)
    return (z.logsumexp(-1) - z.gather(-1, targets[..., None]).squeeze(-1)).mean()


def _parts(rows: Tensor, w_u: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of the rows, each with memory for its logits and as much again: the same for all."""
    n_rows, d_vocab = rows.shape[0], w_u.shape[0]
    size = max(MIN_ROWS, LOGITS.get(rows.device.type, LOGITS_ELSEWHERE) // d_vocab)
    tiles = [rows.new_empty(min(size, n_rows), d_vocab) for _ in range(2)]
    for start in range(0, n_rows, size):
        stop = min(start + size, n_rows)
        yield slice(start, stop), tiles[0][: stop - start], tiles[1][: stop - start]
