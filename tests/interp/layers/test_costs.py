"""Costs that docstrings state, counted: matrix products in multiply-adds, and eigendecompositions."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.interp.builders import make_layer, noise
from tnlm.interp import (
    bounds,
    effective_rank,
    eig,
    hosvd,
    inertia,
    jacobian_kernel,
    moments,
    remove,
    truncate,
    vocab_moments,
)

OUT, IN, HIDDEN = 31, 29, 2048
UNIT = HIDDEN**2 * IN  # one product over pairs of hidden units


class Decompositions(TorchDispatchMode):
    """Counts eigendecompositions, one for each matrix of a batch."""

    def __init__(self):
        super().__init__()
        self.sizes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._linalg_eigh.default:
            self.sizes[args[0].shape[-1]] += args[0].shape[:-2].numel()
        return func(*args, **(kwargs or {}))


def products(call) -> float:
    """Multiply-adds of the matrix products in a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / 2


@pytest.fixture(scope="module")
def layer():
    return make_layer(OUT, IN, HIDDEN, bias=False)


@pytest.mark.parametrize(
    "call, stated",
    [
        (lambda b: b.gram("out"), 3),
        (lambda b: b.gram("in"), 7),
        (lambda b: b.inner(b), 3),
        (lambda b: b.inner(b + make_layer(OUT, IN, 1, bias=False)), 5),
        (lambda b: moments(b), 3),
        (lambda b: jacobian_kernel(b), 7),
        (lambda b: hosvd(b, OUT, IN), 10),
    ],
    ids=["gram out", "gram in", "norm", "inner", "moments", "jacobian_kernel", "hosvd"],
)
def test_products_over_pairs_of_units(layer, call, stated):
    """Docstrings say "about": within a sixth, for outputs about as wide as inputs and many more hidden units."""
    assert products(lambda: call(layer)) / UNIT == pytest.approx(stated, rel=1 / 6)


def test_products_of_forms(layer):
    weights = OUT * HIDDEN  # of one direction over the hidden units
    u, x = noise(5, OUT), noise(5, IN, 3)
    assert products(lambda: layer.tensor()) == OUT * (HIDDEN * IN**2 + weights)
    assert products(lambda: layer.interaction(u)) == 5 * (HIDDEN * IN**2 + weights)
    assert products(lambda: layer.apply(u, x)) == 5 * (3 * 4 * HIDDEN * IN + weights)


def test_moments_of_a_vocabulary_after_the_gram(layer):
    net = SimpleNamespace(mlp=[layer], unembed=noise(2003, OUT), tokens=range(2003))
    gram = layer.gram("out")
    counted = products(lambda: vocab_moments(net, 0, gram=gram))
    assert counted == pytest.approx(2003 * OUT**2, rel=0.1)  # and the means


@pytest.mark.parametrize(
    "call, stated",
    [
        (lambda b, u: eig(b, u, 2), {IN: 5}),
        (lambda b, u: effective_rank(b, u, "max"), {IN: 5}),
        (lambda b, u: inertia(b, u), {IN: 5}),
        (lambda b, u: bounds(b, u), {IN: 5}),
        (lambda b, u: truncate(b, u[0], 3), {IN: 1}),
        (lambda b, u: remove(b, u[0], u[0, :1], noise(IN, 1)), {}),
        (lambda b, u: hosvd(b, 2, 3), {IN: 1, OUT: 1}),
    ],
    ids=["eig", "effective_rank", "inertia", "bounds", "truncate", "remove", "hosvd"],
)
def test_eigendecompositions(layer, call, stated):
    with Decompositions() as counter:
        call(layer, noise(5, OUT))
    assert dict(counter.sizes) == stated
