"""Eigendecomposition of the quadratic forms of a bilinear layer, with residuals.

Eigenvalues that are not computed get a bound.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tnlm.interp.checks import check_bytes, check_choice, check_computed, check_count, check_tensor
from tnlm.interp.layers.bilinear import BilinearTensor, check_layer
from tnlm.interp.layers.eigensolver import Eig, Which, eigenvalue_order, fix_signs, lanczos
from tnlm.interp.layers.rounding import diagonalised_error, round_up, squared_norm_error

# Below this width a dense eigendecomposition is cheaper than any iteration.
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
    """Eigendecomposition of the symmetric form ``Q_u`` of each direction ``u``.

    Args:
        k: How many pairs, all by default.
        which: Which eigenvalues, and their order: largest magnitude, largest, or smallest first.
        method: ``full`` forms each ``Q_u`` (``2 d_hidden d_in**2`` flop) and diagonalises it: exact up to rounding.
            ``krylov`` is a batched Lanczos iteration on the factors: approximate, error in ``residuals``. ``auto``
            takes krylov for 4 directions and more at widths above 512 when at most ``d_in / 16`` pairs are asked for.
        tol: Residual at which krylov stops, relative to the largest ``|value|``; 1e-5 in float32, 1e-10 in float64.
        max_steps: Steps after which krylov returns its current pairs, converged or not; ``residuals`` tells.
        max_bytes: Largest size of the returned vectors; more is an error.

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
        method = "krylov" if b.d_in > DENSE_WIDTH and len(rows) >= 4 and 16 * k <= b.d_in else "full"
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
    """Effective number of eigenvalues of ``Q_u``; 0 for a form that is zero.

    There are four definitions, so ``kind`` has no default:
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
    """Eigenpairs of the forms of ``rows (n, d_out)`` by `lanczos`; ``norms2`` are their `squared_norms`."""
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
        max_steps=max_steps,
        seed=seed,
    )


def form_norms(rows: Tensor, gram: Tensor) -> Tensor:
    """Frobenius norm ``sqrt(u G_out u^T)`` of every row's form, in float64."""
    return ((rows @ gram).double() * rows.double()).sum(-1).clamp_min(0).sqrt()


def squared_norms(b: BilinearTensor, rows: Tensor) -> Tensor:
    """Upper bound on the squared Frobenius norm of every row's form, in float64, tight up to the rounding of float64.

    From the Gram of the outputs, or of ``rows`` where these are fewer. In float64 whatever the dtype of the weights, as
    differences of it are taken.
    """
    wide, u = b.to(torch.float64), rows.double()
    if len(rows) < b.d_out:
        norms2 = wide.project(u).gram("out").diagonal()
    else:
        norms2 = form_norms(u, wide.gram("out")).square()
    return norms2.clamp_min(0) + squared_norm_error(b, rows, torch.float64)


def _dense(b: BilinearTensor, rows: Tensor, k: int, which: Which) -> Eig:
    """Eigenpairs of the forms of ``rows`` by dense eigendecompositions."""
    q = b.interaction(rows)
    values, vectors = torch.linalg.eigh(q)
    order = eigenvalue_order(values, which)
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
