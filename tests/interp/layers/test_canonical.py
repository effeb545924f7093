"""On inputs of one length a layer is fixed up to multiples of the identity: analyses do not move under these."""

from dataclasses import replace

import pytest
import torch

from tests.interp.builders import dense, gauged, make_layer, noise, on_sphere, shifted, sphere_points
from tests.limits import assert_close
from tnlm.interp import BilinearTensor

SHIFT = torch.tensor([2.0, -0.5, 0.25], dtype=torch.float64)


def pair():
    """Two layers that are equal on the sphere and nowhere else."""
    b = on_sphere(make_layer())
    return b, shifted(gauged(b), SHIFT)


def traceless(b):
    """The dense tensor without its traces, by the definition."""
    t = dense(b)
    return t - t.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None] / b.d_in * torch.eye(b.d_in).double()


def test_the_two_layers_are_equal_on_the_sphere_alone():
    b, other = pair()
    x = sphere_points(11, 5, seed=1)
    assert_close(other(x), b(x))
    assert float((other(2 * x) - b(2 * x)).abs().max()) > 1


def test_the_canonical_layer_is_traceless_and_the_same_function_there():
    b, other = pair()
    x = sphere_points(11, 5, seed=1)
    assert_close(b.canonical()(x), b(x))
    assert_close(b.canonical().tensor()[:, 1:, 1:], traceless(b), scale=dense(b).abs().max())
    assert_close(other.canonical().tensor()[:, 1:, 1:], traceless(b), scale=dense(other).abs().max())
    assert_close(other.canonical().bias, b.canonical().bias, scale=5 * dense(other).abs().max())
    without = replace(b, bias=None)
    assert_close(without.canonical()(x), without(x))
    assert make_layer().canonical().d_hidden == 7  # in space the identity is seen


def test_the_shift_is_the_part_that_every_input_sees():
    b, x = on_sphere(make_layer()), noise(11, 5, seed=1)
    rebuilt = torch.einsum("oij,bi,bj->bo", traceless(b), x, x) + x.square().sum(1)[:, None] * b.shift() + b.bias
    assert_close(rebuilt, b(x))
    assert not make_layer().shift().any()


def test_the_domain_is_kept_by_what_leaves_the_inputs_where_they_are():
    b = on_sphere(make_layer())
    turn = torch.linalg.qr(noise(5, 5, seed=1))[0]
    for layer in (b.to(torch.float32), 2 * b, -b, b + b, b - b, b.project(noise(2, 3)), b.symmetrize(), b.fold(turn)):
        assert layer.domain == "sphere"
    for layer in (b.fold(1.01 * turn), b.fold(turn[:, :3].contiguous()), b.fold(noise(5, 7)), b.augment(False)):
        assert layer.domain == "space"
    assert make_layer().fold(turn).domain == "space"


@pytest.mark.user_error
def test_layers_of_two_domains_are_not_added():
    b = make_layer()
    with pytest.raises(ValueError, match=r"one domain to be added, got 'space' and 'sphere'; dataclasses\.replace"):
        b - on_sphere(b)
    with pytest.raises(ValueError, match="domain must be one of 'space', 'sphere', got 'ball'"):
        BilinearTensor(b.w_l, b.w_r, b.w_d, domain="ball")
