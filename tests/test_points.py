"""Interventions on plain models: scoped, whatever happens inside, and refused where they could not fire."""

import pytest
import torch
from torch import nn

from tests.tiny_models import build, ids, tiny
from tnlm.interp.ablation import ablate
from tnlm.points import intervene, record

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
        lambda: model.norm_wires(TOKENS),
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
