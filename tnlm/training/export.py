"""From a checkpoint of a run to a folder that stands alone: weights, configuration, tokenizer, card."""

from pathlib import Path
from typing import Any

import tnlm
from tnlm.card import model_card
from tnlm.tokenizer import FILE_NAME, Tokenizer
from tnlm.training.checkpointing import find_latest, load
from tnlm.training.metrics import read_metrics
from tnlm.training.presets import load_config


def export(run: Path, out: Path, *, step: int | None = None) -> dict[str, Any]:
    """Write the model of ``run`` to ``out``, in the dtypes it was trained in.

    Args:
        step: Of the checkpoint; the newest complete one by default.

    Returns:
        ``folder step n_params`` and the recorded losses.

    Raises:
        ValueError: There is no such complete checkpoint.
    """
    config = load_config(run / "config.json")
    path = find_latest(run)[0] if step is None else run / "checkpoints" / f"step_{step:06d}"
    if path is None:
        raise ValueError(f"{run} holds no complete checkpoint; let it train to one, or to its end")
    checkpoint = load(path)
    model = tnlm.load(path, dtype="checkpoint")
    events = [event for event in read_metrics(run / "metrics.jsonl") if event["step"] <= checkpoint.step]
    losses = {event["kind"]: event["loss"] for event in events if event["kind"] in ("train", "val")}
    facts = {
        "data": config.data,
        "recipe": config.recipe,
        "steps": f"{checkpoint.step} of {config.steps}",
        "tokens": checkpoint.step * config.tokens_per_step,
        "seed": config.seed,
        **{f"{kind}_loss": f"{loss:.4f} nats per token" for kind, loss in losses.items()},
        "versions": checkpoint.facts["versions"],
    }
    tnlm.save(model, out, card=model_card(model.config, training=facts))
    if (path / FILE_NAME).is_file():
        Tokenizer.load(path).save(out)
    return {"folder": str(out), "step": checkpoint.step, "n_params": model.config.n_params, **losses}
