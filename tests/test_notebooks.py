"""The notebooks as committed: in step with their percent scripts, asserting, light, with figures.

``make notebooks`` executes them; here nothing is run.
"""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
PLOTLY = "application/vnd.plotly.v1+json"

every = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """``notebooks/build.py``; it needs the tools of the extra ``docs``."""
    for name in ("jupytext", "nbclient", "nbformat"):
        pytest.importorskip(name, reason='the notebook tools are not installed: pip install -e ".[docs]"')
    spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(script: Path) -> dict:
    return json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))


def code_cells(script: Path) -> list[dict]:
    return [cell for cell in read(script)["cells"] if cell["cell_type"] == "code"]


def test_there_are_eight_pairs():
    assert [path.name[:2] for path in SCRIPTS] == [f"{i:02d}" for i in range(1, 9)]
    assert sorted(FOLDER.glob("*.ipynb")) == [path.with_suffix(".ipynb") for path in SCRIPTS]


@every
def test_pair_is_in_sync(script, build):
    saved, fresh = read(script), build.convert(script)
    assert [(c["cell_type"], "".join(c["source"])) for c in saved["cells"]] == [
        (c.cell_type, c.source) for c in fresh.cells
    ], f"run: python notebooks/build.py {script.stem[:2]}"
    assert saved["metadata"] == build.METADATA, "no versions of one machine"
    assert [c["id"] for c in saved["cells"]] == [c.id for c in fresh.cells]


@every
def test_asks_a_question_and_asserts(script):
    first = read(script)["cells"][0]
    assert first["cell_type"] == "markdown"
    assert re.match(r"# .+\?\n", "".join(first["source"])), "the first heading is a question"
    assertions = [cell for cell in code_cells(script) if re.search(r"^ *assert ", "".join(cell["source"]), flags=re.M)]
    assert len(assertions) >= 3


@every
def test_was_executed_from_top_to_bottom(script):
    cells = code_cells(script)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])


@every
def test_figures_are_light_plotly_json(script):
    outputs = [output for cell in code_cells(script) for output in cell["outputs"]]
    figures = [output["data"] for output in outputs if PLOTLY in output.get("data", {})]
    assert figures
    assert all(set(data) == {PLOTLY} and data[PLOTLY]["data"] for data in figures)
    assert not any(kind.startswith("image/") for output in outputs for kind in output.get("data", {}))
    assert script.with_suffix(".ipynb").stat().st_size < 500_000


@every
def test_nothing_of_one_machine_is_kept(script):
    text = script.with_suffix(".ipynb").read_text(encoding="utf-8")
    for pattern in ("/home/", "/root/", "/tmp/", "/Users/", "site-packages", "iopub", r"\b20\d\d-\d\d-\d\dT"):
        assert not re.search(pattern, text), pattern


def test_table_names_every_notebook_with_its_question():
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    for script in SCRIPTS:
        title = "".join(read(script)["cells"][0]["source"]).splitlines()[0].removeprefix("# ")
        assert f"[{script.stem}]({script.stem}.ipynb) | {title} |" in table
