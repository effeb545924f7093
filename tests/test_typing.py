"""What a type checker sees of the public names, which are imported on first use."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tnlm", "tnlm.checkpoints", "tnlm.interp", "tnlm.text", "tnlm.training")
TORCH = """
from typing import Any, Callable, TypeVar
F = TypeVar("F")
def no_grad() -> Callable[[F], F]: ...
def inference_mode() -> Callable[[F], F]: ...
def __getattr__(name: str) -> Any: ...
"""


def imports_for_checkers(package: str) -> dict[str, str]:
    """Name: the module that the package's imports under ``TYPE_CHECKING`` take it from."""
    tree = ast.parse(Path(importlib.import_module(package).__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    assert all(isinstance(statement, ast.ImportFrom) for block in blocks for statement in block.body)
    return {alias.name: statement.module for block in blocks for statement in block.body for alias in statement.names}


@pytest.mark.parametrize("package", PACKAGES)
def test_checkers_see_the_names_that_users_get(package):
    module = importlib.import_module(package)
    lazy = {name: home for home, names in module._HOMES.items() for name in names}
    lazy |= dict.fromkeys(getattr(module, "_SUBMODULES", ()), package)
    assert imports_for_checkers(package) == lazy
    eager = {name for name in vars(module) if name in module.__all__} - lazy.keys()
    assert set(module.__all__) == lazy.keys() - set(getattr(module, "_SUBMODULES", ())) | eager
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_can_be_imported(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert callable(getattr(module, name)), name
    assert set(module.__all__) <= set(dir(module))


def test_types_of_public_names_for_a_user_of_mypy(tmp_path):
    """Every public name has a type of its own, and one that does not exist is an error."""
    pytest.importorskip("mypy", reason='mypy is not installed: pip install -e ".[dev]"')
    public = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]
    asked = [*public, "tnlm.lens.hook", "tnlm.kernels.bilinear_attention", "tnlm.text.tokenizer.get"]
    misspelt = ["tnlm.laod", "tnlm.interp.explian", "tnlm.training.trian"]
    user = "\n".join(["import tnlm", *(f"reveal_type({name})" for name in [*asked, *misspelt])])
    (tmp_path / "user.py").write_text(f"{user}\n", encoding="utf-8")
    # without site-packages: reading torch takes a minute, and all that matters of it here are its decorators
    (tmp_path / "torch.pyi").write_text(TORCH, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-incremental", "--no-site-packages", "--ignore-missing-imports"]
        + ["--no-implicit-reexport", "--no-color-output", "user.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = dict(re.findall(r"^user\.py:(\d+): (.*)$", done.stdout, flags=re.M)[::-1])  # the first line said of each
    answers = {name: said[str(line)] for line, name in enumerate([*asked, *misspelt], start=2)}
    for name in asked:
        assert re.match(r'note: Revealed type is "(def |Overload\(def |functools)', answers[name]), name
    for name in misspelt:
        assert "error: Module has no attribute" in answers[name], answers[name]
    assert re.search(r'"def \(model: .*, tokens: .*\) -> tnlm\..*\.Explanation"', answers["tnlm.interp.explain"])
