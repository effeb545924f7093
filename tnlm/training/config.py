"""The training configuration: one frozen dataclass with every field of a run, its checks, and reading it from JSON.

A field is declared once, in :class:`TrainConfig`: its type carries the limits that are checked, the string under it is
the help of its flag (:mod:`tnlm.training.flags`), and the run's ``config.json`` holds its value. Imports no torch.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tnlm.config import ModelConfig
from tnlm.output import files
from tnlm.training.optim.schedule import Schedule

Recipe = Literal["replication", "replication-exact"]
Precision = Literal["auto", "float32", "bfloat16"]
NewtonSchulzDtype = Literal["auto", "float32", "bfloat16", "float64"]
MuonDistribution = Literal["replicate", "round_robin"]
Tracker = Literal["none", "trackio", "wandb", "tensorboard"]


@dataclass(frozen=True)
class Limits:
    """Smallest and largest value of a number, both allowed; part of a field's type."""

    low: int | float
    high: int | float = math.inf


Count = Annotated[int, Limits(1)]
NonNegativeInt = Annotated[int, Limits(0)]
NonNegative = Annotated[float, Limits(0)]
Fraction = Annotated[float, Limits(0, 1)]

WARMDOWN = 3704 / 9726
"""Fraction of the published run over which the learning rate falls to zero."""

