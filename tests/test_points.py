"""Interventions on plain models: scoped, whatever happens inside, and refused where they could not fire."""

import pytest
import torch
from torch import nn

from tests.tiny_models import build, ids, tiny
from tnlm.interp.extraction import extract
from tnlm.interp.predictions.ablation import ablate, with_mlp
from tnlm.points import Point, intervene, record

TOKENS = ids(2, 5)
NAMES = ["blocks.0.hook_attn_out", "blocks.1.attn.hook_pattern", "blocks.2.hook_mlp_out"]


@pytest.fixture
def model():
    return build(tiny())


def registries(model):
    """Sizes of all hook registries, in both directions."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {name: [len(getattr(module, kind)) for kind in kinds] for name, module in model.named_modules()}


def raising(error):
    def edit(value):
        raise error

    return edit


def missing_axis(value):
    return value[:, :, :, :, 7]


@pytest.mark.parametrize("edit", [missing_axis, raising(KeyboardInterrupt())], ids=["error", "interrupt"])
def test_nothing_leaks_when_an_edit_fails(model, edit):
    plain, sizes = model(TOKENS), registries(model)
    with pytest.raises((IndexError, KeyboardInterrupt)), intervene(model, {NAMES[0]: torch.neg, NAMES[1]: edit}):
        model(TOKENS)
    assert registries(model) == sizes
    assert torch.equal(model(TOKENS), plain)


def test_nothing_leaks_when_installing_the_second_hook_fails(model, monkeypatch):
    plain, sizes = model(TOKENS), registries(model)
    broken = model.get_submodule(NAMES[1])
    monkeypatch.setattr(broken, "register_forward_hook", raising(RuntimeError("no room")))
    with pytest.raises(RuntimeError, match="no room"), intervene(model, dict.fromkeys(NAMES, torch.neg)):
        pass
    assert registries(model) == sizes
    assert torch.equal(model(TOKENS), plain)


def test_contexts_nest(model):
    plain, sizes = model(TOKENS), registries(model)
    double = {NAMES[0]: lambda value: 2 * value}
    with intervene(model, double):
        once, inside = model(TOKENS), registries(model)
        with intervene(model, double):
            twice = model(TOKENS)
        assert registries(model) == inside
        assert torch.equal(model(TOKENS), once)
        assert torch.equal(record(model, TOKENS, NAMES)["logits"], once)
    assert (twice - once).abs().max() > 1e-6
    assert (once - plain).abs().max() > 1e-6
    assert registries(model) == sizes


def test_other_peoples_hooks_stay_and_count_once(model):
    calls = []
    model.blocks[1].hook_mlp_out.register_forward_hook(lambda *_: calls.append("forward"))
    model.blocks[1].hook_mlp_out.register_full_backward_hook(lambda *_: calls.append("backward"))
    sizes = registries(model)
    for run in (
        lambda: record(model, TOKENS, NAMES),
        lambda: record(model, TOKENS, ["blocks.1.hook_mlp_out"]),
        lambda: ablate(model, TOKENS, "blocks.0.hook_mlp_out", "zero"),
    ):
        calls.clear()
        run()
        assert calls == ["forward"]
        assert registries(model) == sizes
    with intervene(model, {"blocks.1.hook_mlp_out": lambda value: 2 * value}):
        model(TOKENS).sum().backward()
    assert calls == ["forward", "forward", "backward"]
    assert registries(model) == sizes


def test_ablation_of_a_model_that_fails_leaves_no_hook(model, monkeypatch):
    plain, sizes = model(TOKENS), registries(model)
    with monkeypatch.context() as patch:
        patch.setattr(model.unembed, "forward", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            ablate(model, TOKENS, NAMES[1], "zero")
    assert registries(model) == sizes
    assert torch.equal(model(TOKENS), plain)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "compiled, where",
    [
        (lambda m: torch.compile(m, backend="eager"), "the model"),
        (lambda m: m.compile(backend="eager") or m, "the model"),
        (lambda m: m.blocks[1].mlp.compile(backend="eager") or m, r"its part blocks\.1\.mlp"),
        (lambda m: setattr(m.blocks, "1", torch.compile(m.blocks[1], backend="eager")) or m, r"its part blocks\.1"),
    ],
    ids=["wrapped", "in place", "part in place", "part wrapped"],
)
def test_compiled_models_are_refused(model, compiled, where):
    """Hooks added after the first compiled call would be skipped without a word."""
    wrapped: nn.Module = compiled(model)
    with torch.no_grad():
        wrapped(TOKENS)
    message = f"{where} is compiled; hook the eager module"
    with pytest.raises(ValueError, match=message), intervene(wrapped, {}):
        pass
    with pytest.raises(ValueError, match=message):
        record(wrapped, TOKENS, NAMES[2:])


@pytest.mark.user_error
def test_what_stands_on_interventions_refuses_compiled_models_too(model):
    model.compile(backend="eager")
    model(TOKENS)
    for run in (
        lambda: ablate(model, TOKENS, NAMES[2], "zero"),
        lambda: model.inverse_norms(TOKENS),
        lambda: model.run_with_cache(TOKENS),
    ):
        with pytest.raises(ValueError, match="the model is compiled; hook the eager module"):
            run()


@pytest.mark.user_error
def test_unknown_names_are_errors_with_close_matches(model):
    sizes = registries(model)
    message = r"no point 'blocks.0.hook_attn_ot'; close: blocks.0.hook_attn_out"
    with (
        pytest.raises(ValueError, match=message),
        intervene(model, {NAMES[2]: torch.neg, "blocks.0.hook_attn_ot": abs}),
    ):
        pass
    assert registries(model) == sizes


# A hook's tensor is its own


def edited(value):
    return value * 0.5 + 0.25


def edit_in_place(value):
    value.mul_(0.5).add_(0.25)


PAIRS = [
    ("bilinear", "bilinear"),
    ("squared", "squared"),
    ("swiglu", "squared_normalized"),
    ("relu2", "softmax"),
    ("geglu", "differential"),
    ("reglu", "none"),
    ("glu", "none"),
    ("relu", "none"),
    ("gelu", "none"),
    ("none", "bilinear"),
]
CONFIGS = {f"{mlp} {attention}": tiny(mlp=mlp, attention=attention, n_layer=2) for mlp, attention in PAIRS} | {
    "no norms": tiny(norm="none", qk_norm=False, logit_softcap=None, n_layer=2),
    "no norms, no mixing": tiny(norm="none", qk_norm=False, x0_mixing=False, value_residual=False, n_layer=2),
    "biases": tiny(attention="squared", qk_bias=True, n_layer=2),
}
BACKWARD = {
    kind: CONFIGS[kind] if kind == "bilinear bilinear" else CONFIGS[kind].replace(n_layer=1)
    for kind in ("bilinear bilinear", "geglu differential", "no norms", "none bilinear")
}
EVERY_KIND = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def points(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, Point)}


def hook_of(edit):
    return lambda module, args, out: edit(out)


def with_kwargs(edit):
    return lambda module, args, kwargs: ((edit(args[0]),), kwargs)


REGISTRATIONS = {
    "output in place": lambda p: p.register_forward_hook(hook_of(edit_in_place)),
    "input in place": lambda p: p.register_forward_hook(lambda module, args, out: edit_in_place(args[0])),
    "with kwargs": lambda p: p.register_forward_hook(lambda m, args, kw, out: edit_in_place(out), with_kwargs=True),
    "before, in place": lambda p: p.register_forward_pre_hook(lambda module, args: edit_in_place(args[0])),
    "before": lambda p: p.register_forward_pre_hook(lambda module, args: edited(args[0])),
    "before, with kwargs": lambda p: p.register_forward_pre_hook(with_kwargs(edited), with_kwargs=True),
}


@pytest.mark.parametrize("implementation", ["auto", "eager"])
@EVERY_KIND
def test_an_edit_in_place_is_the_functional_one(config, implementation):
    model = build(config)
    model.set_implementation(implementation)
    with torch.no_grad():
        plain = model(TOKENS)
        for name in points(model):
            with intervene(model, {name: edited}):
                expected = model(TOKENS)
            with intervene(model, {name: edit_in_place}):
                assert torch.equal(model(TOKENS), expected), name
            assert not torch.equal(expected, plain), name
        assert torch.equal(model(TOKENS), plain)


@pytest.mark.parametrize("register", REGISTRATIONS.values(), ids=REGISTRATIONS.keys())
def test_plain_torch_hooks_are_kept_to_their_point_too(register):
    model = build(tiny(n_layer=2))
    with torch.no_grad():
        for name, point in points(model).items():
            with intervene(model, {name: edited}):
                expected = model(TOKENS)
            handle = register(point)
            assert torch.equal(model(TOKENS), expected), name
            handle.remove()


def gradients(model):
    model.zero_grad()
    model(TOKENS).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("config", BACKWARD.values(), ids=BACKWARD.keys())
def test_gradients_of_an_edit_in_place_are_those_of_the_functional_one(config):
    model = build(config)
    for name in points(model):
        with intervene(model, {name: edited}):
            expected = gradients(model)
        with intervene(model, {name: edit_in_place}):
            torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("config", BACKWARD.values(), ids=BACKWARD.keys())
def test_a_gradient_edited_in_place_changes_no_other(config):
    """Both summands of a residual receive one gradient: halving one of them must leave the other."""
    model = build(config)
    plain = gradients(model)
    for name, point in points(model).items():
        handle = point.register_full_backward_hook(lambda module, given, grads: (grads[0] * 0.5 + 0.25,))
        expected = gradients(model)
        handle.remove()
        assert any(not torch.equal(expected[key], plain[key]) for key in plain), name
        for register, edit in (
            (point.register_full_backward_hook, lambda module, given, grads: edit_in_place(grads[0])),
            (point.register_full_backward_hook, lambda module, given, grads: edit_in_place(given[0])),
            (point.register_backward_hook, lambda module, given, grads: (edit_in_place(grads[0]), grads)[1]),
            (point.register_full_backward_pre_hook, lambda module, grads: edit_in_place(grads[0])),
        ):
            handle = register(edit)
            torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0, msg=name)
            handle.remove()


def test_what_a_hook_kept_or_returned_is_no_longer_the_models(model):
    """The stream of ``hook_resid_mid`` is read again after the MLP, so an edit of it in between would count."""
    kept, given = [], torch.randn(2, 5, 30, dtype=torch.float64)

    def spoil_kept(value):
        kept[-1].zero_()

    def spoil_given(value):
        given.zero_()

    name, later = "blocks.1.hook_resid_mid", "blocks.1.mlp.hook_post"
    with torch.no_grad():
        with intervene(model, {name: kept.append, later: spoil_kept}):
            assert torch.equal(model(TOKENS), model_without_hooks(model))
        with intervene(model, {name: lambda value: given.clone()}):
            expected = model(TOKENS)
        with intervene(model, {name: lambda value: given, later: spoil_given}):
            assert torch.equal(model(TOKENS), expected)
    assert not kept[-1].any()
    assert not given.any()


def model_without_hooks(model):
    return build(model.config)(TOKENS)


def test_hooks_at_one_point_get_a_tensor_each(model):
    name, kept = "blocks.1.hook_resid_mid", []
    for hook in (kept.append, edit_in_place, kept.append):
        model.get_submodule(name).register_forward_hook(hook_of(hook))
    with torch.no_grad():
        model(TOKENS)
    first, last = kept
    assert torch.equal(last, edited(first))


@EVERY_KIND
def test_recorded_values_share_no_memory(config):
    model = build(config)
    values = record(model, TOKENS, points(model))
    held = [t.untyped_storage().data_ptr() for t in (*values.values(), *model.parameters())]
    assert len(set(held)) == len(held) > 20


def test_without_a_hook_nothing_is_copied():
    x, point = torch.randn(3), Point()
    assert point(x) is x
    handle = point.register_forward_hook(lambda *_: None)
    assert point(x) is not x
    handle.remove()
    assert point(x) is x


def turn(value):
    value.transpose_(0, 1)


WRONG = {
    "rows": lambda value: value[:1],
    "positions": lambda value: value[:, :1],
    "axes": lambda value: value[None],
    "dtype": lambda value: value.float(),
    "device": lambda value: value.to("meta"),
    "no tensor": lambda value: 0.0,
    "axes exchanged in place": turn,
}


@pytest.mark.user_error
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_value_of_another_kind_is_refused_at_every_point(wrong):
    """Most of these would broadcast: logits of the right shape, and wrong."""
    model = build(tiny(n_layer=1))
    gradient = {
        "register_full_backward_hook": lambda module, given, grads: wrong(grads[0]),
        "register_full_backward_pre_hook": lambda module, grads: wrong(grads[0]),
    }
    for name, point in points(model).items():
        message = rf"a hook at the point {name} must keep shape, dtype and device: \(2, .*, torch.float64, cpu; got "
        with pytest.raises(ValueError, match=message), intervene(model, {name: wrong}), torch.no_grad():
            model(TOKENS)
        handle = point.register_forward_pre_hook(lambda module, args: wrong(args[0]))
        with pytest.raises(ValueError, match=message), torch.no_grad():
            model(TOKENS)
        handle.remove()
        for register, hook in gradient.items():
            handle = getattr(point, register)(hook)
            with pytest.raises(ValueError, match=message):
                model(TOKENS).sum().backward()
            handle.remove()


@pytest.mark.user_error
def test_the_refusal_says_what_came_and_names_points_of_replaced_parts(model):
    name = "blocks.1.mlp.hook_pre"
    message = rf"the point {name} must .*: \(2, 5, 7\), torch.float64, cpu; got \(1, 5, 7\), torch.float64, cpu"
    replaced = with_mlp(model, {1: extract(model).mlp[1]})
    for each in (model, replaced):
        with pytest.raises(ValueError, match=message), intervene(each, {name: lambda value: value[:1]}):
            each(TOKENS)
    with (
        pytest.raises(ValueError, match=r"\(2, 5, 7\), .*; got \(5, 2, 7\)"),
        intervene(model, {name: turn}),
    ):
        model(TOKENS)


def test_an_edit_in_place_before_the_first_block_does_not_reach_x0():
    """A torch hook on a block gets the tensors of the model, and x0 enters every block beside the stream."""
    model, tokens = build(tiny(n_layer=2)), ids(2, 5)
    assert model.blocks[0].lambdas[1].abs() > 0

    def run(hook):
        handle = model.blocks[0].register_forward_pre_hook(hook)
        try:
            return model(tokens)
        finally:
            handle.remove()

    def edit(_block, given):
        given[0].mul_(3)

    with torch.no_grad():
        expected = run(lambda _block, given: (given[0] * 3, *given[1:]))
        edited = run(edit)
        assert (expected - model(tokens)).abs().max() > 1e-3
    assert torch.equal(edited, expected)
