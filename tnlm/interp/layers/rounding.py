"""A priori bounds on the rounding errors of forms, norms and eigenvalues that are computed from a layer.

A sum of ``n`` products in a dtype of unit roundoff ``e`` is off by at most ``gamma(n) = n e / (1 - n e)`` times the sum
of their absolute values, in any order of summation (Higham 2002, section 3.1); lengths of nested sums add up.
"""

import torch
from torch import Tensor

from tnlm.interp.layers.bilinear import BilinearTensor


def gamma(n: int, dtype: torch.dtype) -> float:
    """Relative error of a sum of ``n`` products against the sum of their absolute values."""
    error = n * torch.finfo(dtype).eps / 2
    return error / (1 - error) if error < 1 else torch.inf


def form_size(b: BilinearTensor, rows: Tensor) -> Tensor:
    """``sum_oh |u_o w_d[o, h]| |w_l[h]| |w_r[h]|`` of every row ``u (n, d_out)``, in float64.

    By Cauchy and Schwarz an upper bound on the sum of the absolute values of all products in a form, in its trace and
    in the root of its squared norm: the scale that their errors are relative to.
    """
    w_l, w_r, w_d, rows = (t.detach().double() for t in (b.w_l, b.w_r, b.w_d, rows))
    return rows.abs() @ (w_d.abs() @ (w_l.norm(dim=1) * w_r.norm(dim=1)))


def form_error(b: BilinearTensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound on the error of every row's form (Frobenius norm), and of its trace, when computed in ``dtype``.

    On the sphere the shift is taken out: its error is that of the trace over ``d_in``, ``d_in`` times on the diagonal.
    """
    times = 1 + b.d_in**-0.5 if b.domain == "sphere" else 1
    return times * gamma(b.d_out + b.d_hidden + b.d_in + 8, dtype) * form_size(b, rows)


def squared_norm_error(b: BilinearTensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound on the error of every row's squared Frobenius norm, when computed in ``dtype`` by either Gram.

    On the sphere ``trace**2 / d_in`` is taken from it, whose error is at most that over ``d_in``.
    """
    times = 1 + 1 / b.d_in if b.domain == "sphere" else 1
    return times * gamma(2 * (b.d_out + b.d_hidden + b.d_in) + 16, dtype) * form_size(b, rows).square()


def diagonalised_error(b: BilinearTensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound on the error of every eigenvalue of a form that is formed and diagonalised in ``dtype``.

    The error of the form (Weyl) plus the backward error of a symmetric eigensolver, ``d_in`` roundings of the norm.
    """
    return form_error(b, rows, dtype) + gamma(b.d_in, dtype) * form_size(b, rows)


def round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The float64 ``x`` rounded down to ``dtype``; gradients are those of the conversion."""
    narrow = x.to(dtype)
    below = torch.nextafter(narrow.detach(), torch.full_like(narrow, -torch.inf))
    return narrow + torch.where(narrow.detach().double() > x.detach(), below - narrow.detach(), 0)


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The float64 ``x`` rounded up to ``dtype``."""
    return -round_down(-x, dtype)
