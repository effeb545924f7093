"""Named points: ``nn.Identity`` submodules called ``hook_*``, free in training, where hooks observe and intervene."""

import torch
from torch import nn


def listened(*points: nn.Module) -> bool:
    """Whether a hook of any kind is registered on one of the points.

    A quantity that the fast path never forms (a pattern, a per-head result) is computed only when this holds, so that
    a point which is present always fires. Always false inside a compiled graph: hooks are refused there.
    """
    if torch.compiler.is_compiling():
        return False
    return any(p._forward_hooks or p._forward_pre_hooks or p._backward_hooks or p._backward_pre_hooks for p in points)
