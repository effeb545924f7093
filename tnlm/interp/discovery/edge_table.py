"""Connections between components that write and read the residual stream, from the weights and a set of tokens."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Real
from torch import Tensor

from tnlm.interp.checks import check_bytes, check_count, check_number, check_symmetric, check_tensor, check_view
from tnlm.interp.extraction import Extracted
from tnlm.interp.layers.heads import BilinearHead
from tnlm.interp.ranking import as_table
from tnlm.interp.tokens.bare_tokens import arrival, bare_inputs, copied_values, lifted, normed
from tnlm.interp.tokens.folded import draw_tokens
from tnlm.interp.vocabulary import centred

Side = Literal["q", "k"]
_SIDES: dict[Side, str] = {"q": "query", "k": "key"}


class Edge(NamedTuple):
    """One writer and one reader: whether the same token stands out between them, and how much is read at all."""

    writer: str
    reader: str
    value: float
    """Cosine of the edge's table over pairs of tokens with the table "same token", in [-1, 1]; 0 by chance."""
    z: float
    """``value`` in standard deviations over permutations of the writer's tokens."""
    overlap: float
    """What the reader reads of the variation between tokens, relative to a random rotation of it: 1 by chance."""
    overlap_z: float
    """``overlap - 1`` in standard deviations over random rotations."""


class _Writer(NamedTuple):
    name: str
    stage: int  # order in which the residual stream meets it
    layer: int  # -1 for the embedding
    rows: Tensor  # what it writes on each token


class _Reader(NamedTuple):
    name: str
    stage: int
    layer: int
    table: Callable[[Tensor], Tensor]
    """Table [token on the other side, token of the writer] from the rows that it reads."""
    gram: Tensor


@torch.no_grad()
def edges(
    net: Extracted,
    *,
    distance: int = 0,
    token_weights: Real[Tensor, " d_vocab_used"] | None = None,
    samples: int = 512,
    seed: int = 0,
    max_bytes: int = 2**30,
) -> Any:
    """How every component that writes into the residual stream is read by each later one, compared with chance.

    A writer (embedding, head, MLP) is replaced by what it writes when it reads one token ``j`` alone, with attention
    1 on it and both value paths. A reader gets that write alone, normed as in the model, and gives a number for each
    token ``i`` on its other side:

    - query side: the pattern with the key ``i``; key side: with the query ``i``, ``distance`` positions later (softmax:
      the score, differential: the difference of the two scores);
    - value side, MLP, unembedding: the centred logit of ``i``. ``first value`` reads the input of block 0.

    ``value`` and ``z`` say whether ``i = j`` stands out in this table, as in heads that match or copy tokens. For equal
    weights ``z`` is exact over permutations of the tokens; otherwise ``1 / sum(weights**2)`` stands for their number.
    ``overlap`` compares the covariance of the writes with what the reader reads of all directions (both query and key
    sides over all inputs of the other side); its null is a random rotation, mean and variance exact.

    What the table does not say: an edge that takes one token to another token moves ``overlap`` alone, and ``overlap``
    does not see which token is read. Both take each writer alone: how much it adds to the stream of a run, or
    several writers at once, is not in them. A small ``z`` is no proof that an edge is unused.

    Symmetries: R E P U Q QR V L X H S.

    Args:
        distance: Query position minus key position at which patterns are read.
        token_weights: Of the ids in use, such as how often each occurs; equal by default, 0 leaves a token out.
        samples: At most so many tokens: where more have a weight, they are drawn in proportion to it, once each, and
            count the same. Of tokens with parallel rows of the unembedding the first is kept.
        seed: Of the draw.

    Returns:
        DataFrame (list of `Edge` without pandas) with columns writer, reader, value, z, overlap, overlap_z; largest
        ``|z|`` first. Costs about ``10 samples d_model d_qk + 4 samples**2 d_qk`` flop for each writer and head.

    Raises:
        ValueError: An MLP that is no tensor (its own reason), fewer than 2 tokens, or writers over ``max_bytes``.
    """
    check_number("distance", distance)
    check_count("samples", samples, 2)
    check_view(net, "config", "x0", "unembed", "mlp", "attention", "scalars")
    d = net.unembed.shape[1]
    count = 1 + net.n_layer * (1 + net.config.n_head)
    check_bytes("the Grams of all writers", (count, d, d), net.unembed.dtype, max_bytes, "use a smaller model")
    ids, weights = draw_tokens((net,), token_weights, samples, seed)
    writers = list(_writers(net, net.x0[ids]))
    spread = [centred(normed(net, writer.rows), weights) * weights.sqrt()[:, None] for writer in writers]
    grams = torch.stack([rows.mT @ rows for rows in spread])
    found: list[Edge] = []
    for reader in _readers(net, ids, weights, distance):
        overlaps = zip(*(x.tolist() for x in overlap(grams, reader.gram)), strict=True)
        for writer, (ratio, ratio_z) in zip(writers, overlaps, strict=True):
            if writer.stage < reader.stage:
                rows = arrival(net, writer.layer, reader.layer) * writer.rows
                value, z = same_token(reader.table(rows), weights)
                found.append(Edge(writer.name, reader.name, value, z, ratio, ratio_z))
    found.sort(key=lambda edge: -abs(edge.z))
    return as_table(Edge, *zip(*found))


