"""Comparisons in which no two numbers agree, and the same numbers by loops over the runs' curves.

The first has four shared seeds, listed in opposite orders, a fifth seed of the variant, and a warm-down in every run;
the second one seed an arm and no common horizon. Losses are far from a straight line, costs differ between the arms.
"""

import math
from functools import cache
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from tests.training.compare.test_arms import FACTS, make_run
from tnlm.training.compare.arms import Comparison, Options, compare_arms

Z = 1.959963984540054
"""The normal distribution's 97.5th percentile."""
BASE_FACTS = {**FACTS, "n_params": 1_000_000, "flops_per_token": 6_000_000_000, "implementation": "chunked"}
VARIANT_FACTS = {
    **FACTS,
    "n_params": 1_230_000,
    "flops_per_token": 6_600_000_000,
    "tokens_per_step": 640,
    "implementation": "triton",
    "model": {"mlp": "bilinear"},
}
NOISE = (-0.004, 0.001, 0.007, -0.002, 0.005)
OWN = (0.0006, -0.0011, 0.0002, 0.0004, 0.0)
"""Noise of the variant's runs beside that of their seeds."""


@cache
def shared_seeds() -> Comparison:
    """Base of 700 and 1,000 steps, variant of 800, 1,000 and 1,300, which also has a fifth seed; x is 6 %."""
    base = [
        make_run(s, n, noise=NOISE[s], arm="old", facts=BASE_FACTS, every=40, seconds_per_step=0.5 + 0.1 * s**2)
        for n in (700, 1000)
        for s in range(4)
    ]
    variant = [
        make_run(
            s,
            n,
            x=0.06,
            noise=NOISE[s] + OWN[s],
            arm="new",
            facts=VARIANT_FACTS,
            every=30,
            seconds_per_step=0.9 - 0.1 * s**0.5,
            trunk=f"runs/trunk-{s}",
        )
        for n in (1300, 1000, 800)
        for s in (3, 2, 1, 0, *([4] if n == 1300 else []))
    ]
    return compare_arms(base, variant, Options(draws=300))


@cache
def one_seed_each() -> Comparison:
    """Base of 900 steps, variant of 880 and 1,200, 5 % better; the deviation of one run is given."""
    base = [make_run(7, 900, arm="old", facts=BASE_FACTS, every=40, seconds_per_step=0.7)]
    variant = [
        make_run(8, n, x=-0.01, arm="new", facts=VARIANT_FACTS, every=30, seconds_per_step=n / 1000, trunk="runs/eight")
        for n in (880, 1200)
    ]
    return compare_arms(base, variant, Options(sigma=0.05, margin=0.02, draws=300))


@cache
def one_seed_at_one_horizon() -> Comparison:
    """Both arms of 1,000 steps, the variant 4 % worse; the deviation of one run is given."""
    base = [make_run(7, 1000, arm="old", facts=BASE_FACTS, every=40)]
    variant = [make_run(s, 1000, x=0.04, arm="new", facts=VARIANT_FACTS, every=30) for s in (8, 9)]
    return compare_arms(base, variant, Options(sigma=0.0003, margin=0.02, draws=300))


def mean_curve(runs, steps):
    """Steps and mean losses of the runs of one horizon."""
    cell = [run for run in runs if run.steps == steps]
    at = cell[0].curve_steps.tolist()
    return at, [fmean(run.curve_losses[i] for run in cell) for i in range(len(at))]


def final(runs, steps):
    """Mean final loss of the runs of one horizon."""
    return fmean(run.curve_losses[-1] for run in runs if run.steps == steps)


def crossing(steps, losses, level):
    """Step at which a falling curve is at ``level``, with the length and the slope of its segment."""
    for i in range(1, len(steps)):
        if losses[i] <= level:
            length, drop = steps[i] - steps[i - 1], losses[i - 1] - losses[i]
            return steps[i - 1] + length * (losses[i - 1] - level) / drop, length, drop / length
    raise AssertionError("the curve does not reach the level")


def loss_at(runs, n):
    """Loss of a complete schedule of ``n`` steps on the chord in log n; of one horizon, that of its runs."""
    steps = sorted({run.steps for run in runs})
    if len(steps) == 1:
        return final(runs, n)
    low, high = next(pair for pair in pairwise(steps) if pair[0] <= n <= pair[1])
    place = math.log(n / low) / math.log(high / low)
    return (1 - place) * final(runs, low) + place * final(runs, high)


def steps_to(runs, level):
    """Steps of a complete schedule that ends at ``level``, and the loss per step there."""
    steps = sorted({run.steps for run in runs})
    for low, high in pairwise(steps):
        if final(runs, high) <= level <= final(runs, low):
            drop = final(runs, low) - final(runs, high)
            n = low * (high / low) ** ((final(runs, low) - level) / drop)
            return n, drop / (n * math.log(high / low))
    raise AssertionError("the horizons do not bracket the level")


def stable_phase(result, horizons=(1000, 1000)):
    """Levels and extra batches of E3 at these steps of base and variant, of which 38 % are warm-down."""
    curves = []
    for arm, horizon in zip((result.base, result.variant), horizons, strict=True):
        steps, losses = mean_curve(arm.runs, horizon)
        before = [i for i, step in enumerate(steps) if 0 < step <= horizon - round(0.38 * horizon)]
        curves.append(([steps[i] for i in before], [losses[i] for i in before]))
    steps, losses = curves[0]
    high, low = min(curve[1][0] for curve in curves), max(curve[1][-1] for curve in curves)

    def at(curve, level):
        return curve[0][0] if curve[1][0] <= level else crossing(*curve, level)[0]

    first, last = at(curves[0], high), at(curves[0], low)
    levels = [float(np.interp(first + (last - first) * k / 39, steps, losses)) for k in range(40)]
    return levels, [at(curves[1], level) / at(curves[0], level) - 1 for level in levels]


def pooled_deviation(result):
    """Standard deviation of one run around the mean of its arm and horizon."""
    squares, freedom = 0.0, 0
    for arm in (result.base, result.variant):
        for steps in {run.steps for run in arm.runs}:
            losses = [run.curve_losses[-1] for run in arm.runs if run.steps == steps]
            squares += sum((loss - fmean(losses)) ** 2 for loss in losses)
            freedom += len(losses) - 1
    return math.sqrt(squares / freedom)


def seconds(arm):
    """Median of the seconds per step of the runs."""
    return median(run.seconds_per_step for run in arm.runs)
