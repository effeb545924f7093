"""The MLP kinds: degree, symmetry, points and starting values; their formulas are checked in test_transformer."""

import pytest
import torch

from tests.limits import assert_close
from tests.tiny_models import MLPS
from tnlm.config import GATED_MLPS
from tnlm.mlp import MLP, BilinearMLP

KINDS = [kind for kind in MLPS if kind != "none"]


def layer(kind="bilinear", *, bias=False, dtype=torch.float64):
    mlp = MLP(kind=kind, d_in=5, d_hidden=7, d_out=3, bias=bias, dtype=dtype)
    for p in mlp.parameters():
        torch.nn.init.normal_(p)
    return mlp


@pytest.mark.parametrize("kind", ["bilinear", "squared"])
def test_polynomial_kinds_are_even_and_of_degree_two(kind):
    mlp, x = layer(kind), torch.randn(11, 5, dtype=torch.float64)
    assert_close(mlp(-3 * x), 9 * mlp(x))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("bilinear", "squared")])
def test_the_baselines_are_not_of_degree_two(kind):
    mlp, x = layer(kind), torch.randn(11, 5, dtype=torch.float64)
    assert not torch.allclose(mlp(-3 * x), 9 * mlp(x), rtol=1e-2)


def test_squared_is_bilinear_with_equal_encoders():
    bilinear, squared = layer("bilinear"), layer("squared")
    squared.load_state_dict({"w_l": bilinear.w_l, "w_d": bilinear.w_d})
    with torch.no_grad():
        bilinear.w_r.copy_(bilinear.w_l)
    x = torch.randn(11, 5, dtype=torch.float64)
    assert_close(squared(x), bilinear(x))


def test_swapping_the_encoders_changes_nothing_for_bilinear_alone():
    x = torch.randn(11, 5, dtype=torch.float64)
    for kind in GATED_MLPS:
        mlp = layer(kind)
        before = mlp(x)
        mlp.w_l, mlp.w_r = mlp.w_r, mlp.w_l
        assert torch.allclose(mlp(x), before) == (kind == "bilinear")


@pytest.mark.parametrize("kind", KINDS)
def test_points_hold_what_the_table_says(kind):
    mlp, x = layer(kind, bias=True), torch.randn(2, 4, 5, dtype=torch.float64)
    seen = {}
    for name, point in mlp.named_modules():
        if name.startswith("hook_"):
            point.register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out}))
    out = mlp(x)
    assert_close(seen["hook_pre"], torch.einsum("bsi,hi->bsh", x, mlp.w_l))
    assert ("hook_pre_linear" in seen) == (kind in GATED_MLPS)
    if kind in GATED_MLPS:
        assert_close(seen["hook_pre_linear"], torch.einsum("bsi,hi->bsh", x, mlp.w_r))
    assert_close(out, torch.einsum("bsh,oh->bso", seen["hook_post"], mlp.w_d) + mlp.bias)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_layer_adds_nothing_and_learns(kind):
    mlp, x = MLP(kind=kind, d_in=5, d_hidden=7, d_out=3), torch.randn(11, 5)
    out = mlp(x)
    assert torch.equal(out, torch.zeros(11, 3))
    assert mlp.w_l.abs().max() <= 5**-0.5
    assert mlp.w_l.std() > 0.1
    out.sum().backward()
    assert mlp.w_d.grad.abs().max() > 0
    assert torch.equal(mlp.bias.grad, torch.full((3,), 11.0))


def test_float32_weights_serve_bfloat16_activations():
    mlp = layer("bilinear", bias=True, dtype=torch.float32)
    x = torch.randn(11, 5)
    out = mlp(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert_close(out.float(), mlp(x), roundings=7, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (5,)])
def test_any_leading_axes(shape):
    assert layer()(torch.ones(shape, dtype=torch.float64)).shape == (*shape[:-1], 3)


def test_bilinear_mlp_has_no_bias_by_default():
    mlp = BilinearMLP(d_in=5, d_hidden=7, d_out=3, dtype=torch.float64)
    assert [name for name, _ in mlp.named_parameters()] == ["w_l", "w_r", "w_d"]
