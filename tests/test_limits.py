"""The helper of numeric comparisons: what it lets pass, and what it must not."""

import numpy as np
import pytest
import torch

from tests import limits

ONE32, ONE64 = torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    """The failures planted here are none of a host."""
    monkeypatch.delenv("TNLM_MARGINS", raising=False)


@pytest.mark.parametrize("one", [1.0, np.float64(1), np.ones(3), ONE64, 1 + 0j, [1.0, 1.0]], ids=type)
def test_numbers_are_compared_in_their_own_precision(one):
    """Python's numbers too: as float32, 1 and 1 + 1e-9 would be one number, and neighbours 6e-8 apart."""
    bent = [x + 1e-9 for x in one] if isinstance(one, list) else one + 1e-9
    near = [x + 1e-14 for x in one] if isinstance(one, list) else one + 1e-14
    limits.assert_close(near, one)
    with pytest.raises(AssertionError, match=r"1\.000e-09"):
        limits.assert_close(bent, one)


def test_the_limit_is_that_of_the_coarser_side():
    limits.assert_close(ONE32 + 1e-5, ONE32)
    limits.assert_close(float(ONE32 + 1e-5), 1.0, dtype=torch.float32)
    limits.assert_at_most(ONE32 + 1e-5, 1.0)
    with pytest.raises(AssertionError):
        limits.assert_at_most(ONE64 + 1e-9, 1.0)
    with pytest.raises(AssertionError):
        limits.assert_close(ONE32 + 1e-3, ONE32)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_differs(bad):
    for check in (limits.assert_close, limits.assert_at_most):
        with pytest.raises(AssertionError):
            check(torch.tensor([1.0, bad]), torch.ones(2))
    with pytest.raises(AssertionError):
        limits.assert_within(bad, 1.0)
