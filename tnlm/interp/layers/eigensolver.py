"""Eigenpairs of symmetric forms: all of them, with gradients, or the extreme ones of many forms by a Lanczos iteration.

The eigendecomposition of a bilinear layer, which uses both, is ``eig`` in ``spectra.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tnlm.checks import seeded
from tnlm.interp.checks import check_computed, check_count, check_number

Which = Literal["abs", "max", "min"]

# The iteration's own residual is an estimate: it stops below the tolerance, so that the recomputed residual meets it.
_STOP = 0.9


class Eig(NamedTuple):
    """Eigenpairs of one form per direction; complete ones give ``sum_k values[k] (vectors[:, k] . x)**2``.

    ``residuals`` are ``|Q v - value v|``. ``unfound`` bounds the magnitude of every eigenvalue that is not listed, with
    every rounding allowed for; when it is below the listed ones, they are the largest. The sign of a vector is
    arbitrary: here its largest entry is positive. So is the basis of a degenerate eigenspace: compare projectors.
    """

    values: Tensor  # (..., k)
    vectors: Tensor  # (..., d_in, k)
    residuals: Tensor  # (..., k)
    unfound: Tensor  # (...,)


def eigh(q: Float[Tensor, "*batch d d"]) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch d d"]]:
    """Eigenvalues, rising, and eigenvectors of symmetric matrices, with the gradients that exist.

    Where eigenvalues coincide up to rounding, the basis of their eigenspace is arbitrary. A function of the eigenspace
    (of its projector, or of the eigenvalues) has a gradient, which is returned; of one that depends on the basis the
    backward pass is a ValueError.
    """
    return _Eigh.apply(q)


class _Eigh(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(q)
        return values, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor | None, grad_vectors: Tensor | None) -> Tensor:
        values, vectors = ctx.saved_tensors
        inner = torch.zeros_like(vectors) if grad_values is None else torch.diag_embed(grad_values)
        if grad_vectors is not None:
            turn = vectors.mT @ grad_vectors
            gap = values[..., None, :] - values[..., :, None]
            eps, d = torch.finfo(values.dtype).eps, values.shape[-1]
            # vectors are off by d eps over the gap, here by more than 1/64
            tied = gap.abs() <= 64 * d * eps * values.abs().amax(-1)[..., None, None]
            # derivative along the rotation of two tied vectors, which leaves the matrix as it is
            torque = torch.where(tied, turn - turn.mT, 0).abs()
            if bool((torque > eps**0.5 * grad_vectors.flatten(-2).norm(dim=-1)[..., None, None]).any()):
                raise ValueError(
                    "eigenvectors of equal eigenvalues have no gradient, as the basis of their space is arbitrary; "
                    "differentiate the eigenvalues, or the projector on the whole space, v @ v.mT"
                )
            inner = inner + torch.where(tied, 0, turn / torch.where(tied, 1, gap))
        grad = vectors @ inner @ vectors.mT
        return (grad + grad.mT) / 2


def lanczos(
    forms: Callable[[Tensor], Callable[[Tensor], Tensor]],
    n: int,
    d: int,
    k: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    which: Which = "abs",
    tol: float,
    max_steps: int = 192,
    seed: int = 0,
    check_every: int = 4,
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n d k"], Float[Tensor, "n k"]]:
    """Extreme eigenvalues and eigenvectors of ``n`` symmetric forms of width ``d``, which are applied, never formed.

    Approximate: the pairs of the last step, converged or not. All forms start from one random vector, so the result of
    a form does not depend on which others are in the batch. Every step is orthogonalised against all before it. Every
    ``check_every`` steps the converged forms leave the batch. A form whose Krylov space is exhausted continues from a
    fresh random vector, which finds the further copies of a multiple eigenvalue.

    Args:
        forms: ``forms(active (m,))`` is a function of ``x (m, d)``: row i is form ``active[i]`` applied to ``x[i]``.
        tol: A form is done when the estimated residuals of its pairs, relative to its largest value, are below it.

    Returns:
        Values, vectors, and residuals: the estimates ``|beta_m s_mk|`` plus a rounding floor.

    Source: Parlett, The Symmetric Eigenvalue Problem.
    """
    check_number("tol", tol, 0, above=True)
    check_count("max_steps", max_steps, 1)
    max_steps = min(max_steps, d)
    if max_steps < k:
        raise ValueError(f"max_steps must be at least k, got max_steps={max_steps}, k={k}")
    active = torch.arange(n, device=device)
    batch = _Batch.start(n, d, dtype=dtype, device=active.device, seed=seed)
    apply = forms(active)
    done: list[tuple[Tensor, ...]] = []
    while len(active):
        batch.extend(apply, min(check_every, max_steps - batch.steps))
        if batch.steps < min(2 * k, max_steps):
            continue
        ritz = _ritz(batch.alpha, batch.beta, k, which, _STOP * tol)
        finished = ritz.converged | (batch.steps == max_steps)
        if bool(finished.any()):
            vectors = torch.bmm(batch.basis[finished].mT, ritz.weights[finished].to(dtype))
            values, residuals = (t[finished].to(dtype) for t in (ritz.values, ritz.residuals))
            done.append((active[finished], values, fix_signs(vectors), residuals))
            batch.keep(~finished)
            active = active[~finished]
            apply = forms(active)
    index, values, vectors, residuals = (torch.cat(parts) for parts in zip(*done, strict=True))
    order = index.argsort()
    floor = 8 * torch.finfo(dtype).eps * values.abs().amax(1, keepdim=True)
    return values[order], vectors[order], (residuals + floor)[order]


@dataclass(eq=False)
class _Batch:
    """Lanczos vectors and coefficients of the forms that have not converged."""

    v: Tensor  # (n, d) the next vector of every form
    basis: Tensor  # (n, steps, d) the vectors so far
    alpha: Tensor  # (n, steps) diagonal of the tridiagonal matrices
    beta: Tensor  # (n, steps) norms of what is left after every step
    generator: torch.Generator

    @classmethod
    def start(cls, n: int, d: int, *, dtype: torch.dtype, device: torch.device, seed: int) -> "_Batch":
        """``n`` forms that all start from one random vector, without steps."""
        generator = seeded(seed)
        probe = torch.randn(d, generator=generator, dtype=torch.float64).to(device)
        v = (probe / probe.norm()).to(dtype).expand(n, d)
        return cls(v, v.new_zeros(n, 0, d), v.new_zeros(n, 0), v.new_zeros(n, 0), generator)

    @property
    def steps(self) -> int:
        return self.basis.shape[1]

    def keep(self, rows: Tensor) -> None:
        """Drop all forms but those of the boolean ``rows``."""
        self.v, self.basis, self.alpha, self.beta = (t[rows] for t in (self.v, self.basis, self.alpha, self.beta))

    def extend(self, apply: Callable[[Tensor], Tensor], steps: int) -> None:
        """Take ``steps`` further Lanczos steps with every form."""
        start = self.steps
        self.basis, self.alpha, self.beta = (
            torch.cat([t, t.new_zeros(len(t), steps, *t.shape[2:])], dim=1) for t in (self.basis, self.alpha, self.beta)
        )
        for step in range(start, start + steps):
            self._take(step, apply)
        if self.steps == self.v.shape[1]:
            self.beta[:, -1] = 0

    def _take(self, step: int, apply: Callable[[Tensor], Tensor]) -> None:
        dtype, d = self.v.dtype, self.v.shape[1]
        self.basis[:, step] = self.v
        w = apply(self.v)
        self.alpha[:, step] = (w * self.v).sum(-1)
        known = self.basis[:, : step + 1]
        w = _orthogonalise(w, known)
        self.beta[:, step] = w.norm(dim=-1)
        self.v = w / self.beta[:, step, None].clamp_min(torch.finfo(dtype).tiny)
        scale = torch.maximum(self.alpha.abs(), self.beta)[:, : step + 1].amax(-1)
        exhausted = self.beta[:, step] <= 8 * torch.finfo(dtype).eps * scale
        if bool(exhausted.any()):
            self.beta[exhausted, step] = 0
            if step + 1 < d:
                fresh = torch.randn(d, generator=self.generator, dtype=torch.float64).to(self.v)
                fresh = _orthogonalise(fresh.expand_as(self.v[exhausted]), known[exhausted])
                self.v[exhausted] = fresh / fresh.norm(dim=-1, keepdim=True)


def _orthogonalise(w: Tensor, known: Tensor) -> Tensor:
    """Remove from each row the span of its known vectors, to working precision.

    By the Lanczos recurrence nearly all of the overlap is with the last two vectors, so these are removed first, then
    all. If that removed so much that its rounding matters, all are removed once more.
    """
    w = _subtract(w, known[:, -2:])
    before = w.norm(dim=-1)
    w = _subtract(w, known)
    return _subtract(w, known) if bool((w.norm(dim=-1) < 0.7 * before).any()) else w


def _subtract(w: Tensor, known: Tensor) -> Tensor:
    return w - torch.bmm(torch.bmm(known, w[:, :, None]).mT, known)[:, 0]


class _Ritz(NamedTuple):
    values: Tensor  # (n, k) float64, in the order asked for
    weights: Tensor  # (n, m, k) their coefficients in the basis
    residuals: Tensor  # (n, k) estimates
    converged: Tensor  # (n,) whether all residuals are below the tolerance


def _ritz(alpha: Tensor, beta: Tensor, k: int, which: Which, tol: float) -> _Ritz:
    """First ``k`` Ritz values and weights of every form, from the tridiagonal matrices of ``alpha`` and ``beta``."""
    check_computed("the form", alpha, beta)
    off = beta[:, :-1].double()
    t = torch.diag_embed(alpha.double()) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    values, s = torch.linalg.eigh(t)
    order = eigenvalue_order(values, which)[:, :k]
    residuals = beta[:, -1:].double() * s[:, -1].gather(-1, order).abs()
    settled = residuals <= tol * values.abs().amax(-1, keepdim=True)
    weights = s.gather(-1, order[:, None].expand(-1, s.shape[1], -1))
    return _Ritz(values.gather(-1, order), weights, residuals, settled.all(-1))


def fix_signs(vectors: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n k"]:
    """Flip columns so that the entry of largest magnitude is positive."""
    peak = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return vectors * torch.where(peak < 0, -1.0, 1.0).to(vectors.dtype)


def eigenvalue_order(values: Tensor, which: Which) -> Tensor:
    """Indices that sort eigenvalues: largest magnitude, largest, or smallest first."""
    key = {"abs": values.abs(), "max": values, "min": -values}[which]
    return key.argsort(dim=-1, descending=True, stable=True)
