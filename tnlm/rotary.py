"""Rotary position tables and their application. Tables are made for each forward: nothing is cached or saved."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from tnlm.kernels import pointwise


def rotary_frequencies(
    d: int, *, base: float = 10000.0, device: torch.device | str | None = None
) -> Float[Tensor, " half"]:
    """Radians per position of each pair of entries, ``base**(-2 f / d)`` for ``f < d / 2``, in float32.

    In the order of the public code, a reciprocal of a power: ``base ** (-2 f / d)`` is the same number but rounds
    otherwise, which at position 1023 moves the angle by up to 3e-5 and some entries of a bf16 table by a whole unit.
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


# an operator of its own: inlined, a compiler makes the cosines again for every element it rotates, and drops the
# rounding to bf16 where a wider dtype follows
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
    """Rotate the halves ``[a | b]`` of the last axis to ``[a cos + b sin | -a sin + b cos]``.

    The sign is that of the released models, the opposite of the common ``rotate_half``; with one convention for queries
    and keys the scores depend on the distance alone under either. Computed in the wider of the two dtypes, returned in
    ``x``'s. Exact for the tables given.
    """
    return Rotation(cos, sin)(x)


class Rotation:
    """:func:`rotate` by one pair of tables, for several tensors."""

    def __init__(self, cos: Float[Tensor, "seq half"], sin: Float[Tensor, "seq half"]) -> None:
        self.cos, self.sin = cos, sin
        self._wide: dict[tuple[int, torch.dtype], pointwise.WideTables] = {}

    def __call__(self, x: Shaped[Tensor, "batch seq n_head d"]) -> Shaped[Tensor, "batch seq n_head d"]:
        constant = not (self.cos.requires_grad or self.sin.requires_grad)
        if constant and torch.promote_types(x.dtype, self.cos.dtype) == x.dtype and pointwise.fits(x):
            kind = x.shape[-2], x.dtype
            if kind not in self._wide:
                self._wide[kind] = pointwise.wide_tables(self.cos, self.sin, n_head=x.shape[-2], dtype=x.dtype)
            return pointwise.rotation(x, self._wide[kind])
        cos, sin = self.cos[:, None, :], self.sin[:, None, :]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1).to(x.dtype)
