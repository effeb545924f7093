"""The training configuration, and presets: functions that return a whole one. Imports no torch."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tnlm.config import AttentionKind, MLPKind, ModelConfig, published_size
from tnlm.output import files
from tnlm.training.optim.schedule import Schedule

Recipe = Literal["replication", "replication-exact"]
Precision = Literal["auto", "float32", "bfloat16"]
NewtonSchulzDtype = Literal["auto", "float32", "bfloat16", "float64"]
MuonDistribution = Literal["replicate", "round_robin"]
Tracker = Literal["none", "trackio", "wandb"]

WARMDOWN = 3704 / 9726
"""Fraction of the published run over which the learning rate falls to zero."""

OPERATIONAL = frozenset(
    "preset out micro_batch threads device compile implementation muon_distribution log_every val_batch save_every "
    "keep_last keep_every sample_tokens tracker peak_flops".split()
)
"""Fields that say how a run is carried out, not what it computes: they may change on resume."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a run depends on: written as ``config.json`` into its folder before anything else happens.

    Raises:
        ValueError: A value is of the wrong type or range, or contradicts another.
    """

    model: ModelConfig
    """The architecture; sequences of training and validation have ``model.n_ctx`` tokens."""
    preset: str = "nano"
    """The name this configuration started from; a label."""
    recipe: Recipe = "replication"
    """``replication-exact``: numerics and order of the public code, quirks included; ``replication``: repaired."""
    seed: int = 0
    """Seeds the initial weights and the shuffle."""

    data: str = "corpus"
    """``corpus`` (the text every Python carries), ``fineweb10B``, or a folder or glob of .bin shards."""
    val_data: str | None = None
    """The validation shard; by default the one that stands beside the training shards."""
    tokenizer: str = "bpe1024"
    """``bpe1024`` or ``bytes`` for the corpus; for shards that have none beside them ``gpt2``, a path, or ``none``."""
    shuffle: bool = False
    """A seeded permutation of the windows of each epoch, instead of the published order."""
    bos_align: bool = False
    """Start every window at a document."""
    allow_truncated: bool = False
    """Read what a shard shorter than its header says does hold, instead of refusing it."""

    steps: int
    """Optimiser steps, that is updates."""
    batch: int
    """Sequences per step, over all ranks and micro-batches."""
    micro_batch: int
    """Sequences per forward on one device; ``batch`` is a multiple of ``micro_batch`` times the ranks."""
    warmup_steps: int = 0
    warmdown: float = WARMDOWN
    """Fraction of the steps over which every learning rate falls linearly to zero."""

    lr_embed: float = 0.3
    lr_head: float = 0.002
    lr_matrix: float = 0.02
    """Muon, on the 2-D weights of the blocks."""
    lr_scalar: float = 0.02
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    momentum_start: float = 0.85
    momentum_end: float = 0.95
    momentum_warmup_steps: int = 500
    ns_dtype: NewtonSchulzDtype = "auto"
    """Dtype of Muon's Newton-Schulz iteration; auto is bf16 on recent GPUs and float32 elsewhere."""
    muon_distribution: MuonDistribution = "round_robin"
    """Which rank orthogonalises which matrix; the result is the same."""
    weight_decay: float = 0.0
    """Decoupled: every matrix shrinks by ``lr * weight_decay`` each step."""
    clip: float | None = None
    """Largest global gradient norm."""
    init_scale: float = 1.0
    """Factor on the initial embedding: small where no norm follows it."""

    precision: Precision = "auto"
    """bf16 activations over float32 weights, or float32; auto is bf16 on GPUs that have it."""
    device: str = "auto"
    compile: bool = False
    """torch.compile of the model."""
    implementation: str = "auto"
    """Attention implementation, see tnlm.kernels."""
    threads: int | None = None
    """CPU threads; by default at most 4, and 1 for each of several ranks."""

    val_every: int = 125
    """Steps between validations; one more at the end."""
    val_tokens: int = 10_485_760
    val_batch: int | None = None
    """Sequences per forward in validation; ``micro_batch`` by default."""
    log_every: int = 10
    """Steps between lines, or updates of the bar."""
    save_every: int | None = None
    """Steps between checkpoints; there is always one before the warm-down, at the end, and at a signal."""
    keep_last: int = 2
    """Newest checkpoints to keep, beside the last one before the warm-down."""
    keep_every: int | None = None
    """Checkpoints at multiples of this are kept for good."""
    sample_tokens: int = 64
    """Length of the text sampled at the end; 0 for none."""
    tracker: Tracker = "none"
    peak_flops: float | None = None
    """Peak FLOP/s of one device, for MFU, where the built-in table has none."""
    out: str | None = None
    """Run folder; ``runs/{preset}-{mlp}-{attention}-s{seed}`` by default."""
    branched_from: str | None = None
    """The trunk checkpoint whose state this run continues under its own schedule."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "micro_batch", "val_every", "val_tokens", "log_every", "keep_last"):
            _check_int(name, getattr(self, name), low=1)
        for name in ("seed", "warmup_steps", "momentum_warmup_steps", "sample_tokens"):
            _check_int(name, getattr(self, name), low=0)
        for name in ("threads", "val_batch", "save_every", "keep_every"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=1)
        kinds = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            _check_kind(field.name, getattr(self, field.name), kinds[field.name])
        for name in ("lr_embed", "lr_head", "lr_matrix", "lr_scalar", "adam_eps", "weight_decay", "init_scale"):
            _check_float(name, getattr(self, name), low=0.0)
        for name in ("beta1", "beta2", "momentum_start", "momentum_end", "warmdown"):
            _check_float(name, getattr(self, name), low=0.0, high=1.0)
        for name in ("clip", "peak_flops"):
            if getattr(self, name) is not None:
                _check_float(name, getattr(self, name), low=0.0)
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
                f"shuffle={self.shuffle}, bos_align={self.bos_align}; set both to false in the --config file"
            )

    @property
    def seq(self) -> int:
        """Tokens per sequence."""
        return self.model.n_ctx

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    @property
    def warmdown_steps(self) -> int:
        return round(self.warmdown * self.steps)

    @property
    def schedule(self) -> Schedule:
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
        """Where the run lives."""
        name = f"{self.preset}-{self.model.mlp}-{self.model.attention}-s{self.seed}"
        return Path(self.out) if self.out is not None else Path("runs") / name

    def replace(self, **changes: Any) -> "TrainConfig":
        return dataclasses.replace(self, **changes)

    def with_model(self, **changes: Any) -> "TrainConfig":
        """A copy with model fields changed; sizes that follow others keep doing so.

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
        unknown, missing = sorted(values.keys() - known), sorted(required - values.keys())
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
    """The configuration a run folder was started with.

    Raises:
        ValueError: There is no readable configuration.
    """
    return TrainConfig.from_dict(read_json(path), source=str(path))


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: Missing, unreadable, or not an object.
    """
    try:
        return files.read_json(Path(path))
    except OSError as error:
        raise ValueError(f"config file {path} cannot be read: {error.strerror}") from error


def _check_kind(name: str, value: object, kind: Any) -> None:
    """Refuse what is none of a field's choices, no switch, text or model; numbers have their ranges beside."""
    if type(None) in get_args(kind):
        if value is None:
            return
        (kind,) = (option for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}; got {value!r}")
    elif kind not in (int, float) and not isinstance(value, kind):
        what = {bool: "true or false", str: "text"}.get(kind, f"a {kind.__name__}")
        raise ValueError(f"{name} must be {what}, got {value!r}")


