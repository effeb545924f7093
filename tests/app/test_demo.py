"""The demo as a newcomer meets it, on models that train in a second: its output, a second run, an interruption."""

import json
import re
import signal

import pytest

from tnlm.app import specimens
from tnlm.app.cli import main
from tnlm.training.cli import main as train_main
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

    command = ["demo", "--out", str(tmp_path), "--steps", "4"]
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_update", interrupted)
        assert main(command) == 128 + signal.SIGINT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("tnlm: stopped at step 1: ")

    assert main(command) == 0
    out, err = capsys.readouterr()
    for said in ("proves nothing about architectures", "relative difference to the forward", "reads to predict '"):
        assert said in out
    assert [line.endswith("(what is done is kept)") for line in err.splitlines() if "==" in line] == [True, False]

    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    runs = record["runs"]
    assert train_main(["compare", "--base", runs["base"], "--variant", runs["variant"]]) == 0
    compared, table = capsys.readouterr()
    reading = json.loads(compared)
    assert record["comparison"] == {key: reading[key] for key in record["comparison"]}
    table = re.sub(r"seconds/step .*", "", table).strip()
    assert table in re.sub(r"seconds/step .*", "", out)
    page = (tmp_path / "demo.html").read_text()
    assert page.startswith("<!doctype html>")
    assert f"{reading['final']['difference']:+.5f}" in page

    assert main([*command[:-1], "5"]) == 2
    assert "holds another run, differing in steps: 4 -> 5" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tiny, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["demo", "--out", str(tmp_path / "file"), "--steps", "1"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
