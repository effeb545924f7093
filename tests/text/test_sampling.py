"""generate(): every argument at its edges, and that caches change nothing."""

import math

import numpy as np
import pytest
import torch

import tnlm
from tests.limits import assert_close
from tests.tiny_models import ATTENTIONS, build, ids, tiny
from tnlm.cache import LayerState
from tnlm.points import intervene, record
from tnlm.text.sampling import _new_cache, generate, probabilities

LOGITS = torch.tensor([[2.0, 1.0, 0.0, 1.0], [0.0, 0.0, 3.0, 0.0]])


# The distribution


def test_temperature_divides_the_logits():
    assert_close(probabilities(LOGITS, temperature=0.5), (2 * LOGITS.double()).softmax(-1))
    assert_close(probabilities(LOGITS), LOGITS.double().softmax(-1))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-320, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature):
    assert probabilities(LOGITS, temperature=temperature).tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]


def test_a_high_temperature_is_uniform():
    assert_close(probabilities(LOGITS, temperature=1e300), torch.full((2, 4), 0.25, dtype=torch.float64))


def test_temperature_zero_takes_the_first_of_equal_logits():
    assert probabilities(torch.zeros(1, 4), temperature=0).tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("k, kept", [(1, [1, 0, 0, 0]), (2, None), (4, [1, 1, 1, 1]), (99, [1, 1, 1, 1])])
def test_top_k_keeps_exactly_k(k, kept):
    p = probabilities(LOGITS, top_k=k)[0]
    assert (p > 0).sum() == min(k, 4)
    assert kept is None or (p > 0).int().tolist() == kept
    assert p.sum().item() == pytest.approx(1)
    assert p[0] / p[1] == pytest.approx(math.e) or p[1] == 0 or p[3] == 0


