"""Composed layers as one network against running them one after the other."""

import opt_einsum
import pytest
import torch

from tests.interp.builders import make_layer, noise
from tests.interp.layers.test_similarities import PRODUCT, SQUARES
from tests.limits import assert_close
from tnlm.interp import compose


def lift(x):
    return torch.cat([torch.ones(len(x), 1, dtype=x.dtype), x], dim=1)


def test_composed_network_is_the_composition():
    f1, f2 = make_layer(4, 5, 6, bias=False, seed=1), make_layer(3, 4, 7, bias=False, seed=2)
    x = noise(11, 5)
    net = compose(f1, f2)
    assert_close(net.contract({"x": x}), f2(f1(x)))
    assert_close(net.contract({"x": -3 * x}), 81 * f2(f1(x)))
    flat = net.flatten()
    assert len(flat.operands) == 3 + 2 * (3 + 2)
    assert_close(opt_einsum.contract(*flat.args(x=x)), f2(f1(x)))
    assert compose(f1).contract({"x": x}).shape == (11, 4)


def test_layers_are_shared_nodes_and_no_fifth_order_tensor_is_built():
    layers = [make_layer(8, 8, 8, bias=False, seed=s) for s in range(5)]
    cost = compose(*layers).cost({"batch": 3})
    assert cost.largest <= 3 * 8
    assert cost.flops < 5 * 3 * 8 * 8 * 8


def test_residual_and_bias_ride_on_the_constant_coordinate():
    f1, f2 = make_layer(5, 5, 6, seed=1), make_layer(5, 5, 7, seed=2)
    x = noise(11, 5)
    inner = x + f1(x)
    assert_close(compose(f1, f2, residual=True).contract({"x": lift(x)}), inner + f2(inner))
    narrow = make_layer(3, 5, 7, bias=False, seed=3)
    assert_close(compose(f1, narrow).contract({"x": lift(x)}), narrow(f1(x)))


def test_one_function_built_two_ways():
    x = noise(11, 3)
    want = (x[:, :1] * x[:, 1:2]).square()
    for lower, upper in (SQUARES, PRODUCT):
        assert_close(compose(lower, upper).contract({"x": x}), want)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda f: compose(), "needs at least one layer, got none"),
        (lambda f: compose(f, f), "needs f2.d_in == f1.d_out, got 5 and 3; layers come in the order in which"),
        (lambda f: compose(f, f.w_l), "must be a BilinearTensor, got Tensor"),
        (lambda f: compose(f, f.to(torch.float32)), "w_l of every layer must be torch.float64"),
        (lambda f: compose(f, residual=True), "a residual needs d_in == d_out, got d_in=5, d_out=3"),
        (lambda f: compose(f).contract({"x": noise(11, 1)}), "size"),
    ],
)
def test_bad_layers_are_refused(call, text):
    f = make_layer(3, 5, 7, bias=False)
    with pytest.raises(ValueError, match=text):
        call(f)
