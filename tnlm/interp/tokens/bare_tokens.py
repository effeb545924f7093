"""Bare tokens, one embedding alone in the residual stream: what a layer reads of it, and what a head then writes."""

import torch
from jaxtyping import Float
from torch import Tensor

from tnlm.interp.extraction import Extracted
from tnlm.interp.layers.lowrank import LowRank


def arrival(net: Extracted, writer: int, reader: int) -> Float[Tensor, ""]:
    """Factor on what layer ``writer`` writes (-1: the embedding) when layer ``reader`` (n_layer: the end) reads it."""
    factor = net.unembed.new_ones(())
    for layer in range(writer + 1, min(reader + 1, net.n_layer)):
        factor = net.scalars.lambda0[layer] * factor
        if writer < 0:
            factor = factor + net.scalars.lambda1[layer]
    return factor


def normed(net: Extracted, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
    """Rows of the residual stream as a layer reads them: after its norm, in models with norms."""
    return x if net.config.norm == "none" else x / (x.square().mean(-1, keepdim=True) + net.config.norm_eps).sqrt()


def lifted(net: Extracted, x: Float[Tensor, "n d_model"]) -> Float[Tensor, "n d_in"]:
    """Inputs of a head: ``(1, x)`` in models with query and key biases, ``x`` in others."""
    return torch.cat([torch.ones_like(x[:, :1]), x], 1) if net.config.qk_bias else x


def bare_inputs(net: Extracted, layer: int, x0: Float[Tensor, "n d_model"]) -> Float[Tensor, "n d_model"]:
    """What a layer reads of a residual stream that holds ``x0``, the embedding of a token, alone."""
    return normed(net, arrival(net, -1, layer) * x0)


def copied_values(
    net: Extracted, layer: int, head: int, inputs: Float[Tensor, "n d_model"], x0: Float[Tensor, "n d_model"]
) -> LowRank:
    """What a head writes into the residual stream for each input that it reads with weight 1: ``(d_model, n)``.

    Args:
        inputs: Normed inputs of the layer at the positions of ``n`` tokens.
        x0: Embeddings of these tokens: block 0, whose value a value residual adds, reads the bare token.
    """
    circuit = net.attention[layer].head(head)
    paths = [(circuit.ov("layer"), inputs)]
    if circuit.v0 is not None:
        paths.append((circuit.ov("first"), bare_inputs(net, 0, x0)))
    values = [ov.right @ lifted(net, x).mT for ov, x in paths]
    return LowRank(torch.cat([ov.left for ov, _ in paths], 1), torch.cat(values))
