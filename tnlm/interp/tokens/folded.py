"""Layers of two models as maps from tokens to centred logits, and the inner products of these maps.

The tokens are what two models share, whatever the bases of their residual streams. A layer that reads the normed
embedding of each token and writes centred logits is a tensor over tokens. It is never formed: an inner product of two
needs the products of both embeddings and of both unembeddings over the tokens, no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from tnlm.checks import seeded
from tnlm.interp.checks import check_count
from tnlm.interp.extraction import Extracted
from tnlm.interp.layers.bilinear import BilinearTensor, unit_scale
from tnlm.interp.layers.grams import kernel_blocks
from tnlm.interp.layers.heads import BilinearHead, pattern_product
from tnlm.interp.tokens.bare_tokens import lifted, normed
from tnlm.interp.vocabulary import centred, parallel_groups, token_weights

# Numbers of one block of queries or keys: 128 MiB in float64.
_BLOCK = 2**24


def draw_tokens(
    nets: Sequence[Extracted], weights: Real[Tensor, " n"] | None, samples: int | None, seed: int
) -> tuple[Int[Tensor, " m"], Float[Tensor, " m"]]:
    """Ids of tokens that have a weight, and the weights, which sum to 1.

    Where more than ``samples`` have one, that many are drawn in proportion to it, once each, and count the same. Of
    tokens whose centred unembedding rows are parallel in a model the first is kept.

    Raises:
        ValueError: Weights that do not fit, or fewer than 2 tokens left.
    """
    p = token_weights(weights, nets[0].unembed[: len(nets[0].tokens)])
    ids = p.nonzero()[:, 0]
    if samples is not None:
        check_count("samples", samples, 2)
        if len(ids) > samples:
            generator = seeded(seed)
            ids = torch.multinomial(p.double().cpu(), samples, generator=generator).sort().values.to(p.device)
            p = torch.ones_like(p)
    for net in nets:
        rows = centred(net.unembed[ids], p[ids].to(net.unembed))
        ids = ids[parallel_groups(rows) == torch.arange(len(ids), device=ids.device)]
    if len(ids) < 2:
        raise ValueError(f"at least 2 tokens must differ and have a weight, got {len(ids)}")
    return ids, p[ids] / p[ids].sum()


@dataclass(frozen=True, eq=False)
class TokenRows:
    """What the layers of one model read and write by token: ``inputs`` and centred ``outputs``, ``(n, d_model)``."""

    net: Extracted
    inputs: Tensor
    outputs: Tensor
    weights: Tensor

    @classmethod
    def of(cls, net: Extracted, ids: Tensor, weights: Tensor) -> "TokenRows":
        p = weights.to(net.unembed)
        return cls(net, normed(net, net.x0[ids]), centred(net.unembed[ids], p), p)

    def permuted(self, order: Tensor) -> "TokenRows":
        """The model with its tokens renamed, weights left in place."""
        return replace(self, inputs=self.inputs[order], outputs=centred(self.outputs[order], self.weights))


class Folded:
    """Inner products of layers of two models as maps of tokens, in float64.

    Products of the inputs and of the outputs over tokens are formed once: ``4 n d_model**2`` flop.
    """

    def __init__(self, a: TokenRows, b: TokenRows) -> None:
        self.a, self.b = a, b
        self.inputs = _over_tokens(a.inputs, b.inputs, a.weights)
        self.outputs = _over_tokens(a.outputs, b.outputs, a.weights)

    def mlp(self, x: BilinearTensor, y: BilinearTensor) -> Tensor:
        """Inner product of the quadratic parts, symmetric over both tokens that a layer reads.

        Costs about five products of ``(d_hidden, d_model)`` with ``(d_model, d_hidden)``.
        """
        dtype = torch.promote_types(x.dtype, y.dtype)
        x, y, inputs = x.to(dtype), y.to(dtype), self.inputs.to(dtype)
        written = self.outputs.to(dtype) @ y.w_d
        total = self.inputs.new_zeros(())
        for rows, columns, kernel in kernel_blocks(x, y, inputs, hermitian=False):
            total = total + ((x.w_d[:, rows].mT @ written[:, columns]) * kernel).sum(dtype=torch.float64)
        return total

    def layers(self, distances: Sequence[int]) -> dict[str, Tensor]:
        """Inner product of every layer with its counterpart, in the order in which the network applies them.

        Attention is the sum of its heads, an MLP its canonical form without the bias. What is no polynomial in both
        models is left out.
        """
        found = {}
        for layer in range(self.a.net.n_layer):
            if all(_has_patterns(net) for net in self._nets):
                found[f"attention {layer}"] = self.heads(layer, layer, distances).sum()
            if all(net.config.mlp_is_form for net in self._nets):
                x, y = (unit_scale(net.mlp[layer])[0].canonical() for net in self._nets)
                found[f"mlp {layer}"] = self.mlp(x, y)
        return found

    def heads(self, layer_a: int, layer_b: int, distances: Sequence[int]) -> Float[Tensor, "heads_a heads_b"]:
        """Inner products of all pairs of heads of two layers: of patterns, summed over distances, times value circuits.

        Queries and keys are those of the tokens, QK norm and biases included. Costs ``16 n (n_head d_qk)**2`` flop.
        """
        a, b = (
            [net.attention[n].head(h) for h in range(net.config.n_head)]
            for net, n in zip(self._nets, (layer_a, layer_b))
        )
        for head in (*a, *b):
            head._require_pattern("similarity")
        queries, keys = (self._branches(a, b, side) for side in "qk")
        patterns = queries[0][0].new_zeros(len(a), len(b))
        for distance in distances:
            turned = [[_turned(gram, a[0], b[0], distance) for gram in row] for row in keys]
            patterns = patterns + pattern_product(queries, turned)
        values = torch.stack([torch.stack([self._values(x, y) for y in b]) for x in a])
        return patterns * values

    @property
    def _nets(self) -> tuple[Extracted, Extracted]:
        return self.a.net, self.b.net

    def _branches(self, a: list[BilinearHead], b: list[BilinearHead], side: str) -> list[list[Tensor]]:
        """Products ``(heads_a, heads_b, d_qk, d_qk)`` over tokens of the queries (or keys) of branches 1 and 2."""
        width = 2 * max(len(heads) * heads[0].d_qk for heads in (a, b))
        sums: list[list[Tensor]] = []
        for block in torch.arange(len(self.a.inputs)).split(max(1, _BLOCK // width)):
            tables = [_tables(rows, heads, side, block) for rows, heads in ((self.a, a), (self.b, b))]
            weighted = [x * self.a.weights[block].double()[:, None, None] for x in tables[0]]
            grams = [[torch.einsum("nhf,ngk->hgfk", x, y.to(x.device)) for y in tables[1]] for x in weighted]
            sums = [[s + g for s, g in zip(*rows)] for rows in zip(sums, grams)] if sums else grams
        return sums

    def _values(self, x: BilinearHead, y: BilinearHead) -> Tensor:
        """Inner product of value circuits: inputs of the own layer with each other, and those of block 0."""
        total = self.inputs.new_zeros(())
        for source in ("layer", "first")[: 1 + (x.v0 is not None and y.v0 is not None)]:
            p, q = x.ov(source), y.ov(source)  # type: ignore[arg-type]
            left = p.left.double().mT @ self.outputs @ q.left.double()
            reads = [c.right.double()[:, net.config.qk_bias :] for c, net in zip((p, q), self._nets)]
            total = total + (left * (reads[0] @ self.inputs @ reads[1].mT)).sum()
        return total


def shared_rows(
    a: Extracted, b: Extracted, weights: Tensor | None, samples: int | None, seed: int
) -> tuple[TokenRows, TokenRows]:
    """The rows of two models for the same tokens.

    Raises:
        ValueError: The models have different numbers of tokens, or see `draw_tokens`.
    """
    sizes = [len(net.tokens) for net in (a, b)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"models are compared by their tokens and must have the same d_vocab_used, got {sizes}")
    ids, p = draw_tokens((a, b), weights, samples, seed)
    return TokenRows.of(a, ids, p), TokenRows.of(b, ids, p)


def _over_tokens(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Sum over tokens, by weight, of outer products of rows, ``(d_x, d_y)``; float64, a block of tokens at a time."""
    step = max(1, _BLOCK // max(1, x.shape[1], y.shape[1]))
    blocks = zip(x.split(step), y.to(x.device).split(step), weights.split(step))
    return torch.stack([a.double().mT @ (p.double()[:, None] * b.double()) for a, b, p in blocks]).sum(0)


def _has_patterns(net: Extracted) -> bool:
    """Whether the attention patterns of a model are polynomials of queries and keys."""
    return net.n_layer > 0 and net.config.attention != "none" and net.attention[0].head(0).polynomial


def _tables(rows: TokenRows, heads: list[BilinearHead], side: str, block: Tensor) -> list[Tensor]:
    """Queries (or keys) of a block of tokens, ``(n, heads, d_qk)`` for each of two branches."""
    x = lifted(rows.net, rows.inputs[block])
    return [torch.stack([h.token_table(x, n, side).double() for h in heads], 1) for n in (1, 2)]  # type: ignore[arg-type]


def _turned(gram: Tensor, a: BilinearHead, b: BilinearHead, distance: int) -> Tensor:
    """Products of keys ``distance`` positions back; the rotation is the same for all heads of a layer."""
    for axis, head in ((2, a), (3, b)):
        rows = gram.movedim(axis, 0)
        gram = head._turn(rows.flatten(1), -distance).reshape(rows.shape).movedim(0, axis)
    return gram
