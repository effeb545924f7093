"""ModelConfig: the architecture of a model, all that is needed to rebuild it. Imports no torch."""

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

MLPKind = Literal["bilinear", "squared", "swiglu", "geglu", "reglu", "glu", "relu2", "relu", "gelu", "none"]
AttentionKind = Literal["bilinear", "squared", "squared_normalized", "softmax", "differential", "none"]
NormKind = Literal["rms", "none"]
TableDtype = Literal["bfloat16", "float32"]

if TYPE_CHECKING:
    Derived = int
else:
    Derived = int | None
"""Type of a size that may be left out. ``__post_init__`` fills it in, so readers of a config always find an int."""

GATED_MLPS = ("bilinear", "swiglu", "geglu", "reglu", "glu")
POLYNOMIAL_MLPS = ("bilinear", "squared", "none")
TWO_PAIR_ATTENTIONS = ("bilinear", "differential")
POLYNOMIAL_ATTENTIONS = ("bilinear", "squared", "none")
NOT_POLYNOMIAL = {
    "swiglu": "silu is not a polynomial",
    "geglu": "gelu is not a polynomial",
    "reglu": "relu is polynomial only piecewise",
    "glu": "the sigmoid is not a polynomial",
    "relu2": "relu(x)**2 is polynomial only piecewise",
    "relu": "relu is polynomial only piecewise",
    "gelu": "gelu is not a polynomial",
    "squared_normalized": "its rows are divided by their sum, which makes it rational",
    "softmax": "softmax is not a polynomial",
    "differential": "its two softmaxes are not polynomials",
}
"""Why a kind of MLP or attention has no tensor network."""

FP32_EPS = 1.1920929e-07
"""``norm_eps`` of the released models: float32's machine epsilon, for every dtype."""

