"""The Triton kernels on the device they are for: precision, layouts, compilation, repeatability."""

import pytest
import torch

from tests.kernels.attention_cases import (
    FUNCTIONS,
    VIEWS,
    assert_contract,
    in_nan_buffer,
    misaligned,
    operands,
    outputs_and_gradients,
    random_grad,
)
from tests.limits import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOTH = pytest.mark.parametrize("kind", FUNCTIONS)
TRITON = {"implementation": "triton"}


def on_gpu(kind, **sizes):
    return [x.detach().cuda() for x in operands(kind, **sizes)]


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("d_qk, d_v", [(16, 16), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128), (48, 80)])
def test_error_contract_at_every_width(kind, dtype, d_qk, d_v):
    tensors = on_gpu(kind, seq_q=333, n_head=8, d_qk=d_qk, d_v=d_v, dtype=dtype)
    assert_contract(kind, tensors, random_grad(tensors), ["triton", "chunked"])


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seq", [1, 127, 128, 129, 1000, 1024, 4096])
def test_error_contract_at_every_length(kind, dtype, seq):
    tensors = on_gpu(kind, seq_q=seq, n_head=8, d_qk=64, d_v=64, dtype=dtype)
    guarded = [in_nan_buffer(x, rows=128) for x in (*tensors, random_grad(tensors))]
    assert_contract(kind, guarded[:-1], guarded[-1], ["triton"])


@BOTH
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq_q, seq_k", [(130, 300), (300, 130), (1, 257)])
def test_unequal_lengths(kind, causal, seq_q, seq_k):
    tensors = on_gpu(kind, seq_q=seq_q, seq_k=seq_k, d_qk=32, d_v=64, dtype=torch.float32)
    grad = random_grad(tensors)
    got = outputs_and_gradients(kind, tensors, grad, causal=causal, **TRITON)
    want = outputs_and_gradients(kind, tensors, grad, causal=causal, implementation="eager")
    assert_close(got, want)


@BOTH
@pytest.mark.parametrize("view", VIEWS)
def test_layout_changes_no_bit(kind, view):
    packed = on_gpu(kind, seq_q=130, d_qk=64, d_v=64, dtype=torch.bfloat16)
    grad = random_grad(packed)
    want = outputs_and_gradients(kind, packed, grad, **TRITON)
    got = outputs_and_gradients(kind, [VIEWS[view](x) for x in packed], grad.mT.contiguous().mT, **TRITON)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@BOTH
def test_a_misaligned_address_is_copied(kind):
    packed = on_gpu(kind, seq_q=130, d_qk=64, d_v=64, dtype=torch.bfloat16)
    grad = random_grad(packed)
    want = outputs_and_gradients(kind, packed, grad, **TRITON)
    got = outputs_and_gradients(kind, [misaligned(x) for x in packed], misaligned(grad), **TRITON)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@BOTH
def test_compiled_with_cuda_graphs(kind):
    compiled = torch.compile(FUNCTIONS[kind], fullgraph=True, mode="reduce-overhead")
    for seq in (128, 200, 128):
        tensors = [x.requires_grad_() for x in on_gpu(kind, seq_q=seq, d_qk=64, d_v=64, dtype=torch.bfloat16)]
        out = compiled(*tensors)
        gradients = torch.autograd.grad(out.sum(), tensors)
        want = outputs_and_gradients(kind, tensors, **TRITON)
        assert all(torch.equal(a, b) for a, b in zip((out.detach(), *gradients), want, strict=True))


@BOTH
def test_a_hundred_repeats_are_bit_equal(kind):
    tensors = on_gpu(kind, seq_q=1024, d_qk=64, d_v=64, dtype=torch.bfloat16)
    grad = random_grad(tensors)
    first = outputs_and_gradients(kind, tensors, grad, **TRITON)
    for _ in range(99):
        again = outputs_and_gradients(kind, tensors, grad, **TRITON)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
