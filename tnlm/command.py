"""What the commands of the command line share: their common flags, loading, tables. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from tnlm.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Command:
    """What every command takes."""

    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON record instead of tables."""

    def execute(self) -> dict[str, Any]:
        raise NotImplementedError

    def show(self, title: str, rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> None:
        """A table for people; silent under ``--json``."""
        if self.json:
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(*header, title=title, title_justify="left", show_header=bool(header))
        for row in rows:
            table.add_row(*(_cell(value) for value in row))
        Console(markup=False, emoji=False, highlight=False).print(table)

    def say(self, text: str) -> None:
        """A line for people, as it is; silent under ``--json``."""
        if not self.json:
            print(text)


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Command):
    """A command about one model."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder, weight file or run folder; short name of a released model; or Hub id."""
    revision: str | None = None
    """Commit, branch or tag of a Hub id."""
    attention: Literal["squared", "squared_normalized"] | None = None
    """For files that do not say which of the two they are."""


@dataclass(frozen=True, kw_only=True)
class TextCommand(ModelCommand):
    """A command that runs a model on text."""

    tokenizer: str | None = None
    """gpt2, bytes, or a path; by default the one saved with the model, else by the size of its vocabulary."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float64", "checkpoint"] = "float32"
    """checkpoint keeps the stored mixture of bf16 and float32."""

    def load(self) -> "Transformer":
        return load_model(
            self.model, revision=self.revision, attention=self.attention, dtype=self.dtype, device=self.device
        )


def load_model(
    name: str, *, revision: str | None, attention: str | None, dtype: str, device: str = "cpu"
) -> "Transformer":
    """:func:`tnlm.load` with the dtype by name; says that it is loading when that takes long."""
    import torch

    from tnlm.checkpoint import load
    from tnlm.progress import announce

    wanted = dtype if dtype == "checkpoint" else getattr(torch, dtype)
    with announce(f"loading {name}"):
        return load(name, revision=revision, device=device, dtype=wanted, attention=attention)


def _cell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
