"""What every implementation owes: small errors at all lengths, properties of the formula, any memory layout."""

import logging
import multiprocessing
import os
import threading
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.kernels.attention_cases import (
    FUNCTIONS,
    LENGTHS,
    VIEWS,
    assert_contract,
    in_nan_buffer,
    operands,
    outputs_and_gradients,
    random_grad,
)
from tests.limits import assert_close
from tnlm.kernels import chunked

IMPLEMENTATIONS = ("eager", "chunked", "recurrent")
BOTH = pytest.mark.parametrize("kind", FUNCTIONS)
EACH = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@BOTH
@pytest.mark.parametrize("seq", LENGTHS)
@pytest.mark.parametrize("d_qk, d_v", [(8, 24), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_error_contract(kind, seq, dtype, d_qk, d_v, nan_memory):
    tensors = operands(kind, seq_q=seq, n_head=8, d_qk=d_qk, d_v=d_v, dtype=dtype)
    guarded = [in_nan_buffer(x) for x in (*tensors, random_grad(tensors))]
    assert_contract(kind, guarded[:-1], guarded[-1], IMPLEMENTATIONS)


@BOTH
@EACH
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "seq_q, seq_k", [(127, 127), (128, 128), (129, 129), (391, 391), (1, 300), (200, 301), (301, 140), (3, 0)]
)
def test_float64_equals_eager(kind, implementation, causal, seq_q, seq_k, nan_memory):
    tensors = operands(kind, seq_q=seq_q, seq_k=seq_k, batch=1)
    grad = torch.randn(1, seq_q, 3, 10, dtype=torch.float64)
    options = {"causal": causal, "scale": 0.1}
    got = outputs_and_gradients(kind, tensors, grad, implementation=implementation, **options)
    want = outputs_and_gradients(kind, tensors, grad, implementation="eager", **options)
    assert_close(got, want)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)), 0)
        return out


@BOTH
def test_chunked_forms_no_square_of_the_length(kind):
    seq = 16 * chunked.CHUNK
    tensors = [x.detach() for x in operands(kind, seq_q=seq, batch=1, n_head=1, dtype=torch.float32)]
    forward, backward = (getattr(chunked, f"{kind}_{way}") for way in ("forward", "backward"))
    with Largest() as largest:
        grad = forward(*tensors, True, 1.0)
        backward(grad, *tensors, True, 1.0)
    assert largest.numel == chunked.CHUNK * seq


def test_chunked_in_several_groups_of_heads(monkeypatch):
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cpu", 128 * 130 * 2)
    for kind in FUNCTIONS:
        tensors = operands(kind, seq_q=130, batch=1, n_head=5)
        got = outputs_and_gradients(kind, tensors, implementation="chunked")
        want = outputs_and_gradients(kind, tensors, implementation="eager")
        assert_close(got, want)


@pytest.fixture
def threads():
    """Sets the number of threads, and puts back what it was."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@BOTH
@pytest.mark.parametrize("batch, n_head", [(1, 5), (3, 2), (1, 1)])
def test_chunked_on_several_threads(kind, batch, n_head, threads):
    """Shares of the batch, of the heads, and fewer heads than threads; the caller's number of threads stays."""
    tensors = operands(kind, seq_q=150, batch=batch, n_head=n_head, d_qk=16, d_v=24, dtype=torch.float32)
    threads(3)
    assert_contract(kind, tensors, random_grad(tensors), ["chunked"])
    assert torch.get_num_threads() == 3
    with torch.inference_mode():
        x = [t.clone() for t in tensors]
        torch.testing.assert_close(
            FUNCTIONS[kind](*x, implementation="chunked"), FUNCTIONS[kind](*tensors, implementation="chunked").detach()
        )


