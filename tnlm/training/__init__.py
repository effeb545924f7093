"""Training: data, optimisers, the loop and the comparison. Names are imported on first use, torch only then."""

import importlib
from typing import Any

if __name__ != "tnlm.training":
    raise ImportError(
        f"this package must be imported as tnlm.training, got {__name__!r}: the folder at the top level is a link "
        "for the reader"
    )

_LAZY = {
    "Corpus": "tnlm.training.corpus",
    "Loader": "tnlm.training.data",
    "Muon": "tnlm.training.muon",
    "Schedule": "tnlm.training.schedule",
    "TrainConfig": "tnlm.training.presets",
    "TokenStream": "tnlm.training.data",
    "Validation": "tnlm.training.data",
    "compare_arms": "tnlm.training.compare",
    "embedded_corpus": "tnlm.training.corpus",
    "load_run": "tnlm.training.runs",
    "preset": "tnlm.training.presets",
    "train": "tnlm.training.loop",
    "write_shard": "tnlm.training.shards",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tnlm.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
