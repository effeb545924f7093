"""The rooms of the package: what each may import, without circles, and where each heavy library is imported.

Imports are read from the source with ``ast``, those inside functions too, and so are names that are looked up on the
package (``tnlm.load``). Imports for type checkers alone do not count. Neither do the lazy public lists (``_HOMES``),
which hold module names as strings; a name that is taken from one counts as an import of the module that defines it.
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tnlm").rglob("*.py"))
FOLDERS = sorted({file.parent for file in FILES})
MODULES_IN_A_ROOM = 13

MAY_IMPORT: Mapping[str, str] = {
    "tnlm.kernels": "",
    "tnlm": "tnlm.kernels",
    "tnlm.output": "tnlm",
    "tnlm.text": "tnlm tnlm.output",
    "tnlm.languages": "tnlm tnlm.output",
    "tnlm.checkpoints": "tnlm tnlm.kernels tnlm.output tnlm.text",
    "tnlm.output.command": "tnlm tnlm.output tnlm.text tnlm.checkpoints",
    "tnlm.lens": "tnlm tnlm.text",
    "tnlm.integrations": "tnlm tnlm.output tnlm.text tnlm.checkpoints",
    "tnlm.interp": "tnlm tnlm.output tnlm.text tnlm.languages tnlm.checkpoints",
    "tnlm.training": "tnlm tnlm.kernels tnlm.output tnlm.text tnlm.languages tnlm.checkpoints tnlm.output.command",
    "tnlm.app": "tnlm tnlm.output tnlm.text tnlm.languages tnlm.checkpoints tnlm.output.command tnlm.integrations "
    "tnlm.interp tnlm.training",
}
"""Room: the rooms below it that it may import. ``docs/architecture.md`` has the same table, with reasons."""

LADDERS = (
    (
        "tnlm.interp.checks",
        "tnlm.interp.layers.lowrank",
        "tnlm.interp.ranking",
        "tnlm.interp.vocabulary",
        "tnlm.interp.layers",
        "tnlm.interp.contraction",
        "tnlm.interp.extraction",
        "tnlm.interp.tokens",
        "tnlm.interp.predictions",
        "tnlm.interp.discovery",
        "tnlm.interp.views",
        "tnlm.interp",
    ),
    (
        "tnlm.training.optim.schedule",
        "tnlm.training.config",
        "tnlm.training.presets",
        "tnlm.training.run.distributed",
        "tnlm.training.data",
        "tnlm.training.optim",
        "tnlm.training.run",
        "tnlm.training.compare",
        "tnlm.training",
    ),
)
"""Inside the two large rooms, from bottom to top: each may import itself and what stands before it."""

LAZY_EDGES: Mapping[tuple[str, str], str] = {
    ("tnlm.transformer", "Transformer.run_with_cache"): "tnlm.lens",
    ("tnlm.interp.predictions.explanation", "Explanation.plot"): "tnlm.interp.views",
}
"""The only imports that lead upwards: (module, method): the room that it may import when it is called."""

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "transformer_lens": ("tnlm.lens",),
    "plotly": ("tnlm.interp.views", "tnlm.training.compare.plot"),
    "triton": ("tnlm.kernels.triton",),
    "transformers": ("tnlm.integrations",),
    "lm_eval": ("tnlm.integrations",),
    "huggingface_hub": ("tnlm.checkpoints", "tnlm.training.data.download"),
    "opt_einsum": ("tnlm.network", "tnlm.contraction_path"),
}
"""Library: how the names of the modules that may import it begin."""


def imported(source: str, package: str) -> Iterator[tuple[str, str]]:
    """Each import of a source text: the class and function it is in ("" at the top), and the full name it asks for."""
    pending: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    while pending:
        place, node = pending.pop()
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((place, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) + 1 - node.level] if node.level else []
            yield from ((place, ".".join([*base, *filter(None, [node.module]), alias.name])) for alias in node.names)
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"tnlm(\.\w+)+", ast.unparse(node)):
            yield place, ast.unparse(node)
            children = iter(())
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            children = iter(node.orelse)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            place = f"{place}.{node.name}".lstrip(".")
        pending += [(place, child) for child in children]


def read(files: list[Path] = FILES) -> dict[str, str]:
    """Module: source text."""
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return {name: file.read_text(encoding="utf-8") for name, file in zip(names, files, strict=True)}


SOURCES = read()
PACKAGES = {".".join(folder.relative_to(ROOT).parts) for folder in FOLDERS}
LAZY_NAMES = {
    f"{package}.{name}": home
    for package in sorted(PACKAGES)
    for home, names in getattr(importlib.import_module(package), "_HOMES", {}).items()
    for name in names
}


def edges(module: str, source: str, modules: Mapping[str, str] = SOURCES) -> set[str]:
    """The modules of the package that a module imports, without the lazy edges."""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    found = set()
    for place, name in imported(source, package):
        target = LAZY_NAMES.get(name, name)
        while target not in modules and "." in target:
            target = target.rpartition(".")[0]
        allowed = LAZY_EDGES.get((module, place))
        if target in modules and target != module and not (allowed and begins(target, allowed)):
            found.add(target)
    return found


def circle(sources: Mapping[str, str]) -> list[str]:
    """The modules of one import circle in the order of import, or an empty list."""
    try:
        TopologicalSorter({module: edges(module, source, sources) for module, source in sources.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def begins(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def room_of(module: str, rooms: Mapping[str, str] | tuple[str, ...]) -> str:
    """The room that holds a module: of those whose name its own begins with, the longest."""
    return max((room for room in rooms if begins(module, room)), key=len)


def faults(module: str, source: str) -> list[str]:
    """What a module imports and must not."""
    names = {name.partition(".")[0] for _, name in imported(source, module.rpartition(".")[0])}
    found: list[str] = [name for name in ("training", "interp", "tests") if name in names]
    found += [name for name, homes in LIBRARIES.items() if name in names and not module.startswith(homes)]
    room = room_of(module, MAY_IMPORT)
    for target in edges(module, source):
        other = room_of(target, MAY_IMPORT)
        if other != room:
            found += [] if other in MAY_IMPORT[room].split() else [target]
            continue
        for ladder in LADDERS:
            if begins(module, ladder[-1]):
                rung, below = (ladder.index(room_of(name, ladder)) for name in (module, target))
                found += [] if below <= rung else [target]
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_imports_only_what_its_room_may(module):
    source = SOURCES[module]
    assert faults(module, source) == []
    assert source.isascii()
    assert not ("from __future__ import annotations" in source and "from jaxtyping" in source)


def test_no_imports_form_a_circle():
    assert circle(SOURCES) == []


def test_each_lazy_edge_is_there():
    """A name that is no longer needed must not stay as a licence."""
    for (module, place), room in LAZY_EDGES.items():
        assert any(where == place and begins(name, room) for where, name in imported(SOURCES[module], module))


def test_rooms_only_name_rooms_below_them():
    for table in (MAY_IMPORT, *(dict.fromkeys(ladder, "") for ladder in LADDERS)):
        rooms = list(table)
        for number, room in enumerate(rooms):
            assert set(table[room].split()) <= set(rooms[:number])
            assert any(begins(module, room) for module in SOURCES), f"{room} is empty"


def test_the_architecture_page_has_the_same_table():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(tnlm[\w.]*)` \|[^|]*\|([^|]*)\|$", text, flags=re.M)
    assert {room: set(re.findall(r"`(tnlm[\w.]*)`", cell)) for room, cell in rows} == {
        room: set(below.split()) for room, below in MAY_IMPORT.items()
    }


@pytest.mark.parametrize(
    "module, source",
    [
        ("tnlm.mlp", "def f():\n    from tnlm import interp"),
        ("tnlm.mlp", "import tnlm.training.run.loop"),
        ("tnlm.mlp", "from tnlm import load"),
        ("tnlm.mlp", "import tnlm\n\ndef f(name):\n    return tnlm.load(name)"),
        ("tnlm.mlp", "if TYPE_CHECKING:\n    pass\nelse:\n    import tnlm.interp"),
        ("tnlm.kernels.ops", "from ..training import run"),
        ("tnlm.kernels.ops", "from tnlm.config import ModelConfig"),
        ("tnlm.output.files", "from tnlm.checkpoints.checkpoint import load"),
        ("tnlm.transformer", "from tnlm import lens"),
        ("tnlm.transformer", "class Transformer:\n    def forward(self):\n        from tnlm import lens"),
        ("tnlm.lens.hooked", "from tnlm import interp"),
        ("tnlm.training.run.loop", "from tnlm.interp.layers.bilinear import BilinearTensor"),
        ("tnlm.training.run.loop", "from tnlm.training import compare_arms"),
        ("tnlm.training.data.shards", "import tnlm.training.run.loop"),
        ("tnlm.interp.extraction", "from tnlm.training import presets"),
        ("tnlm.interp.layers.spectra", "from tnlm.interp import explain"),
        ("tnlm.interp.layers.spectra", "import plotly.graph_objects as go"),
        ("tnlm.kernels.ops", "import triton"),
        ("tnlm.app.cli", "from transformers import AutoModel"),
        ("tnlm.points", "from transformer_lens.hook_points import HookPoint"),
        ("tnlm.app.cli", "from training import run"),
    ],
)
def test_the_walk_sees_each_kind_of_fault(module, source):
    assert faults(module, source)


@pytest.mark.parametrize(
    "module, source",
    [
        ("tnlm.app.cli", "def run():\n    from tnlm import interp, training"),
        ("tnlm.training.run.loop", "import torch\nfrom tnlm.transformer import Transformer"),
        ("tnlm.training.run.loop", "import tnlm\n\ndef f(name):\n    return tnlm.load(name)"),
        ("tnlm.interp.layers.spectra", "if TYPE_CHECKING:\n    import plotly.graph_objects as go"),
        ("tnlm.lens.hooked", "def hook():\n    import transformer_lens"),
        ("tnlm.transformer", "class Transformer:\n    def run_with_cache(self):\n        from tnlm import lens"),
    ],
)
def test_the_walk_lets_through_what_is_allowed(module, source):
    assert faults(module, source) == []


@pytest.mark.parametrize(
    "planted",
    [
        {"tnlm.mlp": "import tnlm.rotary", "tnlm.rotary": "def f():\n    from tnlm import mlp"},
        {"tnlm.mlp": "from tnlm.rotary import a", "tnlm.rotary": "from .norm import a", "tnlm.norm": "import tnlm.mlp"},
        {
            "tnlm.transformer": "def f():\n    import tnlm\n    tnlm.load()",
            "tnlm.checkpoints.checkpoint": "from tnlm import Transformer",
        },
    ],
    ids=["in a function", "of three", "through the public list"],
)
def test_the_walk_sees_a_circle(planted):
    assert set(circle(planted)) == set(planted)


def test_a_chain_and_an_import_for_checkers_are_no_circle():
    assert not circle(
        {"tnlm.mlp": "import tnlm.rotary", "tnlm.rotary": "import tnlm.norm", "tnlm.norm": "import torch"}
    )
    assert not circle({"tnlm.mlp": "import tnlm.norm", "tnlm.norm": "if TYPE_CHECKING:\n    import tnlm.mlp"})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_room_is_small_and_no_module_bears_the_name_of_something_public_in_it(folder):
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert len(modules) <= MODULES_IN_A_ROOM
    public = set(getattr(importlib.import_module(".".join(folder.relative_to(ROOT).parts)), "__all__", ()))
    for file in folder.glob("*.py"):
        made = ast.parse(file.read_text(encoding="utf-8")).body
        public |= {node.name for node in made if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert not (modules | {path.name for path in folder.iterdir() if path.is_dir()}) & public


def test_the_links_at_the_top_level_never_become_modules():
    assert "training" not in sys.modules
    assert "interp" not in sys.modules
