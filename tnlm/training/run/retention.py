"""Steps at which a run saves, and the checkpoints that it keeps. Imports no torch."""

from collections.abc import Iterable

from tnlm.training.config import TrainConfig


def is_saved(config: TrainConfig, step: int) -> bool:
    """Whether a run saves after ``step`` updates: every ``save_every``, before the warm-down, and at the end."""
    due = config.save_every is not None and step % config.save_every == 0
    return step > 0 and (due or step in (config.schedule.stable_end, config.steps))


def saved_steps(config: TrainConfig) -> list[int]:
    """All steps that an uninterrupted run saves, ascending."""
    every = config.save_every or config.steps
    candidates = {*range(every, config.steps + 1, every), config.schedule.stable_end, config.steps}
    return sorted(step for step in candidates if is_saved(config, step))


def kept_steps(
    steps: Iterable[int], *, keep_last: int, keep_every: int | None = None, stable_end: int | None = None
) -> set[int]:
    """The steps among ``steps`` whose checkpoints are kept.

    They are the newest ``keep_last``, the multiples of ``keep_every``, and the newest one up to ``stable_end``, the
    first update of the warm-down: a branch of a longer horizon starts there.
    """
    ordered = sorted(steps)
    every = [step for step in ordered if keep_every is not None and step % keep_every == 0]
    stable = [step for step in ordered if stable_end is not None and step <= stable_end]
    return {*ordered[-keep_last:], *every, *stable[-1:]}