OPERATIONAL = frozenset(
    "preset out micro_batch threads device compile implementation muon_distribution log_every val_batch save_every "
    "keep_last keep_every sample_tokens tracker peak_flops".split()
)
"""Fields of :class:`TrainConfig` that do not change what a run computes: they may change on resume."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a training run, complete: it is written as ``config.json`` into the run folder first.

    Raises:
        ValueError: A value is of the wrong type or range, or contradicts another.
    """

    model: ModelConfig
    """The architecture; sequences of training and validation have model.n_ctx tokens."""
    preset: str = "nano"
    """Name of the preset that this configuration started from; a label."""
    recipe: Recipe = "replication"
    """replication-exact repeats numerics and data order of the public code, quirks included; replication has the same
    hyper-parameters with float32 weights and exact resume."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights and of the shuffle."""

    data: str = "corpus"
    """corpus (the text every Python carries), fineweb10B, or a folder or glob of .bin shards."""
    val_data: str | None = None
    """Validation shard; None means the one beside the training shards."""
    tokenizer: str = "bpe1024"
    """bpe1024 or bytes for the corpus; gpt2, a path or none for shards without a tokenizer beside them."""
    shuffle: bool = False
    """Read the windows of each epoch in a seeded random order, instead of the order of the shards."""
    bos_align: bool = False
    """Start every window at the beginning of a document."""
    allow_truncated: bool = False
    """Read a shard that is shorter than its header says as far as it goes, instead of refusing it."""

    steps: Count
    """Optimiser steps, that is updates of the weights."""
    batch: Count
    """Sequences per step, over all ranks and micro-batches."""
    micro_batch: Count
    """Sequences per forward on one device; batch is a multiple of micro_batch times the number of ranks."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which every learning rate rises linearly from zero."""
    warmdown: Fraction = WARMDOWN
    """Fraction of the steps, at the end, over which every learning rate falls linearly to zero."""

    # What other programs call learning_rate is one field per group of parameters; presets that set none have these
    lr_embed: NonNegative = 0.3
    """Learning rate of the embedding (Adam)."""
    lr_head: NonNegative = 0.002
    """Learning rate of the unembedding (Adam)."""
    lr_matrix: NonNegative = 0.02
    """Learning rate of the weight matrices of the blocks (Muon)."""
    lr_scalar: NonNegative = 0.02
    """Learning rate of the biases and scalars of the blocks (Adam)."""
    beta1: Fraction = 0.9
    """Adam: decay of the mean of the gradients."""
    beta2: Fraction = 0.95
    """Adam: decay of the mean of the squared gradients."""
    adam_eps: NonNegative = 1e-8
    """Adam: added to the root of the squared gradients."""
    momentum_start: Fraction = 0.85
    """Muon: momentum of the first step."""
    momentum_end: Fraction = 0.95
    """Muon: momentum after momentum_warmup_steps."""
    momentum_warmup_steps: NonNegativeInt = 500
    """Muon: steps over which the momentum rises linearly."""
    ns_dtype: NewtonSchulzDtype = "auto"
    """Muon: dtype of the Newton-Schulz iteration; auto is bfloat16 on GPUs from sm_80 on and float32 elsewhere."""
    muon_distribution: MuonDistribution = "round_robin"
    """Muon: round_robin shares the Newton-Schulz work among the ranks, replicate repeats it; the result is the same."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay: every matrix shrinks by lr * weight_decay each step."""
    clip: NonNegative | None = None
    """Largest global gradient norm; None means no clipping."""
    init_scale: NonNegative = 1.0
    """Factor on the initial embedding; below 1 where no norm follows it."""

    precision: Precision = "auto"
    """bfloat16 activations over float32 weights, or float32; auto is bfloat16 on GPUs that have it."""
    device: str = "auto"
    """cpu, cuda, or cuda:N; auto is a GPU where there is one."""
    compile: bool = False
    """Compile the model with torch.compile."""
    implementation: str = "auto"
    """Attention implementation: eager, chunked, recurrent or triton (see tnlm.kernels); auto chooses by device."""
    threads: Count | None = None
    """CPU threads; None means at most 4, and 1 for each of several ranks."""

    val_every: Count = 125
    """Steps between validations; there is one more at the end."""
    val_tokens: Count = 10_485_760
    """Tokens of a validation, a multiple of the sequence length."""
    val_batch: Count | None = None
    """Sequences per forward in validation; None means micro_batch."""
    log_every: Count = 10
    """Steps between progress lines, or between updates of the progress bar."""
    save_every: Count | None = None
    """Steps between checkpoints; None means only those that are always saved: before the warm-down, at the end, and at
    a signal."""
    keep_last: Count = 2
    """Newest checkpoints to keep, beside the last one before the warm-down."""
    keep_every: Count | None = None
    """Checkpoints at multiples of this number of steps are kept for good; None means no such checkpoints."""
    sample_tokens: NonNegativeInt = 64
    """Length of the text sampled at the end; 0 for none."""
    tracker: Tracker = "none"
    """Experiment tracker that the metrics are also sent to; tensorboard writes into the run folder."""
    peak_flops: NonNegative | None = None
    """Peak FLOP/s of one device, for model FLOPs utilisation; None means the built-in table's."""
    out: str | None = None
    """Run folder; None means runs/{preset}-{mlp}-{attention}-s{seed}."""
    branched_from: str | None = None
    """Checkpoint of another run that this run continues under its own schedule; None means a fresh start. tnlm-train
    branch sets it."""

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            _check_value(field.name, getattr(self, field.name), kinds[field.name])
        if self.batch % self.micro_batch:
            raise ValueError(
                f"batch must be a multiple of micro_batch, got batch={self.batch}, micro_batch={self.micro_batch} "
                f"(remainder {self.batch % self.micro_batch})"
            )
        if self.val_tokens % self.seq:
            raise ValueError(
                f"val_tokens must be a multiple of the sequence length {self.seq}, got {self.val_tokens}; "
                f"the nearest below is {self.val_tokens // self.seq * self.seq}"
            )
        if self.warmup_steps + self.warmdown_steps > self.steps:
            raise ValueError(
                f"warm-up and warm-down must fit into the run, got warmup_steps={self.warmup_steps}, "
                f"warm-down {self.warmdown_steps}, steps={self.steps}"
            )
        if self.recipe == "replication-exact" and (self.shuffle or self.bos_align):
            raise ValueError(
                'recipe="replication-exact" reads the shards in the published order, got '
                f"shuffle={self.shuffle}, bos_align={self.bos_align}; set both to false"
            )

    @property
    def seq(self) -> int:
        """Tokens per sequence."""
        return self.model.n_ctx

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update, over all ranks."""
        return self.batch * self.seq

    @property
    def warmdown_steps(self) -> int:
        """Length of the warm-down, in steps."""
        return round(self.warmdown * self.steps)

    @property
    def schedule(self) -> Schedule:
        """Learning-rate factor and momentum of each update."""
        return Schedule(
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            warmdown_steps=self.warmdown_steps,
            momentum_start=self.momentum_start,
            momentum_end=self.momentum_end,
            momentum_warmup_steps=self.momentum_warmup_steps,
        )

    @property
    def folder(self) -> Path:
        """The run folder: ``out``, or its default."""
        name = f"{self.preset}-{self.model.mlp}-{self.model.attention}-s{self.seed}"
        return Path(self.out) if self.out is not None else Path("runs") / name

    def replace(self, **changes: Any) -> "TrainConfig":
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def with_model(self, **changes: Any) -> "TrainConfig":
        """A copy with fields of the model changed; sizes that depend on them follow.

        ``d_hidden`` keeps its ratio to ``d_model`` and is 0 for ``mlp="none"``; a ``d_qk`` of half a head stays half;
        ``val_tokens`` stays whole sequences, the nearest number below.
        """
        model = self.model
        if changes.get("mlp", model.mlp) == "none":
            changes = {**changes, "d_hidden": 0}
        elif "d_hidden" not in changes and "d_model" in changes:
            changes = {**changes, "d_hidden": model.d_hidden * changes["d_model"] // model.d_model}
        if "d_qk" not in changes and model.d_qk == model.d_head // 2 and {"d_model", "n_head"} & changes.keys():
            d_head = changes.get("d_model", model.d_model) // changes.get("n_head", model.n_head)
            changes = {**changes, "d_qk": d_head // 2}
        model = model.replace(**changes)
        return self.replace(model=model, val_tokens=max(1, self.val_tokens // model.n_ctx) * model.n_ctx)

    def matched(self) -> "TrainConfig":
        """A copy with ``d_qk = d_head / 2``: with two query-key pairs, the parameters and FLOPs of softmax attention.

        Raises:
            ValueError: The attention has one query-key pair: it needs no matching.
        """
        if self.model.n_qk != 2:
            raise ValueError(
                f"matched halves d_qk of attentions with two query-key pairs, got attention={self.model.attention!r}; "
                "use attention=bilinear or differential"
            )
        return self.with_model(d_qk=self.model.d_head // 2)

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain JSON values, the model nested."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "config") -> "TrainConfig":
        """Rebuild from :meth:`to_dict`; ``source`` names the file in errors.

        Raises:
            ValueError: A key is unknown or missing, or a value is refused.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
        unknown, missing = sorted(map(str, values.keys() - known)), sorted(required - values.keys())
        if unknown or missing:
            raise ValueError(
                f"{source} does not fit TrainConfig: missing {', '.join(missing) or 'none'}; "
                f"unexpected {', '.join(unknown) or 'none'}. Known keys: {', '.join(sorted(known))}"
            )
        model = ModelConfig.from_dict(values["model"], source=f"{source}, model")
        try:
            return cls(**{**values, "model": model})
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def updated(self, values: Mapping[str, Any], *, source: str = "config") -> "TrainConfig":
        """A copy with the given fields, as a config file may hold some of them; ``model`` may be partial too.

        Raises:
            ValueError: A key is unknown, or a value is refused.
        """
        if not isinstance(values, Mapping) or not isinstance(values.get("model", {}), Mapping):
            raise ValueError(f"{source} must hold a JSON object, with an object under model if that is given")
        model = self.model.to_dict() | dict(values.get("model", {}))
        return TrainConfig.from_dict({**self.to_dict(), **values, "model": model}, source=source)


