"""Whether tensors are inside a transform of ``torch.func`` or forward-mode AD."""

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
