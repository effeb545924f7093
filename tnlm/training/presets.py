"""Presets: functions that return a whole training configuration, and their list by name. Imports no torch.

What a preset does not set, as the learning rates of ``tiny``, has the default of its field in ``TrainConfig``
(``tnlm/training/config.py``). A new preset is a function here and an entry of ``PRESETS``.
"""

from collections.abc import Callable

from tnlm.checks import check_kind
from tnlm.config import AttentionKind, MLPKind, ModelConfig, published_size
from tnlm.training.config import TrainConfig


def nano() -> TrainConfig:
    """The CPU default: 1.4M parameters, 256k tokens of the embedded corpus, about two minutes on one core."""
    return TrainConfig(
        model=ModelConfig.released(n_layer=4, n_head=4, d_model=128, d_vocab=1024, n_ctx=128),
        preset="nano",
        steps=250,
        batch=8,
        micro_batch=8,
        val_every=50,
        val_tokens=16_384,
        save_every=100,
        keep_every=100,  # 15 MB each; a branch of any horizon finds its checkpoint
        shuffle=True,
    )


def nano_pure() -> TrainConfig:
    """nano without norm, QK-norm and softcap: the whole model is one polynomial."""
    return nano().replace(
        preset="nano-pure",
        model=ModelConfig.pure(d_vocab=1024, n_layer=4, n_head=4, d_model=128, d_hidden=512, n_ctx=128),
        # without norms the logits are polynomials of high degree in the weights: smaller steps keep them bounded
        lr_embed=0.03,
        lr_matrix=0.005,
        lr_scalar=0.005,
        clip=1.0,
    )


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
    return nano_pure().replace(preset="nano-attention-only", model=model)


def tiny() -> TrainConfig:
    """6.4M to 7.2M parameters on the bytes of the embedded corpus: hours on a CPU, minutes on a GPU."""
    return TrainConfig(
        model=ModelConfig.released(n_layer=6, n_head=4, d_model=256, d_vocab=256, n_ctx=256),
        preset="tiny",
        tokenizer="bytes",
        steps=1000,
        batch=16,
        micro_batch=16,
        val_every=125,
        val_tokens=65_536,
        save_every=250,
    )


def _fineweb(model: ModelConfig, *, preset: str, steps: int, micro_batch: int) -> TrainConfig:
    """A published size on the published data, batch and schedule."""
    return TrainConfig(
        model=model,
        preset=preset,
        data="fineweb10B",
        tokenizer="gpt2",
        steps=steps,
        batch=512,
        micro_batch=micro_batch,
        save_every=1000,
    )


def debug() -> TrainConfig:
    """The published smallest setting, 32M parameters: a check on one GPU."""
    return _fineweb(published_size("debug"), preset="debug", steps=500, micro_batch=64)


def small() -> TrainConfig:
    """190M to 205M parameters, 1.7e9 tokens."""
    return _fineweb(published_size("small"), preset="small", steps=3242, micro_batch=32)


def medium() -> TrainConfig:
    """The comparison: 498M to 546M parameters, 5.1e9 tokens; eight GPUs."""
    return _fineweb(published_size("medium"), preset="medium", steps=9726, micro_batch=16)


def large() -> TrainConfig:
    """1.06e9 to 1.17e9 parameters, 5.1e9 tokens."""
    return _fineweb(published_size("large"), preset="large", steps=9726, micro_batch=8)


def debug_relu2() -> TrainConfig:
    """The published debug size with the ReLU^2 MLP and softmax attention."""
    return debug().replace(preset="debug-relu2", model=published_size("debug", mlp="relu2", attention="softmax"))


def small_relu2() -> TrainConfig:
    """The published small size with the ReLU^2 MLP and softmax attention, 162M parameters."""
    return small().replace(preset="small-relu2", model=published_size("small", mlp="relu2", attention="softmax"))


def medium_relu2() -> TrainConfig:
    """The published ReLU^2 medium, 20 layers of width 1280, 522M parameters."""
    return medium().replace(preset="medium-relu2", model=published_size("medium-relu2"))


def large_relu2() -> TrainConfig:
    """The published ReLU^2 large, 26 layers of width 1664, 1.03e9 parameters."""
    return large().replace(preset="large-relu2", model=published_size("large-relu2"))


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
    check_kind("name", name, str, f"one of {', '.join(PRESETS)}")
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    config = PRESETS[name]()
    kinds = {k: v for k, v in {"mlp": mlp, "attention": attention}.items() if v is not None}
    config = config.with_model(**kinds) if kinds else config
    return config.matched() if matched else config
