"""Eigenvalues of the quadratic forms of a bilinear layer, with residuals and a bound on what was not found."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tnlm.interp.checks import check_bytes, check_choice, check_computed, check_count, check_number, check_tensor
from tnlm.interp.layers.bilinear import BilinearTensor, check_layer
from tnlm.interp.layers.rounding import diagonalised_error, round_up, squared_norm_error

Which = Literal["abs", "max", "min"]

# Below this width a dense eigendecomposition is cheaper than any iteration.
_DENSE_WIDTH = 512
# The iteration's own residual is an estimate: stop below the tolerance, so that the recomputed one meets it.
_STOP = 0.9
# Elements of the dense forms held at once.
_DENSE_BLOCK = 2**25


class Eig(NamedTuple):
    """Eigenpairs of one form per direction: ``u . S(x, x) == sum_k values[k] (vectors[:, k] . x)**2`` when complete.

    ``residuals`` are ``|Q v - value v|``. ``unfound`` bounds the magnitude of every eigenvalue that is not listed: the
    listed ones are the largest when it is below them. Of a dense decomposition it allows for every rounding; of an
    iteration for that of the norm and of the difference, and for 8 roundings in each listed value, which is no bound.
    A vector's sign is free and fixed here by its largest entry being positive; inside a degenerate eigenspace the basis
    is free, so compare projectors.
    """

    values: Tensor  # (..., k)
    vectors: Tensor  # (..., d_in, k)
    residuals: Tensor  # (..., k)
    unfound: Tensor  # (...,)


def eig(
    b: BilinearTensor,
    u: Float[Tensor, "*batch d_out"],
    k: int | None = None,
    which: Which = "abs",
    method: Literal["auto", "full", "krylov"] = "auto",
    *,
    tol: float | None = None,
    max_steps: int = 192,
    seed: int = 0,
    max_bytes: int = 2**31,
) -> Eig:
    """Eigendecomposition of the symmetric form ``Q_u`` of each direction ``u``.

    Args:
        k: How many pairs, all by default.
        which: Order and end: largest magnitude, largest, or smallest first.
        method: ``full`` forms each ``Q_u`` (``2 d_hidden d_in**2`` flop) and diagonalises it: exact up to rounding.
            ``krylov`` is a batched Lanczos iteration on the factors: approximate, error in ``residuals``. ``auto``
            takes krylov for 4 directions and more at widths above 512 when at most ``d_in / 16`` pairs are asked for.
        tol: Residual at which krylov stops, relative to the largest ``|value|``; 1e-5 in float32, 1e-10 in float64.
        max_steps: Steps after which krylov returns what it has, residuals as they are.
        max_bytes: Refuse a result with more bytes of vectors than this.

    Returns:
        Residuals are recomputed from the returned pairs under either method.

    Raises:
        ValueError: Bad shapes, NaN, complex weights, a result over ``max_bytes``.

    Source: Pearce et al. 2025, arXiv:2410.08417 (decomposition); docs/mathematics.md (certificate).
    """
    check_layer(b, real=True)
    check_tensor("u", u, (..., b.d_out), b.w_l)
    check_choice("which", which, ("abs", "max", "min"))
    check_choice("method", method, ("auto", "full", "krylov"))
    k = b.d_in if k is None else k
    check_count("k", k, 1, b.d_in)
    batch, rows = u.shape[:-1], u.reshape(-1, b.d_out)
    check_bytes("the eigenvectors", (len(rows), b.d_in, k), b.dtype, max_bytes, "ask for fewer directions or pairs")
    if method == "auto":
        method = "krylov" if b.d_in > _DENSE_WIDTH and len(rows) >= 4 and 16 * k <= b.d_in else "full"
    if len(rows) == 0:
        flat = Eig(*(rows.new_zeros(s) for s in ((0, k), (0, b.d_in, k), (0, k), (0,))))
    elif method == "full":
        chunks = rows.split(max(1, _DENSE_BLOCK // b.d_in**2))
        flat = Eig(*map(torch.cat, zip(*(_dense(b, c, k, which) for c in chunks), strict=True)))
    else:
        flat = krylov(b, rows, squared_norms(b, rows), k, which=which, tol=tol, max_steps=max_steps, seed=seed)
        applied = b.apply(rows, flat.vectors)
        flat = flat._replace(residuals=(applied - flat.vectors * flat.values[:, None]).norm(dim=1))
    return Eig(*(t.reshape((*batch, *t.shape[1:])) for t in flat))


def effective_rank(
    b: BilinearTensor,
    u: Float[Tensor, "*batch d_out"],
    kind: Literal["participation", "entropy", "max", "stable"],
) -> Float[Tensor, "*batch"]:
    """How many eigenvalues of ``Q_u`` carry it; there are four definitions, so ``kind`` has no default. 0 for no form.

    ``participation`` ``(sum |l|)**2 / sum l**2``; ``entropy`` ``exp(-sum p log p)`` with ``p = l**2 / sum l**2``;
    ``max`` ``sum |l| / max |l|``; ``stable`` ``sum l**2 / max l**2``. One dense eigendecomposition per direction.
    """
    check_layer(b, real=True)
    check_tensor("u", u, (..., b.d_out), b.w_l)
    check_choice("kind", kind, ("participation", "entropy", "max", "stable"))
    rows = u.reshape(-1, b.d_out)
    chunks = rows.split(max(1, _DENSE_BLOCK // b.d_in**2))
    values = torch.cat([torch.linalg.eigvalsh(b.interaction(chunk)) for chunk in chunks]).abs()
    top = values.amax(-1)
    values = values / torch.where(top > 0, top, 1)[:, None]
    total, squares = values.sum(-1), values.square().sum(-1)
    if kind == "participation":
        rank = total.square() / squares
    elif kind == "entropy":
        rank = torch.special.entr(values.square() / squares[:, None]).sum(-1).exp()
    else:
        rank = total if kind == "max" else squares
    return torch.where(top > 0, rank, 0).reshape(u.shape[:-1])


def krylov(
    b: BilinearTensor, rows: Tensor, norms2: Tensor, k: int, *, which: Which = "abs", tol: float | None, **options
) -> Eig:
    """`lanczos` on the forms of the directions ``rows (n, d_out)``, whose `squared_norms` are ``norms2``."""
    hidden = rows @ b.w_d
    check_computed("the form", hidden, norms2, norms2.sqrt().to(b.dtype))

    def forms(active: Tensor) -> Callable[[Tensor], Tensor]:
        w = hidden[active]
        return lambda x: b.apply_rows(w, x)

    return lanczos(
        forms,
        norms2,
        b.d_in,
        k,
        dtype=b.dtype,
        which=which,
        tol=(1e-5 if b.dtype == torch.float32 else 1e-10) if tol is None else tol,
        **options,
    )


def fix_signs(vectors: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n k"]:
    """Flip columns so that the entry of largest magnitude is positive."""
    peak = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return vectors * torch.where(peak < 0, -1.0, 1.0).to(vectors.dtype)


def form_norms(rows: Tensor, gram: Tensor) -> Tensor:
    """Frobenius norm ``sqrt(u G_out u^T)`` of every row's form, in float64."""
    return ((rows @ gram).double() * rows.double()).sum(-1).clamp_min(0).sqrt()


