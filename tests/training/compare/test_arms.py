"""The comparison: recorded curves with a known truth of 0 %, synthetic laws with a known x, and what it refuses.

``speedrun_curves.csv``: validation losses of 28 public runs of one algorithm, 20 with a schedule of 3,350 steps
(``long``) and 8 with 3,150 (``short``); numbers from the logs of the optimisation track of
KellerJordan/modded-nanogpt (MIT).
"""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t, ttest_ind, ttest_rel

from tests.limits import assert_close
from tests.training.small import small_config
from tnlm.training.compare import statistics as cs
from tnlm.training.compare.arms import Options, _spacing, compare_arms, matched_n0
from tnlm.training.compare.report import to_dict, to_text, write
from tnlm.training.compare.runs import Arm, Run, load_curves, load_run

CURVES = Path(__file__).with_name("speedrun_curves.csv")


def arm(*specs):
    return load_curves(CURVES, specs)


def compare(base, variant, **options):
    return compare_arms(base, variant, Options(**{"draws": 400, **options}))


def law(n, x=0.0, c=3.0, a=20.0, b=0.55):
    """Loss of a complete schedule of n steps; a variant with x needs (1 + x) n for the base's loss."""
    return c + a * (n / (1 + x)) ** -b


def make_run(seed, steps, *, x=0.0, noise=0.0, arm="base", facts=None, every=50, **rest):
    """A run on ``law(step)`` plus a constant, which the warm-down removes linearly: its last value is the law's."""
    end = steps - round(0.38 * steps)
    at = np.unique(np.concatenate([np.arange(0, steps, every), [end, steps]]))
    share = np.clip((at - end) / (steps - end), 0, 1)
    losses = law(np.maximum(at, 1), x) + 0.05 * (1 - share) + noise
    defaults = {"warmdown_steps": steps - end, "seconds_per_step": 0.5, "metric": "loss"}
    return Run(
        name=f"{arm}-{seed}-{steps}",
        arm=arm,
        seed=str(seed),
        steps=steps,
        curve_steps=at,
        curve_losses=losses,
        facts=facts or {},
        **{**defaults, **rest},
    )


def make_arm(horizons, *, x=0.0, seeds=3, sigma=0.0, name="base", salt=0, **rest):
    rng = np.random.default_rng([salt, seeds])
    return [
        make_run(seed, n, x=x, noise=sigma * rng.standard_normal(), arm=name, **rest)
        for n in horizons
        for seed in range(seeds)
    ]


class TestRecordedCurves:
    """One algorithm: the true answer is 0."""

    def test_one_horizon_per_arm(self):
        result = compare_arms(arm("short"), arm("long"))
        assert result.e1.status == "not bracketed"
        assert result.e1.value is None
        assert 100 * result.e2a.value == pytest.approx(1.57, abs=0.01)
        assert 100 * result.e2a.low == pytest.approx(1.28, abs=0.02)
        assert 100 * result.e2a.high == pytest.approx(1.88, abs=0.02)
        assert result.e2a.detail["step"] == pytest.approx(3199.6, abs=0.5)
        assert result.e2b.status == "not comparable"
        assert result.final.value == pytest.approx(3.27847 - 3.28810, abs=1e-5)
        text = to_text(result)
        assert "E1 matched  not bracketed" in text
        assert "+1.57% batches [+1.28%, +1.87%]" in text
        assert "biased by the warm-down" in text

    def test_split_seeds_with_both_horizons(self):
        result = compare_arms(arm("short:0-3", "long:0-9"), arm("short:4-7", "long:10-19"))
        assert result.e1.status == "ok"
        assert result.e1.detail["n0"] == pytest.approx(math.sqrt(3150 * 3350))
        assert result.e1.low < 0 < result.e1.high
        assert result.e1.low > -0.01
        assert result.e1.high < 0.01
        assert result.verdict.startswith("not resolved")

    def test_stable_phase(self):
        """The rate of these runs falls over their last 70 %: both horizons are one curve before, not after."""
        result = compare_arms(arm("short"), arm("long"), Options(warmdown=0.7))
        assert result.e3.low < 0 < result.e3.high
        assert abs(result.e3.value) < 0.004
        (warning,) = result.warnings[1:]
        assert warning.startswith("E3 takes the last 70.0% of 3150 and 3350 steps as warm-down, as declared")
        wrong = compare_arms(arm("short"), arm("long"), Options(warmdown=0.381))
        assert wrong.e3.low > 0, "what the warning is about"

    def test_stable_phase_at_one_horizon_for_both_arms(self):
        """Where there is one, a warm-down longer than declared is the same in both arms."""
        base, variant = arm("short:0-3", "long:0-9"), arm("short:4-7")
        assert compare(base, variant).e3.note == "the warm-down of these curves is unknown; give --warmdown"
        result = compare(base, variant, warmdown=0.381)
        assert result.e3.low < 0 < result.e3.high
        assert len(result.warnings) == 1

    def test_coverage_over_random_splits(self):
        """The halves of one pool are anti-correlated, so a little under the nominal 95 % is expected."""
        rng, covered = np.random.default_rng(0), 0
        short, long = arm("short"), arm("long")
        options = Options(draws=600)
        for _ in range(200):
            a, b = rng.permutation(8), rng.permutation(20)
            base = [short[i] for i in a[:4]] + [long[i] for i in b[:10]]
            variant = [short[i] for i in a[4:]] + [long[i] for i in b[10:]]
            e1 = compare_arms(base, variant, options).e1
            covered += e1.low <= 0 <= e1.high
        assert 0.85 <= covered / 200 <= 0.99

    def test_noise_and_seeds_needed(self):
        assert compare_arms(arm("short"), arm("long")).sigma == pytest.approx(0.00099, abs=1e-5)
        published = {"sigma": 0.0012, "slope": 0.0048 / 100, "n0": 3350.0}
        assert [cs.seeds_needed(x, **published) for x in (0.04, 0.02, 0.01)] == [1, 3, 9]


