"""The Triton kernels under the interpreter: index arithmetic, masks and algebra, at sizes off every tile.

What it cannot show (registers, shared memory, races, tf32) is checked by ``tnlm.kernels.triton_compile`` and on a GPU.
"""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.kernels.attention_cases import (
    FUNCTIONS,
    LENGTHS,
    VIEWS,
    assert_contract,
    in_nan_buffer,
    misaligned,
    operands,
    outputs_and_gradients,
    random_grad,
)
from tests.limits import assert_close
from tnlm.kernels import ops, tiles, triton_launch

BOTH = pytest.mark.parametrize("kind", FUNCTIONS)
TRITON = {"implementation": "triton"}


def guarded(tensors):
    """Rows past the end, and the heads beside, are NaN: a tile that reads them unmasked cannot hide it."""
    return [in_nan_buffer(x, rows=128) for x in tensors]


def assert_equals_eager(kind, tensors, **options):
    grad = random_grad(tensors)
    (padded,) = guarded([grad])
    got = outputs_and_gradients(kind, guarded(tensors), padded, **TRITON, **options)
    want = outputs_and_gradients(kind, tensors, grad, implementation="eager", **options)
    for a, b in zip(got, want, strict=True):
        assert a.is_contiguous()
        assert_close((a - b).norm(), torch.tensor(0.0), scale=b.norm(), roundings=64)


@pytest.fixture
def other_tiles(monkeypatch, request):
    """Tiles other than the shipped ones: small, so that few positions cross many, or large, to be fast."""
    tile = tiles.Tile(*request.param, num_warps=4, num_stages=1)
    row = tiles.Row(tile, tile, tile)
    lookup = tiles.lookup
    monkeypatch.setattr(tiles, "lookup", lambda *args: (row, lookup(*args)[1]))


def assert_the_contract(kind, seq, dtype, d_qk, d_v):
    tensors = operands(kind, seq_q=seq, batch=2, n_head=8, d_qk=d_qk, d_v=d_v, dtype=dtype)
    *tensors, grad = guarded([*tensors, random_grad(tensors)])
    assert_contract(kind, tensors, grad, ["triton"])


@BOTH
@pytest.mark.parametrize("seq", LENGTHS[:-1])
def test_error_contract_in_float32(kind, seq, nan_memory):
    assert_the_contract(kind, seq, torch.float32, 16, 16)


@BOTH
@pytest.mark.parametrize("seq", LENGTHS[:-1])
def test_error_contract_in_float16(kind, seq, nan_memory):
    assert_the_contract(kind, seq, torch.float16, 16, 16)


@BOTH
@pytest.mark.parametrize("seq", LENGTHS[:-1])
def test_error_contract_in_bfloat16(kind, seq, nan_memory, exact_bfloat16):
    assert_the_contract(kind, seq, torch.bfloat16, 32, 64)


@BOTH
@pytest.mark.parametrize("d_qk, d_v", [*tiles.WIDTHS[1:], (10, 24), (80, 128)])
def test_every_pair_of_widths(kind, d_qk, d_v, nan_memory):
    tensors = operands(kind, seq_q=130, batch=1, n_head=2, d_qk=d_qk, d_v=d_v, dtype=torch.float32)
    assert_equals_eager(kind, tensors)


@BOTH
@pytest.mark.parametrize("other_tiles", [(128, 128)], indirect=True, ids=["128x128"])
def test_a_thousand_tokens(kind, other_tiles, nan_memory):
    tensors = operands(kind, seq_q=LENGTHS[-1], batch=1, n_head=1, d_qk=16, d_v=16, dtype=torch.float32)
    assert_equals_eager(kind, tensors)


@BOTH
@pytest.mark.parametrize("other_tiles", [(16, 32), (32, 16)], indirect=True)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq_q, seq_k", [(65, 65), (20, 51), (51, 20), (1, 40), (33, 1), (32, 64)])
def test_unequal_lengths_over_many_tiles(kind, other_tiles, causal, seq_q, seq_k, nan_memory):
    tensors = operands(kind, seq_q=seq_q, seq_k=seq_k, batch=1, d_qk=16, d_v=16, n_head=2, dtype=torch.float32)
    assert_equals_eager(kind, tensors, causal=causal, scale=0.3)


@pytest.mark.parametrize("other_tiles", [(16, 32), (32, 16)], indirect=True)
@pytest.mark.parametrize("seq_q, seq_k", [(20, 34), (34, 64), (34, 33), (34, 51)])
def test_a_diagonal_that_leaves_one_query_or_key_of_a_tile_apart(other_tiles, seq_q, seq_k, nan_memory):
    """``seq_k - seq_q`` of -2, -1 and 1 modulo the shorter side of a tile: which tiles need the mask is off by one."""
    tensors = operands("squared", seq_q=seq_q, seq_k=seq_k, batch=1, d_qk=16, d_v=16, n_head=1, dtype=torch.float32)
    assert_equals_eager("squared", tensors)


