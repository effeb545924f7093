"""Shares of pairs and Shapley values of one layer, against enumeration."""

import itertools
from math import factorial

import pytest
import torch

from tests.interp.builders import make_layer, noise
from tests.limits import assert_close
from tnlm.interp import layer_pairs, layer_shapley


def enumerate_shapley(value, n):
    """Average marginal contribution over all orders, from the 2**n coalitions."""
    shares = []
    for p in range(n):
        others = [q for q in range(n) if q != p]
        total = 0
        for size in range(n):
            weight = factorial(size) * factorial(n - size - 1) / factorial(n)
            for coalition in itertools.combinations(others, size):
                total = total + weight * (value({*coalition, p}) - value(set(coalition)))
        shares.append(total)
    return torch.stack(shares)


@pytest.mark.parametrize("with_baseline", [False, True])
def test_shapley_is_the_enumeration(with_baseline):
    b, u, parts = make_layer(), noise(3, seed=1), noise(4, 5, seed=2)
    baseline = noise(5, seed=3) if with_baseline else None
    start = torch.zeros(5, dtype=torch.float64) if baseline is None else baseline

    def value(coalition):
        return b(start + sum((parts[p] for p in coalition), torch.zeros_like(start))) @ u

    shares = layer_shapley(b, u, parts, baseline)
    assert_close(shares, enumerate_shapley(value, 4))
    assert_close(shares.sum(), (b(start + parts.sum(0)) - b(start)) @ u)


def test_shapley_of_single_coordinates():
    b, u, x, baseline = make_layer(), noise(3, seed=1), noise(5, seed=2), noise(5, seed=3)
    q, delta = b.interaction(u), x - baseline
    assert_close(layer_shapley(b, u, torch.diag(delta), baseline), 2 * delta * (q @ baseline) + delta * (q @ delta))
    assert_close(layer_shapley(b, u, torch.diag(x)), x * (q @ x))


def test_pairs_sum_to_the_output():
    b, u, parts = make_layer(), noise(3, seed=1), noise(4, 5, seed=2)
    pairs = layer_pairs(b, u, parts)
    assert_close(pairs, parts @ b.interaction(u) @ parts.T)
    assert_close(pairs.sum() + u @ b.bias, b(parts.sum(0)) @ u)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda b: layer_pairs(b.w_l, noise(3), noise(4, 5)), "must be a BilinearTensor, got Tensor"),
        (lambda b: layer_pairs(b, noise(5), noise(4, 5)), r"u must have shape \(3\), got \(5,\)"),
        (lambda b: layer_pairs(b, noise(3), noise(4, 1)), r"parts must have shape \(any, 5\), got \(4, 1\)"),
        (lambda b: layer_shapley(b, noise(3), noise(4, 5) * torch.nan), "parts must be finite"),
        (lambda b: layer_shapley(b, noise(3), noise(4, 5), noise(3)), r"baseline must have shape \(5\)"),
    ],
)
def test_bad_arguments_are_refused(call, text):
    b = make_layer()
    with pytest.raises(ValueError, match=text):
        call(b)
