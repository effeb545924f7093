"""Limits of comparisons: unit roundoff times the growth of rounding errors times the scale of what was summed.

Let a value be computed with ``n`` roundings on its longest path: the lengths of the sums along the path, plus one per
product, quotient or function. Each rounding is a relative error of at most ``u``, the unit roundoff. In the worst case
they add up to ``n u sum|terms|``. They do not all point one way: as independent errors of mean 0 they stay below
``8 sqrt(n) u sum|terms|``, but with probability ``2 n exp(-32)`` (Higham and Mary 2019, SIAM J. Sci. Comput. 41,
theorem 2.4, lambda 8). This holds for every order of summation, so for every CPU, library and number of threads;
``make test-hosts`` checks that no error comes near it.

Every comparison adds a line, test and error over limit, to the file that ``TNLM_MARGINS`` names.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

LAMBDA = 8
ROUNDINGS = 4096
"""Of a test that names none: two evaluations of a small model, each at most 3 layers deep with 8 sums of at most 85."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to ``dtype``."""
    return torch.finfo(dtype).eps / 2


def limit(dtype: torch.dtype, roundings: float, scale: Any = 1.0) -> Any:
    """Bound of the error after ``roundings`` operations in ``dtype`` on terms whose absolute sum is ``scale``."""
    return LAMBDA * roundings**0.5 * unit_roundoff(dtype) * scale


def assert_close(
    got: Any, want: Any, *, roundings: float = ROUNDINGS, scale: Any = None, dtype: torch.dtype | None = None
) -> None:
    """Assert that two tensors, numbers, or sequences or mappings of them, differ by rounding alone.

    Args:
        got, want: The result and its reference, of one shape; dtypes of tensors must agree too.
        roundings: On the longest path of one entry, both sides together.
        scale: Absolute sum of the terms of each entry, a number or a tensor; by default the largest entry of ``want``.
        dtype: Of the arithmetic, when the values were widened after it; by default their own, float64 for numbers.
    """
    if isinstance(want, Mapping):
        assert got.keys() == want.keys()
        got, want = [got[key] for key in want], list(want.values())
    if isinstance(want, Sequence):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_close(g, w, roundings=roundings, scale=scale, dtype=dtype)
        return
    if isinstance(got, Tensor) and isinstance(want, Tensor):
        assert got.shape == want.shape, f"shapes {tuple(got.shape)} and {tuple(want.shape)}"
        assert got.dtype == want.dtype, f"{got.dtype} and {want.dtype}"
    values = [_tensor(x).detach() for x in (got, want)]
    if isinstance(want, Tensor) and not (want.is_floating_point() or want.is_complex()):
        assert torch.equal(got, want), f"{got} and {want}"  # whole numbers are not rounded
        return
    wide = torch.complex128 if any(x.is_complex() for x in values) else torch.float64
    if dtype is None:
        dtype = _arithmetic(got, want)
    if not values[0].numel():
        return
    a, b = (x.to("cpu", wide) for x in values)
    if scale is None:
        scale = b.abs().max().item()
    bound = limit(dtype, roundings, torch.as_tensor(scale, dtype=torch.float64).detach().cpu())
    equal = a == b  # also where both are the same infinity, or the scale is 0
    ratio = torch.where(equal, 0.0, (a - b).abs() / bound)
    _judge(ratio.nan_to_num(nan=torch.inf).max().item(), f"largest difference {(a - b).abs().max().item():.3e}")


def assert_at_most(
    value: Any, bound: Any, *, roundings: float = ROUNDINGS, scale: Any = None, dtype: torch.dtype | None = None
) -> None:
    """Assert ``value <= bound`` in every entry, with an allowance for the rounding of both sides."""
    dtype = _arithmetic(value, bound) if dtype is None else dtype
    value, bound = _tensor(value), _tensor(bound)
    scale = bound.abs().max().item() if scale is None else scale
    over = torch.where(value <= bound, torch.zeros_like(value - bound), value - bound)
    assert_close(over, torch.zeros_like(over), roundings=roundings, scale=scale, dtype=dtype)


def assert_within(error: Any, bound: float, what: str = "error") -> None:
    """Assert ``error <= bound`` where no rounding analysis applies: an iteration that stops, a recorded training run.

    The caller says where ``bound`` comes from; ``make test-hosts`` keeps it above three times what any host gives.
    """
    largest = torch.as_tensor(error, dtype=torch.float64).abs().nan_to_num(nan=torch.inf).max().item()
    _judge(largest / bound, f"{what} {largest:.3e} where at most {bound:.3e} is allowed")


def _arithmetic(*values: Any) -> torch.dtype:
    """Real dtype of the first tensor among ``values``; of numbers float64."""
    return next((x.dtype.to_real() for x in values if isinstance(x, Tensor)), torch.float64)


def _tensor(x: Any) -> Tensor:
    """A number or array in its own precision, where ``torch.as_tensor`` makes Python's numbers float32."""
    return x if isinstance(x, Tensor) else torch.from_numpy(np.asarray(x))


def _judge(ratio: float, found: str) -> None:
    path = os.environ.get("TNLM_MARGINS")
    if path:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
        with open(path, "a") as file:
            file.write(json.dumps({"test": test, "ratio": ratio}) + "\n")
    assert ratio <= 1, f"{found}: {ratio:.3g} times its limit"
