"""Rotary position tables and their application. Tables are made for each forward: nothing is cached or saved."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor


def rotary_tables(
    seq: int,
    d: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    start: int = 0,
) -> tuple[Float[Tensor, "seq half"], Float[Tensor, "seq half"]]:
    """Cosines and sines of ``position * base**(-2 f / d)`` for ``f < d / 2`` and positions ``start..start + seq``.

    Angles are formed in float32 and the tables then rounded to ``dtype``, as the released models were trained (bf16).
    Forming the angles themselves in bf16 would be wrong by up to 2 in a cosine at position 1024.
    """
    frequency = base ** (-torch.arange(0, d, 2, dtype=torch.float32, device=device) / d)
    position = torch.arange(start, start + seq, dtype=torch.float32, device=device)
    angle = torch.outer(position, frequency)
    return _round(angle.cos(), dtype), _round(angle.sin(), dtype)


def _round(x: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """``x.to(dtype)`` that stays rounded under torch.compile, whose fusion drops a cast to bf16 and back.

    Rounding to nearest even on the bits of the float32 makes the cast that follows exact.
    """
    if dtype == torch.bfloat16:
        bits = x.view(torch.int32)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    return x.to(dtype)


def rotate(
    x: Shaped[Tensor, "batch seq n_head d"],
    cos: Float[Tensor, "seq half"],
    sin: Float[Tensor, "seq half"],
) -> Shaped[Tensor, "batch seq n_head d"]:
    """Rotate the halves ``[a | b]`` of the last axis to ``[a cos + b sin | -a sin + b cos]``.

    The sign is that of the released models, the opposite of the common ``rotate_half``; with one convention for queries
    and keys the scores depend on the distance alone under either. Computed in the wider of the two dtypes, returned in
    ``x``'s. Exact for the tables given.
    """
    cos, sin = cos[:, None, :], sin[:, None, :]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1).to(x.dtype)
