"""One self-contained HTML page of text, tables and figures, for light and dark, that works offline.

The contents are elsewhere: the report of a model is ``tnlm/interp/views/reporting.py``, the page of a comparison
``tnlm/training/compare/plot.py``.
"""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tnlm.output.files import write_atomically

FIGURE_LAYOUT: dict[str, Any] = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": "#7f7f7f", "family": "system-ui, sans-serif"},
    "margin": {"l": 70, "r": 30, "t": 70, "b": 60},
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#7f7f7f", "activecolor": "#3b7dd8"},
    "colorway": ["#3b7dd8", "#e0803a", "#3fa66b", "#c8508f", "#8a6fd1", "#2fa5b5", "#b09a2f"],
}
"""Layout of every figure: transparent, with a grey that is readable on white and on black."""

AXIS: dict[str, Any] = {
    "gridcolor": "rgba(127,127,127,0.25)",
    "zerolinecolor": "rgba(127,127,127,0.6)",
    "linecolor": "#7f7f7f",
    "automargin": True,
    "title_standoff": 12,
}
"""Style of every axis; titles do not overlap the labels of the ticks."""

FIGURE_STYLE = """
.figure { overflow-x: auto; }
.js-plotly-plot text:not(.hoverlayer text) { fill: CanvasText !important; }
"""
"""CSS of figures on our pages: their text takes the colour of the page, which differs between light and dark."""

_STYLE = """
:root { color-scheme: light dark; --line: rgba(127,127,127,.35); }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { padding: .8rem; border: 1px solid var(--line); border-radius: 6px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.note { opacity: .75; }
"""


class Page:
    """An HTML page made of parts in the order they are added; plotly's script is embedded once."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = [f"<h1>{html.escape(title)}</h1>"]
        self._has_script = False

    def heading(self, text: str) -> None:
        """Add a heading."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str, *, note: bool = False) -> None:
        """Add a paragraph of plain text; a note is pale."""
        self._parts.append(f'<p class="note">{html.escape(text)}</p>' if note else f"<p>{html.escape(text)}</p>")

    def code(self, text: str) -> None:
        """Add text in a fixed-width font, with its line breaks."""
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table; numbers are right-aligned, floats have four significant digits."""
        head = "".join(f"<th>{html.escape(h)}</th>" for h in header)
        body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
        self._parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")

    def figure(self, figure: Any) -> None:
        """Add a plotly ``Figure``."""
        body = figure.to_html(full_html=False, include_plotlyjs=not self._has_script, config={"displaylogo": False})
        self._has_script = True
        self._parts.append(f'<div class="figure">{body}</div>')

    def render(self) -> str:
        """Text of the whole HTML document."""
        head = (
            f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{html.escape(self.title)}</title><link rel="icon" href="data:,">'
            f"<style>{_STYLE}{FIGURE_STYLE}</style>"
        )
        return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(self._parts)}</body></html>\n'

    def write(self, path: str | Path) -> Path:
        """Write the page atomically, creating its folder; returns the path."""
        path = Path(path)
        write_atomically(path, self.render())
        return path


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{html.escape(str(value))}</td>"
    text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return f'<td class="number">{text}</td>'
