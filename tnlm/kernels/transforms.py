"""Derivatives beyond a first backward pass: detection of ``torch.func`` transforms, and differentiable gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def transformed(*tensors: Tensor) -> bool:
    """Whether a tensor is inside vmap, grad, jvp and the like, where custom operators fail or lose the tangent."""
    if any(unpack_dual(x).tangent is not None for x in tensors):
        return True
    # What follows cannot be traced, and need not be: compiling a custom operator under vmap or grad is an error
    if torch.compiler.is_compiling():
        return False
    return any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors)


def partial_gradients(
    function: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradient of each operand that requires one, differentiable in all operands and in ``grad``; None for the others.

    If two operands share storage or a graph, gradients are taken as if the others were constants.
    """
    aliases = [x.view_as(x) for x in operands]
    wanted = [x for x in aliases if x.requires_grad]
    found = iter(torch.autograd.grad(function(*aliases), wanted, grad, create_graph=True))
    return tuple(next(found) if x.requires_grad else None for x in aliases)
