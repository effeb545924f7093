"""RMS norm and rotation with their gradients written out.

Between matmuls a training step is bound by memory, most of all in eager mode on a CPU, and autograd passes over every
intermediate of a formula. These pass over fewer and keep fewer. They and their gradients, of any order, agree with the
formula and autograd up to rounding. The callers hold the formula, and turn to it where :func:`fits` is false.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from tnlm.kernels.precision import autocast_active
from tnlm.kernels.transforms import transformed


def fits(x: Tensor) -> bool:
    """float32 or float64 outside compilers (which fuse by themselves), ``torch.func``, forward-mode AD and autocast."""
    return (
        x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not autocast_active(x.device.type)
        and not transformed(x)
    )


def rms_norm(x: Float[Tensor, "... d"], eps: float) -> Float[Tensor, "... d"]:
    """``x * (1 / sqrt(mean(x**2) + eps))`` over the last axis."""
    return _RMSNorm.apply(x, eps)[0]


def rotations(
    xs: Sequence[Float[Tensor, "*batch seq n_head d"]],
    cos: Float[Tensor, "seq half"],
    sin: Float[Tensor, "seq half"],
) -> list[Float[Tensor, "*batch seq n_head d"]]:
    """:func:`tnlm.rotary.rotate` of each, in memory heads first: attention then packs nothing."""
    return [x.transpose(-3, -2) for x in _Rotations.apply(cos, sin, *(x.transpose(-3, -2) for x in xs))]


class _RMSNorm(Function):
    """The inverse scale is an output too, so that backward, a function of saved tensors, is differentiable.

    Saves x and not the result, which a hook downstream may edit in place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse)
        return x * inverse, inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_inverse: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse = ctx.saved_tensors
        along = ((grad * x).sum(-1, keepdim=True) + grad_inverse) * inverse * inverse / -x.shape[-1]
        return (x * along).add_(grad).mul_(inverse), None


class _Rotations(Function):
    """Of packed (..., n_head, seq, d)."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        wide = _wide(cos, sin, xs[0].dtype)
        return tuple(_turned(x, *wide) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        heads = grads[0].shape[-3]
        # gradients go back packed (..., seq, n_head, d), as the projections read them
        wide = [t[:, None].expand(-1, heads, -1).contiguous() for t in _wide(cos, -sin, grads[0].dtype)]
        return None, None, *(_turned(grad.transpose(-3, -2), *wide).transpose(-3, -2) for grad in grads)


def _wide(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``[cos | cos]`` and ``[sin | -sin]``."""
    cos, sin = cos.to(dtype), sin.to(dtype)
    return torch.cat([cos, cos], dim=-1), torch.cat([sin, -sin], dim=-1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[a | b] -> [a cos + b sin | b cos - a sin]`` by wide tables; packed in the order of x's axes."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([b, a], dim=-1).mul_(sin).addcmul_(x, cos)