class TestSyntheticLaw:
    @pytest.mark.parametrize("x", [-0.06, 0.0, 0.04])
    @pytest.mark.parametrize("horizons", [(800, 1000, 1250), (700, 850, 1000, 1150, 1300)])
    def test_known_answer(self, x, horizons):
        """Exact on the law (four or more horizons), a chord of log N below it."""
        result = compare(make_arm([1000]), make_arm(horizons, x=x, name="variant"))
        assert result.e1.detail["n0"] == 1000
        assert result.e1.value == pytest.approx(x, abs=2e-4 if len(horizons) >= 4 else 5e-3)
        assert result.e1.detail["n_star"] == pytest.approx(1000 * (1 + result.e1.value))

    def test_interval_covers_at_about_its_rate(self):
        """Three seeds an arm, where plain percentiles would cover 80 % of the time."""
        covered = 0
        unknown = {"sigma": 0.002, "warmdown_steps": None}  # without E3, for speed
        for salt in range(150):
            base = make_arm([1000], salt=2 * salt, **unknown)
            variant = make_arm([900, 1000, 1100], x=0.01, salt=2 * salt + 1, name="variant", **unknown)
            e1 = compare(base, variant, draws=400, seed=salt).e1
            low = -1 if e1.low is None else e1.low
            high = 1 if e1.high is None else e1.high
            covered += low <= 0.01 <= high
        assert 0.88 <= covered / 150 <= 0.995

    def test_stable_phase_needs_no_horizon(self):
        result = compare(make_arm([1000], every=10), make_arm([1000], x=0.05, name="variant", every=10))
        assert result.e3.value == pytest.approx(0.05, abs=2e-3)
        assert result.e3.detail["range"][0] <= result.e3.value <= result.e3.detail["range"][1]

    def test_stable_phase_with_draws_that_reach_no_level(self):
        """Noise larger than the phase: those draws are counted as censored, the others make the interval."""
        noises = (-2.0, 0.0, 2.0)
        base = [make_run(s, 1000, noise=e, every=150) for s, e in enumerate(noises)]
        variant = [make_run(s, 1000, noise=e, every=150, arm="v") for s, e in enumerate(noises)]
        e3 = compare(base, variant).e3
        assert e3.value == pytest.approx(0)
        assert 0 < e3.censored < 1
        assert e3.low <= 0 <= e3.high
        few = compare(make_arm([50]), make_arm([50], name="v")).e3
        assert (few.status, few.note) == ("not comparable", "the base has no two evaluations before step 31")
        apart = compare(make_arm([1000]), make_arm([1000], x=-0.95, name="v")).e3
        assert (apart.status, apart.note) == ("not comparable", "the constant-rate phases share no loss level")

    def test_warm_down_bias_has_the_signs_of_the_theory(self):
        result = compare(make_arm([1000]), make_arm([950, 1000, 1100], x=0.04, name="variant"))
        assert result.e2a.value > result.e1.value + 0.01, "the longer schedule is still warm at N*"
        assert result.e2b.value < result.e1.value - 0.01, "the base is deep in its warm-down there"

    def test_the_answer_in_tokens_flops_and_seconds(self):
        facts = {"tokens_per_step": 1000, "flops_per_token": 5.0}
        costlier = {"tokens_per_step": 1000, "flops_per_token": 6.0}
        base = make_arm([1000], facts=facts)
        variant = make_arm([900, 1000, 1100], x=0.04, name="variant", facts=costlier, seconds_per_step=0.6)
        e1 = compare(base, variant).e1
        assert e1.detail["tokens"] == pytest.approx(e1.value)
        assert e1.detail["flops"] == pytest.approx((1 + e1.value) * 1.2 - 1)
        assert e1.detail["seconds"] == pytest.approx((1 + e1.value) * 1.2 - 1)

    def test_power_law_is_recovered(self):
        steps = np.array([500, 800, 1300, 2100])
        fit = cs.power_law(cs.Horizons(steps, law(steps)[None], np.ones(4)))
        np.testing.assert_allclose([v[0] for v in fit], [3.0, 20.0, 0.55], rtol=2e-3)


