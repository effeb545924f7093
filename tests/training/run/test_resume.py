"""A resumed run is the uninterrupted one, bit for bit, however it was stopped."""

import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

import tnlm
from tests.kills import killed_after
from tests.training.small import small_config
from tnlm.checkpoints.local import mark_complete
from tnlm.training import train
from tnlm.training.cli import main
from tnlm.training.config import TrainConfig
from tnlm.training.data.shards import Shard, write_shard
from tnlm.training.run.branch import branch_config
from tnlm.training.run.checkpointing import complete_steps
from tnlm.training.run.cost import estimate
from tnlm.training.run.export import export_run
from tnlm.training.run.loop import Trainer
from tnlm.training.run.metrics import read_metrics
from tnlm.training.run.outcomes import Diverged, Interrupted

TIMING = ("time", "dt", "tok_s", "mfu", "max_mem")


def record(folder: Path) -> tuple[list[dict], dict[str, bytes]]:
    """Everything a run leaves that does not tell the time: its curve, and the bytes of its last checkpoint."""
    events = [event for event in read_metrics(folder / "metrics.jsonl") if event["kind"] in ("train", "val", "save")]
    last = folder / (folder / "latest").read_text().strip()
    tensors = load_file(last / "model.safetensors") | load_file(last / "training.safetensors")
    # another process draws from other generators
    bits = {k: save({k: t}) for k, t in tensors.items() if not k.startswith("random.")}
    return [{k: v for k, v in event.items() if k not in TIMING} for event in events], bits


def quietly(config: TrainConfig):
    return train(config, progress=False)


class Stop(BaseException):
    """As a kill: no handler of the loop runs."""


def stop_at(monkeypatch, step: int, action) -> None:
    """Call ``action`` once, before the update ``step``."""
    original = Trainer.train_step

    def patched(self):
        if self.step == step:
            monkeypatch.setattr(Trainer, "train_step", original)
            action()
        return original(self)

    monkeypatch.setattr(Trainer, "train_step", patched)


def raise_stop() -> None:
    raise Stop


# 12 is a save, 11 and 14 lie between two; 13 follows one step after a save
@pytest.mark.parametrize("step", [1, 11, 12, 13, 14])
def test_killed_run_continues_bit_for_bit(step, tmp_path, monkeypatch):
    whole = small_config(tmp_path, "whole", shuffle=True)
    quietly(whole)
    stop_at(monkeypatch, step, raise_stop)
    killed = whole.replace(out=str(tmp_path / "killed"))
    with pytest.raises(Stop):
        quietly(killed)
    quietly(killed)
    assert record(killed.folder) == record(whole.folder)


# Three shards of 301, 157 and 211 tokens: the published order leaves the first after 12 of these micro-batches
@pytest.mark.parametrize("recipe, precision", [("replication", "bfloat16"), ("replication-exact", "bfloat16")])
def test_every_recipe_continues_across_shards(recipe, precision, tmp_path, monkeypatch):
    whole = small_config(tmp_path, "whole", recipe=recipe, precision=precision, save_every=1, keep_last=20)
    quietly(whole)
    assert 20 * 4 * 6 > 301
    for step in (10, 12, 13):  # 10 is a validation as well
        killed = whole.replace(out=str(tmp_path / f"killed{step}"))
        stop_at(monkeypatch, step, raise_stop)
        with pytest.raises(Stop):
            quietly(killed)
        quietly(killed)
        assert record(killed.folder) == record(whole.folder)


