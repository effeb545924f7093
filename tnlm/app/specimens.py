"""Models for the notebooks: each by name, with its tokenizer and text that it was not trained on."""

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
"""Environment variable; if it is ``1``, presets are trained at a size that takes one second."""


@dataclass(frozen=True, eq=False)
class Specimen:
    """A model, its tokenizer and held-out tokens."""

    model: "Transformer"
    tokens: "Tensor"
    """Held-out windows, (rows, seq + 1): the last token of a row is only predicted."""
    tokenizer: "Tokenizer"


def get(name: str = "nano", *, rows: int = 32, seq: int = 128) -> Specimen:
    """A model with held-out text: the last tenth of the documentation that comes with Python.

    Args:
        name: ``nano`` or ``nano-pure``, trained on the first nine tenths when first asked for (about two CPU-minutes;
            kept in ``runs/``), or a name or path for :func:`tnlm.load`, such as a run folder or a released model.
        rows, seq: Number of windows of the text, and their length, which is cut to the model's ``n_ctx``.

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
    """The configuration of a preset for the notebooks; tiny (60 steps) if ``TNLM_NOTEBOOK_TINY=1``."""
    from tnlm.training.presets import preset

    config = preset(name, mlp=mlp, attention=attention).replace(seed=seed, sample_tokens=0)
    if os.environ.get(TINY) != "1":
        return config
    config = config.with_model(n_layer=2, n_head=2, d_model=32, n_ctx=64)
    return config.replace(steps=60, val_every=20, val_tokens=1024, save_every=None, threads=1)


def _trained(config: "TrainConfig") -> "tuple[Transformer, Tokenizer]":
    """Model and tokenizer of a run, trained if its folder is not finished; tiny runs use a temporary folder."""
    from tnlm.checkpoints.checkpoint import load
    from tnlm.text.default_tokenizer import find_tokenizer
    from tnlm.training.run.loop import train

    with tempfile.TemporaryDirectory() as scratch:
        if os.environ.get(TINY) == "1":
            config = config.replace(out=str(Path(scratch) / "run"))
        model = load(train(config, progress=False).folder)
        return model, find_tokenizer(model)


def _held_out(tokenizer: "Tokenizer", count: int) -> list[int]:
    """At least ``count`` ids of the validation documents, or all; each document follows the end-of-text id."""
    from tnlm.training.data.corpus import embedded_corpus

    before = [] if tokenizer.eot is None else [tokenizer.eot]
    ids: list[int] = []
    for document in embedded_corpus().validation:
        if len(ids) >= count:
            break
        ids += before + tokenizer.encode(document)
    return ids