FP32_TINY, FP32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest normal and the largest number of float32: outside, a softcap is 0 or inf and makes NaN of logits."""

MAX_SIZE = 2**63 - 1
"""The largest size of an axis in torch."""

LATER_FIELDS = frozenset({"final_norm", "mlp_hidden_bias"})
"""Fields that config files of earlier versions lack; the defaults are right for their models."""

METADATA_KEYS = frozenset(
    "_name_or_path transformers_version model_type architectures torch_dtype step wandb_run tnlm_version".split()
)
"""Keys of a ``config.json`` that do not change what a model computes; ignored with one warning."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a :class:`tnlm.Transformer`: a flat frozen dataclass, checked when made, saved as a JSON object.

    ``ModelConfig.released`` is the published architecture, ``ModelConfig.pure`` one that is a polynomial as a whole.

    Raises:
        ValueError: A value is of the wrong type, out of range, or contradicts another.
    """

    d_vocab: int
    """Rows of the embedding and of the unembedding."""
    n_layer: int
    """Number of blocks."""
    n_head: int
    """Attention heads per block; divides d_model."""
    d_model: int
    """Width of the residual stream."""
    d_hidden: int = 0
    """Hidden units of the MLP; 0 with ``mlp="none"``."""
    n_ctx: int
    """Longest sequence, in tokens, that forward accepts."""
    mlp: MLPKind = "bilinear"
    """Kind of MLP: ``bilinear`` and ``squared`` are polynomials of their input."""
    attention: AttentionKind = "bilinear"
    """Kind of attention: ``bilinear`` and ``squared`` are polynomials of their input."""
    d_qk: Derived = None  # type: ignore[assignment]
    """Width of queries and keys per head, even; ``None`` means ``d_model // n_head``."""
    d_vocab_used: Derived = None  # type: ignore[assignment]
    """Ids from here on are padding (50257 in the released models); ``None`` means ``d_vocab``."""
    norm: NormKind = "rms"
    """Norm before attention, MLP and unembedding: ``rms``, without gain, or ``none``."""
    norm_eps: float = FP32_EPS
    """Added to the mean square of every RMS norm."""
    embedding_norm: bool = True
    """RMS norm after the embedding; acts only with ``norm="rms"``."""
    final_norm: bool = True
    """RMS norm before the unembedding; acts only with ``norm="rms"``."""
    qk_norm: bool = True
    """RMS norm of each head's queries and keys, before the rotation."""
    qk_bias: bool = False
    """A bias on queries and keys."""
    rotary_base: float = 10000.0
    """Base of the wavelengths of the rotary embedding."""
    rotary_table_dtype: TableDtype = "bfloat16"
    """Cosines and sines are made in float32, then rounded to this."""
    logit_softcap: float | None = 30.0
    """``c tanh(z / c)`` on the logits; ``None`` is off."""
    x0_mixing: bool = True
    """Each block first mixes the residual with the embedding, by its two ``lambdas``."""
    value_residual: bool = True
    """Each block mixes its values with block 0's, by its ``lamb``."""
    mlp_bias: bool = True
    """A bias on the MLP's output."""
    mlp_hidden_bias: bool = False
    """A bias on each encoder of the MLP, inside the product: ``(L x + b_l) * (R x + b_r)``."""

    def __post_init__(self) -> None:
        for field in ("d_vocab", "n_layer", "n_head", "d_model", "d_hidden", "n_ctx"):
            _check_int(field, getattr(self, field), low=0 if field in ("n_layer", "d_hidden") else 1)
        for field in (f.name for f in dataclasses.fields(self) if f.type is bool):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} must be true or false, got {getattr(self, field)!r}")
        kinds = {
            "mlp": MLPKind,
            "attention": AttentionKind,
            "norm": NormKind,
            "rotary_table_dtype": TableDtype,
        }
        for field, kind in kinds.items():
            if getattr(self, field) not in get_args(kind):
                raise ValueError(f"{field} must be one of {', '.join(get_args(kind))}; got {getattr(self, field)!r}")
        for field in ("norm_eps", "rotary_base", "logit_softcap"):
            value = getattr(self, field)
            if value is None and field == "logit_softcap":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{field} must be a finite number >= 0, got {value!r}")
            if value == 0 and field != "norm_eps":
                raise ValueError(f"{field} must be above 0, got {value!r}; leave it out or use null for off")
            if value > FP32_MAX or 0 < value < FP32_TINY:
                raise ValueError(
                    f"{field} must be in float32's range, {FP32_TINY:.3g} to {FP32_MAX:.3g}, got {value!r}"
                )
            object.__setattr__(self, field, float(value))
        if self.d_model % self.n_head:
            raise ValueError(
                "d_model must be a multiple of n_head, "
                f"got d_model={self.d_model}, n_head={self.n_head} (remainder {self.d_model % self.n_head})"
            )
        if self.d_qk is None:
            object.__setattr__(self, "d_qk", self.d_model // self.n_head)
        _check_int("d_qk", self.d_qk, low=1)
        if self.attention != "none" and self.d_qk % 2:
            raise ValueError(
                f"d_qk must be even (rotary turns pairs), got d_qk={self.d_qk}; pass d_qk= or change n_head"
            )
        if self.d_vocab_used is None:
            object.__setattr__(self, "d_vocab_used", self.d_vocab)
        _check_int("d_vocab_used", self.d_vocab_used, low=1)
        if self.d_vocab_used > self.d_vocab:
            raise ValueError(f"d_vocab_used must be at most d_vocab={self.d_vocab}, got {self.d_vocab_used}")
        if (self.mlp == "none") != (self.d_hidden == 0):
            raise ValueError(
                f'd_hidden must be 0 exactly when mlp="none", got mlp={self.mlp!r}, d_hidden={self.d_hidden}'
            )

    # Derived sizes

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_head

    @property
    def n_qk(self) -> int:
        """Query-key pairs per head: 2 for bilinear and differential attention."""
        if self.attention == "none":
            return 0
        return 2 if self.attention in TWO_PAIR_ATTENTIONS else 1

    @property
    def mlp_gated(self) -> bool:
        """Whether the MLP has two encoders."""
        return self.mlp in GATED_MLPS

    @property
    def mlp_is_form(self) -> bool:
        """Whether the MLP is a quadratic form of its (normed) input plus a constant, as the analyses of a layer need.

        With biases on the hidden units a polynomial MLP is a form of ``(1, x)`` instead.
        """
        return self.mlp in POLYNOMIAL_MLPS and self.mlp != "none" and not self.mlp_hidden_bias

    @property
    def has_final_norm(self) -> bool:
        """Whether the unembedding reads a normed residual."""
        return self.norm == "rms" and self.final_norm

    def why_not_polynomial(self, part: Literal["model", "layers", "mlp", "attention"] = "model") -> tuple[str, ...]:
        """Reasons why a part of the model is not a polynomial of its input, one clause each; empty when it is.

        Args:
            part: The whole ``model``, as a function of its token embeddings; its ``layers``, ``mlp`` or ``attention``,
                each as a function of its (normed) input.
        """
        mlp, attention = (
            () if kind in polynomial else (f"the {kind} {name} is not polynomial: {NOT_POLYNOMIAL[kind]}",)
            for name, kind, polynomial in (
                ("MLP", self.mlp, POLYNOMIAL_MLPS),
                ("attention", self.attention, POLYNOMIAL_ATTENTIONS),
            )
        )
        rest = []
        if self.norm == "rms":
            rest.append('RMS norms divide by a root (norm="rms")')
        if self.qk_norm and self.attention != "none":
            rest.append("QK-norm divides by a root (qk_norm=True)")
        if self.logit_softcap is not None:
            rest.append(f"the softcap of the logits is a tanh (logit_softcap={self.logit_softcap:g})")
        parts = {"mlp": mlp, "attention": attention, "layers": mlp + attention, "model": (*mlp, *attention, *rest)}
        if part not in parts:
            raise ValueError(f"part must be one of {', '.join(parts)}, got {part!r}")
        return parts[part]

    @property
    def layers_polynomial(self) -> bool:
        """Whether MLP and attention are polynomials of their (normed) inputs."""
        return not self.why_not_polynomial("layers")

    @property
    def polynomial(self) -> bool:
        """Whether the whole model is one polynomial: no norm, QK-norm or softcap either."""
        return not self.why_not_polynomial()

    @property
    def n_params(self) -> int:
        """Number of parameters, computed from the sizes."""
        return 2 * self.d_vocab * self.d_model + self.n_block_params

    @property
    def n_block_params(self) -> int:
        """Number of parameters of all blocks: all but embedding and unembedding."""
        return self.n_layer * (self._attention_params + self._mlp_params + 2 * self.x0_mixing)

    @property
    def polynomial_share(self) -> float:
        """Share of the blocks' parameters in layers that are polynomials of their (normed) inputs, mixing included."""
        outside = (self._attention_params if self.attention not in POLYNOMIAL_ATTENTIONS else 0) + (
            self._mlp_params if self.mlp not in POLYNOMIAL_MLPS else 0
        )
        return 1 - self.n_layer * outside / self.n_block_params if self.n_block_params else 1.0

    @property
    def _attention_params(self) -> int:
        if self.attention == "none":
            return 0
        assert self.d_qk is not None
        qk = 2 * self.n_qk * self.n_head * self.d_qk * (self.d_model + self.qk_bias)
        return 2 * self.d_model**2 + qk + self.value_residual + (self.attention == "differential")

    @property
    def _mlp_params(self) -> int:
        if self.mlp == "none":
            return 0
        encoders = 2 if self.mlp_gated else 1
        biases = self.d_model * self.mlp_bias + encoders * self.d_hidden * self.mlp_hidden_bias
        return (encoders + 1) * self.d_model * self.d_hidden + biases

    @property
    def n_matmul_params(self) -> int:
        """Number of weights that each token is multiplied with: those of every matrix but the embedding."""
        qk = 2 * self.n_qk * self.n_head * self.d_qk * self.d_model
        attention = 0 if self.attention == "none" else 2 * self.d_model**2 + qk
        mlp = (3 if self.mlp_gated else 2) * self.d_model * self.d_hidden
        return self.d_vocab * self.d_model + self.n_layer * (attention + mlp)

    def flops_per_token(self, seq: int | None = None) -> int:
        """Training FLOPs per token, ``6 M + 6 T L H (n_qk d_qk + d_head)``; the causal half is not discounted.

        ``M`` is :attr:`n_matmul_params`, ``T`` the sequence length (default ``n_ctx``).
        """
        seq = self.n_ctx if seq is None else seq
        scores = 0 if self.attention == "none" else self.n_head * (self.n_qk * self.d_qk + self.d_head)
        return 6 * self.n_matmul_params + 6 * seq * self.n_layer * scores

    # Constructors

    @classmethod
    def released(
        cls,
        *,
        n_layer: int = 18,
        n_head: int = 9,
        d_model: int = 1152,
        mlp: MLPKind = "bilinear",
        attention: AttentionKind = "bilinear",
        **changes: Any,
    ) -> "ModelConfig":
        """Config of the published architecture; the default sizes are those of the 18-layer models.

        RMS norms without gain, QK-norm, rotary tables rounded to bf16, x0 mixing, value residual, an MLP bias and a
        softcap of 30. Source: ``train_gpt2.py`` of loganriggs/modded-nanogpt at d5ce2de.
        """
        defaults: dict[str, Any] = {
            "d_vocab": 50304,
            "d_vocab_used": 50257 if changes.get("d_vocab", 50304) == 50304 else None,
            "d_hidden": 0 if mlp == "none" else 4 * d_model,
            "n_ctx": 1024,
        }
        sizes = {"n_layer": n_layer, "n_head": n_head, "d_model": d_model, "mlp": mlp, "attention": attention}
        return cls(**{**defaults, **sizes, **changes})

    @classmethod
    def pure(
        cls,
        *,
        d_vocab: int,
        n_layer: int,
        n_head: int,
        d_model: int,
        d_hidden: int,
        n_ctx: int,
        mlp: MLPKind = "bilinear",
        attention: AttentionKind = "bilinear",
        **changes: Any,
    ) -> "ModelConfig":
        """Config of a model that is one polynomial of its embeddings: no norms, QK-norm or softcap, float32 tables.

        x0 mixing, value residual and bias are affine and stay unless turned off.

        Raises:
            ValueError: ``mlp`` or ``attention`` is not polynomial, or one of ``changes`` makes the model no polynomial.
        """
        defaults: dict[str, Any] = {
            "norm": "none",
            "qk_norm": False,
            "embedding_norm": False,
            "logit_softcap": None,
            "rotary_table_dtype": "float32",
        }
        sizes = {
            "d_vocab": d_vocab,
            "n_layer": n_layer,
            "n_head": n_head,
            "d_model": d_model,
            "d_hidden": d_hidden,
            "n_ctx": n_ctx,
            "mlp": mlp,
            "attention": attention,
        }
        config = cls(**{**defaults, **sizes, **changes})
        if not config.polynomial:
            raise ValueError(
                f"a pure model must be polynomial: mlp in {POLYNOMIAL_MLPS}, attention in {POLYNOMIAL_ATTENTIONS}, "
                f'norm="none", qk_norm=False, logit_softcap=None; here {"; ".join(config.why_not_polynomial())}. '
                "Use ModelConfig(...) for the baselines"
            )
        return config

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed; ``d_qk`` stays ``d_model // n_head`` if it was that."""
        if {"d_model", "n_head"} & changes.keys() and self.d_qk == self.d_head:
            changes = {"d_qk": None, **changes}
        if "d_vocab" in changes and self.d_vocab_used == self.d_vocab:
            changes = {"d_vocab_used": None, **changes}
        return dataclasses.replace(self, **changes)

    # Disk

    def to_dict(self) -> dict[str, Any]:
        """A flat dict of plain JSON values."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps({"model_type": "tnlm", **self.to_dict()}, indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "config") -> "ModelConfig":
        """Config from the dict of :meth:`to_dict`; ``source`` names the file in errors.

        The keys of :data:`METADATA_KEYS` are ignored with one warning (``model_type="tnlm"`` silently).

        Raises:
            ValueError: A key is unknown or missing, or a value is invalid.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"{source} must hold a JSON object, got {type(values).__name__}")
        known = {f.name: f for f in dataclasses.fields(cls)}
        dropped = sorted(k for k in values if k in METADATA_KEYS and (k, values[k]) != ("model_type", "tnlm"))
        warn_dropped(dropped, source)
        unknown = sorted((k for k in values if k not in known and k not in METADATA_KEYS), key=str)
        required = (n for n, f in known.items() if f.default is dataclasses.MISSING)
        missing = sorted(n for n in required if n not in values)
        if unknown or missing:
            raise ValueError(
                f"{source} does not fit ModelConfig: missing {', '.join(missing) or 'none'}; "
                f"unexpected {', '.join(f'{k}={values[k]!r}' for k in unknown) or 'none'}. "
                f"Known keys: {', '.join(known)}"
            )
        try:
            return cls(**{k: v for k, v in values.items() if k in known})
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None


