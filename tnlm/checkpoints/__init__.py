"""Loading, saving, verifying and publishing of models. Names are imported on first use."""

from typing import TYPE_CHECKING

from tnlm._lazy import attach

if TYPE_CHECKING:
    from tnlm.checkpoints import released as released
    from tnlm.checkpoints.card import model_card
    from tnlm.checkpoints.checkpoint import load, read_config, save
    from tnlm.checkpoints.layouts import to_published
    from tnlm.checkpoints.publish import push_to_hub
    from tnlm.checkpoints.verification import Check, verification_table, verify, verify_released

_HOMES = {
    "tnlm.checkpoints.card": ("model_card",),
    "tnlm.checkpoints.checkpoint": ("load", "read_config", "save"),
    "tnlm.checkpoints.layouts": ("to_published",),
    "tnlm.checkpoints.publish": ("push_to_hub",),
    "tnlm.checkpoints.verification": ("Check", "verification_table", "verify", "verify_released"),
}
_SUBMODULES = ("released",)

__all__ = [
    "Check",
    "load",
    "model_card",
    "push_to_hub",
    "read_config",
    "save",
    "to_published",
    "verification_table",
    "verify",
    "verify_released",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, _HOMES, _SUBMODULES)
