"""Derivatives beyond the first backward pass: whether a transform is at work, and gradients that have gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def transformed(*tensors: Tensor) -> bool:
    """True inside vmap, grad, jvp and the like: custom operators fail there or, worse, drop the tangent."""
    if any(unpack_dual(x).tangent is not None for x in tensors):
        return True
    # What follows cannot be traced, and need not be: compiling a custom operator under vmap or grad is an error
    if torch.compiler.is_compiling():
        return False
    return any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors)


def partial_gradients(
    function: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradient of each operand that takes one, as a differentiable function of all and of ``grad``.

    Through an alias of each operand: one that depends on another, or is another, is held fixed for its gradient.
    """
    aliases = [x.view_as(x) for x in operands]
    wanted = [x for x in aliases if x.requires_grad]
    found = iter(torch.autograd.grad(function(*aliases), wanted, grad, create_graph=True))
    return tuple(next(found) if x.requires_grad else None for x in aliases)
