"""RMS norm: its formula with the small addend inside the root, and the two points that freeze it."""

import math

import torch

from tests.limits import assert_close
from tnlm.config import FP32_EPS
from tnlm.norm import NoNorm, RMSNorm


def test_formula_by_hand():
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    scale = math.sqrt((9 + 16) / 2 + FP32_EPS)
    assert_close(RMSNorm()(x), x / scale)


def test_eps_is_added_to_the_mean_square_before_the_root():
    x = torch.full((5,), 1e-4, dtype=torch.float64)
    expected = 1e-4 / math.sqrt(1e-8 + 1.1920929e-07)
    assert_close(RMSNorm()(x), torch.full_like(x, expected))
    assert torch.equal(RMSNorm()(torch.zeros(5)), torch.zeros(5))
    assert_close(RMSNorm(eps=1e-8)(x), torch.full_like(x, math.sqrt(0.5)))


def test_eps_does_not_follow_the_dtype():
    """torch's own default would be 0.0078125 in bf16, a different model at small inputs."""
    x = torch.full((8,), 2.0**-10)
    out = RMSNorm()(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert_close(out.float(), RMSNorm()(x), roundings=1, dtype=torch.bfloat16)


def test_half_precision_is_normed_in_float32():
    x = torch.full((4,), 300.0, dtype=torch.float16)  # its square overflows float16
    assert_close(RMSNorm()(x), torch.ones(4, dtype=torch.float16))


def test_agrees_with_torch():
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    assert_close(RMSNorm(1e-3)(x), torch.nn.functional.rms_norm(x, (7,), eps=1e-3))


def test_freezing_the_scale_makes_the_norm_linear():
    norm, x = RMSNorm(), torch.randn(2, 3, 7, dtype=torch.float64)
    scales = []
    norm.hook_scale.register_forward_hook(lambda _m, _i, out: scales.append(out))
    once = norm(x)
    assert scales[0].shape == (2, 3, 1)
    assert_close(once * scales[0], x)
    norm.hook_scale.register_forward_hook(lambda _m, _i, _out: scales[0])
    assert_close(norm(5 * x), 5 * once)


def test_normalized_is_what_the_layer_reads():
    for norm in (RMSNorm(), NoNorm()):
        norm.hook_normalized.register_forward_hook(lambda _m, _i, out: out + 1)
        x = torch.randn(3, 7)
        assert_close(norm(x), (type(norm)()(x)) + 1)


def test_no_norm_is_the_identity():
    x = torch.randn(3, 7)
    assert torch.equal(NoNorm()(x), x)


def test_who_listens_changes_neither_bits_nor_gradients():
    for dtype in (torch.float32, torch.float64):
        norm, x = RMSNorm(), torch.randn(2, 3, 7, dtype=dtype, requires_grad=True)
        with torch.no_grad():
            x[0, 1] = 0
        plain = norm(x)
        norm.hook_scale.register_forward_hook(lambda *_: None)
        assert torch.equal(norm(x), plain)
        grads = (torch.autograd.grad(out.sin().sum(), x)[0] for out in (norm(x), plain))
        assert_close(*grads)
        if dtype == torch.float64:
            assert torch.autograd.gradgradcheck(norm, x)
