"""A matrix of low rank, kept as its two thin factors."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Inexact
from torch import Tensor

from tnlm.interp.checks import check_bytes, check_computed, check_tensor


class SVD(NamedTuple):
    """``u (m, r)``, ``s (r,)`` descending, ``vh (r, n)``."""

    u: Tensor
    s: Tensor
    vh: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class LowRank:
    """The matrix ``left @ right`` as its factors; everything below is exact and costs ``O((m + n) r**2)``.

    Tensors are kept, not copied: ``mT`` holds views of them.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; NaN or infinity.
    """

    left: Inexact[Tensor, "m r"]
    right: Inexact[Tensor, "r n"]

    def __post_init__(self) -> None:
        check_tensor("left", self.left, (None, None))
        check_tensor("right", self.right, (self.left.shape[1], None), self.left)

    def __repr__(self) -> str:
        return f"LowRank({self.shape[0]} x {self.shape[1]}, rank <= {self.left.shape[1]}, {self.left.dtype})"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.left.shape[0], self.right.shape[1])

    @property
    def mT(self) -> "LowRank":
        return type(self)(self.right.mT, self.left.mT)

    def __matmul__(self, x: Inexact[Tensor, "n ..."]) -> Inexact[Tensor, "m ..."]:
        check_tensor("x", x, (self.shape[1], *[None] * (x.ndim - 1)))
        return self.left @ (self.right @ x)

    def tensor(self, max_bytes: int = 2**30) -> Inexact[Tensor, "m n"]:
        """The dense matrix; refused before allocating when over ``max_bytes``."""
        check_bytes("the dense matrix", self.shape, self.left.dtype, max_bytes, "use svd, inner or top_tokens")
        return self.left @ self.right

    def svd(self) -> SVD:
        """Thin SVD by two QRs and one of size ``(r, r)``; the largest entry of each column of ``u`` is positive."""
        q, r = torch.linalg.qr(self.left)
        p, t = torch.linalg.qr(self.right.mH)
        inner = r @ t.mH
        check_computed("the matrix", inner)
        u, s, vh = torch.linalg.svd(inner, full_matrices=False)
        u, vh = q @ u, vh @ p.mH
        peak = u.gather(0, u.abs().argmax(0, keepdim=True))[0]
        phase = torch.sgn(torch.where(peak == 0, 1, peak))
        return SVD(u * phase.conj(), s, vh * phase[:, None])

    def inner(self, other: "LowRank") -> Tensor:
        """``sum_ij self[i, j] conj(other[i, j])``, summed in float64 (complex128)."""
        if self.shape != other.shape:
            raise ValueError(f"matrices must have the same shape to be compared, got {self.shape} and {other.shape}")
        check_tensor("left of the other matrix", other.left, (None, None), self.left)
        products = (self.left.mT @ other.left.conj()) * (self.right @ other.right.mH)
        return products.sum(dtype=torch.promote_types(products.dtype, torch.float64))

    def norm(self) -> Tensor:
        """Frobenius norm, float64."""
        return self.inner(self).real.clamp_min(0).sqrt()
