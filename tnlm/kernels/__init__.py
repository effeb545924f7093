"""The operations that layers call, each one function that chooses among implementations which agree with one formula.

``docs/kernels.md`` says what each chooses, the error contract, and how to decode with a state.
"""

from tnlm.kernels.cross_entropy import unembedded_cross_entropy
from tnlm.kernels.dispatch import IMPLEMENTATIONS, Implementation, bilinear_attention, squared_attention
from tnlm.kernels.pointwise import Rotation, gated_projection, rms_norm
from tnlm.kernels.precision import linear
from tnlm.kernels.recurrent import State

__all__ = [
    "IMPLEMENTATIONS",
    "Implementation",
    "Rotation",
    "State",
    "bilinear_attention",
    "gated_projection",
    "linear",
    "rms_norm",
    "squared_attention",
    "unembedded_cross_entropy",
]
