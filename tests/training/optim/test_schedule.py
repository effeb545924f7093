"""The published schedule, at the updates where it bends."""

import pytest

from tests.limits import assert_close
from tnlm.training.optim.schedule import Schedule

PUBLISHED = Schedule(steps=9726, warmdown_steps=3704)


@pytest.mark.parametrize(
    "step, factor",
    [(0, 1), (6021, 1), (6022, 1), (6023, 3703 / 3704), (7874, 1852 / 3704), (9725, 1 / 3704), (9726, 0)],
)
def test_published_learning_rate(step, factor):
    assert PUBLISHED.lr_factor(step) == factor


@pytest.mark.parametrize("step, mu", [(0, 0.85), (1, 0.8502), (250, 0.90), (499, 0.9498), (500, 0.95), (9725, 0.95)])
def test_published_momentum(step, mu):
    assert_close(PUBLISHED.momentum(step), mu)


def test_every_update_of_the_published_run_has_the_published_bits():
    """``get_lr`` and the momentum's ``(1 - frac) * 0.85 + frac * 0.95``, ``frac = min(step / 500, 1)``."""
    steps, down = 3242 * 3, 926 * 4
    for t in range(steps + 1):
        assert PUBLISHED.lr_factor(t) == (1.0 if t < steps - down else (steps - t) / down)
        frac = min(t / 500, 1)
        assert PUBLISHED.momentum(t) == (1 - frac) * 0.85 + frac * 0.95


def test_warm_up_ends_at_the_full_rate():
    schedule = Schedule(steps=10, warmdown_steps=4, warmup_steps=3)
    factors = [schedule.lr_factor(t) for t in range(10)]
    assert factors == [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]
    assert schedule.stable_end == 6


def test_without_any_warm_phase():
    schedule = Schedule(steps=3, warmdown_steps=0, momentum_warmup_steps=0)
    assert [schedule.lr_factor(t) for t in range(4)] == [1, 1, 1, 0]
    assert schedule.momentum(0) == 0.95


@pytest.mark.user_error
@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"warmdown_steps": -1}, {"warmdown_steps": 11}, {"warmup_steps": 7, "warmdown_steps": 4}]
)
def test_schedules_that_do_not_fit(wrong):
    with pytest.raises(ValueError, match=r"steps must be positive and hold warm-up and warm-down, got steps="):
        Schedule(**{"steps": 10, "warmdown_steps": 4, **wrong})
