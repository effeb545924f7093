"""The largest entries of a table over pairs of tokens, found block by block, and the results as rows.

The table itself, vocabulary by vocabulary, is never held in memory.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tnlm.checks import check_kind, check_values, is_integer
from tnlm.interp.checks import check_choice, check_computed, check_count

# Entries of the table that are computed at once: 64 MiB in float32.
_BLOCK = 2**24


class Pair(NamedTuple):
    """One entry of a table over pairs of tokens: source and target id, and the value."""

    source: int
    target: int
    value: float


def token_ids(tokens: Sequence[int] | Tensor | None, d_vocab: int, device: torch.device | str) -> Tensor:
    """``tokens`` as an int64 vector on ``device``; ValueError for ids outside ``[0, d_vocab)`` or repeated."""
    if tokens is None:
        return torch.arange(d_vocab, device=device)
    if isinstance(tokens, Tensor):
        check_values("tokens", tokens)
    else:
        check_kind("tokens", tokens, Iterable, "give a list of ids")
        if wrong := [token for token in tokens if not is_integer(token)]:
            raise ValueError(f"tokens must be a vector of integer ids, got {wrong[0]!r} among them")
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
    """The top entries of a table as three vectors: source ids, target ids and values.

    Args:
        columns: Computes the columns of a block of source ids: ``(len(ids), len(block))``, one row per target.
        ids: Tokens that may be source and target.
        k: Entries per source, or in all with ``by="all"``.
        which: Largest (``max``), smallest (``min``) or largest magnitude (``abs``) first.
        keep_self: Keep a token's entry with itself.
    """
    check_count("k", k, 1)
    check_choice("by", by, ("source", "all"))
    check_choice("which", which, ("max", "min", "abs"))
    kept: list[list[Tensor]] = []
    for block in ids.split(max(1, _BLOCK // max(1, len(ids)))):
        entries = columns(block)
        # NaN would be ranked as the largest
        check_computed("the table", entries)
        key = _sort_key(entries, which)
        if not keep_self:
            key = key.masked_fill(ids[:, None] == block, -torch.inf)
        top, rows = key.topk(min(k, len(ids)), dim=0)
        found = (block.expand_as(rows), ids[rows], entries.gather(0, rows))
        kept.append([t.mT[top.mT > -torch.inf] for t in found])
        if by == "all":
            merged = [torch.cat(parts) for parts in zip(*kept)]
            order = _sort_key(merged[2], which).argsort(descending=True, stable=True)[:k]
            kept = [[t[order] for t in merged]]
    sources, targets, values = (torch.cat(parts) for parts in zip(*kept))
    return sources, targets, values


def _sort_key(values: Tensor, which: str) -> Tensor:
    """Numbers whose falling order is the one asked for."""
    if which == "abs":
        return values.abs()
    return -values if which == "min" else values


def as_table(row: Any, *columns: Sequence[Any] | Tensor) -> Any:
    """Columns as a DataFrame named after the fields of ``row`` where pandas is installed, else as a list of ``row``."""
    lists = [c.tolist() if isinstance(c, Tensor) else list(c) for c in columns]
    try:
        import pandas
    except ImportError:
        return [row(*entry) for entry in zip(*lists)]
    return pandas.DataFrame(dict(zip(row._fields, lists)))
