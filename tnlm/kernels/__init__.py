"""Attention without softmax: `bilinear_attention` and `squared_attention`, in several implementations.

`tnlm.kernels.eager` is the definition; the others agree with it up to rounding. ``docs/kernels.md`` has the table of
what "auto" chooses, the limits on errors, and how to decode with a state.
"""

from tnlm.kernels.dispatch import IMPLEMENTATIONS, Implementation, bilinear_attention, squared_attention
from tnlm.kernels.recurrent import State

__all__ = ["IMPLEMENTATIONS", "Implementation", "State", "bilinear_attention", "squared_attention"]
