"""Runs and arms of a comparison, read from run folders of ``tnlm-train`` or from curves recorded elsewhere.

A run folder holds ``config.json``, a ``TrainConfig``, and ``metrics.jsonl``, one event per line. Of the events, read
here:

- ``start`` or ``resume``: ``recipe n_params flops_per_token tokens_per_step warmdown_steps dtype versions world_size
  accumulation`` and ``data`` with ``fingerprint shards_read order val_fingerprint tokenizer tokenizer_hash``;
- ``train``: ``dt``, seconds of the step;
- ``val``: ``step loss bits_per_byte val_tokens``.

Imports no torch.
"""

import csv
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tnlm.checks import as_path
from tnlm.training.config import OPERATIONAL, TrainConfig, load_config
from tnlm.training.run.metrics import read_metrics

Metric = Literal["loss", "bits_per_byte"]
COMPARED_ELSEWHERE = {
    "model": "the question itself: one within an arm, and told between arms",
    "seed": "the independent draw, which pairing matches",
    "steps": "the horizon, of which E1 wants several",
    "warmdown": "one rule for all horizons, a number of steps or a fraction",
    "recipe": "refused, as recorded in the start event",
    "precision": "refused by the dtype it came to",
    "data": "by the hash of the shards",
    "val_data": "by the hash of the validation tokens",
    "val_tokens": "refused by the number that was evaluated",
    "tokenizer": "by the hash of the vocabulary",
    "branched_from": "the trunk, by which seeds are counted",
}
"""Fields of ``TrainConfig`` that are not compared by value, each with how it is compared instead.

The other fields, without the operational ones, are the settings of a run.
"""


def settings(config: TrainConfig) -> dict[str, Any]:
    """Fields by name that two arms should share: the comparison warns where they differ, and does not pair seeds."""
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in OPERATIONAL and field.name not in COMPARED_ELSEWHERE
    }


@dataclass(frozen=True, kw_only=True)
class Run:
    """One complete run: its validation curve, and the facts that decide what it can be compared with."""

    name: str
    arm: str
    """Name of the arm, e.g. ``bilinear+softmax``."""
    seed: str
    """The independent draw: runs of one arm and seed, as branches of one trunk are, share their noise."""
    steps: int
    """Horizon: the length of the complete schedule."""
    curve_steps: np.ndarray
    curve_losses: np.ndarray
    """Validation losses at ``curve_steps``; the last is the final loss, at ``steps``."""
    metric: str = "loss"
    trunk: str | None = None
    """The run whose checkpoint this one continued."""
    warmdown_steps: int | None = None
    seconds_per_step: float | None = None
    """Median duration of a step."""
    facts: dict[str, Any] = field(default_factory=dict)
    """``recipe dtype seq val_tokens val_fingerprint tokenizer tokenizer_hash n_params flops_per_token
    tokens_per_step data_fingerprint shards_read data_order implementation version settings model``; absent for
    curves from elsewhere."""

    def __post_init__(self) -> None:
        bad = np.flatnonzero(~np.isfinite(self.curve_losses))
        if len(bad):
            raise ValueError(
                f"run {self.name} must have finite losses to be compared, got {self.curve_losses[bad[0]]} at step "
                f"{self.curve_steps[bad[0]]}; leave a run that diverged out"
            )

    @property
    def final(self) -> float:
        """Validation loss at the last step."""
        return float(self.curve_losses[-1])