def test_two_resumes_of_one_checkpoint_are_one_run(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    for step in (9, 10, 18):
        stop_at(monkeypatch, step, raise_stop)
        with pytest.raises(Stop):
            quietly(config)
    quietly(config)
    whole = config.replace(out=str(tmp_path / "whole"))
    quietly(whole)
    assert record(config.folder) == record(whole.folder)
    steps = [event["step"] for event in read_metrics(config.folder / "metrics.jsonl") if event["kind"] == "train"]
    assert steps == list(range(1, 21))


def test_random_generators_continue(tmp_path, monkeypatch):
    """Nothing in the loop draws from them, but what a user adds may."""
    draws: dict[str, tuple] = {}

    def draw(into: str):
        return lambda: draws.update({into: (torch.rand(1).item(), random.random(), np.random.rand())})  # noqa: NPY002

    config = small_config(tmp_path)
    stop_at(monkeypatch, 13, raise_stop)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    with pytest.raises(Stop):
        quietly(config)
    for name in ("first", "second"):
        copy = config.replace(out=str(tmp_path / name))
        subprocess.run(["cp", "-r", config.folder, copy.folder], check=True)
        random.seed(6)
        torch.manual_seed(6)
        stop_at(monkeypatch, 17, draw(name))
        quietly(copy)
    assert draws["first"] == draws["second"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_saves_and_says_so(number, tmp_path, monkeypatch):
    whole = small_config(tmp_path, "whole")
    quietly(whole)
    config = small_config(tmp_path)
    before = signal.signal(number, signal.SIG_DFL)  # nohup and background jobs ignore some
    stop_at(monkeypatch, 9, lambda: signal.raise_signal(number))
    try:
        with pytest.raises(
            Interrupted, match=r"stopped at step 10: .*step_000010; the same command resumes"
        ) as stopped:
            quietly(config)
        assert stopped.value.number == number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    quietly(config)
    saves = [e["step"] for e in read_metrics(config.folder / "metrics.jsonl") if e["kind"] == "save"]
    assert saves == [4, 8, 10, 12, 16, 20]
    assert record(config.folder)[1] == record(whole.folder)[1]


def test_a_signal_that_nohup_has_ignored_stays_ignored(tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop_at(monkeypatch, 9, lambda: signal.raise_signal(signal.SIGHUP))
        assert quietly(small_config(tmp_path)).steps == 20
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_repeated_signal_is_the_same_request(tmp_path, monkeypatch):
    """As from a launcher and a scheduler both; before, the second one ended the process without a save."""
    config = small_config(tmp_path)

    def signal_twice() -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)

    stop_at(monkeypatch, 9, signal_twice)
    with pytest.raises(Interrupted, match="stopped at step 10: ") as stopped:
        quietly(config)
    assert stopped.value.number == signal.SIGTERM
    assert complete_steps(config.folder)[-1] == 10


def test_signal_in_validation_or_save_is_one_complete_save(tmp_path, monkeypatch):
    for name in ("evaluate", "save"):
        config = small_config(tmp_path, name, val_every=4)
        original = getattr(Trainer, name)

        def signalled(self, original=original):
            if self.step == 8:
                signal.raise_signal(signal.SIGTERM)
            return original(self)

        monkeypatch.setattr(Trainer, name, signalled)
        with pytest.raises(Interrupted):
            quietly(config)
        monkeypatch.setattr(Trainer, name, original)
        assert sorted(p.name for p in (config.folder / "checkpoints").iterdir())[-1] in ("step_000008", "step_000009")


def test_kill_9_at_a_random_moment(tmp_path):
    """A real process, saving at every step; whatever it was doing, the same command gives the uninterrupted run."""
    whole = small_config(tmp_path, "whole", steps=24, save_every=1)
    quietly(whole)
    config = whole.replace(out=str(tmp_path / "killed"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "tnlm.training.cli", "run", "--config", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while not (config.folder / "checkpoints" / "step_000003").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.5))
    process.kill()
    _, errors = process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0), errors
    quietly(config)
    assert record(config.folder) == record(whole.folder)


def test_finished_run_is_left_alone(tmp_path):
    config = small_config(tmp_path)
    first = quietly(config)
    before = record(config.folder)
    assert quietly(config) == first
    assert record(config.folder) == before


def test_finished_run_and_its_checkpoints_load(tmp_path):
    config = small_config(tmp_path)
    result = quietly(config)
    model = tnlm.load(result.folder)
    assert model.config == config.model
    trained = load_file(config.folder / "checkpoints" / "step_000020" / "model.safetensors")
    torch.testing.assert_close(model.state_dict(), trained, rtol=0, atol=0)
    assert tnlm.load(config.folder / "checkpoints" / "step_000016").config == config.model


@pytest.mark.user_error
def test_export_tells_the_losses_of_its_step_alone(tmp_path):
    config = small_config(tmp_path, val_every=10)
    quietly(config)
    last, before = (
        export_run(config.folder, tmp_path / name, step=step) for name, step in (("last", None), ("16", 16))
    )
    curves = {(e["kind"], e["step"]): e.get("loss") for e in read_metrics(config.folder / "metrics.jsonl")}
    assert (last["train"], last["val"]) == (curves["train", 20], curves["val", 20])
    assert before["train"] == curves["train", 16]
    assert "val" not in before, "step 16 was not validated"
    assert "val_loss" not in (tmp_path / "16" / "README.md").read_text()
    with pytest.raises(ValueError, match=r"must hold a complete checkpoint of step 5, got 12, 16, 20"):
        export_run(config.folder, tmp_path / "5", step=5)


def test_branch_is_the_run_of_its_schedule(tmp_path):
    """From 20 steps to 16: both schedules are constant up to the checkpoint at 8, so nothing but the log tells."""
    trunk = small_config(tmp_path, "trunk", warmdown=0.4, keep_every=4, shuffle=True)
    quietly(trunk)
    branch = branch_config(trunk.folder, steps=16, out=str(tmp_path / "branch"))
    assert branch.branched_from.endswith("step_000008")
    quietly(branch)
    whole = trunk.replace(steps=16, out=str(tmp_path / "whole"))
    quietly(whole)
    assert record(branch.folder) == record(whole.folder)


def test_a_run_keeps_what_a_longer_branch_starts_from(tmp_path):
    """Saving nothing on the way and keeping one: the checkpoint before the warm-down is there all the same."""
    trunk = small_config(tmp_path, "trunk", warmdown=0.35, save_every=None, keep_last=1, shuffle=True)
    assert trunk.schedule.stable_end == 13
    quietly(trunk)
    assert complete_steps(trunk.folder) == [13, 20]
    branch = branch_config(trunk.folder, steps=24)
    assert branch.branched_from.endswith("step_000013")
    quietly(branch)
    assert complete_steps(branch.folder) == [16, 24]
    whole = trunk.replace(steps=24, out=str(tmp_path / "whole"))
    quietly(whole)
    (ours, our_weights), (theirs, their_weights) = record(branch.folder), record(whole.folder)
    assert our_weights == their_weights
    saved_by_the_trunk = [event for event in ours if event not in theirs]
    assert [(event["kind"], event["step"]) for event in saved_by_the_trunk] == [("save", 13)]


def test_the_kept_checkpoints_are_those_that_the_dry_run_counts(tmp_path):
    for i, changes in enumerate(({}, {"save_every": 3, "keep_every": 6, "keep_last": 1}, {"warmdown": 0.0})):
        config = small_config(tmp_path, f"run{i}", **changes)
        quietly(config)
        facts = estimate(config)
        held = list((config.folder / "checkpoints").iterdir())
        assert facts["kept_steps"] == complete_steps(config.folder)
        assert len(held) == len(facts["kept_steps"])
        size = sum(file.stat().st_size for path in held for file in path.iterdir())
        # beside the tensors: the states of three generators, 5 kB each, and names, shapes and shard identities
        assert 0 <= size - len(held) * facts["checkpoint_bytes"] < len(held) * 64_000


def test_longer_branch_of_a_constant_trunk(tmp_path):
    trunk = small_config(tmp_path, "trunk", steps=12, warmdown=0.0)
    quietly(trunk)
    branch = branch_config(trunk.folder, steps=20, warmdown=0.4)
    quietly(branch)
    whole = small_config(tmp_path, "whole", warmdown=0.4)
    quietly(whole)
    (ours, our_weights), (theirs, their_weights) = record(branch.folder), record(whole.folder)
    assert our_weights == their_weights
    assert [event for event in ours if event["step"] != 12] == [event for event in theirs if event["step"] != 12]


@pytest.mark.user_error
def test_branch_refuses_a_checkpoint_from_a_warmdown(tmp_path):
    trunk = small_config(tmp_path, "trunk", warmdown=0.5, keep_last=1)
    quietly(trunk)
    with pytest.raises(ValueError, match=r"checkpoint up to step 8.*got steps 10, 20; .* longer .* --save-every"):
        branch_config(trunk.folder, steps=16)
    with pytest.raises(ValueError, match=r"at step 20, at or before step 10 .*got steps 10, 20"):
        branch_config(trunk.folder, steps=40, at=20)


@pytest.mark.user_error
def test_another_run_is_refused_with_what_differs(tmp_path):
    config = small_config(tmp_path)
    quietly(config)
    other = config.replace(steps=30, lr_head=0.1).with_model(d_hidden=10)
    with pytest.raises(ValueError, match=r"steps: 20 -> 30; lr_head: 0.002 -> 0.1; model.d_hidden: 14 -> 10\. Choose"):
        quietly(other)
    assert json.loads((config.folder / "config.json").read_text())["steps"] == 20
    (config.folder / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="holds another run"):
        quietly(other)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "name, message",
    [
        ("tiny_train_000001.bin", r"which the run has read, number 1 was tiny_train_000001.bin of 1626 bytes"),
        ("tiny_val_000000.bin", r"the validation tokens are not those of .*step_000008"),
    ],
)
def test_other_data_is_refused(name, message, tmp_path, monkeypatch):
    config = small_config(tmp_path)
    stop_at(monkeypatch, 9, raise_stop)
    with pytest.raises(Stop):
        quietly(config)
    path = tmp_path / "data" / name
    ids = Shard(path).read()
    ids[[20, -1]] = 1
    write_shard(path, ids)
    with pytest.raises(ValueError, match=message):
        quietly(config)


