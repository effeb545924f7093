"""Command ``tnlm-train``: run, branch, compare, export, data.

Progress goes to stderr, the last line of stdout is one JSON record. Exit codes:

====== =============================================================
0      done
1      an unexpected error (a traceback), or damaged shards in ``data check``
2      a wrong flag, configuration, file or launch; the message says what to change
3      training diverged: a loss or gradient was not finite
4      the disk refused a write (full, read-only); older checkpoints are untouched
130    SIGINT: a complete checkpoint was saved; the same command resumes
143    SIGTERM: likewise
====== =============================================================
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from tnlm.config import AttentionKind, MLPKind
from tnlm.training.outcomes import Diverged, Interrupted
from tnlm.training.presets import Precision, Recipe, Tracker, TrainConfig, preset, read_json

OK, FAILED, USAGE, DIVERGED, DISK = 0, 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Sizes of the model; what is left out is the preset's. Other fields of the model: ``--config``."""

    n_layer: int | None = None
    n_head: int | None = None
    d_model: int | None = None
    d_hidden: int | None = None
    """Keeps its ratio to d_model when left out."""
    d_qk: int | None = None
    """Width of queries and keys per head."""
    d_vocab: int | None = None
    n_ctx: int | None = None
    """Tokens per sequence."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train a model, or resume: the same command continues a stopped run.

    Without flags: the nano preset, offline, on a CPU, in about two minutes. Under torchrun every rank runs this.
    """

    preset: str = "nano"
    """nano, nano-pure, nano-attention-only, tiny, debug, small, medium, large, or {debug,small,medium,large}-relu2."""
    mlp: MLPKind | None = None
    attention: AttentionKind | None = None
    matched: bool = False
    """d_qk = d_head / 2: bilinear attention with the parameters and FLOPs of softmax."""
    recipe: Recipe | None = None
    """replication-exact repeats the public code, quirks included; replication repairs it."""
    data: str | None = None
    """corpus, fineweb10B, or a folder or glob of .bin shards."""
    val_data: str | None = None
    tokenizer: str | None = None
    steps: int | None = None
    batch: int | None = None
    """Sequences per step over all ranks."""
    micro_batch: int | None = None
    """Sequences per forward on one device."""
    seed: int | None = None
    out: str | None = None
    """Run folder; runs/{preset}-{mlp}-{attention}-s{seed} when left out."""
    precision: Precision | None = None
    device: str | None = None
    threads: int | None = None
    compile: bool | None = None
    val_every: int | None = None
    val_tokens: int | None = None
    save_every: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    log_every: int | None = None
    tracker: Tracker | None = None
    model: ModelFlags = field(default_factory=ModelFlags)
    config: Path | None = None
    """A JSON file with any fields of TrainConfig (and model); flags override it."""
    dry_run: bool = False
    """Print parameters, FLOPs, memory and time, and stop."""

    def resolve(self) -> TrainConfig:
        """Preset, then config file, then flags."""
        values = read_json(self.config) if self.config is not None else {}
        name = self.preset if self.config is None or self.preset != "nano" else values.get("preset", self.preset)
        config = preset(name).updated(values, source=str(self.config)) if values else preset(name)
        kinds = {"mlp": self.mlp, "attention": self.attention, **dataclasses.asdict(self.model)}
        changes = {k: v for k, v in kinds.items() if v is not None}
        config = config.with_model(**changes) if changes else config
        config = config.matched() if self.matched else config
        own = {f.name for f in dataclasses.fields(TrainConfig)} - {"preset", "model"}
        flags = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in own}
        flags = {k: v for k, v in flags.items() if v is not None}
        if "batch" in flags and "micro_batch" not in flags:
            flags["micro_batch"] = min(config.micro_batch, flags["batch"])
        return config.replace(**flags)

    def execute(self) -> dict[str, Any]:
        config = self.resolve()
        if self.dry_run:
            from tnlm.training.estimate import estimate

            return estimate(config)
        from tnlm.training.loop import train

        return {"command": "run", **train(config).to_dict()}


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Continue a checkpoint from another run's constant-rate phase under a schedule of its own."""

    trunk: tyro.conf.Positional[Path]
    """The run folder; it needs checkpoints from before its warm-down (--save-every, --keep-every)."""
    steps: int
    """Horizon of the new schedule, counted from the beginning of the trunk."""
    at: int | None = None
    """Step of the checkpoint; by default the last before either warm-down begins."""
    warmdown: float | None = None
    """Fraction of the steps; by default the trunk's."""
    out: str | None = None
    """Run folder; {trunk}-steps{steps} when left out."""
    keep_last: int | None = None
    threads: int | None = None

    def execute(self) -> dict[str, Any]:
        from tnlm.training.branch import branch_config
        from tnlm.training.loop import train

        config = branch_config(self.trunk, steps=self.steps, at=self.at, warmdown=self.warmdown, out=self.out)
        changes = {"keep_last": self.keep_last, "threads": self.threads}
        config = config.replace(**{k: v for k, v in changes.items() if v is not None})
        return {"command": "branch", "branched_from": config.branched_from, **train(config).to_dict()}


COMMANDS: dict[str, Any] = {"run": Run, "branch": Branch}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="tnlm-train", description="Train and compare tensor-network language models.", args=argv
        )
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else USAGE
    return _guarded(command.execute)


def _guarded(execute: Callable[[], dict[str, Any]]) -> int:
    try:
        record = execute()
    except ValueError as error:
        return _fail(str(error), USAGE)
    except Diverged as error:
        return _fail(str(error), DIVERGED)
    except Interrupted as error:
        return _fail(str(error), 128 + error.number)
    except OSError as error:
        return _fail(str(error), DISK)
    print(json.dumps(record))
    return OK


def _fail(message: str, code: int) -> int:
    print(f"tnlm-train: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
