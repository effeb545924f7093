"""Tables over pairs of tokens: the largest entries of any matrix, or of one path through the network."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Int, Real
from torch import Tensor

from tnlm.checks import check_values
from tnlm.interp.checks import check_count, check_tensor, check_view
from tnlm.interp.extraction import Extracted
from tnlm.interp.layers.bilinear import BilinearTensor
from tnlm.interp.layers.lowrank import LowRank
from tnlm.interp.ranking import Pair, as_table, rank_pairs, token_ids
from tnlm.interp.tokens.bare_tokens import bare_inputs, copied_values
from tnlm.interp.vocabulary import PARALLEL, parallel_groups


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
        check_values("matrix", matrix)
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
    weights: Real[Tensor, " d_vocab_used"] | None = None,
) -> Any:
    """Largest contributions of a source token, alone in the residual stream, to a target's centred logit by one path.

    - ``path=n``, a head: ``W_U O V x(t)``, what it moves when it attends with weight 1, with a value residual the sum
      of both values: its own, and that of block 0;
    - ``path="mlp"``: ``W_U D (L x(t) * R x(t))``, on normed inputs of the traceless form;
    - ``path="direct"``: ``W_U x0(t)`` (``layer`` is ignored).

    ``x(t)`` is what the layer reads of a residual stream that holds the token's embedding alone. ``W_U`` is centred:
    without the mean over tokens, which moves all logits alike; before a softcap that is a convention. Exact at layer 0
    up to the factor of the final norm; in later layers it is what the part would do if it read the embedding alone. The
    factor by which later layers scale the write is included, that of the final norm is not.

    Tokens that are ranked are those of :func:`distinct_tokens`: no padding, none of weight 0, and one of each group
    whose rows of ``W_U`` are parallel, as those of tokens that never occur are.

    Args:
        weights: How often each token occurs, such as counts; uniform by default. Those of weight 0 are left out, and
            the mean that is subtracted is weighted.

    Returns:
        DataFrame (list of `Pair` without pandas) with columns source, target, value.

    Cost: ``2 V**2 d_head`` flop for a head, ``2 V**2 d_model`` for the others and for the search of parallel rows; a
    block of columns at a time.

    Symmetries: R E P U Q QR V L H S.

    Raises:
        ValueError: No such layer, head or path, a part that has no tensor, or weights that do not fit.
    """
    check_view(net, "mlp", "attention", "unembed", "tokens", "x0")
    if path != "direct":
        check_count("layer", layer, 0, net.n_layer - 1)
    ids = distinct_tokens(net, weights)
    columns = _path_columns(net, layer, path, net.unembed_centred(weights)[ids])
    return as_table(Pair, *rank_pairs(columns, ids, top, by=by, which=which, keep_self=keep_self))


def distinct_tokens(
    net: Extracted, weights: Real[Tensor, " d_vocab_used"] | None = None, cosine: float = PARALLEL
) -> Int[Tensor, " n"]:
    """Ids of the tokens worth ranking: of weight above 0, and the first of each group of parallel unembedding rows.

    Padding is left out. The rows are centred; two are parallel from ``cosine`` on. Costs ``2 V**2 d_model`` flop.

    Symmetries: R E P U Q QR V N L X H S.
    """
    rows = net.unembed_centred(weights)
    ids = torch.arange(len(rows), device=rows.device)
    if weights is not None:
        ids = ids[weights.to(rows.device) > 0]
    return ids[parallel_groups(rows[ids], cosine).unique()]


def _path_columns(
    net: Extracted, layer: int, path: int | Literal["mlp", "direct"], targets: Tensor
) -> Callable[[Tensor], Tensor]:
    """Function that computes the columns of a block of source tokens, one row per row of ``targets``."""
    if path == "direct":
        return lambda block: net.embed_factor * targets @ net.x0[block].mT
    if path != "mlp" and not isinstance(path, int):
        raise ValueError(f'path must be a head number, "mlp" or "direct", got {path!r}')
    x, factor = bare_inputs(net, layer, net.x0), net.write_factors[layer]
    if path == "mlp":
        form = net.mlp[layer].canonical()
        quadratic = BilinearTensor(form.w_l, form.w_r, form.w_d)
        return lambda block: factor * targets @ quadratic(x[block]).mT
    written = copied_values(net, layer, path, x, net.x0)
    left = factor * targets @ written.left
    return lambda block: left @ written.right[:, block]
