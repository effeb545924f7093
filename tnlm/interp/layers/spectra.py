"""Eigendecomposition of the quadratic forms of a bilinear layer, with residuals.

Eigenvalues that are not computed get a bound.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tnlm.interp.checks import check_bytes, check_choice, check_computed, check_count, check_number, check_tensor
from tnlm.interp.layers.bilinear import BilinearTensor, check_layer
from tnlm.interp.layers.eigensolver import Eig, Which, eigenvalue_order, eigh, fix_signs, lanczos
from tnlm.interp.layers.rounding import diagonalised_error, form_error, gamma, round_up, squared_norm_error

# Up to this width a dense eigendecomposition takes milliseconds, and its bounds are tight.
DENSE_WIDTH = 512
# Elements of the dense forms held at once.
_DENSE_BLOCK = 2**25


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
    """Eigendecomposition of the symmetric form ``Q_u`` of each direction ``u``; on the sphere of its traceless part.

    All pairs give ``u . f(x) == sum_k values[k] (vectors[:, k] . x)**2 + u . (b.shift() |x|**2 + bias)`` for every
    ``x``. `BilinearTensor.shift` is zero for ``domain="space"``; ``dataclasses.replace(b, domain="space")`` has the
    form as it is stored.

    Args:
        k: How many pairs, all by default.
        which: Which eigenvalues, and their order: largest magnitude, largest, or smallest first.
        method: ``full`` forms each ``Q_u`` (``2 d_hidden d_in**2`` flop) and diagonalises it: exact up to rounding.
            ``krylov`` is a batched Lanczos iteration on the factors: approximate, error in ``residuals``, no gradients.
            ``auto`` takes krylov where `iteration_pays`, and no gradient is asked for.
        tol: Residual at which krylov stops, relative to the largest ``|value|``; 1e-5 in float32, 1e-10 in float64.
        max_steps: Steps after which krylov returns its current pairs, converged or not; ``residuals`` tells.
        max_bytes: Largest size of the returned vectors; more is an error.

    Returns:
        Residuals are recomputed from the returned pairs under either method.

    Raises:
        ValueError: Bad shapes, NaN, complex weights, a result over ``max_bytes``. In the backward pass: a gradient of
            vectors whose eigenvalues coincide, which does not exist; values, and projectors on whole eigenspaces, have
            one.

    Symmetries: R E P U Q QR V N L H S.

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
    tracked = torch.is_grad_enabled() and any(t.requires_grad for t in (u, b.w_l, b.w_r, b.w_d))
    if method == "auto":
        method = "krylov" if iteration_pays(b.d_in, len(rows), k) and not tracked else "full"
    elif method == "krylov" and tracked:
        raise ValueError('method="krylov" has no gradients; use method="full", or torch.no_grad()')
    if len(rows) == 0:
        flat = Eig(*(rows.new_zeros(s) for s in ((0, k), (0, b.d_in, k), (0, k), (0,))))
    elif method == "full":
        flat = Eig(*map(torch.cat, zip(*_dense(b, rows, k, which), strict=True)))
    else:
        flat = krylov(b, rows, squared_norms(b, rows), k, which=which, tol=tol, max_steps=max_steps, seed=seed)
        applied = b.apply(rows, flat.vectors) - (rows @ b.shift())[:, None, None] * flat.vectors
        flat = flat._replace(residuals=(applied - flat.vectors * flat.values[:, None]).norm(dim=1))
    return Eig(*(t.reshape((*batch, *t.shape[1:])) for t in flat))


def iteration_pays(d_in: int, n: int, k: int) -> bool:
    """Whether the iteration is cheaper than ``n`` dense eigendecompositions of which ``k`` pairs are wanted.

    The norms that its bound needs cost as much as 5 to 8 dense ones, whatever ``n`` is. Process time of the dense ones
    over that of the iteration, of random and of planted spectra at widths 512 to 1152 (``benchmarks/interp.py --full
    --only crossover``, one run): 0.4 for 4 directions and 4 pairs, 0.6 to 0.8 for 8 and 8, 1.0 to 1.5 for 16 and 8, 1.3
    to 2.8 for 32 and 4 or 8, 0.7 to 1.8 for 32 and 32.
    """
    return d_in > DENSE_WIDTH and n >= 16 and 32 * k <= d_in


