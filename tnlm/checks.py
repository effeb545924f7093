"""Checks of arguments that several rooms share; each returns the checked value or raises a ValueError."""

import operator
from collections.abc import Iterable

import torch


def as_dtype(name: str, dtype: torch.dtype | str, allowed: Iterable[torch.dtype], *, others: str = "") -> torch.dtype:
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
