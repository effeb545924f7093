"""Estimators of the comparison, on arrays: resampling, matched schedules, crossings. Imports only numpy and scipy.

Arrays have one row per bootstrap draw, after row 0 with the data themselves, so a point estimate and its draws come
from one pass. Steps are updates, losses any decreasing figure of merit.

The readings E1 to E3, how many percent more batches an arm needs, are computed with them in ``arms.py``.
"""

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

EXPONENTS = np.geomspace(0.02, 5.0, 120)
"""Candidates for b in L = c + a N^-b; the best three are refined by a parabola."""


def strata_of(units: Sequence[Hashable], cells: Sequence[Hashable]) -> list[list[list[int]]]:
    """Group units into strata: a stratum holds the units that occur in the same cells, each as indices of observations.

    A unit is a seed, or a trunk with all its branches; a cell is an arm and horizon.
    """
    members: dict[Hashable, list[int]] = {}
    for column, unit in enumerate(units):
        members.setdefault(unit, []).append(column)
    strata: dict[frozenset, list[list[int]]] = {}
    for columns in members.values():
        strata.setdefault(frozenset(cells[column] for column in columns), []).append(columns)
    return list(strata.values())


def resampled_weights(strata: Sequence[Sequence[Sequence[int]]], *, draws: int, seed: int = 0) -> np.ndarray:
    """Count of each observation in each bootstrap draw, shape (1 + draws, observations); row 0 is ones.

    Units are drawn with replacement within their stratum, so no cell is ever empty and branches of one trunk stay
    together. n - 1 of n are drawn: the draws of a mean then have the variance s^2 / n, without the bias of n draws
    (Efron 1982).
    """
    rng = np.random.default_rng(seed)
    weights = np.ones((1 + draws, sum(len(unit) for stratum in strata for unit in stratum)))
    for stratum in strata:
        n = len(stratum)
        counts = rng.multinomial(max(1, n - 1), [1 / n] * n, size=draws)
        for unit, drawn in zip(stratum, counts.T):
            weights[1:, unit] = drawn[:, None]
    return weights


def freedom(x: np.ndarray, weights: np.ndarray, strata: Sequence[Sequence[Sequence[int]]]) -> float:
    """Degrees of freedom of the spread of the draws ``x``, (draws,), of any statistic, given their ``weights``.

    Satterthwaite's ``(sum V)^2 / sum(V^2 / (n - 1))``, as in Welch's t, with V the variance that a stratum of n units
    gives x: ``n / (n - 1)`` times the sum of squared covariances between x and how often a unit was drawn (the
    infinitesimal jackknife; Efron 2014).
    """
    x = x - x.mean()
    total = weighted = 0.0
    for stratum in strata:
        n = len(stratum)
        counts = weights[:, [unit[0] for unit in stratum]]
        covariances = x @ (counts - counts.mean(0)) / len(x)
        variance = n / max(1, n - 1) * float(covariances @ covariances)
        total += variance
        weighted += variance**2 / max(1, n - 1)
    return total**2 / weighted if weighted > 0 else math.inf