def _check_int(name: str, value: object, *, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")


def _check_float(name: str, value: object, *, low: float, high: float = math.inf) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type, operator]
        limit = f">= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be a number {limit}, got {value!r}")


# Presets


def _nano_run(model: ModelConfig, **changes: Any) -> TrainConfig:
    defaults: dict[str, Any] = {
        "steps": 250,
        "batch": 8,
        "micro_batch": 8,
        "val_every": 50,
        "val_tokens": 16_384,
        "save_every": 100,
        "keep_every": 100,  # 15 MB each: a branch of any horizon finds its checkpoint
        "shuffle": True,
    }
    return TrainConfig(model=model, **{**defaults, **changes})


def nano() -> TrainConfig:
    """The CPU default: 1.4M parameters, 256k tokens of the embedded corpus, about two minutes on one core."""
    return _nano_run(ModelConfig.released(n_layer=4, n_head=4, d_model=128, d_vocab=1024, n_ctx=128))


def nano_pure() -> TrainConfig:
    """nano as a polynomial outright: no norm, QK-norm or softcap."""
    model = ModelConfig.pure(d_vocab=1024, n_layer=4, n_head=4, d_model=128, d_hidden=512, n_ctx=128)
    return _nano_run(model, preset="nano-pure", **_PURE)


