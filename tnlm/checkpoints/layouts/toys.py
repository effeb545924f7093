"""Three layouts of small public models, most of them polynomials: two-layer models, toy transformers, cycle toys."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tnlm.checkpoints.layouts.published import check_asked
from tnlm.checkpoints.layouts.table import (
    BOOKKEEPING,
    Fields,
    Layout,
    Shapes,
    Table,
    chain,
    flip_rotation,
    rows_of,
    scale,
)
from tnlm.config import METADATA_KEYS, ModelConfig

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
"""Fields of ModelConfig that these layouts share unless they set them: no norm, softcap, mixing or bias."""

_CYCLE_BOOKKEEPING = "topology variant qdist localmix stutter_p"

ENERGY_EPS = 1e-6
"""Added to ``final_norm.running_mean_energy`` (tdooms/tensor-similarity at bc914a4)."""


def read_two_layer(raw: Mapping[str, Any], shapes: Shapes, source: str, attention: str | None) -> ModelConfig:
    """The architecture of a two-layer model, from its config."""
    fields = Fields(
        raw,
        source,
        required="vocab_size d_model n_head n_layers attn_scale use_bias_qk attn_type",
        optional="n_ctx residual",
    )
    decided = fields.choice("attn_type", {"bilinear": "bilinear"})
    check_asked(decided, attention, source)
    _check_residual(fields, "residual", default="add", scale="attn_scale")
    sizes = {name: fields.integer(name) for name in ("d_model", "n_head")}
    return fields.build(
        ModelConfig,
        d_vocab=fields.integer("vocab_size"),
        n_layer=fields.depth("n_layers", shapes),
        n_ctx=fields.integer("n_ctx", 512),
        mlp="none",
        attention=decided,
        qk_bias=fields.flag("use_bias_qk"),
        **sizes,
        **PURE,
    )


def two_layer_table(config: ModelConfig, raw: Mapping[str, Any], shapes: Shapes) -> Table:
    """Conversion table. The final norm divides by a stored constant, which is folded into the unembedding."""
    s = raw["attn_scale"]
    layer = _Layer("attn", keep=1 - s if raw.get("residual", "add") == "lerp" else 1.0, write=s)
    table, left = _fold([layer] * config.n_layer, config)
    head = {"unembed.weight": (config.d_vocab, config.d_model), "final_norm.running_mean_energy": ()}

    def fold(w: Tensor, energy: Tensor) -> Tensor:
        return w * left / (energy + ENERGY_EPS).sqrt()

    table.add("unembed.w_u", head, fold=fold)
    return table


def read_cycle(raw: Mapping[str, Any], shapes: Shapes, source: str, attention: str | None) -> ModelConfig:
    """The architecture, from a number of attention layers (``n_layer``) or a list (``spec``) of "attn" and "mlp"."""
    raw, listed = _as_read(raw), "spec" in raw
    own = "vocab d_hidden mlp_residual" if listed else "n_head n_vocab"
    fields = Fields(
        raw,
        source,
        required="spec d_model n_head" if listed else "n_layer d_model",
        optional=f"n_ctx scale norm residual attention {own}",
        ignored="n_params",
        bookkeeping=_CYCLE_BOOKKEEPING,
    )
    if listed:
        _check_spec(fields, shapes)
    else:
        fields.depth("n_layer", shapes)
    _check_residual(fields, "residual", default="lerp")
    _check_residual(fields, "mlp_residual", default="add")
    # The text "none" is refused: the code that wrote lists read it as a norm of attention and as none of MLPs
    norms: dict[Any, str] = {None: "none", False: "none", True: "rms", **({"rms": "rms"} if listed else {})}
    norm = fields.choice("norm", norms)
    decided = fields.choice("attention", {"bilinear": "bilinear", "softmax": "softmax"}, "bilinear")
    layers, d_model = _layers(raw), fields.integer("d_model")
    kinds = [layer.kind for layer in layers]
    if "attn" not in kinds:
        decided = "none"
    check_asked(decided, attention, source)
    hidden = 0
    if "mlp" in kinds:
        encoder = f"layers.{kinds.index('mlp')}.L.weight"
        hidden = fields.integer("d_hidden", rows_of(shapes, encoder, 4 * d_model))
    return fields.build(
        ModelConfig,
        d_vocab=fields.integer("vocab" if listed else "n_vocab", rows_of(shapes, "embed.weight")),
        n_layer=len(_blocks(layers, normed=norm == "rms")),
        n_head=fields.integer("n_head", 1),
        d_model=d_model,
        d_hidden=hidden,
        n_ctx=fields.integer("n_ctx", 1024),
        mlp="bilinear" if "mlp" in kinds else "none",
        attention=decided,
        **{
            **PURE,
            "norm": norm,
            "final_norm": norm == "none",
            "x0_mixing": norm == "rms" and any(layer.keep != 1 for layer in layers),
        },
    )


def cycle_table(config: ModelConfig, raw: Mapping[str, Any], shapes: Shapes) -> Table:
    """Conversion table; the scales of the residual stream are folded into the weights."""
    table, left = _fold(_layers(_as_read(raw)), config)
    table.add("unembed.w_u", "head.weight", (config.d_vocab, config.d_model), scale(left))
    return table


def cycle_differences(raw: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Keys of two configs that are in both, describe the architecture, and are read differently."""
    described = raw.keys() & other.keys() - {*METADATA_KEYS, *BOOKKEEPING, *_CYCLE_BOOKKEEPING.split()}
    read, other_read = _as_read(raw), _as_read(other)
    return sorted(key for key in described if read[key] != other_read[key])


