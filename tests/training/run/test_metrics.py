"""The log and its views."""

import json
import math
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import get_args

import pytest

from tnlm.training.config import Tracker
from tnlm.training.run import metrics
from tnlm.training.run.metrics import MetricsLog, Progress, Speed, Tracking, cut_back, peak_flops, read_metrics

VAL = {"loss": 1 / 3, "bits_per_byte": None, "val_tokens": 60}


def test_events_are_read_as_written(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    now = iter([1000.0004, 1001.25])
    monkeypatch.setattr(metrics.time, "time", lambda: next(now))
    log.append("val", step=0, **VAL)
    log.append("train", step=1, loss=2.5)
    # before closing: every line is flushed
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"kind": "val", "time": 1000.0, "step": 0, **VAL},
        {"kind": "train", "time": 1001.25, "step": 1, "loss": 2.5},
    ]
    log.close()


def test_a_full_disk_names_the_file():
    log = MetricsLog(Path("/dev/full"))
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        log.append("train", step=1)
    log.close()


def test_cut_back_drops_what_comes_after_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    more = {"start": {"warmdown_steps": 1, "data": {}}, "train": {"loss": 2.5}, "save": {}, "end": {}}
    kinds = [("start", 0), ("train", 1), ("train", 2), ("save", 2), ("end", 2), ("train", 3)]
    *events, last = [{"kind": kind, "step": step, **more[kind]} for kind, step in kinds]
    path.write_text("".join(json.dumps(event) + "\n" for event in [*events, last]) + '{"kind": "tr')
    assert cut_back(path, 2, into=path) == events[:-1]
    assert read_metrics(path) == events[:-1]
    assert cut_back(path, 1, into=tmp_path / "branch.jsonl") == events[:2]
    assert read_metrics(path) == events[:-1]


