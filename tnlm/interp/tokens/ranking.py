"""Blockwise top-k over token pairs: a vocabulary-by-vocabulary matrix is never held."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tnlm.interp.checks import check_choice, check_computed, check_count, check_tensor
from tnlm.interp.layers.lowrank import LowRank

_BLOCK = 2**24


class Pair(NamedTuple):
    """One ranked entry of a table."""

    source: int
    target: int
    value: float


def top_tokens(
    matrix: Tensor | LowRank,
    k: int = 10,
    *,
    tokens: Sequence[int] | Tensor | None = None,
    by: Literal["source", "all"] = "source",
    which: Literal["max", "min", "abs"] = "max",
    keep_self: bool = False,
) -> Any:
    """Largest entries of a token-by-token matrix ``[target, source]``, block by block.

    Args:
        matrix: Dense or `LowRank`, square, one row and column per id of the vocabulary (output axis first).
        k: Entries per source, or in all with ``by="all"``.
        tokens: Ids that may appear, as source and as target; all by default. Leave padding rows out here.
        which: Largest, smallest, or largest magnitude first.
        keep_self: Keep a token's entry with itself.

    Returns:
        DataFrame with columns source, target, value where pandas is present, else a list of `Pair`. Exact; costs
        ``2 V**2 r`` flop for rank ``r``.
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

    return table(Pair, *rank_pairs(columns, ids, k, by=by, which=which, keep_self=keep_self))


def token_ids(tokens: Sequence[int] | Tensor | None, d_vocab: int, device: torch.device | str) -> Tensor:
    """``tokens`` as an int64 vector on ``device``; ValueError for ids outside ``[0, d_vocab)`` or repeated."""
    if tokens is None:
        return torch.arange(d_vocab, device=device)
    ids = torch.as_tensor(tokens, device=device)
    if ids.ndim != 1 or ids.dtype.is_floating_point or ids.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise ValueError(f"tokens must be a vector of integer ids, got shape {tuple(ids.shape)} of {ids.dtype}")
    ids = ids.long()
    bad = ((ids < 0) | (ids >= d_vocab)).nonzero()
    if len(bad):
        at = int(bad[0])
        raise ValueError(f"token ids must be in [0, {d_vocab}), got {int(ids[at])} at position {at}")
    if len(ids.unique()) != len(ids):
        raise ValueError(f"token ids must differ, got {len(ids) - len(ids.unique())} repeated")
    return ids


def rank_pairs(
    columns: Callable[[Tensor], Tensor], ids: Tensor, k: int, *, by: str, which: str, keep_self: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``(source, target, value)`` of the top entries; ``columns(block of ids)`` gives ``(len(ids), len(block))``."""
    check_count("k", k, 1)
    check_choice("by", by, ("source", "all"))
    check_choice("which", which, ("max", "min", "abs"))
    key_of = {"max": lambda v: v, "min": torch.neg, "abs": torch.abs}[which]
    kept: list[list[Tensor]] = []
    for block in ids.split(max(1, _BLOCK // max(1, len(ids)))):
        entries = columns(block)
        # NaN would be ranked as the largest
        check_computed("the table", entries)
        key = key_of(entries)
        if not keep_self:
            key = key.masked_fill(ids[:, None] == block, -torch.inf)
        top, rows = key.topk(min(k, len(ids)), dim=0)
        found = (block.expand_as(rows), ids[rows], entries.gather(0, rows))
        kept.append([t.mT[top.mT > -torch.inf] for t in found])
        if by == "all":
            merged = [torch.cat(parts) for parts in zip(*kept)]
            order = key_of(merged[2]).argsort(descending=True, stable=True)[:k]
            kept = [[t[order] for t in merged]]
    sources, targets, values = (torch.cat(parts) for parts in zip(*kept))
    return sources, targets, values


def table(row: Any, *columns: Sequence[Any] | Tensor) -> Any:
    """A DataFrame with the fields of ``row`` as columns where pandas is present, else a list of ``row``."""
    lists = [c.tolist() if isinstance(c, Tensor) else list(c) for c in columns]
    try:
        import pandas
    except ImportError:
        return [row(*entry) for entry in zip(*lists)]
    return pandas.DataFrame(dict(zip(row._fields, lists)))