class TestCensoring:
    def test_not_reached(self):
        result = compare(make_arm([1000]), make_arm([900, 1000, 1050], x=0.2, name="variant"))
        e1 = result.e1
        assert (e1.status, e1.value, e1.bound) == ("not bracketed", None, pytest.approx(0.05))
        assert e1.note == "not reached by step 1050, x > +5.00%"
        assert result.verdict == "censored: not reached by step 1050, x > +5.00%"
        assert (result.e2a.status, result.e2a.bound) == ("not reached", pytest.approx(0.05))

    def test_passed_before(self):
        result = compare(make_arm([1000]), make_arm([900, 1000], x=-0.3, name="variant"))
        assert result.e1.note == "passed before step 900, x < -10.00%"
        assert result.e2b.status == "not reached"
        assert result.e2b.bound == 0.0

    def test_extrapolation_is_marked(self):
        base = make_arm([1000])
        for horizons, tolerance in (((950, 1000), 0.02), ((700, 800, 900, 1000), 1e-3)):
            variant = make_arm(horizons, x=0.1, name="variant")
            result = compare(base, variant, extrapolate=True)
            assert result.e1.status == "extrapolated"
            assert result.e1.value == pytest.approx(0.1, abs=tolerance)
            assert "extrapolated" in to_text(result)

    def test_an_interval_that_leaves_the_horizons_is_censored(self):
        variant = make_arm([990, 1010], sigma=0.0001, name="variant")
        base = [make_run(s, 1000, noise=n) for s, n in enumerate((-0.003, 0.0, 0.003))]
        result = compare(base, variant)
        assert result.e1.censored > 0.1
        assert result.e1.low is None
        assert result.verdict.startswith("censored: the interval leaves")
        assert "of draws censored" in to_text(result)


class TestFewSeeds:
    def test_one_seed_without_sigma(self):
        result = compare(make_arm([1000], seeds=1), make_arm([900, 1000, 1100], seeds=1, x=0.02, name="variant"))
        assert result.e1.value == pytest.approx(0.02, abs=2e-3)
        assert (result.e1.low, result.e1.high, result.e1.method) == (None, None, "none: one seed")
        assert result.verdict.startswith("no interval: one seed")
        assert (result.final.p, result.sigma) == (None, None)

    @pytest.mark.parametrize("seeds, half_width", [(1, 0.021), (8, 0.0073)])
    def test_delta_method_at_the_published_noise(self, seeds, half_width):
        """Half-widths derived in the literature figures: slope 0.0048 per 100 steps, sigma 0.0012, N0 3,350."""
        slope = 0.0048 / 100
        base = [make_run(0, 3350)]
        variant = [make_run(0, n, arm="variant") for n in (3150, 3350)]
        level = 3.28
        for run in (*base, *variant):
            run.curve_losses[-1] = level + slope * (3350 - run.steps)
        result = compare(base, variant, sigma=0.0012 / math.sqrt(seeds))
        assert result.e1.method == "delta"
        assert_close(result.e1.value, 0, scale=1)
        reach = result.e1.high - result.e1.value
        assert reach == pytest.approx(half_width, rel=0.05)

    def test_branches_of_one_trunk_do_not_average_noise_away(self):
        """Between two horizons, runs of one seed are one run's noise, runs of two seeds half of its variance."""
        base = [make_run(0, 1000)]
        for seeds, parts in ((("0", "0"), 1 + 1), (("0", "1"), 1 + 1 / 2)):
            variant = [make_run(seed, n, arm="v") for seed, n in zip(seeds, (900, 1111))]
            e1 = compare(base, variant, sigma=0.001).e1
            assert (e1.method, e1.detail["n0"]) == ("delta", 1000)
            at = math.log(e1.detail["n_star"] / 900) / math.log(1111 / 900)
            assert at == pytest.approx(0.5, abs=0.03)
            sd = 0.001 * math.sqrt(parts) / e1.detail["slope"] / 1000
            assert e1.high - e1.value == pytest.approx(1.959964 * sd, rel=2e-3)

    def test_a_horizon_of_one_seed_has_no_bootstrap(self):
        """A seed that alone has a horizon would count once in every draw: its noise would be missed."""
        variant = [*make_arm([900, 1000, 1100], seeds=4, x=0.02, name="v"), make_run(4, 1000, x=0.02, arm="v")]
        result = compare(make_arm([1000]), variant, sigma=0.001)
        assert (result.e1.method, result.e2b.method) == ("delta", "delta")
        assert result.e3.method == "none: fewer than three seeds"
        assert result.e2a.method == "bootstrap", "at step 1100 all four are alike"

    def test_final_difference_uses_the_given_sigma(self):
        result = compare(make_arm([1000], seeds=1), make_arm([1000], seeds=1, x=0.1, name="v"), sigma=0.01, margin=1.0)
        assert result.final.test == "z, given sigma"
        assert result.final.high - result.final.value == pytest.approx(1.959964 * 0.01 * math.sqrt(2))
        assert result.final.p_worse < 1e-6, "far from a whole nat worse"


