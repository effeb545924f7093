"""Our pages in a real browser, by ``scripts/check_pages.py``, and that it sees what is wrong with others."""

import html
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import plotly.graph_objects as go
import pytest
import torch

from tests.interp.test_extraction import make
from tnlm.interp.views import plot
from tnlm.interp.views.reporting import report
from tnlm.output.page import Page
from tnlm.training.compare.arms import Options, compare_arms
from tnlm.training.compare.plot import write_comparison_page
from tnlm.training.compare.runs import load_curves

ROOT = Path(__file__).resolve().parents[1]
GOOD = '<!doctype html><html><head><link rel="icon" href="data:,"></head><body><p id="a">{}</p></body></html>'


def load_script(path: str) -> ModuleType:
    name = path.replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return load_script("scripts/check_pages")


@pytest.fixture(scope="module")
def chromium(pages) -> str:
    found = next(filter(None, map(shutil.which, pages.BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium on the PATH")
    return found


def test_a_page_of_ours_has_no_fault(pages, chromium, tmp_path):
    page = Page("a page")
    page.text("quiet words", note=True)
    page.code("x" * 400)
    page.table(["name", "value"], [["a", 1.5]])
    page.figure(plot.spectrum([3.0, -2.0, 1.0]))
    page.figure(plot.lines({"one": ([0, 1], [2, 3])}, title="lines", x="x", y="y"))
    file = page.write(tmp_path / "page.html").resolve()
    seen = pages.check(chromium, [file], figures=2, screenshots=tmp_path / "shots")[file]
    assert seen.faults == []
    assert seen.figures == 2
    light, dark = ((tmp_path / "shots" / f"page-{scheme}.png").read_bytes() for scheme in ("light", "dark"))
    assert light[:4] == dark[:4] == b"\x89PNG"
    assert light != dark


def test_report_and_comparison_have_no_fault(pages, chromium, tmp_path):
    report(make(), tmp_path / "report.html", tokens=torch.randint(0, 11, (2, 8)), progress=False)
    curves = ROOT / "tests" / "training" / "compare" / "speedrun_curves.csv"
    result = compare_arms(load_curves(curves, ["short"]), load_curves(curves, ["long"]), Options(draws=200))
    write_comparison_page(result, tmp_path / "compare.html")
    seen = pages.check(chromium, sorted(tmp_path.glob("*.html")), figures=1)
    assert {page.name: what.faults for page, what in seen.items()} == {"report.html": [], "compare.html": []}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The documentation, built as `make docs` builds it: a warning of Sphinx is an error."""
    for name in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(name, reason='the docs tools are not installed: pip install -e ".[docs]"')
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-d", f"{out}/doctrees"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, ".", f"{out}/html"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.mark.parametrize("package", ["tnlm", "tnlm.interp", "tnlm.training", "tnlm.kernels", "tnlm.lens"])
def test_the_reference_has_every_public_name_with_its_docstring(site, package):
    """Names that are imported on first use too: signature and the docstring's first words stand on the page."""
    page = (site / "docs" / "api" / f"{package}.html").read_text(encoding="utf-8")
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", ["hook", "HookedModel"]):
        _, entry = page.split(f'id="{package}.{name}"')
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            words = re.findall(r"\w+", html.unescape(re.sub(r"<[^>]+>", " ", entry)))
            first = re.findall(r"\w+", re.split(r":\w+:`", thing.__doc__ or "")[0])[:5]
            assert first, f"{name} has no docstring"
            assert " ".join(first) in " ".join(words), name
            assert inspect.isclass(thing) or set(inspect.signature(thing).parameters) <= set(words), name


def test_the_site_can_be_searched_without_a_server(site):
    """The index is a script: a browser refuses to fetch from the disk."""
    assert 'src="searchindex.js"' in (site / "search.html").read_text(encoding="utf-8")
    assert "explain" in (site / "searchindex.js").read_text(encoding="utf-8")


def test_pages_of_the_site_have_no_fault(pages, chromium, site):
    """Notebooks with figures, the longest page of the reference, and those where code, tables and search stand."""
    notebooks = [page.resolve() for page in sorted((site / "notebooks").glob("0*.html"))]
    assert len(notebooks) == len(list((ROOT / "notebooks").glob("*.ipynb")))
    others = ["index", "README", "search", "docs/index", "docs/cli", "docs/api/tnlm.interp"]
    seen = pages.check(chromium, [*notebooks, *(site / f"{name}.html" for name in others)])
    assert {page.name: what.faults for page, what in seen.items() if what.faults} == {}
    assert all(seen[page].figures >= 1 for page in notebooks)


def test_faults_are_seen(pages, chromium, tmp_path):
    faults = {
        "console": ("<script>console.error('lost', 3)</script>", "console: lost 3"),
        "exception": ("<script>undefined_name + 1</script>", "exception: ReferenceError: undefined_name"),
        "network": ("<img src='https://example.org/x.png'>", "wants the network: https://example.org/x.png"),
        "fetch": ("<script>fetch('https://example.org/f').catch(() => 0)</script>", "network: https://example.org/f"),
        "file": ("<script src='absent.js'></script>", "net::ERR_FILE_NOT_FOUND"),
        "faint": ("<b style='color: #888'>grey on white</b>", 'contrast in light 3.54: "grey on white" (1 texts)'),
        "dark": (
            "<style>:root { color-scheme: light dark }</style><i style='color: #333'>night</i>",
            'contrast in dark 1.48: "night"',
        ),
        "fade": (
            "<style>:root { color-scheme: light dark } i { color: light-dark(#000, #444); transition: color 9s }"
            "</style><i>slowly</i>",
            'contrast in dark 1.92: "slowly"',
        ),
        "veil": ("<i style='opacity: .3'>veiled</i>", 'contrast in light 2.11: "veiled"'),
        "svg": ("<svg><text y='20' fill='#eee'>pale</text></svg>", 'contrast in light 1.16: "pale"'),
        "figure": ("<div class='figure'></div>", "figure 1 of 1 is not drawn"),
        "wide": ("<div style='width: 1400px'>-</div>", "px wider than a window of 1100"),
        "link": ("<a href='nowhere.html'>there</a>", "link leads nowhere: nowhere.html"),
        "redirect": (
            '<meta http-equiv="refresh" content="0; url=./elsewhere.html"/>',
            "link leads nowhere: elsewhere.html",
        ),
        "section": ("<a href='good.html#b'>there</a>", "link leads nowhere: good.html#b"),
    }
    (tmp_path / "good.html").write_text(GOOD.format("words <a href='#a'>there</a>"))
    for name, (body, _) in faults.items():
        (tmp_path / f"{name}.html").write_text(GOOD.format(body))
    seen = pages.check(chromium, [tmp_path / f"{name}.html" for name in ["good", *faults]])
    found = {page.stem: "\n".join(what.faults) for page, what in seen.items()}
    assert found.pop("good") == ""
    for name, (_, expected) in faults.items():
        assert expected in found[name], name


def test_grey_figures_need_the_style_of_the_page(pages, chromium, tmp_path):
    body = go.Figure(go.Bar(y=[1]), {"font": {"color": "#7f7f7f"}}).to_html(full_html=False)
    file = (tmp_path / "bare.html").resolve()
    file.write_text(GOOD.format(f'<div class="figure">{body}</div>'))
    (fault, *_) = pages.check(chromium, [file], figures=2)[file].faults
    assert fault.startswith("contrast in light 4.00")


def test_arguments(pages, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["check_pages", str(tmp_path), str(tmp_path / "absent.html")])
    assert pages.main() == 2
    assert "no page at" in capsys.readouterr().err
    (tmp_path / "absent.html").write_text("now there")
    monkeypatch.setattr(pages, "BROWSERS", ("no-such-browser",))
    assert pages.main() == 0
    assert "skipped, nothing checked" in capsys.readouterr().err