class Arm:
    """Runs of one architecture, by horizon."""

    def __init__(self, runs: Sequence[Run], role: str):
        if not runs:
            raise ValueError(f"the {role} arm must hold at least one run, got none")
        self.runs, self.role, self.label = list(runs), role, runs[0].arm
        self.horizons = sorted({run.steps for run in runs})
        for horizon in self.horizons:
            seeds = [run.seed for run in self.cell(horizon)]
            if len(set(seeds)) < len(seeds):
                names = ", ".join(run.name for run in self.cell(horizon))
                raise ValueError(
                    f"each seed must occur once per horizon in the {role} arm, got seeds {', '.join(seeds)} at "
                    f"{horizon} steps ({names})"
                )
        trunks = {(run.trunk, run.seed) for run in runs if run.trunk}
        if len({trunk for trunk, _ in trunks}) < len(trunks):
            raise ValueError(f"branches of one trunk share its noise and must keep its seed, got {sorted(trunks)}")

    def cell(self, horizon: int) -> list[Run]:
        """Runs of one horizon."""
        return [run for run in self.runs if run.steps == horizon]

    def finals(self, horizon: int) -> np.ndarray:
        """Final losses of the runs of one horizon."""
        return np.array([run.final for run in self.cell(horizon)])

    def curves(self, horizon: int) -> tuple[np.ndarray, np.ndarray]:
        """Steps (M,) that all runs of a horizon evaluated at, and losses (runs, M)."""
        cell = self.cell(horizon)
        steps = sorted(set.intersection(*(set(run.curve_steps.tolist()) for run in cell)))
        return np.array(steps), np.array([run.curve_losses[np.isin(run.curve_steps, steps)] for run in cell])

    def fact(self, key: str) -> Any:
        """A fact that :func:`tnlm.training.compare.checks.check` found equal in the arm; None for curves."""
        return self.runs[0].facts.get(key)

    @property
    def seeds(self) -> int:
        """Number of different seeds in the arm."""
        return len({run.seed for run in self.runs})

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the runs; None if one did not record it."""
        seconds = [run.seconds_per_step for run in self.runs]
        return float(np.median(seconds)) if None not in seconds else None  # type: ignore[arg-type]

    def stable_end(self, horizon: int, fraction: float | None) -> float | None:
        """Last step of the constant-rate phase; ``fraction`` stands in where the runs do not say."""
        known = self.cell(horizon)[0].warmdown_steps
        if known is None and fraction is None:
            return None
        return float(horizon - (known if known is not None else fraction * horizon))  # type: ignore[operator]


def load_run(folder: str | os.PathLike, *, metric: Metric = "loss") -> Run:
    """Read a finished run folder.

    Args:
        metric: ``loss``, nats per token, or ``bits_per_byte``, which compares across vocabularies.

    Raises:
        ValueError: A file is missing or damaged, or the run has no validation at its last step.
    """
    folder = as_path("folder", folder)
    config = load_config(folder / "config.json")
    events = read_events(folder / "metrics.jsonl")
    starts = [event for event in events if event["kind"] in ("start", "resume")]
    if not starts:
        raise ValueError(f"{folder / 'metrics.jsonl'} must hold a start event, got {len(events)} other events")
    start, data = starts[-1], starts[-1].get("data", {})
    curve = {event["step"]: event[metric] for event in events if event["kind"] == "val"}
    steps = config.steps
    if steps not in curve:
        raise ValueError(
            f"run {folder} must be finished, got validation up to step {max(curve, default='none')} of {steps}; "
            "run the same command again to finish it"
        )
    if None in curve.values():
        raise ValueError(f"run {folder} recorded no {metric}; its data folder had no tokenizer")
    durations = [event["dt"] for event in events if event["kind"] == "train" and event.get("dt")]
    order = sorted(curve)
    return Run(
        name=str(folder),
        arm=f"{config.model.mlp}+{config.model.attention}",
        seed=str(config.seed),
        trunk=_trunk_folder(config.branched_from) if config.branched_from else None,
        steps=steps,
        curve_steps=np.array(order),
        curve_losses=np.array([curve[step] for step in order]),
        metric=metric,
        warmdown_steps=start["warmdown_steps"],
        seconds_per_step=float(np.median(durations)) if durations else None,
        facts={
            "model": config.model.to_dict(),
            "seq": config.seq,
            "implementation": config.implementation,
            "val_tokens": next(event["val_tokens"] for event in reversed(events) if event["kind"] == "val"),
            "val_fingerprint": data.get("val_fingerprint"),
            "tokenizer": data.get("tokenizer"),
            "tokenizer_hash": data.get("tokenizer_hash"),
            "data_fingerprint": data.get("fingerprint"),
            "shards_read": data.get("shards_read"),
            "data_order": _order(start),
            "version": start.get("versions"),
            "settings": settings(config),
            **{key: start.get(key) for key in ("recipe", "dtype", "n_params", "flops_per_token", "tokens_per_step")},
        },
    )


def _trunk_folder(checkpoint: str) -> str:
    """The run folder of ``RUN/checkpoints/step_N``: all branches of one run share its noise."""
    path = Path(checkpoint).resolve()
    return str(path.parents[1] if path.parent.name == "checkpoints" else path)


def _order(start: dict[str, Any]) -> str | None:
    """The order of the data as text; the published order depends on how a batch is divided among the ranks."""
    order = start.get("data", {}).get("order")
    if order == "published":
        return f"published order of {start['world_size']} ranks with {start['accumulation']} micro-batches each"
    return order


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of a run's ``metrics.jsonl``.

    Raises:
        ValueError: It is missing or damaged.
    """
    if not path.is_file():
        raise ValueError(f"run {path.parent} must hold the file metrics.jsonl, but there is none")
    return read_metrics(path)


