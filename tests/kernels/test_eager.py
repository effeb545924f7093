"""The definition against loops over positions, its derivatives, and the properties that follow from no softmax."""

import pytest
import torch

from tests.kernels.attention_cases import FUNCTIONS, loops, operands, outputs_and_gradients
from tests.limits import assert_close

SHAPES = [(5, 5), (3, 7), (7, 3), (1, 1)]


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq_q, seq_k", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_eager_is_the_sum_over_pairs(kind, causal, seq_q, seq_k, dtype):
    tensors = operands(kind, seq_q=seq_q, seq_k=seq_k, dtype=dtype)
    out = FUNCTIONS[kind](*tensors, causal=causal, scale=0.3, implementation="eager")
    assert_close(out, loops(kind, tensors, causal=causal, scale=0.3))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_default_scale_is_one_over_d_qk_per_factor(kind):
    tensors = operands(kind, seq_q=5)
    out = FUNCTIONS[kind](*tensors, implementation="eager")
    assert_close(out, loops(kind, tensors, causal=True, scale=1 / 4**2))


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_first_and_second_derivatives(kind, causal):
    tensors = operands(kind, seq_q=2, seq_k=3, batch=1, n_head=2, d_qk=2, d_v=1)

    def attend(*tensors):
        return FUNCTIONS[kind](*tensors, causal=causal, implementation="eager")

    assert torch.autograd.gradcheck(attend, tensors)
    assert torch.autograd.gradgradcheck(attend, tensors)


def test_gradients_match_the_closed_form():
    q1, k1, q2, k2, v = operands("bilinear", seq_q=5)
    grad = torch.randn(2, 5, 3, 10, dtype=torch.float64)
    _, dq1, dk1, dq2, dk2, dv = outputs_and_gradients("bilinear", [q1, k1, q2, k2, v], grad, scale=0.7)
    s1 = torch.einsum("bihd,bjhd->bhij", q1, k1)
    s2 = torch.einsum("bihd,bjhd->bhij", q2, k2)
    a = torch.einsum("bihd,bjhd->bhij", grad, v).tril() * 0.7
    assert_close(dv, torch.einsum("bhij,bihd->bjhd", (s1 * s2).tril() * 0.7, grad))
    assert_close(dq1, torch.einsum("bhij,bjhd->bihd", a * s2, k1))
    assert_close(dq2, torch.einsum("bhij,bjhd->bihd", a * s1, k2))
    assert_close(dk1, torch.einsum("bhij,bihd->bjhd", a * s2, q1))
    assert_close(dk2, torch.einsum("bhij,bihd->bjhd", a * s1, q2))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_transforms_of_the_definition(kind):
    tensors = [x.detach() for x in operands(kind, seq_q=3, batch=1)]

    def total(*tensors):
        return FUNCTIONS[kind](*tensors, implementation="auto").sin().sum()

    assert torch.func.hessian(total)(*tensors).shape == tensors[0].shape * 2
    tangents = tuple(torch.randn_like(x) for x in tensors)
    _, forward = torch.func.jvp(total, tuple(tensors), tangents)
    gradients = torch.func.grad(total, argnums=tuple(range(len(tensors))))(*tensors)
    backward = sum((g * t).sum() for g, t in zip(gradients, tangents, strict=True))
    assert_close(forward, backward)
    mapped = torch.vmap(FUNCTIONS[kind])(*(torch.stack([x, 2 * x]) for x in tensors))
    assert_close(mapped[1], FUNCTIONS[kind](*(2 * x for x in tensors)))
