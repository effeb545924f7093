"""Tensor-network language models: exact checkpoints, explicit tensors, training and weight-based interpretability.

The names below are imported on first use: ``import tnlm`` itself imports no torch.
"""

from typing import TYPE_CHECKING

from tnlm._lazy import attach
from tnlm.config import ModelConfig

if TYPE_CHECKING:
    from tnlm import checkpoints as checkpoints
    from tnlm import interp as interp
    from tnlm import kernels as kernels
    from tnlm import lens as lens
    from tnlm import text as text
    from tnlm import training as training
    from tnlm.checkpoints.checkpoint import load, save
    from tnlm.checkpoints.publish import push_to_hub
    from tnlm.network import Network
    from tnlm.text.sampling import generate
    from tnlm.transformer import Transformer

__version__ = "0.1.0"

_HOMES = {
    "tnlm.checkpoints.checkpoint": ("load", "save"),
    "tnlm.network": ("Network",),
    "tnlm.checkpoints.publish": ("push_to_hub",),
    "tnlm.text.sampling": ("generate",),
    "tnlm.transformer": ("Transformer",),
}
_SUBMODULES = ("checkpoints", "interp", "kernels", "lens", "text", "training")

__all__ = ["ModelConfig", "Network", "Transformer", "generate", "load", "push_to_hub", "save"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, _HOMES, _SUBMODULES)
