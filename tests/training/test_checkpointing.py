"""A checkpoint is complete or ignored, and nothing that goes wrong while saving touches the ones before."""

import json
import resource
from pathlib import Path

import pytest
import torch

from tests.training.small import small_config
from tnlm.training import checkpointing
from tnlm.training.checkpointing import MARKER, find_defect, find_latest, load, prune, save
from tnlm.training.outcomes import SaveError
from tnlm.training.start import build_model


class Killed(BaseException):
    """No handler runs after it, as after kill -9."""


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


def count_syncs(monkeypatch, fail_at: int | None = None, error: BaseException | None = None) -> list[Path]:
    """Follow every flush to disk; raise at number ``fail_at``."""
    seen: list[Path] = []
    original = checkpointing._sync

    def sync(path: Path) -> None:
        seen.append(path)
        if len(seen) - 1 == fail_at:
            raise error
        original(path)

    monkeypatch.setattr(checkpointing, "_sync", sync)
    return seen


def test_kill_at_any_moment_of_a_save_leaves_the_one_before(tmp_path, model, monkeypatch):
    before = write(tmp_path, 4, model)
    content = {p.name: p.read_bytes() for p in before.iterdir()}
    with monkeypatch.context() as patch:
        seen = count_syncs(patch)
        write(tmp_path / "other", 8, model)
        moments = len(seen)
    assert moments > 6
    outcomes = set()
    for moment in range(moments):
        with monkeypatch.context() as patch:
            count_syncs(patch, fail_at=moment, error=Killed())
            with pytest.raises(Killed):
                write(tmp_path, 8, model)
        latest, skipped = find_latest(tmp_path)
        # the last flushes come after the renaming: the new one is complete then
        outcomes.add(latest.name)
        if latest == before:
            assert skipped == [".step_000008.part: an interrupted save"]
        else:
            assert find_defect(latest) is None
        assert {p.name: p.read_bytes() for p in before.iterdir()} == content
        checkpointing.remove_interrupted(tmp_path)
        for path in (tmp_path / "checkpoints").glob("step_000008/*"):
            path.unlink()
    assert outcomes == {"step_000004", "step_000008"}


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
    before = write(tmp_path, 4, model)
    for moment in range(6):
        with monkeypatch.context() as patch:
            count_syncs(patch, fail_at=moment, error=OSError(28, "No space left on device"))
            with pytest.raises(SaveError, match="step_000008 could not be written: No space left on device"):
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
