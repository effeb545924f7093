"""The transformer-lens view: one forward, shared parameters, every point fires, hooks are scoped."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformer_lens.hook_points import HookPoint

import tnlm
from tests.limits import assert_close
from tests.tiny_models import PUBLISHED, build, ids, tiny
from tnlm import lens
from tnlm.config import ModelConfig
from tnlm.points import Point, intervene, is_point
from tnlm.text import tokenizer


def published(mlp, attention):
    """The sizes of the recorded models, every parameter random, float32."""
    sizes = {"d_vocab": 96, "n_layer": 3, "n_head": 2, "d_model": 32, "n_ctx": 64}
    return build(ModelConfig.released(mlp=mlp, attention=attention, **sizes), dtype=torch.float32)


TOKENS = ids(2, 5)


# One forward, and every point


@pytest.mark.parametrize("mlp, attention", [*PUBLISHED, ("geglu", "squared"), ("none", "bilinear"), ("glu", "none")])
def test_logits_are_bit_equal_and_every_point_fires(mlp, attention):
    if mlp == "none" or attention == "none":
        model = build(tiny(mlp=mlp, attention=attention), dtype=torch.float32)
    else:
        model = published(mlp, attention)
    model.set_implementation("eager")
    plain = model(TOKENS)
    hooked = lens.hook(model)
    assert torch.equal(hooked(TOKENS), plain)
    logits, cache = hooked.run_with_cache(TOKENS)
    assert torch.equal(logits, plain)
    points = {name for name, _ in model.named_modules() if is_point(name)}
    assert set(cache.keys()) == set(hooked.hook_dict) == points
    theirs = dict(model.named_parameters())
    assert {name: id(p) for name, p in hooked.named_parameters()} == {name: id(p) for name, p in theirs.items()}
    assert all(value.isfinite().all() for value in cache.values())


def test_the_thin_method_is_the_same(model):
    logits, cache = model.run_with_cache(TOKENS, names_filter="blocks.1.hook_resid_mixed")
    assert list(cache.keys()) == ["blocks.1.hook_resid_mixed"]
    assert_close(logits, model(TOKENS))


def test_view_leaves_the_model_alone_and_shares_its_parameters(model):
    before, keys = model(TOKENS), list(model.state_dict())
    hooked = lens.hook(model)
    hooked.run_with_hooks(TOKENS, fwd_hooks=[("hook_embed", lambda value, hook: 0 * value)])
    assert torch.equal(model(TOKENS), before)
    assert model.blocks[0].attn.implementation == "auto"
    assert all(type(m) is Point for name, m in model.named_modules() if is_point(name))
    assert list(hooked.state_dict()) == keys
    mine, theirs = dict(hooked.named_parameters()), dict(model.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(mine[name] is theirs[name] for name in theirs)
    with torch.no_grad():
        model.embed.w_e.mul_(2)
        model.blocks[1].attn.w_q1 = nn.Parameter(-model.blocks[1].attn.w_q1)
    assert_close(hooked(TOKENS), model(TOKENS))
    assert (hooked(TOKENS) - before).abs().max() > 1e-3


def test_hooking_twice_pickling_copying_and_casting(hooked):
    assert lens.hook(hooked) is hooked
    logits = hooked(TOKENS)
    for other in (copy.deepcopy(hooked), pickle.loads(pickle.dumps(hooked))):
        assert torch.equal(other(TOKENS), logits)
        with torch.no_grad():
            other.embed.w_e.zero_()
        assert (other(TOKENS) - logits).abs().max() > 1e-3
    assert hooked.to(torch.bfloat16)(TOKENS).dtype == torch.bfloat16
    assert hooked.cfg.dtype == torch.bfloat16


@pytest.mark.parametrize("mlp, attention", PUBLISHED)
def test_patching_a_cached_value_back_changes_nothing(mlp, attention):
    hooked = lens.hook(published(mlp, attention))
    logits, cache = hooked.run_with_cache(TOKENS)
    assert hooked.hook_dict
    for name in hooked.hook_dict:
        back = hooked.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda value, hook: cache[hook.name].clone())])
        assert torch.equal(back, logits), name


@pytest.mark.parametrize("mlp, attention", PUBLISHED)
def test_a_zeroed_pattern_acts_in_every_layer(mlp, attention):
    hooked = lens.hook(published(mlp, attention))
    plain = hooked(TOKENS)
    for layer in range(3):
        zero = [(f"blocks.{layer}.attn.hook_pattern", lambda value, hook: torch.zeros_like(value))]
        assert (hooked.run_with_hooks(TOKENS, fwd_hooks=zero) - plain).abs().max() > 1e-3, layer
    assert torch.equal(hooked(TOKENS), plain)


def test_edits_act_and_vanish(hooked):
    plain = hooked(TOKENS)

    def zero_head(value, hook):
        value[:, 1] = 0  # in place, as is common

    for name in ("blocks.1.attn.hook_pattern", "blocks.0.attn.hook_result", "blocks.2.attn.hook_attn_scores2"):
        edited = hooked.run_with_hooks(TOKENS, fwd_hooks=[(name, zero_head)])
        assert (edited - plain).abs().max() > 1e-6, name
    assert torch.equal(hooked(TOKENS), plain)
    zeroed = hooked.run_with_hooks(TOKENS, fwd_hooks=[(lambda name: name.endswith("pattern"), lambda v, hook: 0 * v)])
    silent = hooked.run_with_hooks(TOKENS, fwd_hooks=[(lambda name: name.endswith("attn_out"), lambda v, hook: 0 * v)])
    assert torch.equal(zeroed, silent)


# A hook's tensor is its own


def functional(value, hook):
    return value * 0.5 + 0.25


def in_place(value, hook):
    value.mul_(0.5).add_(0.25)


MIXED = {f"{mlp} {attention}": tiny(mlp=mlp, attention=attention, n_layer=2) for mlp, attention in PUBLISHED[::5]} | {
    "no norms": tiny(norm="none", qk_norm=False, n_layer=2),
    "no mixing": tiny(x0_mixing=False, value_residual=False, norm="none", qk_norm=False, n_layer=2),
    "none bilinear": tiny(mlp="none", n_layer=2),
}


@pytest.mark.parametrize("config", MIXED.values(), ids=MIXED.keys())
def test_an_edit_in_place_is_the_functional_one_and_rewrites_no_cache(config):
    """At every point, every cached value included: those before the edit are the clean run's."""
    hooked = lens.hook(build(config))
    with torch.no_grad():
        plain, clean = hooked.run_with_cache(TOKENS)
        for name in hooked.hook_dict:
            with hooked.hooks(fwd_hooks=[(name, functional)]):
                expected, theirs = hooked.run_with_cache(TOKENS)
            assert not torch.equal(expected, plain), name
            assert torch.equal(hooked.run_with_hooks(TOKENS, fwd_hooks=[(name, in_place)]), expected), name
            with hooked.hooks(fwd_hooks=[(name, in_place)]):
                logits, ours = hooked.run_with_cache(TOKENS)
            assert torch.equal(logits, expected), name
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
            before, fill, _ = hooked.get_caching_hooks(name)
            assert torch.equal(hooked.run_with_hooks(TOKENS, fwd_hooks=[*fill, (name, in_place)]), expected), name
            assert torch.equal(before[name], clean[name]), name
        assert torch.equal(hooked(TOKENS), plain)


