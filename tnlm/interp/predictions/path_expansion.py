"""One logit split by how often its paths pass through chosen branches of the network."""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from tnlm.checks import as_count, check_kind
from tnlm.interp.extraction import Extracted, extract
from tnlm.interp.predictions.polynomials import polynomial_coefficients
from tnlm.points import intervene, is_point, record
from tnlm.transformer import Transformer

_KINDS = {"hook_embed": "embed", "hook_attn_out": "attn", "hook_mlp_out": "mlp"}


class Paths(NamedTuple):
    """``values[m, n, ...]``: sum over all paths that pass ``m`` times through the first branch, ``n`` the second."""

    values: Float[Tensor, "..."]
    branches: tuple[str, ...]


@torch.no_grad()
def paths(
    model: "Transformer | Extracted",
    tokens: Int[Tensor, " seq"] | str,
    target: int | str,
    branches: Sequence[str],
    *,
    max_forwards: int = 1024,
) -> Paths:
    """Split the last position's logit by how often its paths pass through each branch.

    With the norms of the run held fixed, the logit is a polynomial in a factor that multiplies a branch: the part of
    degree 0 never reads the branch, the part of degree 2 reads it twice. The coefficients come from one forward at
    every combination of roots of unity and sum to the logit before the softcap. Exact given the norms of this run, in
    the model's precision (use float64).

    Args:
        tokens, target: The prompt and one token: text, or ids.
        branches: ``hook_embed`` (of the first block's input), ``blocks.l.hook_attn_out`` or ``blocks.l.hook_mlp_out``
            with the number of a layer for ``l``.

    Cost: ``prod(degree + 1)`` forwards; a branch's degree grows by a factor of 5 with every later attention and 2 with
    every later MLP, so choose branches of late layers, or few layers of small models.

    Symmetries: R E P Q QR V N L X H.

    Raises:
        ValueError: A layer is no polynomial, a name is no branch, or more than ``max_forwards`` are needed.
    """
    net = model if isinstance(model, Extracted) else extract(model)
    if reasons := net.config.why_not_polynomial("layers"):
        raise ValueError(f"paths need polynomial layers, but {', '.join(reasons)}; explain takes every kind")
    tokens, target = net.read_prompt("paths", tokens), net.read_token("target", target)
    check_kind("branches", branches, Sequence, "give a list of points")
    if len(set(branches)) != len(branches):
        raise ValueError(f"branches must differ, got {list(branches)}")
    degrees = [_degree(net, branch) for branch in branches]
    forwards = prod(degree + 1 for degree in degrees)
    if forwards > as_count("max_forwards", max_forwards, 1):
        raise ValueError(
            f"branches of degrees {degrees} need {forwards:,} forwards, more than max_forwards={max_forwards:,}; "
            "choose fewer branches, later layers, or raise max_forwards"
        )
    run = record(net.model, tokens[None], [n for n, _ in net.model.named_modules() if is_point(n) and "scale" in n])
    scales = {name: _constant(value) for name, value in run.items() if name != "logits"}
    read = net.unembed[target]
    if "ln_final.hook_scale" in run:
        read = read / net.cast(run["ln_final.hook_scale"])[0, -1]
    wide = torch.complex128 if net.unembed.dtype == torch.float64 else torch.complex64

    def logit(factors: Complex[Tensor, " branches"]) -> Complex[Tensor, ""]:
        edits = {branch: _scaled(factor) for branch, factor in zip(branches, factors.to(wide), strict=True)}
        x0 = net.model.embedding(tokens[None]).to(wide)  # all of it: later values are mixed with those of block 0
        if "hook_embed" in edits:
            x0 = edits.pop("hook_embed")(x0)
        with intervene(net.model, scales | edits):
            return net.model.run(x0)[0, -1].to(wide) @ read.to(wide)

    return Paths(polynomial_coefficients(logit, degrees, dtype=wide).real, tuple(branches))


def _degree(net: Extracted, branch: str) -> int:
    """Degree of the final residual in a factor on the branch, norms held."""
    kind = _KINDS.get(branch.rpartition(".")[2])
    if kind is None or (kind == "embed") != (branch == "hook_embed"):
        raise ValueError(f"branches are hook_embed, blocks.l.hook_attn_out and blocks.l.hook_mlp_out, got {branch!r}")
    attention = 1 if net.config.attention == "none" else 5
    mlp = 1 if net.config.mlp == "none" else 2
    if kind == "embed":
        return (attention * mlp) ** net.n_layer
    later = net.n_layer - 1 - int(branch.split(".")[1])
    return (attention * mlp) ** later * (mlp if kind == "attn" else 1)


def _constant(value: Tensor) -> Callable[[Tensor], Tensor]:
    """Edit that puts ``value`` in place of what comes, whose dtype is complex after a scaled branch."""
    return lambda now: value.to(now.dtype)


def _scaled(factor: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor
