"""Decompositions of the residual stream sum to what they say; weights, attributions and transformer-lens's tools."""

import pytest
import torch
from transformer_lens import patching
from transformer_lens.tools.analysis import attribution_patch, direct_logit_attribution, logit_lens

from tests.limits import assert_close
from tests.tiny_models import PUBLISHED, build, ids, tiny
from tnlm import lens
from tnlm.lens.residual import factors
from tnlm.points import intervene, record

PURE = {"norm": "none", "qk_norm": False, "embedding_norm": False, "logit_softcap": None}
CONFIGS = {f"{mlp} {attention}": tiny(mlp=mlp, attention=attention) for mlp, attention in PUBLISHED} | {
    "biases": tiny(attention="softmax", mlp="relu2", qk_bias=True),
    "no bias": tiny(attention="differential", mlp="swiglu", mlp_bias=False),
    "no mixing": tiny(x0_mixing=False, value_residual=False),
    "attention only": tiny(mlp="none"),
    "mlp only": tiny(attention="none", mlp="squared"),
    "pure": tiny(**PURE),
    "one layer": tiny(n_layer=1),
    "no final norm": tiny(final_norm=False),
    "hidden biases": tiny(mlp_hidden_bias=True),
}
TOKENS = ids(2, 5)
LAYERS = [(layer, mid, ln) for layer in (None, 0, 1, 2, 3) for mid in (False, True) for ln in (False, True)]


def run(config, dtype=torch.float64):
    hooked = lens.hook(build(config, dtype))
    with torch.no_grad():
        return hooked, *hooked.run_with_cache(TOKENS)


def assert_near(actual, expected):
    """Equal but for rounding, relative to the largest number in play."""
    assert_close(actual, expected, scale=max(1.0, expected.abs().max().item()))


def stream(config, cache, layer, mid, ln):
    """What a decomposition must sum to, read from the cache; None where the model has no such point."""
    n = config.n_layer
    layer = n if layer is None else layer
    if layer > n or (mid and (layer == n or config.mlp == "none")):
        return None
    if layer == n:
        last = cache[f"blocks.{n - 1}.hook_resid_post"]
        return cache["ln_final.hook_normalized"] if ln else last
    if ln:
        if not mid and config.attention == "none":
            return None
        return cache[f"blocks.{layer}.ln{1 + mid}.hook_normalized"]
    return cache[f"blocks.{layer}.hook_resid_{'mid' if mid else 'pre'}"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_parts_sum_to_the_stream(config, dtype):
    _, _, cache = run(config, dtype)
    for layer, mid, ln in LAYERS:
        expected = stream(config, cache, layer, mid, ln)
        if expected is None:
            continue
        options = {"mlp_input": mid, "apply_ln": ln}
        assert_near(cache.decompose_resid(layer, **options).sum(0), expected)
        for expand in (True, False):
            assert_near(cache.get_full_resid_decomposition(layer, expand_neurons=expand, **options).sum(0), expected)
        assert_near(cache.stack_neuron_results(layer, incl_remainder=True, **options).sum(0), expected)
        assert_near(cache.accumulated_resid(layer, incl_mid=True, **options)[-1], expected)
        if not mid:
            assert_near(cache.stack_head_results(layer, incl_remainder=True, apply_ln=ln).sum(0), expected)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_each_part_is_what_its_label_says(config):
    hooked, _, cache = run(config)
    blocks, n = hooked.blocks, config.n_layer
    embed, writes = factors(blocks)
    if config.x0_mixing:
        a = [block.lambdas[0].item() for block in blocks]
        b = [block.lambdas[1].item() for block in blocks]
        chain = 1.0
        for first, second in zip(a, b, strict=True):
            chain = first * chain + second
        assert embed == pytest.approx(chain)
        assert writes[0] == pytest.approx(torch.tensor(a[1:]).prod().item())
    parts, labels = cache.decompose_resid(return_labels=True)
    named = dict(zip(labels, parts, strict=True))
    heads = dict(zip(*cache.stack_head_results(return_labels=True)[::-1], strict=True))
    units = dict(zip(*cache.stack_neuron_results(n, return_labels=True)[::-1], strict=True))
    assert_near(named["embed"], embed * cache["hook_embed"])
    for i, block in enumerate(blocks):
        if block.attn is not None:
            assert_near(named[f"{i}_attn_out"], writes[i] * cache["attn_out", i])
            assert_near(sum(heads[f"L{i}H{h}"] for h in range(3)), named[f"{i}_attn_out"])
        if block.mlp is not None:
            assert_near(named[f"{i}_mlp_out"], writes[i] * cache["mlp_out", i])
            bias = 0 if block.mlp.bias is None else writes[i] * block.mlp.bias
            assert_near(sum(units[f"L{i}N{j}"] for j in range(7)) + bias, named[f"{i}_mlp_out"])
    only = cache.decompose_resid(mode="mlp", incl_embeds=False, return_labels=True)[1]
    assert only == [label for label in labels if label.endswith("mlp_out")]
    full = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)[1]
    assert full == [*heads, *(label for label in labels if label.endswith("mlp_out")), "embed", "bias"]
    _, where = cache.get_full_resid_decomposition(return_labels=True)
    bias = cache.get_full_resid_decomposition()[where.index("bias")]
    assert_near(bias, hooked.accumulated_bias(n).expand_as(bias))


