"""The page of first steps: every block runs, in this process and with short trainings; README leads there."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from tnlm.app import cli
from tnlm.training import cli as training_cli

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {"tnlm": cli.main, "tnlm-train": training_cli.main}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("newcomer_tasks", ROOT / "scripts" / "newcomer_tasks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_block_runs(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    said = {}
    for title, blocks in script.tasks():
        for language, text in blocks:
            if language == "python":
                exec(compile(text, title, "exec"), {})
                continue
            for line in text.splitlines():
                program, *argv = shlex.split(script.shortened(line, 2))
                assert COMMANDS[program](argv) == 0, line
        said[title[0]] = capsys.readouterr().out
    assert list(said) == list("123456")
    assert "cross-entropy, nats per token" in said["1"]
    assert "remainder (rounding)" in said["2"]
    assert "largest eigenvalue" in said["3"]
    assert "torch.Size([1, 4, " in said["4"]
    assert "verdict" in said["5"]
    assert "E1 matched" in (tmp_path / "comparison" / "compare.html").read_text()
    assert "numerics" in said["6"]
    assert "largest difference to the recorded logits" in said["6"]


def test_a_failing_block_is_reported(script, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("## 1. Works\n```bash\ntrue\n```\n## 2. Breaks\n```bash\nfalse\ntrue\n```\n## 3. After\n")
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["newcomer_tasks"])
    assert script.main() == 1
    out = capsys.readouterr().out
    assert "ok     1. Works" in out
    assert "FAILED 2. Breaks" in out
    assert "After" not in out


def test_steps_are_shortened(script):
    assert script.shortened("tnlm-train run --steps 60 --out a", 2) == "tnlm-train run --steps 2 --out a"
    assert sum(len(re.findall(r"--steps \d+", text)) for _, blocks in script.tasks() for _, text in blocks) == 2


def test_readme_leads_to_the_page():
    table = (ROOT / "README.md").read_text().split("## What people do with it")[1].split("## ")[0]
    assert "(docs/first-steps.md)" in table


@pytest.mark.slow
def test_the_script_performs_all_six(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["newcomer_tasks", "--steps", "10"])
    assert script.main() == 0
    assert re.findall(r"^ok +(\d)", capsys.readouterr().out, flags=re.M) == list("123456")
