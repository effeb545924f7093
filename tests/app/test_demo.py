"""The demo as a newcomer meets it, on models that train in a second: its output, a second run, an interruption."""

import json
import signal

import pytest

from tnlm.app import demo, specimens
from tnlm.training.run import loop


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setenv(specimens.TINY, "1")


def test_it_is_interrupted_continues_compares_reads_and_writes(tiny, tmp_path, capsys, monkeypatch):
    update = loop.Trainer._update

    def interrupted(self):
        values = update(self)
        signal.raise_signal(signal.SIGINT)
        return values

    command = ["--out", str(tmp_path), "--steps", "4"]
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_update", interrupted)
        assert demo.main(command) == 128 + signal.SIGINT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("demo: stopped at step 1: ")

    assert demo.main(command) == 0
    out, err = capsys.readouterr()
    record = json.loads(out.splitlines()[-1])
    assert list(record["val_loss"]) == list(demo.ARMS)
    assert all(6 < loss < 7 for loss in record["val_loss"].values())
    for said in ("proves nothing about architectures", "relative difference to the forward", "reads to predict '"):
        assert said in out
    assert (tmp_path / "demo.html").read_text().startswith("<!doctype html>")
    assert [line.endswith("(what is done is kept)") for line in err.splitlines() if "==" in line] == [True, False]

    assert demo.main([*command[:-1], "5"]) == 2
    assert "holds another run, differing in steps: 4 -> 5" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tiny, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert demo.main(["--out", str(tmp_path / "file"), "--steps", "1"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