def test_updates_that_the_log_lost_are_said(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.warns(UserWarning, match=r"metrics.jsonl lacks 5 of the 5 updates of this run, from step 1 to 5"):
        assert cut_back(path, 5, into=path) == []
    events = [{"kind": "train", "step": step, "loss": 2.5} for step in (1, 2, 4, 5, 7)]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.warns(UserWarning, match=r"lacks 2 of the 6 updates of this run, from step 3 to 6"):
        assert cut_back(path, 6, into=path) == events[:4]


@pytest.mark.user_error
@pytest.mark.parametrize(
    "line",
    [
        *(b"not json", b"5", b"[]", b"null", b"{}", b'{"kind": "val"}', b'{"step": 3}', b"\0\0\0", b"\xff\xfe"),
        b'{"kind": "train", "step": 3}',
        b'{"kind": "train", "step": 3, "loss": "2.5"}',
        b'{"kind": "val", "step": 3, "loss": null, "bits_per_byte": null, "val_tokens": 60}',
        b'{"kind": "val", "step": 3, "loss": 2.5}',
        b'{"kind": "start", "step": 0, "data": null, "warmdown_steps": 8}',
        b'{"kind": ["val"], "step": 3}',
    ],
)
def test_a_line_that_is_no_event_is_named(line, tmp_path):
    """Anywhere but at the end, where a kill may have cut a line short."""
    event, path = json.dumps({"kind": "val", "step": 3, **VAL}).encode() + b"\n", tmp_path / "m.jsonl"
    path.write_bytes(event + line + b"\n" + event)
    with pytest.raises(ValueError, match=r"m\.jsonl line 2 must be a JSON object with kind, step and .*got .*; remove"):
        read_metrics(path)
    path.write_bytes(event + line)
    assert read_metrics(path) == [json.loads(event)]


def test_peak_of_a_known_device_and_none_of_another():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("Another GPU") is None


def test_bits_per_byte():
    """One nat per token of two bytes is 1 / (2 ln 2) bits per byte."""
    assert metrics.bits_per_byte(1.0, 10, 20) == pytest.approx(1 / (2 * math.log(2)))


def test_plain_lines_off_a_terminal(capsys):
    progress = Progress(steps=9726, start=0, enabled=True)
    progress.train({"step": 500, "loss": 4.123, "lr": 1.0, "tok_s": 1.02e6, "mfu": 0.41}, eta=5025.0)
    progress.train({"step": 510, "loss": 4.1, "lr": 1.0}, eta=None)
    progress.close()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "step 500/9726  loss 4.1230  lr 1.00  1.02M tok/s  mfu 41%  eta 1:23:45"
    assert second == "step 510/9726  loss 4.1000  lr 1.00"


def test_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress(steps=40, start=10, enabled=True)
    progress.train({"step": 20, "loss": 4.123, "lr": 1.0, "tok_s": 1020.0}, eta=5.0)
    progress.say("step 20/40  val 4.0000")
    progress.close()
    shown = capsys.readouterr().err
    assert "20/40" in shown
    assert "loss 4.1230  1.02k tok/s" in shown
    assert "val 4.0000" in shown


def test_other_ranks_say_nothing(capsys):
    progress = Progress(steps=40, start=0, enabled=False)
    progress.train({"step": 20, "loss": 4.0, "lr": 1.0}, eta=5.0)
    progress.say("hello")
    assert capsys.readouterr() == ("", "")


def test_speed_leaves_out_the_first_step(monkeypatch):
    now = iter([0.0, 0.0, 100.0, 100.0, 102.0, 102.0, 106.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(now))
    speed = Speed()
    for expected in (100.0, 2.0, 4.0):
        speed.start()
        assert speed.stop() == expected
    assert speed.per_step() == 3.0


def test_tracker_gets_numbers_under_their_kind(monkeypatch, tmp_path):
    (tmp_path / "nano-s0").mkdir()
    logged: list = []
    run = types.SimpleNamespace(log=logged.append, finish=lambda: logged.append("finished"))
    fake = types.SimpleNamespace(init=lambda **kwargs: logged.append(kwargs) or run)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    tracking = Tracking("trackio", folder=tmp_path / "nano-s0", config={"steps": 3})
    tracking.log("train", {"step": 1, "loss": 2.5, "path": "x"})
    tracking.close()
    assert logged == [
        {"project": "tnlm", "name": "nano-s0", "config": {"steps": 3}, "resume": "allow"},
        {"train/step": 1, "train/loss": 2.5},
        "finished",
    ]


def test_wandb_continues_a_resumed_run_and_another_folder_is_another_run(monkeypatch, tmp_path):
    begun: list = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **kwargs: begun.append(kwargs)))
    for name in ("a", "a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        Tracking("wandb", folder=tmp_path / name, config={})
    first, again, other = (kwargs["id"] for kwargs in begun)
    assert first == again != other
    assert [kwargs["resume"] for kwargs in begun] == ["allow"] * 3
    assert [kwargs["name"] for kwargs in begun] == ["a", "a", "b"]


def test_tensorboard_gets_each_number_at_its_step(monkeypatch, tmp_path):
    written: list = []

    class SummaryWriter:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, *values):
            written.append(values)

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    tracking = Tracking("tensorboard", folder=tmp_path, config={})
    tracking.log("val", {"step": 7, "loss": 2.5, "path": "x", "tokens": 70})
    tracking.close()
    assert written == [str(tmp_path / "tensorboard"), ("val/loss", 2.5, 7), ("val/tokens", 70, 7), "closed"]


def test_every_tracker_comes_with_the_extra():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    names = {re.match(r"\w+", needed)[0] for needed in project["optional-dependencies"]["trackers"]}
    assert names == {*get_args(Tracker)} - {"none"}


def test_failing_tracker_is_reported_once_and_dropped(monkeypatch, capsys, tmp_path):
    def fail(values):
        raise ConnectionError("no route")

    fake = types.SimpleNamespace(init=lambda **kwargs: types.SimpleNamespace(log=fail, finish=lambda: None))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracking = Tracking("wandb", folder=tmp_path, config={})
    tracking.log("train", {"loss": 1.0})
    tracking.log("train", {"loss": 1.0})
    assert capsys.readouterr().err == "tracking stopped: ConnectionError: no route\n"
    monkeypatch.setitem(sys.modules, "trackio", None)
    Tracking("trackio", folder=tmp_path, config={})
    assert "tracking stopped: ModuleNotFoundError" in capsys.readouterr().err


@pytest.mark.user_error
def test_a_folder_is_no_log(tmp_path):
    with pytest.raises(ValueError, match=r"must be a file, but is a folder; rename or remove it"):
        read_metrics(tmp_path)
