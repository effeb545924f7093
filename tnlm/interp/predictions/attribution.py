"""One logit as a sum over pairs of components that wrote into the residual stream, or over single components."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tnlm.checks import check_kind
from tnlm.interp.checks import check_choice, check_count
from tnlm.interp.extraction import Extracted, extract
from tnlm.interp.layers.input_shares import layer_pairs
from tnlm.points import record
from tnlm.transformer import Transformer


class Attribution(NamedTuple):
    """Contributions to one logit; ``values.sum()`` is the logit before the softcap, given the norms of this run.

    ``names`` are the components; ``names[0]``, the constant, holds the biases of the expanded MLPs and, on normed
    inputs, the traces of their forms, which no component owns. With ``method="pairs"`` ``values`` is a symmetric (p, p)
    matrix, and a component's direct path to the logit is split equally between its two entries with the constant. With
    ``method="shapley"`` it is (p,). A model without norms needs nothing of a run.
    """

    values: Float[Tensor, "..."]
    names: tuple[str, ...]


@torch.no_grad()
def attribute(
    model: "Transformer | Extracted",
    tokens: Int[Tensor, " seq"] | str,
    target: int | str,
    method: Literal["pairs", "shapley"] = "pairs",
    *,
    layers: Sequence[int] | None = None,
) -> Attribution:
    """Split the last position's logit among the components that write it: the embedding, every head, every MLP.

    Each MLP of ``layers`` is expanded as the quadratic form of its input, whose parts are the writes of the components
    before it, so ``logit = direct + sum_pq f_p . Q f_q``. An MLP that is not expanded is a component with a direct path
    only. Exact given the norms of this run, if the model has any.

    Symmetries: R E P Q QR V L X H S.

    Args:
        tokens, target: The prompt and one token: text, or ids.
        method: ``pairs`` gives every term of that sum, ``shapley`` the Shapley values of the components (baseline:
            nothing written), where the two components of a pair share its interaction equally.
        layers: MLPs to expand; by default all, or none for models whose MLPs are no polynomials.

    Raises:
        ValueError: An id or a layer out of range, or an MLP to expand that is no polynomial.
    """
    net = model if isinstance(model, Extracted) else extract(model)
    check_choice("method", method, ("pairs", "shapley"))
    tokens, target = net.read_prompt("attribute", tokens), net.read_token("target", target)
    _check_layers(net, layers)
    expanded = set(range(net.n_layer) if layers is None and net.config.mlp_is_form else layers or ())
    names, points = _components(net)
    run = record(net.model, tokens[None], [*points, *_norm_points(net)])
    read = net.unembed[target] / _scale(net, run, "ln_final.hook_scale")

    parts = net.unembed.new_zeros(len(names), net.config.d_model)  # in the residual as it stands at each layer
    values = parts.new_zeros(len(names), len(names))
    x0 = net.cast(run["hook_embed"])[0, -1]
    parts[1] = x0
    for layer in range(net.n_layer):
        parts = parts * net.scalars.lambda0[layer]
        parts[1] += net.scalars.lambda1[layer] * x0
        factor = net.write_factors[layer]
        if net.config.attention != "none":
            start = names.index(f"L{layer}.H0")
            parts[start : start + net.config.n_head] = _head_writes(net, layer, run)
        if net.config.mlp != "none":
            if layer in expanded:
                mlp, x = net.mlp[layer], parts / _scale(net, run, f"blocks.{layer}.ln2.hook_scale")
                values += factor * layer_pairs(mlp.canonical(), read, x)
                constant = mlp.shift() * x.sum(0).square().sum() + (0 if mlp.bias is None else mlp.bias)
                values[0, 0] += factor * (read @ constant)
            parts[names.index(f"L{layer}.MLP")] = net.cast(run[f"blocks.{layer}.hook_mlp_out"])[0, -1]
    direct = parts @ read
    for layer in expanded:
        direct[names.index(f"L{layer}.MLP")] = 0
    values[0] += direct / 2
    values[:, 0] += direct / 2
    return Attribution(values if method == "pairs" else _shapley(values), tuple(names))


def _components(net: Extracted) -> tuple[list[str], list[str]]:
    """Names of the components, in the order in which they write, and the points that record their writes."""
    names, points = ["constant", "embed"], ["hook_embed"]
    for layer in range(net.n_layer):
        if net.config.attention != "none":
            names += [f"L{layer}.H{n}" for n in range(net.config.n_head)]
            points.append(f"blocks.{layer}.attn.hook_z")
        if net.config.mlp != "none":
            names.append(f"L{layer}.MLP")
            points.append(f"blocks.{layer}.hook_mlp_out")
    return names, points


def _scale(net: Extracted, run: dict[str, Tensor], point: str) -> Tensor:
    """The norm's scale at the last position, 1 where the model has no such norm."""
    return net.cast(run[point])[0, -1] if point in run else net.unembed.new_ones(1)


def _shapley(values: Tensor) -> Tensor:
    """Shapley values from the matrix of pairs.

    The constant is always present: it keeps its own entry, and its pair terms are added to the other components.
    """
    shares = values.sum(1) + values[:, 0]
    shares[0] = values[0, 0]
    return shares


def _head_writes(net: Extracted, layer: int, run: dict[str, Tensor]) -> Float[Tensor, "n_head d_model"]:
    z = net.cast(run[f"blocks.{layer}.attn.hook_z"])[0, -1]  # [n_head, d_head]
    w_o = net.cast(net.model.blocks[layer].attn.w_o).unflatten(1, z.shape)
    return torch.einsum("mnd,nd->nm", w_o, z)


def _norm_points(net: Extracted) -> list[str]:
    if net.config.norm == "none":
        return []
    layers = range(net.n_layer) if net.config.mlp != "none" else ()
    final = ["ln_final.hook_scale"] if net.config.has_final_norm else []
    return [*final, *(f"blocks.{layer}.ln2.hook_scale" for layer in layers)]


def _check_layers(net: Extracted, layers: Sequence[int] | None) -> None:
    if layers is not None:
        check_kind("layers", layers, Sequence, "give a list of layers, or None for all")
    for layer in layers or ():
        check_count("every one of layers", layer, 0, net.n_layer - 1)
        net.mlp[layer]  # raises with the reason when the MLP has no tensor
