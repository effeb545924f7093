"""Sphinx's settings for ``site/``: the guides, the notebooks with their figures, the API reference. No network.

The source folder is the repository, so that a link between pages leads to the same place here and on GitHub:

    sphinx-build -c docs . site
"""

import json
import tomllib
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs
from sphinx.application import Sphinx

import tnlm

ROOT = Path(__file__).resolve().parents[1]
PLOTLY = "application/vnd.plotly.v1+json"
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Repository", "")

project = "tnlm"
author = "The tnlm authors"
version = release = tnlm.__version__
language = "en"

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "notebooks/*.md", "notebooks/*.ipynb"]
exclude_patterns = [".*", *"benchmarks build demo interp runs scripts site tests tnlm training".split()]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.githubpages", "sphinx.ext.napoleon"]

myst_heading_anchors = 4
nb_execution_mode = "off"  # shown as they were committed; `make notebooks` executes them
nb_merge_streams = True
nb_ipywidgets_js: dict[str, Any] = {}  # its default is on a CDN

add_module_names = False
autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 90
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"tnlm {release}"
html_copy_source = html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = (
    {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": ""} if REPOSITORY else {}
)


def draw_figures(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give each plotly figure of a notebook the HTML that draws it: myst-nb does not know plotly's JSON."""
    if Path(app.env.doc2path(docname)).suffix != ".ipynb":
        return
    notebook = json.loads(source[0])
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    for number, data in enumerate(output["data"] for output in outputs if PLOTLY in output.get("data", {})):
        figure = json.dumps(data.pop(PLOTLY)).replace("</", "<\\/")
        name = escape(f"{Path(docname).name}-{number}")
        data["text/html"] = (
            f'<div class="figure"><div id="{name}"></div></div><script>addEventListener("DOMContentLoaded", () => {{'
            f"const f = {figure}; Plotly.newPlot('{name}', f.data, f.layout, {{displaylogo: false, responsive: true}});"
            "})</script>"
        )
    source[0] = json.dumps(notebook)


def add_plotly(app: Sphinx, pagename: str, *_: object) -> None:
    """Load plotly's script on the pages that have figures."""
    if pagename.startswith("notebooks/0"):
        app.add_js_file("plotly.min.js")


def write_plotly(app: Sphinx) -> None:
    """plotly's script, once, from the installed package."""
    static = Path(app.outdir) / "_static"
    static.mkdir(parents=True, exist_ok=True)
    (static / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")


def write_start(app: Sphinx, exception: Exception | None) -> None:
    """``index.html`` at the top of the site leads to the first page."""
    if exception is None:
        start = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(start, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_plotly)
    app.connect("source-read", draw_figures)
    app.connect("html-page-context", add_plotly)
    app.connect("build-finished", write_start)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
