"""Checks of arguments that all analyses share; each raises a ValueError."""

import math
import sys
from fractions import Fraction
from numbers import Real
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_tensor(
    name: str, x: Tensor, shape: tuple[int | EllipsisType | None, ...], like: Tensor | None = None
) -> None:
    """Raise ValueError unless ``x`` is a finite tensor of ``shape``.

    ``None`` in ``shape`` stands for any size, a leading ``...`` for any number of batch axes. With ``like``, dtype and
    device must be those of ``like`` too, as nothing is converted implicitly.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}; use torch.as_tensor")
    trailing = shape[1:] if shape[:1] == (...,) else shape
    axes_fit = x.ndim >= len(trailing) if trailing is not shape else x.ndim == len(trailing)
    sizes = x.shape[x.ndim - len(trailing) :]
    if not axes_fit or any(want is not None and want != size for want, size in zip(trailing, sizes, strict=False)):
        wanted = ", ".join("..." if s is ... else "any" if s is None else str(s) for s in shape)
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(
            f"{name} must be float32, float64 or complex, got {x.dtype}; half precision is widened with .float()"
        )
    if like is not None and (x.dtype, x.device) != (like.dtype, like.device):
        raise ValueError(
            f"{name} must be {like.dtype} on {like.device} like the weights, got {x.dtype} on {x.device}; "
            "convert one of them with .to(...)"
        )
    check_finite(name, x)


def check_finite(name: str, x: Tensor) -> None:
    """Raise ValueError if ``x`` holds NaN or infinity; meta tensors hold nothing and pass."""
    if x.is_meta:
        return
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        count = int((~finite).sum())
        raise ValueError(f"{name} must be finite, got {count} NaN or infinite of {x.numel()} entries")


def check_computed(what: str, *results: Tensor) -> None:
    """Raise ValueError if a result of finite inputs is NaN or infinite, which means that it overflowed."""
    for x in results:
        if not x.is_meta and not bool(torch.isfinite(x).all()):
            count, dtype = int((~torch.isfinite(x)).sum()), str(x.dtype).removeprefix("torch.")
            way_out = "scale the weights down" if x.dtype.itemsize // (1 + x.is_complex()) == 8 else "use dtype=float64"
            raise ValueError(f"{what} overflows {dtype}, got {count} NaN or infinite of {x.numel()} entries: {way_out}")


def check_symmetric(name: str, x: Tensor) -> None:
    """Raise ValueError unless ``x`` equals its (conjugate) transpose up to rounding."""
    scale = float(x.abs().max()) if x.numel() else 0.0
    gap = float((x - x.mH).abs().max()) if x.numel() else 0.0
    if gap > 1e3 * torch.finfo(x.dtype).eps * scale:
        raise ValueError(
            f"{name} must be symmetric, its largest |m - m^T| is {gap:.3g} at scale {scale:.3g}; "
            "pass (m + m.mT) / 2 if only the symmetric part is meant"
        )


def check_real(name: str, x: Tensor) -> None:
    """Raise ValueError if ``x`` is complex: a complex symmetric form has no real spectrum."""
    if x.is_complex():
        raise ValueError(
            f"{name} must be real for this analysis, got {x.dtype}: a complex symmetric form has no real spectrum; "
            "forward, grams, norm and inner do take complex weights"
        )


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_count(name: str, value: int, low: int, high: int | None = None) -> None:
    """Raise ValueError unless ``value`` is an integer in ``[low, high]``, of at most 63 bits as torch has them."""
    largest = 2**63 - 1 if high is None else high
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= largest:
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be an integer {limit}, got {value!r}")


def check_number(name: str, value: float | int, low: float | int = -math.inf, *, above: bool = False) -> None:
    """Raise ValueError unless ``value`` is a finite real number at least ``low`` (with ``above``: greater)."""
    largest = sys.float_info.max  # compared, as an int beyond it has no float; torch computes with no Fraction
    real = isinstance(value, Real) and not isinstance(value, bool | Fraction) and -largest <= value <= largest
    if not real or value < low or (above and value == low):
        limit = "" if low == -math.inf else f" {'>' if above else '>='} {low:g}"
        raise ValueError(f"{name} must be a finite number{limit}, got {value!r}")


def check_view(net: Any, *parts: str) -> None:
    """Raise ValueError unless ``net`` has the parts of an extracted model that an analysis reads."""
    missing = [part for part in parts if not hasattr(net, part)]
    if missing:
        raise ValueError(
            f"net must be an extracted model, got {type(net).__name__} without {', '.join(missing)}; "
            "pass tnlm.interp.extract(model)"
        )


def check_bytes(what: str, shape: tuple[int, ...], dtype: torch.dtype, max_bytes: int, instead: str) -> None:
    """Raise ValueError before an allocation of ``shape`` that would pass ``max_bytes``."""
    if not isinstance(max_bytes, float) or max_bytes != math.inf:
        check_number("max_bytes", max_bytes, 0)
    need = dtype.itemsize
    for size in shape:
        need *= size
    if need > max_bytes:
        raise ValueError(
            f"{what} of shape {tuple(shape)} needs {need:,} bytes, more than max_bytes={max_bytes:,}; "
            f"{instead}, or raise max_bytes"
        )