def load_config(path: str | Path) -> TrainConfig:
    """Read the configuration of a run from its ``config.json``.

    Raises:
        ValueError: There is no readable configuration.
    """
    return TrainConfig.from_dict(read_json(path), source=str(path))


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object from a configuration file.

    Raises:
        ValueError: Missing, unreadable, or not an object.
    """
    try:
        return files.read_json(Path(path))
    except OSError as error:
        raise ValueError(f"config file {path} cannot be read: {error.strerror}") from error


def _check_value(name: str, value: object, kind: Any) -> None:
    """Raise ``ValueError`` unless ``value`` has the type of a field, and lies within its :class:`Limits`."""
    options = get_args(kind)
    if NoneType in options:
        if value is None:
            return
        (kind,) = (option for option in options if option is not NoneType)
    if get_origin(kind) is Annotated:
        number, limits = get_args(kind)
        _check_number(name, value, number, limits)
    elif get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}; got {value!r}")
    elif not isinstance(value, kind):
        what = {bool: "true or false", str: "text"}.get(kind, f"a {kind.__name__}")
        raise ValueError(f"{name} must be {what}, got {value!r}")


def _check_number(name: str, value: object, number: type, limits: Limits) -> None:
    # an int serves as a float; true and false are no numbers
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and isinstance(value, int | number)
        and abs(value) <= (2**63 - 1 if number is int else sys.float_info.max)
        and limits.low <= value <= limits.high
    ):
        return
    limit = f">= {limits.low:g}" if limits.high == math.inf else f"in [{limits.low:g}, {limits.high:g}]"
    raise ValueError(f"{name} must be {'an integer' if number is int else 'a number'} {limit}, got {value!r}")
