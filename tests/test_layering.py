"""Imports point one way: core <- interp, core <- training; each heavy library has one place."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tnlm").rglob("*.py"))
HOMES = {
    "transformer_lens": {path.relative_to(ROOT).as_posix() for path in FILES if path.match("lens/*.py")},
    "plotly": {path.relative_to(ROOT).as_posix() for path in FILES if path.name == "plot.py"},
    "triton": {path.relative_to(ROOT).as_posix() for path in FILES if path.match("kernels/triton*.py")},
    "transformers": {path.relative_to(ROOT).as_posix() for path in FILES if path.match("integrations/*.py")},
}


APPLICATION = ("tnlm/app/cli.py", "tnlm/app/demo.py", "tnlm/app/specimens.py")
"""These stand above all parts."""


def imported(source: str, package: str) -> set[str]:
    """Absolute names of every module that a source text imports, in functions too, but not for type checkers alone."""
    names = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
        else:
            pending += ast.iter_child_nodes(node)
    return names


def part(path: str) -> str:
    return path.split("/")[1] if path.startswith(("tnlm/training/", "tnlm/interp/")) else "core"


def faults(path: str, source: str) -> list[str]:
    """What a file imports and must not."""
    package = path.rpartition("/")[0].replace("/", ".")
    names, found = imported(source, package), []
    forbidden = {"core": ("training", "interp"), "training": ("interp",), "interp": ("training",)}[part(path)]
    if path not in APPLICATION:
        found += [n for n in names for other in forbidden if n == f"tnlm.{other}" or n.startswith(f"tnlm.{other}.")]
    roots = {n.partition(".")[0] for n in names}
    found += [library for library, homes in HOMES.items() if library in roots and path not in homes]
    found += [link for link in ("training", "interp", "tests") if link in roots]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_imports_only_what_its_part_may(file):
    source = file.read_text(encoding="utf-8")
    assert faults(file.relative_to(ROOT).as_posix(), source) == []
    assert source.isascii()
    assert not ("from __future__ import annotations" in source and "from jaxtyping" in source)


@pytest.mark.parametrize(
    "path, source",
    [
        ("tnlm/mlp.py", "def f():\n    from tnlm import interp"),
        ("tnlm/mlp.py", "import tnlm.training.run.loop"),
        ("tnlm/kernels/ops.py", "from ..training import loop"),
        ("tnlm/training/run/loop.py", "from tnlm.interp.layers.bilinear import BilinearTensor"),
        ("tnlm/interp/extraction.py", "from tnlm.training import presets"),
        ("tnlm/interp/layers/spectra.py", "import plotly.graph_objects as go"),
        ("tnlm/kernels/ops.py", "import triton"),
        ("tnlm/app/cli.py", "from transformers import AutoModel"),
        ("tnlm/mlp.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import tnlm.interp"),
        ("tnlm/points.py", "from transformer_lens.hook_points import HookPoint"),
        ("tnlm/app/cli.py", "from training import loop"),
    ],
)
def test_the_walk_sees_each_kind_of_fault(path, source):
    assert faults(path, source)


def test_the_walk_lets_through_what_is_allowed():
    assert not faults("tnlm/app/cli.py", "def run():\n    from tnlm import interp, training")
    assert not faults("tnlm/training/run/loop.py", "import torch\nfrom tnlm.transformer import Transformer")
    assert not faults("tnlm/interp/layers/spectra.py", "if TYPE_CHECKING:\n    import plotly.graph_objects as go")
    assert not faults("tnlm/lens/hooked.py", "def hook():\n    import transformer_lens")


@pytest.mark.parametrize("package", ["tnlm", "tnlm.checkpoints", "tnlm.interp", "tnlm.text", "tnlm.training"])
def test_no_module_is_named_like_a_public_name_beside_it(package):
    folder = ROOT / package.replace(".", "/")
    modules = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir() if path.is_dir()}
    assert not modules & set(importlib.import_module(package).__all__)


def test_the_links_at_the_top_level_never_become_modules():
    assert "training" not in sys.modules
    assert "interp" not in sys.modules
