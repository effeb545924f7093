"""The training configuration: sizes that follow others, what is refused, and reading it from JSON."""

import pytest

from tnlm.training.config import load_config
from tnlm.training.presets import preset


def test_sizes_follow_the_model_fields_that_they_depend_on():
    nano = preset("nano")
    wide = nano.with_model(d_model=192).model
    assert (wide.d_hidden, wide.d_qk) == (768, 48)
    assert preset("nano", matched=True).with_model(d_model=192).model.d_qk == 24
    assert nano.with_model(mlp="none").model.d_hidden == 0
    assert nano.with_model(d_model=192, d_hidden=100).model.d_hidden == 100
    assert nano.val_tokens == 16_384
    assert nano.with_model(n_ctx=96).val_tokens == 16_320
    assert nano.with_model(n_ctx=20_000).val_tokens == 20_000


def test_default_folder_tells_runs_apart():
    folders = {preset("nano", attention=a).replace(seed=s).folder for a in ("bilinear", "softmax") for s in (0, 1)}
    assert len(folders) == 4
    assert str(preset("nano").folder) == "runs/nano-bilinear-bilinear-s0"


@pytest.mark.user_error
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"steps": 10.0}, "steps must be an integer >= 1, got 10.0"),
        ({"batch": 10, "micro_batch": 4}, r"batch=10, micro_batch=4 \(remainder 2\)"),
        ({"val_tokens": 1000}, "multiple of the sequence length 128, got 1000; the nearest below is 896"),
        ({"lr_head": float("nan")}, "lr_head must be a number >= 0, got nan"),
        ({"warmdown": 1.5}, r"warmdown must be a number in \[0, 1\], got 1.5"),
        ({"warmup_steps": 200}, "warm-up and warm-down must fit into the run"),
        ({"recipe": "exact"}, "recipe must be one of replication, replication-exact; got 'exact'"),
        ({"recipe": "replication-exact", "shuffle": True}, "published order"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        preset("nano").replace(**changes)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "values, message",
    [
        ({"lr_embde": 0.1}, r"my\.json .* missing none; unexpected lr_embde"),
        ({"model": {"d_mdoel": 4}}, r"my\.json, model .*d_mdoel"),
    ],
)
def test_unknown_keys_of_a_config_file(values, message):
    with pytest.raises(ValueError, match=message):
        preset("nano").updated(values, source="my.json")


@pytest.mark.user_error
@pytest.mark.parametrize("content, message", [("[1]", "it holds a list"), (None, "cannot be read")])
def test_config_files_that_hold_no_object(content, message, tmp_path):
    if content is not None:
        (tmp_path / "c.json").write_text(content)
    with pytest.raises(ValueError, match=rf"c\.json .*{message}"):
        load_config(tmp_path / "c.json")


@pytest.mark.user_error
def test_an_unknown_preset():
    with pytest.raises(ValueError, match="'nanoo'; known: nano"):
        preset("nanoo")


def test_a_config_file_may_hold_some_fields():
    nano = preset("nano")
    changed = nano.updated({"steps": 7, "model": {"logit_softcap": None}})
    assert (changed.steps, changed.model.logit_softcap, changed.model.d_model) == (7, None, 128)