def test_parts_are_labelled_by_their_own_weights():
    """From the weights of that head, and of that unit alone: a sum over all of them cannot see an exchange."""
    hooked, _, cache = run(tiny())
    _, writes = factors(hooked.blocks)
    heads = dict(zip(*cache.stack_head_results(return_labels=True)[::-1], strict=True))
    units = dict(zip(*cache.stack_neuron_results(3, return_labels=True)[::-1], strict=True))
    for i, block in enumerate(hooked.blocks):
        for h in range(3):
            w_o = block.attn.w_o[:, 10 * h : 10 * h + 10]
            assert_near(heads[f"L{i}H{h}"], writes[i] * cache["z", i][:, :, h] @ w_o.T)
        for j in range(7):
            assert_near(units[f"L{i}N{j}"], writes[i] * cache["post", i][..., j, None] * block.mlp.w_d[:, j])
    streams = dict(zip(*cache.accumulated_resid(incl_mid=True, return_labels=True)[::-1], strict=True))
    for i in range(3):
        assert_near(streams[f"{i}_pre"], cache["resid_pre", i])
        assert_near(streams[f"{i}_mid"], cache["resid_mid", i])
    assert list(streams)[-1] == "final_post"
    bias = sum(writes[i] * block.mlp.bias for i, block in enumerate(hooked.blocks))
    assert_near(hooked.accumulated_bias(3), bias)
    assert not hooked.accumulated_bias(3, include_mlp_biases=False).any()


def test_slices_and_projections_commute_with_the_sum():
    _, _, cache = run(tiny())
    expected = cache["ln_final.hook_normalized"]
    direction, plane = torch.randn(30, dtype=torch.float64), torch.randn(30, 4, dtype=torch.float64)
    for positions, part in ((-1, expected[:, -1]), ((1, 3), expected[:, 1:3]), ([0, 4], expected[:, [0, 4]])):
        full = cache.get_full_resid_decomposition
        assert_near(full(apply_ln=True, pos_slice=positions).sum(0), part)
        assert_near(full(apply_ln=True, pos_slice=positions, project_output_onto=direction).sum(0), part @ direction)
        assert_near(full(apply_ln=True, pos_slice=positions, project_output_onto=plane).sum(0), part @ plane)
        assert_near(cache.decompose_resid(apply_ln=True, pos_slice=positions).sum(0), part)
    few, labels = cache.stack_neuron_results(2, neuron_slice=[1, 5], return_labels=True)
    assert labels == ["L0N1", "L0N5", "L1N1", "L1N5"]
    whole, names = cache.stack_neuron_results(2, return_labels=True)
    assert_near(few, whole[[names.index(label) for label in labels]])
    assert cache.stack_neuron_results(2, neuron_slice=3, return_labels=True)[1] == ["L0N3", "L1N3"]
    assert cache.decompose_resid(0, incl_embeds=False).shape == (0, 2, 5, 30)


