"""Coefficients of a polynomial function, computed from its values at roots of unity."""

import itertools
from collections.abc import Callable, Sequence
from math import prod

import torch
from jaxtyping import Inexact
from torch import Tensor

from tnlm.checks import check_function, check_kind, check_values
from tnlm.interp.checks import check_count, check_tensor


def degrees(f: Callable[[Tensor], Tensor], x: Inexact[Tensor, "*shape"], n: int) -> Inexact[Tensor, "degree ..."]:
    """Homogeneous parts ``F_0(x) .. F_n(x)`` of a polynomial map of degree at most ``n``; they sum to ``f(x)``.

    Exact: ``n + 1`` evaluations at ``exp(2 pi i k / (n + 1)) x`` and a discrete Fourier transform, plus one evaluation
    at ``x / 2`` that the parts must reproduce. ``f`` must take complex input; a function with a norm inside is no
    polynomial.

    Returns:
        ``(n + 1, *f(x).shape)``, real when ``x`` is.

    Raises:
        ValueError: ``f`` is no polynomial of degree ``n`` (with real coefficients, for real ``x``), or NaN in ``x``.
    """
    check_function("f", f)
    check_values("x", x)
    check_tensor("x", x, (...,))
    if not x.numel():
        raise ValueError(f"x must hold at least one number, got shape {tuple(x.shape)}")
    check_count("n", n, 0)
    z = x.to(x.dtype.to_complex())
    parts = polynomial_coefficients(lambda g: f(g[0] * z), [n], dtype=z.dtype)
    return parts if x.is_complex() else _real(parts)


def polynomial_coefficients(
    f: Callable[[Tensor], Tensor], degree: Sequence[int], *, dtype: torch.dtype = torch.complex128
) -> Inexact[Tensor, "..."]:
    """Every coefficient of a polynomial in a few variables: entry ``[m, n, ..]`` multiplies ``g_0**m g_1**n ..``.

    When the variables are factors on chosen branches of a network, each coefficient is the contribution of one set of
    paths, and together they sum to the value where all factors are 1. Exact; ``prod(degree + 1)`` evaluations at roots
    of unity and one more as a check.

    Args:
        f: Takes a complex vector of variables ``(len(degree),)``.
        degree: Degree of ``f`` in each variable.

    Raises:
        ValueError: The values are no polynomial of these degrees.
    """
    check_function("f", f)
    check_kind("degree", degree, Sequence, "give a list, with one degree for each variable")
    check_kind("dtype", dtype, torch.dtype, "such as torch.complex128")
    if not degree:
        raise ValueError("degree must name at least one variable, got none")
    for n in degree:
        check_count("degree", n, 0)
    if not dtype.is_complex:
        raise ValueError(f"dtype must be complex, got {dtype}")
    sizes = [n + 1 for n in degree]
    values = []
    for powers in itertools.product(*map(range, sizes)):
        angles = torch.tensor([2 * torch.pi * p / size for p, size in zip(powers, sizes)], dtype=torch.float64)
        values.append(f(torch.polar(torch.ones_like(angles), angles).to(dtype)))
    for value in values:
        check_values("what f returns", value)
    stacked = torch.stack(values)
    grid = stacked.reshape(*sizes, *stacked.shape[1:])
    parts = torch.fft.fftn(grid, dim=tuple(range(len(sizes)))) / prod(sizes)
    # away from the roots of unity a wrong degree, or a function that is no polynomial, gives another value
    probe = torch.linspace(0.5, 0.7, len(sizes), dtype=torch.float64)
    total = parts
    for variable in probe.tolist():
        monomials = torch.tensor([variable**p for p in range(total.shape[0])], dtype=parts.dtype, device=parts.device)
        total = torch.tensordot(monomials, total, dims=1)
    gap = float((total - f(probe.to(dtype))).abs().max())
    scale = float(grid.abs().max())
    if not gap <= 1e4 * torch.finfo(parts.dtype).eps * scale:
        raise ValueError(
            f"the values are no polynomial of degree {list(degree)}: off the nodes they differ by {gap:.3g} at scale "
            f"{scale:.3g}; raise the degree, or hold the norms of the run fixed"
        )
    return parts


def _real(parts: Tensor) -> Tensor:
    """The real part; ValueError unless the imaginary part is rounding."""
    residue, scale = float(parts.imag.abs().max()), float(parts.abs().max())
    if residue > 1e4 * torch.finfo(parts.dtype).eps * scale:
        raise ValueError(f"a real polynomial has real parts, got an imaginary residue of {residue:.3g}")
    return parts.real