def warn_dropped(keys: list[str], source: str) -> None:
    """Warn once with the names of the metadata keys of ``source`` that were ignored."""
    if keys:
        warnings.warn(f"{source}: ignored metadata {', '.join(keys)}", UserWarning, stacklevel=3)


def _check_int(field: str, value: object, *, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{field} must be an integer >= {low}, got {value!r}")
    if value > MAX_SIZE:
        raise ValueError(f"{field} must be at most 2**63 - 1, got a number of {value.bit_length()} bits")


_SIZES: dict[str, tuple[int, int, int]] = {
    "debug": (6, 4, 256),
    "small": (12, 6, 768),
    "medium": (18, 9, 1152),
    "large": (24, 12, 1536),
    "medium-relu2": (20, 10, 1280),
    "large-relu2": (26, 13, 1664),
}


def published_size(name: str, **changes: Any) -> ModelConfig:
    """Config of the published architecture at a named size: debug, small, medium, large; medium-relu2, large-relu2.

    The ReLU^2 family of the published code has sizes of its own (and uses ``mlp="relu2"`` here unless told otherwise);
    ``debug`` and ``small`` serve both.

    Raises:
        ValueError: The name is not one of these.
    """
    if name not in _SIZES:
        raise ValueError(f"unknown size {name!r}; known: {', '.join(_SIZES)}")
    n_layer, n_head, d_model = _SIZES[name]
    if name.endswith("-relu2"):
        changes = {"mlp": "relu2", "attention": "softmax", **changes}
    return ModelConfig.released(n_layer=n_layer, n_head=n_head, d_model=d_model, **changes)
