"""The attention benchmark before it meets a GPU: every row of that run at toy sizes, its budget, what it imports."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import attention, record

ROOT = Path(attention.__file__).parents[1]
BARE = """
import runpy, sys
from importlib.machinery import PathFinder

class Only:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else PathFinder.find_spec(name, path, target)

MISSING = set(sys.argv.pop(1).split(","))
sys.meta_path = [Only if finder is PathFinder else finder for finder in sys.meta_path]
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
MISSING = "huggingface_hub transformer_lens transformers plotly scipy jaxtyping tiktoken tokenizers tyro rich datasets"


def dry_run(folder):
    """The rows of a dry run where only what the GPU run may need can be imported; half a minute."""
    script = folder.parent / "bare.py"
    script.write_text(BARE)
    options = ["--dry", "--repeats", "1", "--commit", "c0ffee", "--out", str(folder)]
    done = subprocess.run(
        [sys.executable, script, MISSING.replace(" ", ","), ROOT / "benchmarks" / "attention.py", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    (written,) = folder.glob("*_attention_*.jsonl")
    assert written.read_text() == done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_dry_run_measures_every_row_and_says_where_it_comes_from(tmp_path):
    rows = dry_run(tmp_path / "results")
    assert_every_row_in_the_order_of_its_value(rows)
    assert_rows_name_their_source_and_what_they_are_compared_with(rows)


def assert_every_row_in_the_order_of_its_value(rows):
    names = [*attention.SDPA, "bilinear:triton", "squared:triton", "bilinear-half:triton", "einsum:published"]
    steps = ["step:softmax", "step:bilinear", "step:bilinear-half"]
    first, second = ("B{} T{} H{} D{}".format(*shape) for shape in attention.DRY.shapes)
    sections = [
        (None, "compilation", [None]),
        (None, "matmul 16^3", [None]),
        (first, "forward+backward", names),
        (first, "forward", names),
        (None, "training step", steps),
        (second, "forward+backward", names),
        (second, "forward", names),
    ]
    got = [(row.get("shape"), row["pass"], row.get("candidate")) for row in rows]
    # A candidate that cannot run says so before the others have been timed.
    assert sorted(got, key=str) == sorted(((s, p, n) for s, p, section in sections for n in section), key=str)
    assert list(dict.fromkeys(row[:2] for row in got)) == [section[:2] for section in sections]
    assert rows[0]["failed"] == []
    assert {row["candidate"] for row in rows if "unsupported" in row} == {"sdpa:cudnn"}
    assert "No viable backend" in next(row["unsupported"] for row in rows if "unsupported" in row)


def assert_rows_name_their_source_and_what_they_are_compared_with(rows):
    for row in rows:
        assert row["commit"] == "c0ffee"
        assert row["command"].startswith("python benchmarks/attention.py --dry --repeats 1")
        assert row["torch"] == torch.__version__
        assert row.keys() >= {"date", "triton", "python", "hardware"}
    timed = [row for row in rows if "ms" in row]
    for row in timed:
        assert row["repeats"] == 1
        assert row["ms_min"] <= row["ms_quartiles"][0] <= row["ms"] <= row["ms_quartiles"][1]
        base = (
            {"step:softmax"} if row["pass"] == "training step" else {"sdpa:default", "sdpa:flash", "einsum:published"}
        )
        assert row["ratio_to"].keys() == base
    softmax, full, half = (row["n_params"] for row in rows if row["pass"] == "training step")
    assert half == softmax < full


def test_the_models_of_the_training_step_are_the_published_ones():
    from tnlm.config import ModelConfig

    softmax, half, full = (
        ModelConfig.released(**attention.GPU.step_model, **kind).n_params
        for kind in (
            {"attention": "softmax"},
            {"attention": "bilinear", "d_qk": attention.GPU.step_half},
            {"attention": "bilinear"},
        )
    )
    assert half == softmax
    assert (round(softmax / 1e6), round(full / 1e6)) == (498, 546)


class Fake:
    """A candidate whose runs take one second of a clock that only they advance."""

    flop = 10**12

    def __init__(self, name, clock, fault=None):
        self.name, self.clock, self.fault, self.seconds = name, clock, fault, []

    def run(self):
        if self.fault:
            raise self.fault
        self.clock.now += 1


class Meter:
    def __init__(self, clock):
        self.clock = clock

    def seconds(self, call):
        start = self.clock.now
        call()
        return self.clock.now - start

    def growth(self, call):
        call()
        return {"bytes": 7}


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize("deadline, repeats", [(math.inf, 20), (14.5, 5), (3.5, 3)])
def test_a_budget_ends_the_turns_but_not_before_three(clock, deadline, repeats):
    tasks = [Fake("sdpa:flash", clock), Fake("bilinear:triton", clock)]
    rows = list(attention.interleaved(tasks, Meter(clock), 20, deadline))
    assert [row["repeats"] for row in rows] == [repeats, repeats]
    assert rows[1] == {
        "candidate": "bilinear:triton",
        "repeats": repeats,
        "ms": 1000.0,
        "ms_min": 1000.0,
        "ms_quartiles": [1000.0, 1000.0],
        "tflop_per_second": 1.0,
        "bytes": 7,
        "ratio_to": {"sdpa:flash": 1.0},
    }


def test_what_cannot_run_and_what_comes_too_late_are_rows(clock):
    tasks = [Fake("broken", clock, RuntimeError("no kernel\nfor you")), Fake("first", clock), Fake("late", clock)]
    rows = list(attention.interleaved(tasks, Meter(clock), 2, deadline=2.5))
    assert [row.get("unsupported") for row in rows] == ["RuntimeError: no kernel", "out of budget", None]
    assert rows[2]["candidate"] == "first"


def test_a_call_on_a_gpu_is_timed_between_events_after_the_flush(monkeypatch):
    order = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append(int(meter.flush.sum()))
            self.at = len(order)

        def elapsed_time(self, stop):
            return 1e3 * (stop.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 10)
    meter = attention.Cuda("cpu", 8)
    meter.flush.fill_(1)
    assert meter.seconds(lambda: order.append("call")) == 2
    assert order == [0, "call", 0]
    assert meter.growth(lambda: order.append("call")) == {"bytes": 7}


def test_every_kernel_of_a_run_is_compiled_first():
    gpu = attention.kernels_of(attention.GPU)
    assert gpu[0][1:] == (128, 128)
    for *_, d in attention.GPU.shapes:
        assert {("bilinear", d, d), ("squared", d, d), ("bilinear", d // 2, d)} <= set(gpu)
    assert attention.warm("cpu", torch.float32, "squared", 16, 16) is None
    assert attention.warm("cpu", torch.float64, "squared", 16, 16).startswith("squared 16,16: ValueError: ")


def test_the_environment_of_a_gpu_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    about = record.about("attention", device="cuda")
    assert about["hardware"] == "NVIDIA H200"
    assert about.keys() >= {"commit", "driver", "cuda", "cudnn", "triton", "torch"}
    assert record.output("no-such-program") == "unknown"
    assert record.version("no-such-package") == "not installed"
