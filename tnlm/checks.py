"""Checks of arguments that several rooms share; each returns the checked value or raises a ValueError.

No torch is imported before a check needs it: the command lines read tokenizers without it.
"""

import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MODEL, TOKENIZER = "tnlm.load gives one", "tnlm.text.tokenizer.get gives one"
"""Ways out of what is no model and no tokenizer."""


def as_dtype(
    name: str, dtype: "torch.dtype | str", allowed: "Iterable[torch.dtype]", *, others: str = ""
) -> "torch.dtype":
    """The dtype that is meant by a torch dtype or its name, such as ``"float32"``.

    Args:
        name: Name of the argument in errors.
        others: What the argument may be instead, for the error.

    Raises:
        ValueError: It is none of ``allowed``.
    """
    names = {str(known).removeprefix("torch."): known for known in allowed}
    for text, known in names.items():
        if dtype is known or (isinstance(dtype, str) and dtype == text):
            return known
    raise ValueError(f"{name} must be one of {', '.join(names)}{others}; got {dtype!r}")


def as_token_id(name: str, value: object, limit: int) -> int:
    """``value`` as an id in ``[0, limit)``; integers of numpy and torch are taken too.

    Raises:
        ValueError: It is no such id; ``name`` is its name in the error.
    """
    try:
        found = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if not 0 <= found < limit:
        raise ValueError(f"{name} must be a token id in [0, {limit}), got {value!r}")
    return found


def as_path(name: str, value: object) -> Path:
    """``value``, a text or a path, as a path.

    Raises:
        ValueError: It is something else; ``name`` is its name in the error.
    """
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} must be a path, as a text or a pathlib.Path, got {type(value).__name__}")
    return Path(value)


def is_integer(value: object) -> bool:
    """Whether ``value`` is an integer, of Python or a library such as numpy, and no bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool) and not hasattr(value, "is_meta")


def as_count(name: str, value: Any, low: int, *, others: str = "") -> int:
    """``value`` as an integer of at least ``low`` that torch can hold.

    Args:
        others: What the argument may be instead, for the error.

    Raises:
        ValueError: It is none; ``name`` is its name in the error.
    """
    if not is_integer(value) or not low <= (found := operator.index(value)) < 2**63:
        raise ValueError(f"{name} must be an integer in [{low}, 2**63){others}, got {value!r}")
    return found


def seeded(seed: Any, *, others: str = "") -> "torch.Generator":
    """A generator of the CPU that starts from ``seed``.

    Raises:
        ValueError: The seed is no integer in ``[0, 2**63)``.
    """
    import torch

    return torch.Generator().manual_seed(as_count("seed", seed, 0, others=others))


def check_function(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` can be called."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {type(value).__name__}")


def check_kind(name: str, value: object, kind: type | tuple[type, ...], way_out: str) -> None:
    """Raise ValueError unless ``value`` is of one of the classes ``kind``.

    Args:
        name: Name of the argument in the error.
        way_out: What the user can do, for the error.
    """
    if not isinstance(value, kind):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"{name} must be a {names}, got {type(value).__name__}; {way_out}")


def check_values(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a tensor that holds values, whatever these are."""
    import torch

    check_kind(name, value, torch.Tensor, "torch.tensor makes one")
    if value.is_meta:  # type: ignore[attr-defined]
        raise ValueError(f"{name} must hold values, got a tensor on the meta device; use one on cpu or cuda")
