"""Ranks on CPU with gloo, under the real torchrun: one and several launchers, and another world size on resume."""

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from tests.limits import assert_close
from tests.training.small import small_config
from tests.training.torchrun import finish, torchrun
from tnlm.training import train
from tnlm.training.run.checkpointing import complete_steps
from tnlm.training.run.metrics import read_metrics


def curve(folder: Path, kind: str = "train") -> dict[int, float]:
    return {e["step"]: e["loss"] for e in read_metrics(folder / "metrics.jsonl") if e["kind"] == kind}


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
