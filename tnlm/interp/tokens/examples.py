"""Places in text where a layer's output along a direction is largest, beside the bounds from the weights."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tnlm.checks import check_values
from tnlm.interp.checks import check_computed, check_count, check_tensor
from tnlm.interp.extraction import Extracted, extract
from tnlm.interp.layers.statistics import Bounds, bounds
from tnlm.output.progress import track
from tnlm.points import record
from tnlm.transformer import Transformer


class Example(NamedTuple):
    """One place in text; ``tokens`` are the context up to and with it."""

    value: float
    row: int
    position: int
    tokens: tuple[int, ...]


class Examples(NamedTuple):
    """Places with the largest and smallest values, and the certified range over all inputs of the layer."""

    high: list[Example]
    low: list[Example]
    bounds: Bounds
    usage: tuple[float, float]
    """Largest value in the text over the largest possible one, and the same for the smallest."""


@torch.no_grad()
def top_examples(
    net: "Extracted | Transformer",
    tokens: Int[Tensor, "rows seq"],
    layer: int,
    u: Float[Tensor, " d_model"],
    k: int = 10,
    *,
    context: int = 16,
    batch_size: int = 8,
    progress: bool = False,
) -> Examples:
    """Places in text where ``u . mlp_layer(x)`` is largest and smallest, bias included; equal contexts appear once.

    Streaming: memory does not grow with the rows. The bounds are of the layer's write for inputs of squared norm up to
    ``d_model`` (what an RMS norm gives); their maximiser may be far from anything text produces. Norm-free models have
    no such bound: their range is that of ``|x|`` in the text.

    Symmetries: R E P U Q QR V N L H.

    Raises:
        ValueError: Shapes that do not fit, a layer without tensor, or ids out of range.
    """
    net = net if isinstance(net, Extracted) else extract(net)
    check_values("tokens", tokens)
    if tokens.ndim != 2 or not tokens.numel():
        raise ValueError(f"tokens must be (rows, seq) with at least one token, got shape {tuple(tokens.shape)}")
    net.model.check_tokens(tokens, limit=net.config.d_vocab_used)
    for name, count in (("k", k), ("context", context), ("batch_size", batch_size)):
        check_count(name, count, 1)
    check_count("layer", layer, 0, net.n_layer - 1)
    form = net.mlp[layer]
    check_tensor("u", u, (form.d_out,), form.w_l)
    point = f"blocks.{layer}.ln2.hook_normalized"
    found: dict[bool, dict[tuple[int, ...], Example]] = {True: {}, False: {}}
    radius2 = 0.0
    for start, rows in enumerate(track(tokens.split(batch_size), "reading text", enabled=progress)):
        x = net.cast(record(net.model, rows, [point])[point])
        radius2 = max(radius2, float(x.square().sum(-1).max()))
        values = form(x) @ u
        # NaN would be ranked as the largest
        check_computed("the form of the text", values)
        for largest in (True, False):
            top = values.flatten().topk(min(4 * k, values.numel()), largest=largest)
            for value, index in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                row, position = divmod(index, values.shape[1])
                seen = tuple(rows[row, max(0, position + 1 - context) : position + 1].tolist())
                example = Example(value, start * batch_size + row, position, seen)
                known = found[largest].get(seen)
                if known is None or (value > known.value) == largest:
                    found[largest][seen] = example
            found[largest] = dict(_best(found[largest], k, largest))
    limits = bounds(form, u, radius2=float(form.d_in) if net.config.norm == "rms" else radius2, domain="ball")
    high, low = ([e for _, e in _best(found[largest], k, largest)] for largest in (True, False))
    return Examples(high, low, limits, (_share(high[0].value, limits.high), _share(low[0].value, limits.low)))


def _best(found: dict[tuple[int, ...], Example], k: int, largest: bool) -> list[tuple[tuple[int, ...], Example]]:
    return sorted(found.items(), key=lambda item: -item[1].value if largest else item[1].value)[:k]


def _share(value: float, limit: Tensor | float) -> float:
    return value / float(limit) if float(limit) else math.nan