def test_resume_and_branch_on_more_shards_than_the_run_began_with(tmp_path, monkeypatch, capsys):
    """13 steps of 24 tokens go into the second of three shards; 24 take the third, which is then another."""
    config = small_config(tmp_path, "trunk", warmdown=0.35)
    stop_at(monkeypatch, 14, raise_stop)
    with pytest.raises(Stop):
        quietly(config)
    data = tmp_path / "data"
    write_shard(data / "tiny_train_000003.bin", np.arange(180) % 53)
    write_shard(data / "tiny_train_000004.bin", np.arange(190) % 31)
    train(config)
    assert "the training shards have changed beyond what step 13 had read" in capsys.readouterr().err
    branch = branch_config(config.folder, steps=24)
    quietly(branch)
    for run in (config, branch):
        whole = run.replace(out=str(tmp_path / f"whole{run.steps}"), branched_from=None)
        quietly(whole)
        assert record(run.folder)[1] == record(whole.folder)[1]


@pytest.mark.user_error
@pytest.mark.parametrize(
    "name, message",
    [
        ("random.torch", "must hold the states of all random generators, missing random.torch"),
        ("optimizer.embed.w_e.exp_avg", r"state of embed.w_e must be exp_avg, exp_avg_sq, step"),
        ("optimizer.blocks.0.attn.w_q2.momentum_buffer", "missing blocks.0.attn.w_q2; unexpected none"),
    ],
)
def test_missing_state_is_an_error(name, message, tmp_path, monkeypatch):
    config = small_config(tmp_path)
    stop_at(monkeypatch, 9, raise_stop)
    with pytest.raises(Stop):
        quietly(config)
    path = config.folder / "checkpoints" / "step_000008" / "training.safetensors"
    save_file({k: v for k, v in load_file(path).items() if k != name}, path)
    mark_complete(path.parent, step=8)
    with pytest.raises(ValueError, match=message):
        quietly(config)


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.user_error
@pytest.mark.parametrize("name", ["training.safetensors", "model.safetensors", "training.json"])
def test_a_pickle_in_a_checkpoint_is_never_run(name, tmp_path, monkeypatch):
    config = small_config(tmp_path)
    stop_at(monkeypatch, 9, raise_stop)
    with pytest.raises(Stop):
        quietly(config)
    path, mark = config.folder / "checkpoints" / "step_000008" / name, tmp_path / "PWNED"
    payload = pickle.dumps(Hostile(mark))
    path.write_bytes(payload.ljust(path.stat().st_size, b"."))
    mark_complete(path.parent, step=8)
    with pytest.raises(ValueError, match="step_000008"):
        quietly(config)
    assert not mark.exists()
    pickle.loads(payload)
    assert mark.exists(), "the payload would have been seen"