FACTS = {
    "recipe": "replication",
    "dtype": "float32",
    "seq": 128,
    "val_tokens": 1024,
    "val_fingerprint": "v",
    "tokenizer": "bytes",
    "tokenizer_hash": "t",
    "n_params": 1000,
    "flops_per_token": 6000,
    "tokens_per_step": 512,
    "data_fingerprint": "d",
    "data_order": "stream",
    "implementation": "auto",
    "version": {"tnlm": "1"},
    "settings": {"lr": 0.1, "clip": None},
    "model": {"mlp": "swiglu"},
}


class TestPaired:
    def test_shared_seeds_narrow_the_interval(self):
        """Noise common to both arms cancels when seed and data order are shared."""
        rng = np.random.default_rng(5)
        noise = 0.01 * rng.standard_normal(6)
        variant_facts = {**FACTS, "model": {"mlp": "bilinear"}}
        base = [make_run(s, n, noise=e, facts=FACTS) for s, e in enumerate(noise) for n in (800, 1000, 1200)]
        variant = [
            make_run(s, n, x=0.03, noise=e, arm="v", facts=variant_facts)
            for s, e in enumerate(noise)
            for n in (800, 1000, 1200)
        ]
        paired = compare(base, variant)
        assert paired.paired
        assert paired.e1.high - paired.e1.low < 1e-3
        assert paired.final.test == "paired t"
        other = [make_run(s + 100, r.steps, x=0.03, arm="v", facts=variant_facts) for s in range(6) for r in base[:3]]
        unpaired = compare(base, other)
        assert not unpaired.paired
        assert unpaired.e1.high - unpaired.e1.low > 10 * (paired.e1.high - paired.e1.low)

    def test_data_is_compared_as_far_as_it_is_read(self):
        """A shard that was added for a longer horizon is no difference; another one, or a shuffle over it, is."""

        def told(base, variant):
            runs = [
                make_run(0, 1000, arm=name, facts={**FACTS, "data_fingerprint": name, "shards_read": read})
                for name, read in (("a", base), ("b", variant))
            ]
            result = compare(runs[:1], runs[1:])
            return result.paired, [w for w in result.warnings if "training data" in w]

        different = (False, ["training data differ: a and b"])
        assert told(["x", "y"], ["x", "y", "z"]) == told(["x"], ["x"]) == (True, [])
        assert told(["x", "y"], ["x", "z", "y"]) == told(None, ["x"]) == told(None, None) == different

    def test_differences_equal_scipy(self):
        a, b = np.array([1.0, 1.2, 0.9, 1.4]), np.array([1.1, 1.5, 1.3, 1.2])
        welch = ttest_ind(b, a[:3], equal_var=False)
        mine = cs.difference(a[:3], b, paired=False, confidence=0.9)
        assert mine.p == pytest.approx(welch.pvalue)
        np.testing.assert_allclose([mine.low, mine.high], welch.confidence_interval(0.9), rtol=1e-9)
        pairs = ttest_rel(b, a)
        mine = cs.difference(a, b, paired=True, confidence=0.95, margin=0.4)
        assert mine.p == pytest.approx(pairs.pvalue)
        np.testing.assert_allclose([mine.low, mine.high], pairs.confidence_interval(0.95), rtol=1e-9)
        assert mine.p_worse == pytest.approx(ttest_rel(b - 0.4, a, alternative="less").pvalue)

    def test_differences_by_the_formulas_of_the_books(self):
        """Welch's t with Satterthwaite's degrees of freedom, and z, written out."""
        a, b, margin = np.array([3.0, 3.2, 2.9]), np.array([3.1, 3.5, 3.3, 3.2, 3.3]), 0.05
        parts = a.var(ddof=1) / 3, b.var(ddof=1) / 5
        error = math.sqrt(sum(parts))
        freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 4)
        gap, reach = b.mean() - a.mean(), t.ppf(0.95, freedom) * error
        mine = cs.difference(a, b, paired=False, confidence=0.9, margin=margin, sigma=9.0)
        expected = [
            gap,
            gap - reach,
            gap + reach,
            2 * t.sf(gap / error, freedom),
            t.cdf((gap - margin) / error, freedom),
        ]
        got = [mine.value, mine.low, mine.high, mine.p, mine.p_worse]
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
        one = cs.difference(a[:1], b, paired=False, confidence=0.9, margin=margin, sigma=0.1)
        gap, error = b.mean() - 3.0, 0.1 * math.sqrt(1 + 1 / 5)
        expected = [gap - 1.6448536269514722 * error, math.erfc(gap / error / math.sqrt(2))]
        np.testing.assert_allclose([one.low, one.p], expected, rtol=0, atol=1e-12)
        assert one.p_worse == pytest.approx(1 - math.erfc((gap - margin) / error / math.sqrt(2)) / 2, abs=1e-12)

    @pytest.mark.parametrize("paired", [True, False])
    def test_runs_without_spread(self, paired):
        same, other = np.full(3, 3.0), np.full(3, 2.0)
        equal = cs.difference(same, same, paired=paired, confidence=0.95, margin=0.1)
        assert (equal.low, equal.high, equal.p, equal.p_worse) == (0.0, 0.0, 1.0, 0.0)
        worse = cs.difference(other, same, paired=paired, confidence=0.95, margin=0.1)
        assert (worse.low, worse.high, worse.p, worse.p_worse) == (1.0, 1.0, 0.0, 1.0)
        assert cs.difference(same, same, paired=paired, confidence=0.95, margin=0.0).p_worse == 1.0

    def test_branches_of_one_trunk_are_one_seed(self):
        """Four horizons of one seed each time are three draws, not twelve."""
        runs = make_arm([900, 1000, 1100, 1200], seeds=3, sigma=0.001)
        strata = cs.strata_of([r.seed for r in runs], [r.steps for r in runs])
        weights = cs.resampled_weights(strata, draws=50, seed=1)
        assert [len(stratum) for stratum in strata] == [3]
        assert cs.freedom(weights[1:] @ np.array([r.final for r in runs]), weights[1:], strata) == pytest.approx(2)
        for seed in range(3):
            same = [i for i, r in enumerate(runs) if r.seed == str(seed)]
            assert (weights[:, same] == weights[:, same[:1]]).all()
        assert (weights[1:].sum(1) == 4 * 2).all(), "n - 1 of n units are drawn"