@pytest.mark.parametrize("n", [1, 2, 4])
def test_chunked_waits_for_threads_once(n, threads, monkeypatch):
    """No product of a share is itself parallel: each would wait for the slowest thread of a busy machine."""
    seen = set()
    product = torch.bmm

    def bmm(*args, **kwargs):
        seen.add((threading.get_ident(), torch.get_num_threads()))
        return product(*args, **kwargs)

    threads(n)
    tensors = operands("bilinear", seq_q=130, batch=1, n_head=9, d_qk=16, d_v=24, dtype=torch.float32)
    monkeypatch.setattr(torch, "bmm", bmm)
    FUNCTIONS["bilinear"](*(t.detach() for t in tensors), implementation="chunked")
    assert {used for _, used in seen} == {1}
    assert (threading.get_ident() in {thread for thread, _ in seen}) == (n == 1)


def test_chunked_threads_survive_a_fork(threads):
    """A forked process has none of the threads of its parent, and must not wait for them."""
    threads(2)
    x = operands("squared", seq_q=130, batch=1, n_head=4, d_qk=16, d_v=16, dtype=torch.float32)
    x = [t.detach() for t in x]
    FUNCTIONS["squared"](*x, implementation="chunked")
    process = multiprocessing.get_context("fork").Process(
        target=lambda: FUNCTIONS["squared"](*x, implementation="chunked")
    )
    with warnings.catch_warnings():
        # Python 3.12 and later warn of what is tested here
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0


@BOTH
@EACH
@pytest.mark.parametrize("shape", [{"seq_q": 0}, {"seq_q": 0, "seq_k": 3}, {"seq_q": 5, "batch": 0}])
def test_empty_inputs_give_empty_outputs(kind, implementation, shape):
    tensors = operands(kind, **shape)
    out, *gradients = outputs_and_gradients(kind, tensors, implementation=implementation)
    assert out.shape == (*tensors[0].shape[:3], 10)
    assert [g.shape for g in gradients] == [x.shape for x in tensors]
    assert not any(g.count_nonzero() for g in gradients)


@BOTH
@EACH
def test_degree_in_each_operand(kind, implementation):
    tensors = operands(kind, seq_q=131)
    out = FUNCTIONS[kind](*tensors, implementation=implementation)
    for i in range(len(tensors)):
        scaled = [x * -3 if i == j else x for j, x in enumerate(tensors)]
        degree = 2 if kind == "squared" and i < 2 else 1
        assert_close(FUNCTIONS[kind](*scaled, implementation=implementation), (-3) ** degree * out)


@EACH
def test_the_two_factors_commute(implementation):
    q1, k1, q2, k2, v = operands("bilinear", seq_q=131)
    attend = FUNCTIONS["bilinear"]
    assert_close(
        attend(q1, k1, q2, k2, v, implementation=implementation),
        attend(q2, k2, q1, k1, v, implementation=implementation),
    )


@EACH
def test_squared_is_bilinear_of_equal_factors(implementation):
    q, k, v = operands("squared", seq_q=131)
    out, dq, dk, dv = outputs_and_gradients("squared", [q, k, v], implementation=implementation)
    same, dq1, dk1, dq2, dk2, dv_ = outputs_and_gradients("bilinear", [q, k, q, k, v], implementation=implementation)
    assert_close([out, dq, dk, dv], [same, dq1 + dq2, dk1 + dk2, dv_])


@BOTH
@EACH
@pytest.mark.parametrize("at", [0, 1, 64, 130])
def test_causality_is_bit_exact(kind, implementation, at):
    tensors = [x.detach() for x in operands(kind, seq_q=131, dtype=torch.float32)]
    before = FUNCTIONS[kind](*tensors, implementation=implementation)
    for x in tensors:
        x[:, at] += 1
    after = FUNCTIONS[kind](*tensors, implementation=implementation)
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at], after[:, at])


@BOTH
@EACH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [1, 64, 130])
def test_a_key_that_is_not_finite_reaches_only_those_who_see_it(kind, implementation, bad, at):
    tensors = [x.detach() for x in operands(kind, seq_q=131, dtype=torch.float32)]
    before = FUNCTIONS[kind](*tensors, implementation=implementation)
    for k in tensors[1:-1:2]:
        k[:, at] = bad
    after = FUNCTIONS[kind](*tensors, implementation=implementation)
    assert torch.equal(before[:, :at], after[:, :at])
    assert not after[:, at:].isfinite().any()


