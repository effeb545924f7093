"""The flags of ``run`` and ``branch`` are the fields of the configuration, with their texts and values."""

import dataclasses
import json
import re
from types import NoneType
from typing import get_args, get_type_hints

import pytest

from tests.training.small import small_config
from tnlm.config import ModelConfig
from tnlm.training.cli import main
from tnlm.training.commands import Run
from tnlm.training.config import TrainConfig
from tnlm.training.flags import field_texts
from tnlm.training.presets import PRESETS

FIELDS = [(f.name, "", TrainConfig) for f in dataclasses.fields(TrainConfig) if f.name not in ("model", "preset")]
MODEL_FIELDS = [(f.name, "model.", ModelConfig) for f in dataclasses.fields(ModelConfig)]


def bare(text: str) -> str:
    return "".join(text.split())


def help_of(capsys, monkeypatch, *command: str) -> dict[str, str]:
    """The help of a command: what stands at each of its flags, without white space, for it breaks lines anywhere."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*command, "--help"]) == 0
    texts: dict[str, str] = {}
    current: list[str] = []
    for line in capsys.readouterr().out.splitlines():
        words = line.strip()
        if words.startswith("-"):
            current = re.findall(r"(?<![\w-])--([\w.-]+)", words.partition("(default")[0])
            texts |= dict.fromkeys(current, "")
        for name in current:
            texts[name] += bare(words)
    return texts


def test_every_field_has_a_flag_with_text_and_default_of_the_preset(capsys, monkeypatch):
    """Of a preset whose values differ from those of the dataclass, and of the default preset."""
    for arguments, config in (([], PRESETS["nano"]()), (["--preset", "nano-pure"], PRESETS["nano-pure"]())):
        texts = help_of(capsys, monkeypatch, "run", *arguments)
        for name, prefix, kind in FIELDS + MODEL_FIELDS:
            said = texts[prefix + name.replace("_", "-")]
            value = getattr(config.model if prefix else config, name)
            assert bare(field_texts(kind)[name]) + bare(f"(default: {value})") in said
    assert {
        "preset",
        "mlp",
        "attention",
        "data",
        "steps",
        "seed",
        "out",
        "config",
        "matched",
        "dry-run",
    } <= texts.keys()
    assert "(default:0.005)" in texts["lr-matrix"]
    assert all(name in texts["preset"] for name in PRESETS)


def test_the_help_shows_nano_where_no_such_preset_exists(capsys, monkeypatch):
    assert "(default:250)" in help_of(capsys, monkeypatch, "run", "--preset", "nanoo")["steps"]
    assert "(default:1000)" in help_of(capsys, monkeypatch, "run", "--preset=tiny")["steps"]


@pytest.mark.parametrize("name, prefix, kind", FIELDS + MODEL_FIELDS)
def test_a_field_that_may_be_none_says_what_none_means(name, prefix, kind):
    nullable = NoneType in get_args(get_type_hints(kind)[name])
    assert ("None" in field_texts(kind)[name]) == nullable


def test_a_branch_has_the_flags_of_what_may_change(capsys, monkeypatch):
    texts = help_of(capsys, monkeypatch, "branch")
    for name in ("keep_last", "threads", "warmdown"):
        assert bare(f"{field_texts(TrainConfig)[name]} (default: the trunk's)") in texts[name.replace("_", "-")]
    assert not {"lr-matrix", "batch", "seed", "preset"} & texts.keys()


def test_every_flag_reaches_its_field(tmp_path, monkeypatch):
    """A value that is not the preset's, and None where that is a value."""
    resolved = []
    monkeypatch.setattr(Run, "execute", lambda self: resolved.append(self.resolve()))
    config = small_config(tmp_path)
    (tmp_path / "c.json").write_text(json.dumps(config.to_dict() | {"clip": 2.0}))
    flags = "--lr-embed 0.1 --lr-head 0.2 --lr-matrix 0.3 --lr-scalar 0.4 --clip None --shuffle True --batch 2"
    flags += " --mlp swiglu --model.logit-softcap None --model.qk-norm False --model.rotary-base 99"
    assert main(["run", "--config", str(tmp_path / "c.json"), *flags.split()]) == 0
    (given,) = resolved
    assert (given.lr_embed, given.lr_head, given.lr_matrix, given.lr_scalar) == (0.1, 0.2, 0.3, 0.4)
    assert (given.clip, given.shuffle, given.batch, given.micro_batch) == (None, True, 2, min(2, config.micro_batch))
    model = given.model
    assert (model.mlp, model.logit_softcap, model.qk_norm, model.rotary_base) == ("swiglu", None, False, 99.0)
    assert given.steps == config.steps
    assert model.d_model == config.model.d_model


def test_a_flag_with_the_preset_s_value_counts_as_given(tmp_path, monkeypatch):
    resolved = []
    monkeypatch.setattr(Run, "execute", lambda self: resolved.append(self.resolve()))
    (tmp_path / "c.json").write_text('{"steps": 300}')
    flags = ["--steps", "250", "--model.d-model", "192", "--model.d-hidden", "512"]
    assert main(["run", "--config", str(tmp_path / "c.json"), *flags]) == 0
    assert (resolved[0].steps, resolved[0].model.d_model, resolved[0].model.d_hidden) == (250, 192, 512)


@pytest.mark.user_error
@pytest.mark.parametrize("flags", [["--lr-head", "-1"], ["--clip", "x"], ["--compile", "maybe"], ["--tracker", "no"]])
def test_wrong_values_are_exit_code_2(flags):
    assert main(["run", *flags]) == 2
