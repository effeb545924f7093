"""RMS norm and rotation with written-out gradients, against their formulas in float64."""

import pytest
import torch

from tests.kernels.attention_cases import SHAPES_CHECKED
from tests.limits import assert_at_most, assert_close
from tnlm.config import GATED_MLPS
from tnlm.kernels import pointwise
from tnlm.mlp import MLP
from tnlm.norm import RMSNorm
from tnlm.rotary import rotary_tables, rotate

EPS = 1e-3


def norm_formula(x):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def rotation_formula(x, cos, sin):
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


def tables(seq=5, d=6):
    """Rounded to bf16: ``cos**2 + sin**2`` is not 1, so neither is the rotation orthogonal."""
    return rotary_tables(seq, d, dtype=torch.bfloat16)


def turned(x):
    return pointwise.Rotation(*tables())(x)


def noise(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


OPERATIONS = {
    "norm": (lambda x: pointwise.rms_norm(x, EPS), norm_formula),
    "rotation": (lambda x: turned(x), lambda x: rotation_formula(x, *tables())),
    "rotated norm": (
        lambda x: turned(pointwise.rms_norm(x, EPS)),
        lambda x: rotation_formula(norm_formula(x), *tables()),
    ),
}
EACH = pytest.mark.parametrize("operation, formula", OPERATIONS.values(), ids=list(OPERATIONS))
LAYOUTS = {
    "packed": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
}


@EACH
def test_first_and_second_derivatives(operation, formula):
    x = noise(2, 5, 3, 6)
    assert_close(operation(x), formula(x))
    assert torch.autograd.gradcheck(operation, x)
    assert torch.autograd.gradgradcheck(operation, x)


@EACH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_is_that_of_the_formula_in_any_layout(operation, formula, layout):
    x, grad = noise(2, 5, 3, 6), torch.randn(2, 5, 3, 6, dtype=torch.float64)
    (want,) = torch.autograd.grad(formula(x), x, grad)
    (got,) = torch.autograd.grad(operation(LAYOUTS[layout](x)), x, LAYOUTS[layout](grad))
    assert_close(got, want)


@EACH
def test_float32_rounds_no_worse_than_the_formula(operation, formula):
    wide, grad = noise(2, 5, 3, 6), torch.randn(2, 5, 3, 6, dtype=torch.float64)
    x = wide.detach().float().requires_grad_()
    wide = x.detach().double().requires_grad_()
    exact = [formula(wide), *torch.autograd.grad(formula(wide), wide, grad.float().double())]
    errors = []
    for function in (operation, formula):
        found = [function(x), *torch.autograd.grad(function(x), x, grad.float())]
        errors.append([(a.double() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)])
    for ours, theirs in zip(*errors, strict=True):
        assert_at_most(ours, 2 * theirs, scale=1, roundings=16, dtype=torch.float32)


def test_a_second_backward_finds_the_graph_as_it_was():
    x = noise(2, 5, 3, 6)
    out = OPERATIONS["rotated norm"][0](x)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.sum(), x)[0])


def test_rows_of_zeros_have_the_gradient_of_the_formula():
    x = noise(2, 3, 4)
    with torch.no_grad():
        x[0, 1] = 0
    weights = torch.randn(2, 3, 4, dtype=torch.float64)
    for order in (1, 2):
        found = []
        for function in (lambda x: pointwise.rms_norm(x, EPS), norm_formula):
            (g,) = torch.autograd.grad((function(x) * weights).sum(), x, create_graph=True)
            found.append(g if order == 1 else torch.autograd.grad(g.square().sum(), x)[0])
        assert_close(*found)


def test_rotations_lie_heads_first_in_memory():
    out = turned(noise(2, 5, 3, 6))
    assert out.shape == (2, 5, 3, 6)
    assert out.transpose(1, 2).is_contiguous()


def test_one_pair_of_tables_serves_tensors_of_several_kinds():
    rotation = pointwise.Rotation(*tables())
    for n_head, dtype in ((3, torch.float32), (2, torch.float32), (3, torch.float64), (3, torch.float32)):
        x = noise(2, 5, n_head, 6, dtype=dtype)
        assert_close(rotation(x), rotation_formula(x, *tables()))
        grads = (
            torch.autograd.grad(f(x).sin().sum(), x)[0] for f in (rotation, lambda x: rotation_formula(x, *tables()))
        )
        assert_close(*grads)