class TestRefusals:
    @pytest.mark.user_error
    @pytest.mark.parametrize(
        "key, value, message",
        [
            ("val_fingerprint", "w", "one validation tokens .by hash., got v .* and w .*evaluate both alike"),
            ("val_tokens", 2048, "number of validation tokens, got 1024 .* and 2048"),
            ("seq", 256, "sequence length, got 128"),
            ("tokenizer_hash", "u", "vocabulary .*--metric bits_per_byte"),
            ("recipe", "replication-exact", "recipe, got replication .* and replication-exact"),
            ("dtype", "bfloat16", "dtype, got float32"),
        ],
    )
    def test_incomparable_runs(self, key, value, message):
        base = make_arm([1000], facts=FACTS)
        variant = make_arm([900, 1000], facts={**FACTS, key: value}, name="v")
        with pytest.raises(ValueError, match=message):
            compare(base, variant)

    def test_bits_per_byte_compares_across_vocabularies(self):
        base = make_arm([1000], facts=FACTS, metric="bits_per_byte")
        other = {**FACTS, "tokenizer_hash": "u", "val_fingerprint": "w", "val_tokens": 2048}
        result = compare(base, make_arm([900, 1000, 1100], facts=other, name="v", metric="bits_per_byte"))
        assert result.e1.status == "ok"
        assert [w.split(" differ")[0] for w in result.warnings] == [
            "validation tokens (by hash)",
            "number of validation tokens",
            "vocabulary (by hash)",
        ]
        assert "bits/byte" in to_text(result)

    @pytest.mark.parametrize(
        "key, value, message",
        [
            ("tokens_per_step", 1024, "tokens per step differ: 512 and 1024"),
            ("data_order", "shuffle", "data order differ: stream and shuffle"),
            ("data_fingerprint", "e", "training data differ: d and e"),
            ("n_params", 1020, r"parameters by \+2.0%"),
            ("implementation", "triton", "attention implementation differ: auto and triton"),
            ("settings", {"lr": 0.2, "clip": None}, "training settings differ: lr 0.1 and 0.2$"),
            ("model", {"mlp": "swiglu", "d_qk": 4}, "models differ in more than mlp and attention: d_qk None and 4$"),
            ("version", {"tnlm": "2"}, "code version differ"),
        ],
    )
    def test_warnings(self, key, value, message):
        base = make_arm([1000], facts=FACTS)
        result = compare(base, make_arm([900, 1000, 1100], facts={**FACTS, key: value}, name="v"))
        assert len(result.warnings) == 1
        assert re.search(message, result.warnings[0])
        assert f"warning     {result.warnings[0]}" in to_text(result)

    def test_nothing_to_warn_of(self):
        base = make_arm([1000], facts=FACTS)
        other = {**FACTS, "n_params": 1005, "flops_per_token": 7000, "model": {"mlp": "bilinear"}}
        assert compare(base, make_arm([1000], facts=other, name="v")).warnings == []

    def test_warm_down_rules(self):
        base = make_arm([1000], facts=FACTS)
        variant = make_arm([1000], facts=FACTS, name="v", warmdown_steps=200)
        assert compare(base, variant).warnings == ["warm-down rules differ: 200 of 1000, 380 of 1000 steps"]
        rounded = make_arm([36, 44], facts=FACTS, every=4), make_arm([40], facts=FACTS, name="v", every=4)
        assert {run.warmdown_steps for arm in rounded for run in arm} == {14, 15, 17}
        assert compare(*rounded).warnings == []
        same_steps = make_arm([900, 1100], facts=FACTS, name="v", warmdown_steps=380)
        assert compare(base, same_steps).warnings == []

    @pytest.mark.user_error
    @pytest.mark.parametrize(
        "base, variant, message",
        [
            (list, lambda: make_arm([1000]), "base arm must hold at least one run"),
            (lambda: make_arm([1000]) * 2, lambda: make_arm([1000], name="v"), "once per horizon in the base arm"),
            (lambda: make_arm([1000]), lambda: make_arm([1000]), "one arm only, got base-0-1000, base-1-1000"),
            (
                lambda: [*make_arm([1000], facts=FACTS), *make_arm([1100], facts={**FACTS, "n_params": 2000})],
                lambda: make_arm([1000], name="v", facts=FACTS),
                "base arm must have one parameter count, got 1000 .* two arms",
            ),
            (
                lambda: [
                    *make_arm([1000], facts={**FACTS, "model": {"mlp": "swiglu", "qk_norm": True}}),
                    *make_arm([9], facts={**FACTS, "model": {"mlp": "swiglu", "qk_norm": False}}),
                ],
                lambda: make_arm([1000], name="v", facts=FACTS),
                r"base arm must have one model, got qk_norm True and False \(base-0-1000, ",
            ),
            (
                lambda: [make_run(seed, 1000, trunk="t") for seed in (0, 1)],
                lambda: make_arm([1000], name="v"),
                "branches of one trunk",
            ),
            (
                lambda: make_arm([1000]),
                lambda: make_arm([1000], name="v", metric="bits_per_byte"),
                "one metric, got bits_per_byte, loss",
            ),
        ],
    )
    def test_inconsistent_arms(self, base, variant, message):
        with pytest.raises(ValueError, match=message):
            compare(base(), variant())

    def test_settings_are_compared_over_all_runs(self):
        three = [{**FACTS, "settings": {"lr": lr, "clip": clip}} for lr, clip in ((0.1, None), (0.2, None), (0.1, 1.0))]
        runs = [make_run(seed, 1000, facts=facts) for seed, facts in enumerate(three)]
        (warning,) = compare(runs, make_arm([1000], name="v", facts=FACTS)).warnings
        assert warning.endswith("settings differ: clip None and 1.0; lr 0.1 and 0.2"), "of all runs, not of two"


