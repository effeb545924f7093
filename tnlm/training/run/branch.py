"""Configuration of a run that continues a checkpoint of another run under a schedule of its own."""

from pathlib import Path

from tnlm.training.config import TrainConfig, load_config
from tnlm.training.run.checkpointing import complete_steps


def branch_config(
    trunk: Path, *, steps: int, at: int | None = None, warmdown: float | None = None, out: str | None = None
) -> TrainConfig:
    """The configuration that continues a checkpoint of ``trunk`` under a schedule of ``steps``.

    So several horizons share one constant-rate phase, and each costs only its warm-down. As long as both schedules are
    constant up to the checkpoint, the branch is bit for bit the run that would have been trained with ``steps`` from
    the beginning; it copies the trunk's log up to there. Branches of one trunk share their noise: they count as one
    seed.

    Args:
        at: Step of the checkpoint; by default the last one before either warm-down begins.
        warmdown: Fraction of ``steps``, by default the trunk's.
        out: By default ``{trunk}-steps{steps}``.

    Raises:
        ValueError: The trunk has no such checkpoint, or it lies in a warm-down.

    Source: Haegele et al. 2024, arXiv:2405.18392.
    """
    config = load_config(trunk / "config.json")
    branch = config.replace(
        steps=steps,
        warmdown=config.warmdown if warmdown is None else warmdown,
        out=out or f"{trunk}-steps{steps}",
    )
    stable_end = min(config.schedule.stable_end, branch.schedule.stable_end)
    held = complete_steps(trunk)
    usable = [step for step in held if step <= stable_end]
    if at is None and not usable:
        raise ValueError(
            f"{trunk} must hold a complete checkpoint up to step {stable_end}, where a warm-down begins, got "
            f"{_listed(held)}; a run keeps its last checkpoint before its own warm-down, which serves longer horizons: "
            "for a shorter one train it with --save-every N --keep-every N"
        )
    if at is not None and at not in usable:
        raise ValueError(
            f"{trunk} must hold a complete checkpoint at step {at}, at or before step {stable_end} where a warm-down "
            f"begins, got {_listed(held)}"
        )
    step = max(usable) if at is None else at
    return branch.replace(branched_from=str((trunk / "checkpoints" / f"step_{step:06d}").resolve()))


def _listed(steps: list[int]) -> str:
    return f"steps {', '.join(map(str, steps))}" if steps else "none"