@pytest.mark.parametrize("options", [{}, {"remove_batch_dim": True}, {"pos_slice": (1, 4)}, {"pos_slice": -1}], ids=str)
@pytest.mark.parametrize("config", MIXED.values(), ids=MIXED.keys())
def test_no_two_cached_values_share_memory(config, options):
    hooked = lens.hook(build(config))
    _, cache = hooked.run_with_cache(TOKENS[:1], return_type="loss", incl_bwd=True, **options)
    values = [*cache.values(), *hooked.add_caching_hooks().values(), *hooked.parameters()]
    hooked(TOKENS)
    held = [value.untyped_storage().data_ptr() for value in values]
    assert len(set(held)) == len(held) > 40


def test_an_edit_of_a_cached_value_during_the_run_is_of_the_cache_alone(hooked):
    """The stream of ``hook_resid_mid`` is read again after the MLP, so an edit of it in between would count."""
    name, later = "blocks.1.hook_resid_mid", "blocks.1.mlp.hook_post"
    plain = hooked(TOKENS)
    cache = hooked.add_caching_hooks(name)

    def spoil(value, hook):
        cache[name].zero_()

    assert torch.equal(hooked.run_with_hooks(TOKENS, fwd_hooks=[(later, spoil)]), plain)
    assert not cache[name].any()


