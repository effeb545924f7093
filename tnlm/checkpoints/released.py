"""Registry of the released models: repository, commit, hashes, architecture, cross-entropies. Imports no torch.

Hashes, sizes and cross-entropies are those that public users of the files recorded (loganriggs/tensor_language,
ajskateboarder/redesigned-octo-couscous, tdooms/tensor-similarity); a value that nobody recorded is None.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tnlm.config import AttentionKind, MLPKind, ModelConfig

TOLERANCE = 2e-3
"""Largest difference in nats per token allowed between two cross-entropies of the same rows, in float32."""


@dataclass(frozen=True, kw_only=True)
class File:
    """Size in bytes and sha256 of a file at the recorded commit; None where not recorded."""

    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """A recorded cross-entropy and the protocol that reproduces it."""

    value: float
    """Nats per token, float32 weights, rotary tables rounded to bf16."""
    rows: int
    seq: int
    """Tokens per row."""
    text: str
    """The text that was measured; slices of a data set differ by up to 0.4 nats."""


@dataclass(frozen=True, kw_only=True)
class Released:
    """One released checkpoint."""

    name: str
    """Short name for :func:`tnlm.load`; the last part of ``repo`` works as well."""
    repo: str
    revision: str | None
    """Full commit; None if none was recorded: loading then warns, naming the commit it took."""
    config: ModelConfig
    confirmed: bool = True
    """Whether ``config`` was read from the files; if not, :meth:`check` accepts another architecture."""
    files: Mapping[str, File] = field(default_factory=lambda: {"config.json": File(), "pytorch_model.bin": File()})
    cross_entropy: tuple[CrossEntropy, ...] = ()

    @property
    def n_params(self) -> int:
        """Number of parameters of the recorded architecture."""
        return self.config.n_params

    def check(self, config: ModelConfig, *, label: str) -> None:
        """Check that files have the recorded architecture.

        Raises:
            ValueError: They have another one; names each field that differs.
        """
        found, recorded = config.to_dict(), self.config.to_dict()
        differs = [f"{k}={found[k]!r} instead of {recorded[k]!r}" for k in recorded if found[k] != recorded[k]]
        if self.confirmed and differs:
            raise ValueError(
                f"{label} is not the model recorded as {self.name}: {', '.join(differs)}; "
                "load another revision by its Hub id and revision="
            )


def find_released(name: str) -> Released | None:
    """The released model with this short name, repository, or last part of the repository; None if there is none."""
    for entry in RELEASED.values():
        if name in (entry.name, entry.repo, entry.repo.rpartition("/")[2]):
            return entry
    return None


def find_released_by_sha256(sha256: str) -> Released | None:
    """The released model that has a file with this sha256; None if there is none."""
    return next((e for e in RELEASED.values() if sha256 in {file.sha256 for file in e.files.values()}), None)


def _18l(mlp: MLPKind, attention: AttentionKind) -> ModelConfig:
    return ModelConfig.released(mlp=mlp, attention=attention)


def _12l(mlp: MLPKind, attention: AttentionKind) -> ModelConfig:
    return ModelConfig.released(n_layer=12, n_head=6, d_model=768, mlp=mlp, attention=attention)


_FINEWEB = "FineWeb sample-10BT as streamed, documents joined with end-of-text appended, first rows"
_PILE = "Pile-10k (NeelNanda/pile-10k), documents joined, first rows"

_ENTRIES = (
    Released(
        name="bilinear-bilinear-18l",
        repo="Elriggs/gpt2-bilinear-sqrd-attn-18l-9h-1152embd",
        revision="ed9146549ee6dc8ed8cd75e9d48fcfe4278f4240",
        config=_18l("bilinear", "bilinear"),
        files={
            "config.json": File(sha256="428042bfd807ba36f8b4326395440fbbebe52cd3d040212e6fef14a4fdf2d83c"),
            "pytorch_model.bin": File(
                size=2_067_738_635, sha256="680d6c26cf05af2e9b5eaac1d52fa1c9e4ea443f60a7c74ad211740e317d6de3"
            ),
        },
        cross_entropy=(
            CrossEntropy(value=3.0763, rows=600, seq=512, text=_FINEWEB),
            CrossEntropy(value=5.4967, rows=32, seq=1024, text=_PILE),
            CrossEntropy(value=3.234, rows=16, seq=512, text=_PILE),
            CrossEntropy(value=3.6309, rows=512, seq=512, text=_PILE),
        ),
    ),
    Released(
        name="bilinear-softmax-18l",
        repo="Elriggs/gpt2-bilinear-18l-9h-1152embd",
        revision="84c0a0e23cadfc4e0b5b62f006d08768e135de9e",
        config=_18l("bilinear", "softmax"),
    ),
    Released(
        name="swiglu-softmax-18l",
        repo="Elriggs/gpt2-swiglu-18l-9h-1152embd-v2",
        revision="83ec8f7ff178dd1af90c090fc8531910d4017cdc",
        config=_18l("swiglu", "softmax"),
        confirmed=False,
    ),
    Released(
        name="swiglu-bilinear-18l",
        repo="Elriggs/gpt2-swiglu-sqrd-attn-18l-9h-1152embd",
        revision="9e53b1ec447313086e7edd2ee72b259f83e8b2fe",
        config=_18l("swiglu", "bilinear"),
        confirmed=False,
    ),
    Released(
        name="relu2-squared-12l",
        repo="Elriggs/gpt2-sqrd-attn-12l-6h-768embd",
        revision=None,
        config=_12l("relu2", "squared_normalized"),
        cross_entropy=(CrossEntropy(value=3.4967, rows=32, seq=1024, text=_PILE),),
    ),
    Released(
        name="bilinear-squared-12l",
        repo="Elriggs/gpt2-bilinear-sqrd-attn-12l-6h-768embd",
        revision=None,
        config=_12l("bilinear", "squared_normalized"),
    ),
    Released(
        name="bilinear-softmax-12l",
        repo="Elriggs/gpt2-bilinear-12l-6h-768embd",
        revision=None,
        config=_12l("bilinear", "softmax"),
    ),
)

RELEASED: dict[str, Released] = {entry.name: entry for entry in _ENTRIES}
"""All released models, by short name."""
