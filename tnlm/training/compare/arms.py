"""Comparison of two arms: how many percent more batches the variant needs for the base's loss, in four readings.

``L_a(N)`` is the final validation loss of arm a after a *complete schedule* of N steps.

N0 is a number of steps of the base, N* the number that the variant needs for the same loss. Each reading has its
uncertainty:

- **E1, matched schedule** (primary): ``x = N* / N0 - 1`` with ``L_variant(N*) = L_base(N0)``; :func:`matched_n0`
  chooses N0. Needs two or more complete variant horizons around N*.
- **E2a, within schedule**: first step at which the variant's own curve is at the base's *final* loss, over N0,
  the base's longest horizon. Biased: a step inside a warm-down is not a complete run.
- **E2b, mirror**: the longest common horizon over the first step at which the base's curve is at the variant's final
  loss. Biased likewise.
- **E3, stable phase**: ratio of the steps at which both arms pass a level in their constant-rate phases.

Runs are read by :mod:`tnlm.training.compare.runs`; the estimators are in :mod:`tnlm.training.compare.statistics`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy.stats import norm

from tnlm.training.compare import statistics as cs
from tnlm.training.compare.checks import check, is_paired
from tnlm.training.compare.runs import Arm, Run

Status = Literal["ok", "extrapolated", "not bracketed", "not reached", "not comparable"]
E3_LEVELS = 40
MIN_SEEDS = 3
"""Below this many seeds in a cell: no bootstrap."""


@dataclass(frozen=True)
class Options:
    """Options of a comparison."""

    at: float | int | None = None
    """N0 of E1 in steps, instead of the rule."""
    sigma: float | None = None
    """Known standard deviation of one run's final loss, for arms of fewer than three seeds."""
    margin: float | None = None
    """Also test that the variant is not worse by more than this, in units of the metric."""
    extrapolate: bool = False
    """Continue the ends of the variant's horizons where they do not bracket N*; marked in the status."""
    warmdown: float | None = None
    """Warm-down of curves recorded elsewhere, as a fraction of the steps; E3 needs it."""
    draws: int = 10_000
    seed: int = 0
    confidence: float = 0.95

    def __post_init__(self) -> None:
        for name in ("at", "sigma", "margin"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number above 0, got {value}")
        if self.warmdown is not None and not 0 <= self.warmdown < 1:
            raise ValueError(f"warmdown must be a fraction of the steps in [0, 1), got {self.warmdown}")


@dataclass(frozen=True)
class Reading:
    """One estimate of the extra batches, as fractions: 0.04 is 4 % more steps for the variant."""

    status: Status
    value: float | None = None
    low: float | None = None
    high: float | None = None
    """Ends of the interval; None where there is none, or where it falls among censored draws."""
    method: str = "none"
    """bootstrap, delta, or none, with the reason."""
    bound: float | None = None
    """When not reached: the value is above (or below, see ``note``) this."""
    censored: float | None = None
    """Fraction of bootstrap draws without a value."""
    note: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison: readings, verdict and warnings, with the arms they are of."""

    base: Arm
    variant: Arm
    options: Options
    e1: Reading
    e2a: Reading
    e2b: Reading
    e3: Reading
    final: cs.Difference
    final_steps: tuple[int, int]
    """Horizons of the two final losses: the longest common one, else the longest of each."""
    sigma: float | None
    """Standard deviation of one run: given, or pooled over all arms and horizons."""
    paired: bool
    verdict: str
    seeds_needed: int | None
    """Seeds per arm at which E1's value would be resolved with 80 % power."""
    warnings: list[str]


class _Bootstrap:
    """Bootstrap over the seeds: how often each run counts in each draw, and intervals from the draws."""

    def __init__(self, base: Arm, variant: Arm, options: Options, *, paired: bool, sigma: float | None):
        self.options, self.sigma = options, sigma
        runs = [*base.runs, *variant.runs]
        roles = [0] * len(base.runs) + [1] * len(variant.runs)
        units = [run.seed if paired else (role, run.seed) for role, run in zip(roles, runs)]
        cells = [(role, run.steps) for role, run in zip(roles, runs)]
        self._strata = cs.strata_of(units, cells)
        self._weights = cs.resampled_weights(self._strata, draws=options.draws, seed=options.seed)
        self._columns = {id(run): i for i, run in enumerate(runs)}
        self._drawn_among = {column: len(stratum) for stratum in self._strata for unit in stratum for column in unit}

    def means(self, arm: Arm, horizon: int, values: np.ndarray) -> np.ndarray:
        """Mean over a cell in each draw; row 0 is the data."""
        columns = [self._columns[id(run)] for run in arm.cell(horizon)]
        return cs.weighted_means(self._weights[:, columns], values)

    def suffices(self, cells: Sequence[tuple[Arm, int]]) -> bool:
        """Whether every run of these arms and horizons is drawn among enough seeds for a bootstrap."""
        columns = [self._columns[id(run)] for arm, horizon in cells for run in arm.cell(horizon)]
        return min(self._drawn_among[column] for column in columns) >= MIN_SEEDS

    def reading(
        self,
        x: np.ndarray,
        cells: Sequence[tuple[Arm, int]],
        deviation: Callable[[], float],
        status: Status,
        **rest: Any,
    ) -> Reading:
        """The reading of ``x`` (rows,) with its interval; ``cells`` are the arms and horizons that it comes from.

        ``deviation()`` is the standard deviation of x over that of one run's loss, for the delta method.
        """
        value, confidence = float(x[0]), self.options.confidence
        if self.suffices(cells):
            known = np.isfinite(x)
            freedom = cs.freedom(x[known], self._weights[known], self._strata)
            low, high = cs.interval(x[1:][~np.isnan(x[1:])], confidence, freedom)
            censored = float(np.mean(~known[1:]))
            return Reading(status, value, _finite(low), _finite(high), "bootstrap", censored=censored, **rest)
        if self.sigma is None:
            return Reading(status, value, method="none: one seed", **rest)
        reach = float(norm.ppf((1 + confidence) / 2)) * self.sigma * deviation()
        return Reading(status, value, value - reach, value + reach, "delta", **rest)


def compare_arms(base: Sequence[Run], variant: Sequence[Run], options: Options | None = None) -> Comparison:
    """Compare two arms; each may hold several seeds and horizons.

    Raises:
        ValueError: The runs cannot be compared (names what differs), or an arm is empty or inconsistent.
    """
    options = options or Options()
    base_arm, variant_arm = Arm(base, "base"), Arm(variant, "variant")
    warnings = check(base_arm, variant_arm)
    paired = is_paired(base_arm, variant_arm)
    groups = [arm.finals(n) for arm in (base_arm, variant_arm) for n in arm.horizons]
    sigma = options.sigma if options.sigma is not None else cs.pooled_sd(groups)
    boot = _Bootstrap(base_arm, variant_arm, options, paired=paired, sigma=sigma)
    e1 = _matched_schedule(base_arm, variant_arm, boot)
    cells = _longest(base_arm, variant_arm)
    steps = (cells[0][1], cells[1][1])
    if (warning := _declared_warmdown(cells, options.warmdown)) is not None:
        warnings.append(warning)
    final = cs.difference(
        *_aligned(cells, paired),
        paired=paired and steps[0] == steps[1],
        confidence=options.confidence,
        margin=options.margin,
        sigma=sigma,
    )
    verdict, needed = _verdict(e1, sigma)
    return Comparison(
        base=base_arm,
        variant=variant_arm,
        options=options,
        e1=e1,
        e2a=_within_schedule(base_arm, variant_arm, boot),
        e2b=_mirror(base_arm, variant_arm, boot),
        e3=_stable_phase(base_arm, variant_arm, boot),
        final=final,
        final_steps=steps,
        sigma=sigma,
        paired=paired,
        verdict=verdict,
        seeds_needed=needed,
        warnings=warnings,
    )


def _longest(base: Arm, variant: Arm) -> list[tuple[Arm, int]]:
    """Both arms at their longest common horizon; without one, each at its own longest."""
    common = set(base.horizons) & set(variant.horizons)
    return [(arm, max(common) if common else arm.horizons[-1]) for arm in (base, variant)]


def _aligned(cells: Sequence[tuple[Arm, int]], paired: bool) -> list[np.ndarray]:
    """Final losses of both arms, in the order of the seeds when they are paired."""
    runs = [arm.cell(n) for arm, n in cells]
    if paired:
        runs = [sorted(cell, key=lambda run: run.seed) for cell in runs]
    return [np.array([run.final for run in cell]) for cell in runs]


def _declared_warmdown(cells: Sequence[tuple[Arm, int]], fraction: float | None) -> str | None:
    """A warning where E3 depends on a declared warm-down, an error of which can read as extra batches."""
    recorded = all(arm.cell(steps)[0].warmdown_steps is not None for arm, steps in cells)
    base_steps, variant_steps = (steps for _, steps in cells)
    if fraction is None or recorded or base_steps == variant_steps:
        return None
    return (
        f"E3 takes the last {fraction:.1%} of {base_steps} and {variant_steps} steps as warm-down, as declared; were "
        "it longer, the schedules would differ within E3's range and read as extra batches"
    )


def _horizons(arm: Arm, boot: _Bootstrap) -> cs.Horizons:
    means = [boot.means(arm, n, arm.finals(n)) for n in arm.horizons]
    counts = np.array([len(arm.cell(n)) for n in arm.horizons])
    return cs.Horizons(np.array(arm.horizons), np.stack(means, 1), counts)


def matched_n0(base: Sequence[int], variant: Sequence[int], at: float | int | None = None) -> float | None:
    """N0 of E1, in steps; None when the arms share no range, or ``at`` is outside the base's.

    It is ``at``; else the geometric middle of the range that both arms cover with several horizons; else the base's
    longest horizon.
    """
    if at is not None:
        return float(at) if base[0] <= at <= base[-1] else None
    if len(base) == 1 or len(variant) == 1:
        return float(base[-1])
    low, high = max(base[0], variant[0]), min(base[-1], variant[-1])
    return math.sqrt(low * high) if low <= high else None


def _matched_schedule(base: Arm, variant: Arm, boot: _Bootstrap) -> Reading:
    """E1: how many more batches, as the fraction ``N* / N0 - 1``, from complete schedules of equal final loss."""
    options = boot.options
    n0 = matched_n0(base.horizons, variant.horizons, options.at)
    detail: dict[str, Any] = {"n0": n0, "n_star": None, "horizons": variant.horizons, "base_horizons": base.horizons}
    if n0 is None:
        what = f"N0 = {options.at:g} is" if options.at is not None else "the variant's horizons are"
        return Reading("not bracketed", note=f"{what} outside the base's horizons {base.horizons}", detail=detail)
    if len(variant.horizons) == 1:
        note = f"the variant has one horizon, {variant.horizons[0]}; add complete runs around N* (tnlm-train branch)"
        return Reading("not bracketed", note=note, detail=detail)
    base_curve, variant_curve = _horizons(base, boot), _horizons(variant, boot)
    target = cs.loss_at(base_curve, n0)
    found = cs.steps_to(variant_curve, target)
    status: Status = "ok"
    if not np.isfinite(found[0]) and options.extrapolate:
        found, status = cs.steps_to(variant_curve, target, extrapolate=True), "extrapolated"
    if not np.isfinite(found[0]):
        low, high = variant_curve.range
        if found[0] > 0:
            bound = high / n0 - 1
            note = f"not reached by step {high}, x > {100 * bound:+.2f}%"
        else:
            bound = low / n0 - 1
            note = f"passed before step {low}, x < {100 * bound:+.2f}%"
        censored = float(np.mean(~np.isfinite(found[1:])))
        return Reading("not bracketed", bound=bound, note=note, censored=censored, detail=detail)
    n_star = float(found[0])
    x = n_star / n0 - 1
    slope = cs.slope_at(variant_curve, n_star)
    parts = [
        cs.mean_variance(curve.steps, [[run.seed for run in arm.cell(n)] for n in arm.horizons], at)
        for arm, curve, at in ((base, base_curve, n0), (variant, variant_curve, n_star))
    ]
    spread = math.sqrt(sum(parts))
    detail |= {"n_star": n_star, "loss": float(target[0]), "slope": slope, **_converted(x, base, variant)}
    cells = [(arm, n) for arm in (base, variant) for n in arm.horizons]
    return boot.reading(found / n0 - 1, cells, lambda: spread / slope / n0, status, detail=detail)


def _converted(x: float, base: Arm, variant: Arm) -> dict[str, float | None]:
    """Extra batches as extra tokens, FLOPs and seconds: ``(1 + x)`` times the ratio of the cost of a step, minus 1."""

    def extra(base_cost: float | int | None, variant_cost: float | int | None) -> float | None:
        return (1 + x) * variant_cost / base_cost - 1 if base_cost and variant_cost else None

    tokens = [arm.fact("tokens_per_step") for arm in (base, variant)]
    flops = [arm.fact("flops_per_token") for arm in (base, variant)]
    work = [t * f if t and f else None for t, f in zip(tokens, flops)]
    return {
        "tokens": extra(*tokens),
        "flops": extra(*work),
        "seconds": extra(base.seconds_per_step, variant.seconds_per_step),
    }


def _within_schedule(base: Arm, variant: Arm, boot: _Bootstrap) -> Reading:
    """E2a: the step at which the variant's own curve is at the base's final loss, over the base's horizon, minus 1."""
    n0, horizon = base.horizons[-1], variant.horizons[-1]
    steps, losses = variant.curves(horizon)
    target = boot.means(base, n0, base.finals(n0))
    curves = boot.means(variant, horizon, losses)
    found = cs.first_crossing(steps, curves, target)
    detail = {"n0": n0, "variant_horizon": horizon, "step": _finite(float(found[0]))}
    note = "biased by the warm-down"
    if not np.isfinite(found[0]):
        bound = horizon / n0 - 1
        return Reading(
            "not reached", bound=bound, note=f"not reached by step {horizon}, x > {100 * bound:+.2f}%", detail=detail
        )
    detail["eval_spacing"] = _spacing(steps, float(found[0])) / n0
    cells = [(base, n0), (variant, horizon)]
    slope = cs.crossing_slope(steps, curves[0], float(found[0]))
    return boot.reading(found / n0 - 1, cells, lambda: _spread(cells) / slope / n0, "ok", note=note, detail=detail)


def _mirror(base: Arm, variant: Arm, boot: _Bootstrap) -> Reading:
    """E2b: the common horizon over the step at which the base's curve is at the variant's final loss, minus 1."""
    common = set(base.horizons) & set(variant.horizons)
    if not common:
        return Reading("not comparable", note="needs one horizon that both arms have")
    n = max(common)
    steps, losses = base.curves(n)
    curves = boot.means(base, n, losses)
    found = cs.first_crossing(steps, curves, boot.means(variant, n, variant.finals(n)))
    detail = {"horizon": n, "step": _finite(float(found[0]))}
    if not np.isfinite(found[0]):
        note = f"the base does not reach the variant's final loss by step {n}, x < +0.00%"
        return Reading("not reached", bound=0.0, note=note, detail=detail)
    at = float(found[0])
    detail["eval_spacing"] = _spacing(steps, at) / n
    cells = [(base, n), (variant, n)]
    slope = cs.crossing_slope(steps, curves[0], at)
    with np.errstate(divide="ignore"):
        x = np.where(np.isfinite(found), n / found - 1, -np.inf)
    note = "biased by the warm-down"
    return boot.reading(x, cells, lambda: _spread(cells) / slope * n / at**2, "ok", note=note, detail=detail)


def _spread(cells: Sequence[tuple[Arm, int]]) -> float:
    """Standard deviation of a difference of two means, over that of one run."""
    return math.sqrt(sum(1 / len(arm.cell(horizon)) for arm, horizon in cells))


def _stable_phase(base: Arm, variant: Arm, boot: _Bootstrap) -> Reading:
    """E3: median over loss levels of the ratio of the steps at which the arms pass them before warm-down, minus 1."""
    phases = []
    cells = _longest(base, variant)
    for arm, horizon in cells:
        end = arm.stable_end(horizon, boot.options.warmdown)
        if end is None:
            return Reading("not comparable", note="the warm-down of these curves is unknown; give --warmdown")
        steps, losses = arm.curves(horizon)
        keep = (steps > 0) & (steps <= end)
        if keep.sum() < 2:
            return Reading("not comparable", note=f"the {arm.role} has no two evaluations before step {end:g}")
        phases.append((steps[keep], boot.means(arm, horizon, losses[:, keep])))
    (base_steps, base_curves), (variant_steps, variant_curves) = phases
    lowest = [np.minimum.accumulate(curves[0]) for _, curves in phases]
    high, low = min(line[0] for line in lowest), max(line[-1] for line in lowest)
    if low >= high:
        return Reading("not comparable", note="the constant-rate phases share no loss level")
    # evenly spaced in the base's steps, so that the early steep part does not fill the median
    ends = cs.first_crossing(base_steps, np.stack([lowest[0]] * 2), np.array([high, low]))
    levels = np.interp(np.linspace(float(ends[0]), float(ends[1]), E3_LEVELS), base_steps, lowest[0])
    ratios = np.empty((len(base_curves), len(levels)))
    for k, level in enumerate(levels):
        target = np.full(len(ratios), level)
        at = cs.first_crossing(base_steps, base_curves, target)
        variant_at = cs.first_crossing(variant_steps, variant_curves, target)
        reached = np.isfinite(at) & np.isfinite(variant_at)  # else the draw says nothing about this level
        ratios[:, k] = np.where(reached, variant_at, np.nan) / np.where(reached, at, 1) - 1
    known = np.isfinite(ratios).any(1)
    median = np.full(len(ratios), np.nan)
    median[known] = np.nanmedian(ratios[known], axis=1)
    detail = {
        "levels": levels.tolist(),
        "values": [float(v) for v in ratios[0]],
        "range": [float(np.nanmin(ratios[0])), float(np.nanmax(ratios[0]))],
    }
    note = f"median over losses {levels[-1]:.3f}..{levels[0]:.3f}; silent about final quality"
    if not boot.suffices(cells):
        return Reading("ok", float(median[0]), method="none: fewer than three seeds", note=note, detail=detail)
    return boot.reading(median, cells, lambda: math.nan, "ok", note=note, detail=detail)


def _verdict(e1: Reading, sigma: float | None) -> tuple[str, int | None]:
    needed = None
    if e1.value and sigma is not None:
        needed = cs.seeds_needed(e1.value, sigma=sigma, slope=e1.detail["slope"], n0=e1.detail["n0"])
    if e1.value is None:
        return f"{'censored' if e1.bound is not None else e1.status}: {e1.note}", None
    if e1.method.startswith("none"):
        return "no interval: one seed; give more seeds, or --sigma", needed
    if e1.low is None or e1.high is None:
        return "censored: the interval leaves the variant's horizons; add horizons", needed
    about = f"about {needed} seeds per arm would be needed" if needed is not None else "no noise was measured"
    if e1.low <= 0 <= e1.high:
        return f"not resolved: {about} for {100 * e1.value:+.2f}%", needed
    more = "more" if e1.value > 0 else "fewer"
    mark = ", extrapolated" if e1.status == "extrapolated" else ""
    return f"resolved{mark}: the variant needs {100 * abs(e1.value):.2f}% {more} batches", needed


def _spacing(steps: np.ndarray, at: float | int) -> float:
    """Steps between the evaluations around ``at``, an uncertainty of the crossing."""
    after = int(np.clip(np.searchsorted(steps, at), 1, len(steps) - 1))
    return float(steps[after] - steps[after - 1])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
