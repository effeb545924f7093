"""The Triton kernels under the interpreter: index arithmetic, masks and algebra, at sizes off every tile.

What it cannot show (registers, shared memory, races, tf32) is checked by ``tnlm.kernels.triton_compile`` and on a GPU.
"""

import pytest
import torch

from tests.kernels.attention_cases import (
    FUNCTIONS,
    LENGTHS,
    VIEWS,
    assert_contract,
    in_nan_buffer,
    operands,
    outputs_and_gradients,
)
from tnlm.kernels import tiles

BOTH = pytest.mark.parametrize("kind", FUNCTIONS)
TRITON = {"implementation": "triton"}


def guarded(tensors):
    """Rows past the end, and the heads beside, are NaN: a tile that reads them unmasked cannot hide it."""
    return [in_nan_buffer(x, rows=128) for x in tensors]


def random_grad(tensors):
    q, v = tensors[0], tensors[-1]
    return torch.randn(*q.shape[:3], v.shape[3]).to(v.dtype)


def assert_equals_eager(kind, tensors, **options):
    grad = random_grad(tensors)
    (padded,) = guarded([grad])
    got = outputs_and_gradients(kind, guarded(tensors), padded, **TRITON, **options)
    want = outputs_and_gradients(kind, tensors, grad, implementation="eager", **options)
    for a, b in zip(got, want, strict=True):
        assert a.is_contiguous()
        assert (a - b).norm() <= 2e-6 * b.norm()


@pytest.fixture
def other_tiles(monkeypatch, request):
    """Tiles other than the shipped ones: small, so that few positions cross many, or large, to be fast."""
    tile = tiles.Tile(*request.param, num_warps=4, num_stages=1)
    row = tiles.Row(tile, tile, tile)
    lookup = tiles.lookup
    monkeypatch.setattr(tiles, "lookup", lambda *args: (row, lookup(*args)[1]))


@BOTH
@pytest.mark.parametrize("seq", LENGTHS[:-1])
def test_error_contract_in_float32(kind, seq, nan_memory):
    tensors = operands(kind, seq_q=seq, batch=2, n_head=8, d_qk=16, d_v=16, dtype=torch.float32)
    (grad,) = guarded([random_grad(tensors)])
    assert_contract(kind, guarded(tensors), ["triton"], grad)


@BOTH
@pytest.mark.parametrize("seq", [1, 17, 130])
def test_error_contract_in_float16(kind, seq, nan_memory):
    tensors = operands(kind, seq_q=seq, batch=2, n_head=8, d_qk=16, d_v=16, dtype=torch.float16)
    assert_contract(kind, guarded(tensors), ["triton"])


@BOTH
@pytest.mark.parametrize("seq", [1, 17, 65, 130])
def test_error_contract_in_bfloat16(kind, seq, nan_memory, exact_bfloat16):
    tensors = operands(kind, seq_q=seq, batch=2, n_head=8, d_qk=16, d_v=16, dtype=torch.bfloat16)
    assert_contract(kind, guarded(tensors), ["triton"])


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
    shifted = []
    for x in packed:
        buffer = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype)
        shifted.append(buffer[1:].view_as(x).copy_(x))
    assert shifted[0].data_ptr() % 16
    assert torch.equal(FUNCTIONS["squared"](*shifted, **TRITON), FUNCTIONS["squared"](*packed, **TRITON))


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


def test_opcheck():
    tensors = operands("bilinear", seq_q=5, seq_k=7, dtype=torch.float32)
    torch.library.opcheck(torch.ops.tnlm.bilinear_attn_fwd.default, (*tensors, True, 0.5, "triton"))


@pytest.mark.user_error
def test_float64_is_refused_by_name():
    with pytest.raises(ValueError, match=r'"triton" needs float32, .* got torch.float64; use "eager"'):
        FUNCTIONS["squared"](*operands("squared", seq_q=3), **TRITON)
