"""A checkpoint is complete or ignored, and nothing that goes wrong while saving touches the ones before."""

import itertools
import json
import os
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.kills import killed_after
from tests.training.small import small_config
from tnlm.checkpoints.local import MARKER, find_defect
from tnlm.training.run import checkpointing
from tnlm.training.run.checkpointing import find_latest, load, prune, recover, save
from tnlm.training.run.outcomes import SaveError
from tnlm.training.run.start import build_model


@pytest.fixture
def model(tmp_path):
    return build_model(small_config(tmp_path), mixed=False)


def write(run: Path, step: int, model) -> Path:
    state = {"optimizer.embed.w_e.exp_avg": torch.full((3,), float(step), dtype=torch.bfloat16)}
    return save(run, step=step, model=model, tokenizer=None, tensors=state, facts={"recipe": "replication"})


def test_what_is_saved_is_loaded(tmp_path, model):
    path = write(tmp_path, 7, model)
    checkpoint = load(path)
    assert (checkpoint.step, checkpoint.facts["recipe"]) == (7, "replication")
    assert checkpoint.tensors["optimizer.embed.w_e.exp_avg"].dtype == torch.bfloat16
    torch.testing.assert_close(checkpoint.model_state(), dict(model.state_dict()), rtol=0, atol=0)
    assert (tmp_path / "latest").read_text() == "checkpoints/step_000007\n"
    assert find_latest(tmp_path) == (path, [])


def test_files_are_plain_data(tmp_path, model):
    """Nothing that could hold code: no pickle is ever written, so none is ever read."""
    names = {p.name for p in write(tmp_path, 7, model).iterdir()}
    assert names == {
        "COMPLETE",
        "README.md",
        "config.json",
        "model.safetensors",
        "training.json",
        "training.safetensors",
    }


def names(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*"))


def save_and_prune(run: Path, model) -> None:
    write(run, 8, model)
    prune(run, keep_last=1, keep_every=None)


def damage(run: Path) -> None:
    """The newest checkpoint no longer is what its hashes say; one byte, no size."""
    path = run / "checkpoints" / "step_000008" / "training.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def prepare(run: Path, model, start: str) -> None:
    """What lies in the run folder before the save that is killed."""
    run.mkdir()
    for step in {"first save": (), "third save": (2, 4), "over a damaged one": (4, 8)}[start]:
        write(run, step, model)
    if start == "over a damaged one":
        damage(run)


@pytest.mark.parametrize("start", ["first save", "third save", "over a damaged one"])
def test_kill_at_every_change_of_a_save_and_a_prune(start, tmp_path, model):
    """At each moment a complete checkpoint is there and ``latest`` names one; a restart loses and leaves nothing."""
    template, whole = tmp_path / "template", tmp_path / "whole"
    prepare(template, model, start)
    shutil.copytree(template, whole)
    save_and_prune(whole, model)
    for changes in itertools.count():
        run = tmp_path / f"run{changes}"
        shutil.copytree(template, run)
        with killed_after(changes) as died:
            save_and_prune(run, model)
        complete = [path for path in (run / "checkpoints").glob("step_*") if find_defect(path, contents=True) is None]
        if start != "first save":
            assert complete
            assert start == "over a damaged one" or run / (run / "latest").read_text().strip() in complete
        newest = restart(run)
        assert newest == max(complete, default=None)
        if newest is not None:
            assert (run / "latest").read_text() == f"checkpoints/{newest.name}\n"
            load(newest)
        assert not [name for name in names(run) if "/." in f"/{name}"]
        save_and_prune(run, model)
        assert [name for name in names(run) if ".damaged" not in name] == names(whole)
        if not died[0]:
            break
    assert changes > 25


def restart(run: Path) -> Path | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the damaged one, tested in test_resume.py
        return recover(run)[0]


def test_kill_at_every_change_of_a_recovery(tmp_path, model):
    template = tmp_path / "template"
    prepare(template, model, "over a damaged one")
    for name in (".step_000012.part", ".step_000002.removed.part"):
        shutil.copytree(template / "checkpoints" / "step_000004", template / "checkpoints" / name)
    (template / ".latest.1.part").write_text("check")
    for changes in itertools.count():
        run = tmp_path / f"run{changes}"
        shutil.copytree(template, run)
        with killed_after(changes) as died:
            restart(run)
        assert restart(run) == run / "checkpoints" / "step_000004"
        assert {path.name for path in run.iterdir()} == {"checkpoints", "latest"}
        assert {path.name for path in (run / "checkpoints").iterdir()} == {"step_000004", "step_000008.damaged"}
        assert (run / "latest").read_text() == "checkpoints/step_000004\n"
        if not died[0]:
            break
    assert changes > 10


def test_newest_complete_is_found_and_the_damaged_are_named(tmp_path, model):
    paths = [write(tmp_path, step, model) for step in (2, 4, 6, 8, 10)]
    (paths[4] / MARKER).unlink()
    shard = paths[3] / "training.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    (paths[2] / "model.safetensors").unlink()
    (paths[1] / MARKER).write_text("{")
    assert find_latest(tmp_path) == (
        paths[0],
        [
            "step_000010: no COMPLETE marker",
            f"step_000008: training.safetensors has {size - 1} bytes of {size}",
            "step_000006: model.safetensors is missing",
            "step_000004: unreadable COMPLETE marker",
        ],
    )


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "training.json", "config.json", MARKER])
@pytest.mark.parametrize("spoil", [flip_bit, zero, truncate, Path.unlink])
def test_any_damage_is_named_and_set_aside(spoil, name, tmp_path, model):
    for step in (2, 4):
        write(tmp_path, step, model)
    spoil(tmp_path / "checkpoints" / "step_000004" / name)
    # a bit of the marker is one of a hash: then the file with that hash is named
    named = r"[\w.]+" if (spoil, name) == (flip_bit, MARKER) else f".*{name}"
    with pytest.warns(UserWarning, match=f"continues from step_000002, passed over step_000004: {named}"):
        newest, removed = recover(tmp_path)
    assert (newest.name, removed) == ("step_000002", [])
    assert (tmp_path / "latest").read_text() == "checkpoints/step_000002\n"
    assert (tmp_path / "checkpoints" / "step_000004.damaged").is_dir()
    assert recover(tmp_path)[0] == newest


