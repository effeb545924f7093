"""Exact contributions of sets of paths, by gates on chosen branches of the network."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from tnlm.interp.extraction import Extracted, extract
from tnlm.interp.predictions.polynomials import gate_coefficients
from tnlm.points import intervene, is_point, record
from tnlm.transformer import Transformer

_BRANCHES = {"hook_embed": "embed", "hook_attn_out": "attn", "hook_mlp_out": "mlp"}


class Paths(NamedTuple):
    """``values[m, n, ...]``: what paths add that pass ``m`` times through the first gate, ``n`` the second."""

    values: Float[Tensor, "..."]
    gates: tuple[str, ...]


@torch.no_grad()
def paths(
    model: "Transformer | Extracted",
    tokens: Int[Tensor, " seq"],
    target: int,
    gates: Sequence[str],
    *,
    max_forwards: int = 1024,
) -> Paths:
    """Split the last position's logit by how often its paths pass through each gated branch.

    With the norms of the run held, the logit is a polynomial in a factor put on a branch: its degree-0 part never reads
    the branch, degree 2 reads it twice. Coefficients come from a forward at every combination of roots of unity and sum
    to the logit before the softcap. Exact given the norms of this run, in the model's precision (use float64).

    Args:
        gates: ``hook_embed`` (of the first block's input), ``blocks.l.hook_attn_out`` or ``blocks.l.hook_mlp_out``.

    Cost: ``prod(degree + 1)`` forwards; a branch's degree grows by 5 per later attention and 2 per later MLP, so gate
    late layers, or few layers of small models.

    Raises:
        ValueError: A layer is no polynomial, a name is no branch, or more than ``max_forwards`` are needed.
    """
    net = model if isinstance(model, Extracted) else extract(model)
    if not net.config.layers_polynomial:
        raise ValueError(
            f"paths need polynomial layers, got mlp={net.config.mlp!r}, attention={net.config.attention!r}; "
            "explain takes every kind"
        )
    net.check_prompt("paths", tokens, target=target)
    if len(set(gates)) != len(gates):
        raise ValueError(f"gates must differ, got {list(gates)}")
    degrees = [_degree(net, gate) for gate in gates]
    forwards = 1
    for degree in degrees:
        forwards *= degree + 1
    if forwards > max_forwards:
        raise ValueError(
            f"gates of degrees {degrees} need {forwards:,} forwards, more than max_forwards={max_forwards:,}; "
            "gate fewer branches, later layers, or raise max_forwards"
        )
    run = record(net.model, tokens[None], [n for n, _ in net.model.named_modules() if is_point(n) and "scale" in n])
    scales = {name: _constant(value) for name, value in run.items() if name != "logits"}
    read = net.unembed[target]
    if "ln_final.hook_scale" in run:
        read = read / net.cast(run["ln_final.hook_scale"])[0, -1]
    wide = torch.complex128 if net.unembed.dtype == torch.float64 else torch.complex64

    def logit(g: Complex[Tensor, " gates"]) -> Complex[Tensor, ""]:
        edits = {gate: _scaled(factor) for gate, factor in zip(gates, g.to(wide), strict=True)}
        x0 = net.model.embedding(tokens[None])
        with intervene(net.model, {**scales, **{k: v for k, v in edits.items() if k != "hook_embed"}}):
            x0 = edits["hook_embed"](x0) if "hook_embed" in edits else x0
            return net.model.run(x0)[0, -1].to(wide) @ read.to(wide)

    return Paths(gate_coefficients(logit, degrees, dtype=wide).real, tuple(gates))


def _degree(net: Extracted, gate: str) -> int:
    """Degree of the final residual in a factor on the branch, norms held."""
    branch = _BRANCHES.get(gate.rpartition(".")[2])
    if branch is None or (branch == "embed") != (gate == "hook_embed"):
        raise ValueError(f"gates are hook_embed, blocks.l.hook_attn_out and blocks.l.hook_mlp_out, got {gate!r}")
    attention = 1 if net.config.attention == "none" else 5
    mlp = 1 if net.config.mlp == "none" else 2
    if branch == "embed":
        return (attention * mlp) ** net.n_layer
    later = net.n_layer - 1 - int(gate.split(".")[1])
    return (attention * mlp) ** later * (mlp if branch == "attn" else 1)


def _constant(value: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda now: value.to(now.dtype)  # which is complex above a gate


def _scaled(factor: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor
