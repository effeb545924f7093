"""Progress on stderr: bars on a terminal, lines in a log, and a line before work that takes long."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

DELAY = 2.0
"""Seconds before anything is shown."""
LINE_EVERY = 10.0
"""Seconds between lines where stderr is no terminal."""


class Bar:
    """A bar on stderr that shows how much is done, with a text and the remaining time.

    Args:
        total, done: Number of items, and of those done at the start.
        text: Shown beside the bar; :meth:`update` changes it.
        transient: Remove the bar when it is closed, and show counts alone.
    """

    def __init__(self, total: int, *, done: int = 0, text: str = "", transient: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        described = TextColumn("{task.description}", markup=False)
        counted, remaining = MofNCompleteColumn(), TimeRemainingColumn()
        columns = (described, counted, remaining) if transient else (BarColumn(), counted, described, remaining)
        self._progress = Progress(*columns, console=Console(stderr=True), transient=transient)
        self._task = self._progress.add_task(text, total=total, completed=done)
        self._shown = False

    def show(self) -> None:
        """Start to draw the bar; without effect if it is drawn."""
        if not self._shown:
            self._progress.start()
            self._shown = True

    def update(self, done: int, text: str | None = None) -> None:
        """Set the number of items done, and the text unless it is None."""
        self._progress.update(self._task, completed=done, description=text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Stop drawing."""
        if self._shown:
            self._progress.stop()


def on_terminal() -> bool:
    """Whether stderr is a terminal, where a bar can be drawn."""
    return sys.stderr.isatty()


def track(items: Sequence[T], label: str, *, enabled: bool = True) -> Iterator[T]:
    """Yield ``items``; after :data:`DELAY` seconds, show how many are done: a bar on a terminal, else lines."""
    if not enabled:
        yield from items
        return
    bar = Bar(len(items), text=label, transient=True) if on_terminal() else None
    due = time.monotonic() + DELAY
    try:
        for done, item in enumerate(items):
            if bar is not None:
                bar.update(done)
            if time.monotonic() > due:
                if bar is not None:
                    bar.show()
                else:
                    print(f"{label}: {done}/{len(items)}", file=sys.stderr)
                    due = time.monotonic() + LINE_EVERY
            yield item
    finally:
        if bar is not None:
            bar.close()


@contextmanager
def announce(label: str) -> Iterator[None]:
    """Context manager that prints a line with ``label`` if its block takes longer than :data:`DELAY` seconds."""
    timer = threading.Timer(DELAY, print, (f"{label} ...",), {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
