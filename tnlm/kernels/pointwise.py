"""RMS norm, rotation and gated projection with their gradients written out.

Between matmuls a training step is bound by memory, most of all in eager mode on a CPU, and autograd passes over every
intermediate of a formula. These pass over fewer and keep fewer. They and their gradients, of any order, agree with the
formula and autograd up to rounding. The callers hold the formula, and turn to it where :func:`fits` is false.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from tnlm.kernels.precision import autocast_active
from tnlm.kernels.transforms import transformed


def fits(*tensors: Tensor | None) -> bool:
    """All float32 or all float64, outside compilers (which fuse alone), ``torch.func``, dual numbers and autocast."""
    given = [t for t in tensors if t is not None]
    return (
        {t.dtype for t in given} in ({torch.float32}, {torch.float64})
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not autocast_active(given[0].device.type)
        and not transformed(*given)
    )


def rms_norm(x: Float[Tensor, "*batch d"], eps: float) -> Float[Tensor, "*batch d"]:
    """``x * (1 / sqrt(mean(x**2) + eps))`` over the last axis."""
    return _RMSNorm.apply(x, eps)[0]


def rms_scale(x: Float[Tensor, "*batch d"], eps: float) -> Float[Tensor, "*batch 1"]:
    """``sqrt(mean(x**2) + eps)``, with the bits of the one that :func:`rms_norm` divides by."""
    return _RMSScale.apply(x, eps)


class WideTables(NamedTuple):
    """``[cos | cos]`` and ``[sin | -sin]`` for heads first, ``[cos | cos]`` and ``[-sin | sin]`` for back again."""

    cos: Float[Tensor, "seq d"]
    sin: Float[Tensor, "seq d"]
    cos_back: Float[Tensor, "seq n_head d"]
    sin_back: Float[Tensor, "seq n_head d"]


def wide_tables(
    cos: Float[Tensor, "seq half"], sin: Float[Tensor, "seq half"], *, n_head: int, dtype: torch.dtype
) -> WideTables:
    """What :func:`rotation` multiplies with: made once for several tensors."""
    cos, sin = cos.to(dtype), sin.to(dtype)
    wide = torch.cat([cos, cos], dim=-1), torch.cat([sin, -sin], dim=-1)
    back = (t[:, None].expand(-1, n_head, -1).contiguous() for t in (wide[0], -wide[1]))
    return WideTables(*wide, *back)


def rotation(x: Float[Tensor, "*batch seq n_head d"], tables: WideTables) -> Float[Tensor, "*batch seq n_head d"]:
    """:func:`tnlm.rotary.rotate`, in memory heads first: attention then packs nothing."""
    return _Rotation.apply(x.transpose(-3, -2), *tables).transpose(-3, -2)


def gated_projection(
    left: Float[Tensor, "*batch d_hidden"],
    right: Float[Tensor, "*batch d_hidden"],
    w: Float[Tensor, "d_out d_hidden"],
    bias: Float[Tensor, " d_out"] | None,
) -> Float[Tensor, "*batch d_out"]:
    """``(left * right) w^T + bias``; keeps no product, and makes one gradient in the memory of another."""
    return _GatedProjection.apply(left, right, w, bias)


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
    """Of (..., n_head, seq, d), packed in that order; its gradient as the projections read it, heads last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, cos_back: Tensor, sin_back: Tensor) -> Tensor:
        ctx.save_for_backward(cos_back, sin_back)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _turned(grad.transpose(-3, -2), *ctx.saved_tensors).transpose(-3, -2), None, None, None, None


class _GatedProjection(Function):
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
    """``[a | b] -> [a cos + b sin | b cos - a sin]`` by wide tables; packed in the order of x's axes."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([b, a], dim=-1).mul_(sin).addcmul_(x, cos)
