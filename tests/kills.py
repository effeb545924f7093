"""A process that dies at a chosen moment: before each change to the file system in turn, and in the middle of a write.

Once dead it changes nothing more, so no handler and no ``finally`` can tidy up, as after ``kill -9``. Locks of the
kernel are the exception: the test's process lives on, so they are released as the blocks that hold them end.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


class Killed(BaseException):
    """No handler of the code under test may catch it."""


_left: list[int] = []
"""How many more changes the process lives for; empty while nobody is to be killed."""


def _change() -> None:
    if _left:
        _left[0] -= 1
        if _left[0] < 0:
            raise Killed


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if not _left:
        return
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
    if event in CHANGES or writes:
        _change()


sys.addaudithook(_watch)


class _Halves:
    """A file whose every write can be cut in the middle."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: Any) -> int:
        half = len(data) // 2
        self.file.write(data[:half])
        self.file.flush()
        _change()
        self.file.write(data[half:])
        self.file.flush()
        _change()
        return len(data)

    def __enter__(self) -> "_Halves":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _save_file(tensors: dict[str, Any], path: Any, metadata: dict[str, str] | None = None) -> None:
    """In place of safetensors' own, whose writes Python does not see."""
    with io.open(path, "wb") as file:  # noqa: UP020
        file.write(safetensors.torch.save(tensors, metadata))


@contextlib.contextmanager
def killed_after(changes: int) -> Iterator[list[bool]]:
    """Kill what the block does after ``changes`` changes; yields a list that tells in the end whether it died."""
    died: list[bool] = [False]
    original = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        made = original(file, mode, *args, **kwargs)
        return _Halves(made) if set(mode) & set("wax+") else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", opened)
        for module in ("tnlm.checkpoints.checkpoint", "tnlm.training.run.checkpointing"):
            patch.setattr(f"{module}.save_file", _save_file)
        _left[:] = [changes]
        try:
            yield died
        except Killed:
            died[0] = True
        finally:
            _left.clear()
