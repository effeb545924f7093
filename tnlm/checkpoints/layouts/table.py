"""Tools to describe a published layout: a strict reader of its config, and a table that maps its tensors to ours."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tnlm.checkpoints.weightfiles import list_names
from tnlm.config import METADATA_KEYS, ModelConfig, warn_dropped

Shapes = Mapping[str, Sequence[int]]
TIE = "tie_word_embeddings"

BOOKKEEPING = frozenset(
    "name seed lr learning_rate weight_decay optimizer warmup batch batch_size steps n_steps num_steps num_batches "
    "epochs n_params dataset tokenizer repo date commit notes train_loss val_loss final_train_loss "
    "final_val_loss".split()
)
"""Keys of public configs about data, training and results, which do not change the model. Those that a layout does not
list itself are named in one warning; any other unknown key is an error, because it may change the model."""


@dataclass(frozen=True)
class Layout:
    """A published layout.

    Args:
        name: Its name in errors and in ``model.source``.
        marks: Regular expressions; the layout is recognised when each matches a whole key.
        read_config: ``(fields of its config, shapes by key, attention asked for) -> ModelConfig``.
        make_table: ``(config, its config as read, shapes by key) -> Table``.
        block: Entry of its config that describes the model; None for all of it.
        differences: ``(config, another of the same weights) -> keys in both that describe the architecture and
            differ``; None where the config lies in one file.
    """

    name: str
    marks: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any], Shapes, str, str | None], ModelConfig]
    make_table: Callable[[ModelConfig, Mapping[str, Any], Shapes], "Table"]
    block: str | None = None
    differences: Callable[[Mapping[str, Any], Mapping[str, Any]], list[str]] | None = None

    def recognises(self, keys: Sequence[str]) -> bool:
        """Whether a state dict with these keys is in this layout."""
        return all(any(re.fullmatch(mark, key) for key in keys) for mark in self.marks)


@dataclass
class Table:
    """For each of our parameters, the tensors of the file it is made from; and the shapes that these must have.

    A row without ``fold`` copies the tensor, reshaped to our shape; a fold computes in float64.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[str, tuple[tuple[str, ...], Callable[..., Tensor] | None]] = field(default_factory=dict)
    checks: dict[str, Callable[[Tensor], str | None]] = field(default_factory=dict)
    """Buffers of the file that are no weights: if present, each is checked and then dropped."""

    def add(
        self,
        ours: str,
        key: str | Mapping[str, Sequence[int]],
        shape: Sequence[int] = (),
        fold: Callable[..., Tensor] | None = None,
    ) -> None:
        """Add a row: one key of ``shape``, or several keys with their shapes, whose tensors ``fold`` takes in order."""
        shapes = {key: shape} if isinstance(key, str) else key
        self.shapes |= {k: tuple(s) for k, s in shapes.items()}
        self.rows[ours] = (tuple(shapes), fold)

    def fill(self, ours: str, make: Callable[[], Tensor]) -> None:
        """Add a row without keys, for a parameter that the layout does not have; ``make`` returns its values."""
        self.rows[ours] = ((), make)

    def check(self, shapes: Shapes, *, label: str, config: ModelConfig) -> None:
        """Check that the file has every key of the table, at its shape, and no extra key.

        Raises:
            ValueError: It does not; names all missing and unexpected keys and wrong shapes.
        """
        missing = self.shapes.keys() - shapes.keys()
        unexpected = shapes.keys() - self.shapes.keys() - self.checks.keys()
        wrong = [
            f"{key} {tuple(shapes[key])} instead of {want}"
            for key, want in self.shapes.items()
            if key in shapes and not _same_shape(shapes[key], want)
        ]
        if missing or unexpected or wrong:
            layers = {int(n) for key in shapes for n in re.findall(r"\.(\d+)\.", key)}
            counted = len(layers) if layers else 0
            note = f" The file has {counted} layers, the config {config.n_layer}." if counted != config.n_layer else ""
            raise ValueError(
                f"checkpoint {label} does not fit the config: missing {list_names(missing)}; "
                f"unexpected {list_names(unexpected)}; wrong shape {list_names(wrong)}.{note}"
            )

    def make(self, ours: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """One of our parameters, in the layout's shape and, unless folded, in the stored dtype."""
        keys, fold = self.rows[ours]
        if fold is None:
            return tensors[keys[0]]
        # in float64, so that the only rounding is the one to the final dtype
        return fold(*(tensors[key].double() for key in keys))


def rows_of(shapes: Shapes, key: str, default: int = 1) -> int:
    """Length of the first axis of a stored matrix, or the default for a missing key: :meth:`Table.check` names it."""
    return next(iter(shapes.get(key, ())), default)


def _same_shape(found: Sequence[int], want: Sequence[int]) -> bool:
    """Whether two shapes are equal, where ``()`` equals ``(1,)``."""
    return tuple(found) == tuple(want) or {tuple(found), tuple(want)} == {(), (1,)}


class Fields:
    """Typed access to the values of a published ``config.json``, whose keys must all be known.

    Args:
        raw: The JSON object.
        source: Name of the file in errors.
        required, optional: Keys of the layout, separated by spaces.
        ignored: Keys that do not change the model, such as training statistics.
        bookkeeping: The same, but named in a warning, as those of :data:`BOOKKEEPING` are.

    Raises:
        ValueError: A key is missing or unknown; in every method, a value has the wrong type or range. Names key, value
            and file.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        source: str,
        *,
        required: str,
        optional: str = "",
        ignored: str = "",
        bookkeeping: str = "",
    ) -> None:
        known = {*required.split(), *optional.split(), *ignored.split(), TIE}
        dropped = (raw.keys() - known) & {*METADATA_KEYS, *BOOKKEEPING, *bookkeeping.split()}
        warn_dropped(sorted(dropped), source)
        missing = [k for k in required.split() if k not in raw]
        unknown = [f"{k}={raw[k]!r}" for k in raw if k not in known | dropped]
        if missing or unknown:
            raise ValueError(
                f"{source} does not fit this layout: missing {list_names(missing)}; unexpected {list_names(unknown)}. "
                f"Known keys: {', '.join(sorted(known))}. What is missing can be said by overrides=; a key that you "
                "know to change nothing must be taken out of the file"
            )
        self.raw, self.source = raw, source

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.source}: {key} must be an integer >= 1, got {value!r}")
        return value

    def depth(self, key: str, shapes: Shapes) -> int:
        """A number of layers, at most the number of the file's tensors: a wrong one could fill the memory."""
        value = self.integer(key)
        if value > len(shapes):
            raise ValueError(f"{self.source}: {key}={value} layers cannot come from a file of {len(shapes)} tensors")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number, as float."""
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self.source}: {key} must be a finite number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.source}: {key} must be true or false, got {value!r}")
        return value

    def choice(self, key: str, allowed: Mapping[Any, Any], default: Any = None) -> Any:
        """The value that ``allowed`` has for the one in the file, which must be one of its keys."""
        value = self.raw.get(key, default)
        if not isinstance(value, str | bool | None) or value not in allowed:
            raise ValueError(f"{self.source}: {key} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        return allowed[value]

    def refuse(self, key: str, wanted: Any, why: str, default: Any = None) -> None:
        """Check that a key has the value ``wanted``; ``why`` ends the error otherwise."""
        value = self.raw.get(key, default)
        if value != wanted:
            raise ValueError(f"{self.source}: {key} must be {wanted!r}, got {value!r}: {why}")

    def build(self, make: Callable[..., ModelConfig], **values: Any) -> ModelConfig:
        """``make(**values)``; its errors are made to name the file."""
        try:
            return make(**values)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from None


def flip_rotation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """A fold that negates the second half of each head's rows, which converts ``rotate_half`` to our rotation, exactly.

    It must be applied to queries and keys. Our rotation takes ``[a | -b]`` to ``[a cos - b sin | -(a sin + b cos)]``:
    the result of ``rotate_half`` with its second half negated. The two signs cancel in every score.
    """

    def fold(w: Tensor) -> Tensor:
        sign = torch.ones(config.n_head, config.d_qk, dtype=torch.float64)
        sign[:, config.d_qk // 2 :] = -1
        return w * sign.view(-1, *[1] * (w.ndim - 1))

    return fold


def scale(factor: float) -> Callable[[Tensor], Tensor]:
    """A fold that multiplies by a number."""
    return lambda w: w * factor


def chain(first: Callable[..., Tensor], then: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A fold that applies ``first`` to the tensors of a row, then ``then`` to the result."""
    return lambda *tensors: then(first(*tensors))