def nano_attention_only() -> TrainConfig:
    """Two layers of bilinear attention and nothing else: small enough to write out as one tensor network."""
    model = ModelConfig.pure(
        d_vocab=1024,
        n_layer=2,
        n_head=4,
        d_model=128,
        d_hidden=0,
        n_ctx=128,
        mlp="none",
        x0_mixing=False,
        value_residual=False,
    )
    return _nano_run(model, preset="nano-attention-only", **_PURE)


_PURE = {"lr_embed": 0.03, "lr_matrix": 0.005, "lr_scalar": 0.005, "clip": 1.0}
"""Without norms the logits are polynomials of high degree in the weights: smaller steps keep them bounded."""


def tiny() -> TrainConfig:
    """6.4M to 7.2M parameters on the bytes of the embedded corpus: hours on a CPU, minutes on a GPU."""
    model = ModelConfig.released(n_layer=6, n_head=4, d_model=256, d_vocab=256, n_ctx=256)
    return TrainConfig(
        model=model,
        preset="tiny",
        tokenizer="bytes",
        steps=1000,
        batch=16,
        micro_batch=16,
        val_every=125,
        val_tokens=65_536,
        save_every=250,
    )


def _fineweb(name: str, size: str, steps: int, micro_batch: int, **model_changes: Any) -> TrainConfig:
    return TrainConfig(
        model=published_size(size, **model_changes),
        preset=name,
        data="fineweb10B",
        tokenizer="gpt2",
        steps=steps,
        batch=512,
        micro_batch=micro_batch,
        save_every=1000,
    )


def debug() -> TrainConfig:
    """The published smallest setting, 32M parameters: a check on one GPU."""
    return _fineweb("debug", "debug", 500, 64)


def small() -> TrainConfig:
    """190M to 205M parameters, 1.7e9 tokens."""
    return _fineweb("small", "small", 3242, 32)


def medium() -> TrainConfig:
    """The comparison: 498M to 546M parameters, 5.1e9 tokens; eight GPUs."""
    return _fineweb("medium", "medium", 9726, 16)


def large() -> TrainConfig:
    """1.06e9 to 1.17e9 parameters, 5.1e9 tokens."""
    return _fineweb("large", "large", 9726, 8)


_RELU2: dict[str, Any] = {"mlp": "relu2", "attention": "softmax"}


def debug_relu2() -> TrainConfig:
    """The published debug size with the ReLU^2 MLP and softmax attention."""
    return _fineweb("debug-relu2", "debug", 500, 64, **_RELU2)


def small_relu2() -> TrainConfig:
    """The published small size with the ReLU^2 MLP and softmax attention, 162M parameters."""
    return _fineweb("small-relu2", "small", 3242, 32, **_RELU2)


def medium_relu2() -> TrainConfig:
    """The published ReLU^2 medium, 20 layers of width 1280, 522M parameters."""
    return _fineweb("medium-relu2", "medium-relu2", 9726, 16)


def large_relu2() -> TrainConfig:
    """The published ReLU^2 large, 26 layers of width 1664, 1.03e9 parameters."""
    return _fineweb("large-relu2", "large-relu2", 9726, 8)


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "nano": nano,
    "nano-pure": nano_pure,
    "nano-attention-only": nano_attention_only,
    "tiny": tiny,
    "debug": debug,
    "small": small,
    "medium": medium,
    "large": large,
    "debug-relu2": debug_relu2,
    "small-relu2": small_relu2,
    "medium-relu2": medium_relu2,
    "large-relu2": large_relu2,
}


def preset(
    name: str, *, mlp: MLPKind | None = None, attention: AttentionKind | None = None, matched: bool = False
) -> TrainConfig:
    """A preset by name, with another MLP, another attention, or ``d_qk = d_head / 2``.

    Raises:
        ValueError: The name is unknown, or the changes do not fit.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    config = PRESETS[name]()
    kinds = {k: v for k, v in {"mlp": mlp, "attention": attention}.items() if v is not None}
    config = config.with_model(**kinds) if kinds else config
    return config.matched() if matched else config
