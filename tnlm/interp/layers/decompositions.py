"""Decompositions of a bilinear layer: HOSVD, CP, truncation of one direction, and factors in a fixed gauge.

A gauge is a choice among the factors that give the same layer. The eigendecomposition is ``eig`` in ``spectra.py``.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tnlm.interp.checks import check_count, check_number, check_tensor
from tnlm.interp.layers.bilinear import BilinearTensor, check_layer
from tnlm.interp.layers.eigensolver import fix_signs
from tnlm.interp.layers.spectra import eig


class Tucker(NamedTuple):
    """Tucker decomposition of ``S``: a core, an output basis, and one input basis shared by both inputs."""

    core: BilinearTensor  # d_out = rank_out, d_in = rank_in, factored
    out: Tensor  # (d_out, rank_out), orthonormal columns
    inp: Tensor  # (d_in, rank_in), orthonormal columns
    spectrum_out: Tensor  # (d_out,) all eigenvalues of the output Gram, descending
    spectrum_in: Tensor  # (d_in,) all eigenvalues of the input Gram, descending

    @property
    def error_bound(self) -> Tensor:
        """Upper bound on the Frobenius error: discarded output plus twice discarded input eigenvalues."""
        out, inp = self.spectrum_out[self.out.shape[1] :], self.spectrum_in[self.inp.shape[1] :]
        return (out.clamp_min(0).sum() + 2 * inp.clamp_min(0).sum()).sqrt()

    def reconstruct(self) -> BilinearTensor:
        """The approximating layer, without bias."""
        return self.core.fold(self.inp.mT.contiguous()).project(self.out)


def hosvd(b: BilinearTensor, rank_out: int, rank_in: int) -> Tucker:
    """Higher-order SVD of the quadratic part, from the two Grams; the dense tensor is never formed.

    Both inputs share one factor. Exact at full rank; a truncated one obeys ``error_bound``. Residual (an identity has
    full rank) and bias are not included. Costs both Grams: about 11 ``d_hidden**2 d_in`` products.

    Source: De Lathauwer, De Moor and Vandewalle 2000.
    """
    check_layer(b, real=True)
    check_count("rank_out", rank_out, 1, b.d_out)
    check_count("rank_in", rank_in, 1, b.d_in)
    spectra, bases = [], []
    for gram, rank in ((b.gram("out"), rank_out), (b.gram("in"), rank_in)):
        values, vectors = torch.linalg.eigh(gram)
        spectra.append(values.flip(0))
        bases.append(fix_signs(vectors.flip(1)[:, :rank]))
    core = BilinearTensor(b.w_l, b.w_r, b.w_d).fold(bases[1]).project(bases[0].mT)
    return Tucker(core, bases[0], bases[1], spectra[0], spectra[1])


def cp(
    b: BilinearTensor,
    rank: int,
    sweeps: int = 300,
    restarts: int = 5,
    ridge: float = 1e-9,
    seed: int = 0,
    *,
    tol: float = 1e-9,
    callback: Callable[[int, int, float], None] | None = None,
) -> BilinearTensor:
    """CP decomposition: the layer of ``rank`` hidden units nearest to ``b``, found by alternating least squares.

    The objective ``min |S - sym(sum_r d_r l_r r_r)|`` compares *symmetric* tensors: without ``sym`` a fit to ``S``
    would need two terms per unit, and a fit to the tensor that is not symmetrised would depend on the gauge.
    Approximate, and a local minimum: the best of ``restarts`` is returned, and ``(b - fit).norm()`` says how good it
    is. Of 36 planted random layers with fewer units than inputs 32 came back within the default restarts; of 12 with
    as many or more only one did, the others stopped at a relative error of 1e-4 to 3e-2. The bias is kept.

    Args:
        ridge: Relative Tikhonov term that keeps the factors bounded, as a best fit need not exist.
        tol: A restart ends when its relative error is below ``tol``, or within 10 sweeps falls by less than ``tol``.
        callback: Called with restart, sweep and relative error ``|S - S_fit| / |S|`` (floor about 1e-8 in float64).

    Returns:
        The fit in the gauge of `fix_gauge`. One sweep costs ``O(rank d_hidden d_in)`` and at most 30 conjugate-gradient
        steps of ``O(rank**2 d_in)`` for each input factor.
    """
    check_layer(b, real=True)
    check_count("rank", rank, 1)
    check_count("sweeps", sweeps, 1)
    check_count("restarts", restarts, 1)
    check_number("ridge", ridge, 0)
    check_number("tol", tol, 0)
    norm2 = float(b.inner(b).clamp_min(0))
    if norm2 == 0:
        empty = b.w_l.new_zeros(rank, b.d_in)
        return BilinearTensor(empty, empty, b.w_d.new_zeros(b.d_out, rank), b.bias)
    generator = torch.Generator().manual_seed(seed)
    best_error, best = float("inf"), b
    for restart in range(restarts):
        w_l, w_r = (torch.randn(rank, b.d_in, generator=generator, dtype=torch.float64).to(b.w_l) for _ in range(2))
        report = None if callback is None else partial(callback, restart)
        fit, error = _fit_restart(b, w_l, w_r, norm2, sweeps, ridge, tol, report)
        if error < best_error:
            best_error, best = error, fit
        if error <= 100 * tol:
            break
    return fix_gauge(best)


def _fit_restart(
    b: BilinearTensor,
    w_l: Tensor,
    w_r: Tensor,
    norm2: float,
    sweeps: int,
    ridge: float,
    tol: float,
    report: Callable[[int, float], None] | None,
) -> tuple[BilinearTensor, float]:
    """Alternating least squares from one start; returns the layer and its relative error."""
    w_l, w_r = _unit_rows(w_l), _unit_rows(w_r)
    w_d, error2 = _solve_outputs(b, w_l, w_r, norm2, ridge)
    errors, stride = [], 1.0
    for sweep in range(sweeps):
        before = w_l, w_r
        w_l = _solve_inputs(b, w_d, w_r, w_l, ridge)
        w_r = _solve_inputs(b, w_d, w_l, w_r, ridge)
        w_l, w_r = _unit_rows(w_l), _unit_rows(w_r)
        w_d, error2 = _solve_outputs(b, w_l, w_r, norm2, ridge)
        # alternating solves converge slowly along valleys: step further in the direction of the sweep while that helps
        far_l, far_r = (_unit_rows(w + stride * (w - old)) for w, old in zip((w_l, w_r), before, strict=True))
        far_d, far_error2 = _solve_outputs(b, far_l, far_r, norm2, ridge)
        if far_error2 < error2:
            w_l, w_r, w_d, error2, stride = far_l, far_r, far_d, far_error2, 2 * stride
        else:
            stride = max(1.0, stride / 4)
        errors.append((max(error2, 0.0) / norm2) ** 0.5)
        if report is not None:
            report(sweep, errors[-1])
        if errors[-1] <= tol or (len(errors) > 10 and errors[-11] - errors[-1] < tol):
            break
    return BilinearTensor(w_l, w_r, w_d, b.bias), errors[-1]


def _unit_rows(w: Tensor) -> Tensor:
    return w / w.norm(dim=1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)


def _solve_outputs(b: BilinearTensor, w_l: Tensor, w_r: Tensor, norm2: float, ridge: float) -> tuple[Tensor, float]:
    """Best output map for given input maps, and the squared error it leaves."""
    c = ((w_l @ w_l.mT) * (w_r @ w_r.mT) + (w_l @ w_r.mT) * (w_r @ w_l.mT)) / 2
    x = ((w_l @ b.w_l.mT) * (w_r @ b.w_r.mT) + (w_l @ b.w_r.mT) * (w_r @ b.w_l.mT)) / 2
    target = b.w_d @ x.mT
    damped = c + ridge * c.diagonal().mean() * torch.eye(len(c), dtype=c.dtype, device=c.device)
    w_d = torch.linalg.solve(damped, target, left=False)
    fitted = (w_d @ c).double()
    return w_d, norm2 - float((w_d.double() * (2 * target.double() - fitted)).sum())


def _solve_inputs(b: BilinearTensor, w_d: Tensor, other: Tensor, start: Tensor, ridge: float) -> Tensor:
    """Best input map given the output map and the other input map: conjugate gradients from the current one."""
    n, p = w_d.mT @ w_d, w_d.mT @ b.w_d
    direct = n * (other @ other.mT)
    damping = ridge * direct.diagonal().mean()
    target = ((p * (other @ b.w_r.mT)) @ b.w_l + (p * (other @ b.w_l.mT)) @ b.w_r) / 2

    def normal(y: Tensor) -> Tensor:
        return (direct @ y + (n * (other @ y.mT)) @ other) / 2 + damping * y

    y, residual = start, target - normal(start)
    direction, size = residual, (residual * residual).sum()
    goal = torch.finfo(y.dtype).eps ** 2 * (target * target).sum()
    for _ in range(30):
        if size <= goal:
            break
        image = normal(direction)
        step = size / (direction * image).sum()
        y, residual = y + step * direction, residual - step * image
        size, previous = (residual * residual).sum(), size
        direction = residual + (size / previous) * direction
    return y


def fix_gauge(b: BilinearTensor) -> BilinearTensor:
    """The same layer with canonical factors: layers that differ by their gauge alone get equal factors.

    The gauge is the order and scale of the hidden units, and the exchange of their left and right rows.

    Rows of ``w_l`` and ``w_r`` have length 1 and a positive largest entry, ``w_l`` is the one with the larger overlap
    with a fixed generic vector, units are ordered by the length of their output column, longest first. A unit with a
    zero factor contributes nothing: it becomes zero and comes last. Ties keep their order.
    """
    check_layer(b, real=True)
    scale_l, scale_r = b.w_l.norm(dim=1), b.w_r.norm(dim=1)
    alive = (scale_l > 0) & (scale_r > 0)
    w_l, w_r = (
        torch.where(alive[:, None], w / torch.where(alive, s, 1)[:, None], 0)
        for w, s in ((b.w_l, scale_l), (b.w_r, scale_r))
    )
    fixed_l, fixed_r = (fix_signs(w.mT).mT for w in (w_l, w_r))
    signs = ((fixed_l * w_l).sum(1) * (fixed_r * w_r).sum(1)).sign()
    w_d = b.w_d * (scale_l * scale_r * signs)
    generic = torch.arange(1, b.d_in + 1, dtype=b.dtype, device=b.w_l.device).cos()
    swap = (fixed_l @ generic < fixed_r @ generic)[:, None]
    w_l, w_r = torch.where(swap, fixed_r, fixed_l), torch.where(swap, fixed_l, fixed_r)
    order = w_d.norm(dim=0).argsort(descending=True, stable=True)
    return BilinearTensor(w_l[order], w_r[order], w_d[:, order], b.bias)


def truncate(b: BilinearTensor, u: Float[Tensor, " d_out"], k: int) -> BilinearTensor:
    """The layer with only the ``k`` eigen-components of largest magnitude left in direction ``u``.

    ``u . f`` becomes exactly ``sum_{i<=k} values_i (v_i . x)**2`` (plus bias); outputs orthogonal to ``u`` are as they
    were, others change by their overlap with ``u``. Adds ``d_in - k`` hidden units; one dense eigendecomposition.
    """
    check_layer(b, real=True)
    check_tensor("u", u, (b.d_out,), b.w_l)
    check_count("k", k, 0, b.d_in)
    pairs = eig(b, u)
    return remove(b, u, pairs.values[k:], pairs.vectors[:, k:])


def remove(
    b: BilinearTensor, u: Float[Tensor, " d_out"], values: Float[Tensor, " k"], vectors: Float[Tensor, "d_in k"]
) -> BilinearTensor:
    """The layer with ``u . f(x)`` lowered by exactly ``sum_k values_k (vectors_k . x)**2``; one hidden unit more each.

    Raises:
        ValueError: Bad shapes, NaN, or ``u = 0``, which names no direction.
    """
    check_layer(b)
    check_tensor("u", u, (b.d_out,), b.w_l)
    check_tensor("values", values, (None,), b.w_l)
    check_tensor("vectors", vectors, (b.d_in, len(values)), b.w_l)
    length2 = u @ u
    if not u.is_meta and length2 == 0:
        raise ValueError("u must not be zero: removing a component needs a direction of the output")
    rows = vectors.mT
    return b + BilinearTensor(rows, rows, torch.outer(u, -values / length2))