@pytest.mark.parametrize("attention", ["bilinear", "softmax"])
def test_a_gradient_edited_in_place_is_edited_at_its_point_alone(attention):
    hooked = lens.hook(build(tiny(n_layer=2, attention=attention)))

    def gradients(*hooks):
        hooked.zero_grad()
        with hooked.hooks(bwd_hooks=list(hooks)):
            hooked(TOKENS, return_type="loss").backward()
        return {name: p.grad.clone() for name, p in hooked.named_parameters()}

    def in_place_and_returned(value, hook):
        in_place(value, hook)
        return (value,)

    for name in hooked.hook_dict:
        expected = gradients((name, functional))
        for edit in (in_place, in_place_and_returned):
            torch.testing.assert_close(gradients((name, edit)), expected, rtol=0, atol=0, msg=name)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "wrong, got",
    [
        (lambda value, hook: value[:1], r"\(1, .*, torch.float64, cpu"),
        (lambda value, hook: value[:, :1], r"\(2, 1.*, torch.float64, cpu"),
        (lambda value, hook: value.float(), r"\(2, .*, torch.float32, cpu"),
        (lambda value, hook: 0, "int"),
    ],
)
def test_a_value_of_another_kind_is_refused_at_every_point(wrong, got):
    """Most of these would broadcast: logits of the right shape, and wrong."""
    hooked = lens.hook(build(tiny(n_layer=1)))
    for name in hooked.hook_dict:
        message = (
            rf"a hook at the point {name} must keep shape, dtype and device: \(2, .*, torch.float64, cpu; got {got}"
        )
        with pytest.raises(ValueError, match=message):
            hooked.run_with_hooks(TOKENS, fwd_hooks=[(name, wrong)])
        with pytest.raises(ValueError, match=message), hooked.hooks(bwd_hooks=[(name, wrong)]):
            hooked(TOKENS, return_type="loss").backward()


def test_weights_of_the_whole_are_copies_and_those_of_a_part_views():
    hooked = lens.hook(build(tiny()))
    before = {name: p.clone() for name, p in hooked.named_parameters()}
    names = "W_E W_U b_U W_Q W_K W_Q2 W_K2 W_V W_O W_in W_gate W_out b_out".split()
    with torch.no_grad():
        given = [getattr(hooked, name) for name in names]
        given += [hooked.tokens_to_residual_directions(tokens) for tokens in (3, torch.tensor(3), TOKENS)]
        given += [hooked.own_share(), hooked.accumulated_bias(1)]
        given += [f for m in (hooked.QK, hooked.QK2, hooked.OV, hooked.OV_first) for f in (m.A, m.B)]
        for weight in given:
            weight -= 7
        assert all(torch.equal(p, before[name]) for name, p in hooked.named_parameters())
        hooked.embed.W_E[3] = 5
        hooked.unembed.W_U[:, 3] = 6
        hooked.blocks[1].attn.W_Q[2] = 7
        hooked.blocks[1].mlp.W_out[4] = 8
    assert hooked.embed.w_e[3].eq(5).all()
    assert hooked.unembed.w_u[3].eq(6).all()
    assert hooked.blocks[1].attn.w_q1[8:12].eq(7).all()
    assert hooked.blocks[1].mlp.w_d[:, 4].eq(8).all()


