"""The attention kinds: one pattern behind two paths, its symmetries, and the points that form it."""

import pytest
import torch

from tests.limits import assert_close, assert_within
from tests.tiny_models import ATTENTIONS, build, ids, tiny
from tnlm.attention import causal_mask
from tnlm.config import ModelConfig
from tnlm.points import intervene, record

KINDS = [kind for kind in ATTENTIONS if kind != "none"]
POINTS = ("hook_rot_q", "hook_rot_k", "hook_rot_q2", "hook_rot_k2", "hook_attn_scores", "hook_attn_scores2")


def values(model, tokens, layer, *names):
    names = [f"blocks.{layer}.{name}" for name in names]
    seen = record(model, tokens, names)
    return [seen[name] for name in names]


@pytest.mark.parametrize("kind", KINDS)
def test_listening_to_the_pattern_changes_no_logit(kind):
    model, tokens = build(tiny(attention=kind)), ids(2, 7)
    plain = model(tokens)
    names = [f"blocks.{i}.attn.{p}" for i in range(3) for p in ("hook_pattern", "hook_attn_scores", "hook_result")]
    assert_close(record(model, tokens, names)["logits"], plain)
    assert torch.equal(model(tokens), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_of_the_pattern_changes_the_logits(kind):
    model, tokens = build(tiny(attention=kind)), ids(2, 7)
    plain = model(tokens)
    for point in ("hook_pattern", "hook_attn_scores"):
        with intervene(model, {f"blocks.1.attn.{point}": lambda value: value + value.square()}):
            assert (model(tokens) - plain).abs().max() > 1e-3
    with intervene(model, {"blocks.1.attn.hook_pattern": torch.zeros_like}):
        zeroed = model(tokens)
    with intervene(model, {"blocks.1.hook_attn_out": torch.zeros_like}):
        assert_close(zeroed, model(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_patterns_are_causal_and_normalised_where_they_should_be(kind):
    model = build(tiny(attention=kind))
    (pattern,) = values(model, ids(2, 7), 1, "attn.hook_pattern")
    assert torch.equal(pattern, pattern.tril())
    sums = pattern.sum(-1)
    if kind in ("softmax", "squared_normalized"):
        assert_within(sums - 1, 1e-4)
    elif kind == "differential":
        lamb = model.blocks[1].attn.bilinear_lamb
        assert_close(sums, (1 - lamb).expand_as(sums), scale=1 + abs(lamb.item()))
    else:
        assert (sums - 1).abs().max() > 0.1
    assert bool((pattern < 0).any()) == (kind in ("bilinear", "differential"))


def test_points_hold_the_factors_of_the_pattern():
    model = build(tiny())
    q, k, q2, k2, s, s2 = values(model, ids(2, 7), 2, *(f"attn.{p}" for p in POINTS))
    pattern, v, z, result, out = values(
        model,
        ids(2, 7),
        2,
        *("attn." + p for p in ("hook_pattern", "hook_v_mixed", "hook_z", "hook_result")),
        "hook_attn_out",
    )
    assert_close(s, torch.einsum("bqhd,bkhd->bhqk", q, k) / 4)
    assert_close(s2, torch.einsum("bqhd,bkhd->bhqk", q2, k2) / 4)
    assert_close(pattern, (s * s2).tril())
    assert_close(z, torch.einsum("bhqk,bkhd->bqhd", pattern, v))
    assert_close(result.sum(2), out)
    for head in range(3):
        w_o = model.blocks[2].attn.w_o[:, 10 * head : 10 * (head + 1)]
        assert_close(result[:, :, head], z[:, :, head] @ w_o.T)


def test_value_residual_mixes_with_block_zero_before_its_own_mixing():
    model, tokens = build(tiny()), ids(2, 5)
    (v0,) = values(model, tokens, 0, "attn.hook_v")
    for layer in range(3):
        v, mixed = values(model, tokens, layer, "attn.hook_v", "attn.hook_v_mixed")
        m = model.blocks[layer].attn.lamb
        assert_close(mixed, (1 - m) * v + m * v0)
    mixed, v = values(model, tokens, 0, "attn.hook_v_mixed", "attn.hook_v")
    assert_close(mixed, v)


def test_an_edit_of_mixed_values_stays_in_its_block():
    """Later blocks mix with block 0's ``hook_v``, which an edit of its ``hook_v_mixed`` leaves alone."""
    model, tokens = build(tiny()), ids(2, 5)
    (v0,) = values(model, tokens, 0, "attn.hook_v")
    with intervene(model, {"blocks.0.attn.hook_v_mixed": torch.zeros_like}):
        v, mixed = values(model, tokens, 1, "attn.hook_v", "attn.hook_v_mixed")
    m = model.blocks[1].attn.lamb
    assert_close(mixed, (1 - m) * v + m * v0)


def test_each_head_of_queries_and_keys_is_normed_alone_and_before_the_rotation():
    model, tokens = build(tiny()), ids(2, 5)
    q, scale, normed, rotated = values(
        model,
        tokens,
        1,
        *(f"attn.{p}" for p in ("hook_q", "q_norm.hook_scale", "q_norm.hook_normalized", "hook_rot_q")),
    )
    assert_close(scale[..., 0], (q.square().mean(-1) + 1.1920929e-07).sqrt())
    assert_close(normed, q / scale)
    assert_close(rotated[:, 0], normed[:, 0])
    assert (rotated[:, 1] - normed[:, 1]).abs().max() > 0.1


@pytest.mark.parametrize("signs", [(-1, -1, 1, 1), (1, 1, -1, -1), (-1, 1, -1, 1), (1, -1, -1, 1)])
def test_gauges_of_bilinear_attention(signs):
    """An even number of sign flips, and the exchange of the branches, leave the function alone."""
    model, tokens = build(tiny()), ids(2, 5)
    before = model(tokens)
    attn = model.blocks[1].attn
    with torch.no_grad():
        for name, sign in zip(("w_q1", "w_k1", "w_q2", "w_k2"), signs, strict=True):
            getattr(attn, name).mul_(sign)
        assert_close(model(tokens), before)
        attn.w_q1, attn.w_q2 = attn.w_q2, attn.w_q1
        attn.w_k1, attn.w_k2 = attn.w_k2, attn.w_k1
    assert_close(model(tokens), before)


@pytest.mark.parametrize("kind", ["bilinear", "squared"])
def test_unnormed_attention_is_of_degree_five(kind):
    model = build(tiny(attention=kind, qk_norm=False, value_residual=False))
    attn, x = model.blocks[0].attn, torch.randn(2, 5, 30, dtype=torch.float64)
    tables = tuple(torch.randn(5, 2, dtype=torch.float64) for _ in range(2))
    assert_close(attn(-2 * x, None, tables)[0], -32 * attn(x, None, tables)[0])


def test_squared_is_bilinear_with_equal_pairs():
    bilinear, squared = build(tiny(n_layer=1)), build(tiny(n_layer=1, attention="squared"))
    state = {k: v for k, v in bilinear.state_dict().items() if "2" not in k.rpartition(".")[2]}
    squared.load_state_dict(state)
    with torch.no_grad():
        for b in ("w_q", "w_k"):
            getattr(bilinear.blocks[0].attn, f"{b}2").copy_(getattr(bilinear.blocks[0].attn, f"{b}1"))
    assert_close(squared(ids(2, 7)), bilinear(ids(2, 7)))


@pytest.mark.parametrize("implementation", ["auto", "eager", "chunked", "recurrent"])
@pytest.mark.parametrize("kind", ["bilinear", "squared", "squared_normalized"])
def test_prefixes_of_every_length_give_the_same_logits(kind, implementation):
    model = build(tiny(attention=kind, n_layer=2, n_ctx=300), dtype=torch.float32)
    model.set_implementation(implementation)
    tokens = ids(1, 300)
    full = model(tokens)
    assert torch.isfinite(full).all()
    for seq in (1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257):
        assert_close(model(tokens[:, :seq]), full[:, :seq])


@pytest.mark.parametrize("kind", ["bilinear", "squared"])
def test_unbounded_scores_never_become_nan(kind):
    """Without QK-norm nothing bounds the scores: bf16 and fp32 hold them, fp16 refuses on a CPU."""
    config = tiny(attention=kind, qk_norm=False, norm="none", embedding_norm=False, logit_softcap=None, n_layer=1)
    model = build(config, dtype=torch.float32)
    with torch.no_grad():
        model.embed.w_e.mul_(100)
    tokens = ids(1, 17)
    assert torch.isfinite(model(tokens)).all()
    assert torch.isfinite(model.to(torch.bfloat16)(tokens)).all()
    with pytest.raises(ValueError, match="must fit float16"):
        model.to(torch.float16)(tokens)


def test_one_position_by_hand():
    """seq = 1: no rotation, no sum; (q1.k1)(q2.k2) / d**2 v."""
    config = ModelConfig.pure(d_vocab=11, n_layer=1, n_head=3, d_model=30, d_hidden=7, n_ctx=5, d_qk=4)
    attn, x = build(config).blocks[0].attn, torch.randn(1, 1, 30, dtype=torch.float64)
    tables = (torch.ones(1, 2, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64))
    q1, k1, q2, k2 = (w @ x[0, 0] for w in (attn.w_q1, attn.w_k1, attn.w_q2, attn.w_k2))
    pattern = (q1 * k1).view(3, 4).sum(1) * (q2 * k2).view(3, 4).sum(1) / 16
    expected = attn.w_o @ (pattern[:, None] * (attn.w_v @ x[0, 0]).view(3, 10)).flatten()
    assert_close(attn(x, None, tables)[0][0, 0], expected)


@pytest.mark.parametrize("seq_q, seq_k", [(3, 3), (1, 4), (2, 5), (4, 2), (0, 3)])
def test_mask_is_aligned_so_that_the_last_query_sees_every_key(seq_q, seq_k):
    mask = causal_mask(seq_q, seq_k)
    assert mask.shape == (seq_q, seq_k)
    for i in range(seq_q):
        for j in range(seq_k):
            assert mask[i, j] == (j <= i + seq_k - seq_q)


def test_fresh_attention_has_the_published_starting_values():
    attn = build(tiny(attention="differential", qk_bias=True)).blocks[0].attn
    attn.reset_parameters()
    assert (attn.lamb.item(), attn.bilinear_lamb.item()) == (0.5, 0.8)
    assert not attn.w_o.any()
    assert not attn.b_q1.any()
    assert not attn.b_k2.any()
    assert 0.9 < attn.w_q2.abs().max() * 30**0.5 <= 1