def test_batch_slices_keep_the_repair():
    _, _, cache = run(tiny())
    row = cache.apply_slice_to_batch_dim([1])
    assert isinstance(row, lens.ResidualCache)
    assert_near(row.decompose_resid().sum(0), cache["resid_post", 2][[1]])
    hooked = lens.hook(build(tiny()))
    with torch.no_grad():
        _, single = hooked.run_with_cache(TOKENS[:1], remove_batch_dim=True)
    assert_near(single.decompose_resid(apply_ln=True).sum(0), single["ln_final.hook_normalized"])
    assert_near(single.get_full_resid_decomposition(1, mlp_input=True).sum(0), single["resid_mid", 1])


def test_head_results_come_from_z_when_they_were_not_cached():
    hooked = lens.hook(build(tiny()))
    with torch.no_grad():
        _, cache = hooked.run_with_cache(TOKENS, names_filter=lambda name: not name.endswith("hook_result"))
        _, whole = hooked.run_with_cache(TOKENS)
    assert_near(cache.stack_head_results(2), whole.stack_head_results(2))
    assert "blocks.1.attn.hook_result" not in cache.keys()  # noqa: SIM118
    cache.compute_head_results()
    assert_near(cache["result", 1], whole["result", 1])


@pytest.mark.user_error
@pytest.mark.parametrize("name", ["decompose_resid", "accumulated_resid", "get_full_resid_decomposition"])
@pytest.mark.parametrize("layer, options, message", [(4, {}, "got layer=4"), (3, {"mlp_input": True}, "below 3 with")])
def test_layers_are_checked(name, layer, options, message):
    with pytest.raises(ValueError, match=rf"layer must be in \[0, 3\] .*{message}"):
        getattr(run(tiny())[2], name)(layer, **options)


@pytest.mark.user_error
def test_modes_are_checked():
    with pytest.raises(ValueError, match='"all", "mlp" or "attn", got \'heads\''):
        run(tiny())[2].decompose_resid(mode="heads")


# Names in the cache


def test_shorthand_reaches_every_point():
    hooked, _, cache = run(tiny())
    assert cache["k2", 0] is cache["blocks.0.attn.hook_k2"]
    assert cache["attn_scores2", -1] is cache["blocks.2.attn.hook_attn_scores2"]
    assert cache["pattern", 1, "attn"] is cache["blocks.1.attn.hook_pattern"]
    assert cache["attn", 1] is cache["blocks.1.attn.hook_pattern"]
    assert cache["scale", 1, "ln2"] is cache["blocks.1.ln2.hook_scale"]
    assert cache["resid_mixed", 1] is cache["blocks.1.hook_resid_mixed"]
    assert cache["embed"] is cache["hook_embed"]
    for name in hooked.hook_dict:
        assert cache[name].shape[0] == 2


@pytest.mark.user_error
def test_missing_names_say_what_is_there():
    hooked = lens.hook(build(tiny()))
    _, cache = hooked.run_with_cache(TOKENS, names_filter=["blocks.0.hook_attn_out"])
    with pytest.raises(KeyError, match=r"'blocks.1.hook_attn_out' was not cached; close: blocks.0.hook_attn_out"):
        cache["attn_out", 1]
    with pytest.raises(KeyError, match="'hook_embed' was not cached"):
        cache.decompose_resid()


