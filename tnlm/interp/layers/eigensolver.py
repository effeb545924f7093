"""Extreme eigenvalues of many symmetric forms at once: a batched Lanczos iteration with a certificate.

The eigendecomposition of a bilinear layer, which uses it, is ``eig`` in ``spectra.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tnlm.interp.checks import check_computed, check_count, check_number
from tnlm.interp.layers.rounding import round_up

Which = Literal["abs", "max", "min"]

# The iteration's own residual is an estimate: it stops below the tolerance, so that the recomputed residual meets it.
_STOP = 0.9


class Eig(NamedTuple):
    """Eigenpairs of one form per direction: ``u . S(x, x) == sum_k values[k] (vectors[:, k] . x)**2`` when complete.

    ``residuals`` are ``|Q v - value v|``. ``unfound`` bounds the magnitude of every eigenvalue that is not listed; when
    it is below the listed ones, they are the largest. For a dense decomposition it allows for every rounding. For an
    iteration it allows for the rounding of the norm and of the difference, and for 8 roundings in each listed value,
    which is no rigorous bound. The sign of a vector is arbitrary: here its largest entry is positive. The basis of a
    degenerate eigenspace is arbitrary too: compare projectors.
    """

    values: Tensor  # (..., k)
    vectors: Tensor  # (..., d_in, k)
    residuals: Tensor  # (..., k)
    unfound: Tensor  # (...,)


def lanczos(
    forms: Callable[[Tensor], Callable[[Tensor], Tensor]],
    form_norms2: Float[Tensor, " n"],
    d: int,
    k: int,
    *,
    dtype: torch.dtype,
    which: Which = "abs",
    tol: float,
    max_steps: int = 192,
    seed: int = 0,
    check_every: int = 4,
) -> Eig:
    """Extreme eigenpairs of ``n`` symmetric forms of width ``d`` at once, which are only applied, never formed.

    All forms start from one random vector, so the result of a form does not depend on which others are in the batch.
    Every step is orthogonalised against all before it. Every ``check_every`` steps the converged forms leave the batch.
    A form whose Krylov space is exhausted continues from a fresh random vector, which finds the further copies of a
    multiple eigenvalue.

    Args:
        forms: ``forms(active (m,))`` is a function of ``x (m, d)``: row i is form ``active[i]`` applied to ``x[i]``.
        form_norms2: Squared Frobenius norms, in float64, for the certificate.

    Returns:
        ``residuals`` are the estimates ``|beta_m s_mk|`` plus a rounding floor.

    Source: Parlett, The Symmetric Eigenvalue Problem (Lanczos); Kahan 1967 (inclusion), see docs/mathematics.md.
    """
    check_number("tol", tol, 0, above=True)
    check_count("max_steps", max_steps, 1)
    max_steps = min(max_steps, d)
    if max_steps < k:
        raise ValueError(f"max_steps must be at least k, got max_steps={max_steps}, k={k}")
    active = torch.arange(len(form_norms2), device=form_norms2.device)
    batch = _Batch.start(len(active), d, dtype=dtype, device=form_norms2.device, seed=seed)
    apply = forms(active)
    done: list[tuple[Tensor, Eig]] = []
    while len(active):
        batch.extend(apply, min(check_every, max_steps - batch.steps))
        if batch.steps < min(2 * k, max_steps):
            continue
        ritz = _ritz(batch.alpha, batch.beta, k, which, _STOP * tol)
        finished = ritz.converged | (batch.steps == max_steps)
        if bool(finished.any()):
            done.append((active[finished], _finish(ritz, finished, batch.basis, form_norms2[active], d)))
            batch.keep(~finished)
            active = active[~finished]
            apply = forms(active)
    order = torch.cat([index for index, _ in done]).argsort()
    return Eig(*(torch.cat(parts)[order] for parts in zip(*(part for _, part in done), strict=True)))


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
        generator = torch.Generator().manual_seed(seed)
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
    values: Tensor  # (n, m) float64, in the order asked for
    weights: Tensor  # (n, m, k) coefficients of the first k in the basis
    residuals: Tensor  # (n, m) estimates
    settled: Tensor  # (n, m) whether the residual is below the tolerance
    converged: Tensor  # (n,) whether the first k are settled


def _ritz(alpha: Tensor, beta: Tensor, k: int, which: Which, tol: float) -> _Ritz:
    """Ritz values and weights of every form, from the tridiagonal matrices of ``alpha`` and ``beta``."""
    check_computed("the form", alpha, beta)
    off = beta[:, :-1].double()
    t = torch.diag_embed(alpha.double()) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    values, s = torch.linalg.eigh(t)
    order = eigenvalue_order(values, which)
    values = values.gather(-1, order)
    last = s[:, -1].gather(-1, order)
    residuals = beta[:, -1:].double() * last.abs()
    settled = residuals <= tol * values.abs().amax(-1, keepdim=True)
    weights = s.gather(-1, order[:, None, :k].expand(-1, s.shape[1], -1))
    return _Ritz(values, weights, residuals, settled, settled[:, :k].all(-1))


def _finish(ritz: _Ritz, rows: Tensor, basis: Tensor, form_norms2: Tensor, d: int) -> Eig:
    """Ritz vectors and the completeness certificate of the finished rows."""
    values, weights, residuals, settled = (t[rows] for t in ritz[:4])
    form_norms2 = form_norms2[rows].double()
    k, dtype, m = weights.shape[-1], basis.dtype, values.shape[-1]
    vectors = fix_signs(torch.bmm(basis[rows].mT, weights.to(dtype)))
    eps = torch.finfo(dtype).eps
    floor = 8 * eps * values.abs().amax(-1, keepdim=True)
    # Kahan: the settled values pair one to one with eigenvalues, each no further away than the joint residual.
    gap = (residuals.square() * settled).sum(-1, keepdim=True).sqrt() + floor
    found = ((values.abs() - gap).clamp_min(0).square() * settled).sum(-1)
    rest = ((form_norms2 - found).clamp_min(0) + 16 * eps * form_norms2).sqrt()
    unlisted = ((values.abs() + gap) * settled)[:, k:]
    if unlisted.shape[-1]:
        rest = torch.maximum(rest, unlisted.amax(-1)) if m < d else unlisted.amax(-1)
    elif m == d:
        rest = torch.zeros_like(rest)
    return Eig(values[:, :k].to(dtype), vectors, (residuals[:, :k] + floor).to(dtype), round_up(rest, dtype))


def fix_signs(vectors: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n k"]:
    """Flip columns so that the entry of largest magnitude is positive."""
    peak = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return vectors * torch.where(peak < 0, -1.0, 1.0).to(vectors.dtype)


def eigenvalue_order(values: Tensor, which: Which) -> Tensor:
    """Indices that sort eigenvalues: largest magnitude, largest, or smallest first."""
    key = {"abs": values.abs(), "max": values, "min": -values}[which]
    return key.argsort(dim=-1, descending=True, stable=True)
