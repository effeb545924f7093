"""Attention without softmax: one definition and implementations that agree with it.

``docs/kernels.md`` has the table of what "auto" chooses, the error contract, and how to decode with a state.
"""

from tnlm.kernels.dispatch import IMPLEMENTATIONS, Implementation, bilinear_attention, squared_attention
from tnlm.kernels.recurrent import State

__all__ = ["IMPLEMENTATIONS", "Implementation", "State", "bilinear_attention", "squared_attention"]
