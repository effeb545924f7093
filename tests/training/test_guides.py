"""The training guides: their commands parse, their table is the recorded result."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tnlm.training import cli, commands
from tnlm.training.presets import preset
from tnlm.training.run.cost import estimate
from tnlm.training.run.retention import kept_steps, saved_steps

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "small_replication"
COMMANDS = [
    commands.Run,
    commands.Branch,
    commands.Compare,
    commands.Export,
    commands.DataGet,
    commands.DataTokenize,
    commands.DataCheck,
    commands.DataToy,
]
SOURCES = [made.__doc__ for made in COMMANDS]
SOURCES += [(ROOT / "docs" / f"{name}.md").read_text() for name in ("training", "replication", "data", "comparison")]
SOURCES = [re.sub(r"\\\n\s*", "", text) for text in SOURCES]
LINES = sorted(
    {
        line.strip()[2:]
        for text in SOURCES
        for line in text.splitlines()
        if re.match(r"\s*\$ (tnlm-train|torchrun) ", line)
    }
)


@pytest.mark.parametrize("made", COMMANDS, ids=lambda made: made.__name__)
def test_every_command_shows_an_example(made):
    assert re.search(r"\$ (tnlm-train|torchrun) ", made.__doc__)


@pytest.mark.parametrize(
    "name", ["run", "branch", "compare", "export", *map("data {}".format, "get tokenize check toy".split())]
)
def test_help_names_no_default_where_there_is_none(name, capsys):
    assert cli.main([*name.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "--json" in out
    assert "default: )" not in out
    if name not in ("run", "branch"):  # their None is a value, whose meaning the text says: see test_flags
        assert "None" not in out


@pytest.mark.parametrize("line", LINES)
def test_example_lines_parse(line, monkeypatch, capsys):
    for made in COMMANDS:
        monkeypatch.setattr(made, "execute", lambda self: {})
    arguments = line.split("tnlm.training.cli ")[1] if line.startswith("torchrun") else line.removeprefix("tnlm-train ")
    assert cli.main(shlex.split(arguments)) == 0, capsys.readouterr().err


@pytest.mark.parametrize("line", [line for line in LINES if "--preset" in line and "branch" not in line])
def test_configurations_of_the_examples_exist(line):
    preset = re.search(r"--preset (\S+)", line).group(1)
    from tnlm.training.presets import preset as make

    assert make(preset).steps > 0


def percent(reading):
    if reading["value"] is None:
        return reading["status"]
    low, high = ("censored" if reading[k] is None else f"{reading[k] * 100:+.1f}" for k in ("low", "high"))
    return f"{reading['value'] * 100:+.1f} [{low}, {high}]"


@pytest.mark.parametrize(
    "arm", ["bilinear+softmax", "swiglu+bilinear", "bilinear+bilinear", "bilinear+bilinear-matched"]
)
def test_replication_table_is_the_recorded_result(arm):
    result = json.loads((RESULTS / arm / "compare.json").read_text())
    final = result["final"]
    cells = [arm, f"{result['variant']['n_params']:,}"]
    cells.append(f"{final['difference']:+.4f} [{final['low']:+.4f}, {final['high']:+.4f}]")
    cells += [percent(result[key]) for key in ("e1", "e2a", "e2b", "e3")]
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs" / "replication.md").read_text()
    assert result["base"]["seeds"] == result["variant"]["seeds"] == 5
    assert all("/" not in run["name"] for side in ("base", "variant") for run in result[side]["runs"])


def test_disk_of_the_guides_is_the_dry_runs():
    training, replication = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("training", "replication"))
    medium = preset("medium")
    plain, often = (estimate(config) for config in (medium, medium.replace(save_every=500, keep_every=500)))
    gib = [f"{facts[key] / 2**30:.2f}" for facts, key in ((plain, "checkpoint_bytes"), (often, "disk_bytes"))]
    assert f"keeps {len(plain['kept_steps'])} of {gib[0]} GiB" in training
    assert f"keeps {len(often['kept_steps'])}, {gib[1]}\nGiB" in training
    softmax = estimate(preset("medium", attention="softmax"))["disk_bytes"] / 2**30
    assert (
        f"leaves {plain['disk_bytes'] / 2**30:.2f} GiB, three checkpoints of {gib[0]} GiB ({softmax:.2f}" in replication
    )


def test_branches_of_the_replication_guide_start_from_what_a_run_keeps():
    text = (ROOT / "docs" / "replication.md").read_text()
    trunk = preset("medium")
    start = trunk.schedule.stable_end
    horizons = [int(steps) for steps in re.findall(r"tnlm-train branch \S+ --steps (\d+)", text)]
    assert len(horizons) == 3
    assert all(trunk.replace(steps=steps).schedule.stable_end >= start for steps in horizons)
    assert start in kept_steps(saved_steps(trunk), keep_last=trunk.keep_last, stable_end=start)
    left = [f"{steps - start:,}" for steps in horizons]
    assert f"(step {start:,}), which gives them for {left[0]}, {left[1]} and {left[2]}\nsteps" in text


def test_the_branch_of_the_training_guide_starts_from_what_nano_keeps():
    trunk = preset("nano")
    (steps,) = re.findall(r"tnlm-train branch \S+ --steps (\d+)", (ROOT / "docs" / "training.md").read_text())
    branch = trunk.replace(steps=int(steps))
    kept = kept_steps(saved_steps(trunk), keep_last=trunk.keep_last, keep_every=trunk.keep_every)
    assert [step for step in kept if step <= branch.schedule.stable_end]