# Logits


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_attributions_sum_to_the_logit_before_the_softcap(config):
    hooked, logits, cache = run(config)
    before = hooked._view.pre_softcap(TOKENS).detach()
    assert_near(cache.accumulated_resid(apply_ln=True)[-1] @ hooked.W_U, before)
    for unit in ("component", "head"):
        found = direct_logit_attribution(hooked, TOKENS, 3, 8, unit=unit)
        assert_near(found.attribution.sum(0).detach(), before[:, -1, 3] - before[:, -1, 8])
        found = direct_logit_attribution(hooked, cache=cache, answer_tokens=3, unit=unit, pos=None)
        assert_near(found.attribution.sum(0).detach(), before[..., 3])
    full = cache.get_full_resid_decomposition()
    assert_near(cache.logit_attrs(full, tokens=torch.tensor([4, 9])).sum(0).detach()[1], before[1, :, 9])
    result = cache.logit_lens(positions=None)
    assert_near(result.readout.values[-1], logits)
    assert_near(logit_lens(hooked, TOKENS, incl_mid=config.mlp != "none").readout.values[-1], logits[:, -1])


@pytest.mark.parametrize("attention", ["bilinear", "squared", "softmax"])
def test_scores_and_outputs_follow_from_qk_and_ov(attention):
    config = tiny(attention=attention, qk_norm=False)
    hooked, _, cache = run(config)
    branches = [("hook_attn_scores", hooked.QK)]
    branches += [("hook_attn_scores2", hooked.QK2)] if attention == "bilinear" else []
    first = cache["blocks.0.ln1.hook_normalized"]
    ov, ov_first = hooked.OV.AB, hooked.OV_first.AB
    assert ov.shape == ov_first.shape == (3, 3, 30, 30)
    for i in range(3):
        x = cache[f"blocks.{i}.ln1.hook_normalized"]
        for name, qk in branches:  # at position 0 nothing is rotated
            first_token = torch.einsum("bm,hmn,bn->bh", x[:, 0], qk.AB[i], x[:, 0])
            scale = 2.0 if attention == "softmax" else 4.0
            assert_near(cache[f"blocks.{i}.attn.{name}"][:, :, 0, 0], first_token / scale)
            parts = ("q1", "k1") if name == "hook_attn_scores" else ("q2", "k2")
            w_q, w_k = (getattr(hooked.blocks[i].attn, f"w_{part}").view(3, 4, 30) for part in parts)
            query, key = torch.randn(2, 30, dtype=torch.float64)  # two vectors, or the transpose would pass
            want = torch.stack([(w_q[h] @ query) @ (w_k[h] @ key) for h in range(3)])
            assert_near(torch.einsum("m,hmn,n->h", query, qk.AB[i], key), want)
        pattern = cache["pattern", i]
        own = torch.einsum("bhqk,bkm,hmn->bqn", pattern, x, ov[i])
        assert_near(own + torch.einsum("bhqk,bkm,hmn->bqn", pattern, first, ov_first[i]), cache["attn_out", i])
    assert ov_first[0].abs().max() == 0
    assert ov_first[1].abs().max() > 0.01


@pytest.mark.parametrize("mlp", ["bilinear", "swiglu", "relu2"])
def test_weights_in_their_names_compute_the_forward(mlp):
    hooked, logits, cache = run(tiny(mlp=mlp, attention="bilinear"))
    x = cache["blocks.1.ln1.hook_normalized"]
    attn, block_mlp = hooked.blocks[1].attn, hooked.blocks[1].mlp
    own = {"W_Q": attn.w_q1, "W_K": attn.w_k1, "W_Q2": attn.w_q2, "W_K2": attn.w_k2, "W_V": attn.w_v}
    for point, (name, parameter) in zip(("q", "k", "q2", "k2", "v"), own.items(), strict=True):
        weight = getattr(attn, name)
        assert_near(torch.einsum("bsm,hmd->bshd", x, weight), cache[point, 1])
        assert torch.equal(getattr(hooked, name)[1], weight)
        assert weight.data_ptr() == parameter.data_ptr()
    assert_near(torch.einsum("bshd,hdm->bshm", cache["z", 1], hooked.W_O[1]), cache["result", 1])
    y = cache["blocks.1.ln2.hook_normalized"]
    gate = block_mlp.W_gate if mlp != "relu2" else block_mlp.W_in
    assert_near(y @ gate, cache["pre", 1])
    hidden = tiny(mlp=mlp, attention="bilinear", mlp_hidden_bias=True)
    biased = lens.hook(build(hidden)).blocks[1].mlp
    first, second = (biased.b_l, None) if mlp == "relu2" else (biased.b_r, biased.b_l)
    assert biased.b_in is first
    assert biased.b_gate is second
    if mlp == "relu2":
        assert block_mlp.W_gate is None
    else:
        assert_near(y @ hooked.W_in[1], cache["pre_linear", 1])
    assert_near(cache["post", 1] @ hooked.W_out[1] + hooked.b_out[1], cache["mlp_out", 1])
    capped = 30 * torch.tanh((cache["ln_final.hook_normalized"] @ hooked.W_U + hooked.b_U) / 30)
    assert_near(capped, logits)
    assert torch.equal(hooked.W_E[TOKENS], cache["hook_embed_raw"])