def _as_read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config with ``norm`` and ``scale`` converted from text, as which some runs stored them."""
    words = {"True": True, "true": True, "False": False, "false": False}
    norm, s = raw.get("norm"), raw.get("scale", 0.5)
    if isinstance(s, str):
        with suppress(ValueError):
            s = float(s)
    return {**raw, "norm": words.get(norm, norm) if isinstance(norm, str) else norm, "scale": s}


def _check_spec(fields: Fields, shapes: Shapes) -> None:
    spec = fields.raw["spec"]
    if not isinstance(spec, list) or not spec or not all(kind in ("attn", "mlp") for kind in spec):
        raise ValueError(f"{fields.source}: spec must list layers, each 'attn' or 'mlp', got {spec!r}")
    if len(spec) > len(shapes):
        raise ValueError(f"{fields.source}: {len(spec)} layers cannot come from a file of {len(shapes)} tensors")


def _check_residual(fields: Fields, residual: str, *, default: str, scale: str = "scale") -> None:
    s = fields.number(scale, 0.5)
    if fields.choice(residual, {"add": "add", "lerp": "lerp"}, default) == "lerp" and not 0 < s < 1:
        raise ValueError(f"{fields.source}: {scale} must be between 0 and 1 for {residual}='lerp', got {s!r}")


@dataclass(frozen=True)
class _Layer:
    """One layer of a file, attention or MLP: ``x <- keep x + write f(norm(x))``."""

    kind: str
    keep: float
    write: float


def _layers(raw: Mapping[str, Any]) -> list[_Layer]:
    s = raw["scale"]
    lerp = {"attn": raw.get("residual", "lerp") == "lerp", "mlp": raw.get("mlp_residual", "add") == "lerp"}
    kinds = raw["spec"] if "spec" in raw else ["attn"] * raw["n_layer"]
    return [_Layer(kind, 1 - s, s) if lerp[kind] else _Layer(kind, 1.0, 1.0) for kind in kinds]


def _blocks(layers: Sequence[_Layer], *, normed: bool) -> list[dict[str, int]]:
    """For each of our blocks, the layers of the file it holds: at most one attention, then at most one MLP.

    With norms, a layer whose ``keep`` is not 1 ends its block: the next layer's norm must read the scaled ``x``, and
    our blocks scale ``x`` (by ``lambdas``) only at their start.
    """
    blocks: list[dict[str, int]] = []
    for i, layer in enumerate(layers):
        follows = layer.kind == "mlp" and i > 0 and layers[i - 1].kind == "attn"
        if follows and not (normed and layers[i - 1].keep != 1):
            blocks[-1]["mlp"] = i
        else:
            blocks.append({layer.kind: i})
    return blocks


def _fold(layers: Sequence[_Layer], config: ModelConfig) -> tuple[Table, float]:
    """Table rows of the embedding and all blocks, and the factor ``c`` by which the head must be multiplied.

    Our residual stream only adds, so the layers' ``keep`` is folded into the weights. Let ``x = c y``, where ``c``
    starts at 1 and each layer multiplies it by its ``keep``: then ``y <- y + write / (c keep) f``, and the head reads
    ``c y``. Without norms, the weights of ``f`` that read ``x`` are multiplied by ``c``; QK biases are not. With norms,
    ``f`` must read ``x`` itself because of the norm's eps: the ``lambdas`` ``(c, 0)`` of the next block multiply ``c``
    in and set it back to 1. The folding is exact. Attention or MLP that a block lacks gets zero weights.
    """
    d, h, normed = config.d_model, config.d_hidden, config.norm == "rms"
    qk = [f"{name}{branch}" for branch in ("1", "2")[: config.n_qk] for name in ("q", "k")]
    parts: dict[str, dict[str, tuple[int, int]]] = {}
    if config.attention != "none":
        parts["attn"] = dict.fromkeys((*qk, "v", "o"), (d, d))
    if config.mlp != "none":
        parts["mlp"] = {"l": (h, d), "r": (h, d), "d": (d, h)}
    flip = flip_rotation(config)
    table, c = Table(), 1.0
    table.add("embed.w_e", "embed.weight", (config.d_vocab, d))
    for b, block in enumerate(_blocks(layers, normed=normed)):
        ours = f"blocks.{b}"
        if config.x0_mixing:
            table.fill(f"{ours}.lambdas", partial(torch.tensor, [c, 0.0], dtype=torch.float64))
            c = 1.0
        for part, shapes in parts.items():
            if part not in block:
                for name, shape in shapes.items():
                    table.fill(f"{ours}.{part}.w_{name}", partial(torch.zeros, shape, dtype=torch.float64))
                continue
            layer, theirs = layers[block[part]], f"layers.{block[part]}"
            read, c = scale(1.0 if normed else c), c * layer.keep
            for name, shape in shapes.items():
                key = f"{theirs}.{name.upper() if part == 'mlp' else name}"
                fold = scale(layer.write / c) if name in ("o", "d") else read
                table.add(f"{ours}.{part}.w_{name}", f"{key}.weight", shape, chain(flip, fold) if name in qk else fold)
                if config.qk_bias and name in qk:
                    table.add(f"{ours}.attn.b_{name}", f"{key}.bias", (d,), flip)
    return table, c


def read_toy(raw: Mapping[str, Any], shapes: Shapes, source: str, attention: str | None) -> ModelConfig:
    """The architecture of a toy transformer, from its config and the shapes of the file."""
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
    projection = "layers.0.bilinear.proj1.weight"
    if mlp == "bilinear" and projection not in shapes:
        raise ValueError(f"{source} says model_type='transformer', but the file holds no {projection}")
    return fields.build(
        ModelConfig,
        d_vocab=fields.integer("vocab_size"),
        n_layer=fields.depth("n_layer", shapes),
        n_head=fields.integer("n_head"),
        n_ctx=fields.integer("n_ctx"),
        d_model=fields.integer("d_model"),
        d_hidden=rows_of(shapes, projection) if mlp == "bilinear" else 0,
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
    """Conversion table, without any folds: the rotation of this code is that of the released models."""
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
    "two-layer",
    (r"embed\.weight", r"layers\.0\.q1\.weight", r"unembed\.weight"),
    read_two_layer,
    two_layer_table,
    block="model",
)
CYCLE = Layout(
    "cycle",
    (r"embed\.weight", r"layers\.0\.(q1|L)\.weight", r"head\.weight"),
    read_cycle,
    cycle_table,
    differences=cycle_differences,
)
TOY = Layout("toy", (r"embed\.weight", r"layers\.0\.(attn\.)?c_q\.weight", r"head\.weight"), read_toy, toy_table)
