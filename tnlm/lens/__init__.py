"""The transformer-lens interface: hooks, caches and patching tools on the same forward and the same parameters.

``lens.hook(model)`` is the entry point. Names are imported on first use; this room alone imports transformer_lens.
"""

from typing import TYPE_CHECKING

from tnlm._lazy import attach

if TYPE_CHECKING:
    from tnlm.lens.hooked import HookedModel, ResidualCache, hook
    from tnlm.lens.residual import ResidualParts

_HOMES = {
    "tnlm.lens.hooked": ("HookedModel", "ResidualCache", "hook"),
    "tnlm.lens.residual": ("ResidualParts",),
}

__all__ = ["HookedModel", "ResidualCache", "ResidualParts", "hook"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, _HOMES)
