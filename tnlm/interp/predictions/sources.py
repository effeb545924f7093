"""One logit as a form in what wrote into the residual stream: pairs of writers, or their Shapley shares."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tnlm.interp.checks import check_choice, check_count
from tnlm.interp.extraction import Extracted, extract
from tnlm.interp.predictions.attribution import layer_pairs
from tnlm.points import record
from tnlm.transformer import Transformer


class Attribution(NamedTuple):
    """Shares of one logit; ``values.sum()`` is the logit before the softcap, given the norms of this run.

    ``names[0]`` is the constant: biases of the expanded MLPs. ``pairs``: ``values`` (p, p) is symmetric, and a writer's
    direct path to the logit stands half in its row and half in its column of the constant. ``shapley``: (p,).
    """

    values: Float[Tensor, "..."]
    names: tuple[str, ...]


@torch.no_grad()
def attribute(
    model: "Transformer | Extracted",
    tokens: Int[Tensor, " seq"],
    target: int,
    method: Literal["pairs", "shapley"] = "pairs",
    *,
    layers: Sequence[int] | None = None,
) -> Attribution:
    """Split the last position's logit among writers: the embedding, every head, every MLP.

    Each MLP of ``layers`` is written out as the quadratic form of its input, whose parts are the earlier writers, so
    ``logit = direct + sum_pq f_p . Q f_q``; an MLP that is not expanded is a writer with a direct path only. Shapley
    shares of that form: a pair's interaction is shared equally (baseline: nothing written). Exact given the norms of
    this run.

    Args:
        layers: MLPs to expand; all by default, none for models whose MLPs are no polynomials.

    Raises:
        ValueError: An id or a layer out of range, or an MLP to expand that is no polynomial.
    """
    net = model if isinstance(model, Extracted) else extract(model)
    check_choice("method", method, ("pairs", "shapley"))
    _check(net, tokens, target, layers)
    expanded = set(range(net.n_layer) if layers is None and net.config.mlp_is_form else layers or ())
    names, points = ["constant", "embed"], ["hook_embed", *_norm_points(net)]
    for l in range(net.n_layer):
        if net.config.attention != "none":
            names += [f"L{l}.H{n}" for n in range(net.config.n_head)]
            points.append(f"blocks.{l}.attn.hook_z")
        if net.config.mlp != "none":
            names.append(f"L{l}.MLP")
            points.append(f"blocks.{l}.hook_mlp_out")
    run = record(net.model, tokens[None], points)
    one = net.unembed.new_ones(1)
    read = net.unembed[target] / net.cast(run.get("ln_final.hook_scale", one[None, None]))[0, -1]

    parts = net.unembed.new_zeros(len(names), net.config.d_model)  # in the residual as it stands at each layer
    values = parts.new_zeros(len(names), len(names))
    x0 = net.cast(run["hook_embed"])[0, -1]
    parts[1] = x0
    for l in range(net.n_layer):
        parts = parts * net.scalars.lambda0[l]
        parts[1] += net.scalars.lambda1[l] * x0
        factor = net.write_factors[l]
        if net.config.attention != "none":
            start = names.index(f"L{l}.H0")
            parts[start : start + net.config.n_head] = _head_writes(net, l, run)
        if net.config.mlp != "none":
            at = names.index(f"L{l}.MLP")
            if l in expanded:
                inverse = 1 / net.cast(run.get(f"blocks.{l}.ln2.hook_scale", one[None, None]))[0, -1]
                values += factor * layer_pairs(net.mlp[l], read, parts * inverse)
                if net.mlp[l].bias is not None:
                    values[0, 0] += factor * (read @ net.mlp[l].bias)
            parts[at] = net.cast(run[f"blocks.{l}.hook_mlp_out"])[0, -1]
    direct = parts @ read
    for l in expanded:
        direct[names.index(f"L{l}.MLP")] = 0
    values[0] += direct / 2
    values[:, 0] += direct / 2
    return Attribution(values if method == "pairs" else _shapley(values), tuple(names))


def _shapley(values: Tensor) -> Tensor:
    """Shares of a form on ``(1, parts)``: the constant is always there: it keeps its entry, gives up its pairs."""
    shares = values.sum(1) + values[:, 0]
    shares[0] = values[0, 0]
    return shares


def _head_writes(net: Extracted, l: int, run: dict[str, Tensor]) -> Float[Tensor, "n_head d_model"]:
    z = net.cast(run[f"blocks.{l}.attn.hook_z"])[0, -1]  # [n_head, d_head]
    w_o = net.cast(net.model.blocks[l].attn.w_o).unflatten(1, z.shape)
    return torch.einsum("mnd,nd->nm", w_o, z)


def _norm_points(net: Extracted) -> list[str]:
    if net.config.norm == "none":
        return []
    layers = range(net.n_layer) if net.config.mlp != "none" else ()
    final = ["ln_final.hook_scale"] if net.config.has_final_norm else []
    return [*final, *(f"blocks.{l}.ln2.hook_scale" for l in layers)]


def _check(net: Extracted, tokens: Tensor, target: int, layers: Sequence[int] | None) -> None:
    net.check_prompt("attribute", tokens, target=target)
    for l in layers or ():
        check_count("every one of layers", l, 0, net.n_layer - 1)
        net.mlp[l]
