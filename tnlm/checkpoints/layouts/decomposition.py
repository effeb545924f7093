"""The layout of tdooms/bilinear-decomposition: softmax attention and a tensor MLP, ``rotate_half``, RMS eps 1e-8."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tnlm.checkpoints.layouts.published import check_asked
from tnlm.checkpoints.layouts.table import Fields, Layout, Shapes, Table, chain, flip_rotation, rows_of, scale
from tnlm.config import ModelConfig
from tnlm.rotary import rotary_frequencies

GATES = {None: "bilinear", "silu": "swiglu", "relu": "reglu", "gelu": "geglu"}
ONE_ENCODER = {"relu": "relu", "gelu": "gelu"}
"""MLP kinds for ``bilinear: false``; no gate (a linear map) and silu (no kind of ours) are errors."""


def read_config(raw: Mapping[str, Any], shapes: Shapes, source: str, attention: str | None) -> ModelConfig:
    """The architecture, from the config and the shapes of the file."""
    fields = Fields(
        raw,
        source,
        required="n_head n_layer n_ctx d_model d_hidden bilinear gate bias normalization",
        optional="attention2 scale_attn",
        ignored="tokenizer repo",
    )
    fields.refuse("attention2", False, "the second attention of the research trees is not supported", default=False)
    check_asked("softmax", attention, source)
    norm, bias = fields.flag("normalization"), fields.flag("bias")
    return fields.build(
        ModelConfig,
        d_vocab=rows_of(shapes, "transformer.wte.weight"),
        n_layer=fields.depth("n_layer", shapes),
        n_head=fields.integer("n_head"),
        n_ctx=fields.integer("n_ctx"),
        d_model=fields.integer("d_model"),
        d_hidden=fields.integer("d_hidden"),
        mlp=fields.choice("gate", GATES if fields.flag("bilinear") else ONE_ENCODER),
        attention="softmax",
        norm="rms" if norm else "none",
        norm_eps=1e-8,
        embedding_norm=False,
        qk_norm=False,
        rotary_table_dtype="float32",
        logit_softcap=None,
        x0_mixing=False,
        value_residual=False,
        mlp_bias=bias,
        mlp_hidden_bias=bias,
    )


def make_table(config: ModelConfig, raw: Mapping[str, Any], shapes: Shapes) -> Table:
    """Conversion table, with three kinds of folds.

    ``1/sqrt(2 n_layer)`` is folded into W_O unless ``scale_attn`` is false, the sign of the rotation into queries and
    keys, and the gains of norms into the weights that read them.
    """
    d, v, h = config.d_model, config.d_vocab, config.d_hidden
    flip = flip_rotation(config)
    residual = scale((2 * config.n_layer) ** -0.5 if raw.get("scale_attn", True) else 1.0)
    table = Table()

    def add(ours: str, key: str, shape: tuple[int, int], gain: str, fold: Callable[..., Tensor]) -> None:
        """A weight behind a norm: the norm's gain, in trees that have one, scales its columns."""
        if gain in shapes:
            table.add(ours, {key: shape, gain: (d,)}, fold=chain(lambda w, g: w * g, fold))
        else:
            table.add(ours, key, shape, fold)

    table.add("embed.w_e", "transformer.wte.weight", (v, d))
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        n1, n2 = f"{theirs}.n1.weight", f"{theirs}.n2.weight"
        for part, name in enumerate(("w_q1", "w_k1", "w_v")):
            take = rows(part, d)
            fold = take if name == "w_v" else chain(take, flip)
            add(f"{ours}.attn.{name}", f"{theirs}.attn.qkv.weight", (3 * d, d), n1, fold)
        table.add(f"{ours}.attn.w_o", f"{theirs}.attn.o.weight", (d, d), residual)
        table.checks[f"{theirs}.attn.rotary.inv_freq"] = frequencies_check(config)
        sides = ("l", "r")[: 1 + config.mlp_gated]
        for part, side in enumerate(sides):
            add(f"{ours}.mlp.w_{side}", f"{theirs}.mlp.w.weight", (len(sides) * h, d), n2, rows(part, h))
            if config.mlp_hidden_bias:
                table.add(f"{ours}.mlp.b_{side}", f"{theirs}.mlp.w.bias", (len(sides) * h,), rows(part, h))
        # Older trees call the output map o
        down = "o" if f"{theirs}.mlp.o.weight" in shapes else "p"
        table.add(f"{ours}.mlp.w_d", f"{theirs}.mlp.{down}.weight", (d, h))
        if config.mlp_bias:
            table.add(f"{ours}.mlp.bias", f"{theirs}.mlp.{down}.bias", (d,))
    add("unembed.w_u", "lm_head.weight", (v, d), "transformer.n_f.weight", lambda w: w)
    return table


def rows(part: int, size: int) -> Callable[[Tensor], Tensor]:
    """A function that takes one of several matrices stacked by rows."""
    return lambda w: w[part * size : (part + 1) * size]


def frequencies_check(config: ModelConfig) -> Callable[[Tensor], str | None]:
    """A check of a stored rotary buffer: it must hold the frequencies from which our rotary tables are made."""

    def check(found: Tensor) -> str | None:
        wanted = rotary_frequencies(config.d_head, base=config.rotary_base)
        if found.shape == wanted.shape and torch.allclose(found.float(), wanted, rtol=1e-2):
            return None
        return f"must hold the rotary frequencies of base {config.rotary_base:g}, got {found.flatten()[:4].tolist()}..."

    return check


DECOMPOSITION = Layout(
    "bilinear-decomposition",
    (r"transformer\.wte\.weight", r"transformer\.h\.\d+\.mlp\.w\.weight"),
    read_config,
    make_table,
)