def effective_rank(
    b: BilinearTensor,
    u: Float[Tensor, "*batch d_out"],
    kind: Literal["participation", "entropy", "max", "stable"],
) -> Float[Tensor, "*batch"]:
    """Effective number of eigenvalues of ``Q_u``, on the sphere of its traceless part; 0 for a form that is zero.

    There are four definitions, so ``kind`` has no default:
    ``participation`` ``(sum |l|)**2 / sum l**2``; ``entropy`` ``exp(-sum p log p)`` with ``p = l**2 / sum l**2``;
    ``max`` ``sum |l| / max |l|``; ``stable`` ``sum l**2 / max l**2``. One dense eigendecomposition per direction.

    Symmetries: R E P U Q QR V N L X H S.
    """
    check_layer(b, real=True)
    check_tensor("u", u, (..., b.d_out), b.w_l)
    check_choice("kind", kind, ("participation", "entropy", "max", "stable"))
    rows = u.reshape(-1, b.d_out)
    values = torch.cat([torch.linalg.eigvalsh(q) for _, q in _forms(b, rows)] or [rows.new_zeros(0, b.d_in)]).abs()
    top = values.amax(-1)
    values = values / torch.where(top > 0, top, 1)[:, None]
    total, squares = values.sum(-1), torch.where(top > 0, values.square().sum(-1), 1)
    if kind == "participation":
        rank = total.square() / squares
    elif kind == "entropy":
        shares = values.square() / squares[:, None]
        # the derivative of -p log p is infinite at 0, where the share does not move
        rank = torch.special.entr(torch.where(shares > 0, shares, 1)).sum(-1).exp()
    else:
        rank = total if kind == "max" else squares
    return torch.where(top > 0, rank, 0).reshape(u.shape[:-1])


class Inertia(NamedTuple):
    """Numbers of ``positive`` and ``negative`` eigenvalues, and of ``products`` whose sum is the form: ``(...)``."""

    positive: Tensor
    negative: Tensor
    products: Tensor


def inertia(b: BilinearTensor, u: Float[Tensor, "*batch d_out"], tol: float | None = None) -> Inertia:
    """Numbers of positive and negative eigenvalues of ``Q_u``, and of products ``(a . x)(b . x)`` that sum to it.

    A form with ``p`` positive and ``q`` negative eigenvalues is a sum of ``max(p, q)`` products and of no fewer. On the
    sphere a multiple of the identity is free: the counts are those of ``Q_u - c I`` with the ``c`` of fewest products.

    Args:
        tol: Eigenvalues closer than this to 0 (to ``c``), relative to the range of the spectrum (with 0 in it for
            ``domain="space"``), count as 0; by default what rounding in float64 can move them by.

    Returns:
        Integers. Computed in float64, one dense eigendecomposition per direction.

    Symmetries: R E P U Q QR V N L X H S.
    """
    check_layer(b, real=True)
    check_tensor("u", u, (..., b.d_out), b.w_l)
    wide, rows = b.to(torch.float64), u.reshape(-1, b.d_out).double()
    counts = []
    for chunk, q in _forms(wide, rows):
        values = torch.linalg.eigvalsh(q)
        origins = values if b.domain == "sphere" else torch.zeros_like(values[:, :1])
        if tol is None:
            near = 2 * diagonalised_error(wide, chunk, torch.float64)
        else:
            check_number("tol", tol, 0)
            ends = torch.cat([values, origins], dim=1)
            near = tol * (ends.amax(1) - ends.amin(1))
        above = values[:, None] - origins[:, :, None]  # [direction, origin, eigenvalue]
        positive, negative = (part.sum(-1) for part in (above > near[:, None, None], above < -near[:, None, None]))
        best = torch.maximum(positive, negative).argmin(1, keepdim=True)
        counts.append(torch.cat([positive.gather(1, best), negative.gather(1, best)], dim=1))
    flat = torch.cat(counts) if counts else torch.zeros(0, 2, dtype=torch.long, device=u.device)
    positive, negative = (part.reshape(u.shape[:-1]) for part in flat.unbind(1))
    return Inertia(positive, negative, torch.maximum(positive, negative))