def test_the_rule_of_n0():
    assert matched_n0([1000], [900, 1100]) == 1000
    assert matched_n0([900, 1000], [950]) == 1000
    assert matched_n0([900, 1100], [1000, 1300]) == pytest.approx(math.sqrt(1000 * 1100))
    assert matched_n0([900, 1000], [1100, 1300]) is None
    assert matched_n0([900, 1100], [1000, 1300], at=950) == 950
    assert matched_n0([900, 1100], [1000, 1300], at=1200) is None


def test_at_outside_the_base_is_not_bracketed():
    result = compare(make_arm([1000]), make_arm([900, 1100], name="v"), at=1050)
    assert (result.e1.status, result.e1.note) == ("not bracketed", "N0 = 1050 is outside the base's horizons [1000]")


class TestEstimators:
    @pytest.mark.parametrize("values", [[5, 4, 3], [3, 4, 5], [5, 3, 4, 2], [2, 2, 1], [7]])
    def test_decreasing_fit_is_the_projection(self, values):
        """Against pooling adjacent violators by hand, with unequal weights."""
        counts = np.arange(1, len(values) + 1)
        blocks = [[float(v), int(c), 1] for v, c in zip(values, counts)]
        i = 0
        while i + 1 < len(blocks):
            if blocks[i][0] < blocks[i + 1][0]:
                (a, m, k), (b, n, j) = blocks[i], blocks.pop(i + 1)
                blocks[i] = [(a * m + b * n) / (m + n), m + n, k + j]
                i = max(0, i - 1)
            else:
                i += 1
        expected = [value for value, _, size in blocks for _ in range(size)]
        np.testing.assert_allclose(cs.decreasing_fit(np.array([values], float), counts)[0], expected)

    def test_crossing_of_the_running_minimum(self):
        steps = np.array([10, 20, 30, 40])
        curves = np.array([[5.0, 3.0, 4.0, 1.0]] * 5)
        found = cs.first_crossing(steps, curves, np.array([6.0, 4.0, 3.0, 2.0, 0.5]))
        np.testing.assert_allclose(found, [10, 15, 20, 35, np.inf])

    @pytest.mark.parametrize("at, spacing", [(0, 10), (5, 10), (10, 10), (20, 30), (42, 5), (45, 5)])
    def test_spacing_of_the_evaluations_around_a_step(self, at, spacing):
        assert _spacing(np.array([0, 10, 40, 45]), at) == spacing

    def test_steps_to_is_the_inverse_of_loss_at(self):
        for steps in ([900, 1100], [800, 1000, 1300], [700, 900, 1100, 1400]):
            steps = np.array(steps)
            held = cs.Horizons(steps, law(steps)[None], np.ones(len(steps)))
            for n in (float(steps[0] + 1), 1000.0, float(steps[-1] - 1)):
                assert cs.steps_to(held, cs.loss_at(held, n))[0] == pytest.approx(n)

    def test_flat_horizons_have_no_answer(self):
        flat = cs.Horizons(np.array([900, 1100]), np.array([[3.0, 3.1]]), np.ones(2))
        assert not np.isfinite(cs.steps_to(flat, np.array([3.05]))).any()

    def test_means_of_draws_have_the_right_variance(self):
        values = np.random.default_rng(0).standard_normal(5)
        weights = cs.resampled_weights(cs.strata_of(range(5), "ccccc"), draws=40_000)
        means = cs.weighted_means(weights, values)
        assert means[0] == pytest.approx(values.mean())
        assert means[1:].var() == pytest.approx(values.var(ddof=1) / 5, rel=0.03)

    def test_interval_widens_for_few_seeds(self):
        draws = np.random.default_rng(0).standard_normal(200_000)
        assert cs.interval(draws, 0.95, 1e9) == pytest.approx((-1.96, 1.96), abs=0.03)
        assert cs.interval(draws, 0.95, 4.0) == pytest.approx((-2.776, 2.776), abs=0.08)

    def test_freedom_of_a_difference_of_means_is_welchs(self):
        rng = np.random.default_rng(1)
        few, many = 3 * rng.standard_normal(4), rng.standard_normal(15)
        strata = cs.strata_of(range(19), "a" * 4 + "b" * 15)
        weights = cs.resampled_weights(strata, draws=40_000)[1:]
        gaps = cs.weighted_means(weights[:, 4:], many) - cs.weighted_means(weights[:, :4], few)
        assert cs.freedom(gaps, weights, strata) == pytest.approx(ttest_ind(many, few, equal_var=False).df, rel=0.02)
        assert cs.freedom(np.zeros(40_000), weights, strata) == math.inf


