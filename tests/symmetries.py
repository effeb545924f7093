"""Changes of the weights that leave the predictions of a model alone, each a function from model to model.

The table :data:`SYMMETRIES` names them as ``docs/symmetries.md`` does. Those with ``eps`` are exact for ``norm_eps=0``;
above it they move the predictions in proportion to ``norm_eps`` over the mean square of what is normed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tnlm.config import GATED_MLPS, ModelConfig
from tnlm.transformer import Transformer

Kept = Literal["logits", "logits of text", "log-probabilities"]


@dataclass(frozen=True)
class Symmetry:
    """One change: what it does, when it holds, and what stays equal."""

    id: str
    words: str
    """The change in plain words, for the table of the docs."""
    when: str
    """When it holds, in plain words."""
    change: Callable[[Transformer, torch.Generator], None]
    """Edits a copy of a model in place."""
    holds: Callable[[ModelConfig], bool]
    kept: Kept = "logits"
    eps: bool = False
    """Exact only for ``norm_eps=0``."""
    wider: bool = False
    """The changed model has ``d_model`` more hidden units."""

    def __call__(self, model: Transformer, seed: int = 0) -> Transformer:
        """The changed model; ``model`` stays as it is."""
        assert self.holds(model.config), f"{self.id} does not hold for {model.config}"
        changed = copy_of(model, model.config.d_model if self.wider else 0)
        with torch.no_grad():
            self.change(changed, torch.Generator().manual_seed(seed))
        return changed

    def turn(self, vectors: Tensor, seed: int = 0) -> Tensor:
        """``vectors`` of the residual stream, ``(..., d_model)``, as they lie in the changed model."""
        if self.id != "R":
            return vectors
        turn = orthogonal(vectors.shape[-1], torch.Generator().manual_seed(seed), vectors.dtype)
        return vectors @ turn


def kept(model: Transformer, tokens: Tensor, what: Kept) -> Tensor:
    """The predictions of ``model`` that a symmetry leaves alone."""
    with torch.no_grad():
        logits = model(tokens)
    if what == "logits of text":
        return logits[..., : model.config.d_vocab_used]
    return logits.log_softmax(-1) if what == "log-probabilities" else logits


def orthogonal(n: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random orthogonal matrix ``(n, n)``."""
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0].to(dtype)


def turn_residual(model: Transformer, turn: Tensor) -> None:
    """Change the basis of the residual stream in place: a row ``x`` becomes ``x turn``, of any invertible matrix."""
    back = torch.linalg.inv(turn).mT  # of what reads: w x = (w turn^-T) (turn^T x)
    model.embed.w_e.copy_(model.embed.w_e @ turn)
    model.unembed.w_u.copy_(model.unembed.w_u @ back)
    for block in model.blocks:
        for module in (block.attn, block.mlp):
            for name in ("w_q1", "w_k1", "w_q2", "w_k2", "w_v", "w_l", "w_r"):
                w = getattr(module, name, None)
                if w is not None:
                    w.copy_(w @ back)
            for name in ("w_o", "w_d", "bias"):
                w = getattr(module, name, None)
                if w is not None:
                    w.copy_(turn.mT @ w)


def permute_heads(model: Transformer, layer: int, order: list[int]) -> None:
    """Put the heads of one layer in another order, in place."""
    attn = model.blocks[layer].attn
    for name, width in [*((n, attn.d_qk) for n in _QK), ("w_v", attn.d_head)]:
        w = getattr(attn, name)
        if w is not None:
            w.copy_(w.unflatten(0, (attn.n_head, width))[order].flatten(0, 1))
    attn.w_o.copy_(attn.w_o.unflatten(1, (attn.n_head, attn.d_head))[:, order].flatten(1))


_QK = ("w_q1", "b_q1", "w_k1", "b_k1", "w_q2", "b_q2", "w_k2", "b_k2")


def copy_of(model: Transformer, more_hidden: int = 0) -> Transformer:
    """A copy, with ``more_hidden`` further hidden units whose output maps are zero."""
    config = replace(model.config, d_hidden=model.config.d_hidden + more_hidden)
    other = Transformer(config, dtype=model.embed.w_e.dtype)
    state = other.state_dict()
    for name, value in model.state_dict().items():
        state[name][tuple(slice(n) for n in value.shape)] = value
    return other


