"""Turn each percent script of this folder into an executed notebook with light outputs.

    python notebooks/build.py [01 05 ...]

The ``.py`` is the source, edited and reviewed; the ``.ipynb`` is what GitHub and the documentation show. Figures are
kept as plotly JSON alone; nothing that differs between machines (paths, times, random cell ids) is written.
"""

import os
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def convert(source: Path) -> nbformat.NotebookNode:
    """The unexecuted notebook of a percent script."""
    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id, cell.metadata = f"cell-{number:02d}", nbformat.from_dict({})
    return notebook


def build(source: Path) -> Path:
    """Convert, execute in this folder, and write beside the source."""
    notebook = convert(source)
    NotebookClient(notebook, timeout=3600, record_timing=False, resources={"metadata": {"path": str(HERE)}}).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [light(output) for output in cell.outputs if output.get("name") != "stderr"]
    target = source.with_suffix(".ipynb")
    nbformat.write(notebook, target)
    return target


def light(output: Any) -> Any:
    """A figure without its alternatives, everything else as it is."""
    data = output.get("data", {})
    figures = {kind: value for kind, value in data.items() if kind == "application/vnd.plotly.v1+json"}
    if figures:
        output.data = nbformat.from_dict(figures)
    return output


def main() -> None:
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wanted = tuple(sys.argv[1:]) or ("",)
    for source in sorted(HERE.glob("[0-9][0-9]_*.py")):
        if source.name.startswith(wanted):
            target = build(source)
            print(f"{target.name}  {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