@BOTH
@EACH
def test_a_prefix_gives_the_prefix_of_the_output(kind, implementation):
    tensors = operands(kind, seq_q=200)
    out = FUNCTIONS[kind](*tensors, implementation=implementation)
    for t in (1, 127, 129):
        prefix = FUNCTIONS[kind](*(x[:, :t] for x in tensors), implementation=implementation)
        assert_close(prefix, out[:, :t])


@BOTH
@EACH
@pytest.mark.parametrize("view", VIEWS)
def test_layout_changes_nothing_but_rounding(kind, implementation, view):
    """Libraries of matrix products may take another order of sums for another layout, on some CPUs."""
    packed = [x.detach() for x in operands(kind, seq_q=130, d_v=12, dtype=torch.float32)]
    views = [VIEWS[view](x) for x in packed]
    grad = torch.randn(2, 130, 3, 12)
    strided_grad = grad.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    want = outputs_and_gradients(kind, packed, grad, implementation=implementation)
    got = outputs_and_gradients(kind, views, strided_grad, implementation=implementation)
    assert_close(got, want)


@BOTH
@EACH
@pytest.mark.parametrize("axis", range(4))
def test_an_expanded_axis_is_a_repeated_one(kind, implementation, axis):
    packed = [x.detach() for x in operands(kind, seq_q=130, batch=2, d_v=4, dtype=torch.float32)]
    expanded = [x.narrow(axis, 0, 1).expand_as(x) for x in packed]
    grad = torch.ones(()).expand(expanded[-1].shape)
    want = outputs_and_gradients(
        kind, [x.contiguous() for x in expanded], grad.contiguous(), implementation=implementation
    )
    got = outputs_and_gradients(kind, expanded, grad, implementation=implementation)
    assert all(map(torch.equal, got, want))
    assert got[0].is_contiguous()


@BOTH
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_are_summed_in_float32(kind, implementation, dtype):
    q = k = 4 * torch.ones(1, 1, 1, 64, dtype=dtype)  # one score of 1024
    v = torch.ones(1, 1, 1, 1, dtype=dtype)
    tensors = [q, k] * (2 if kind == "bilinear" else 1) + [v]
    out = FUNCTIONS[kind](*tensors, scale=1.0, implementation=implementation)
    assert out.item() == 1024**2
    assert FUNCTIONS[kind](*tensors, implementation=implementation).item() == 1024**2 / 64**2

    q = k = torch.full((1, 1024, 1, 2), 10.0, dtype=dtype)  # 1024 scores of 200
    tensors = [q[:, :1], k] * (2 if kind == "bilinear" else 1) + [torch.ones(1, 1024, 1, 1, dtype=dtype)]
    out = FUNCTIONS[kind](*tensors, scale=1.0, implementation=implementation)
    assert out.item() == torch.tensor(40_960_000.0).to(dtype).item()


@BOTH
@EACH
@pytest.mark.user_error
def test_float16_overflow_raises_on_a_cpu(kind, implementation):
    q = k = 4 * torch.ones(1, 1, 1, 64, dtype=torch.float16)
    tensors = [q, k] * (2 if kind == "bilinear" else 1) + [torch.ones(1, 1, 1, 1, dtype=torch.float16)]
    with pytest.raises(ValueError, match=r"must fit float16 .* got 1\.04858e\+06.* use bfloat16"):
        FUNCTIONS[kind](*tensors, scale=1.0, implementation=implementation)
    assert FUNCTIONS[kind](*tensors, implementation=implementation).item() == 256


def test_an_interrupt_while_threads_start_leaves_none_waiting(monkeypatch):
    """Threads that wait for a start which never comes would keep the process from ending."""

    class Interrupted(threading.Barrier):
        def wait(self, timeout=None):
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return super().wait(timeout)

    before = set(threading.enumerate())
    monkeypatch.setattr(chunked.threading, "Barrier", Interrupted)
    monkeypatch.setattr(logging.getLogger("concurrent.futures"), "disabled", True)  # it reports the broken start
    with pytest.raises(KeyboardInterrupt):
        chunked._pool.__wrapped__(os.getpid(), 3)
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(20)
    assert not any(thread.is_alive() for thread in started)
