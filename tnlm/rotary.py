"""Rotary position embedding: tables of cosines and sines, and the rotation by them.

``Attention.forward`` (``tnlm/attention.py``) applies the rotation to queries and keys, after QK-norm. Tables are made
for each forward and not kept in the model.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from tnlm.kernels import Rotation


def rotary_frequencies(
    d: int, *, base: float = 10000.0, device: torch.device | str | None = None
) -> Float[Tensor, " half"]:
    """Radians per position of each pair of entries, ``base**(-2 f / d)`` for ``f < d / 2``, in float32.

    Computed as a reciprocal of a power, like the public code: ``base ** (-2 f / d)`` is the same number with another
    rounding, which at position 1023 moves the angle by up to 3e-5 and some entries of a bf16 table by one unit.
    """
    return 1.0 / base ** (torch.arange(0, d, 2, dtype=torch.float32, device=device) / d)


def rotary_tables(
    seq: int,
    d: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    start: int = 0,
) -> tuple[Float[Tensor, "seq half"], Float[Tensor, "seq half"]]:
    """Cosines and sines of ``position * frequency`` for :func:`rotary_frequencies`, positions ``start..start + seq``.

    Angles are formed in float32 and the tables then rounded to ``dtype``, as the released models were trained (bf16).
    Forming the angles themselves in bf16 would be wrong by up to 2 in a cosine at position 1024.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    return _tables(seq, d, float(base), dtype, device, start)


# A custom operator, because a compiler that inlines this computes the cosines again for every element it rotates, and
# drops the rounding to bf16 where a wider dtype follows.
@torch.library.custom_op("tnlm::rotary_tables", mutates_args=())
def _tables(
    seq: int, d: int, base: float, dtype: torch.dtype, device: torch.device, start: int
) -> tuple[Tensor, Tensor]:
    position = torch.arange(start, start + seq, dtype=torch.float32, device=device)
    angle = torch.outer(position, rotary_frequencies(d, base=base, device=device))
    return angle.cos().to(dtype), angle.sin().to(dtype)


@_tables.register_fake
def _(seq: int, d: int, base: float, dtype: torch.dtype, device: torch.device, start: int) -> tuple[Tensor, Tensor]:
    shape = (seq, (d + 1) // 2)
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)


def rotate(
    x: Shaped[Tensor, "batch seq n_head d"],
    cos: Float[Tensor, "seq half"],
    sin: Float[Tensor, "seq half"],
) -> Shaped[Tensor, "batch seq n_head d"]:
    """``x`` with the halves ``[a | b]`` of its last axis rotated to ``[a cos + b sin | -a sin + b cos]``.

    The sign is that of the released models, the opposite of the common ``rotate_half``; with one convention for queries
    and keys the scores depend on the distance alone under either. Computed in the wider of the two dtypes, returned in
    ``x``'s. Exact for the tables given.
    """
    return Rotation(cos, sin)(x)