def squared_norms(b: BilinearTensor, rows: Tensor) -> Tensor:
    """Upper bound on the squared Frobenius norm of every row's form, in float64, tight up to the rounding of float64.

    By the Gram of the outputs, or of fewer ``rows``; in float64 whatever the weights, as differences of it are taken.
    """
    wide, u = b.to(torch.float64), rows.double()
    if len(rows) < b.d_out:
        norms2 = wide.project(u).gram("out").diagonal()
    else:
        norms2 = form_norms(u, wide.gram("out")).square()
    return norms2.clamp_min(0) + squared_norm_error(b, rows, torch.float64)


def _order(values: Tensor, which: Which) -> Tensor:
    key = {"abs": values.abs(), "max": values, "min": -values}[which]
    return key.argsort(dim=-1, descending=True, stable=True)


def _dense(b: BilinearTensor, rows: Tensor, k: int, which: Which) -> Eig:
    q = b.interaction(rows)
    values, vectors = torch.linalg.eigh(q)
    order = _order(values, which)
    values = values.gather(-1, order)
    vectors = fix_signs(vectors.gather(-1, order[:, None, :k].expand(-1, q.shape[-1], -1)))
    rest = values[:, k:].abs()
    if rest.shape[-1]:
        unfound = round_up(rest.amax(-1).double() + diagonalised_error(b, rows, b.dtype), b.dtype)
    else:
        unfound = rest.new_zeros(len(q))
    values = values[:, :k]
    residuals = (q @ vectors - vectors * values[:, None]).norm(dim=1)
    check_computed("the spectrum", values, vectors, residuals, unfound)
    return Eig(values, vectors, residuals, unfound)


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
    """Extreme eigenpairs of ``n`` symmetric forms of width ``d`` at once, by applying them alone.

    All forms start from one random vector, so the result of a form does not depend on its companions, and every step
    is orthogonalised against all before it. Every ``check_every`` steps the converged forms leave the batch. A form
    whose Krylov space is exhausted goes on from a fresh vector, which is how a multiple eigenvalue shows again.

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
    device = form_norms2.device
    generator = torch.Generator().manual_seed(seed)
    active = torch.arange(len(form_norms2), device=device)
    probe = torch.randn(d, generator=generator, dtype=torch.float64).to(device)
    v = (probe / probe.norm()).to(dtype).expand(len(active), d)
    basis = v.new_zeros(len(active), 0, d)
    alpha, beta = v.new_zeros(len(active), 0), v.new_zeros(len(active), 0)
    apply = forms(active)
    done: list[tuple[Tensor, Eig]] = []
    while len(active):
        m = basis.shape[1]
        steps = min(check_every, max_steps - m)
        basis, alpha, beta = (
            torch.cat([t, t.new_zeros(len(t), steps, *t.shape[2:])], dim=1) for t in (basis, alpha, beta)
        )
        for j in range(m, m + steps):
            basis[:, j] = v
            w = apply(v)
            alpha[:, j] = (w * v).sum(-1)
            known = basis[:, : j + 1]
            w = _orthogonalise(w, known)
            beta[:, j] = w.norm(dim=-1)
            v = w / beta[:, j, None].clamp_min(torch.finfo(dtype).tiny)
            scale = torch.maximum(alpha.abs(), beta)[:, : j + 1].amax(-1)
            exhausted = beta[:, j] <= 8 * torch.finfo(dtype).eps * scale
            if bool(exhausted.any()):
                beta[exhausted, j] = 0
                if j + 1 < d:
                    fresh = torch.randn(d, generator=generator, dtype=torch.float64).to(v).expand_as(v[exhausted])
                    fresh = _orthogonalise(fresh, known[exhausted])
                    v[exhausted] = fresh / fresh.norm(dim=-1, keepdim=True)
        m += steps
        if m == d:
            beta[:, -1] = 0
        if m < min(2 * k, max_steps):
            continue
        ritz = _ritz(alpha, beta, k, which, _STOP * tol)
        finished = ritz.converged | (m == max_steps)
        if bool(finished.any()):
            done.append((active[finished], _finish(ritz, finished, basis, form_norms2[active], d)))
            keep = ~finished
            active, v, basis, alpha, beta = (t[keep] for t in (active, v, basis, alpha, beta))
            apply = forms(active)
    order = torch.cat([index for index, _ in done]).argsort()
    return Eig(*(torch.cat(parts)[order] for parts in zip(*(part for _, part in done), strict=True)))


def _orthogonalise(w: Tensor, known: Tensor) -> Tensor:
    """Remove from each row the span of its known vectors, to working precision.

    First the last two, which hold nearly all of it (the Lanczos recurrence), then all; and once more where that took
    away so much that rounding could show.
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
    settled: Tensor  # (n, m) residual below the tolerance
    converged: Tensor  # (n,) the first k are settled


def _ritz(alpha: Tensor, beta: Tensor, k: int, which: Which, tol: float) -> _Ritz:
    check_computed("the form", alpha, beta)
    off = beta[:, :-1].double()
    t = torch.diag_embed(alpha.double()) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    values, s = torch.linalg.eigh(t)
    order = _order(values, which)
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
    # Kahan: the settled values pair one to one with eigenvalues no further away than the joint residual.
    gap = (residuals.square() * settled).sum(-1, keepdim=True).sqrt() + floor
    found = ((values.abs() - gap).clamp_min(0).square() * settled).sum(-1)
    rest = ((form_norms2 - found).clamp_min(0) + 16 * eps * form_norms2).sqrt()
    unlisted = ((values.abs() + gap) * settled)[:, k:]
    if unlisted.shape[-1]:
        rest = torch.maximum(rest, unlisted.amax(-1)) if m < d else unlisted.amax(-1)
    elif m == d:
        rest = torch.zeros_like(rest)
    return Eig(values[:, :k].to(dtype), vectors, (residuals[:, :k] + floor).to(dtype), round_up(rest, dtype))
