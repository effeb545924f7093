"""Small models, every parameter random, sizes pairwise different; and the whole forward as loops over floats."""

import math
from typing import get_args

import torch
from torch import Tensor

from tests.conftest import randomize
from tnlm.config import AttentionKind, MLPKind, ModelConfig
from tnlm.transformer import Transformer

MLPS = get_args(MLPKind)
ATTENTIONS = get_args(AttentionKind)
PUBLISHED = [
    (mlp, attention)
    for mlp in ("bilinear", "relu2", "squared", "swiglu")
    for attention in ("bilinear", "differential", "softmax", "squared_normalized")
]
"""MLP and attention of the 16 architectures whose logits are recorded."""


PURE = {"d_vocab": 13, "d_vocab_used": 11, "n_layer": 2, "n_head": 3, "d_model": 12, "d_hidden": 7, "n_ctx": 17}
"""Sizes of a pure model, all different, with two ids that no text contains."""


def tiny(**changes: object) -> ModelConfig:
    """The released architecture at n_head 3, d_qk 4, d_head 10, d_hidden 7, 11 of 13 ids used."""
    sizes = {"d_vocab": 13, "d_vocab_used": 11, "n_layer": 3, "n_head": 3, "d_model": 30, "d_qk": 4, "n_ctx": 17}
    hidden = 0 if changes.get("mlp") == "none" else 7
    return ModelConfig.released(**{**sizes, "d_hidden": hidden, **changes})


def build(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> Transformer:
    model = Transformer(config, dtype=dtype)
    randomize(model, seed)
    return model


def build_mixed(config: ModelConfig, seed: int = 0) -> Transformer:
    """A random model whose layers take 0.3 of their values from block 0, where symmetry L is far from its pole."""
    model = build(config, seed=seed)
    for block in model.blocks:
        if block.attn is not None and block.attn.lamb is not None:
            block.attn.lamb.data.fill_(0.3)
    return model


def ids(*shape: int, limit: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(seed))


def forward_by_loops(model: Transformer, tokens: list[int]) -> Tensor:
    """Logits (seq, d_vocab) of one sequence in float64, position by position and pair by pair."""
    c = model.config
    p = {name: value.detach().double() for name, value in model.named_parameters()}
    eps = c.norm_eps

    def rms(x: Tensor) -> Tensor:
        return x / math.sqrt(sum(float(a) ** 2 for a in x) / len(x) + eps)

    def norm(x: Tensor) -> Tensor:
        return rms(x) if c.norm == "rms" else x

    def rotary(x: Tensor, position: int) -> Tensor:
        half, y = c.d_qk // 2, torch.zeros_like(x)
        for f in range(half):
            angle = torch.tensor(position * c.rotary_base ** (-2 * f / c.d_qk))
            table = getattr(torch, c.rotary_table_dtype)
            cos, sin = float(angle.cos().to(table)), float(angle.sin().to(table))
            y[f] = x[f] * cos + x[half + f] * sin
            y[half + f] = -x[f] * sin + x[half + f] * cos
        return y

    x0 = [p["embed.w_e"][t] for t in tokens]
    x0 = [norm(x) if c.embedding_norm else x for x in x0]
    xs, v_block0 = list(x0), None
    for layer in range(c.n_layer):
        block = {name.split(f"blocks.{layer}.")[1]: w for name, w in p.items() if name.startswith(f"blocks.{layer}.")}
        if c.x0_mixing:
            a, b = block["lambdas"]
            xs = [a * x + b * first for x, first in zip(xs, x0, strict=True)]
        if c.attention != "none":
            xs, v_block0 = _attention(c, block, xs, v_block0, norm, rms, rotary)
        if c.mlp != "none":
            xs = [x + _mlp(c, block, norm(x)) for x in xs]
    logits = torch.stack([p["unembed.w_u"] @ (norm(x) if c.final_norm else x) for x in xs])
    return logits if c.logit_softcap is None else c.logit_softcap * torch.tanh(logits / c.logit_softcap)


def _mlp(c: ModelConfig, block: dict[str, Tensor], x: Tensor) -> Tensor:
    sigmoid = lambda a: 1 / (1 + math.exp(-a))  # noqa: E731
    act = {
        "bilinear": lambda a: a,
        "swiglu": lambda a: a * sigmoid(a),
        "geglu": lambda a: a * 0.5 * (1 + math.erf(a / math.sqrt(2))),
        "reglu": lambda a: max(a, 0.0),
        "glu": sigmoid,
        "squared": lambda a: a * a,
        "relu2": lambda a: max(a, 0.0) ** 2,
        "relu": lambda a: max(a, 0.0),
        "gelu": lambda a: a * 0.5 * (1 + math.erf(a / math.sqrt(2))),
    }[c.mlp]
    left, right = (block[f"mlp.w_{side}"] @ x if f"mlp.w_{side}" in block else None for side in "lr")
    if c.mlp_hidden_bias:
        left, right = left + block["mlp.b_l"], right + block["mlp.b_r"] if c.mlp_gated else None
    hidden = torch.tensor([act(float(a)) for a in left], dtype=torch.float64)
    if c.mlp_gated:
        hidden = hidden * right
    out = block["mlp.w_d"] @ hidden
    return out + block["mlp.bias"] if c.mlp_bias else out


def _attention(c, block, xs, v_block0, norm, rms, rotary):
    normed = [norm(x) for x in xs]
    values = [(block["attn.w_v"] @ x).view(c.n_head, c.d_head) for x in normed]
    if v_block0 is None:
        v_block0 = values
    if c.value_residual:
        m = block["attn.lamb"][0]
        values = [(1 - m) * v + m * first for v, first in zip(values, v_block0, strict=True)]

    def project(name: str, x: Tensor, position: int, head: int) -> Tensor:
        y = block[f"attn.w_{name}"] @ x
        y = y + block[f"attn.b_{name}"] if c.qk_bias else y
        y = y.view(c.n_head, c.d_qk)[head]
        return rotary(rms(y) if c.qk_norm else y, position)

    out = []
    for i in range(len(xs)):
        z = []
        for head in range(c.n_head):
            s, r = [], []
            for j in range(i + 1):
                for scores, branch in ((s, "1"), (r, "2"))[: c.n_qk]:
                    q = project(f"q{branch}", normed[i], i, head)
                    k = project(f"k{branch}", normed[j], j, head)
                    scores.append(float(q @ k))
            pattern = _pattern(c, block, s, r)
            z.append(sum(weight * values[j][head] for j, weight in enumerate(pattern)))
        out.append(xs[i] + block["attn.w_o"] @ torch.cat(z))
    return out, v_block0


def _pattern(c: ModelConfig, block: dict[str, Tensor], s: list[float], r: list[float]) -> list[float]:
    def softmax(scores: list[float]) -> list[float]:
        total = sum(math.exp(a) for a in scores)
        return [math.exp(a) / total for a in scores]

    d = c.d_qk
    if c.attention == "bilinear":
        return [(a / d) * (b / d) for a, b in zip(s, r, strict=True)]
    if c.attention == "squared":
        return [(a / d) ** 2 for a in s]
    if c.attention == "squared_normalized":
        w = [(a / math.sqrt(d)) ** 2 for a in s]
        return [a / (sum(w) + 1e-8) for a in w]
    if c.attention == "softmax":
        return softmax([a / math.sqrt(d) for a in s])
    g = float(block["attn.bilinear_lamb"])
    first, second = softmax([a / d for a in s]), softmax([a / d for a in r])
    return [a - g * b for a, b in zip(first, second, strict=True)]