def test_a_file_that_cannot_be_read_is_a_defect(tmp_path, model, monkeypatch):
    """A disk that fails, and a live run that removes the checkpoint while another process looks at it."""
    path, stat = write(tmp_path, 2, model), Path.stat
    for error, said in (
        (OSError(5, "Input/output error"), "cannot be read: Input/output"),
        (FileNotFoundError(), "is m"),
    ):

        def fail(self, error=error, **options):
            if self.name == "training.json":
                raise error
            return stat(self, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", fail)
            assert find_defect(path).startswith(f"training.json {said}")


@pytest.mark.user_error
def test_incomplete_checkpoint_is_not_read(tmp_path, model):
    path = write(tmp_path, 2, model)
    (path / MARKER).unlink()
    with pytest.raises(ValueError, match="step_000002 is not complete: no COMPLETE marker"):
        load(path)


def test_disk_full_names_path_and_cause(tmp_path, model):
    before = write(tmp_path, 4, model)
    content = {p.name: p.read_bytes() for p in before.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(SaveError, match=r"checkpoint .*step_000008 could not be written: .*[Ff]ile too large"):
            write(tmp_path, 8, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert find_latest(tmp_path) == (before, [])
    assert {p.name: p.read_bytes() for p in before.iterdir()} == content


def test_any_refusal_while_flushing_is_a_save_error(tmp_path, model, monkeypatch):
    before, flush, flushes = write(tmp_path, 4, model), os.fsync, []

    def fail(moment: int) -> Callable[[int], None]:
        def fsync(descriptor: int) -> None:
            flushes.append(descriptor)
            if len(flushes) > moment:
                raise OSError(28, "No space left on device")
            flush(descriptor)

        return fsync

    for moment in range(8):
        flushes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail(moment))
            with pytest.raises(SaveError, match=r"step_000008 could not be written: .*No space left on device"):
                write(tmp_path, 8, model)
        assert find_latest(tmp_path) == (before, [])


def test_folder_that_cannot_be_made(tmp_path, model):
    (tmp_path / "checkpoints").write_text("a file where the folder belongs")
    with pytest.raises(SaveError, match=r"step_000008 could not be written: (Not a directory|File exists)"):
        write(tmp_path, 8, model)


@pytest.mark.parametrize(
    "keep_last, keep_every, stable_end, kept",
    [
        (1, None, None, [10]),
        (2, None, None, [8, 10]),
        (1, 4, None, [4, 8, 10]),
        (9, None, None, [2, 4, 6, 8, 10]),
        (1, None, 7, [6, 10]),
        (1, None, 4, [4, 10]),
        (3, None, 6, [6, 8, 10]),
        (2, 10, 1, [8, 10]),
    ],
)
def test_pruning(keep_last, keep_every, stable_end, kept, tmp_path, model):
    for step in (2, 4, 6, 8, 10):
        write(tmp_path, step, model)
    prune(tmp_path, keep_last=keep_last, keep_every=keep_every, stable_end=stable_end)
    assert checkpointing.complete_steps(tmp_path) == kept


def test_pruning_counts_complete_ones_only(tmp_path, model):
    """A damaged newest one must not push out the good one that a restart needs."""
    paths = [write(tmp_path, step, model) for step in (2, 4)]
    (paths[1] / MARKER).unlink()
    prune(tmp_path, keep_last=1, keep_every=None)
    assert find_latest(tmp_path)[0] == paths[0]


def test_saving_a_step_again_keeps_the_complete_one(tmp_path, model):
    path = write(tmp_path, 4, model)
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert write(tmp_path, 4, model) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp
    (path / MARKER).unlink()
    write(tmp_path, 4, model)
    assert json.loads((path / MARKER).read_text())["step"] == 4