@BOTH
@pytest.mark.parametrize("view", VIEWS)
def test_layout_changes_no_bit(kind, view):
    packed = [x.detach() for x in operands(kind, seq_q=33, batch=1, d_qk=16, d_v=16, dtype=torch.float32)]
    grad = random_grad(packed)
    want = outputs_and_gradients(kind, packed, grad, **TRITON)
    got = outputs_and_gradients(kind, [VIEWS[view](x) for x in packed], grad.mT.contiguous().mT, **TRITON)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_a_misaligned_address_is_copied():
    packed = [x.detach() for x in operands("squared", seq_q=5, d_qk=16, d_v=16, dtype=torch.float16)]
    shifted = [misaligned(x) for x in packed]
    assert torch.equal(FUNCTIONS["squared"](*shifted, **TRITON), FUNCTIONS["squared"](*packed, **TRITON))
    (ready,) = triton_launch._ready([shifted[0]], 16)
    assert ready.data_ptr() % 16 == 0


def test_row_offsets_that_int32_cannot_hold_are_copied_or_refused(monkeypatch):
    packed = [x.detach() for x in operands("squared", seq_q=5, n_head=2, d_qk=16, d_v=16, dtype=torch.float32)]
    far = [torch.cat([x] * 4, dim=2)[:, :, :2] for x in packed]
    want = FUNCTIONS["squared"](*packed, **TRITON)
    assert triton_launch._ready(far, 16) == far
    monkeypatch.setattr(triton_launch, "INT32_LIMIT", 5 * 2 * 16 + 1)
    assert all(x.is_contiguous() for x in triton_launch._ready(far, 16))
    assert torch.equal(FUNCTIONS["squared"](*far, **TRITON), want)
    monkeypatch.setattr(triton_launch, "INT32_LIMIT", 5 * 2 * 16)
    with pytest.raises(ValueError, match=r'below 160, got seq=5, n_head=2, width=16; use "chunked"'):
        FUNCTIONS["squared"](*packed, **TRITON)


@BOTH
@pytest.mark.parametrize("other_tiles", [(16, 32)], indirect=True)
def test_degree_in_each_operand(kind, other_tiles):
    tensors = [x.detach() for x in operands(kind, seq_q=35, batch=1, d_qk=16, d_v=16, dtype=torch.float32)]
    out = FUNCTIONS[kind](*tensors, **TRITON)
    for i in range(len(tensors)):
        scaled = [x * -2 if i == j else x for j, x in enumerate(tensors)]
        # A power of two is exact in every rounding.
        assert torch.equal(FUNCTIONS[kind](*scaled, **TRITON), out * (4 if kind == "squared" and i < 2 else -2))


@pytest.mark.parametrize("other_tiles", [(16, 32)], indirect=True)
def test_symmetry_of_the_factors_and_squared_as_bilinear(other_tiles):
    q1, k1, q2, k2, v = operands("bilinear", seq_q=35, batch=1, d_qk=16, d_v=16, dtype=torch.float32)
    grad = random_grad([q1, v])
    out, dq1, dk1, dq2, dk2, dv = outputs_and_gradients("bilinear", [q1, k1, q2, k2, v], grad, **TRITON)
    swapped = outputs_and_gradients("bilinear", [q2, k2, q1, k1, v], grad, **TRITON)
    assert_close(swapped, [out, dq2, dk2, dq1, dk1, dv])
    squared = outputs_and_gradients("squared", [q1, k1, v], grad, **TRITON)
    out, dq1, dk1, dq2, dk2, dv = outputs_and_gradients("bilinear", [q1, k1, q1, k1, v], grad, **TRITON)
    assert_close(squared, [out, dq1 + dq2, dk1 + dk2, dv])


@BOTH
@pytest.mark.parametrize("other_tiles", [(16, 32)], indirect=True)
def test_a_prefix_gives_the_prefix_of_the_output(kind, other_tiles):
    tensors = [x.detach() for x in operands(kind, seq_q=50, batch=1, d_qk=16, d_v=16, dtype=torch.float32)]
    out = FUNCTIONS[kind](*tensors, **TRITON)
    for t in (1, 17, 33):
        assert torch.equal(FUNCTIONS[kind](*(x[:, :t] for x in tensors), **TRITON), out[:, :t])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_scores_are_summed_in_float32(kind, dtype, exact_bfloat16):
    q = k = 4 * torch.ones(1, 1, 1, 64, dtype=dtype)  # one score of 1024
    v = torch.ones(1, 1, 1, 1, dtype=dtype)
    tensors = [q, k] * (2 if kind == "bilinear" else 1) + [v]
    half = dtype == torch.float16
    assert FUNCTIONS[kind](*tensors, **TRITON).item() == 1024**2 / 64**2
    with np.errstate(over="ignore", invalid="ignore"):
        assert FUNCTIONS[kind](*tensors, scale=1.0, **TRITON).item() == (torch.inf if half else 1024**2)
    q = k = torch.full((1, 1024, 1, 2), 10.0, dtype=dtype)  # 1024 scores of 200
    tensors = [q[:, :1], k] * (2 if kind == "bilinear" else 1) + [torch.ones(1, 1024, 1, 1, dtype=dtype)]
    with np.errstate(over="ignore", invalid="ignore"):
        out = FUNCTIONS[kind](*tensors, scale=1.0, **TRITON)
    assert out.item() == (torch.inf if half else torch.tensor(40_960_000.0).to(dtype).item())


