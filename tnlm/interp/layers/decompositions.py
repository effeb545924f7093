"""Decompositions of a bilinear layer: HOSVD, CP, truncation of one direction, and factors in a fixed gauge.

A gauge is a choice among the factors that give the same layer. The eigendecomposition is ``eig`` in ``spectra.py``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tnlm.checks import check_function, seeded
from tnlm.interp.checks import check_count, check_number, check_tensor
from tnlm.interp.layers.bilinear import BilinearTensor, check_layer
from tnlm.interp.layers.eigensolver import fix_signs
from tnlm.interp.layers.rounding import gamma
from tnlm.interp.layers.spectra import eig


class Tucker(NamedTuple):
    """Tucker decomposition of ``S``: a core, an output basis, and one input basis shared by both inputs."""

    core: BilinearTensor  # d_out = rank_out, d_in = rank_in, factored, without bias
    out: Tensor  # (d_out, rank_out), orthonormal columns
    inp: Tensor  # (d_in, rank_in), orthonormal columns
    spectrum_out: Tensor  # (d_out,) float64, all eigenvalues of the output Gram, descending
    spectrum_in: Tensor  # (d_in,) float64, all eigenvalues of the input Gram, descending
    error_bound: Tensor  # () float64, upper bound on the Frobenius error of `reconstruct`, rounding included
    layer: BilinearTensor  # what was decomposed, in canonical form

    def reconstruct(self, rank_out: int | None = None, rank_in: int | None = None) -> BilinearTensor:
        """The approximating layer, with the bias of the layer that was decomposed.

        Args:
            rank_out, rank_in: Leading columns of the two bases to keep, all by default; ``error_bound`` is for all.
        """
        out, inp = self.out[:, :rank_out].double(), self.inp[:, :rank_in].double()
        core = self.core.to(torch.float64)
        core = replace(core, w_l=core.w_l[:, :rank_in], w_r=core.w_r[:, :rank_in], w_d=core.w_d[:rank_out])
        folded = core.fold(inp.mT).project(out).to(self.inp.dtype)
        return replace(folded, bias=self.layer.bias, domain=self.layer.domain)


def hosvd(b: BilinearTensor, rank_out: int, rank_in: int) -> Tucker:
    """Higher-order SVD of the quadratic part, from the two Grams; the dense tensor is never formed.

    Both inputs share one factor. Exact at full rank; a truncated one obeys ``error_bound``. On the sphere it is that of
    the traceless part, the trace in the bias, and "exact" means there. The bias is kept as it is; a residual (an
    identity has full rank) is not part of the layer.

    Computed in float64: the eigenvalues of the Grams are squared singular values, so below 1e-8 of the largest singular
    value they are rounding. Costs both Grams, about ten ``n**2 d_in`` products with ``n = d_hidden`` (on the sphere
    ``d_hidden + d_in``), and two eigendecompositions.

    Symmetries: R E P U Q QR V N L H S.

    Source: De Lathauwer, De Moor and Vandewalle 2000; docs/mathematics.md (bound).
    """
    check_layer(b, real=True)
    check_count("rank_out", rank_out, 1, b.d_out)
    check_count("rank_in", rank_in, 1, b.d_in)
    layer = b.canonical()
    wide = layer.to(torch.float64)
    size = (wide.w_d.norm(dim=0) * wide.w_l.norm(dim=1) * wide.w_r.norm(dim=1)).sum()
    spectra, bases, squares = [], [], size.new_zeros(())
    for gram, rank, times in ((wide.gram("out"), rank_out, 1), (wide.gram("in"), rank_in, 2)):
        values, vectors = torch.linalg.eigh(gram)
        spectra.append(values.flip(0))
        bases.append(fix_signs(vectors.flip(1)[:, :rank]))
        discarded, roundings = spectra[-1][rank:], 2 * (b.d_out + layer.d_hidden + b.d_in) + 16 + len(gram)
        squares = squares + times * (discarded + gamma(roundings, torch.float64) * size.square()).clamp_min(0).sum()
    core = replace(wide, bias=None).fold(bases[1]).project(bases[0].mT)
    # of the bases (twice each), the core and the result, each rounded once to the dtype of the layer
    rounded = 1.1 * gamma(1, b.dtype) * (6 + 4 * rank_in**0.5 + 2 * rank_out**0.5) * size
    bound = squares.sqrt() + rounded + gamma(b.d_out + layer.d_hidden + b.d_in + 8, torch.float64) * size
    out, inp = (basis.to(b.dtype) for basis in bases)
    return Tucker(core.to(b.dtype), out, inp, spectra[0], spectra[1], bound, layer)


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
    as many or more only one did, the others stopped at a relative error of 1e-4 to 3e-2. The bias is kept. The fit is
    to ``S`` as it is stored: pass ``b.canonical()`` for one to the part that inputs on the sphere fix.

    Args:
        ridge: Relative Tikhonov term that keeps the factors bounded, as a best fit need not exist.
        tol: A restart ends when its relative error is below ``tol``, or within 10 sweeps falls by less than ``tol``.
        callback: Called with restart, sweep and relative error ``|S - S_fit| / |S|`` (floor about 1e-8 in float64).

    Returns:
        The fit in the gauge of `fix_gauge`. One sweep costs ``O(rank d_hidden d_in)`` and at most 30 conjugate-gradient
        steps of ``O(rank**2 d_in)`` for each input factor.

    Symmetries: E P U Q QR V N L H.
    """
    check_layer(b, real=True)
    check_count("rank", rank, 1)
    check_count("sweeps", sweeps, 1)
    check_count("restarts", restarts, 1)
    check_number("ridge", ridge, 0)
    check_number("tol", tol, 0)
    if callback is not None:
        check_function("callback", callback)
    norm2 = float(b.inner(b).clamp_min(0))
    if norm2 == 0:
        empty = b.w_l.new_zeros(rank, b.d_in)
        return replace(b, w_l=empty, w_r=empty, w_d=b.w_d.new_zeros(b.d_out, rank))
    generator = seeded(seed)
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
    return replace(b, w_l=w_l, w_r=w_r, w_d=w_d), errors[-1]


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
    """The same layer with factors in a fixed gauge, read in the basis of the residual stream.

    The gauge is the order and scale of the hidden units, and the exchange of their left and right rows: layers that
    differ by it alone get equal factors.

    Rows of ``w_l`` and ``w_r`` have length 1 and a positive largest entry, ``w_l`` is the one with the larger overlap
    with a fixed generic vector, units are ordered by the length of their output column, longest first. A unit with a
    zero factor contributes nothing: it becomes zero and comes last. Ties keep their order.

    Symmetries: E P U Q QR V N L H.
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
    return replace(b, w_l=w_l[order], w_r=w_r[order], w_d=w_d[:, order])


def truncate(b: BilinearTensor, u: Float[Tensor, " d_out"], k: int) -> BilinearTensor:
    """The layer with only the ``k`` eigen-components of largest magnitude left in direction ``u``.

    ``u . f`` becomes exactly ``sum_{i<=k} values_i (v_i . x)**2 + u . (b.shift() |x|**2 + bias)``, with the components
    of `eig`; outputs orthogonal to ``u`` are as they were, others change by their overlap with ``u``. Adds ``d_in - k``
    hidden units; one dense eigendecomposition.

    Symmetries: R E P U Q QR V N L H S.
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

    Symmetries: R E P U Q QR V N L H S.

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
    return b + BilinearTensor(rows, rows, torch.outer(u, -values / length2), domain=b.domain)