@pytest.mark.user_error
def test_another_precision_is_refused(tmp_path, monkeypatch):
    config = small_config(tmp_path, recipe="replication-exact", precision="bfloat16")
    stop_at(monkeypatch, 9, raise_stop)
    with pytest.raises(Stop):
        quietly(config)
    saved = json.loads((config.folder / "config.json").read_text())
    (config.folder / "config.json").write_text(json.dumps({**saved, "precision": "float32"}))
    with pytest.raises(
        ValueError, match=r"holds .* in torch.bfloat16, this run in torch.float32; resume with the same"
    ):
        quietly(config.replace(precision="float32"))


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_checkpoint_is_named_and_the_one_before_continues(tmp_path, monkeypatch):
    """One bit, in a file that stays readable; in the end the run is the one that was never damaged."""
    whole = small_config(tmp_path, "whole")
    quietly(whole)
    config = small_config(tmp_path)
    stop_at(monkeypatch, 9, raise_stop)
    with pytest.raises(Stop):
        quietly(config)
    flip_bit(config.folder / "checkpoints" / "step_000008" / "model.safetensors")
    with pytest.warns(UserWarning, match="continues from step_000004, passed over step_000008: model.safetensors"):
        quietly(config)
    assert record(config.folder) == record(whole.folder)
    assert complete_steps(config.folder) == complete_steps(whole.folder)


