"""Training: data, optimisers, the loop and the comparison. Names are imported on first use, torch only then."""

from typing import TYPE_CHECKING

if __name__ != "tnlm.training":
    raise ImportError(
        f"this package must be imported as tnlm.training, got {__name__!r}: the folder at the top level is a link "
        "for the reader"
    )

from tnlm._lazy import attach

if TYPE_CHECKING:
    from tnlm.training.compare import compare_arms
    from tnlm.training.corpus import Corpus, embedded_corpus
    from tnlm.training.data import Loader, TokenStream, Validation
    from tnlm.training.loop import train
    from tnlm.training.muon import Muon
    from tnlm.training.presets import TrainConfig, preset
    from tnlm.training.runs import load_run
    from tnlm.training.schedule import Schedule
    from tnlm.training.shards import write_shard

_HOMES = {
    "tnlm.training.compare": ("compare_arms",),
    "tnlm.training.corpus": ("Corpus", "embedded_corpus"),
    "tnlm.training.data": ("Loader", "TokenStream", "Validation"),
    "tnlm.training.loop": ("train",),
    "tnlm.training.muon": ("Muon",),
    "tnlm.training.presets": ("TrainConfig", "preset"),
    "tnlm.training.runs": ("load_run",),
    "tnlm.training.schedule": ("Schedule",),
    "tnlm.training.shards": ("write_shard",),
}

__all__ = [
    "Corpus",
    "Loader",
    "Muon",
    "Schedule",
    "TokenStream",
    "TrainConfig",
    "Validation",
    "compare_arms",
    "embedded_corpus",
    "load_run",
    "preset",
    "train",
    "write_shard",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, _HOMES)
