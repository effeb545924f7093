"""The text that a command measures a model on: a file, or the validation tokens of the model's training run."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from tnlm.text.default_tokenizer import folders_of

if TYPE_CHECKING:
    from torch import Tensor

    from tnlm.text.tokenizer import Tokenizer
    from tnlm.training.data.stream import Validation
    from tnlm.transformer import Transformer


def validation_of(run: Path) -> "tuple[Validation, Tokenizer | None]":
    """The validation set of a run folder and its tokenizer."""
    from tnlm.training.config import load_config
    from tnlm.training.data.inputs import open_inputs
    from tnlm.training.run.distributed import World

    inputs = open_inputs(load_config(run / "config.json"), World.from_environment())
    inputs.loader.close()
    return inputs.validation, inputs.tokenizer


def run_of(model: "Transformer") -> Path | None:
    """The folder of the training run that a model was loaded from; None if it comes from none."""
    from tnlm.checkpoints.local import is_run

    return next(filter(is_run, folders_of(model)), None)


def text_or_held_out(
    text: Path | None, model: "Transformer", tokenizer: "Tokenizer", seq: int | None
) -> "tuple[Tensor, int | None, str]":
    """Ids of a text file or of a run's validation tokens, their window, and their name for tables and records.

    Warns if the validation tokens are not those that the run was trained with.

    Raises:
        ValueError: No file is given, and the model comes from no run.
    """
    import torch

    if text is not None:
        return torch.tensor(tokenizer.encode(text.read_text(encoding="utf-8"))), seq, str(text)
    from tnlm.output.files import read_json

    run = run_of(model)
    if run is None:
        raise ValueError("which text? Pass --text FILE; only a training run brings validation tokens of its own")
    validation, _ = validation_of(run)
    facts = next((path for folder in folders_of(model) if (path := folder / "training.json").is_file()), None)
    trained_with = None if facts is None else read_json(facts).get("val_fingerprint")
    if trained_with not in (None, validation.fingerprint):
        warnings.warn(
            f"the validation tokens are not those that {run} was trained with: their sha256 is "
            f"{validation.fingerprint[:16]}, and {facts} records {trained_with[:16]}; results do not compare "
            "with the curve of the run",
            stacklevel=2,
        )
    windows = torch.cat(list(validation.batches(1024))).long()
    stream = torch.cat([windows[0, :1], windows[:, 1:].flatten()])
    return stream, validation.seq if seq is None else seq, f"validation tokens of {run}"