@pytest.mark.user_error
def test_no_undamaged_checkpoint_is_an_error_that_changes_nothing(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    stop_at(monkeypatch, 9, raise_stop)
    with pytest.raises(Stop):
        quietly(config)
    for step in (4, 8):
        flip_bit(config.folder / "checkpoints" / f"step_{step:06d}" / "model.safetensors")
    before = {p: p.read_bytes() for p in config.folder.rglob("*") if p.is_file()}
    with pytest.raises(
        ValueError, match=r"no checkpoint that .* \(step_000008: model.safetensors is damaged.*step_000004"
    ):
        quietly(config)
    assert {p: p.read_bytes() for p in config.folder.rglob("*") if p.is_file()} == before


@pytest.mark.user_error
def test_damaged_checkpoint_is_neither_branched_from_nor_exported(tmp_path):
    trunk = small_config(tmp_path, "trunk", warmdown=0.4, keep_every=4)
    quietly(trunk)
    branch = branch_config(trunk.folder, steps=16, out=str(tmp_path / "branch"))
    flip_bit(Path(branch.branched_from) / "training.safetensors")
    with pytest.raises(ValueError, match=r"step_000008 cannot be used: training.safetensors is damaged: its sha256"):
        quietly(branch)
    with pytest.raises(ValueError, match=r"step_000008 cannot be used: training.safetensors is damaged"):
        export_run(trunk.folder, tmp_path / "exported", step=8)
    assert not (tmp_path / "exported").exists()


def test_a_lost_log_is_said_and_training_continues(tmp_path, monkeypatch, capsys):
    config = small_config(tmp_path)
    stop_at(monkeypatch, 9, raise_stop)
    with pytest.raises(Stop):
        train(config)
    loss = next(
        e["loss"] for e in read_metrics(config.folder / "metrics.jsonl") if (e["kind"], e["step"]) == ("train", 8)
    )
    stop_at(monkeypatch, 9, raise_stop)
    with pytest.raises(Stop):
        train(config)
    assert f"continues after step 8, whose loss was {loss:.4f}\n" in capsys.readouterr().err
    (config.folder / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"lacks 8 of the 8 updates of this run, from step 1 to 8"):
        train(config)
    assert "continues after step 8, whose loss is not in " in capsys.readouterr().err
    assert [e["step"] for e in read_metrics(config.folder / "metrics.jsonl") if e["kind"] == "train"] == [*range(9, 21)]


def snapshot(folder: Path) -> dict[str, bytes]:
    """What a finished run leaves, without what tells the time or the folder: names, checkpoints, ``latest``."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
    return {name: (folder / name).read_bytes() if name == "latest" else b"" for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "branch"])
def test_kill_at_every_change_of_a_run(kind, tmp_path):
    """The same command gives the run that was never killed, and nothing is left over."""
    trunk = small_config(tmp_path, "trunk", steps=2, val_every=2, save_every=1, keep_last=1, warmdown=0.0)
    whole = trunk
    if kind == "branch":
        quietly(trunk)
        whole = branch_config(trunk.folder, steps=3, warmdown=0.4, out=str(tmp_path / "whole"))
    quietly(whole)
    expected, files = record(whole.folder), snapshot(whole.folder)
    for changes in itertools.count():
        config = whole.replace(out=str(tmp_path / f"killed{changes}"))
        with killed_after(changes) as died:
            quietly(config)
        if not died[0]:
            break
        quietly(config)
        assert record(config.folder) == expected
        assert snapshot(config.folder) == files
        shutil.rmtree(config.folder)
    assert changes > 50


def test_second_run_in_a_live_folder_leaves_the_first_one_whole(tmp_path, monkeypatch):
    whole = small_config(tmp_path, "whole")
    quietly(whole)
    config, refused = small_config(tmp_path), []

    def start_second() -> None:
        with pytest.raises(ValueError, match=f"is in use by process {os.getpid()} on ") as error:
            quietly(config)
        refused.append(error)

    stop_at(monkeypatch, 9, start_second)
    quietly(config)
    assert len(refused) == 1
    assert record(config.folder) == record(whole.folder)


HOLD = """
import sys
from pathlib import Path
from tnlm.output.files import lock
with lock(Path(sys.argv[1]), what="x"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_second_process_in_a_run_folder_is_refused_and_changes_nothing(tmp_path, monkeypatch, capsys):
    """The first one holds the folder in a process of its own and is killed: the kernel releases the lock."""
    config = small_config(tmp_path)
    stop_at(monkeypatch, 9, raise_stop)
    with pytest.raises(Stop):
        quietly(config)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, config.folder / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        first.stdout.readline()
        before = {p: p.read_bytes() for p in config.folder.rglob("*") if p.is_file()}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config.to_dict()))
        assert main(["run", "--config", str(path)]) == 2
        assert re.search(
            rf"the run folder .*run is in use by process {first.pid} on .*, since 2\d{{3}}-", capsys.readouterr().err
        )
        assert {p: p.read_bytes() for p in config.folder.rglob("*") if p.is_file()} == before
        first.kill()
    quietly(config)
    assert not (config.folder / ".lock").exists()
    assert complete_steps(config.folder)[-1] == 20


