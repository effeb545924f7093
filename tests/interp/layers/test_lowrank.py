"""Thin factors against the dense matrix."""

import pytest
import torch

from tests.interp.builders import noise
from tests.limits import assert_close
from tnlm.interp import LowRank


@pytest.mark.parametrize("m, r, n", [(7, 3, 5), (2, 3, 5), (5, 3, 2), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_svd_norm_and_inner_are_those_of_the_dense_matrix(m, r, n, dtype):
    a = LowRank(noise(m, r, dtype=dtype), noise(r, n, seed=1, dtype=dtype))
    b = LowRank(noise(m, 4, seed=2, dtype=dtype), noise(4, n, seed=3, dtype=dtype))
    w = a.tensor()
    u, s, vh = a.svd()
    assert_close((u * s) @ vh, w)
    assert_close(u.mH @ u, torch.eye(u.shape[1], dtype=dtype))
    assert_close(s, torch.linalg.svdvals(w)[: len(s)])
    assert_close(a.norm(), w.norm())
    assert_close(a.inner(b), (w * b.tensor().conj()).sum())
    x = noise(n, 2, seed=4, dtype=dtype)
    assert_close(a @ x, w @ x)
    assert_close(a.mT.tensor(), w.mT)
    peaks = u.gather(0, u.abs().argmax(0, keepdim=True))
    assert_close(peaks, peaks.abs().to(dtype))


def test_dense_over_the_budget_is_refused_before_allocating():
    a = LowRank(torch.zeros(2**20, 1), torch.zeros(1, 2**20))
    with pytest.raises(ValueError, match=r"dense matrix of shape \(1048576, 1048576\) needs 4,398,046,511,104 bytes"):
        a.tensor()


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda a: LowRank(noise(7, 3), noise(1, 5)), r"right must have shape \(3, any\), got \(1, 5\)"),
        (lambda a: LowRank(noise(7, 3) * torch.nan, noise(3, 5)), "left must be finite"),
        (lambda a: a @ noise(4), r"x must have shape \(5\), got \(4,\)"),
        (lambda a: a @ noise(4, 2), r"x must have shape \(5, any\), got \(4, 2\)"),
        (lambda a: a.inner(LowRank(noise(7, 3), noise(3, 1))), r"same shape to be compared, got \(7, 5\) and \(7, 1\)"),
    ],
)
def test_bad_factors_are_refused(call, text):
    a = LowRank(noise(7, 3), noise(3, 5))
    with pytest.raises(ValueError, match=text):
        call(a)