class TestReport:
    def test_json_keys(self, tmp_path):
        result = compare(make_arm([1000], facts=FACTS), make_arm([900, 1000, 1100], x=0.02, facts=FACTS, name="v"))
        written = json.loads(write(result, tmp_path / "out").read_text())
        assert written == json.loads(json.dumps(to_dict(result)))
        for key in ("e1", "e2a", "e2b", "e3"):
            assert {"value", "low", "high", "status"} <= written[key].keys()
        assert written["e1"]["value"] == result.e1.value
        assert written["variant"]["horizons"]["1000"]["runs"] == 3
        assert written["base"]["val_fingerprint"] == "v"

    def test_text_of_run_folders(self):
        other = {**FACTS, "n_params": 1100, "flops_per_token": 6600}
        text = to_text(
            compare(
                make_arm([1000], facts=FACTS),
                make_arm([900, 1000, 1100], x=0.02, facts=other, name="v", seconds_per_step=0.55),
            )
        )
        assert "recipe replication   val CE nats/token, 1,024 tokens, T=128" in text
        assert "(+10.0%)   flops/token 0.00 / 0.00 GF (+10.0%)   tokens/step 512   warm-down 38.0%" in text
        assert "% tokens, +" in text
        assert "% flops, +" in text
        assert "% seconds" in text
        assert "causal half not discounted" in text


class TestRunFolders:
    @pytest.fixture
    def folder(self, tmp_path):
        folder = tmp_path / "run"
        folder.mkdir()
        config = small_config(tmp_path, seed=3, implementation="eager").with_model(attention="softmax").to_dict()
        start = {
            "kind": "start",
            "step": 0,
            "recipe": "replication",
            "n_params": 1000,
            "flops_per_token": 6000,
            "tokens_per_step": 512,
            "warmdown_steps": 8,
            "dtype": "float32",
            "versions": {"tnlm": "1"},
            "data": {"fingerprint": "d", "order": "stream", "val_fingerprint": "v", "tokenizer_hash": "t"},
        }
        events = [start, *({"kind": "train", "step": s, "loss": 5.0, "dt": 0.1 * s} for s in range(1, 21))]
        for step in (0, 10, 20):
            val = {"kind": "val", "step": step, "loss": 5 - step / 10, "bits_per_byte": 2.0, "val_tokens": 64}
            events.append(val)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return folder

    def test_what_is_read(self, folder):
        run = load_run(folder)
        assert (run.arm, run.seed, run.steps, run.final, run.warmdown_steps) == ("bilinear+softmax", "3", 20, 3.0, 8)
        assert run.curve_steps.tolist() == [0, 10, 20]
        assert run.seconds_per_step == pytest.approx(1.05)
        assert run.facts["settings"]["lr_matrix"] == 0.02
        assert (run.facts["seq"], run.facts["val_tokens"], run.facts["val_fingerprint"]) == (6, 64, "v")
        assert load_run(folder, metric="bits_per_byte").final == 2.0

    def test_a_resumed_run_is_described_by_its_last_start(self, folder):
        """Its first part ran under other sizes of micro-batches, or another version."""
        metrics = folder / "metrics.jsonl"
        start = {**json.loads(metrics.read_text().splitlines()[0]), "kind": "resume", "step": 10}
        other = {**start, "dtype": "bfloat16", "warmdown_steps": 7, "versions": {"tnlm": "2"}}
        with metrics.open("a") as file:
            file.write(json.dumps(other) + "\n")
        run = load_run(folder)
        assert (run.facts["dtype"], run.warmdown_steps, run.facts["version"]) == ("bfloat16", 7, {"tnlm": "2"})

    def test_branches_name_their_trunk(self, folder, tmp_path):
        config = json.loads((folder / "config.json").read_text())
        config["branched_from"] = str(tmp_path / "trunk" / "checkpoints" / "step_10")
        (folder / "config.json").write_text(json.dumps(config))
        assert load_run(folder).trunk == str((tmp_path / "trunk").resolve())

    def test_a_line_cut_by_a_kill_is_ignored(self, folder):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "val", "st')
        assert load_run(folder).final == 3.0

    @pytest.mark.user_error
    @pytest.mark.parametrize(
        "damage, message",
        [
            (lambda lines: lines[:-1], "must be finished, got validation up to step 10 of 20"),
            (lambda lines: lines[-1:], "must hold a start event"),
            (lambda lines: ["[1]\n"], r"metrics.jsonl line 1 must be a JSON object with kind, step"),
        ],
        ids=["unfinished", "no start", "no event"],
    )
    def test_damaged_logs(self, folder, damage, message):
        metrics = folder / "metrics.jsonl"
        metrics.write_text("".join(damage(metrics.read_text().splitlines(keepends=True))))
        with pytest.raises(ValueError, match=message):
            load_run(folder)

    @pytest.mark.user_error
    def test_a_folder_without_a_log_or_a_configuration(self, folder):
        (folder / "metrics.jsonl").unlink()
        with pytest.raises(ValueError, match=r"must hold the file metrics\.jsonl"):
            load_run(folder)
        (folder / "config.json").write_text('{"seed": 1}')
        with pytest.raises(ValueError, match="missing batch, micro_batch, model, steps"):
            load_run(folder)

    @pytest.mark.user_error
    def test_no_bits_per_byte(self, folder):
        text = (folder / "metrics.jsonl").read_text().replace('"bits_per_byte": 2.0', '"bits_per_byte": null')
        (folder / "metrics.jsonl").write_text(text)
        with pytest.raises(ValueError, match="recorded no bits_per_byte"):
            load_run(folder, metric="bits_per_byte")