@pytest.mark.parametrize("name", ["W_E", "W_U", "W_V"])
def test_gradients_reach_the_parameters_through_the_copies(name):
    hooked = lens.hook(build(tiny()))
    getattr(hooked, name).square().sum().backward()
    parameter = {"W_E": hooked.embed.w_e, "W_U": hooked.unembed.w_u, "W_V": hooked.blocks[2].attn.w_v}[name]
    torch.testing.assert_close(parameter.grad, 2 * parameter.detach(), rtol=0, atol=0)


# Caching


def test_pos_slice_cuts_positions_at_every_point(hooked):
    _, whole = hooked.run_with_cache(TOKENS)
    for cut in (-1, (1, 4), [0, 3]):
        _, cache = hooked.run_with_cache(TOKENS, pos_slice=cut)
        for name, value in whole.items():
            axis = 2 if "pattern" in name or "attn_scores" in name else 1
            index = torch.arange(5)[slice(*cut) if isinstance(cut, tuple) else cut]
            expected = value.index_select(axis, index.reshape(-1))
            torch.testing.assert_close(cache[name], expected, rtol=0, atol=0)


def test_remove_batch_dim(hooked):
    _, cache = hooked.run_with_cache(TOKENS[:1], remove_batch_dim=True)
    _, whole = hooked.run_with_cache(TOKENS[:1])
    assert all(torch.equal(cache[name], value[0]) for name, value in whole.items())
    assert cache.decompose_resid().shape == (7, 5, 30)


@pytest.mark.user_error
def test_remove_batch_dim_needs_one_row(hooked):
    with pytest.raises(ValueError, match="needs a batch of 1, got 2"):
        hooked.run_with_cache(TOKENS, remove_batch_dim=True)


def test_max_bytes_refuses_before_running(hooked):
    _, cache = hooked.run_with_cache(TOKENS)
    held = sum(value.nbytes for value in cache.values())
    with pytest.raises(ValueError, match=r"would hold about [\d,]+ bytes .* name fewer points in names_filter"):
        hooked.run_with_cache(TOKENS, max_bytes=held // 2)
    hooked.run_with_cache(TOKENS, max_bytes=2 * held)
    hooked.run_with_cache(TOKENS, max_bytes=held // 2, names_filter="hook_embed")


def test_gradients_are_those_of_autograd(hooked, model):
    loss, cache = hooked.run_with_cache(TOKENS, return_type="loss", incl_bwd=True)
    logits = model(TOKENS)
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, 13), TOKENS[:, 1:].reshape(-1))
    assert_close(loss, expected)
    torch.testing.assert_close(hooked(TOKENS, return_type="both")[1], loss, rtol=0, atol=0)
    per_token = hooked(TOKENS, "loss", loss_per_token=True)
    assert per_token.shape == (2, 4)
    assert_close(per_token.mean(), loss)
    name = "blocks.1.attn.hook_pattern"
    seen = {}
    model.zero_grad()
    with intervene(model, {name: lambda value: seen.setdefault("pattern", value).retain_grad()}):
        logits = model(TOKENS)
        F.cross_entropy(logits[:, :-1].reshape(-1, 13), TOKENS[:, 1:].reshape(-1)).backward()
    assert_close(cache[f"{name}_grad"], seen["pattern"].grad)
    assert {f"{n}_grad" for n in hooked.hook_dict} <= set(cache.keys())


