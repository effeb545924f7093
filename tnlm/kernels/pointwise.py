"""RMS norm, rotation and the gated projection of an MLP: formulas, and closed gradients where these can be used.

Between matmuls a training step is bound by memory, most of all in eager mode on a CPU, and autograd passes over every
intermediate of a formula. The closed gradients are written out: they pass over fewer tensors and keep fewer. They agree
with autograd of the formula up to rounding, in derivatives of any order. Each public function chooses between the two.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd import Function

from tnlm.kernels.precision import accumulation_dtype, autocast_active, linear
from tnlm.kernels.transforms import transformed


def closed_gradients_fit(*tensors: Tensor | None) -> bool:
    """Whether closed gradients can be used: the tensors are all float32 or all float64, and autograd alone is at work.

    False inside compilers (they fuse the formula by themselves), ``torch.func`` transforms, forward-mode AD and
    autocast.
    """
    given = [t for t in tensors if t is not None]
    return (
        {t.dtype for t in given} in ({torch.float32}, {torch.float64})
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not autocast_active(given[0].device.type)
        and not transformed(*given)
    )


def rms_norm(
    x: Shaped[Tensor, "*batch d"], eps: float, *, at_scale: Callable[[Tensor], Tensor] | None = None
) -> Shaped[Tensor, "*batch d"]:
    """``x / sqrt(mean(x**2) + eps)`` over the last axis; half precision is normed in float32.

    Args:
        at_scale: Called with the square root, ``(*batch, 1)``; what it returns divides ``x`` instead. The value has the
            same bits with and without it.
    """
    closed = closed_gradients_fit(x)
    if closed and at_scale is None:
        return _RMSNorm.apply(x, eps)[0]
    wide = x.to(accumulation_dtype(x.dtype))
    scale = _RMSScale.apply(x, eps) if closed else (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    if at_scale is not None:
        scale = at_scale(scale)
    # one small reciprocal: the gradient of a division by a broadcast scale costs twice that of a product
    return (wide * scale.reciprocal()).to(x.dtype)


def gated_projection(
    left: Shaped[Tensor, "*batch d_hidden"],
    right: Shaped[Tensor, "*batch d_hidden"],
    w: Shaped[Tensor, "d_out d_hidden"],
    bias: Shaped[Tensor, " d_out"] | None = None,
) -> Shaped[Tensor, "*batch d_out"]:
    """``(left * right) w^T + bias``; with closed gradients the product is not kept for the backward pass."""
    if closed_gradients_fit(left, right, w, bias):
        return _GatedProjection.apply(left, right, w, bias)
    return linear(left * right, w, bias)


class Rotation:
    """Rotates the last axis of tensors ``(*batch, seq, n_head, d)`` by one pair of tables.

    The halves ``[a | b]`` become ``[a cos + b sin | b cos - a sin]``, see :func:`tnlm.rotary.rotate`. Computed in the
    wider of the two dtypes, returned in that of the tensor. One object serves several tensors: the tables in the form
    that closed gradients read are made once.
    """

    def __init__(self, cos: Float[Tensor, "seq half"], sin: Float[Tensor, "seq half"]) -> None:
        self.cos, self.sin = cos, sin
        self._wide: dict[tuple[int, torch.dtype], _WideTables] = {}

    def __call__(self, x: Shaped[Tensor, "*batch seq n_head d"]) -> Shaped[Tensor, "*batch seq n_head d"]:
        constant = not (self.cos.requires_grad or self.sin.requires_grad)
        if constant and torch.promote_types(x.dtype, self.cos.dtype) == x.dtype and closed_gradients_fit(x):
            # in memory heads first: attention then packs nothing
            return _Rotation.apply(x.transpose(-3, -2), *self._wide_tables(x.shape[-2], x.dtype)).transpose(-3, -2)
        cos, sin = self.cos[:, None, :], self.sin[:, None, :]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1).to(x.dtype)

    def _wide_tables(self, n_head: int, dtype: torch.dtype) -> "_WideTables":
        if (n_head, dtype) not in self._wide:
            cos, sin = self.cos.to(dtype), self.sin.to(dtype)
            wide = torch.cat([cos, cos], dim=-1), torch.cat([sin, -sin], dim=-1)
            back = (t[:, None].expand(-1, n_head, -1).contiguous() for t in (wide[0], -wide[1]))
            self._wide[n_head, dtype] = _WideTables(*wide, *back)
        return self._wide[n_head, dtype]


class _WideTables(NamedTuple):
    """``[cos | cos]`` and ``[sin | -sin]`` for heads first, ``[cos | cos]`` and ``[-sin | sin]`` for the way back."""

    cos: Float[Tensor, "seq d"]
    sin: Float[Tensor, "seq d"]
    cos_back: Float[Tensor, "seq n_head d"]
    sin_back: Float[Tensor, "seq n_head d"]


class _RMSNorm(Function):
    """The inverse scale is an output too, so that backward, a function of saved tensors, is differentiable.

    Saves x and not the result, which a hook downstream may edit in place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        inverse = _rms(x, eps).reciprocal_()
        ctx.save_for_backward(x, inverse)
        return x * inverse, inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_inverse: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse = ctx.saved_tensors
        along = ((grad * x).sum(-1, keepdim=True) + grad_inverse) * inverse * inverse / -x.shape[-1]
        return (x * along).add_(grad).mul_(inverse), None


class _RMSScale(Function):
    """The scale alone, with the bits of the one that :class:`_RMSNorm` divides by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        scale = _rms(x, eps)
        ctx.save_for_backward(x, scale)
        return scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        return x * (grad / scale / x.shape[-1]), None


def _rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).sqrt_()


class _Rotation(Function):
    """Rotation of ``(..., n_head, seq, d)``, packed in that order; the gradient is packed with heads last.

    Each is the order in which the next matmul reads it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, cos_back: Tensor, sin_back: Tensor) -> Tensor:
        ctx.save_for_backward(cos_back, sin_back)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _turned(grad.transpose(-3, -2), *ctx.saved_tensors).transpose(-3, -2), None, None, None, None


class _GatedProjection(Function):
    """The product is made again in the backward pass, and one gradient is written into its memory."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(left, right, w)
        return F.linear(left * right, w, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, w = ctx.saved_tensors
        product, d_product = left * right, grad @ w
        rows = grad.flatten(0, -2)
        d_w = rows.mT @ product.flatten(0, -2) if ctx.needs_input_grad[2] else None
        d_bias = rows.sum(0) if ctx.needs_input_grad[3] else None
        if torch.is_grad_enabled():
            return d_product * right, d_product * left, d_w, d_bias
        return torch.mul(d_product, right, out=product), d_product.mul_(left), d_w, d_bias


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[a cos + b sin | b cos - a sin]`` of ``[a | b]`` by wide tables, packed in the order of x's axes."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([b, a], dim=-1).mul_(sin).addcmul_(x, cos)
