"""A progress bar on stderr for whatever takes longer than two seconds."""

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

DELAY = 2.0
"""Seconds before a bar appears."""


def track(items: Sequence[T], label: str, *, enabled: bool = True) -> Iterator[T]:
    """Yield ``items``; once they have taken :data:`DELAY` seconds, show how many are done."""
    if not enabled:
        yield from items
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=len(items))
    began, shown = time.monotonic(), False
    try:
        for done, item in enumerate(items):
            if not shown and time.monotonic() - began > DELAY:
                bar.start()
                shown = True
            bar.update(task, completed=done)
            yield item
    finally:
        if shown:
            bar.stop()
