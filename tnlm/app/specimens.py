"""What the notebooks start from: a model by name, its tokenizer, and text that it was not trained on.

With ``tnlm.app.cli`` and ``tnlm.app.demo`` this is the application layer: it may import training and interp.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tnlm.config import AttentionKind, MLPKind

if TYPE_CHECKING:
    from torch import Tensor

    from tnlm.text.tokenizer import Tokenizer
    from tnlm.training.config import TrainConfig
    from tnlm.transformer import Transformer

TINY = "TNLM_NOTEBOOK_TINY"
"""Environment variable: with ``1`` every preset is trained at a size that takes a second."""


@dataclass(frozen=True, eq=False)
class Specimen:
    """A model and what to read it on."""

    model: "Transformer"
    tokens: "Tensor"
    """Held-out windows, (rows, seq + 1): the last token of a row is only predicted."""
    tokenizer: "Tokenizer"


def get(name: str = "nano", *, rows: int = 32, seq: int = 128) -> Specimen:
    """A model with held-out text: the last tenth of the documents that every Python carries.

    Args:
        name: ``nano`` or ``nano-pure``, trained on the first nine tenths when first asked for (about two CPU-minutes;
            kept in ``runs/``), or whatever :func:`tnlm.load` takes: a run folder, the short name of a released model.
        rows, seq: Windows of the text, and their length, at most the model's ``n_ctx``.

    Raises:
        ValueError: Nothing is found under the name, or the text holds fewer windows.
    """
    import torch

    from tnlm.checkpoints.checkpoint import load
    from tnlm.text.default_tokenizer import find_tokenizer
    from tnlm.training.presets import PRESETS

    if name in PRESETS and not Path(name).exists():
        model, tokenizer = _trained(training_config(name))
    else:
        model = load(name)
        tokenizer = find_tokenizer(model)
    model.eval()
    length = min(seq, model.config.n_ctx) + 1
    ids = _held_out(tokenizer, rows * length)
    if len(ids) < rows * length:
        raise ValueError(f"{rows} windows of {length} tokens need {rows * length}, the held-out text has {len(ids)}")
    return Specimen(model, torch.tensor(ids[: rows * length]).view(rows, length), tokenizer)


def training_config(
    name: str, *, mlp: MLPKind | None = None, attention: AttentionKind | None = None, seed: int = 0
) -> "TrainConfig":
    """A preset as the notebooks train it; two layers, 32 wide, 60 steps under ``TNLM_NOTEBOOK_TINY=1``."""
    from tnlm.training.presets import preset

    config = preset(name, mlp=mlp, attention=attention).replace(seed=seed, sample_tokens=0)
    if os.environ.get(TINY) != "1":
        return config
    config = config.with_model(n_layer=2, n_head=2, d_model=32, n_ctx=64)
    return config.replace(steps=60, val_every=20, val_tokens=1024, save_every=None, threads=1)


def _trained(config: "TrainConfig") -> "tuple[Transformer, Tokenizer]":
    """The finished run in its folder, trained if need be; tiny ones leave nothing behind."""
    from tnlm.checkpoints.checkpoint import load
    from tnlm.text.default_tokenizer import find_tokenizer
    from tnlm.training.run.loop import train

    with tempfile.TemporaryDirectory() as scratch:
        if os.environ.get(TINY) == "1":
            config = config.replace(out=str(Path(scratch) / "run"))
        model = load(train(config, progress=False).folder)
        return model, find_tokenizer(model)


def _held_out(tokenizer: "Tokenizer", count: int) -> list[int]:
    """At least ``count`` ids of the validation documents, each after the end-of-text id, if there are so many."""
    from tnlm.training.data.corpus import embedded_corpus

    before = [] if tokenizer.eot is None else [tokenizer.eot]
    ids: list[int] = []
    for document in embedded_corpus().validation:
        if len(ids) >= count:
            break
        ids += before + tokenizer.encode(document)
    return ids
