"""Ranks on CPU with gloo, under the real torchrun: one and several launchers, and another world size on resume."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.small import small_config
from tnlm.training import train
from tnlm.training.checkpointing import complete_steps
from tnlm.training.distributed import World, on_main
from tnlm.training.metrics import read_metrics
from tnlm.training.presets import TrainConfig


def curve(folder: Path, kind: str = "train") -> dict[int, float]:
    return {e["step"]: e["loss"] for e in read_metrics(folder / "metrics.jsonl") if e["kind"] == kind}


def torchrun(config: TrainConfig, path: Path, *options: str, stderr: int = subprocess.PIPE) -> subprocess.Popen:
    """``tnlm-train run`` under torchrun, with a configuration file."""
    path.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tnlm.training.cli", "run", "--config"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    pipes = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    return subprocess.Popen([*command, str(path)], env=environment, **pipes)


def finish(*processes: subprocess.Popen) -> list[str]:
    """What each printed on stdout."""
    printed = []
    for process in processes:
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, (errors or output)[-3000:]
        printed.append(output)
    return printed


def close(ours: dict[int, float], theirs: dict[int, float], *, start: int) -> None:
    """First step of ``start`` on to 1e-6, the others to 1e-5, relative."""
    assert ours.keys() == theirs.keys()
    assert ours[start] == pytest.approx(theirs[start], rel=1e-6)
    assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=1e-5)


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
    close(curve(config.folder), curve(one.folder), start=1)
    assert list(curve(config.folder, "val").values()) == pytest.approx(
        list(curve(one.folder, "val").values()), rel=1e-5
    )
    assert complete_steps(config.folder) == [6, 12]

    resumed = config.replace(out=str(tmp_path / "resumed"), micro_batch=4)
    shutil.copytree(config.folder, resumed.folder)
    shutil.rmtree(resumed.folder / "checkpoints" / "step_000012")
    train(resumed, progress=False)
    close(curve(resumed.folder), curve(config.folder), start=7)
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
    close(curve(config.folder), curve(one.folder), start=7)


@pytest.mark.slow
def test_four_ranks_saved_two_and_one_resume(tmp_path):
    """One sequence per rank, then two micro-batches of one, then one micro-batch of four."""
    four = small_config(tmp_path, "four", steps=12, warmdown=0.5, save_every=6, keep_last=3, micro_batch=1)
    finish(torchrun(four, tmp_path / "four.json", "--standalone", "--nproc_per_node=4"))
    one = four.replace(out=str(tmp_path / "one"), micro_batch=4)
    train(one, progress=False)
    close(curve(four.folder), curve(one.folder), start=1)
    for ranks in (2, 1):
        resumed = four.replace(out=str(tmp_path / f"resumed{ranks}"), micro_batch=4 // ranks)
        shutil.copytree(four.folder, resumed.folder)
        shutil.rmtree(resumed.folder / "checkpoints" / "step_000012")
        finish(torchrun(resumed, tmp_path / f"{ranks}.json", "--standalone", f"--nproc_per_node={ranks}"))
        close(curve(resumed.folder), curve(four.folder), start=7)


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_once(tmp_path):
    config = small_config(tmp_path, "two", steps=100_000, save_every=None, val_every=100_000, log_every=100_000)
    process = torchrun(config, tmp_path / "two.json", "--standalone", "--nproc_per_node=2")
    log, deadline = config.folder / "metrics.jsonl", time.monotonic() + 120
    while len(read_metrics(log)) < 5 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    (step,) = complete_steps(config.folder)
    assert f"stopped at step {step}" in errors


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