def weighted_means(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Mean of ``values`` (observations, ...) under each row of ``weights`` (rows, observations)."""
    return weights @ values / weights.sum(1).reshape(-1, *[1] * (values.ndim - 1))


@dataclass(frozen=True)
class Horizons:
    """Final losses of one arm: horizons (K,) increasing, means (rows, K), runs behind each mean (K,)."""

    steps: np.ndarray
    means: np.ndarray
    counts: np.ndarray

    @property
    def range(self) -> tuple[int, int]:
        return int(self.steps[0]), int(self.steps[-1])


def decreasing_fit(means: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Least-squares fit that never increases along the last axis, weighted by ``counts`` (isotonic regression).

    By the min-max formula, ``fit[k] = min over i <= k of max over j >= k of the mean of i..j``.
    """
    n = means.shape[-1]
    sums = np.concatenate([np.zeros((*means.shape[:-1], 1)), np.cumsum(means * counts, -1)], -1)
    total = np.concatenate([[0], np.cumsum(counts)])
    block = {
        (i, j): (sums[..., j + 1] - sums[..., i]) / (total[j + 1] - total[i]) for i in range(n) for j in range(i, n)
    }
    fit = [np.min([np.max([block[i, j] for j in range(k, n)], axis=0) for i in range(k + 1)], axis=0) for k in range(n)]
    return np.stack(fit, -1)


def loss_at(arm: Horizons, n: float) -> np.ndarray:
    """Loss of a complete schedule of ``n`` steps, per row: interpolated, or by the power law from four horizons on."""
    if len(arm.steps) >= 4:
        c, a, b = power_law(arm)
        return c + a * n**-b
    fit = decreasing_fit(arm.means, arm.counts)
    first, fraction = _segment(arm.steps, n)
    if len(arm.steps) == 1:
        return fit[:, 0]
    return (1 - fraction) * fit[:, first] + fraction * fit[:, first + 1]


def _segment(steps: np.ndarray, n: float) -> tuple[int, float]:
    """Index of the segment of log N that ``n`` lies in (the nearest outside) and its place there, 0 to 1 inside."""
    if len(steps) == 1:
        return 0, 0.0
    first = int(np.clip(np.searchsorted(steps, n, side="right") - 1, 0, len(steps) - 2))
    low, high = np.log(steps[first]), np.log(steps[first + 1])
    return first, float((math.log(n) - low) / (high - low))


def steps_to(arm: Horizons, target: np.ndarray, *, extrapolate: bool = False) -> np.ndarray:
    """Horizon, in steps, whose final loss is ``target`` (rows,): the inverse of :func:`loss_at`, per row.

    ``inf`` where even the longest horizon stays above the target, ``-inf`` where the shortest is below it;
    ``extrapolate`` continues the end segments (or the law) instead.
    """
    low, high = arm.range
    if len(arm.steps) >= 4:
        c, a, b = power_law(arm)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.where((target > c) & (a > 0), ((target - c) / a) ** (-1 / b), np.inf)
        if extrapolate:
            return found
        return np.where(found > high, np.inf, np.where(found < low, -np.inf, found))
    fit, logs = decreasing_fit(arm.means, arm.counts), np.log(arm.steps)
    found = np.where(target < fit[:, -1], np.inf, -np.inf)
    last = len(arm.steps) - 2
    for k in range(last, -1, -1):
        drop = fit[:, k] - fit[:, k + 1]
        inside = (target <= fit[:, k]) & (target >= fit[:, k + 1])
        if extrapolate:
            inside |= (target > fit[:, k]) if k == 0 else False
            inside |= (target < fit[:, k + 1]) if k == last else False
        with np.errstate(invalid="ignore", divide="ignore"):
            place = np.where(drop > 0, (fit[:, k] - target) / drop, np.nan)
            at = np.exp(logs[k] + place * (logs[k + 1] - logs[k]))
        found = np.where(inside & np.isfinite(at), at, found)
    return found


def power_law(arm: Horizons) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least-squares c, a, b of ``L = c + a N^-b``, per row, weighted by the runs behind each mean."""
    weight = arm.counts / arm.counts.sum()
    scale = arm.steps / arm.steps[0]
    best = np.empty((len(arm.means), len(EXPONENTS)))
    for k, b in enumerate(EXPONENTS):
        best[:, k] = _law(arm.means, weight, scale, np.full(len(arm.means), b))[2]
    k = np.clip(best.argmin(1), 1, len(EXPONENTS) - 2)
    rows, logs = np.arange(len(best)), np.log(EXPONENTS)
    left, middle, right = best[rows, k - 1], best[rows, k], best[rows, k + 1]
    bend = left - 2 * middle + right
    shift = np.divide(left - right, 2 * bend, out=np.zeros_like(bend), where=bend > 0).clip(-1, 1)
    b = np.exp(logs[k] + shift * (logs[1] - logs[0]))
    c, a, _ = _law(arm.means, weight, scale, b)
    return c, a * float(arm.steps[0]) ** b, b


def _law(means: np.ndarray, weight: np.ndarray, scale: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, ...]:
    """c, a and the squared error of means = c + a scale^-b by weighted linear regression, per row."""
    x = scale[None, :] ** -b[:, None]
    dx, dy = x - (x @ weight)[:, None], means - (means @ weight)[:, None]
    a = (dx * dy) @ weight / ((dx * dx) @ weight)
    return means @ weight - a * (x @ weight), a, ((dy - a[:, None] * dx) ** 2) @ weight


def slope_at(arm: Horizons, n: float) -> float:
    """Slope of the loss of complete runs at ``n``, ``|dL/dN|`` in nats per step, from row 0."""
    one = Horizons(arm.steps, arm.means[:1], arm.counts)
    low, high = n * 0.999, n * 1.001
    if len(arm.steps) < 4:
        first, _ = _segment(arm.steps, n)
        low, high = float(arm.steps[first]), float(arm.steps[first + 1])
    return float(abs(loss_at(one, low) - loss_at(one, high))[0]) * (1 / (n * math.log(high / low)))


def mean_variance(steps: np.ndarray, seeds: Sequence[Sequence[str]], n: float) -> float:
    """Variance of the interpolated loss at ``n`` in units of the variance of one run.

    ``seeds`` are those behind each horizon of ``steps``; the runs of one seed share all their noise.
    """
    first, fraction = _segment(steps, n)
    shares = {seed: (1 - fraction) / len(seeds[first]) for seed in seeds[first]}
    if fraction:
        after = seeds[first + 1]
        shares |= {seed: shares.get(seed, 0.0) + fraction / len(after) for seed in after}
    return sum(share**2 for share in shares.values())


def first_crossing(steps: np.ndarray, curves: np.ndarray, target: np.ndarray) -> np.ndarray:
    """First step at which the running minimum of each curve is at or below its target; ``inf`` if it never is.

    Linear between evaluations. ``steps`` (M,), ``curves`` (rows, M), ``target`` (rows,).
    """
    lowest = np.minimum.accumulate(curves, axis=1)
    below = lowest <= target[:, None]
    after = below.argmax(1)
    before = np.maximum(after - 1, 0)
    rows = np.arange(len(curves))
    high, low = lowest[rows, before], lowest[rows, after]
    fraction = np.divide(high - target, high - low, out=np.ones_like(high), where=high > low)
    found = steps[before] + fraction * (steps[after] - steps[before])
    return np.where(below.any(1), np.where(after == 0, steps[0], found), np.inf)


def crossing_slope(steps: np.ndarray, curve: np.ndarray, at: float) -> float:
    """Loss per step of a curve's running minimum around the crossing ``at``."""
    lowest = np.minimum.accumulate(curve)
    after = int(np.clip(np.searchsorted(steps, at), 1, len(steps) - 1))
    return float((lowest[after - 1] - lowest[after]) / (steps[after] - steps[after - 1]))


def interval(draws: np.ndarray, confidence: float, freedom: float) -> tuple[float, float]:
    """Percentile interval, at the percentiles that Student's t of ``freedom`` asks for in place of the normal.

    Plain percentiles are too narrow for a handful of seeds (Hesterberg 2015, arXiv:1411.5279). An end that falls
    among censored draws is infinite.
    """
    tail = float(stats.norm.sf(stats.t.ppf((1 + confidence) / 2, freedom)))
    low, high = np.quantile(draws, [tail, 1 - tail], method="nearest")
    return float(low), float(high)


def pooled_sd(groups: Sequence[np.ndarray]) -> float | None:
    """Standard deviation of one run around its group's mean; None when no group has two runs."""
    freedom = sum(len(g) - 1 for g in groups)
    if freedom < 1:
        return None
    return math.sqrt(sum(float(np.sum((g - g.mean()) ** 2)) for g in groups) / freedom)


@dataclass(frozen=True)
class Difference:
    """Difference of the mean final losses, variant minus base, with its interval and p values."""

    value: float
    low: float | None
    high: float | None
    p: float | None
    """Two-sided, for any difference."""
    p_worse: float | None
    """One-sided p that the variant is worse by more than ``margin``: small means not inferior."""
    test: str


def difference(
    base: np.ndarray,
    variant: np.ndarray,
    *,
    paired: bool,
    confidence: float,
    margin: float | None = None,
    sigma: float | None = None,
) -> Difference:
    """Difference of means: paired t, else Welch's t; with too few runs a z test if ``sigma`` is known, else none."""
    value = float(variant.mean() - base.mean())

    def t_test(than: float, alternative: str) -> Any:
        if paired:
            return stats.ttest_1samp(variant - base, than, alternative=alternative)
        return stats.ttest_ind(variant - than, base, equal_var=False, alternative=alternative)

    if min(len(base), len(variant)) >= 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # runs without spread: p is 0, or nan for no difference
            both = t_test(0.0, "two-sided")
            worse = None if margin is None else _p(t_test(margin, "less").pvalue)
        low, high = (float(end) for end in both.confidence_interval(confidence))
        return Difference(value, low, high, _p(both.pvalue), worse, "paired t" if paired else "Welch t")
    if sigma is None:
        return Difference(value, None, None, None, None, "none: one seed")
    error = sigma * math.sqrt(1 / len(base) + 1 / len(variant))
    reach = float(stats.norm.ppf((1 + confidence) / 2)) * error
    with np.errstate(divide="ignore", invalid="ignore"):
        z, z_worse = np.divide([value, value - (margin or 0.0)], error)
    worse = None if margin is None else _p(stats.norm.cdf(z_worse))
    return Difference(value, value - reach, value + reach, _p(2 * stats.norm.sf(abs(z))), worse, "z, given sigma")


def _p(value: float) -> float:
    """A p value as a float; 1 where it is nan, as for two equal groups without spread."""
    return 1.0 if math.isnan(value) else float(value)


def seeds_needed(x: float, *, sigma: float, slope: float, n0: float, power: float = 0.8) -> int:
    """Seeds per arm to tell extra batches ``x`` from 0 at two-sided 5 %, normal approximation.

    ``2 ((z_0.975 + z_power) sigma / (slope n0 x))^2``, rounded up, with the slope of complete runs per step.
    """
    z = float(stats.norm.ppf(0.975) + stats.norm.ppf(power))
    return max(1, math.ceil(2 * (z * sigma / (slope * n0 * abs(x))) ** 2))
