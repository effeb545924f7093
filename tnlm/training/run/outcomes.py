"""Exceptions and the result of a training run. Imports no torch."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tnlm.output.exit_codes import CommandError, ExitCode


@dataclass(frozen=True)
class Result:
    """Folder, sizes and final losses of a finished run."""

    folder: Path
    """The run folder, which :func:`tnlm.load` reads."""
    steps: int
    tokens: int
    train_loss: float
    """Loss of the last update's batch, nats per token."""
    val_loss: float
    bits_per_byte: float | None
    recipe: str

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"folder": str(self.folder)}


class Diverged(CommandError, RuntimeError):
    """The loss or a gradient is not finite; nothing was saved since the last complete checkpoint."""

    exit_code = ExitCode.DIVERGED


class Interrupted(CommandError):
    """A signal ended the run after a complete save; running the same command again resumes."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message, number)
        self.message, self.number = message, number
        self.exit_code = 128 + number

    def __str__(self) -> str:
        return self.message


class SaveError(OSError):
    """A checkpoint could not be written; the older ones are untouched."""