# Names


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call",
    [
        lambda h, name: h.run_with_cache(TOKENS, names_filter=name),
        lambda h, name: h.run_with_cache(TOKENS, names_filter=["hook_embed", name]),
        lambda h, name: h.run_with_hooks(TOKENS, fwd_hooks=[(name, print)]),
        lambda h, name: h.add_hook(name, print),
        lambda h, name: h.add_caching_hooks(name),
        lambda h, name: h.hooks(bwd_hooks=[(name, print)]).__enter__(),
    ],
)
def test_unknown_names_are_errors_with_close_matches(hooked, call):
    message = "no point 'blocks.1.attn.hook_patern'; close: blocks.1.attn.hook_pattern"
    with pytest.raises(ValueError, match=message):
        call(hooked, "blocks.1.attn.hook_patern")
    with pytest.raises(ValueError, match=r"no point 'blocks\.1\.attn'"):
        call(hooked, "blocks.1.attn")
    with pytest.raises(ValueError, match=r"no point 'pattern'; close: blocks\.0\.attn\.hook_pattern, blocks\.1"):
        call(hooked, "pattern")
    assert not hooked.list_hooks()


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda h: h.run_with_hooks(TOKENS, fwd_hooks=("hook_embed", print)),
            r"list of pairs .*, got 'hook_embed' in it",
        ),
        (lambda h: h.run_with_hooks(TOKENS, fwd_hooks=[("hook_embed", 3)]), r"got \('hook_embed', 3\) in it"),
        (lambda h: h.run_with_cache(TOKENS, names_filter=5), "a name, several, a predicate or None for all, got 5"),
        (lambda h: h.run_with_hooks(TOKENS, fwd_hooks=[(3, print)]), "a name, several, a predicate .*, got 3"),
        (lambda h: h([[1, 2]]), "ids in a tensor, a text or a list of texts, got list"),
        (lambda h: h(TOKENS.numpy()), "ids in a tensor, a text or a list of texts, got ndarray"),
        (lambda h: h.run_with_cache([1, "a"]), "ids in a tensor, a text or a list of texts, got list"),
    ],
)
def test_mistaken_calls_are_named(hooked, call, message):
    with pytest.raises(ValueError, match=message):
        call(hooked)
    assert not hooked.list_hooks()


@pytest.mark.user_error
def test_a_filter_that_selects_nothing_is_an_error(hooked):
    with pytest.raises(ValueError, match="none of 114 names passed it"):
        hooked.run_with_cache(TOKENS, names_filter=lambda name: name.endswith("hook_mlp_pre"))
    with pytest.raises(ValueError, match="got an empty list; None selects all"):
        hooked.run_with_cache(TOKENS, names_filter=[])


# Compilation


@pytest.mark.user_error
def test_compiled_models_are_refused(model):
    with pytest.raises(ValueError, match="the model is compiled; hook the eager module"):
        lens.hook(torch.compile(model, backend="eager"))
    hooked = lens.hook(model)
    with pytest.raises(ValueError, match="compile the plain model"):
        hooked.compile()
    hooked.blocks[1].mlp.compile(backend="eager")
    for call in (
        lambda: hooked.run_with_hooks(TOKENS, fwd_hooks=[("hook_embed", print)]),
        lambda: hooked.run_with_cache(TOKENS),
        lambda: hooked.add_hook("hook_embed", print),
    ):
        with pytest.raises(ValueError, match=r"its part blocks\.1\.mlp is compiled"):
            call()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    with pytest.raises(ValueError, match=r"its part blocks\.0 is compiled"):
        model.run_with_cache(TOKENS)


def test_a_compiled_view_still_runs_its_hooks(hooked):
    compiled = torch.compile(hooked, backend="eager")
    compiled(TOKENS)
    calls = []
    hooked.add_hook("blocks.1.hook_resid_mid", lambda value, hook: calls.append(hook.name))
    torch.testing.assert_close(compiled(TOKENS), hooked._view(TOKENS), rtol=0, atol=0)
    assert calls == 2 * ["blocks.1.hook_resid_mid"]


@pytest.mark.user_error
def test_only_our_models_are_hooked(model):
    with pytest.raises(ValueError, match=r"needs a tnlm.Transformer, got DataParallel; pass its .module"):
        lens.hook(nn.DataParallel(model))
    with pytest.raises(ValueError, match=r"needs a tnlm.Transformer, got Linear$"):
        lens.hook(nn.Linear(2, 3))