def same_token(table: Float[Tensor, "n n"], weights: Float[Tensor, " n"]) -> tuple[float, float]:
    """Cosine of a table of token pairs with the identity, both centred by rows and columns, and its z-score.

    Tokens are drawn independently with ``weights``, which sum to 1. A table without structure gives 0 and 0.
    """
    wide, p = table.double(), weights.double()
    rest = wide - p @ wide - (wide @ p)[:, None] + p @ wide @ p
    norm = float(p @ rest.square() @ p) ** 0.5
    noise = torch.finfo(table.dtype).eps * float(wide.abs().max()) * len(p) ** 0.5
    chance = float(p.square().sum())
    identity = max(chance - 2 * float(p.pow(3).sum()) + chance**2, 0.0) ** 0.5
    if norm <= noise or identity == 0:
        return 0.0, 0.0
    value = float(p.square() @ rest.diagonal()) / (norm * identity)
    return value, value * (1 / chance - 1)


def overlap(writers: Float[Tensor, "n d d"], reader: Float[Tensor, "d d"]) -> tuple[Tensor, Tensor]:
    """``d tr(W R) / (tr W tr R)`` for each writer Gram, and its z-score under a Haar-random rotation of one.

    A Gram that is zero or isotropic has no orientation: z is 0 there (and the value 1 for zero).
    """
    d = reader.shape[-1]
    writers, reader = (gram.double() for gram in (writers, reader))
    # a scale of one Gram moves nothing, and products of small ones would underflow
    sizes = writers.abs().amax((1, 2), keepdim=True)
    writers, reader = writers / torch.where(sizes > 0, sizes, 1), reader / (reader.abs().max() or 1)
    traces, trace = writers.diagonal(dim1=1, dim2=2).sum(-1), reader.diagonal().sum()
    scale = torch.where(traces * trace > 0, traces * trace, 1)
    products = torch.einsum("nij,ij->n", writers, reader)
    values = torch.where(traces * trace > 0, d * products / scale, 1)
    spread_w = (writers.square().sum((1, 2)) - traces.square() / d).clamp_min(0)
    spread_r = (reader.square().sum() - trace.square() / d).clamp_min(0)
    deviation = d / scale * (2 * spread_w * spread_r / (max(d - 1, 1) * (d + 2))).sqrt()
    return values, torch.where(deviation > 0, (values - 1) / torch.where(deviation > 0, deviation, 1), 0)


def alignment(direction: Float[Tensor, "*batch d"], gram: Float[Tensor, "d d"]) -> Float[Tensor, "*batch"]:
    """Share of a direction that a reader with Gram ``R`` reads, ``d w^T R w / (|w|**2 tr R)``: 1 for a random one.

    With the Gram of a layer's `canonical` form S leaves it alone, too.

    Symmetries: R E P U Q QR V N L X H.
    """
    check_tensor("gram", gram, (None, None))
    check_tensor("direction", direction, (..., gram.shape[0]), gram)
    check_symmetric("gram", gram)
    trace, length2 = gram.diagonal().sum(), direction.square().sum(-1)
    if not float(trace) > 0 or bool((length2 == 0).any()):
        raise ValueError("alignment needs a non-zero direction and a non-zero positive Gram")
    return gram.shape[0] * ((direction @ gram) * direction).sum(-1) / (length2 * trace)


