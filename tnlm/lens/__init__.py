"""Hooks, caches and patching tools of transformer-lens for these models, on the same forward and parameters.

``lens.hook(model)`` is the entry point. Names are imported on first use. No other package imports transformer_lens.
"""

from typing import TYPE_CHECKING

from tnlm._lazy import attach

if TYPE_CHECKING:
    from tnlm.lens.activations import ResidualCache
    from tnlm.lens.hooked import HookedModel, hook
    from tnlm.lens.residual import ResidualParts

_HOMES = {
    "tnlm.lens.activations": ("ResidualCache",),
    "tnlm.lens.hooked": ("HookedModel", "hook"),
    "tnlm.lens.residual": ("ResidualParts",),
}

__all__ = ["HookedModel", "ResidualCache", "ResidualParts", "hook"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, _HOMES)
