"""Tensor-network language models: exact checkpoints, explicit tensors, training and weight-based interpretability.

The names below are imported on first use: ``import tnlm`` itself imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tnlm.config import ModelConfig

if TYPE_CHECKING:
    from tnlm.checkpoint import load, save
    from tnlm.network import Network
    from tnlm.publish import push_to_hub
    from tnlm.sampling import generate
    from tnlm.transformer import Transformer

__version__ = "0.1.0"

_LAZY = {
    "Network": "tnlm.network",
    "Transformer": "tnlm.transformer",
    "generate": "tnlm.sampling",
    "load": "tnlm.checkpoint",
    "push_to_hub": "tnlm.publish",
    "save": "tnlm.checkpoint",
}
_SUBMODULES = ("interp", "kernels", "lens", "released", "tokenizer", "training")

__all__ = ["ModelConfig", "Network", "Transformer", "generate", "load", "push_to_hub", "save"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"tnlm.{name}")
    raise AttributeError(f"module 'tnlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
