"""Training: data, optimisers, the loop and the comparison. Names are imported on first use, torch only then."""

from typing import TYPE_CHECKING

if __name__ != "tnlm.training":
    raise ImportError(
        f"this package must be imported as tnlm.training, not as {__name__!r}: training/ at the top of "
        "the repository is a symbolic link to tnlm/training; write `from tnlm import training`"
    )

from tnlm._lazy import attach

if TYPE_CHECKING:
    from tnlm.training.compare.arms import compare_arms
    from tnlm.training.compare.runs import load_run
    from tnlm.training.config import TrainConfig
    from tnlm.training.data.corpus import Corpus, embedded_corpus
    from tnlm.training.data.inputs import token_counts
    from tnlm.training.data.shards import write_shard
    from tnlm.training.data.stream import Loader, TokenStream, Validation
    from tnlm.training.optim.muon import Muon
    from tnlm.training.optim.schedule import Schedule
    from tnlm.training.presets import preset
    from tnlm.training.run.loop import train

_HOMES = {
    "tnlm.training.compare.arms": ("compare_arms",),
    "tnlm.training.data.corpus": ("Corpus", "embedded_corpus"),
    "tnlm.training.data.inputs": ("token_counts",),
    "tnlm.training.data.stream": ("Loader", "TokenStream", "Validation"),
    "tnlm.training.run.loop": ("train",),
    "tnlm.training.optim.muon": ("Muon",),
    "tnlm.training.config": ("TrainConfig",),
    "tnlm.training.presets": ("preset",),
    "tnlm.training.compare.runs": ("load_run",),
    "tnlm.training.optim.schedule": ("Schedule",),
    "tnlm.training.data.shards": ("write_shard",),
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
    "token_counts",
    "train",
    "write_shard",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, _HOMES)
