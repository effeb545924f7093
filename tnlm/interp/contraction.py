"""The logits of a run contracted from the extracted tensors, with the inverse norms of the run as inputs."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tnlm.attention import causal_mask
from tnlm.rotary import rotary_tables, rotate

if TYPE_CHECKING:
    from tnlm.interp.extraction import Extracted


def contract(
    net: "Extracted", tokens: Int[Tensor, "batch seq"], inverse_norms: dict[str, Tensor]
) -> Float[Tensor, "batch seq d_vocab"]:
    """Logits before the softcap from the tensors of ``net`` alone.

    Args:
        inverse_norms: By point, as ``net.inverse_norms(tokens)`` gives: ``(1, 1 / scale)``; 1 where a point is missing.

    Raises:
        ValueError: MLP or attention is no polynomial.
    """

    def normed(x: Tensor, norm: str) -> Tensor:
        found = inverse_norms.get(f"{norm}.hook_scale")
        return x if found is None else x * found[..., 1:]

    x0 = normed(net.embed[tokens.long()], "ln_embed")
    x, first = x0, x0
    for layer in range(net.n_layer):
        x = net.scalars.lambda0[layer] * x + net.scalars.lambda1[layer] * x0
        if net.config.attention != "none":
            read = normed(x, f"blocks.{layer}.ln1")
            first = read if layer == 0 else first
            x = x + _attention(net, layer, read, first, inverse_norms)
        if net.config.mlp != "none":
            x = x + net.mlp[layer](normed(x, f"blocks.{layer}.ln2"))
    return normed(x, "ln_final") @ net.unembed.mT


def _attention(
    net: "Extracted", layer: int, x: Tensor, first: Tensor, inverse_norms: dict[str, Tensor]
) -> Float[Tensor, "batch seq d_model"]:
    """Sum over heads of ``O pattern v``; ``x`` and ``first`` are the normed inputs of this layer and of layer 0."""
    config, heads = net.config, net.attention[layer]
    if reasons := config.why_not_polynomial("attention"):
        raise ValueError(f"{', '.join(reasons)}, so its pattern has no tensor")
    seq, d_qk = x.shape[1], heads.module.d_qk
    dtype = getattr(torch, config.rotary_table_dtype)
    tables = rotary_tables(seq, d_qk, base=config.rotary_base, dtype=dtype, device=x.device)
    keep = causal_mask(seq, seq, device=x.device)
    out = torch.zeros_like(x)
    if config.qk_bias:
        x, first = (torch.cat([torch.ones_like(t[..., :1]), t], dim=-1) for t in (x, first))
    for n in range(len(heads)):
        head = heads.head(n)
        scores = []
        for branch in heads.module.branches:
            q, k = (x @ getattr(head, f"{side}{branch}").mT for side in ("q", "k"))
            if config.qk_norm:
                suffix = "" if branch == "1" else branch
                q = q * inverse_norms[f"blocks.{layer}.attn.q{suffix}_norm.hook_scale"][:, :, 1 + n, None]
                k = k * inverse_norms[f"blocks.{layer}.attn.k{suffix}_norm.hook_scale"][:, :, 1 + n, None]
            q, k = (rotate(t[:, :, None], *tables)[:, :, 0] for t in (q, k))
            scores.append(q @ k.mT / d_qk)
        pattern = (scores[0] * scores[-1]).masked_fill(~keep, 0)
        v = (1 - head.value_mix) * (x @ head.v.mT)
        if head.v0 is not None:
            v = v + head.value_mix * (first @ head.v0.mT)
        out = out + pattern @ v @ head.o.mT
    return out