def krylov(
    b: BilinearTensor,
    rows: Tensor,
    norms2: Tensor,
    k: int,
    *,
    which: Which = "abs",
    tol: float | None,
    max_steps: int = 192,
    seed: int = 0,
) -> Eig:
    """Eigenpairs of the forms of ``rows (n, d_out)`` by `lanczos`; ``norms2`` are their `squared_norms`.

    ``residuals`` are its estimates. ``unfound`` is the norm of the form, or, where the pairs carry so much of it that
    the rest is below the largest of them, a bound on the rest: then their residuals are computed in float64, at the
    cost of about ``2 k`` steps.
    """
    hidden, shift = rows @ b.w_d, (rows @ b.shift())[:, None]
    check_computed("the form", hidden, norms2, norms2.sqrt().to(b.dtype))

    def forms(active: Tensor) -> Callable[[Tensor], Tensor]:
        w, s = hidden[active], shift[active]
        return lambda x: b.apply_rows(w, x) - s * x

    values, vectors, residuals = lanczos(
        forms,
        len(rows),
        b.d_in,
        k,
        dtype=b.dtype,
        device=rows.device,
        which=which,
        tol=(1e-5 if b.dtype == torch.float32 else 1e-10) if tol is None else tol,
        max_steps=max_steps,
        seed=seed,
    )
    unfound = norms2.sqrt() * (1 + gamma(2, torch.float64))
    squares = values.double().square()
    useful = norms2 - squares.sum(1) < squares.amax(1)
    if k == b.d_in:
        unfound = torch.zeros_like(unfound)
    elif bool(useful.any()):
        wide, size = b.to(torch.float64), max(1, _DENSE_BLOCK // (k * max(b.d_hidden, b.d_in)))
        parts = (part[useful].double().split(size) for part in (rows, norms2, values, vectors))
        unfound[useful] = torch.cat([_beyond(wide, *part) for part in zip(*parts, strict=True)])
    return Eig(values, vectors, residuals, round_up(unfound, b.dtype))


def _beyond(b: BilinearTensor, rows: Tensor, norms2: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Proven bound on every eigenvalue that is not among these pairs; all in float64.

    From the norm of the form, less what the pairs are shown to carry by their residuals (docs/mathematics.md).
    """
    applied = b.apply(rows, vectors) - (rows @ b.shift())[:, None, None] * vectors
    residual = (applied - vectors * values[:, None]).flatten(1).norm(dim=1)
    roundings = gamma(b.d_in + 8, torch.float64)
    size2 = vectors.square().sum((1, 2)) * (1 + roundings)
    eye = torch.eye(vectors.shape[-1], dtype=torch.float64, device=vectors.device)
    skew = (vectors.mT @ vectors - eye).flatten(1).norm(dim=1) * (1 + roundings) + roundings * size2
    error = (form_error(b, rows, torch.float64) + roundings * values.abs().amax(1)) * size2.sqrt()
    # Kahan: as many eigenvalues lie within this of the listed values, one each
    gap = (residual * (1 + roundings) + error) / (1 - skew).clamp_min(0).sqrt()
    found = (values.abs() - gap[:, None]).clamp_min(0).square().sum(1) * (1 - roundings)
    rest = (norms2 - found).clamp_min(0) + gamma(4, torch.float64) * norms2
    return rest.sqrt() * (1 + gamma(4, torch.float64))


def form_norms(rows: Tensor, gram: Tensor) -> Tensor:
    """Frobenius norm ``sqrt(u G_out u^T)`` of every row's form, in float64."""
    return ((rows @ gram).double() * rows.double()).sum(-1).clamp_min(0).sqrt()


def squared_norms(b: BilinearTensor, rows: Tensor) -> Tensor:
    """Upper bound on the squared Frobenius norm of every row's form, in float64, tight up to the rounding of float64.

    On the sphere of the traceless part, ``|Q|**2 - (tr Q)**2 / d_in``. From the Gram of the outputs, or of ``rows``
    where these are fewer. In float64 whatever the dtype of the weights, as differences of it are taken.
    """
    wide, u = b.to(torch.float64), rows.double()
    if len(rows) < b.d_out:
        norms2 = wide.project(u).gram("out").diagonal()
    else:
        norms2 = form_norms(u, wide.gram("out")).square()
    norms2 = norms2 - b.d_in * (u @ wide.shift()).square()
    return norms2.clamp_min(0) + squared_norm_error(b, rows, torch.float64)


def _forms(b: BilinearTensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of ``rows`` and their dense forms ``(n, d_in, d_in)``, without the shift."""
    shift = b.shift()
    for chunk in rows.split(max(1, _DENSE_BLOCK // b.d_in**2)) if len(rows) else ():
        q = b.interaction(chunk)
        if b.domain == "sphere":
            q.diagonal(dim1=1, dim2=2).sub_((chunk @ shift)[:, None])
        yield chunk, q


def extreme_pairs(b: BilinearTensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest eigenvalue ``(n, 2)`` of every row's form, and their vectors ``(n, d_in, 2)``."""
    ends = [tuple(t[..., [0, -1]] for t in eigh(q)) for _, q in _forms(b, rows)]
    values, vectors = (torch.cat(parts) for parts in zip(*ends, strict=True))
    check_computed("the spectrum", values, vectors)
    return values, vectors


def _dense(b: BilinearTensor, rows: Tensor, k: int, which: Which) -> Iterator[Eig]:
    """Eigenpairs of the forms of ``rows`` by dense eigendecompositions, chunk by chunk."""
    for chunk, q in _forms(b, rows):
        values, vectors = eigh(q)
        order = eigenvalue_order(values, which)
        values = values.gather(-1, order)
        vectors = fix_signs(vectors.gather(-1, order[:, None, :k].expand(-1, q.shape[-1], -1)))
        rest = values[:, k:].detach().abs()
        if rest.shape[-1]:
            unfound = round_up(rest.amax(-1).double() + diagonalised_error(b, chunk, b.dtype), b.dtype)
        else:
            unfound = rest.new_zeros(len(q))
        values = values[:, :k]
        residuals = (q @ vectors - vectors * values[:, None]).detach().norm(dim=1)
        check_computed("the spectrum", values, vectors, residuals, unfound)
        yield Eig(values, vectors, residuals, unfound)
