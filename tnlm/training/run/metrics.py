"""Metrics of a run: the log ``metrics.jsonl``, and what is shown of it on a terminal or sent to a tracker.

One JSON object per line. ``time`` is the moment of writing, in seconds since 1970 (UTC). ``step`` counts updates
done, so ``train`` at step 1 is the loss of the first update and
``val`` at step 0 that of the fresh model:

- ``start``, ``resume``: facts that the run depends on beyond its configuration: data, tokenizer, sizes, versions;
- ``train``: ``step tokens epoch loss lr mu grad_norm dt`` and, at log steps, ``tok_s mfu max_mem``; ``lr`` is the
  schedule's factor, ``loss`` the mean over ranks and micro-batches in nats per token, ``dt`` seconds, ``max_mem``
  bytes, ``epoch`` the passes over the training data so far, a fraction;
- ``epoch``: the step whose batch is the first to hold tokens of the epoch ``epoch`` = 2, 3, ...;
- ``val``: ``step tokens loss bits_per_byte buckets val_tokens dt``;
- ``save``, ``sample``, ``end``.

Imports no torch.
"""

import contextlib
import json
import math
import os
import sys
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tnlm.output.files import write_atomically
from tnlm.output.progress import Bar, on_terminal

PEAK_FLOPS: dict[str, float] = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}
"""Dense bf16 FLOP/s by the start of the device's name, the longest match counting; from the makers' data sheets."""


_NEEDED: dict[str, dict[str, Any]] = {
    "start": {"warmdown_steps": int, "data": dict},
    "resume": {"warmdown_steps": int, "data": dict},
    "train": {"loss": int | float},
    "val": {"loss": int | float, "bits_per_byte": int | float | None, "val_tokens": int},
}
"""What the readers of an event take for granted, by its kind."""


def peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s, or None for a device not in :data:`PEAK_FLOPS`."""
    matches = [name for name in PEAK_FLOPS if device_name.startswith(name)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


class MetricsLog:
    """Append-only events of one run; every line is flushed, and synced to disk at evaluations and saves.

    Raises:
        OSError: The disk refuses a line; names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, kind: str, **values: Any) -> None:
        try:
            self._file.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **values}) + "\n")
            self._file.flush()
            if kind != "train":
                os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # or closing would try once more to write what is left
                self._file.close()
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def sync(self) -> None:
        """Flush all lines to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all events of a ``metrics.jsonl``; a last line cut short by a kill is left out.

    Raises:
        ValueError: Another line is no event (names it), or the path is a folder.
    """
    if path.is_dir():
        raise ValueError(f"{path} must be a file, but is a folder; rename or remove it")
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    events = []
    for number, line in enumerate(lines, start=1):
        event = _parse_event(line) if line else None
        if event is not None:
            events.append(event)
        elif line and number < len(lines):
            start = line[:80].decode("utf-8", "replace")
            raise ValueError(
                f"{path} line {number} must be a JSON object with kind, step and what else its kind holds, got "
                f"{start!r}; remove the line"
            )
    return events


def _parse_event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
        needed = {"step": int, **_NEEDED.get(event["kind"], {})}
        whole = isinstance(event["kind"], str) and all(isinstance(event[key], kind) for key, kind in needed.items())
        return event if whole else None
    except (ValueError, KeyError, TypeError):
        return None


def cut_back(path: Path, step: int, *, into: Path) -> list[dict[str, Any]]:
    """Write the events of ``path`` up to ``step`` to ``into`` (itself, or the log of a branch); returns them.

    Every update has a train event; updates without one are named in a warning.
    """
    kept = [event for event in read_metrics(path) if event["step"] <= step and event["kind"] not in ("sample", "end")]
    lost = sorted(set(range(1, step + 1)) - {event["step"] for event in kept if event["kind"] == "train"})
    if lost:
        warnings.warn(
            f"{path} lacks {len(lost)} of the {step} updates of this run, from step {lost[0]} to {lost[-1]}: training "
            "continues, but the curve has a gap",
            stacklevel=2,
        )
    write_atomically(into, "".join(json.dumps(event) + "\n" for event in kept))
    return kept