class TestCurveFiles:
    def test_arms_by_group_and_run(self):
        runs = arm("short:0-2,7", "long:19")
        assert [r.name for r in runs] == ["short:0", "short:1", "short:2", "short:7", "long:19"]
        assert [r.steps for r in runs] == [3150] * 4 + [3350]
        assert runs[0].final == 3.2885
        assert len(arm("short")) == 8

    @pytest.mark.user_error
    @pytest.mark.parametrize(
        "specs, message",
        [
            (["middle"], "no group 'middle', it holds long, short"),
            (["short:9"], "has no run '9', asked for by 'short:9'"),
            (["short:3-1"], "must look like GROUP:0-3,7"),
            (["short:"], None),
            (["short:0", "short:0-1"], "given once in an arm, got short:0 twice"),
        ],
    )
    def test_specs(self, specs, message):
        if message is None:
            assert len(arm(*specs)) == 8
            return
        with pytest.raises(ValueError, match=message):
            arm(*specs)

    @pytest.mark.user_error
    @pytest.mark.parametrize(
        "text, message",
        [
            ("group,run,step,val_loss\n", "lacks schedule_steps"),
            ("group,run,schedule_steps,step,val_loss\na,0,10,x,3\n", "a row must hold numbers"),
            (
                "group,run,schedule_steps,step,val_loss\na,0,10,5,nan\na,0,10,10,3\n",
                "run a:0 must have finite losses to be compared, got nan at step 5",
            ),
            ("group,run,schedule_steps,step,val_loss\na,0,10,10,inf\n", "got inf at step 10; leave a run"),
            ("group,run,schedule_steps,step,val_loss\na,0,10,5,3\n", "its last step there, got .* last step 5"),
            ("group,run,schedule_steps,step,val_loss\na,0,10,10,3\na,0,10,10,3\n", "2 rows for 1 steps"),
        ],
    )
    def test_damaged_tables(self, tmp_path, text, message):
        (tmp_path / "c.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_curves(tmp_path / "c.csv", ["a"])
        with pytest.raises(ValueError, match="must be a CSV file, but there is none"):
            load_curves(tmp_path / "absent.csv", ["a"])


def test_curves_of_a_cell_share_their_steps():
    short = make_run(0, 1000)
    long = make_run(1, 1000)
    fewer = Run(
        name="f",
        arm="base",
        seed="2",
        steps=1000,
        curve_steps=np.array([0, 500, 1000]),
        curve_losses=np.array([9, 4, 3]),
    )
    steps, losses = Arm([short, long, fewer], "base").curves(1000)
    assert steps.tolist() == [0, 500, 1000]
    np.testing.assert_array_equal(losses[2], [9, 4, 3])


def test_the_documented_example(monkeypatch, capsys):
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    (code,) = re.findall(r"```python\n(.*?)```", (root / "docs" / "comparison.md").read_text(), re.DOTALL)
    exec(code, {})
    assert "E1 matched  not bracketed" in capsys.readouterr().out
