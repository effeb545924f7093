"""Learning-rate factor and Muon momentum of each update, from the public recipe. Imports no torch.

Update ``t = 0, 1, ...`` of ``steps``: the factor is 1 until the warm-down and then falls linearly,
``(steps - t) / warmdown_steps``, so the last update has ``1 / warmdown_steps``. One factor multiplies every
learning rate. Momentum rises linearly over its own warm-up and is set before the update.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning-rate factor and momentum as functions of the update, counted from 0.

    Raises:
        ValueError: Warm-up and warm-down do not fit into the steps.
    """

    steps: int
    warmdown_steps: int
    """3,704 of 9,726 in the published run."""
    warmup_steps: int = 0
    momentum_start: float = 0.85
    momentum_end: float = 0.95
    momentum_warmup_steps: int = 500

    def __post_init__(self) -> None:
        least = min(self.steps - 1, self.warmdown_steps, self.warmup_steps, self.momentum_warmup_steps)
        if least < 0 or self.warmup_steps + self.warmdown_steps > self.steps:
            raise ValueError(
                "steps must be positive and hold warm-up and warm-down, got "
                f"steps={self.steps}, warmup_steps={self.warmup_steps}, warmdown_steps={self.warmdown_steps}, "
                f"momentum_warmup_steps={self.momentum_warmup_steps}"
            )

    @property
    def stable_end(self) -> int:
        """First update of the warm-down; updates in ``[warmup_steps, stable_end)`` have factor 1."""
        return self.steps - self.warmdown_steps

    def lr_factor(self, step: int) -> float:
        """Factor on every learning rate at update ``step``; 0 from ``steps`` on."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if step < self.stable_end:
            return 1.0
        return max(0, self.steps - step) / self.warmdown_steps if self.warmdown_steps else 0.0

    def momentum(self, step: int) -> float:
        """Muon's momentum at update ``step``: ``momentum_start`` at 0, ``momentum_end`` from its warm-up's end."""
        if step >= self.momentum_warmup_steps:
            return self.momentum_end
        done = step / self.momentum_warmup_steps
        return (1 - done) * self.momentum_start + done * self.momentum_end