class TestTheFormulaStandsInWhere:
    """``closed_gradients_fit`` is false, because the closed form would fail or be wrong there."""

    @pytest.fixture(autouse=True)
    def closed_forms_are_counted(self, monkeypatch):
        self.calls = []
        for closed in (pointwise._RMSNorm, pointwise._Rotation):
            original = closed.apply
            monkeypatch.setattr(closed, "apply", lambda *a, original=original: self.calls.append(1) or original(*a))

    def layer(self, x):
        return rotate(RMSNorm(EPS)(x), *tables())

    def test_nothing_is_special(self):
        x = noise(2, 5, 3, 6, dtype=torch.float32)
        assert_close(self.layer(x), rotation_formula(norm_formula(x), *tables()))
        assert len(self.calls) == 2

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
    def test_other_dtypes(self, dtype):
        x = noise(2, 5, 3, 6).to(dtype)
        assert_close(rotate(x, *tables()), rotation_formula(x, *tables()), roundings=1)
        assert not self.calls

    def test_transforms(self):
        x = noise(2, 5, 3, 6).detach()
        total = lambda x: self.layer(x).sin().sum()  # noqa: E731
        want = lambda x: rotation_formula(norm_formula(x), *tables()).sin().sum()  # noqa: E731
        assert_close(torch.func.grad(total)(x), torch.func.grad(want)(x))
        assert_close(torch.func.jvp(total, (x,), (x,))[1], torch.func.jvp(want, (x,), (x,))[1], scale=x.numel())
        assert_close(torch.func.hessian(total)(x), torch.func.hessian(want)(x))
        mapped = torch.vmap(self.layer)(torch.stack([x, 2 * x]))
        assert_close(mapped[1], rotation_formula(norm_formula(2 * x), *tables()))
        assert not self.calls

    def test_transforms_of_something_else(self):
        x, scales = noise(2, 5, 3, 6).detach(), torch.tensor([1.0, 3.0], dtype=torch.float64)
        mapped = torch.vmap(lambda scale: self.layer(x).sum() * scale)(scales)
        assert_close(mapped, self.layer(x).sum() * scales)
        assert len(self.calls) == 2  # of the second call alone

    def test_dual_numbers(self):
        x = noise(2, 5, 3, 6).detach()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            tangent = torch.autograd.forward_ad.unpack_dual(self.layer(dual)).tangent
        assert tangent is not None
        assert not self.calls

    def test_autocast(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.layer(noise(2, 5, 3, 6, dtype=torch.float32))
        assert not self.calls

    @pytest.mark.skipif(SHAPES_CHECKED, reason="Dynamo cannot trace the runtime checks of shapes")
    def test_compilers(self):
        torch._dynamo.reset()
        x = noise(2, 5, 3, 6, dtype=torch.float32)
        compiled = torch.compile(lambda x: RMSNorm(EPS)(x), backend="eager", fullgraph=True)
        assert_close(compiled(x), norm_formula(x))
        assert not self.calls

    def test_tables_are_wider_or_take_a_gradient(self):
        x = noise(2, 5, 3, 6, dtype=torch.float32)
        wide = [t.double() for t in tables()]
        assert_close(rotate(x, *wide), rotation_formula(x, *tables()))
        learned = [t.float().requires_grad_() for t in tables()]
        grads = torch.autograd.grad(rotate(x, *learned).square().sum(), learned)
        assert all(g.norm() > 0 for g in grads)
        assert not self.calls

    def test_somebody_listens_and_may_write_in_place(self):
        norm, x = RMSNorm(EPS), noise(2, 5, 6)
        norm.hook_normalized.register_forward_hook(lambda _m, _i, out: out.mul_(2))
        (got,) = torch.autograd.grad(norm(x).sum(), x)
        assert_close(got, torch.autograd.grad(2 * norm_formula(x).sum(), x)[0])
        assert not self.calls

    def test_another_module_stands_in_place_of_a_point(self):
        norm, x = RMSNorm(EPS), noise(2, 5, 6)
        norm.hook_scale = torch.nn.Softplus()
        assert (norm(x) - norm_formula(x)).norm() > 0.1
        assert not self.calls


def test_results_may_be_edited_in_place():
    """As hooks downstream of a norm or a rotation do."""
    x = noise(2, 5, 3, 6)
    y = pointwise.rms_norm(x, EPS)
    y.mul_(2)
    z = turned(y)
    z[:, 2] = 0
    want = rotation_formula(2 * norm_formula(x), *tables())
    keep = torch.ones(5, 1, 1, dtype=torch.float64)
    keep[2] = 0
    assert_close(z, want * keep)
    grads = (torch.autograd.grad(out.sin().sum(), x)[0] for out in (z, want * keep))
    assert_close(*grads)


@pytest.mark.parametrize("leading", [(), (2,), (2, 5, 4)])
def test_any_leading_axes(leading):
    """Sizes that coincide with seq included."""
    x = noise(*leading, 5, 5, 6)
    assert_close(rotate(x, *tables()), rotation_formula(x, *tables()))
    grads = (torch.autograd.grad(f(x, *tables()).sin().sum(), x)[0] for f in (rotate, rotation_formula))
    assert_close(*grads)


class TestGatedProjection:
    def formula(self, left, right, w, bias):
        out = (left * right) @ w.mT
        return out if bias is None else out + bias

    @pytest.mark.parametrize("biased", [True, False])
    @pytest.mark.parametrize("shape", [(2, 5, 7), (3, 7)])
    def test_value_and_derivatives(self, shape, biased):
        operands = [noise(*shape), noise(*shape), noise(4, 7), noise(4) if biased else None]
        assert_close(pointwise.gated_projection(*operands), self.formula(*operands))
        assert torch.autograd.gradcheck(pointwise.gated_projection, operands)
        assert torch.autograd.gradgradcheck(pointwise.gated_projection, operands)

    def test_gradients_with_and_without_a_graph(self):
        operands, grad = [noise(2, 5, 7), noise(2, 5, 7), noise(4, 7), noise(4)], torch.randn(2, 5, 4).double()
        want = torch.autograd.grad(self.formula(*operands), operands, grad)
        out = pointwise.gated_projection(*operands)
        for create_graph in (False, True, False):
            got = torch.autograd.grad(out, operands, grad, create_graph=create_graph, retain_graph=True)
            assert_close(got, want)

    def test_one_tensor_on_both_sides(self):
        x, w = noise(2, 5, 7), noise(4, 7)
        got, want = (
            torch.autograd.grad(f(x, x, w, None).sin().sum(), (x, w))
            for f in (pointwise.gated_projection, self.formula)
        )
        assert_close(got, want)

    @pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float64])
    def test_the_layer_casts_weights_of_another_dtype(self, bias_dtype):
        layer, x = MLP(kind="bilinear", d_in=3, d_hidden=7, d_out=4, dtype=torch.float64), noise(5, 3)
        with torch.no_grad():
            for p in layer.parameters():
                p.normal_()
        layer.bias.data = layer.bias.data.to(bias_dtype)
        out = layer(x.float())
        assert out.dtype == torch.float32
        assert_close(out, layer.double()(x).float())

    def test_a_tangent_of_the_bias_is_not_lost(self):
        layer, x = MLP(kind="bilinear", d_in=3, d_hidden=7, d_out=4, dtype=torch.float64), noise(5, 3).detach()
        bias, tangent = layer._parameters.pop("bias"), torch.randn(4).double()
        with torch.autograd.forward_ad.dual_level():
            layer.bias = torch.autograd.forward_ad.make_dual(bias.detach(), tangent)
            found = torch.autograd.forward_ad.unpack_dual(layer(x)).tangent
        assert_close(found, tangent.expand(5, 4))

    def test_frozen_weights(self):
        left, right = noise(2, 5, 7), noise(2, 5, 7)
        out = pointwise.gated_projection(left, right, noise(4, 7).detach(), noise(4).detach())
        assert all(g.norm() > 0 for g in torch.autograd.grad(out.sum(), (left, right)))

    @pytest.mark.parametrize("kind", GATED_MLPS)
    def test_the_layer_takes_it_unless_somebody_listens(self, kind, monkeypatch):
        calls, closed = [], pointwise._GatedProjection
        original = closed.apply
        monkeypatch.setattr(closed, "apply", lambda *a: calls.append(1) or original(*a))
        layer, x = MLP(kind=kind, d_in=3, d_hidden=7, d_out=4), noise(5, 3, dtype=torch.float32)
        with torch.no_grad():
            for p in layer.parameters():
                p.normal_()
        plain = layer(x)
        assert len(calls) == 1
        layer.hook_post.register_forward_hook(lambda *_: None)
        assert_close(layer(x), plain)
        half = layer(x.bfloat16())
        assert half.dtype == torch.bfloat16
        assert len(calls) == 1
