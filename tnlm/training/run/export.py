"""Export of a checkpoint to a model folder: weights, configuration, tokenizer, card."""

from pathlib import Path
from typing import Any

import tnlm
from tnlm.checkpoints.card import model_card
from tnlm.text.tokenizer import FILE_NAME, Tokenizer
from tnlm.training.config import load_config
from tnlm.training.run.checkpointing import check, complete_steps, load
from tnlm.training.run.metrics import read_metrics


def export_run(run: Path, out: Path, *, step: int | None = None) -> dict[str, Any]:
    """Write the model of ``run`` to ``out``, in the dtypes it was trained in.

    Args:
        step: Step of the checkpoint; the newest complete one by default.

    Returns:
        ``folder step n_params`` and the losses recorded at that step.

    Raises:
        ValueError: There is no such complete checkpoint, or it is damaged.
    """
    config = load_config(run / "config.json")
    held = complete_steps(run)
    if not held:
        raise ValueError(f"{run} holds no complete checkpoint; let it train to one, or to its end")
    if step is not None and step not in held:
        raise ValueError(f"{run} must hold a complete checkpoint of step {step}, got {', '.join(map(str, held))}")
    path = run / "checkpoints" / f"step_{held[-1] if step is None else step:06d}"
    check(path)
    checkpoint = load(path)
    model = tnlm.load(checkpoint.path, dtype="checkpoint")
    events = [event for event in read_metrics(run / "metrics.jsonl") if event["step"] == checkpoint.step]
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
    tokenizer = Tokenizer.load(checkpoint.path) if (checkpoint.path / FILE_NAME).is_file() else None
    tnlm.save(model, out, card=model_card(model.config, training=facts), tokenizer=tokenizer)
    return {"folder": str(out), "step": checkpoint.step, "n_params": model.config.n_params, **losses}
