"""Every field of a configuration says how a run is carried out, or the comparison and a resume see it change."""

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from tests.training.small import small_config
from tnlm.config import ModelConfig
from tnlm.text.tokenizer import train_bpe
from tnlm.training.compare.checks import check, is_paired
from tnlm.training.compare.runs import COMPARED_ELSEWHERE, Arm, load_run
from tnlm.training.config import OPERATIONAL, TrainConfig
from tnlm.training.data.shards import write_shard, write_sidecar
from tnlm.training.run.loop import Trainer
from tnlm.training.run.start import claim_folder

VOCAB, EOT = 275, 269
FIELDS = [field.name for field in dataclasses.fields(TrainConfig) if field.name != "model"]
MODEL_FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]


def another(kind: Any, value: Any) -> Any:
    """Another value of a field, from its type; free text and what must fit together is in the tables below."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(option for option in get_args(kind) if option is not types.NoneType)
    if get_origin(kind) is Literal:
        return next(option for option in get_args(kind) if option != value)
    if kind is bool:
        return not value
    if kind in (int, float):
        return kind(2 * (value or 1))
    raise AssertionError(f"say in this test how another {kind} looks like")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Two data sets, and two vocabularies with one end-of-text id."""
    root = tmp_path_factory.mktemp("fields")
    for name, seed in (("one", 0), ("two", 1)):
        rng = np.random.default_rng(seed)
        for file, size in (("train_000001.bin", 900), ("val_000000.bin", 200)):
            ids = rng.integers(0, EOT, size)
            ids[::25] = EOT
            (root / name).mkdir(exist_ok=True)
            write_shard(root / name / file, ids)
        write_sidecar(root / name, d_vocab=VOCAB)
    train_bpe(["the cat sat on the mat, the rat"] * 9, EOT + 1).save(root / "cats")
    train_bpe(["a dog dug a ditch and a bog"] * 9, EOT + 1).save(root / "dogs")
    return root


@pytest.fixture
def base(root, tmp_path) -> TrainConfig:
    data, tokenizer = str(root / "one"), str(root / "cats")
    config = small_config(tmp_path, data=data, val_data=data, tokenizer=tokenizer, precision="float32")
    return config.replace(model=config.model.replace(d_vocab=VOCAB, d_vocab_used=VOCAB))


def changed(config: TrainConfig, name: str, root: Path) -> TrainConfig:
    special = {
        "preset": "other",
        "data": str(root / "two"),
        "val_data": str(root / "two"),
        "tokenizer": str(root / "dogs"),
        "precision": "bfloat16",
        "device": "cpu:0",
        "implementation": "eager",
        "warmdown": 0.6,
        "beta1": 0.8,
        "beta2": 0.9,
        "momentum_start": 0.8,
        "momentum_end": 0.9,
        "branched_from": str(root / "trunk" / "checkpoints" / "step_000004"),
    }
    if name == "out":
        return config
    value = special.get(name) or another(get_type_hints(TrainConfig)[name], getattr(config, name))
    return config.replace(**{name: value})


def changed_model(config: TrainConfig, name: str, root: Path) -> TrainConfig:
    model = config.model
    special: dict[str, dict[str, Any]] = {
        "d_vocab": {"d_vocab": VOCAB + 5, "d_vocab_used": VOCAB},
        "d_vocab_used": {"d_vocab_used": VOCAB - 1},
        "d_qk": {"d_qk": 4},
        "n_head": {"n_head": 4, "d_qk": 6},
        "attention": {"attention": "softmax"},
        "mlp": {"mlp": "swiglu"},
    }
    change = special.get(name) or {name: another(get_type_hints(ModelConfig)[name], getattr(model, name))}
    return config.replace(model=model.replace(**change))


