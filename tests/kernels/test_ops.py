"""The custom operators: registration, compilation, FLOP counts, distribution, and what they refuse."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from tests.kernels.attention_cases import FUNCTIONS, SHAPES_CHECKED, VIEWS, operands, outputs_and_gradients
from tests.limits import assert_close
from tnlm.kernels import bilinear_attention, ops, squared_attention

FORWARD = {"bilinear": ops.bilinear_fwd, "squared": ops.squared_fwd}
BACKWARD = {"bilinear": ops.bilinear_bwd, "squared": ops.squared_bwd}
BOTH = pytest.mark.parametrize("kind", FUNCTIONS)
COMPILED = pytest.mark.skipif(SHAPES_CHECKED, reason="Dynamo cannot trace the runtime checks of shapes")


@BOTH
@pytest.mark.parametrize("causal", [True, False])
def test_opcheck(kind, causal):
    tensors = operands(kind, seq_q=5, seq_k=7)
    torch.library.opcheck(FORWARD[kind], (*tensors, causal, 0.5, "chunked"))
    plain = [x.detach() for x in tensors]
    grad = torch.randn(2, 5, 3, 10, dtype=torch.float64)
    torch.library.opcheck(BACKWARD[kind], (grad, *plain, causal, 0.5, "chunked"))


@COMPILED
@BOTH
@pytest.mark.parametrize("implementation", ["auto", "chunked", "eager"])
def test_one_graph_and_changing_lengths(kind, implementation):
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=backend, fullgraph=True)
    def attend(*tensors):
        return FUNCTIONS[kind](*tensors, implementation=implementation)

    for seq in (300, 311, 322):
        tensors = operands(kind, seq_q=seq, batch=1, dtype=torch.float32)
        out = attend(*tensors)
        gradients = torch.autograd.grad(out.sum(), tensors)
        want = outputs_and_gradients(kind, tensors, implementation=implementation)
        assert_close([out.detach(), *gradients], want)
    # The first length, then one graph for every other.
    assert backend.frame_count == 2


@COMPILED
@BOTH
@pytest.mark.parametrize("implementation", ["chunked", "eager", "recurrent"])
def test_layouts_inside_a_compiled_function(kind, implementation):
    torch._dynamo.reset()
    fused = torch.randn(2, 3, 140, 5, 4).requires_grad_()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(fused):
        views = fused.transpose(1, 2)[:, 5:135].unbind(3)[: 5 if kind == "bilinear" else 3]
        return FUNCTIONS[kind](*views, implementation=implementation)

    out = attend(fused)
    grad = torch.randn(out.shape[::-1]).permute(3, 2, 1, 0)
    (gradient,) = torch.autograd.grad(out, fused, grad)
    packed = [x.contiguous() for x in fused.detach().transpose(1, 2)[:, 5:135].unbind(3)]
    packed = packed[: 5 if kind == "bilinear" else 3]
    want = outputs_and_gradients(kind, packed, grad, implementation=implementation)
    assert torch.equal(out, want[0])
    views = gradient.transpose(1, 2)[:, 5:135].unbind(3)
    assert_close(list(views[: len(packed)]), want[1:])


@COMPILED
@BOTH
def test_recurrent_compiles_into_one_graph_per_length(kind):
    tensors = operands(kind, seq_q=5, dtype=torch.float32)
    torch._dynamo.reset()
    attend = torch.compile(FUNCTIONS[kind], backend="eager", fullgraph=True)
    out = attend(*tensors, implementation="recurrent")
    assert_close(out, FUNCTIONS[kind](*tensors, implementation="recurrent"))


@BOTH
def test_flops_are_those_of_the_formula(kind):
    batch, n_head, seq, d_qk, d_v, n = 2, 3, 6, 4, 10, 2 if kind == "bilinear" else 1
    tensors = operands(kind, seq_q=seq, batch=batch, n_head=n_head, d_qk=d_qk, d_v=d_v)
    pairs = batch * n_head * seq * (seq + 1) // 2
    with FlopCounterMode(display=False) as counter:
        out = FUNCTIONS[kind](*tensors, implementation="chunked")
    assert counter.get_total_flops() == 2 * pairs * (n * d_qk + d_v)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * n * d_qk + 2 * d_v)


@pytest.mark.parametrize("seq_q, seq_k", [(5, 5), (3, 7), (7, 3), (0, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_pairs_are_counted_as_they_are_masked(seq_q, seq_k, causal):
    mask = torch.ones(seq_q, seq_k).tril(seq_k - seq_q) if causal else torch.ones(seq_q, seq_k)
    assert ops.causal_pairs(seq_q, seq_k, causal) == mask.sum()


@BOTH
def test_meta_tensors_have_the_shape_and_no_memory(kind):
    tensors = [x.to("meta") for x in operands(kind, seq_q=300)]
    out = FUNCTIONS[kind](*tensors)
    assert out.shape == (2, 300, 3, 10)
    assert out.device.type == "meta"


@BOTH
@pytest.mark.parametrize("view", VIEWS)
def test_layouts_of_results_do_not_follow_those_of_the_operands(kind, view):
    tensors = [VIEWS[view](x.detach()) for x in operands(kind, seq_q=7)]
    out, *gradients = outputs_and_gradients(kind, tensors, implementation="chunked")
    assert out.is_contiguous()
    assert all(x.transpose(1, 2).is_contiguous() for x in gradients)
    assert len({x.untyped_storage().data_ptr() for x in (out, *gradients)}) == 1 + len(tensors)


@BOTH
@pytest.mark.parametrize("causal", [True, False])
def test_second_derivatives_are_those_of_the_definition(kind, causal):
    tensors = operands(kind, seq_q=2, seq_k=3, batch=1, n_head=2, d_qk=2, d_v=1)
    assert torch.autograd.gradgradcheck(
        lambda *tensors: FUNCTIONS[kind](*tensors, causal=causal, implementation="chunked"), tensors
    )
    tensors[1].requires_grad_(False)
    seconds = []
    for implementation in ("chunked", "eager"):
        out = FUNCTIONS[kind](*tensors, implementation=implementation)
        (first,) = torch.autograd.grad(out.sin().sum(), tensors[0], create_graph=True)
        seconds.append(torch.autograd.grad(first.sin().sum(), (tensors[0], tensors[2])))
    assert_close(*seconds)


@pytest.mark.parametrize(
    "attend",
    [
        lambda x, v, how: squared_attention(x, x, v, implementation=how),
        lambda x, v, how: squared_attention(x, 2 * x, v, implementation=how),
        lambda x, v, how: bilinear_attention(x, x.sin(), x, 3 * x, v, implementation=how),
    ],
)
def test_operands_that_depend_on_each_other_are_not_counted_twice(attend):
    """``create_graph`` takes the gradient of the definition, once per operand and not along with what it came from."""
    x, _, v = operands("squared", seq_q=5)
    found = []
    for how in ("chunked", "eager"):
        (first,) = torch.autograd.grad(attend(x, v, how).sin().sum(), x, create_graph=True)
        found.append((first, *torch.autograd.grad(first.sin().sum(), (x, v))))
    assert_close(*found)


@BOTH
def test_transforms_take_eager_and_never_drop_a_tangent(kind):
    tensors = tuple(x.detach().float() for x in operands(kind, seq_q=300, batch=1))
    tangents = tuple(torch.randn_like(x) for x in tensors)

    def attend(implementation):
        return lambda *tensors: FUNCTIONS[kind](*tensors, implementation=implementation)

    _, tangent = torch.func.jvp(attend("auto"), tensors, tangents)
    _, want = torch.func.jvp(attend("eager"), tensors, tangents)
    assert torch.equal(tangent, want)
    assert want.norm() > 0
    for transform in (torch.vmap, lambda f: lambda *t: torch.func.jvp(f, t, t)):
        stacked = tuple(x[None] for x in tensors) if transform is torch.vmap else tensors
        with pytest.raises(ValueError, match=r'"chunked" cannot run inside torch.func .* use "eager"'):
            transform(attend("chunked"))(*stacked)


@COMPILED
@BOTH
def test_a_compiled_jvp_takes_eager(kind):
    tensors = tuple(x.detach().float() for x in operands(kind, seq_q=300, batch=1))
    torch._dynamo.reset()

    def tangent(*tensors):
        return torch.func.jvp(FUNCTIONS[kind], tensors, tensors)[1]

    want = tangent(*tensors)
    assert want.norm() > 0
    assert_close(torch.compile(tangent, backend="eager")(*tensors), want)


@BOTH
def test_deterministic_algorithms_are_accepted_and_repeat(kind):
    tensors = operands(kind, seq_q=300, dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (outputs_and_gradients(kind, tensors, implementation="chunked") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_two_ranks_and_compilation_average_their_gradients():
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ddp_worker"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
