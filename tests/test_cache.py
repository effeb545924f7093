"""What is kept between forwards gives the logits of the full forward, however the tokens arrive."""

import pytest
import torch

from tests.limits import assert_close
from tests.tiny_models import ATTENTIONS, build, ids, tiny
from tnlm.cache import Cache, LayerCache, position_numbers, state_numbers
from tnlm.points import intervene

CUTS = [[1] * 17, [5] + [1] * 12, [17], [8, 9], [2, 3, 12], [0, 5, 0, 12]]
MODES = [(kind, False) for kind in ATTENTIONS] + [("bilinear", True), ("squared", True)]


def in_pieces(model, tokens, cuts, *, recurrent):
    cache, out = Cache(model.config, recurrent=recurrent), []
    for piece in tokens.split(cuts, dim=1):
        out.append(model(piece, cache=cache))
    assert cache.length == tokens.shape[1]
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("kind, recurrent", MODES)
def test_pieces_equal_the_full_forward(kind, recurrent, cuts):
    tokens = ids(2, 17)
    with torch.no_grad():
        for dtype in (torch.float64, torch.float32):
            model = build(tiny(attention=kind), dtype=dtype)
            out = in_pieces(model, tokens, cuts, recurrent=recurrent)
            assert_close(out, model(tokens))


@pytest.mark.parametrize("recurrent", [False, True])
def test_long_decoding_in_bfloat16(recurrent):
    model, tokens = build(tiny(n_ctx=300, n_layer=2), dtype=torch.bfloat16), ids(1, 300)
    with torch.no_grad():
        out = in_pieces(model, tokens, [150] + [1] * 150, recurrent=recurrent)
        assert (out - model(tokens)).float().norm() < 0.02 * model(tokens).float().norm()


def test_storage_doubles_and_keeps_what_it_holds():
    cache, pieces = LayerCache(), [torch.randn(2, n, 3, 4) for n in (3, 1, 1, 1, 5)]
    sizes = []
    for piece in pieces:
        (held,) = cache.extend([piece])
        sizes.append(cache._storage[0].shape[1])
    assert torch.equal(held, torch.cat(pieces, dim=1))
    assert sizes == [3, 6, 6, 6, 12]


def test_points_fire_on_the_new_positions():
    model, tokens, cache, seen = build(tiny()), ids(2, 6), Cache(tiny()), []
    with torch.no_grad(), intervene(model, {"blocks.1.attn.hook_pattern": lambda p: seen.append(tuple(p.shape))}):
        model(tokens[:, :4], cache=cache)
        model(tokens[:, 4:], cache=cache)
    assert seen == [(2, 3, 4, 4), (2, 3, 2, 6)]


@pytest.mark.user_error
@pytest.mark.parametrize("kind", ["softmax", "differential", "squared_normalized"])
def test_kinds_without_a_state_are_refused(kind):
    with pytest.raises(ValueError, match=f"a recurrent state needs attention in .*got '{kind}'"):
        Cache(tiny(attention=kind), recurrent=True)


@pytest.mark.user_error
def test_a_state_refuses_to_leave_a_listened_pattern_out():
    model = build(tiny())
    with (
        intervene(model, {"blocks.1.attn.hook_pattern": lambda p: None}),
        pytest.raises(ValueError, match="a recurrent state forms no pattern"),
    ):
        model(ids(2, 5), cache=Cache(tiny(), recurrent=True))


@pytest.mark.user_error
def test_the_context_counts_what_the_cache_has_seen():
    model, cache = build(tiny()), Cache(tiny())
    with torch.no_grad():
        model(ids(1, 15), cache=cache)
        with pytest.raises(ValueError, match="at most n_ctx=17 tokens, got 18"):
            model(ids(1, 3), cache=cache)


@pytest.mark.user_error
@pytest.mark.parametrize("recurrent, message", [(False, "holds 2 rows, got 1"), (True, "batch=2")])
def test_a_cache_serves_one_batch(recurrent, message):
    model, cache, tokens = build(tiny()), Cache(tiny(), recurrent=recurrent), ids(2, 6)
    with torch.no_grad():
        # storage of 8 after two calls: the row would fit, and be copied into both
        first = [model(tokens[:, :4], cache=cache), model(tokens[:, 4:5], cache=cache)]
        with pytest.raises(ValueError, match=message):
            model(tokens[:1, 5:], cache=cache)
        last = model(tokens[:, 5:], cache=cache)
    assert_close(torch.cat([*first, last], dim=1), model(tokens))


@pytest.mark.parametrize("kind", ["bilinear", "squared"])
def test_the_stated_sizes_are_those_held(kind):
    config = tiny(attention=kind)
    model = build(config)
    with torch.no_grad():
        kept, state = Cache(config), Cache(config, recurrent=True)
        model(ids(2, 5), cache=kept)
        model(ids(2, 5), cache=state)
    assert sum(t.numel() for t in kept.layers[0]._storage) == 2 * 5 * position_numbers(config)
    assert state.layers[0]._state.state_dict()["total"].numel() == 2 * state_numbers(config)
