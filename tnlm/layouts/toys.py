"""Three layouts of small models, most of them polynomials outright: two-layer, toy transformers, cycle toys."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tnlm.config import ModelConfig
from tnlm.layouts.published import check_asked
from tnlm.layouts.table import Fields, Layout, Shapes, Table, chain, flip_rotation, scale

PURE = {
    "norm": "none",
    "embedding_norm": False,
    "qk_norm": False,
    "rotary_table_dtype": "float32",
    "logit_softcap": None,
    "x0_mixing": False,
    "value_residual": False,
    "mlp_bias": False,
}
"""No norm, softcap, mixing or bias: what these layouts share unless they say otherwise."""

ENERGY_EPS = 1e-6
"""Added to ``final_norm.running_mean_energy`` (tdooms/tensor-similarity at bc914a4)."""


def read_two_layer(raw: Mapping[str, Any], shapes: Shapes, source: str, attention: str | None) -> ModelConfig:
    """``config.json`` has a block ``model``; other blocks describe the training."""
    if not isinstance(raw.get("model"), dict):
        raise ValueError(f"{source} must hold a block 'model', got the keys {', '.join(raw) or 'none'}")
    fields = Fields(
        raw["model"],
        f"{source}, block model",
        required="vocab_size d_model n_head n_layers attn_scale use_bias_qk attn_type",
        optional="n_ctx residual",
    )
    decided = fields.choice("attn_type", {"bilinear": "bilinear"})
    check_asked(decided, attention, source)
    _check_residual(fields, fields.choice("residual", {"add": "add", "lerp": "lerp"}, "add"), key="attn_scale")
    sizes = {name: fields.integer(name) for name in ("d_model", "n_head")}
    return fields.build(
        ModelConfig,
        d_vocab=fields.integer("vocab_size"),
        n_layer=fields.integer("n_layers"),
        n_ctx=fields.integer("n_ctx", 512),
        mlp="none",
        attention=decided,
        qk_bias=fields.flag("use_bias_qk"),
        **sizes,
        **PURE,
    )


def two_layer_table(config: ModelConfig, raw: Mapping[str, Any], shapes: Shapes) -> Table:
    """The final norm divides by one constant, which folds into the unembedding."""
    block = raw["model"]
    lerp = block.get("residual", "add") == "lerp"
    table = _attention_only(config, lerp=lerp, s=block["attn_scale"])
    keep = (1 - block["attn_scale"]) ** config.n_layer if lerp else 1.0
    head = {"unembed.weight": (config.d_vocab, config.d_model), "final_norm.running_mean_energy": ()}

    def fold(w: Tensor, energy: Tensor) -> Tensor:
        return w * keep / (energy + ENERGY_EPS).sqrt()

    table.add("unembed.w_u", head, fold=fold)
    return table


def read_cycle(raw: Mapping[str, Any], shapes: Shapes, source: str, attention: str | None) -> ModelConfig:
    fields = Fields(
        raw,
        source,
        required="n_layer d_model n_head",
        optional="n_vocab n_ctx scale norm residual attention",
        ignored="n_params",
    )
    norm = fields.flag("norm", False)
    residual = fields.choice("residual", {"add": "add", "lerp": "lerp"}, "lerp")
    _check_residual(fields, residual, key="scale")
    if norm:
        fields.refuse("residual", "add", "lerp does not fold through a norm", default="lerp")
    decided = fields.choice("attention", {"bilinear": "bilinear", "softmax": "softmax"}, "bilinear")
    check_asked(decided, attention, source)
    return fields.build(
        ModelConfig,
        d_vocab=fields.integer("n_vocab", shapes["embed.weight"][0]),
        n_layer=fields.integer("n_layer"),
        n_head=fields.integer("n_head"),
        d_model=fields.integer("d_model"),
        n_ctx=fields.integer("n_ctx", 1024),
        mlp="none",
        attention=decided,
        **{**PURE, "norm": "rms" if norm else "none"},
    )


def cycle_table(config: ModelConfig, raw: Mapping[str, Any], shapes: Shapes) -> Table:
    lerp, s = raw.get("residual", "lerp") == "lerp", raw.get("scale", 0.5)
    table = _attention_only(config, lerp=lerp, s=s if lerp else 1.0)
    keep = (1 - s) ** config.n_layer if lerp else 1.0
    table.add("unembed.w_u", "head.weight", (config.d_vocab, config.d_model), scale(keep))
    return table


def _check_residual(fields: Fields, residual: str, *, key: str) -> None:
    s = fields.number(key, 0.5)
    if residual == "lerp" and not 0 < s < 1:
        raise ValueError(f"{fields.source}: {key} must be between 0 and 1 for residual='lerp', got {s!r}")


def _attention_only(config: ModelConfig, *, lerp: bool, s: float) -> Table:
    """Embedding and layers of the two attention-only layouts: ``x <- x + s O z`` or, lerp, ``(1 - s) x + s O z``.

    With ``x_l = (1 - s)**l y_l`` the interpolation is plain addition in ``y``: layer ``l`` reads ``(1 - s)**l y``, so
    its weights take that factor, its output ``s / (1 - s)**(l + 1)``, and the head, by the caller,
    ``(1 - s)**n_layer``. Exact; the QK biases are not scaled.
    """
    d = config.d_model
    flip = flip_rotation(config)
    table = Table()
    table.add("embed.w_e", "embed.weight", (config.d_vocab, d))
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}.attn", f"layers.{i}"
        read = scale((1 - s) ** i if lerp else 1.0)
        for branch in ("1", "2")[: config.n_qk]:
            for name in ("q", "k"):
                key = f"{theirs}.{name}{branch}"
                table.add(f"{ours}.w_{name}{branch}", f"{key}.weight", (d, d), chain(flip, read))
                if config.qk_bias:
                    table.add(f"{ours}.b_{name}{branch}", f"{key}.bias", (d,), flip)
        table.add(f"{ours}.w_v", f"{theirs}.v.weight", (d, d), read)
        write = scale(s / (1 - s) ** (i + 1) if lerp else s)
        table.add(f"{ours}.w_o", f"{theirs}.o.weight", (d, d), write)
    return table


def read_toy(raw: Mapping[str, Any], shapes: Shapes, source: str, attention: str | None) -> ModelConfig:
    fields = Fields(
        raw,
        source,
        required="vocab_size d_model n_ctx n_head n_layer model_type use_mixer use_softmax use_bilinear_attn "
        "bilinear_attn_qk_norm",
        ignored="dropout mixer_r num_batches final_train_loss final_val_loss learning_rate batch_size",
    )
    fields.refuse("use_mixer", False, "the mixer is not supported")
    fields.refuse("use_softmax", False, "the softmax variant of this layout is not supported")
    fields.refuse("use_bilinear_attn", True, "the variant with one query-key pair is not supported")
    check_asked("bilinear", attention, source)
    mlp = fields.choice("model_type", {"attention_only": "none", "transformer": "bilinear"})
    projection = shapes.get("layers.0.bilinear.proj1.weight")
    if mlp == "bilinear" and projection is None:
        raise ValueError(
            f"{source} says model_type='transformer', but the file holds no layers.0.bilinear.proj1.weight"
        )
    return fields.build(
        ModelConfig,
        d_vocab=fields.integer("vocab_size"),
        n_layer=fields.integer("n_layer"),
        n_head=fields.integer("n_head"),
        n_ctx=fields.integer("n_ctx"),
        d_model=fields.integer("d_model"),
        d_hidden=projection[0] if mlp == "bilinear" and projection else 0,
        mlp=mlp,
        attention="bilinear",
        **{
            **PURE,
            "qk_norm": fields.flag("bilinear_attn_qk_norm"),
            "rotary_table_dtype": "bfloat16",
            "mlp_bias": mlp == "bilinear",
        },
    )


def toy_table(config: ModelConfig, raw: Mapping[str, Any], shapes: Shapes) -> Table:
    """Same numbers throughout: this code turns as the released models do."""
    d, v, h = config.d_model, config.d_vocab, config.d_hidden
    table = Table()
    table.add("embed.w_e", "embed.weight", (v, d))
    names = {"w_q1": "c_q", "w_k1": "c_k", "w_q2": "c_q2", "w_k2": "c_k2", "w_v": "c_v", "w_o": "c_proj"}
    for i in range(config.n_layer):
        attn = f"layers.{i}" if config.mlp == "none" else f"layers.{i}.attn"
        for ours, theirs in names.items():
            table.add(f"blocks.{i}.attn.{ours}", f"{attn}.{theirs}.weight", (d, d))
        if config.mlp != "none":
            theirs = f"layers.{i}.bilinear"
            table.add(f"blocks.{i}.mlp.w_l", f"{theirs}.proj1.weight", (h, d))
            table.add(f"blocks.{i}.mlp.w_r", f"{theirs}.proj2.weight", (h, d))
            table.add(f"blocks.{i}.mlp.w_d", f"{theirs}.down.weight", (d, h))
            table.add(f"blocks.{i}.mlp.bias", f"{theirs}.down.bias", (d,))
    table.add("unembed.w_u", "head.weight", (v, d))
    return table


TWO_LAYER = Layout(
    "two-layer", (r"embed\.weight", r"layers\.0\.q1\.weight", r"unembed\.weight"), read_two_layer, two_layer_table
)
CYCLE = Layout("cycle", (r"embed\.weight", r"layers\.0\.q1\.weight", r"head\.weight"), read_cycle, cycle_table)
TOY = Layout("toy", (r"embed\.weight", r"layers\.0\.(attn\.)?c_q\.weight", r"head\.weight"), read_toy, toy_table)
