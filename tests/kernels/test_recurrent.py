"""The decoding state: any split of a sequence gives the whole, and a saved past continues."""

import copy
import pickle

import pytest
import torch

from tests.kernels.attention_cases import FUNCTIONS, operands
from tests.limits import assert_close
from tnlm.kernels import State
from tnlm.kernels.recurrent import CHUNK

BOTH = pytest.mark.parametrize("kind", FUNCTIONS)
SIZES = {"batch": 2, "n_head": 3, "d_qk": 4, "d_v": 10}


def pieces(tensors, splits):
    """The operands cut along the sequence."""
    return zip(*(x.split(splits, dim=1) for x in tensors), strict=True)


@BOTH
@pytest.mark.parametrize(
    "splits", [[1] * 9, [CHUNK], [CHUNK - 1, 1, 1], [5, 0, 300, 1, 1], [CHUNK, CHUNK, 3 * CHUNK + 7]]
)
def test_any_split_gives_the_whole(kind, splits):
    tensors = operands(kind, seq_q=sum(splits))
    state = State(kind, **SIZES, dtype=torch.float64)
    out = torch.cat([state.attend(*piece) for piece in pieces(tensors, splits)], dim=1)
    assert_close(out, FUNCTIONS[kind](*tensors, implementation="eager"))
    assert state.seq == sum(splits)


@BOTH
def test_update_then_query_sees_every_key(kind):
    *factors, v = operands(kind, seq_q=5, seq_k=300)
    state = State(kind, **SIZES, dtype=torch.float64, scale=0.3)
    for *keys, values in pieces([*factors[1::2], v], [1, 299]):
        state.update(*keys, values)
    want = FUNCTIONS[kind](*factors, v, causal=False, scale=0.3, implementation="eager")
    assert_close(state.query(*factors[0::2]), want)
    assert state.seq == 300


@BOTH
@pytest.mark.parametrize("at", [3, 200])
def test_a_saved_state_continues_bit_equal(kind, at, tmp_path):
    tensors = operands(kind, seq_q=at + 131, dtype=torch.float32)
    before, after = pieces(tensors, [at, 131])
    state = State(kind, **SIZES)
    state.attend(*before)
    torch.save(state.state_dict(), tmp_path / "state.pt")
    want = state.attend(*after)
    resumed = State(kind, **SIZES)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(resumed.attend(*after), want)
    assert resumed.seq == at + 131


@BOTH
def test_a_copied_state_is_independent_and_continues_bit_equal(kind):
    tensors = [x.detach() for x in operands(kind, seq_q=300, dtype=torch.float32)]
    before, after = pieces(tensors, [200, 100])
    state = State(kind, **SIZES)
    state.attend(*before)
    copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    want = state.attend(*after)
    for other in copies:
        assert other.seq == 200
        assert torch.equal(other.attend(*after), want)


@BOTH
def test_a_float32_state_continues_in_float64(kind):
    tensors = [x.detach().float().double() for x in operands(kind, seq_q=300)]
    before, after = pieces(tensors, [200, 100])
    narrow, wide = State(kind, **SIZES), State(kind, **SIZES, dtype=torch.float64)
    narrow.update(*(x.float() for x in (*before[1:-1:2], before[-1])))
    wide.load_state_dict(narrow.state_dict())
    out = wide.attend(*after)
    assert out.dtype == torch.float64
    want = FUNCTIONS[kind](*tensors, implementation="eager")[:, 200:]
    assert_close(out, want, dtype=torch.float32)


MISFITS = {
    "a narrow query": ("d=4", lambda i, x, n: x[..., :3] if i == 0 else x),
    "narrow values": ("d=10", lambda i, x, n: x[..., :3] if i == n - 1 else x),
    "fewer keys": ("new=128", lambda i, x, n: x[:, :5] if i == 1 else x),
    "float64": (
        r"a state of torch.float32, got torch.float64; make the state with dtype=torch.float64",
        lambda i, x, n: x.double(),
    ),
    "a complex key": (
        r"a state of torch.float32, got torch.complex64",
        lambda i, x, n: x.to(torch.complex64) if i == 1 else x,
    ),
    "values elsewhere": (r"device of this state, cpu, got meta", lambda i, x, n: x.to("meta") if i == n - 1 else x),
}