@pytest.mark.parametrize(
    "top_p, expected",
    [
        (1e-9, [1, 0, 0, 0]),
        (0.5, [1, 0, 0, 0]),
        (0.51, [5 / 8, 3 / 8, 0, 0]),
        (0.799, [5 / 8, 3 / 8, 0, 0]),
        (0.81, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (1, [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, expected):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    assert probabilities(logits, top_p=top_p).tolist() == pytest.approx(expected)
    shuffled = torch.tensor([3, 0, 2, 1])
    assert probabilities(logits[shuffled], top_p=top_p).tolist() == pytest.approx([expected[i] for i in shuffled])


def test_top_p_counts_what_top_k_left():
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    assert probabilities(logits, top_k=2, top_p=0.62).tolist() == [1, 0, 0]
    assert (probabilities(logits, top_k=2, top_p=0.63) > 0).tolist() == [True, True, False]


def test_draws_follow_the_distribution():
    config = tiny(n_layer=0, norm="none", logit_softcap=None)
    model = build(config)
    tokens = torch.full((20000, 1), 3)
    drawn = generate(model, tokens, 1, seed=0, temperature=0.7)[:, 1].bincount(minlength=11) / 20000
    expected = (model(tokens[:1])[0, 0, :11] / 0.7).softmax(-1)
    assert (drawn - expected).abs().max() < 4 * (0.25 / 20000) ** 0.5


# Generation


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_greedy_equals_a_plain_loop_with_every_cache(kind):
    model, tokens = build(tiny(attention=kind)), ids(3, 4)
    expected = tokens
    for _ in range(13):
        expected = torch.cat([expected, model(expected)[:, -1:, :11].argmax(-1)], dim=1)
    caches = ["auto", "kv", "none"] + ["recurrent"] * (kind in ("bilinear", "squared"))
    for cache in caches:
        assert torch.equal(generate(model, tokens, 13, temperature=0, cache=cache), expected)


@pytest.mark.parametrize("cache", ["kv", "none", "recurrent"])
def test_a_seed_gives_the_same_tokens_again_and_leaves_torch_alone(model, cache):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = generate(model, ids(3, 4), 9, seed=7, cache=cache)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generate(model, ids(3, 4), 9, seed=7, cache=cache), first)
    assert not torch.equal(generate(model, ids(3, 4), 9, seed=8), first)


def test_the_default_device_of_the_process_does_not_matter(model):
    prompt = ids(2, 4)
    expected = generate(model, prompt, 5, seed=3, stop=[2])
    with torch.device("meta"):
        assert torch.equal(generate(model, prompt, 5, seed=3, stop=[2]), expected)


@pytest.mark.user_error  # a type checker refuses numpy's integers first
def test_numpy_integers_serve(model):
    first = generate(model, ids(3, 4), 9, seed=7, top_k=5, stop=3)
    again = generate(model, ids(3, 4), np.int64(9), seed=np.int64(7), top_k=np.int32(5), stop=np.array([3]))
    assert torch.equal(again, first)


def test_without_a_seed_torchs_own_generator_draws(model):
    torch.manual_seed(5)
    first = generate(model, ids(3, 4), 9)
    assert not torch.equal(generate(model, ids(3, 4), 9), first)
    torch.manual_seed(5)
    assert torch.equal(generate(model, ids(3, 4), 9), first)


def test_tnlm_exports_it(model):
    assert tnlm.generate is generate
    assert generate(model, ids(2, 4).int(), 3, seed=0).dtype == torch.int64


def test_padding_ids_are_never_sampled():
    """A fresh model gives all 13 ids the same logit; the two padding ids must not come up in 500 draws."""
    model = tnlm.Transformer(tiny(n_ctx=512))
    out = generate(model, ids(1, 1), 500, seed=0)
    assert set(out[0].tolist()) == set(range(11))
    with torch.no_grad():
        build_into = build(tiny())
        build_into.unembed.w_u[11:] *= 1000
    assert generate(build_into, ids(4, 4), 13, temperature=0).max() < 11


def test_a_row_repeats_the_id_that_stopped_it(model):
    free = generate(model, ids(4, 3), 12, seed=3)
    stop = int(free[0, 5])
    out = generate(model, ids(4, 3), 12, seed=3, stop=stop)
    for row, whole in zip(out.tolist(), free.tolist(), strict=True):
        end = whole.index(stop, 3) if stop in whole[3:] else len(whole)
        assert row[:end] == whole[:end]
        assert set(row[end:]) <= {stop}
    padded = generate(model, ids(4, 3), 12, seed=3, stop=[stop], pad=12)
    assert padded[0].tolist() == out[0, :6].tolist() + [12] * (padded.shape[1] - 6)


def test_generation_ends_with_the_last_row(model):
    tokens = ids(1, 3).expand(4, 3)
    greedy = generate(model, tokens, 12, temperature=0)
    out = generate(model, tokens, 12, temperature=0, stop=int(greedy[0, 3]))
    assert out.shape == (4, 4)
    assert generate(model, tokens, 12, temperature=0, stop=range(11)).shape == (4, 4)
    assert torch.equal(generate(model, tokens, 12, temperature=0, stop=[]), greedy)
    assert torch.equal(generate(model, tokens, 12, temperature=0, stop=torch.tensor([], dtype=torch.long)), greedy)


def test_stop_ids_in_the_prompt_do_not_count(model):
    tokens = torch.tensor([[4, 7, 4]])
    out = generate(model, tokens, 5, temperature=0)
    unused = next(i for i in (4, 7) if i not in out[0, 3:])
    assert torch.equal(generate(model, tokens, 5, temperature=0, stop=unused), out)


def test_no_new_tokens_gives_a_copy_of_the_prompt(model):
    tokens = ids(2, 4)
    out = generate(model, tokens, 0)
    assert torch.equal(out, tokens)
    assert out.data_ptr() != tokens.data_ptr()
    assert generate(model, ids(2, 17), 0).shape == (2, 17)


def test_the_context_can_be_filled_to_the_brim(model):
    assert generate(model, ids(2, 4), 13, seed=0).shape == (2, 17)


def test_an_empty_batch_generates_nothing(model):
    assert generate(model, torch.empty(0, 4, dtype=torch.long), 3, seed=0).shape == (0, 7)


def test_options_do_not_matter_to_greedy(model):
    greedy = generate(model, ids(2, 4), 9, temperature=0)
    assert torch.equal(generate(model, ids(2, 4), 9, temperature=0, top_k=3, top_p=0.1, seed=1), greedy)
    assert torch.equal(generate(model, ids(2, 4), 9, top_k=1), greedy)
    assert torch.equal(generate(model, ids(2, 4), 9, top_p=1e-12), greedy)


def test_auto_takes_the_state_where_it_is_smaller_than_the_keys_and_values(model):
    """Three heads of d_qk 4, d_head 10: 160 numbers against 18 per position, so from 9 tokens on."""
    kinds = [type(_new_cache(model, "auto", length).layers[0]) for length in (8, 9)]
    assert [kind is LayerState for kind in kinds] == [False, True]
    softmax = build(tiny(attention="softmax"))
    assert type(_new_cache(softmax, "auto", 17).layers[0]) is not LayerState


def test_a_listened_pattern_makes_auto_keep_keys_and_values(model):
    seen = []
    with intervene(model, {"blocks.2.attn.hook_pattern": lambda p: seen.append(tuple(p.shape[-2:]))}):
        generate(model, ids(1, 4), 3, seed=0)
        generate(model, ids(1, 4), 2, seed=0, cache="none")
    assert seen == [(4, 4), (1, 5), (1, 6), (4, 4), (5, 5)]


def test_edits_at_points_change_what_is_generated(model):
    plain = generate(model, ids(2, 4), 9, temperature=0)
    with intervene(model, {"ln_final.hook_normalized": lambda x: -x}):
        assert not torch.equal(generate(model, ids(2, 4), 9, temperature=0), plain)
    assert torch.equal(generate(model, ids(2, 4), 9, temperature=0), plain)
    assert torch.equal(record(model, plain[:, :-1], [])["logits"][:, -1, :11].argmax(-1), plain[:, -1])


# Refusals


@pytest.mark.user_error
@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -0.1}, r"temperature must be a finite number >= 0 \(0 is greedy\), got -0.1"),
        ({"temperature": math.inf}, "got inf"),
        ({"temperature": math.nan}, "got nan"),
        ({"temperature": "1"}, "got '1'"),
        ({"temperature": None}, "got None"),
        ({"temperature": True}, "got True"),
        ({"top_k": 0}, "top_k must be an integer >= 1, or None for off, got 0"),
        ({"top_k": -1}, "top_k .* got -1"),
        ({"top_k": 1.5}, "top_k .* got 1.5"),
        ({"top_k": True}, "top_k .* got True"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, or None for off, got 0; temperature=0 is greedy"),
        ({"top_p": 1.0001}, "top_p .* got 1.0001"),
        ({"top_p": -1}, "top_p .* got -1"),
        ({"top_p": math.nan}, "top_p .* got nan"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer >= 0, got -1"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens .* got 2\.0"),
        ({"max_new_tokens": True}, "max_new_tokens .* got True"),
        ({"max_new_tokens": 14}, r"must fit n_ctx=17, got 4 \+ 14 tokens; max_new_tokens may be at most 13 here"),
        ({"stop": 11}, r"stop must be a token id in \[0, 11\), got 11"),
        ({"stop": -1}, "stop .* got -1"),
        ({"stop": [3, 99]}, "stop .* got 99"),
        ({"stop": "eot"}, "stop .* got 'e'"),
        ({"stop": 1.0}, r"stop .* got 1\.0"),
        ({"stop": True}, "stop .* got True"),
        ({"pad": 13}, r"pad must be a token id in \[0, 13\), got 13"),
        ({"seed": -1}, r"seed must be an integer in \[0, 2\*\*63\), or None, got -1"),
        ({"seed": 2**63}, "seed must be"),
        ({"seed": 0.5}, "seed must be .* got 0.5"),
        ({"cache": "paged"}, "cache must be one of auto, kv, recurrent, none; got 'paged'"),
    ],
    ids=str,
)
def test_bad_options_are_named(model, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, ids(2, 4), **{"max_new_tokens": 3, **options})


