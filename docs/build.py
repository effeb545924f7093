"""Build ``site/``: the guides of ``docs/``, the notebooks with their figures, and the API reference. No network.

    python docs/build.py [--out site]

Every page stands on its own folder: plotly's script is written once, links between guides are kept.
"""

import argparse
import html
import json
import pkgutil
import re
import sys
import warnings
from pathlib import Path

import markdown2
import pdoc
import pdoc.render
from plotly.offline import get_plotlyjs

import tnlm
from tnlm.page import FIGURE_STYLE

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ["fenced-code-blocks", "tables", "header-ids", "code-friendly", "cuddled-lists"]
STYLE = """
:root { color-scheme: light dark; --line: rgba(127,127,127,.35); }
body { font: 16px/1.6 system-ui, sans-serif; max-width: 58rem; margin: 0 auto; padding: 0 1rem 4rem; }
nav { padding: .8rem 0; border-bottom: 1px solid var(--line); font-size: .9rem; }
nav { display: flex; flex-wrap: wrap; gap: .1rem .9rem; }
pre { padding: .7rem .9rem; border: 1px solid var(--line); border-radius: 6px; overflow-x: auto; font-size: .88rem; }
pre.output { border-left: 4px solid var(--line); opacity: .9; }
code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: left; vertical-align: top; }
"""
PLOTLY = "application/vnd.plotly.v1+json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "site")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    (out / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    guides = sorted((ROOT / "docs").glob("*.md"))
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    titles = {path: title_of(path) for path in [*guides, *notebooks]}
    nav = navigation(titles)
    for path in guides:
        body = markdown2.markdown(path.read_text(encoding="utf-8"), extras=EXTRAS)
        write(out / f"{path.stem}.html", titles[path], nav, relink(body))
    for path in notebooks:
        write(out / f"{path.stem}.html", titles[path], nav, notebook_body(path), script=True)
    links = "".join(f'<li><a href="{p.stem}.html">{html.escape(t)}</a></li>' for p, t in titles.items())
    readme = markdown2.markdown((ROOT / "README.md").read_text(encoding="utf-8"), extras=EXTRAS)
    contents = f'<h2>Contents</h2><ul>{links}<li><a href="api/tnlm.html">API reference</a></li></ul>'
    write(out / "index.html", "tnlm", nav, relink(readme) + contents)
    api_reference(out / "api")
    print(f"{len(guides)} guides, {len(notebooks)} notebooks and the API reference: {out / 'index.html'}")
    return 0


def title_of(path: Path) -> str:
    """The first heading of a guide or notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
    match = re.search(r"^# (.+)$", text, flags=re.M)
    if match is None:
        sys.exit(f"{path} has no heading '# ...'")
    return match.group(1)


def navigation(titles: dict[Path, str]) -> str:
    links = [f'<a href="{p.stem}.html" title="{html.escape(t)}">{p.stem}</a>' for p, t in titles.items()]
    return f'<nav><a href="index.html"><b>tnlm</b></a>{"".join(links)}<a href="api/tnlm.html">API</a></nav>'


def relink(body: str) -> str:
    """Links to guides and notebooks lead to their pages."""
    return re.sub(
        r'href="(?:(?:\./)?docs/|notebooks/|\.\./notebooks/)?([\w-]+)\.(?:md|ipynb)(#[^"]*)?"',
        r'href="\1.html\2"',
        body,
    )


def notebook_body(path: Path) -> str:
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(markdown2.markdown(source, extras=EXTRAS))
        elif cell["cell_type"] == "code" and source.strip():
            parts.append(f"<pre><code>{html.escape(source)}</code></pre>")
            parts += [output_html(output, f"{path.stem}-{len(parts)}-{i}") for i, output in enumerate(cell["outputs"])]
    return "".join(parts)


def output_html(output: dict, name: str) -> str:
    """A figure as a figure, everything else as text."""
    data = output.get("data", {})
    if PLOTLY in data:
        figure = json.dumps(data[PLOTLY]).replace("</", "<\\/")
        draw = f"{{const f={figure};Plotly.newPlot('{name}',f.data,f.layout,{{displaylogo:false,responsive:true}});}}"
        return f'<div class="figure"><div id="{name}"></div><script>{draw}</script></div>'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f'<pre class="output">{html.escape(text)}</pre>' if text.strip() else ""


def write(path: Path, title: str, nav: str, body: str, *, script: bool = False) -> None:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}{FIGURE_STYLE}</style>'
        + ('<script src="plotly.min.js"></script>' if script else "")
    )
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{nav}<main>{body}</main></body></html>\n'
    path.write_text(page, encoding="utf-8")


def api_reference(out: Path) -> None:
    """Every public module; those that import a heavy optional library are described in the guides instead."""
    skipped = re.compile(r"tnlm\.(lens|integrations|kernels\.triton|demo)|\._")
    modules = [m.name for m in pkgutil.walk_packages(tnlm.__path__, "tnlm.") if not skipped.search(m.name)]
    warnings.filterwarnings("ignore", message="Found '.*' in tnlm")  # lazy names, documented where they are defined
    style = ROOT / "docs" / "api"  # its custom.css adds to pdoc's own
    pdoc.render.configure(docformat="google", show_source=True, footer_text="tnlm", template_directory=style)
    pdoc.pdoc("tnlm", *modules, output_directory=out)
    for page in out.rglob("*.html"):
        page.write_text(without_dead_links(page.read_text(encoding="utf-8")), encoding="utf-8")


def without_dead_links(body: str) -> str:
    """pdoc links what a class inherits from torch to sections that it does not write: the words alone."""
    ids = set(re.findall(r'id="([^"]+)"', body))
    return re.sub(r'<a href="#([^"]+)">(.*?)</a>', lambda m: m[0] if m[1] in ids else m[2], body)


if __name__ == "__main__":
    sys.exit(main())