@BOTH
@pytest.mark.user_error
@pytest.mark.parametrize("message, change", MISFITS.values(), ids=MISFITS)
def test_what_is_refused_leaves_the_state_as_it_was(kind, message, change):
    tensors = [x.detach() for x in operands(kind, seq_q=131, dtype=torch.float32)]
    before, after = pieces(tensors, [3, 128])
    state, untouched = State(kind, **SIZES), State(kind, **SIZES)
    state.attend(*before)
    untouched.attend(*before)
    with pytest.raises(ValueError, match=message):
        state.attend(*(change(i, x, len(after)) for i, x in enumerate(after)))
    assert torch.equal(state.attend(*after), untouched.attend(*after))
    assert state.seq == 131


@BOTH
@pytest.mark.user_error
def test_a_wider_past_is_refused(kind):
    state, wide = State(kind, **SIZES), State(kind, **SIZES, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"total must fit a state of torch.float32, got torch.float64"):
        state.load_state_dict(wide.state_dict())
    assert state.seq == 0


@BOTH
def test_continuations_of_one_prefix_do_not_touch_each_other(kind):
    tensors = operands(kind, seq_q=250)
    prefix, first, second = pieces(tensors, [120, 65, 65])
    state = State(kind, **SIZES, dtype=torch.float64)
    state.attend(*prefix)
    other = state.fork()
    state.attend(*first)
    out = other.attend(*second)
    joined = [torch.cat(pair, dim=1) for pair in zip(prefix, second, strict=True)]
    want = FUNCTIONS[kind](*joined, implementation="eager")[:, 120:]
    assert_close(out, want)
    assert (state.seq, other.seq) == (185, 185)


def test_squared_state_keeps_one_of_each_symmetric_pair():
    total = State("squared", **SIZES).state_dict()["total"]
    assert total.shape == (2, 3, 4 * 5 // 2, 10)
    assert State("bilinear", **SIZES).state_dict()["total"].shape == (2, 3, 16, 10)


@BOTH
def test_half_inputs_keep_a_float32_state(kind):
    # 2000 products of 1 and one of 2**-9: a bfloat16 running sum would stop at 256 and drop the last.
    k = torch.ones(1, 2000, 1, 1, dtype=torch.bfloat16)
    state = State(kind, batch=1, n_head=1, d_qk=1, d_v=1)
    factors = 2 if kind == "bilinear" else 1
    state.update(*[k] * factors, k)
    state.update(*[k[:, :1]] * factors, k[:, :1] * 2**-9)
    q = torch.ones(1, 1, 1, 1)
    assert state.query(*[q] * factors).item() == 2000 + 2**-9
    assert state.query(*[q.bfloat16()] * factors).dtype == torch.bfloat16


@BOTH
def test_autocast_does_not_round_the_state(kind):
    tensors = operands(kind, seq_q=300, dtype=torch.float32)
    plain, cast = State(kind, **SIZES), State(kind, **SIZES)
    want = plain.attend(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(cast.attend(*tensors), want)


Q, K, V = (torch.zeros(2, 3, 3, d) for d in (4, 4, 10))
PAST = State("bilinear", **SIZES).state_dict()


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda state: State("bilinear", **SIZES, dtype=torch.bfloat16), r"float32 or wider, got torch\.bfloat16"),
        (lambda state: State("softmax", **SIZES), r"kind must be .*, got 'softmax'"),
        (lambda state: state.attend(Q, K, V), "bilinear state takes 4 .* got 2"),
        (lambda state: state.update(K[:, :, :1], K, V), r"batch=2, new=3, n_head=3, d=4\), got \(2, 3, 1, 4\)"),
        (
            lambda state: State("squared", **SIZES).load_state_dict(PAST),
            r"a squared state holds \['k1', 'seq', 'total', 'v'\], got \['k1', 'k2'",
        ),
        (
            lambda state: state.load_state_dict(PAST | {"total": PAST["total"][:, :, :9]}),
            r"total must have shape \(2, 3, 16, 10\), got \(2, 3, 9, 10\)",
        ),
    ],
)
def test_errors_name_what_does_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call(State("bilinear", **SIZES))


@BOTH
def test_fewer_than_a_chunk_of_tokens_are_kept_as_they_are(kind):
    *factors, v = (x.detach() for x in operands(kind, seq_q=2 * CHUNK + 3, dtype=torch.float32))
    state = State(kind, **SIZES)
    for n, kept in ((CHUNK - 1, CHUNK - 1), (1, 0), (1, 1), (CHUNK, 0)):
        state.update(*(k[:, :n] for k in factors[1::2]), v[:, :n])
        assert state.state_dict()["v"].shape[1] == state.state_dict()["k1"].shape[1] == kept