def test_weights_that_a_model_lacks_are_no_attributes():
    hooked = lens.hook(build(tiny(mlp="relu2", attention="softmax")))
    assert hooked.W_in.shape == (3, 30, 7)
    for name in ("W_gate", "W_Q2", "QK2"):
        assert not hasattr(hooked, name)
    with pytest.raises(AttributeError, match="this model has no W_gate: it is no part of every block's mlp"):
        _ = hooked.W_gate
    assert not hasattr(lens.hook(build(tiny(attention="none"))), "W_Q")


# transformer-lens's own tools


def test_patching_tools_run_and_restore():
    hooked = lens.hook(build(tiny()))
    clean, corrupted = TOKENS[:1], ids(1, 5, seed=7)

    def metric(logits):
        return logits[0, -1, 3] - logits[0, -1, 8]

    with torch.no_grad():
        target, cache = hooked.run_with_cache(clean)
        assert metric(hooked(corrupted)) != metric(target)
        streams = patching.get_act_patch_resid_pre(hooked, corrupted, cache, metric)
        heads = patching.get_act_patch_attn_head_out_by_pos(hooked, corrupted, cache, metric)
        patterns = patching.get_act_patch_attn_head_pattern_all_pos(hooked, corrupted, cache, metric)
    assert (streams.shape, heads.shape, patterns.shape) == ((3, 5), (3, 5, 3), (3, 3))
    for values in (streams, heads, patterns):
        assert values.unique().numel() > 3
    assert not hooked.list_hooks()


@pytest.mark.parametrize("config", [tiny(), tiny(x0_mixing=False, norm="none", qk_norm=False)], ids=["mixing", "plain"])
def test_patching_the_stream_is_the_functional_edit_in_every_layer_and_position(config):
    """transformer-lens patches in place; what enters block 0 is also what x0 mixing mixes in, and must not change."""
    model = build(config)
    hooked, clean, corrupted = lens.hook(model), TOKENS[:1], ids(1, 5, seed=7)

    def metric(logits):
        return logits[0, -1, 3] - logits[0, -1, 8]

    expected = torch.empty(3, 5, dtype=torch.float64)
    with torch.no_grad():
        _, cache = hooked.run_with_cache(clean)
        got = patching.get_act_patch_resid_pre(hooked, corrupted, cache, metric)
        for layer in range(3):
            name = f"blocks.{layer}.hook_resid_pre"
            value = record(model, clean, [name])[name]
            for position in range(5):
                here = (torch.arange(5) == position)[:, None]
                with intervene(model, {name: lambda x, v=value, here=here: torch.where(here, v, x)}):
                    expected[layer, position] = metric(model(corrupted))
    assert expected.unique().numel() > 10
    # the tool's table is float32, so each entry of it is rounded once
    torch.testing.assert_close(got, expected.float(), rtol=2e-7, atol=1e-9)


def test_attribution_patching_runs():
    hooked = lens.hook(build(tiny()))
    result = attribution_patch(hooked, TOKENS[:1], ids(1, 5, seed=7), lambda logits: logits[0, -1, 3])
    assert len(result.node_scores) == 5 * (1 + 3 * 4)
    assert not hooked.list_hooks()
