"""Mistakes in the comparison, planted one at a time: the test that is named beside each must notice it."""

import pytest

from tests.planted import each_is_noticed
from tests.training.compare import cases, test_arms, test_plot, test_report
from tnlm.training.compare import arms, checks, plot, report, runs

FAULTS = {
    "E2b as 1 - found / n": (
        arms,
        "np.where(np.isfinite(found), n / found - 1, -np.inf)",
        "np.where(np.isfinite(found), 1 - found / n, -np.inf)",
        test_report.TestSharedSeeds.test_mirror,
    ),
    "slope of E2b without the square": (
        arms,
        "_spread(cells) / slope * n / at**2",
        "_spread(cells) / slope * n / at",
        test_report.TestOneHorizon.test_mirror_is_the_horizon_over_the_step,
    ),
    "reach of E2a not over N0": (
        arms,
        "lambda: _spread(cells) / slope / n0,",
        "lambda: _spread(cells) / slope / horizon,",
        test_report.TestSharedSeeds.test_within_the_schedule,
    ),
    "spread of two equal arms": (
        arms,
        "return math.sqrt(sum(1 / len(arm.cell(horizon)) for arm, horizon in cells))",
        "return math.sqrt(2 / len(cells[0][0].cell(cells[0][1])))",
        test_report.TestSharedSeeds.test_within_the_schedule,
    ),
    "spacing of the evaluations before": (
        arms,
        "after = int(np.clip(np.searchsorted(steps, at), 1, len(steps) - 1))",
        "after = len(steps) - 1",
        test_report.TestSharedSeeds.test_within_the_schedule,
    ),
    "pairs in the order of the list": (
        arms,
        "runs = [sorted(cell, key=lambda run: run.seed) for cell in runs]",
        "runs = list(runs)",
        test_report.TestSharedSeeds.test_final_losses_are_paired_by_seed,
    ),
    "shortest common horizon": (
        arms,
        "(arm, max(common) if common else arm.horizons[-1])",
        "(arm, min(common) if common else arm.horizons[-1])",
        test_report.test_final_losses_at_the_longest_common_horizon,
    ),
    "FLOPs of a token, not of a step": (
        arms,
        "extra(*work)",
        "extra(*flops)",
        test_report.TestSharedSeeds.test_the_matched_schedule,
    ),
    "loss of the base at N*": (
        arms,
        '"loss": float(target[0])',
        '"loss": float(cs.loss_at(base_curve, n_star)[0])',
        test_report.TestSharedSeeds.test_the_matched_schedule,
    ),
    "seeds needed at N*": (
        arms,
        'n0=e1.detail["n0"])',
        'n0=e1.detail["n_star"] * 2)',
        test_report.TestSharedSeeds.test_the_matched_schedule,
    ),
    "E3 as a mean": (arms, "np.nanmedian(", "np.nanmean(", test_report.TestSharedSeeds.test_stable_phase),
    "range of E3 over the draws": (
        arms,
        "float(np.nanmin(ratios[0])), float(np.nanmax(ratios[0]))",
        "float(np.nanmin(ratios)), float(np.nanmax(ratios))",
        test_report.TestSharedSeeds.test_stable_phase,
    ),
    "delta method without sigma": (
        arms,
        "* self.sigma * deviation()",
        "* deviation()",
        test_arms.TestFewSeeds.test_branches_of_one_trunk_do_not_average_noise_away,
    ),
    "one implementation for both arms": (
        checks,
        '"data_order", "implementation", "settings", "version")',
        '"data_order", "settings", "version")',
        test_report.TestSharedSeeds.test_the_rest_of_the_file,
    ),
    "mean of the seconds per step": (
        runs,
        "np.median(seconds)",
        "np.mean(seconds)",
        test_report.TestSharedSeeds.test_arms,
    ),
    "E2a printed for E2b": (
        report,
        '("E2b", f"{_value(result.e2b)}',
        '("E2b", f"{_value(result.e2a)}',
        test_report.TestText.test_shared_seeds,
    ),
    "ends of the printed interval": (
        report,
        "for v in (reading.low, reading.high)",
        "for v in (reading.high, reading.low)",
        test_report.TestText.test_shared_seeds,
    ),
    "printed ratio upside down": (
        report,
        "({100 * (b / a - 1):+.1f}%, {kernels})",
        "({100 * (a / b - 1):+.1f}%, {kernels})",
        test_report.TestText.test_shared_seeds,
    ),
    "printed deviation of the population": (
        report,
        "finals.std(ddof=1):",
        "finals.std():",
        test_report.TestText.test_shared_seeds,
    ),
    "written ratio upside down": (
        report,
        "return variant / base if",
        "return base / variant if",
        test_report.TestSharedSeeds.test_arms,
    ),
    "p of any difference for that of the margin": (
        report,
        '"p_worse_than_margin": result.final.p_worse',
        '"p_worse_than_margin": result.final.p',
        test_report.TestText.test_one_seed_each,
    ),
    "error bars that are values": (
        plot,
        '[reading.high - value], "arrayminus": [value - reading.low]',
        '[reading.high], "arrayminus": [reading.low]',
        test_plot.TestComparisonFigure.test_readings,
    ),
    "labels of N0 and N* exchanged": (
        plot,
        '{"n0": "N0", "n_star": "N*"}',
        '{"n0": "N*", "n_star": "N0"}',
        test_plot.TestComparisonFigure.test_marks,
    ),
    "gap of the other sign": (
        plot,
        "variant.mean(0)[np.isin(steps, common)] - base.mean(0)[np.isin(base_steps, common)]",
        "base.mean(0)[np.isin(base_steps, common)] - variant.mean(0)[np.isin(steps, common)]",
        test_plot.TestComparisonFigure.test_gap,
    ),
    "band of the error of the mean": (
        plot,
        "losses.std(0, ddof=1)",
        "losses.std(0, ddof=1) / len(losses) ** 0.5",
        test_plot.TestComparisonFigure.test_curves_and_bands,
    ),
    "FLOPs of a token on the axis": (
        plot,
        "return tokens * flops if",
        "return flops if",
        test_plot.TestComparisonFigure.test_every_unit_of_every_trace,
    ),
}


@pytest.fixture(autouse=True)
def fresh_cases():
    """Comparisons made by the planted code, and none of them kept."""
    made = [cases.shared_seeds, cases.one_seed_each, cases.one_seed_at_one_horizon]
    for make in made:
        make.cache_clear()
    yield
    for make in made:
        make.cache_clear()


test_fault_is_noticed = each_is_noticed(FAULTS)