class TrackerRun(Protocol):
    """The methods that runs of trackio and wandb share."""

    def log(self, values: dict[str, Any], /) -> Any: ...
    def finish(self) -> Any: ...


class TensorBoardRun:
    """TensorBoard's event files of a run, in its folder, with the methods of the other trackers."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, Any]) -> None:
        step = next(value for name, value in values.items() if name.endswith("/step"))
        for name, value in values.items():
            if not name.endswith("/step"):
                self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class Tracking:
    """Forwards events to a tracker. One that fails is reported once and dropped; training goes on.

    A resumed run continues the tracker's: the file ``tracker_id`` of the run folder holds its id for wandb.
    """

    def __init__(self, name: str, *, folder: Path, config: Mapping[str, Any]) -> None:
        self._run: TrackerRun | None = None
        if name != "none":
            self._guard(lambda: self._start(name, folder, config))

    def _start(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        if name == "tensorboard":
            self._run = TensorBoardRun(folder)
            return
        import importlib

        known = folder / "tracker_id"
        if not known.exists():
            known.write_text(uuid.uuid4().hex)
        own_id = {"id": known.read_text()} if name == "wandb" else {}  # trackio finds a run by its name
        self._run = importlib.import_module(name).init(
            project="tnlm", name=folder.name, config=dict(config), resume="allow", **own_id
        )

    def log(self, kind: str, values: Mapping[str, Any]) -> None:
        numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
        if self._run is not None:
            self._guard(lambda: self._run.log(numbers))

    def close(self) -> None:
        if self._run is not None:
            self._guard(self._run.finish)

    def _guard(self, action: Any) -> None:
        try:
            action()
        except Exception as error:
            print(f"tracking stopped: {type(error).__name__}: {error}", file=sys.stderr)
            self._run = None


class Progress:
    """Progress of a run on stderr: a bar on a terminal, else one plain line per log interval."""

    def __init__(self, *, steps: int, start: int, enabled: bool) -> None:
        self.steps, self.enabled = steps, enabled
        self._bar = None
        if enabled and on_terminal():
            self._bar = Bar(steps, done=start)
            self._bar.show()

    def train(self, event: Mapping[str, Any], *, eta: float | None) -> None:
        speed = f"{_si(event['tok_s'])} tok/s" if event.get("tok_s") else ""
        use = f"mfu {event['mfu']:.0%}" if event.get("mfu") else ""
        if self._bar is not None:
            text = "  ".join(filter(None, (f"loss {event['loss']:.4f}", speed, use)))
            self._bar.update(event["step"], text)
            return
        left = f"eta {clock(eta)}" if eta is not None else ""
        head = f"step {event['step']}/{self.steps}  loss {event['loss']:.4f}  lr {event['lr']:.2f}"
        self.say("  ".join(filter(None, (head, speed, use, left))))

    def say(self, text: str) -> None:
        if not self.enabled:
            return
        if self._bar is not None:
            self._bar.say(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Speed:
    """Mean duration of a step since this process began; evaluations do not count."""

    def __init__(self) -> None:
        self.seconds, self.steps, self._warm = 0.0, 0, False
        self._began = time.perf_counter()

    def start(self) -> None:
        """Begin to measure a step."""
        self._began = time.perf_counter()

    def stop(self) -> float:
        """Seconds of the step that :meth:`start` began."""
        dt = time.perf_counter() - self._began
        if self.steps == 1 and not self._warm:
            # the first step compiles and warms up: it would spoil the mean
            self.seconds, self.steps, self._warm = 0.0, 0, True
        self.seconds, self.steps = self.seconds + dt, self.steps + 1
        return dt

    def per_step(self) -> float:
        """Mean seconds per step."""
        return self.seconds / max(self.steps, 1)


def resident_bytes() -> int | None:
    """Largest resident memory of this process so far, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def bits_per_byte(loss: float, tokens: int, n_bytes: int) -> float:
    """Bits per byte of a loss in nats per token: ``loss / ln 2 * tokens / n_bytes``."""
    return loss / math.log(2) * tokens / n_bytes


def _si(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:.0f}"


def clock(seconds: float) -> str:
    """A duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"
