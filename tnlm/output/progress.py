"""Signs of life on stderr from whatever takes longer than two seconds."""

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


def track(items: Sequence[T], label: str, *, enabled: bool = True) -> Iterator[T]:
    """Yield ``items``; once that has taken :data:`DELAY` seconds, show how many are done: a bar, or lines in a log."""
    if not enabled:
        yield from items
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(label, total=len(items))
    due, shown = time.monotonic() + DELAY, False
    try:
        for done, item in enumerate(items):
            bar.update(task, completed=done)
            if not shown and time.monotonic() > due:
                if console.is_terminal:
                    bar.start()
                    shown = True
                else:
                    print(f"{label}: {done}/{len(items)}", file=sys.stderr)
                    due = time.monotonic() + LINE_EVERY
            yield item
    finally:
        if shown:
            bar.stop()


@contextmanager
def announce(label: str) -> Iterator[None]:
    """Print ``label`` as a line of its own when the body takes longer than :data:`DELAY` seconds."""
    timer = threading.Timer(DELAY, print, (f"{label} ...",), {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
