"""Ranks on CPU with gloo, under the real torchrun: one and several launchers, and another world size on resume."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests.limits import assert_close
from tests.training.small import small_config
from tnlm.training import train
from tnlm.training.config import TrainConfig
from tnlm.training.run.checkpointing import complete_steps
from tnlm.training.run.distributed import World, on_main, process_group
from tnlm.training.run.metrics import read_metrics


def curve(folder: Path, kind: str = "train") -> dict[int, float]:
    return {e["step"]: e["loss"] for e in read_metrics(folder / "metrics.jsonl") if e["kind"] == kind}


ROOT = Path(__file__).resolve().parents[3]
CLI = ("-m", "tnlm.training.cli")


def torchrun(
    config: TrainConfig, path: Path, *options: str, program: Sequence[str] = CLI, stderr: int = subprocess.PIPE
) -> subprocess.Popen:
    """``tnlm-train run`` under torchrun, with a configuration file."""
    path.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "torch.distributed.run", *options, *program, "run", "--config"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    pipes = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    return subprocess.Popen([*command, str(path)], env=environment, **pipes)


def finish(*processes: subprocess.Popen) -> list[str]:
    """What each printed on stdout."""
    printed = []
    for process in processes:
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, (errors or output)[-3000:]
        printed.append(output)
    return printed


def assert_same_losses(ours: dict[int, float], theirs: dict[int, float], *, start: int) -> None:
    """The first step from ``start`` differs by the rounding of one forward, the others by that of training too."""
    assert ours.keys() == theirs.keys()
    assert_close(ours[start], theirs[start], roundings=64, dtype=torch.float32)
    assert_close(ours, theirs, dtype=torch.float32)


def test_two_ranks_are_one_and_resume_as_one(tmp_path):
    """Each rank one micro-batch of two; Muon's matrices are shared out. Then one rank continues what two saved."""
    config = small_config(
        tmp_path, "two", steps=12, warmdown=0.5, save_every=6, keep_last=3, tokenizer="bytes"
    )  # so it samples
    config = config.replace(model=config.model.replace(d_vocab=256, d_vocab_used=256))
    launched = torchrun(config, tmp_path / "two.json", "--standalone", "--nproc_per_node=2", stderr=subprocess.STDOUT)
    (printed,) = finish(launched)
    records = [line for line in printed.splitlines() if line.startswith("{")]
    assert len(records) == 1, "rank 0 alone prints the record"
    assert json.loads(records[0])["folder"] == str(config.folder)
    assert "sample: " in printed
    assert printed.splitlines()[-1] == records[0], "and nothing follows it, on either stream"
    one = config.replace(out=str(tmp_path / "one"))
    train(one, progress=False)
    assert_same_losses(curve(config.folder), curve(one.folder), start=1)
    assert_close(curve(config.folder, "val"), curve(one.folder, "val"), dtype=torch.float32)
    assert complete_steps(config.folder) == [6, 12]

    resumed = config.replace(out=str(tmp_path / "resumed"), micro_batch=4)
    shutil.copytree(config.folder, resumed.folder)
    shutil.rmtree(resumed.folder / "checkpoints" / "step_000012")
    train(resumed, progress=False)
    assert_same_losses(curve(resumed.folder), curve(config.folder), start=7)
    events = [e for e in read_metrics(resumed.folder / "metrics.jsonl") if e["kind"] in ("start", "resume")]
    assert [(e["kind"], e["world_size"], e["accumulation"]) for e in events] == [("start", 2, 1), ("resume", 1, 1)]


def test_two_launchers_continue_what_one_rank_saved(tmp_path):
    """Two nodes, as far as torchrun can tell: each launcher starts one rank and they meet at an address."""
    one = small_config(tmp_path, "one", steps=12, warmdown=0.5, save_every=6, keep_last=3)
    train(one, progress=False)
    config = one.replace(out=str(tmp_path / "nodes"), micro_batch=1)
    shutil.copytree(one.folder, config.folder)
    shutil.rmtree(config.folder / "checkpoints" / "step_000012")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meet = ["--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    finish(*(torchrun(config, tmp_path / f"node{i}.json", *meet) for i in range(2)))
    assert_same_losses(curve(config.folder), curve(one.folder), start=7)


@pytest.mark.slow
def test_four_ranks_saved_two_and_one_resume(tmp_path):
    """One sequence per rank, then two micro-batches of one, then one micro-batch of four."""
    four = small_config(tmp_path, "four", steps=12, warmdown=0.5, save_every=6, keep_last=3, micro_batch=1)
    finish(torchrun(four, tmp_path / "four.json", "--standalone", "--nproc_per_node=4"))
    one = four.replace(out=str(tmp_path / "one"), micro_batch=4)
    train(one, progress=False)
    assert_same_losses(curve(four.folder), curve(one.folder), start=1)
    for ranks in (2, 1):
        resumed = four.replace(out=str(tmp_path / f"resumed{ranks}"), micro_batch=4 // ranks)
        shutil.copytree(four.folder, resumed.folder)
        shutil.rmtree(resumed.folder / "checkpoints" / "step_000012")
        finish(torchrun(resumed, tmp_path / f"{ranks}.json", "--standalone", f"--nproc_per_node={ranks}"))
        assert_same_losses(curve(resumed.folder), curve(four.folder), start=7)


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
