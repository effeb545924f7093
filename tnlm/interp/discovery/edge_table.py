"""Connections between components that write and read the residual stream, from the weights, with an exact null."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tnlm.interp.checks import check_bytes, check_choice, check_number, check_symmetric, check_tensor, check_view
from tnlm.interp.layers.heads import BilinearHead
from tnlm.interp.ranking import as_table


class Edge(NamedTuple):
    """Overlap of one writer and one reader.

    ``value`` is 1 on average over random relative orientations, and ``z`` is its distance from 1 in standard
    deviations.
    """

    writer: str
    reader: str
    value: float
    z: float


class _Component(NamedTuple):
    name: str
    stage: int  # order in which the residual stream meets it
    gram: Tensor


def edges(
    net: Any,
    null: Literal["haar"] = "haar",
    *,
    distance: int = 0,
    metric: Literal["identity", "unembed"] = "identity",
    max_bytes: int = 2**30,
) -> Any:
    """Overlap of every writer with every later reader of the residual stream, relative to chance.

    ``d tr(W R) / (tr W tr R)`` of the writer's Gram ``W`` (MLP: ``G_out``; head: its OV circuits; embedding) and the
    reader's ``R`` (MLP: ``G_in``; head: value, query and key side; unembedding). For a Haar-random relative orientation
    the mean is exactly 1 and the variance is known, which gives ``z``. Exact statements about weights, not about data:
    no activations are used, and norms and the scale of each component cancel.

    Args:
        net: Has ``config``, ``embed``, ``unembed``, ``mlp[layer]``, ``attention[layer].head(n)``, as `extract` gives.
        distance: Query position minus key position at which patterns are read.
        metric: Weight of the output directions of an MLP that reads: all equal, or as the unembedding reads them.

    Returns:
        DataFrame (list of `Edge` without pandas) with columns writer, reader, value, z, strongest first. Heads whose
        pattern is not polynomial are read through their score forms.

    Raises:
        ValueError: An MLP that is no tensor (its own reason), or writers over ``max_bytes``.
    """
    check_choice("null", null, ("haar",))
    check_choice("metric", metric, ("identity", "unembed"))
    check_number("distance", distance)
    check_view(net, "config", "embed", "unembed", "mlp", "attention")
    d = net.unembed.shape[1]
    count = 1 + net.config.n_layer * (1 + net.config.n_head)
    check_bytes("the Grams of all writers", (count, d, d), net.unembed.dtype, max_bytes, "use a smaller model")
    writers = list(_writers(net))
    stacked = torch.stack([w.gram for w in writers]).reshape(len(writers), -1)
    rows: list[Edge] = []
    for reader in _readers(net, distance, metric):
        values, z = overlap(stacked.reshape(-1, d, d), reader.gram)
        earlier = (n for n, w in enumerate(writers) if w.stage < reader.stage)
        rows += [Edge(writers[n].name, reader.name, float(values[n]), float(z[n])) for n in earlier]
    rows.sort(key=lambda edge: -edge.value)
    return as_table(Edge, *zip(*rows))


def overlap(writers: Float[Tensor, "n d d"], reader: Float[Tensor, "d d"]) -> tuple[Tensor, Tensor]:
    """``d tr(W R) / (tr W tr R)`` for each writer Gram, and its z-score under a Haar-random rotation of one.

    A Gram that is zero or isotropic has no orientation: z is 0 there (and the value 1 for zero).
    """
    d = reader.shape[-1]
    traces, trace = writers.diagonal(dim1=1, dim2=2).sum(-1).double(), reader.diagonal().sum().double()
    scale = torch.where(traces * trace > 0, traces * trace, 1)
    products = torch.einsum("nij,ij->n", writers, reader).double()
    values = torch.where(traces * trace > 0, d * products / scale, 1)
    spread_w = (writers.square().sum((1, 2)).double() - traces.square() / d).clamp_min(0)
    spread_r = (reader.square().sum().double() - trace.square() / d).clamp_min(0)
    deviation = d / scale * (2 * spread_w * spread_r / (max(d - 1, 1) * (d + 2))).sqrt()
    return values, torch.where(deviation > 0, (values - 1) / torch.where(deviation > 0, deviation, 1), 0)


def alignment(direction: Float[Tensor, "*batch d"], gram: Float[Tensor, "d d"]) -> Float[Tensor, "*batch"]:
    """Share of a direction that a reader with Gram ``R`` reads, ``d w^T R w / (|w|**2 tr R)``: 1 for a random one."""
    check_tensor("gram", gram, (None, None))
    check_tensor("direction", direction, (..., gram.shape[0]), gram)
    check_symmetric("gram", gram)
    trace, length2 = gram.diagonal().sum(), direction.square().sum(-1)
    if not float(trace) > 0 or bool((length2 == 0).any()):
        raise ValueError("alignment needs a non-zero direction and a non-zero positive Gram")
    return gram.shape[0] * ((direction @ gram) * direction).sum(-1) / (length2 * trace)


def _heads(net: Any, layer: int) -> Iterator[tuple[int, BilinearHead]]:
    if net.config.attention != "none":
        for n in range(net.config.n_head):
            yield n, net.attention[layer].head(n)


def _writers(net: Any) -> Iterator[_Component]:
    yield _Component("embed", -1, net.embed.mT @ net.embed)
    for layer in range(net.config.n_layer):
        for n, head in _heads(net, layer):
            circuits = [head.ov()] + ([head.ov("first")] if head.v0 is not None else [])
            gram = torch.stack([c.left @ (c.right @ c.right.mT) @ c.left.mT for c in circuits]).sum(0)
            yield _Component(f"head {layer}.{n}", 2 * layer, gram)
        if net.config.mlp != "none":
            yield _Component(f"mlp {layer}", 2 * layer + 1, net.mlp[layer].gram("out"))


def _readers(net: Any, distance: int, metric: str) -> Iterator[_Component]:
    logits = net.unembed.mT @ net.unembed
    for layer in range(net.config.n_layer):
        for n, head in _heads(net, layer):
            circuit = head.ov()
            sides = {
                "value": circuit.right.mT @ (circuit.left.mT @ circuit.left) @ circuit.right,
                "query": _pattern_gram(head, "q", distance),
                "key": _pattern_gram(head, "k", distance),
            }
            # a head with biases reads (1, x): the constant coordinate is not part of the residual stream
            start = head.d_in - net.unembed.shape[1]
            for name, gram in sides.items():
                yield _Component(f"head {layer}.{n} {name}", 2 * layer, gram[start:, start:])
        if net.config.mlp != "none":
            gram = net.mlp[layer].gram("in", logits if metric == "unembed" else None)
            yield _Component(f"mlp {layer}", 2 * layer + 1, gram)
    yield _Component("unembed", 2 * net.config.n_layer, logits)


def _pattern_gram(head: BilinearHead, side: Literal["q", "k"], distance: int) -> Tensor:
    if head.polynomial:
        return head.read_gram(side, distance)
    forms = [head.qk(1, distance)] if head.q2 is None else [head.qk(1, distance), head.qk(2, distance)]
    if side == "k":
        forms = [form.mT for form in forms]
    return torch.stack([form.left @ (form.right @ form.right.mT) @ form.left.mT for form in forms]).sum(0)