# Scope: hooks never leak, and nobody else's are removed


def registries(hooked):
    """Sizes of all hook registries, ours and torch's, in both directions."""
    sizes = {}
    for name, module in hooked.named_modules():
        torch_hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        ours = (module.fwd_hooks, module.bwd_hooks) if isinstance(module, HookPoint) else ()
        sizes[name] = [len(registry) for registry in (*torch_hooks, *ours)]
    return sizes


def raising(error):
    def hook(value, hook):
        raise error

    return hook


@pytest.mark.parametrize("error", [IndexError("missing axis"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_nothing_leaks_when_a_hook_fails(hooked, error):
    hooked.add_hook("hook_embed", lambda value, hook: None)
    plain, sizes = hooked(TOKENS), registries(hooked)
    bad = [("hook_embed", lambda v, hook: 2 * v), ("blocks.1.hook_resid_mid", raising(error))]
    for run in (
        lambda: hooked.run_with_hooks(TOKENS, fwd_hooks=bad),
        lambda: hooked.run_with_hooks(TOKENS, fwd_hooks=[(lambda name: "z" in name, raising(error))]),
    ):
        with pytest.raises(type(error)):
            run()
        assert registries(hooked) == sizes
        assert torch.equal(hooked(TOKENS), plain)
    with hooked.hooks(fwd_hooks=bad[1:]), pytest.raises(type(error)):
        hooked.run_with_cache(TOKENS)
    with pytest.raises(type(error)), hooked.hooks(bwd_hooks=bad[1:]):
        hooked(TOKENS, return_type="loss").backward()
    assert registries(hooked) == sizes
    assert hooked.context_level == 0
    assert torch.equal(hooked(TOKENS), plain)


def test_nothing_leaks_when_installing_the_second_hook_fails(hooked, monkeypatch):
    plain, sizes, install = hooked(TOKENS), registries(hooked), HookPoint.add_hook

    def failing(point, *args, **options):
        if point.name == "blocks.1.hook_resid_pre":
            raise RuntimeError("no room")
        return install(point, *args, **options)

    monkeypatch.setattr(HookPoint, "add_hook", failing)
    names = ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre", "blocks.2.hook_resid_pre"]
    with pytest.raises(RuntimeError, match="no room"):
        hooked.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda v, hook: 0 * v) for name in names])
    assert registries(hooked) == sizes
    assert torch.equal(hooked(TOKENS), plain)


def test_contexts_nest(hooked):
    plain, sizes = hooked(TOKENS), registries(hooked)
    double = [("blocks.0.hook_attn_out", lambda v, hook: 2 * v)]
    with hooked.hooks(fwd_hooks=double):
        once, inside = hooked(TOKENS), registries(hooked)
        twice = hooked.run_with_hooks(TOKENS, fwd_hooks=double)
        _, cache = hooked.run_with_cache(TOKENS)
        assert registries(hooked) == inside
        assert torch.equal(hooked(TOKENS), once)
    assert (twice - once).abs().max() > 1e-6
    assert (once - plain).abs().max() > 1e-6
    result = cache["blocks.0.attn.hook_result"].sum(2)
    torch.testing.assert_close(cache["blocks.0.hook_attn_out"], 2 * result, rtol=0, atol=0)
    assert registries(hooked) == sizes
    assert torch.equal(hooked(TOKENS), plain)