@BOTH
@pytest.mark.parametrize("other_tiles", [(16, 32)], indirect=True)
def test_a_key_of_nan_reaches_only_those_who_see_it(kind, other_tiles):
    tensors = [x.detach() for x in operands(kind, seq_q=50, batch=1, d_qk=16, d_v=16, dtype=torch.float32)]
    before = FUNCTIONS[kind](*tensors, **TRITON)
    for k in tensors[1:-1:2]:
        k[:, 40] = torch.nan
    after = FUNCTIONS[kind](*tensors, **TRITON)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not after[:, 40:].isfinite().any()


@BOTH
@pytest.mark.parametrize("other_tiles", [(16, 32)], indirect=True)
def test_causality_is_bit_exact(kind, other_tiles):
    tensors = [x.detach() for x in operands(kind, seq_q=50, d_qk=16, d_v=16, dtype=torch.float32)]
    before = FUNCTIONS[kind](*tensors, **TRITON)
    for x in tensors:
        x[:, 40] += 1
    after = FUNCTIONS[kind](*tensors, **TRITON)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40], after[:, 40])


@BOTH
@pytest.mark.parametrize("shape", [{"seq_q": 0}, {"seq_q": 3, "seq_k": 0}, {"seq_q": 5, "batch": 0}])
def test_empty_inputs_launch_nothing(kind, shape):
    tensors = operands(kind, **shape, dtype=torch.float32)
    out, *gradients = outputs_and_gradients(kind, tensors, **TRITON)
    assert out.shape == (*tensors[0].shape[:3], 10)
    assert [g.shape for g in gradients] == [x.shape for x in tensors]
    assert not any(x.count_nonzero() for x in (out, *gradients))


@pytest.mark.parametrize(
    "kind, forward, backward",
    [("bilinear", ops.bilinear_fwd, ops.bilinear_bwd), ("squared", ops.squared_fwd, ops.squared_bwd)],
)
def test_opcheck(kind, forward, backward):
    tensors = operands(kind, seq_q=5, seq_k=7, batch=1, dtype=torch.float32)
    torch.library.opcheck(forward, (*tensors, True, 0.5, "triton"))
    plain = [x.detach() for x in tensors]
    torch.library.opcheck(backward, (random_grad(plain), *plain, True, 0.5, "triton"))


@BOTH
def test_one_graph_and_changing_lengths(kind):
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    attend = torch.compile(FUNCTIONS[kind], backend=backend, fullgraph=True)
    for seq in (5, 7, 9):
        tensors = operands(kind, seq_q=seq, batch=1, dtype=torch.float32)
        out = attend(*tensors, **TRITON)
        gradients = torch.autograd.grad(out.sum(), tensors)
        assert all(map(torch.equal, (out, *gradients), outputs_and_gradients(kind, tensors, **TRITON)))
    assert backend.frame_count == 2


@BOTH
def test_autocast_determinism_and_double_backward(kind):
    tensors = operands(kind, seq_q=5, d_qk=16, d_v=16, dtype=torch.float32)
    halves = [x.half() for x in tensors]
    with torch.autocast("cpu", dtype=torch.float16):
        cast = FUNCTIONS[kind](*tensors[:-1], halves[-1], **TRITON)
    assert torch.equal(cast, FUNCTIONS[kind](*halves, **TRITON))
    want = outputs_and_gradients(kind, tensors, **TRITON)
    torch.use_deterministic_algorithms(True)
    try:
        assert all(map(torch.equal, outputs_and_gradients(kind, tensors, **TRITON), want))
    finally:
        torch.use_deterministic_algorithms(False)
    seconds = []
    for options in (TRITON, {"implementation": "eager"}):
        out = FUNCTIONS[kind](*tensors, **options)
        (first,) = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
        seconds.append(torch.autograd.grad(first.sum(), tensors[1])[0])
    assert_close(*seconds)


@pytest.mark.user_error
def test_float64_is_refused_by_name():
    with pytest.raises(ValueError, match=r'"triton" needs float32, .* got torch.float64; use "eager"'):
        FUNCTIONS["squared"](*operands("squared", seq_q=3), **TRITON)