@pytest.mark.user_error
def test_a_saved_model_is_not_overwritten_by_a_run(tmp_path):
    config = small_config(tmp_path)
    tnlm.save(tnlm.Transformer(config.model), config.folder)
    before = {p.name: p.read_bytes() for p in config.folder.iterdir()}
    with pytest.raises(ValueError, match=r"config.json is not the configuration of a run and would be lost; choose"):
        quietly(config)
    assert {p.name: p.read_bytes() for p in config.folder.iterdir()} == before


def test_divergence_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    config, nan = small_config(tmp_path), float("nan")

    def poison() -> None:
        monkeypatch.setattr(
            "tnlm.training.run.loop.MeanLoss.forward", lambda self, *_: self.model.unembed.w_u.sum() * nan
        )

    stop_at(monkeypatch, 10, poison)
    with pytest.raises(Diverged, match=r"the loss is nan at step 11; the last complete checkpoint is .*step_000008"):
        quietly(config)
    monkeypatch.undo()
    quietly(config)
    whole = small_config(tmp_path, "whole")
    quietly(whole)
    assert record(config.folder) == record(whole.folder)


def test_gradient_that_is_not_finite_changes_nothing(tmp_path):
    trainer = Trainer(small_config(tmp_path), progress=False)
    trainer.model.unembed.w_u.register_hook(lambda g: g * float("inf"))
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(Diverged, match=r"the gradient norm is (nan|inf) at step 1; no checkpoint had been saved"):
        trainer.train_step()
    torch.testing.assert_close(dict(trainer.model.named_parameters()), before, rtol=0, atol=0)
