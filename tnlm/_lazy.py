"""Public names of a package that are imported on first use (PEP 562)."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def attach(
    package: str, homes: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Functions ``__getattr__`` and ``__dir__`` for ``package``, which import a public name when it is first used.

    Type checkers cannot read ``homes``: the package repeats it as imports under ``TYPE_CHECKING``, and defines the two
    functions only outside of it, so that a misspelt name is an error. ``tests/test_typing.py`` compares the two lists.

    Args:
        homes: Full name of a module: the public names that it defines.
        submodules: Modules of the package that are imported when they are first used.
    """
    module_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in module_of:
            return getattr(import_module(module_of[name]), name)
        if name in submodules:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *submodules})

    return get, names
