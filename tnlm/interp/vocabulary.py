"""Rows of an unembedding without what all tokens share, and the groups of rows that point the same way."""

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from tnlm.interp.checks import check_number, check_tensor

PARALLEL = 0.999
"""Cosine from which two unembedding rows count as one direction: tokens that training never shows are pushed alike."""
# Entries of the table of cosines that are computed at once: 64 MiB in float32.
_BLOCK = 2**24


def token_weights(weights: Real[Tensor, " n"] | None, rows: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Weights of the tokens of ``rows`` that sum to 1, in the dtype of ``rows``: uniform by default.

    Raises:
        ValueError: Not one weight per row, a negative or infinite one, or none above 0.
    """
    if weights is None:
        return rows.new_full((len(rows),), 1 / max(1, len(rows)))
    if not isinstance(weights, Tensor) or weights.shape != (len(rows),):
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"weights must be a tensor of one number per token, shape ({len(rows)},), got {got}")
    wide = weights.to(rows.device, torch.float64)
    check_tensor("weights", wide, (len(rows),))
    if bool((wide < 0).any()) or not bool((wide > 0).any()):
        raise ValueError("weights must be at least 0 and not all 0; counts of the tokens are fine")
    return (wide / wide.sum()).to(rows.dtype)


def centred(rows: Float[Tensor, "n d"], weights: Real[Tensor, " n"] | None = None) -> Float[Tensor, "n d"]:
    """``rows`` minus their mean, weighted by token."""
    return rows - token_weights(weights, rows) @ rows


def parallel_groups(rows: Float[Tensor, "n d"], cosine: float = PARALLEL) -> Int[Tensor, " n"]:
    """Index of the first row of every row's group: rows are chained to the first one within ``cosine`` of them.

    Rows that are zero are one group.
    """
    check_number("cosine", cosine, 0, above=True)
    if not len(rows):
        return torch.zeros(0, dtype=torch.long, device=rows.device)
    length = rows.norm(dim=1, keepdim=True)
    unit = rows / torch.where(length > 0, length, 1)
    zero = (length == 0)[:, 0]
    step = max(1, _BLOCK // len(rows))
    first = []
    for start in range(0, len(rows), step):
        block = slice(start, start + step)
        near = unit[block] @ unit[: start + step].mT >= cosine
        near |= zero[block, None] & zero[None, : start + step]
        # each row is near itself, whatever its rounding
        near.diagonal(start).fill_(True)
        first.append(near.int().argmax(1))
    groups = torch.cat(first)
    while not torch.equal(groups, groups[groups]):
        groups = groups[groups]
    return groups