def _factors(n: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random factors from 1/2 to 2."""
    return (2 ** (2 * torch.rand(n, generator=generator, dtype=torch.float64) - 1)).to(dtype)


def _heads(attn, name: str) -> Tensor | None:
    """A query or key parameter as a view ``(n_head, d_qk, ...)``."""
    w = getattr(attn, name)
    return None if w is None else w.unflatten(0, (attn.n_head, attn.d_qk))


def _scale(attn, branch: str, side: str, factors: Tensor) -> None:
    """Multiply queries (or keys) of every head by ``factors``, ``(n_head,)`` or by row, ``(n_head, d_qk)``."""
    for kind in "wb":
        view = _heads(attn, f"{kind}_{side}{branch}")
        if view is not None:
            view.mul_(factors.reshape(*factors.shape, *[1] * (view.ndim - factors.ndim)))


def _rotate_residual(model: Transformer, generator: torch.Generator) -> None:
    turn_residual(model, orthogonal(model.config.d_model, generator, model.embed.w_e.dtype))


def _scale_embedding(model: Transformer, generator: torch.Generator) -> None:
    w_e = model.embed.w_e
    w_e.mul_(_factors(len(w_e), generator, w_e.dtype)[:, None])


def _replace_padding(model: Transformer, generator: torch.Generator) -> None:
    for w in (model.embed.w_e, model.unembed.w_u):
        rows = w[model.config.d_vocab_used :]
        rows.copy_(torch.randn(rows.shape, generator=generator, dtype=torch.float64))


def _shift_unembedding(model: Transformer, generator: torch.Generator) -> None:
    model.unembed.w_u.add_(torch.randn(model.config.d_model, generator=generator, dtype=torch.float64))


def _scale_queries(model: Transformer, generator: torch.Generator) -> None:
    config = model.config
    for block in model.blocks:
        attn = block.attn
        for branch in attn.branches:
            factors = _factors(attn.n_head, generator)
            _scale(attn, branch, "q", factors)
            if not config.qk_norm:
                _scale(attn, branch, "k", 1 / factors)
        signs = torch.tensor([-1.0] + [1.0] * (attn.n_head - 1), dtype=torch.float64)
        if attn.kind in ("bilinear", "squared", "squared_normalized"):
            for branch in attn.branches:
                _scale(attn, branch, "q", signs)
        if attn.kind == "bilinear":
            for first, second in (("q1", "q2"), ("k1", "k2")):
                for kind in "wb":
                    a, b = _heads(attn, f"{kind}_{first}"), _heads(attn, f"{kind}_{second}")
                    if a is not None:
                        last = a[-1].clone()  # the branches of the last head are exchanged
                        a[-1] = b[-1]
                        b[-1] = last


def _turn_pairs(model: Transformer, generator: torch.Generator) -> None:
    for block in model.blocks:
        attn = block.attn
        half = attn.d_qk // 2
        for branch in attn.branches:
            angle = 6.28 * torch.rand(attn.n_head, half, generator=generator, dtype=torch.float64)
            scale = _factors(attn.n_head * half, generator).reshape(attn.n_head, half)
            for side in "qk":
                for kind in "wb":
                    view = _heads(attn, f"{kind}_{side}{branch}")
                    if view is None:
                        continue
                    rows = (attn.n_head, half, *[1] * (view.ndim - 2))
                    cos, sin = angle.cos().reshape(rows), angle.sin().reshape(rows)
                    a, b = view[:, :half].clone(), view[:, half:].clone()
                    view[:, :half], view[:, half:] = a * cos - b * sin, a * sin + b * cos
                if not model.config.qk_norm:
                    _scale(attn, branch, side, torch.cat([scale, scale], 1) ** (1 if side == "q" else -1))


def _change_values(model: Transformer, generator: torch.Generator) -> None:
    shared = model.config.value_residual
    changes = None
    for block in model.blocks:
        attn = block.attn
        if changes is None or not shared:
            changes = torch.randn(attn.n_head, attn.d_head, attn.d_head, generator=generator, dtype=torch.float64)
            changes = changes + 2 * torch.eye(attn.d_head, dtype=torch.float64)
        values = changes @ attn.w_v.unflatten(0, (attn.n_head, attn.d_head))
        outputs = torch.einsum("onh,nhk->onk", attn.w_o.unflatten(1, (attn.n_head, -1)), torch.linalg.inv(changes))
        attn.w_v.copy_(values.flatten(0, 1))
        attn.w_o.copy_(outputs.flatten(1))


def _permute_heads(model: Transformer, generator: torch.Generator) -> None:
    shared = model.config.value_residual
    order = None
    for layer in range(model.config.n_layer):
        if order is None or not shared:
            order = [*range(1, model.config.n_head), 0]
            if not shared and int(torch.randint(2, (), generator=generator)):
                order = order[::-1]
        permute_heads(model, layer, order)


def _scale_value_mix(model: Transformer, generator: torch.Generator) -> None:
    for layer, block in enumerate(model.blocks):
        attn, c = block.attn, float(_factors(1, generator))
        if layer == 0:
            attn.lamb.add_(c)  # block 0 mixes its value with itself
            continue
        lamb = float(attn.lamb)
        if abs(1 - c * lamb) < 0.1:
            c = 0.5 * c  # away from the pole
        attn.lamb.mul_(c)
        attn.w_v.mul_(c * (1 - lamb) / (1 - c * lamb))
        attn.w_o.div_(c)
    if model.config.x0_mixing and model.blocks:
        model.blocks[0].lambdas.add_(torch.tensor([0.3, -0.3], dtype=torch.float64))  # both multiply x0: the sum counts


def _scale_stream(model: Transformer, generator: torch.Generator) -> None:
    before = 1.0
    for block in model.blocks:
        scale = float(_factors(1, generator))
        block.lambdas.mul_(torch.tensor([scale / before, scale], dtype=torch.float64))
        for module in (block.attn, block.mlp):
            for name in ("w_o", "w_d", "bias"):
                w = getattr(module, name, None)
                if w is not None:
                    w.mul_(scale)
        before = scale


def _change_hidden(model: Transformer, generator: torch.Generator) -> None:
    for block in model.blocks:
        mlp = block.mlp
        order = torch.randperm(mlp.d_hidden, generator=generator)
        p, q = (_factors(mlp.d_hidden, generator) for _ in range(2))
        left = [w for w in (mlp.w_l, mlp.b_l) if w is not None]
        right = [w for w in (mlp.w_r, mlp.b_r) if w is not None]
        for side, factors in ((left, p), (right, q)):
            for w in side:
                w.copy_(w[order])
                if mlp.kind in ("bilinear", "squared") or side is right:
                    w.mul_(factors.reshape(-1, *[1] * (w.ndim - 1)))
        mlp.w_d.copy_(mlp.w_d[:, order])
        if mlp.kind == "bilinear":
            mlp.w_d.div_(p * q)
            for a, b in zip(left, right, strict=True):
                half = a[::2].clone()
                a[::2] = b[::2]
                b[::2] = half
        elif mlp.kind == "squared":
            mlp.w_d.div_(p**2)
        elif mlp.kind in GATED_MLPS:
            mlp.w_d.div_(q)


def _shift_traces(model: Transformer, generator: torch.Generator) -> None:
    """Add ``c |x|**2`` and take ``c d_model`` from the bias: ``d_model`` more hidden units, one for each coordinate."""
    d = model.config.d_model
    eye = torch.eye(d, dtype=torch.float64)
    for block in model.blocks:
        mlp = block.mlp
        c = torch.randn(d, generator=generator, dtype=torch.float64) / d
        for name in ("w_l", "w_r"):
            w = getattr(mlp, name)
            if w is not None:
                w[-d:] = eye
        mlp.w_d[:, -d:] = c[:, None]
        mlp.bias.sub_(d * c)


SYMMETRIES = {
    s.id: s
    for s in (
        Symmetry(
            "R",
            "Another orthonormal basis of the residual stream: one rotation of every map that reads or writes it.",
            "always (without norms any invertible matrix)",
            _rotate_residual,
            lambda c: True,
        ),
        Symmetry(
            "E",
            "Each row of the embedding scaled by a positive number.",
            "with a norm of the embedding; up to `norm_eps`",
            _scale_embedding,
            lambda c: c.norm == "rms" and c.embedding_norm,
            eps=True,
        ),
        Symmetry(
            "P",
            "Other rows of embedding and unembedding for ids that no text contains.",
            "with padding ids; logits of text ids stay equal",
            _replace_padding,
            lambda c: c.d_vocab_used < c.d_vocab,
            kept="logits of text",
        ),
        Symmetry(
            "U",
            "One vector added to every row of the unembedding.",
            "without a softcap; log-probabilities stay equal",
            _shift_unembedding,
            lambda c: c.logit_softcap is None,
            kept="log-probabilities",
        ),
        Symmetry(
            "Q",
            "Queries of a branch scaled (with QK-norm), or queries and keys inversely (without); bilinear: branches "
            "exchanged, the sign of both changed; squared: one sign changed.",
            "always; with QK-norm up to `norm_eps`",
            _scale_queries,
            lambda c: c.attention != "none",
            eps=True,
        ),
        Symmetry(
            "QR",
            "Queries and keys of a rotary pair turned by one angle; without QK-norm scaled inversely, too.",
            "always",
            _turn_pairs,
            lambda c: c.attention != "none",
        ),
        Symmetry(
            "V",
            "Another basis of a head's values, with value residual one for that head in all layers.",
            "always",
            _change_values,
            lambda c: c.attention != "none",
        ),
        Symmetry(
            "N",
            "Heads in another order, with value residual one order in all layers.",
            "always",
            _permute_heads,
            lambda c: c.attention != "none" and c.n_head > 1,
        ),
        Symmetry(
            "L",
            "The mixing weight `lamb` of the values scaled, `w_v` and `w_o` to match; block 0's own `lamb`, and the "
            "difference of its two `lambdas`.",
            "with value residual",
            _scale_value_mix,
            lambda c: c.value_residual and c.attention != "none",
        ),
        Symmetry(
            "X",
            "The residual stream of a block scaled, by its `lambdas` and by what its attention and MLP write.",
            "with norms and x0 mixing; up to `norm_eps`",
            _scale_stream,
            lambda c: c.has_final_norm and c.x0_mixing,
            eps=True,
        ),
        Symmetry(
            "H",
            "Hidden units of an MLP in another order, rescaled, left and right exchanged, as far as its kind allows.",
            "always",
            _change_hidden,
            lambda c: c.mlp != "none",
        ),
        Symmetry(
            "S",
            "A multiple of the squared length of the input added to each output of an MLP, and taken from its bias: "
            "after a norm the squared length is `d_model`.",
            "with norms, a bias, and a bilinear or squared MLP; up to `norm_eps`",
            _shift_traces,
            lambda c: c.norm == "rms" and c.mlp_bias and c.mlp_is_form,
            eps=True,
            wider=True,
        ),
    )
}