def load_curves(path: str | os.PathLike, specs: Sequence[str]) -> list[Run]:
    """Runs of one arm from a CSV with columns ``group, run, schedule_steps, step, val_loss``.

    Args:
        specs: ``GROUP`` or ``GROUP:RUNS``, RUNS like ``0-3,7``; several make one arm of several horizons.

    Raises:
        ValueError: A column, group or run is missing, a number does not parse, or a curve ends early.
    """
    table = _read_table(Path(path))
    runs: list[Run] = []
    for spec in specs:
        group, _, wanted = spec.partition(":")
        held = {run for g, run in table if g == group}
        if not held:
            raise ValueError(f"{path} has no group {group!r}, it holds {', '.join(sorted({g for g, _ in table}))}")
        for run in _expand(wanted, spec) if wanted else sorted(held, key=lambda r: (len(r), r)):
            if run not in held:
                raise ValueError(f"group {group!r} of {path} has no run {run!r}, asked for by {spec!r}")
            name = f"{group}:{run}"
            if any(name == other.name for other in runs):
                raise ValueError(f"each run must be given once in an arm, got {name} twice in {' '.join(specs)}")
            runs.append(_curve(path, name, table[group, run], arm=" ".join(specs)))
    return runs


def _curve(path: str | os.PathLike, name: str, rows: list[tuple[int, int, float]], *, arm: str) -> Run:
    horizons = {horizon for horizon, _, _ in rows}
    by_step = {step: loss for _, step, loss in rows}
    steps = sorted(by_step)
    if len(horizons) != 1 or len(by_step) != len(rows) or steps[-1] != max(horizons):
        raise ValueError(
            f"run {name} of {path} must have one schedule_steps, each step once and its last step there, got "
            f"schedules {sorted(horizons)}, {len(rows)} rows for {len(by_step)} steps, last step {steps[-1]}"
        )
    return Run(
        name=name,
        arm=arm,
        seed=name,
        steps=steps[-1],
        curve_steps=np.array(steps),
        curve_losses=np.array([by_step[step] for step in steps]),
    )


def _read_table(path: Path) -> dict[tuple[str, str], list[tuple[int, int, float]]]:
    columns = ("group", "run", "schedule_steps", "step", "val_loss")
    if not path.is_file():
        raise ValueError(f"curves {path} must be a CSV file, but there is none")
    table: dict[tuple[str, str], list[tuple[int, int, float]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(row for row in file if not row.startswith("#"))
        if missing := [column for column in columns if column not in (rows.fieldnames or ())]:
            raise ValueError(f"{path} must have columns {', '.join(columns)}, but it lacks {', '.join(missing)}")
        for row in rows:
            try:
                values = int(row["schedule_steps"]), int(row["step"]), float(row["val_loss"])
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}: a row must hold numbers, got {row} ({error})") from error
            table.setdefault((row["group"], row["run"]), []).append(values)
    return table


def _expand(runs: str, spec: str) -> list[str]:
    """The labels of a list of runs: ``0-3,7`` gives 0, 1, 2, 3, 7."""
    labels: list[str] = []
    for part in runs.split(","):
        first, dash, last = part.partition("-")
        if dash and first.isdigit() and last.isdigit() and int(first) <= int(last):
            labels += [str(i) for i in range(int(first), int(last) + 1)]
        elif part and not dash:
            labels.append(part)
        else:
            raise ValueError(f"runs of an arm must look like GROUP:0-3,7, got {spec!r}")
    return labels
