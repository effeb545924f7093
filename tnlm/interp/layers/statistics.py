"""Mean and covariance of a bilinear layer over random inputs, and certified bounds of its outputs."""

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tnlm.checks import check_values
from tnlm.interp.checks import (
    check_choice,
    check_computed,
    check_count,
    check_number,
    check_real,
    check_symmetric,
    check_tensor,
)
from tnlm.interp.layers.bilinear import BilinearTensor, check_layer
from tnlm.interp.layers.eigensolver import fix_signs
from tnlm.interp.layers.grams import input_gram
from tnlm.interp.layers.rounding import diagonalised_error, gamma, round_down, round_up
from tnlm.interp.layers.spectra import extreme_pairs


class Moments(NamedTuple):
    """Mean ``(d_out,)`` and covariance ``(d_out, d_out)`` of the outputs."""

    mean: Tensor
    cov: Tensor


class Bounds(NamedTuple):
    """Range of ``u . f(x)`` and inputs that attain it: ``low, high (...)``, ``argmin, argmax (..., d_in)``."""

    low: Tensor
    high: Tensor
    argmin: Tensor
    argmax: Tensor


class TraceBounds(NamedTuple):
    """``max_low <= lam_max <= max_high`` and ``min_low <= lam_min <= min_high``, all ``(...)``."""

    min_low: Tensor
    min_high: Tensor
    max_low: Tensor
    max_high: Tensor


def moments(
    b: BilinearTensor,
    mean: Float[Tensor, " d_in"] | None = None,
    cov: Float[Tensor, "d_in d_in"] | None = None,
    kind: Literal["sphere", "gaussian"] = "sphere",
) -> Moments:
    """Exact mean and covariance of ``f(x)``, bias included.

    Args:
        mean, cov: Of the Gaussian inputs, 0 and 1 by default; ``kind="sphere"`` takes neither.
        kind: ``sphere``, uniform on ``|x|**2 = d_in`` (RMS-normed inputs), or ``gaussian``, whose inputs have many
            lengths, so that a multiple of the identity counts (it moves under S). A constant coordinate is
            not Gaussian: keep it apart as the bias instead of lifting to ``(1, x)``.

    Returns:
        Costs one output Gram, about three ``d_hidden**2 d_in`` products.

    Symmetries: R E P U Q QR V N L H S.

    Raises:
        ValueError: Bad shapes, NaN, complex weights, ``cov`` not symmetric positive semi-definite.
    """
    check_layer(b, real=True)
    check_choice("kind", kind, ("sphere", "gaussian"))
    bias = b.w_d.new_zeros(b.d_out) if b.bias is None else b.bias
    if kind == "sphere":
        if mean is not None or cov is not None:
            raise ValueError('the sphere has no mean and covariance to choose; pass kind="gaussian" with them')
        traces = b.traces()
        outer = torch.outer(traces, traces)
        return Moments(traces + bias, b.d_in / (b.d_in + 2) * (2 * b.gram("out") + outer) - outer)
    if cov is not None:
        check_tensor("cov", cov, (b.d_in, b.d_in), b.w_l)
        check_symmetric("cov", cov)
        smallest, largest = (float(v) for v in torch.linalg.eigvalsh(cov)[[0, -1]])
        if smallest < -1e3 * torch.finfo(cov.dtype).eps * max(abs(smallest), abs(largest)):
            raise ValueError(f"cov must be positive semi-definite, its smallest eigenvalue is {smallest:.3g}")
    spread = b.w_l if cov is None else b.w_l @ cov
    expected = b.w_d @ (spread * b.w_r).sum(1) + bias
    variance = 2 * b.gram("out", cov)
    if mean is not None:
        check_tensor("mean", mean, (b.d_in,), b.w_l)
        left, right = b.w_l @ mean, b.w_r @ mean
        expected = expected + b.w_d @ (left * right)
        slope = ((b.w_d * left) @ b.w_r + (b.w_d * right) @ b.w_l) / 2
        variance = variance + 4 * slope @ (slope if cov is None else slope @ cov).mT
    return Moments(expected, (variance + variance.mT) / 2)