def recorded(config: TrainConfig, folder: Path) -> Path:
    """The folder of a finished run of ``config``, as the loop would leave it."""
    config = config.replace(out=str(folder))
    trainer = Trainer(config, progress=False)
    trainer.inputs.loader.close()
    more = {"bits_per_byte": None, "val_tokens": config.val_tokens}
    events = [{"kind": "start", "step": 0, **trainer.facts()}]
    events += [{"kind": "val", "step": s, "loss": 5.0, **more} for s in (0, config.steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def seen(one: TrainConfig, other: TrainConfig, tmp_path: Path) -> tuple[str, bool]:
    """What the comparison says of two runs: its refusal or its warnings; and whether it pairs them."""
    runs = [load_run(recorded(config, tmp_path / name)) for name, config in (("base", one), ("variant", other))]
    arms = Arm(runs[:1], "base"), Arm(runs[1:], "variant")
    try:
        return "; ".join(check(*arms)), is_paired(*arms)
    except ValueError as refused:
        return str(refused), False


SAID = {
    "warmdown": "warm-down rules differ",
    "recipe": "must have one recipe",
    "precision": "must have one dtype",
    "data": "training data differ",
    "val_data": "must have one validation tokens",
    "val_tokens": "must have one validation tokens",
    "tokenizer": "must have one vocabulary",
}
"""What is said of a field that is compared otherwise than by value."""
SHOWN = {"seed", "steps", "branched_from"}
"""Fields in which the runs of an arm differ on purpose: seeds, horizons and trunks are counted and shown."""


@pytest.mark.parametrize("name", FIELDS)
def test_a_changed_field_is_told_by_the_comparison(name, base, root, tmp_path):
    told, paired = seen(base, changed(base, name, root), tmp_path)
    if name == "implementation":
        assert told == "attention implementation differ: auto and eager", "seconds per step depend on it, losses do not"
        assert paired
    elif name in OPERATIONAL:
        assert (told, paired) == ("", True)
    elif name in SHOWN:
        assert told == ""
        assert paired == (name == "branched_from")
    elif name in SAID:
        assert SAID[name] in told
    else:
        assert f"{name} " in told
        assert "training settings differ" in told
        assert not paired


def test_every_exception_is_accounted_for():
    assert COMPARED_ELSEWHERE.keys() == SAID.keys() | SHOWN | {"model"}
    assert not OPERATIONAL & COMPARED_ELSEWHERE.keys()
    assert OPERATIONAL | COMPARED_ELSEWHERE.keys() < {*FIELDS, "model"}


@pytest.mark.parametrize("name", [n for n in MODEL_FIELDS if n not in ("mlp", "attention")])
def test_a_changed_field_of_the_model_is_told(name, base, root, tmp_path):
    """MLP and attention are the arms' names."""
    if name == "d_vocab_used":  # the data's
        with pytest.raises(ValueError, match="must have the vocabulary of the data"):
            seen(base, changed_model(base, name, root), tmp_path)
        return
    told, _ = seen(base, changed_model(base, name, root), tmp_path)
    if name == "n_ctx":
        assert "must have one sequence length, got 6" in told
    else:
        assert f"{name} " in told


@pytest.mark.parametrize("name", FIELDS)
def test_a_changed_field_is_refused_by_resume(name, base, root):
    (base.folder / "checkpoints").mkdir(parents=True)
    claim_folder(base)
    other = changed(base, name, root)
    if name in OPERATIONAL:
        claim_folder(other)
        return
    with pytest.raises(ValueError, match=f"differing in .*{name}: "):
        claim_folder(other)


@pytest.mark.parametrize("name", MODEL_FIELDS)
def test_a_changed_field_of_the_model_is_refused_by_resume(name, base, root):
    (base.folder / "checkpoints").mkdir(parents=True)
    claim_folder(base)
    with pytest.raises(ValueError, match=r"differing in .*model\."):
        claim_folder(changed_model(base, name, root))


@pytest.mark.user_error
@pytest.mark.parametrize("name", [*FIELDS, "model"])
def test_a_value_of_another_type_is_refused(name, base):
    """A word such as "false" for a switch would be taken for true."""
    with pytest.raises(ValueError, match=name):
        base.replace(**{name: b"false"})
