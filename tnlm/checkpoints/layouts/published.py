"""The layout of the released models and of the training script's own checkpoints (loganriggs/modded-nanogpt)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tnlm.checkpoints.layouts.table import Fields, Layout, Shapes, Table
from tnlm.config import ModelConfig

QK_KEYS = {"w_q1": "c_q", "w_k1": "c_k", "w_q2": "c_q2", "w_k2": "c_k2"}


def read_config(raw: Mapping[str, Any], shapes: Shapes, source: str, attention: str | None) -> ModelConfig:
    """The architecture, from the flags of the config and the keys of the file, which must agree."""
    fields = Fields(
        raw,
        source,
        required="vocab_size n_layer n_head n_embd squared_mlp bilinear expansion_factor gated",
        optional="squared_attn bilinear_attn",
        ignored="step",
    )
    d_model, d_vocab = fields.integer("n_embd"), fields.integer("vocab_size")
    if fields.flag("bilinear"):
        mlp, d_hidden = "swiglu" if fields.flag("gated") else "bilinear", fields.integer("expansion_factor") * d_model
    else:
        # One encoder is 4 wide whatever expansion_factor says
        mlp, d_hidden = "squared" if fields.flag("squared_mlp") else "relu2", 4 * d_model
    return fields.build(
        ModelConfig.released,
        d_vocab=d_vocab,
        n_layer=fields.depth("n_layer", shapes),
        n_head=fields.integer("n_head"),
        d_model=d_model,
        d_hidden=d_hidden,
        mlp=mlp,
        attention=_attention(fields, shapes, attention),
    )


def _attention(fields: Fields, shapes: Shapes, asked: str | None) -> str:
    squared, bilinear = fields.flag("squared_attn", False), fields.flag("bilinear_attn", False)
    flags = f"squared_attn={squared}, bilinear_attn={bilinear}"
    for part, said in ((".c_q2.", bilinear), (".bilinear_lamb", bilinear and not squared)):
        key = next((k for k in shapes if part in f"{k}."), None)
        if (key is not None) != said:
            holds = f"holds {key}" if key else f"holds no *{part.rstrip('.')}"
            raise ValueError(f"{fields.source} says {flags}, but the file {holds}: one of the two is of another model")
    if bilinear or not squared:
        decided = ("bilinear" if squared else "differential") if bilinear else "softmax"
        check_asked(decided, asked, fields.source)
        return decided
    if asked not in ("squared", "squared_normalized"):
        given = "" if asked is None else f", got attention={asked!r}"
        raise ValueError(
            f"{fields.source} says squared_attn with one query-key pair, and the same flags and keys were used for two "
            f'functions: pass attention="squared" (pattern (q.k/d)**2, code from 2025-11-11 on) or '
            f'attention="squared_normalized" (each row divided by its sum, code of 2025-11-10){given}. '
            "Only the cross-entropy on text tells them apart: about 3.5 nats on the Pile with the right one, 7.5 with "
            "the wrong one"
        )
    return asked


def check_asked(decided: str, asked: str | None, source: str) -> None:
    """Check that ``load(attention=...)`` does not contradict the attention that the file decides.

    Raises:
        ValueError: It does.
    """
    if asked not in (None, decided):
        raise ValueError(f"{source} decides attention={decided!r}, got attention={asked!r}; leave attention= out")


def make_table(config: ModelConfig, raw: Mapping[str, Any], shapes: Shapes) -> Table:
    """Conversion table, without any folds; scalars are 0-d in the file and ``(1,)`` here."""
    d, v, h = config.d_model, config.d_vocab, config.d_hidden
    table = Table()
    table.add("embed.w_e", "transformer.wte.weight", (v, d))
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        table.add(f"{ours}.lambdas", f"{theirs}.lambdas", (2,))
        table.add(f"{ours}.attn.lamb", f"{theirs}.attn.lamb")
        if config.attention == "differential":
            table.add(f"{ours}.attn.bilinear_lamb", f"{theirs}.attn.bilinear_lamb")
        for w, c in list(QK_KEYS.items())[: 2 * config.n_qk] + [("w_v", "c_v"), ("w_o", "c_proj")]:
            table.add(f"{ours}.attn.{w}", f"{theirs}.attn.{c}.weight", (d, d))
        if config.mlp_gated:
            names = {"w_l": "Left.weight", "w_r": "Right.weight", "w_d": "Down.weight", "bias": "Down_bias"}
        else:
            names = {"w_l": "c_fc.weight", "w_d": "c_proj.weight", "bias": "bias"}
        for w, name in names.items():
            table.add(f"{ours}.mlp.{w}", f"{theirs}.mlp.{name}", {"w_d": (d, h), "bias": (d,)}.get(w, (h, d)))
    table.add("unembed.w_u", "lm_head.weight", (v, d))
    return table


def to_published(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The state dict under the keys of the released models, with 0-d scalars: the inverse of loading that layout."""
    table = make_table(config, {}, {})
    return {keys[0]: state[ours].reshape(table.shapes[keys[0]]) for ours, (keys, _) in table.rows.items()}


PUBLISHED = Layout("published", (r"transformer\.wte\.weight", r"transformer\.h\.\d+\.lambdas"), read_config, make_table)