def _heads(net: Extracted, layer: int) -> Iterator[tuple[int, BilinearHead]]:
    if net.config.attention != "none":
        for n in range(net.config.n_head):
            yield n, net.attention[layer].head(n)


def _writers(net: Extracted, x0: Tensor) -> Iterator[_Writer]:
    yield _Writer("embed", -1, -1, x0)
    for layer in range(net.n_layer):
        x = bare_inputs(net, layer, x0)
        for n, _ in _heads(net, layer):
            written = copied_values(net, layer, n, x, x0)
            yield _Writer(f"head {layer}.{n}", 2 * layer, layer, (written.left @ written.right).mT)
        if net.config.mlp != "none":
            yield _Writer(f"mlp {layer}", 2 * layer + 1, layer, net.mlp[layer](x))


def _readers(net: Extracted, ids: Tensor, weights: Tensor, distance: int) -> Iterator[_Reader]:
    x0, outputs = net.x0[ids], centred(net.unembed[ids], weights)
    logits = outputs.mT @ (weights[:, None] * outputs)
    for layer in range(net.n_layer):
        for n, head in _heads(net, layer):
            name, stage = f"head {layer}.{n}", 2 * layer
            for side, words in _SIDES.items():
                table = _pattern(net, layer, head, side, bare_inputs(net, layer, x0), distance)
                # the constant coordinate is not part of the residual stream
                gram = _pattern_gram(head, side, distance)[net.config.qk_bias :, net.config.qk_bias :]
                yield _Reader(f"{name} {words}", stage, layer, table, gram)
            for source in ("layer", "first") if head.v0 is not None else ("layer",):
                ov = head.ov(source)
                left, right = outputs @ ov.left, ov.right[:, net.config.qk_bias :]
                table = _logits(net, left, partial(F.linear, weight=right))
                gram = right.mT @ (left.mT @ (weights[:, None] * left)) @ right
                if source == "layer":
                    yield _Reader(f"{name} value", stage, layer, table, gram)
                else:
                    yield _Reader(f"{name} first value", 0, 0, table, gram)
        if net.config.mlp != "none":
            # constants of an MLP shift whole rows of the table, which are centred
            mlp = replace(net.mlp[layer].canonical(), bias=None)
            reader = _logits(net, outputs, mlp)
            yield _Reader(f"mlp {layer}", 2 * layer + 1, layer, reader, mlp.gram("in", logits))
    final = _logits(net, outputs) if net.config.has_final_norm else lambda rows: outputs @ rows.mT
    yield _Reader("unembed", 2 * net.n_layer, net.n_layer, final, logits)


def _logits(
    net: Extracted, outputs: Tensor, part: Callable[[Tensor], Tensor] = lambda x: x
) -> Callable[[Tensor], Tensor]:
    """Function from rows of the stream to ``outputs`` times what a part makes of them, normed."""
    return lambda rows: outputs @ part(normed(net, rows)).mT


def _pattern(
    net: Extracted, layer: int, head: BilinearHead, side: Side, others: Tensor, distance: int
) -> Callable[[Tensor], Tensor]:
    """Function from the rows that one side reads to the pattern with the inputs ``others`` on the other side."""
    other: Side = "k" if side == "q" else "q"
    positions = {"q": 0, "k": -distance}
    branches = (1,) if head.q2 is None else (1, 2)
    tables = {b: head.token_table(lifted(net, others), b, other, positions[other]) for b in branches}

    def table(rows: Tensor) -> Tensor:
        read = lifted(net, normed(net, rows))
        scores = [tables[b] @ head.token_table(read, b, side, positions[side]).mT for b in branches]
        if head.attention == "softmax":
            return scores[0]
        if head.attention == "differential":
            return scores[0] - net.scalars.differential[layer] * scores[1]
        return scores[0] * scores[-1]

    return table


def _pattern_gram(head: BilinearHead, side: Side, distance: int) -> Tensor:
    if head.polynomial:
        return head.read_gram(side, distance)
    forms = [head.qk(1, distance)] if head.q2 is None else [head.qk(1, distance), head.qk(2, distance)]
    if side == "k":
        forms = [form.mT for form in forms]
    grams = [form.left @ (form.right @ form.right.mT) @ form.left.mT for form in forms]
    # with QK norm the scale of a branch says nothing
    return torch.stack([gram / (gram.diagonal().sum() or 1) for gram in grams]).sum(0)
