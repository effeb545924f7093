"""What is kept between forwards gives the logits of the full forward, however the tokens arrive."""

import copy
import io
import pickle

import pytest
import torch

from tests.limits import assert_close
from tests.tiny_models import ATTENTIONS, build, ids, tiny
from tnlm.cache import Cache, LayerCache, position_numbers, state_numbers
from tnlm.points import intervene

CUTS = [[1] * 17, [5] + [1] * 12, [17], [8, 9], [2, 3, 12], [0, 5, 0, 12]]
MODES = [(kind, False) for kind in ATTENTIONS] + [("bilinear", True), ("squared", True)]
ATTENDING = [(kind, recurrent) for kind, recurrent in MODES if kind != "none"]


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
        (_, held) = cache.extend([-piece], piece)
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
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_cache_serves_one_batch(recurrent):
    model, cache, tokens = build(tiny()), Cache(tiny(), recurrent=recurrent), ids(2, 6)
    with torch.no_grad():
        # storage of 8 after two calls: the row would fit, and be copied into both
        first = [model(tokens[:, :4], cache=cache), model(tokens[:, 4:5], cache=cache)]
        with pytest.raises(ValueError, match=r"holds \(2, seq, 3, 4\) .*; got \(1, seq, 3, 4\)"):
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


# A forward that fails


def raising(error):
    def edit(value):
        raise error

    return edit


PLACES = [
    "hook_embed",
    "blocks.1.attn.hook_v",
    "blocks.1.attn.hook_z",
    "blocks.2.hook_resid_post",
    "ln_final.hook_scale",
]


