"""Tables over pairs of tokens: the largest entries of any matrix, or of one path through the network."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tnlm.interp.checks import check_count, check_tensor, check_view
from tnlm.interp.extraction import Extracted
from tnlm.interp.layers.bilinear import BilinearTensor
from tnlm.interp.layers.lowrank import LowRank
from tnlm.interp.ranking import Pair, as_table, rank_pairs, token_ids


def top_tokens(
    matrix: Tensor | LowRank,
    k: int = 10,
    *,
    tokens: Sequence[int] | Tensor | None = None,
    by: Literal["source", "all"] = "source",
    which: Literal["max", "min", "abs"] = "max",
    keep_self: bool = False,
) -> Any:
    """Largest entries of a token-by-token matrix ``[target, source]``, found block by block.

    Args:
        matrix: Dense or `LowRank`, square, one row and column per id of the vocabulary (output axis first).
        k: Entries per source, or in all with ``by="all"``.
        tokens: Ids that may appear, as source and as target; all by default. Leave padding rows out here.
        which: Largest, smallest, or largest magnitude first.
        keep_self: Keep a token's entry with itself.

    Returns:
        DataFrame with columns source, target, value where pandas is installed, else a list of `Pair`. Exact; costs
        ``2 V**2 r`` flop for rank ``r``.

    Raises:
        ValueError: A matrix that is not square, real and finite, or token ids out of range or repeated.
    """
    if isinstance(matrix, LowRank):
        like, shape = matrix.left, matrix.shape
    else:
        check_tensor("matrix", matrix, (None, None))
        like, shape = matrix, (matrix.shape[0], matrix.shape[1])
    if shape[0] != shape[1]:
        raise ValueError(f"matrix must be square, one row and column per token id, got {shape}")
    if like.is_complex():
        raise ValueError(f"matrix must be real to be ranked, got {like.dtype}")
    ids = token_ids(tokens, shape[0], like.device)

    def columns(block: Tensor) -> Tensor:
        if isinstance(matrix, LowRank):
            return matrix.left[ids] @ matrix.right[:, block]
        return matrix[ids][:, block]

    return as_table(Pair, *rank_pairs(columns, ids, k, by=by, which=which, keep_self=keep_self))


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
    """Largest contributions of a source token, alone in the residual stream, to a target's logit through one path.

    - ``path=n``, a head: ``W_U O V x0(t)``, what it moves when it attends with weight 1 (its own layer's circuit);
    - ``path="mlp"``: ``W_U D (L x0(t) * R x0(t))``;
    - ``path="direct"``: ``W_U x0(t)`` (``layer`` is ignored).

    ``x0`` is the normed embedding. Exact at layer 0 up to the factor of the final norm; in later layers it is what the
    part would do if it read the embedding alone. The factor by which later layers scale the write is included, that of
    the final norm is not. Padding tokens are left out.

    Returns:
        DataFrame (list of `Pair` without pandas) with columns source, target, value.

    Cost: ``2 V**2 d_head`` flop for a head, ``2 V**2 d_model`` for the others; a block of columns at a time.

    Raises:
        ValueError: No such layer, head or path, or a part that has no tensor.
    """
    check_view(net, "mlp", "attention", "unembed", "tokens", "x0")
    if path != "direct":
        check_count("layer", layer, 0, net.n_layer - 1)
    ids = token_ids(torch.arange(len(net.tokens)), net.config.d_vocab, net.unembed.device)
    columns = _path_columns(net, layer, path, ids)
    return as_table(Pair, *rank_pairs(columns, ids, top, by=by, which=which, keep_self=keep_self))


def _path_columns(
    net: Extracted, layer: int, path: int | Literal["mlp", "direct"], ids: Tensor
) -> Callable[[Tensor], Tensor]:
    """Function that computes the columns of a block of source tokens, one row per target in ``ids``."""
    x0, w_u = net.x0, net.unembed
    if isinstance(path, int):
        ov = net.attention[layer].head(path).ov("layer")
        inputs = torch.cat([torch.ones_like(x0[:, :1]), x0], 1) if net.config.qk_bias else x0
        matrix = LowRank(w_u @ ov.left * net.write_factors[layer], ov.right @ inputs.mT)
        return lambda block: matrix.left[ids] @ matrix.right[:, block]
    if path == "mlp":
        mlp, factor = net.mlp[layer], net.write_factors[layer]
        quadratic = BilinearTensor(mlp.w_l, mlp.w_r, mlp.w_d)
        return lambda block: factor * w_u[ids] @ quadratic(x0[block]).mT
    if path == "direct":
        return lambda block: net.embed_factor * w_u[ids] @ x0[block].mT
    raise ValueError(f'path must be a head number, "mlp" or "direct", got {path!r}')