def test_other_peoples_hooks_stay_and_count_once(model):
    calls = []
    count = lambda name: lambda *_: calls.append(name)  # noqa: E731
    handles = [
        model.register_forward_hook(count("root")),
        model.blocks[1].mlp.register_forward_hook(count("module")),
        model.blocks[1].hook_mlp_out.register_forward_hook(count("point")),
        model.blocks[1].attn.hook_pattern.register_forward_hook(count("pattern")),
        model.blocks[2].hook_attn_out.register_full_backward_hook(count("backward")),
    ]
    hooked = lens.hook(model)
    hooked.add_hook("blocks.0.hook_mlp_out", lambda value, hook: calls.append("ours"))
    hooked.add_hook("blocks.0.hook_mlp_out", lambda value, hook: calls.append("ours back"), dir="bwd")
    hooked.register_forward_hook(count("view"))
    forward = sorted(["root", "module", "point", "pattern", "ours", "view"])
    for run in (
        lambda: hooked(TOKENS),
        lambda: hooked.run_with_cache(TOKENS),
        lambda: hooked.run_with_hooks(TOKENS, fwd_hooks=[("hook_embed", lambda value, hook: None)]),
    ):
        calls.clear()
        run()
        assert sorted(calls) == forward
    calls.clear()
    hooked.run_with_cache(TOKENS, return_type="loss", incl_bwd=True)
    assert sorted(calls) == sorted([*forward, "backward", "ours back"])
    for handle in handles:
        handle.remove()
    calls.clear()
    hooked(TOKENS)
    assert sorted(calls) == ["ours", "view"]


def test_interventions_on_the_model_act_in_its_view(model, hooked):
    edit = {"blocks.1.attn.hook_pattern": lambda value: 0 * value}
    with intervene(model, edit):
        assert_close(hooked(TOKENS), model(TOKENS))
        assert (hooked(TOKENS) - hooked.run_with_hooks(TOKENS)).abs().max() == 0
    with intervene(hooked._view, edit):
        assert (hooked(TOKENS) - model(TOKENS)).abs().max() > 1e-6


def test_removing_a_handle_twice_removes_nothing_else(hooked):
    point, calls = hooked.hook_dict["hook_embed"], []
    handle = point.add_hook(lambda value, hook: calls.append("first"))
    point.add_hook(lambda value, hook: calls.append("second"))
    handle.hook.remove()
    handle.hook.remove()
    hooked(TOKENS)
    assert calls == ["second"]


@pytest.mark.user_error
def test_backward_hooks_that_could_never_fire_are_refused(hooked):
    with pytest.raises(ValueError, match="bwd_hooks must outlive the forward"):
        hooked.run_with_hooks(TOKENS, bwd_hooks=[("hook_embed", lambda value, hook: None)])
    with pytest.raises(ValueError, match='pass return_type="loss"'):
        hooked.run_with_cache(TOKENS, incl_bwd=True)
    with torch.no_grad(), pytest.raises(ValueError, match=r"leave torch\.no_grad"):
        hooked.run_with_cache(TOKENS, return_type="loss", incl_bwd=True)


# Ids and text


@pytest.mark.user_error
@pytest.mark.parametrize(
    "tokens, message",
    [
        (torch.tensor([[3, -1]]), r"in \[0, 11\), got -1 at row 0, position 1"),
        (torch.tensor([[11]]), r"in \[0, 11\), got 11 at row 0, position 0"),  # a padding id
        (torch.tensor([[2**31]]), r"in \[0, 11\), got 2147483648"),
        (torch.tensor([[1.0]]), "int64 or int32, got torch.float32"),
        (torch.tensor([[True]]), "int64 or int32, got torch.bool"),
        (torch.tensor([[1]], dtype=torch.uint16), "int64 or int32, got torch.uint16"),
        (torch.zeros(1, 18, dtype=torch.int64), "at most n_ctx=17 tokens, got 18"),
    ],
)
@pytest.mark.parametrize("name", ["forward", "run_with_cache", "run_with_hooks", "generate"])
def test_bad_ids_are_refused(hooked, name, tokens, message):
    with pytest.raises(ValueError, match=message):
        getattr(hooked, name)(tokens)


@pytest.mark.user_error
def test_directions_of_padding_ids_are_refused(hooked):
    with pytest.raises(ValueError, match=r"in \[0, 11\), got 12"):
        hooked.tokens_to_residual_directions(12)
    with pytest.raises(ValueError, match=r"no tokenizer was saved with the model, and none is known for 11 ids"):
        hooked.to_tokens("text")
    with pytest.raises(ValueError, match='return_type must be "logits"'):
        hooked(TOKENS, return_type="probs")
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        hooked(TOKENS[:, :1], return_type="loss")


