"""Mean cross-entropy of unembedded rows, some rows at a time, so that the logits of a batch are never all in memory."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.autograd import Function

from tnlm.kernels import pointwise
from tnlm.kernels.precision import accumulation_dtype, linear
from tnlm.kernels.transforms import partial_gradients

MIN_ROWS = 128
"""Rows at a time, at least: with fewer a matmul does not use the cores."""
LOGITS = {"cpu": 2**17}
"""Logits at a time by device, if that is more rows: 512 KiB in float32, so that they stay in the cache of a CPU."""
LOGITS_ELSEWHERE = 2**26


def unembedded_cross_entropy(
    x: Shaped[Tensor, "*rows d_model"],
    w_u: Shaped[Tensor, "d_vocab d_model"],
    targets: Int[Tensor, "*rows"],
    cap: float | None,
) -> Float[Tensor, ""]:
    """Mean of ``-log softmax(softcap(w_u x))[target]`` in nats, in float32 or wider.

    ``softcap(z) = cap tanh(z / cap)``; without a cap it is z. Where closed gradients can be used
    (:func:`tnlm.kernels.pointwise.closed_gradients_fit`), forward computes the gradients of x and w_u along with the
    loss, and backward only scales them: the logits of 128 or more rows, twice, and the gradient of w_u are held instead
    of about four times the logits of the batch. They agree with autograd of the formula, to any order, up to rounding.
    """
    if pointwise.closed_gradients_fit(x, w_u):
        return _UnembeddedCrossEntropy.apply(x, w_u, targets, cap, torch.is_grad_enabled())
    return _formula(x, w_u, targets, cap)


class _UnembeddedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_u: Tensor, targets: Tensor, cap: float | None, grad_enabled: bool) -> Tensor:
        rows, ids = x.flatten(0, -2), targets.reshape(-1, 1)
        d_rows = torch.empty_like(rows) if grad_enabled and ctx.needs_input_grad[0] else None
        d_w = torch.zeros_like(w_u) if grad_enabled and ctx.needs_input_grad[1] else None
        losses = rows.new_empty(ids.shape)
        for part, logits, p in _parts(rows, w_u):
            torch.mm(rows[part], w_u.mT, out=logits)
            if cap is not None:
                logits.mul_(1 / cap).tanh_()
            scale = 1 if cap is None else cap
            largest = logits.amax(-1, keepdim=True)
            total = torch.sub(logits, largest, out=p).mul_(scale).exp_().sum(-1, keepdim=True)
            losses[part] = total.log().add_(largest - logits.gather(-1, ids[part]), alpha=scale)
            if d_rows is None and d_w is None:
                continue
            p.mul_(total.mul_(ids.shape[0]).reciprocal_())
            p.scatter_add_(-1, ids[part], p.new_full((1, 1), -1 / ids.shape[0]).expand_as(ids[part]))
            if cap is not None:
                p.mul_(logits.square_().neg_().add_(1))
            if d_rows is not None:
                torch.mm(p, w_u, out=d_rows[part])
            if d_w is not None:
                d_w.addmm_(p.mT, rows[part])
        ctx.save_for_backward(x, w_u, targets, None if d_rows is None else d_rows.view_as(x), d_w)
        ctx.cap = cap
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w_u, targets, *gradients = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted; autograd finds it from the formula
            found = partial_gradients(lambda x, w_u: _formula(x, w_u, targets, ctx.cap), (x, w_u), grad)
        else:
            found = tuple(None if d is None else d * grad for d in gradients)
        return *found, None, None, None


def _formula(x: Tensor, w_u: Tensor, targets: Tensor, cap: float | None) -> Tensor:
    z = linear(x, w_u)
    z = z if cap is None else cap * torch.tanh(z / cap)
    wide = z.to(accumulation_dtype(z.dtype))
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape).mean()


def _parts(rows: Tensor, w_u: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of the rows, each with two work arrays for its logits; all slices share the same memory."""
    n_rows, d_vocab = rows.shape[0], w_u.shape[0]
    size = max(MIN_ROWS, LOGITS.get(rows.device.type, LOGITS_ELSEWHERE) // d_vocab)
    tiles = [rows.new_empty(min(size, n_rows), d_vocab) for _ in range(2)]
    for start in range(0, n_rows, size):
        stop = min(start + size, n_rows)
        yield slice(start, stop), tiles[0][: stop - start], tiles[1][: stop - start]
