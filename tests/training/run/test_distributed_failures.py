"""Ranks that fail, are interrupted, or are started wrongly: messages, exit codes, and what is saved."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests.training.small import small_config
from tests.training.torchrun import torchrun
from tnlm.training import train
from tnlm.training.run.distributed import World, on_main, process_group

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def signals() -> ModuleType:
    spec = importlib.util.spec_from_file_location("signals_benchmark", ROOT / "benchmarks" / "signals.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SLOW_MODES = ["launcher", "workers", "both, 0 ms apart", "both, 5 ms apart", "both, 500 ms apart"]


@pytest.mark.parametrize("mode", ["both, 50 ms apart", *(pytest.param(m, marks=pytest.mark.slow) for m in SLOW_MODES)])
def test_sigterm_leaves_a_complete_checkpoint_whoever_gets_it(mode, signals, tmp_path):
    assert {mode, *SLOW_MODES} <= signals.MODES.keys()
    row = signals.interrupt(tmp_path, tmp_path / "run", mode)
    assert signals.is_whole(row), row
    assert row["workers"] == 2
    assert row["exit_code"] == 1, "of the launcher, as docs/training.md says"
    assert row["message"]


FAILING_RANK = """
import os, sys
from tnlm.training import cli
from tnlm.training.run import loop
original = loop.Trainer.train_step
def step(self):
    if self.step == 2 and os.environ["RANK"] == "1":
        raise ValueError("the fault of rank 1")
    return original(self)
loop.Trainer.train_step = step
sys.exit(cli.main())
"""


def test_a_failure_of_one_rank_is_reported_and_ends_the_job(tmp_path):
    """Rank 0 waits in a collective that rank 1 never joins."""
    config, script = small_config(tmp_path, steps=12), tmp_path / "failing.py"
    script.write_text(FAILING_RANK)
    process = torchrun(config, tmp_path / "run.json", "--standalone", "--nproc_per_node=2", program=[str(script)])
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "tnlm-train: the fault of rank 1\n" in errors


def test_the_group_is_destroyed_after_success_only(monkeypatch):
    """Under NCCL, destroying waits for the ranks that still are in a collective, and hides the failure."""
    done = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: done.append("init"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroy"))
    with pytest.raises(RuntimeError, match="a fault"), process_group(World(size=2), torch.device("cpu")):
        raise RuntimeError("a fault")
    assert done == ["init"]
    with process_group(World(size=2), torch.device("cpu")):
        pass
    assert done == ["init", "init", "destroy"]


@pytest.mark.user_error
@pytest.mark.parametrize(
    "environment, message",
    [
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE must be at least 1, got 0"),
        ({"WORLD_SIZE": "abc", "RANK": "0"}, "WORLD_SIZE must be an integer >= 0, got 'abc'"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK must be an integer >= 0, got '-1'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK must be below WORLD_SIZE, got RANK=2, WORLD_SIZE=2"),
        ({"RANK": "0"}, "without WORLD_SIZE; start with torchrun"),
        ({"WORLD_SIZE": "4"}, "without RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "2 ranks need MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_environment_that_torchrun_did_not_set(environment, message):
    with pytest.raises(ValueError, match=message):
        World.from_environment(environment)


def test_environment_of_torchrun_and_of_none():
    assert World.from_environment({"PATH": "/bin"}) == World(rank=0, size=1, local_rank=0)
    full = {"WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert World.from_environment(full) == World(rank=9, size=16, local_rank=1)
    assert not World.from_environment(full).main


@pytest.mark.user_error
@pytest.mark.parametrize("size, nearest", [(3, 6), (8, 16)])
def test_batch_that_does_not_divide_is_refused_before_anything_is_made(size, nearest, tmp_path, monkeypatch):
    config = small_config(tmp_path, batch=4 if size == 3 else 12)
    environment = {"WORLD_SIZE": size, "RANK": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(
        ValueError, match=rf"batch={config.batch} sequences, micro_batch=2, world_size={size}.* {nearest}$"
    ):
        train(config, progress=False)
    assert not config.folder.exists()


def test_one_process_needs_no_group():
    assert on_main(lambda: 5, World()) == 5