def test_one_row_and_int32_are_tokens_too(hooked):
    logits = hooked(TOKENS)
    assert torch.equal(hooked(TOKENS.int()), logits)
    assert_close(hooked(TOKENS[0]), logits[:1])
    assert hooked(TOKENS, return_type=None) is None


def test_text_in_and_out():
    model = build(tiny(d_vocab=256, d_vocab_used=256))
    hooked = lens.hook(model, tokenizer=tokenizer.get("bytes"))
    assert hooked.to_tokens("abc").tolist() == [[97, 98, 99]]
    assert hooked.to_tokens(["ab", "cd"]).shape == (2, 2)
    assert hooked.to_string(hooked.to_tokens(["ab", "cd"])) == ["ab", "cd"]
    assert hooked.to_string(97) == "a"
    assert hooked.to_str_tokens("abc") == ["a", "b", "c"]
    assert hooked.to_single_token("a") == 97
    assert torch.equal(hooked("abc"), hooked(torch.tensor([[97, 98, 99]])))
    assert torch.equal(hooked.tokens_to_residual_directions("b"), hooked.W_U[:, 98])
    with pytest.raises(ValueError, match="text must be one token, got 'ab', which is 2: 'a', 'b'"):
        hooked.to_single_token("ab")
    with pytest.raises(ValueError, match=r"equally many tokens, got \[1, 2\]"):
        hooked.to_tokens(["a", "bc"])
    with pytest.raises(ValueError, match="no end-of-text id to prepend"):
        hooked.to_tokens("a", prepend_bos=True)


def test_the_tokenizer_of_text_is_the_one_that_every_function_finds():
    model = build(tiny(d_vocab=256, d_vocab_used=256))
    assert lens.hook(model).to_tokens("abc").tolist() == [[97, 98, 99]]  # bytes, found by the number of ids
    model.tokenizer = tokenizer.Tokenizer("own", [bytes([255 - byte]) for byte in range(256)], eot=False)
    assert lens.hook(model).to_tokens("abc").tolist() == [[158, 157, 156]]
    assert lens.hook(model, tokenizer=tokenizer.get("bytes")).to_tokens("a").tolist() == [[97]]
    with pytest.raises(ValueError, match="must have the model's 11 ids, got 'bytes' with 256"):
        lens.hook(build(tiny()), tokenizer=tokenizer.get("bytes")).to_tokens("a")


def test_end_of_text_is_prepended_only_when_asked():
    tokens = [bytes([byte]) for byte in range(256)]
    hooked = lens.hook(
        build(tiny(d_vocab=257, d_vocab_used=257)), tokenizer=tokenizer.Tokenizer("own", tokens, eot=True)
    )
    assert hooked.to_tokens("a").tolist() == [[97]]
    assert hooked.to_tokens("a", prepend_bos=True).tolist() == [[256, 97]]
    assert hooked.cfg.default_prepend_bos is False


def test_generate_goes_through_the_hooks():
    model = build(tiny(d_vocab=256, d_vocab_used=256))
    hooked = lens.hook(model, tokenizer=tokenizer.get("bytes"))
    prompt = hooked.to_tokens("abc")
    plain = tnlm.generate(model, prompt, 5, temperature=0)
    assert torch.equal(hooked.generate(prompt, 5, temperature=0), plain)
    assert hooked.generate("abc", 5, temperature=0) == tokenizer.get("bytes").decode(plain[0].tolist())
    with hooked.hooks(fwd_hooks=[("hook_embed", lambda value, hook: -3 * value.flip(-1))]):
        assert not torch.equal(hooked.generate(prompt, 5, temperature=0), plain)


def test_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "lens.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert "assert " in code, "the page checks itself"
    exec(code, {})
