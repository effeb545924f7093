"""SIGTERM, SIGINT and SIGHUP as a request to stop: training ends after the step, with a checkpoint."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

SAME_SIGNAL_SECONDS = 10.0
"""Signals that follow the first one within this time are the same request to stop."""


class StopRequest:
    """The signal by which this process was told to stop, if there was one.

    Args:
        announce: Say on stderr that a signal arrived.
    """

    def __init__(self, *, announce: bool) -> None:
        self.number = 0
        """The signal; 0 until one arrives."""
        self._announce = announce
        self._first = 0.0

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Record SIGTERM, SIGINT and, unless ``nohup`` ignores it, SIGHUP here while the context lasts.

        A launcher and a scheduler often signal the same process both, so whatever comes within
        :data:`SAME_SIGNAL_SECONDS` is the same request; a later signal ends the process at once, without a save.
        Signals reach the main thread only, so this does nothing in another.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        stopping = [signal.SIGTERM, signal.SIGINT]
        # a lost terminal sends SIGHUP, and torchrun passes it on
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            stopping.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in stopping}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._first = number, time.monotonic()
            self._say(
                f"{signal.Signals(number).name}: saving after this step; "
                f"again after {SAME_SIGNAL_SECONDS:g} s to exit at once, without a save"
            )
        elif time.monotonic() - self._first > SAME_SIGNAL_SECONDS:
            os._exit(128 + number)

    def _say(self, text: str) -> None:
        # not print: the handler may have interrupted a print to the same stream
        if self._announce:
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())
