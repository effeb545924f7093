"""Command-line flags made from the fields of a configuration: type, help text and default are the field's own.

Only flags that were given on the command line reach the program, so a preset, a config file and the flags can be laid
over one another. Imports no torch.
"""

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_type_hints

import tyro


def flags_of(kind: type, defaults: Mapping[str, object], *, aliases: Mapping[str, list[str]] | None = None) -> Any:
    """A type for ``tyro`` whose values are dicts of the flags that were given, by field name.

    Args:
        kind: The configuration dataclass that declares the fields.
        defaults: The fields that get a flag, each with what the help shows as its default.
        aliases: Further names of flags, with their dashes.
    """
    types, texts, aliases = get_type_hints(kind), field_texts(kind), aliases or {}
    fields = {}
    for name, default in defaults.items():
        hint = tyro.conf.arg(
            help=texts.get(name),
            help_behavior_hint=f"(default: {default})",
            aliases=aliases.get(name, []),
        )
        fields[name] = Annotated[types[name], tyro.conf.FlagConversionOff, hint]
    return TypedDict("Given", fields, total=False)  # type: ignore[operator]


@cache
def field_texts(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass, on one line; a field without one is left out."""
    try:
        source = Path(inspect.getfile(kind)).read_text(encoding="utf-8")
    except OSError:  # installed without sources: flags without texts
        return {}
    (declared,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == kind.__name__)
    texts = {}
    for field, below in pairwise(declared.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            texts[field.target.id] = " ".join(below.value.value.replace("``", "").split())
    return texts