def bounds(
    b: BilinearTensor,
    u: Float[Tensor, "*batch d_out"],
    radius2: float | None = None,
    domain: Literal["sphere", "ball"] = "sphere",
) -> Bounds:
    """Range of ``u . f(x)`` over ``|x|**2 = radius2`` (or ``<=``, the ball), with inputs that attain both ends.

    Computed in float64 and rounded outwards by a bound on the rounding (docs/mathematics.md): the exact range lies
    between ``low`` and ``high``, and is equally wide up to that rounding.

    Args:
        radius2: ``d_in`` by default, the squared length of an RMS-normed input. With a norm's eps > 0 inputs lie in
            the ball, where an end that the sphere cannot bring past zero is attained at ``x = 0``. Other lengths than
            ``d_in`` see a multiple of the identity (they move under S).

    Returns:
        The bias adds ``u . bias`` to both ends. One dense eigendecomposition per direction.

    Symmetries: R E P U Q QR V N L H S.

    Raises:
        ValueError: Bad shapes, NaN, complex weights, a negative radius.
    """
    check_choice("domain", domain, ("sphere", "ball"))
    check_layer(b, real=True)
    radius2 = b.d_in if radius2 is None else radius2
    check_number("radius2", radius2, 0)
    radius2 = float(radius2)
    check_tensor("u", u, (..., b.d_out), b.w_l)
    # of the form as it is stored: other radii see the multiple of the identity
    wide, dtype = replace(b.to(torch.float64), domain="space"), b.dtype
    batch, u = u.shape[:-1], u.reshape(-1, b.d_out).double()
    values, vectors = extreme_pairs(wide, u)
    error = diagonalised_error(wide, u, torch.float64)
    low, high = radius2 * (values[:, 0] - error), radius2 * (values[:, 1] + error)
    argmin, argmax = (radius2**0.5 * fix_signs(vectors).to(dtype)).unbind(-1)
    if domain == "ball":
        argmin, argmax = argmin * (low < 0)[..., None], argmax * (high > 0)[..., None]
        low, high = low.clamp_max(0), high.clamp_min(0)
    if wide.bias is not None:
        shift, error = u @ wide.bias, gamma(b.d_out + 4, torch.float64) * (u.abs() @ wide.bias.abs())
        low, high = low + shift - error, high + shift + error
    low, high = round_down(low, dtype), round_up(high, dtype)
    check_computed("the range", low, high)
    return Bounds(*(t.reshape((*batch, *t.shape[1:])) for t in (low, high, argmin, argmax)))


def trace_bounds(
    trace: Float[Tensor, "*batch"],
    frobenius: Float[Tensor, "*batch"],
    d: int,
    *,
    trace_error: Float[Tensor, "*batch"] | None = None,
    squares_error: Float[Tensor, "*batch"] | None = None,
) -> TraceBounds:
    """Bounds on both extreme eigenvalues of a symmetric ``(d, d)`` matrix, from its trace and Frobenius norm alone.

    Without rounding they are attained when all eigenvalues but one are equal. Computed in float64 and rounded outwards.

    Args:
        trace_error, squares_error: Bounds on the errors of ``trace`` and of ``frobenius**2``; by default those of two
            numbers that were rounded once to their dtype.

    Source: Wolkowicz and Styan 1980, Linear Algebra and its Applications 29.
    """
    check_tensor("trace", trace, (...,))
    check_real("trace", trace)
    check_tensor("frobenius", frobenius, tuple(trace.shape), trace)
    check_count("d", d, 1)
    for name, error in (("trace_error", trace_error), ("squares_error", squares_error)):
        if error is not None:
            check_values(name, error)
            check_tensor(name, error, tuple(trace.shape))
    check_values("trace", trace)
    if bool((frobenius < 0).any()):
        raise ValueError(f"frobenius must be norms, at least 0, got {float(frobenius.min()):.3g}")
    dtype = trace.dtype
    trace, squares = trace.double(), frobenius.double().square()
    trace_error = gamma(1, dtype) * trace.abs() if trace_error is None else trace_error.double()
    squares_error = gamma(3, dtype) * squares if squares_error is None else squares_error.double()
    mean = trace / d
    mean_error = trace_error / d + gamma(4, torch.float64) * mean.abs()
    if d == 1:
        low, high = round_down(mean - mean_error, dtype), round_up(mean + mean_error, dtype)
        return TraceBounds(low, high, low, high)
    variance = squares / d - mean.square()
    error = squares_error / d + (2 * mean.abs() + mean_error) * mean_error
    error = error + gamma(8, torch.float64) * (squares / d + mean.square())
    # the outer bounds take the largest possible spread, the inner ones the smallest
    wide = ((variance + error).clamp_min(0) * (d - 1)).sqrt() * (1 + gamma(8, torch.float64)) + mean_error
    narrow = ((variance - error).clamp_min(0) / (d - 1)).sqrt() * (1 - gamma(8, torch.float64)) - mean_error
    return TraceBounds(
        round_down(mean - wide, dtype),
        round_up(mean - narrow, dtype),
        round_down(mean + narrow, dtype),
        round_up(mean + wide, dtype),
    )


def jacobian_kernel(
    b: BilinearTensor, second_moment: Float[Tensor, "d_in d_in"] | None = None
) -> Float[Tensor, "d_in d_in"]:
    """The matrix ``K = 4 G_in``, by which Jacobians at two inputs have the inner product ``<J(x), J(y)> == x^T K y``.

    With ``second_moment = E[x x^T]`` of some data it is instead the expectation ``E[J(x)^T J(x)]``, exactly. Show it
    next to the kernel without data, which also covers directions that the data does not reach. About seven
    ``d_hidden**2 d_in`` products. It holds the slope along ``x`` too, which inputs of one length do not have, so it
    moves under S: pass ``b.canonical()`` for what they fix.

    Symmetries: R E P U Q QR V N L H.
    """
    check_layer(b)
    if second_moment is None:
        return 4 * b.gram("in")
    check_tensor("second_moment", second_moment, (b.d_in, b.d_in), b.w_l)
    check_symmetric("second_moment", second_moment)
    return 4 * input_gram(b, second=second_moment)