@pytest.mark.parametrize("error", [RuntimeError("no room"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind, recurrent", ATTENDING)
def test_a_forward_that_fails_leaves_the_cache_as_it_was(kind, recurrent, place, error):
    """Other tokens go through the failing call, so that a layer which kept them would be seen."""
    model, tokens, others = build(tiny(attention=kind)), ids(2, 17), ids(2, 17, seed=8)
    cache, out = Cache(model.config, recurrent=recurrent), []
    with torch.no_grad():
        for start, end in ((0, 5), (5, 6), (6, 7), (7, 17)):  # the third fits the storage of the second
            with intervene(model, {place: raising(error)}), pytest.raises(type(error)):
                model(others[:, start:end], cache=cache)
            assert cache.length == start
            out.append(model(tokens[:, start:end], cache=cache))
        assert_close(torch.cat(out, dim=1), model(tokens))


@pytest.mark.parametrize("method", ["pre_softcap", "final_residual"])
def test_the_forwards_below_the_logits_keep_to_it_too(method):
    model, tokens = build(tiny()), ids(2, 9)
    with torch.no_grad():
        expected, cache = getattr(model, method)(tokens), Cache(tiny())
        with intervene(model, {"ln_final.hook_scale": raising(KeyboardInterrupt())}), pytest.raises(KeyboardInterrupt):
            getattr(model, method)(tokens[:, :4], cache=cache)
        parts = [getattr(model, method)(piece, cache=cache) for piece in tokens.split([4, 5], dim=1)]
    assert_close(torch.cat(parts, dim=1), expected)


# Another model


def other(**changes):
    return tiny(**{"attention": "squared", **changes})


@pytest.mark.user_error
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(
    "config, made, got",
    [
        (other(attention="softmax"), "attention='squared'", "attention='softmax'"),
        (other(attention="bilinear"), "attention='squared'", "attention='bilinear'"),
        (other(n_layer=2), "n_layer=3", "n_layer=2"),
        (other(n_layer=4), "n_layer=3", "n_layer=4"),
        (other(n_head=5), "n_head=3", "n_head=5"),
        (other(d_qk=6), "d_qk=4", "d_qk=6"),
        (other(d_model=33), "d_model=30", "d_model=33"),
        (other(value_residual=False), "value_residual=True", "value_residual=False"),
    ],
)
def test_another_kind_of_model_is_refused(recurrent, config, made, got):
    cache, tokens = Cache(other(), recurrent=recurrent), ids(2, 6)
    model, wrong = build(other()), build(config)
    with torch.no_grad():
        with pytest.raises(ValueError, match=f"made for a model with .*{made}.*, got one with .*{got}"):
            wrong(tokens, cache=cache)
        first = model(tokens[:, :4], cache=cache)
        with pytest.raises(ValueError, match=f"made for a model with .*{made}.*, got one with .*{got}"):
            wrong(tokens[:, 4:], cache=cache)
        rest = model(tokens[:, 4:], cache=cache)
    assert_close(torch.cat([first, rest], dim=1), model(tokens))


@pytest.mark.user_error
@pytest.mark.parametrize("filled, read", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("kind, recurrent", ATTENDING)
def test_another_dtype_is_refused(kind, recurrent, filled, read):
    model, tokens = build(tiny(attention=kind), dtype=filled), ids(2, 6)
    cache = Cache(model.config, recurrent=recurrent)
    with torch.no_grad():
        model(tokens[:, :4], cache=cache)
        model.to(read)
        with pytest.raises(ValueError, match=rf"it holds .* {filled} cpu.*; got .* {read} cpu"):
            model(tokens[:, 4:], cache=cache)


@pytest.mark.user_error
@pytest.mark.parametrize("recurrent", [False, True])
def test_another_device_is_refused(recurrent):
    cache, tokens = Cache(tiny(), recurrent=recurrent), ids(2, 6)
    with torch.no_grad():
        build(tiny())(tokens[:, :4], cache=cache)
        with pytest.raises(ValueError, match="a cache serves the model that filled it, got another one"):
            build(tiny()).to("meta")(tokens[:, 4:].to("meta"), cache=cache)


@pytest.mark.user_error
def test_a_layer_never_reads_what_it_did_not_write():
    """One tensor more would have had memory that nobody filled in front of it."""
    layer, piece = LayerCache(), torch.randn(2, 3, 3, 4)
    layer.extend([piece], piece)
    for keys in ([piece, piece], []):
        with pytest.raises(ValueError, match=r"it holds \(2, seq, 3, 4\) .*; got "):
            layer.extend(keys, piece)
    assert layer.length == 3


# Copies, and what only looks like the same model


@pytest.mark.parametrize("split", [lambda cache: cache.fork(), copy.copy, copy.deepcopy], ids=["fork", "copy", "deep"])
@pytest.mark.parametrize("kind, recurrent", ATTENDING)
def test_two_continuations_of_one_past_do_not_meet(kind, recurrent, split):
    """The past is 6 positions in storage for 10, so both continuations fit behind it."""
    model, tokens, others = build(tiny(attention=kind)), ids(2, 12), ids(2, 12, seed=8)
    first, out = Cache(model.config, recurrent=recurrent), []
    with torch.no_grad():
        model(tokens[:, :5], cache=first)
        model(tokens[:, 5:6], cache=first)
        second = split(first)
        for start, end in ((6, 8), (8, 12)):
            out.append([model(t[:, start:end], cache=c) for t, c in ((tokens, first), (others, second))])
        mixed = torch.cat([tokens[:, :6], others[:, 6:]], dim=1)
        for parts, whole in zip(zip(*out, strict=True), (tokens, mixed), strict=True):
            torch.testing.assert_close(torch.cat(parts, dim=1), model(whole)[:, 6:], rtol=1e-12, atol=1e-12)


@pytest.mark.user_error
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_cache_that_another_model_of_the_same_config_filled_is_refused(recurrent):
    cache, tokens, model = Cache(tiny(), recurrent=recurrent), ids(2, 6), build(tiny())
    with torch.no_grad():
        model(tokens[:, :4], cache=cache)
        for wrong in (build(tiny(), seed=5), copy.deepcopy(model)):
            with pytest.raises(ValueError, match="a cache serves the model that filled it, got another one"):
                wrong(tokens[:, 4:], cache=cache)
        rest = model(tokens[:, 4:], cache=cache)
    torch.testing.assert_close(rest, model(tokens)[:, 4:], rtol=1e-12, atol=1e-12)


@pytest.mark.user_error
def test_the_blocks_alone_must_start_where_the_cache_ends():
    model, cache = build(tiny()), Cache(tiny())
    with torch.no_grad():
        x0 = model.embedding(ids(2, 6))
        model.run(x0[:, :4], cache=cache)
        with pytest.raises(ValueError, match="start must be the number of positions in the cache, 4, got 0"):
            model.run(x0[:, 4:], cache=cache)
        rest = model.run(x0[:, 4:], start=4, cache=cache)
        torch.testing.assert_close(rest, model.run(x0)[:, 4:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind, recurrent", [("bilinear", False), ("softmax", False), ("bilinear", True)])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_go_on_independently_with_the_model_of_the_cache(kind, recurrent, copied):
    model, tokens = build(tiny(attention=kind)), ids(2, 9)
    other = copy.deepcopy(model)
    with torch.no_grad():
        cache = Cache(model.config, recurrent=recurrent)
        model(tokens[:, :4], cache=cache)
        twin = copied(cache)
        model(tokens[:, :2], cache=cache)
        assert (cache.length, twin.length) == (6, 4)
        assert_close(model(tokens[:, 4:], cache=twin), model(tokens)[:, 4:])
        with pytest.raises(ValueError, match="serves the model that filled it"):
            other(tokens[:, :1], cache=copied(cache))


@pytest.mark.user_error
@pytest.mark.parametrize("filled", [False, True])
def test_a_cache_is_not_pickled(filled):
    model = build(tiny())
    cache = Cache(model.config)
    if filled:
        model(ids(1, 3), cache=cache)
    for save in (pickle.dumps, lambda c: torch.save(c, io.BytesIO())):
        with pytest.raises(ValueError, match="cannot be pickled; save the tokens"):
            save(cache)
