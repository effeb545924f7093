"""MLP: the bilinear and squared kinds are polynomials, the others are the baselines they are compared with."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from tnlm.config import GATED_MLPS, MLPKind
from tnlm.explicit import mlp_network, mlp_tensor
from tnlm.kernels import gated_projection, linear
from tnlm.network import DEFAULT_MAX_BYTES, Network
from tnlm.points import Point, listened


def _identity(x: Tensor) -> Tensor:
    return x


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "bilinear": _identity,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "reglu": F.relu,
    "glu": torch.sigmoid,
    "squared": torch.square,
    "relu2": _relu2,
    "relu": F.relu,
    "gelu": F.gelu,
}
"""The function of ``L x`` in each kind; the gated kinds then multiply by ``R x`` (Shazeer 2020, arXiv:2002.05202)."""


class MLP(nn.Module):
    """MLP: ``D (act(L x) * R x) + bias`` for the gated kinds, ``D act(L x) + bias`` for the others.

    With ``hidden_bias``, ``L x`` is ``L x + b_l`` and ``R x`` is ``R x + b_r`` throughout.

    Args:
        kind: ``bilinear`` (act is the identity) and ``squared`` (``(L x)**2``) are homogeneous polynomials of degree 2
            in ``x``, plus the bias, and with ``hidden_bias`` of degree 2 in ``(1, x)``; all others are not polynomials.

    Fresh layers have ``w_d = 0`` and biases 0, and ``w_l``, ``w_r`` uniform in ``+-1/sqrt(d_in)``.
    Points: ``hook_pre`` (``L x``), ``hook_pre_linear`` (``R x``), ``hook_post`` (the input of ``D``).
    """

    def __init__(
        self,
        *,
        kind: MLPKind,
        d_in: int,
        d_hidden: int,
        d_out: int,
        bias: bool = True,
        hidden_bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.gated = kind, kind in GATED_MLPS
        self.d_in, self.d_hidden, self.d_out = d_in, d_hidden, d_out
        factory_kwargs: dict[str, Any] = {"dtype": dtype, "device": device}
        self.w_l = nn.Parameter(torch.empty(d_hidden, d_in, **factory_kwargs))
        self.w_r = nn.Parameter(torch.empty(d_hidden, d_in, **factory_kwargs)) if self.gated else None
        self.w_d = nn.Parameter(torch.empty(d_out, d_hidden, **factory_kwargs))
        self.bias = nn.Parameter(torch.empty(d_out, **factory_kwargs)) if bias else None
        self.b_l = nn.Parameter(torch.empty(d_hidden, **factory_kwargs)) if hidden_bias else None
        self.b_r = nn.Parameter(torch.empty(d_hidden, **factory_kwargs)) if hidden_bias and self.gated else None
        self.hook_pre = Point()
        self.hook_pre_linear: Any = Point() if self.gated else None
        self.hook_post = Point()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Encoders uniform in ``+-1/sqrt(d_in)``; everything else 0."""
        for w in (self.w_l, self.w_r):
            if w is not None:
                nn.init.uniform_(w, -(self.d_in**-0.5), self.d_in**-0.5)
        for p in (self.w_d, self.bias, self.b_l, self.b_r):
            if p is not None:
                nn.init.zeros_(p)

    @property
    def reads_constant(self) -> bool:
        """Whether :meth:`network` and :meth:`tensor` read ``(1, x)``: there are biases."""
        return self.bias is not None or self.b_l is not None

    def forward(self, x: Shaped[Tensor, "... d_in"]) -> Shaped[Tensor, "... d_out"]:
        post = ACTIVATIONS[self.kind](self.hook_pre(linear(x, self.w_l, self.b_l)))
        if self.w_r is not None:
            right = self.hook_pre_linear(linear(x, self.w_r, self.b_r))
            if not listened(self.hook_post):
                return gated_projection(post, right, self.w_d, self.bias)
            post = post * right
        return linear(self.hook_post(post), self.w_d, self.bias)

    def network(self) -> Network:
        """``mlp(x)`` as a network of five operands; exact.

        The input ``x`` is ``(batch, d_in)``, or with biases ``(batch, 1 + d_in)``: ``(1, x)``, the constant in front,
        as :func:`tnlm.explicit.augment` makes it. The output bias is then one more hidden unit, ``1 * 1``.

        Raises:
            ValueError: The kind is not a polynomial.
        """
        return mlp_network(self)

    def tensor(self, max_bytes: int = DEFAULT_MAX_BYTES) -> Float[Tensor, "d_out one_plus_d_in one_plus_d_in"]:
        """Dense third-order tensor, symmetric in its two inputs; exact.

        ``mlp(x)[o] == sum_ij T[o, i, j] x[i] x[j]``; with biases ``x`` is ``(1, x)`` here and each input axis
        ``1 + d_in`` long. ``T = 1/2 sum_h w_d[o, h] (w_l[h, i] w_r[h, j] + w_l[h, j] w_r[h, i])``.

        Args:
            max_bytes: Bound on the largest array built on the way, about ``d_hidden * d_in**2`` numbers: 32 MiB at
                d_in 128 and d_hidden 512 in float32, 7.2 GB at 768 and 3072. Checked before anything is allocated.

        Raises:
            ValueError: The kind is not a polynomial, or an array would exceed ``max_bytes``.

        Source: Pearce et al. 2025, arXiv:2410.08417.
        """
        return mlp_tensor(self, max_bytes)

    def extra_repr(self) -> str:
        return f"kind={self.kind}, d_in={self.d_in}, d_hidden={self.d_hidden}, d_out={self.d_out}"


class BilinearMLP(MLP):
    """Bilinear MLP ``D (L x * R x)``, by default without bias, so that ``f(a x) = a**2 f(x)`` exactly.

    Source: Pearce et al. 2025, arXiv:2410.08417.
    """

    def __init__(
        self,
        *,
        d_in: int,
        d_hidden: int,
        d_out: int,
        bias: bool = False,
        hidden_bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            kind="bilinear",
            d_in=d_in,
            d_hidden=d_hidden,
            d_out=d_out,
            bias=bias,
            hidden_bias=hidden_bias,
            dtype=dtype,
            device=device,
        )