@pytest.mark.user_error
@pytest.mark.parametrize(
    "tokens, options, message",
    [
        (torch.tensor([[3, 4], [11, 4]]), {}, "must not be left-padded: row 1 begins with padding id 11"),
        (torch.tensor([[3, 4], [0, 4]]), {"pad": 0}, "must not be left-padded: row 1 begins with padding id 0"),
        (torch.tensor([[3, 12]]), {}, r"ids must be in \[0, 11\), got 12 at row 0, position 1"),
        (torch.tensor([[3, 13]]), {}, r"ids must be in \[0, 11\), got 13 at row 0, position 1"),
        (torch.tensor([[13, 3]]), {}, r"ids must be in \[0, 11\), got 13 at row 0, position 0"),
        (torch.tensor([[-100, 3]]), {}, r"ids must be in \[0, 11\), got -100 at row 0, position 0"),
        (torch.tensor([[-1, 3]]), {}, r"ids must be in \[0, 11\), got -1 at row 0, position 0"),
        (torch.empty(2, 0, dtype=torch.long), {}, "every prompt must hold at least one token"),
        (torch.tensor([3, 4]), {}, r"tokens must be \(batch, seq\), got shape \(2,\)"),
        (torch.tensor([[3.0]]), {}, "tokens must be int64 or int32, got torch.float32"),
        (ids(1, 18), {}, "at most n_ctx=17 tokens, got 18"),
    ],
    ids=str,
)
def test_bad_prompts_are_named(model, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, tokens, 3, **options)


@pytest.mark.user_error
def test_recurrent_by_name_says_why_it_cannot_serve_softmax():
    with pytest.raises(ValueError, match="a recurrent state needs attention in"):
        generate(build(tiny(attention="softmax")), ids(1, 4), 3, cache="recurrent")


@pytest.mark.user_error
@pytest.mark.parametrize("weight, seen", [(math.nan, "nan"), (math.inf, "nan|inf")])
def test_logits_that_are_no_numbers_are_reported_instead_of_sampled(weight, seen):
    model = build(tiny(logit_softcap=None))
    with torch.no_grad():
        model.unembed.w_u[3] = weight
    for temperature in (0, 1):
        with pytest.raises(ValueError, match=f"got ({seen}) in row 0; check the weights"):
            generate(model, ids(2, 4), 3, temperature=temperature)
