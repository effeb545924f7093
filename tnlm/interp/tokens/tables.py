"""Token-to-token tables of one path through the network, ranked block by block."""

from typing import Any, Literal

import torch

from tnlm.interp.checks import check_count, check_view
from tnlm.interp.extraction import Extracted
from tnlm.interp.layers.lowrank import LowRank
from tnlm.interp.tokens.ranking import Pair, rank_pairs, table, token_ids


@torch.no_grad()
def path_table(
    net: Extracted,
    layer: int,
    path: int | Literal["mlp", "direct"],
    top: int = 10,
    *,
    by: Literal["source", "all"] = "source",
    which: Literal["max", "min", "abs"] = "max",
    keep_self: bool = False,
) -> Any:
    """What a bare source token adds to a target's logit through one path, padding rows left out.

    - a head ``n``: ``W_U O V x0(t)``, what it moves when it attends with weight 1 (its own layer's circuit);
    - ``"mlp"``: ``W_U D (L x0(t) * R x0(t))``;
    - ``"direct"``: ``W_U x0(t)`` (``layer`` is ignored).

    ``x0`` is the normed embedding: exact at layer 0 up to the factor of the final norm, elsewhere what the part would
    do on bare tokens. The factor with which later layers scale the write is included, that of the final norm is not.

    Returns:
        DataFrame (list of :class:`Pair` without pandas) with columns source, target, value.

    Cost: ``2 V**2 d_head`` flop for a head, ``2 V**2 d_model`` for the others; a block of columns at a time.

    Raises:
        ValueError: No such layer, head or path, or a part that has no tensor.
    """
    check_view(net, "mlp", "attention", "unembed", "tokens", "x0")
    if path != "direct":
        check_count("layer", layer, 0, net.n_layer - 1)
    ids = token_ids(torch.arange(len(net.tokens)), net.config.d_vocab, net.unembed.device)
    x0, w_u = net.x0, net.unembed
    if isinstance(path, int):
        ov = net.attention[layer].head(path).ov("layer")
        inputs = torch.cat([torch.ones_like(x0[:, :1]), x0], 1) if net.config.qk_bias else x0
        matrix = LowRank(w_u @ ov.left * net.write_factors[layer], ov.right @ inputs.mT)
        ranked = rank_pairs(
            lambda block: matrix.left[ids] @ matrix.right[:, block], ids, top, by=by, which=which, keep_self=keep_self
        )
        return table(Pair, *ranked)
    if path == "mlp":
        mlp, factor = net.mlp[layer], net.write_factors[layer]
        quadratic = type(mlp)(mlp.w_l, mlp.w_r, mlp.w_d)

        def columns(block: torch.Tensor) -> torch.Tensor:
            return factor * w_u[ids] @ quadratic(x0[block]).mT
    elif path == "direct":

        def columns(block: torch.Tensor) -> torch.Tensor:
            return net.embed_factor * w_u[ids] @ x0[block].mT
    else:
        raise ValueError(f'path must be a head number, "mlp" or "direct", got {path!r}')
    return table(Pair, *rank_pairs(columns, ids, top, by=by, which=which, keep_self=keep_self))
