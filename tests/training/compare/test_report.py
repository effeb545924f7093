"""Every number that a comparison prints, writes or draws, against loops over the runs' curves."""

import json
import math
import platform
import re
from functools import cached_property

import numpy as np
import pytest

import tnlm
from tests.training.compare import cases
from tests.training.compare.cases import Z, crossing, final, mean_curve
from tnlm.training.compare.report import FLOPS_CONVENTION, to_dict, to_record, to_text, write

LOOSE = 1e-9
"""Relative error that the few roundings of these short sums stay far below."""


def close(value):
    return pytest.approx(value, rel=LOOSE)


def e1_by_hand(result, n0, sigma, spread):
    base, variant = result.base.runs, result.variant.runs
    level = cases.loss_at(base, n0)
    n_star, slope = cases.steps_to(variant, level)
    reach = Z * sigma * spread(n_star) / slope / n0
    return level, n_star, slope, n_star / n0 - 1, reach


class TestSharedSeeds:
    """Paired, a fifth seed at one horizon: E1 and E2a by the delta method, E2b and E3 by the bootstrap."""

    @cached_property
    def result(self):
        return cases.shared_seeds()

    @cached_property
    def data(self):
        return to_dict(self.result)

    def test_the_matched_schedule(self):
        n0, sigma = math.sqrt(800 * 1000), cases.pooled_deviation(self.result)

        def spread(n_star):
            """Runs of one seed share their noise: four seeds around N0, five of unequal shares around N*."""
            after = math.log(n_star / 800) / math.log(1000 / 800)
            assert 0 < after < 1, "between the horizons of four seeds"
            return math.sqrt(1 / 4 + 1 / 4)

        level, n_star, slope, x, reach = e1_by_hand(self.result, n0, sigma, spread)
        e1 = self.data["e1"]
        found = [e1[key] for key in ("n0", "n_star", "loss", "slope", "value", "low", "high")]
        assert found == close([n0, n_star, level, slope, x, x - reach, x + reach])
        assert (e1["status"], e1["method"]) == ("ok", "delta")
        assert (e1["horizons"], e1["base_horizons"]) == ([800, 1000, 1300], [700, 1000])
        work = 640 * 6.6 / (512 * 6.0)
        assert e1["tokens"] == close((1 + x) * 640 / 512 - 1)
        assert e1["flops"] == close((1 + x) * work - 1)
        assert e1["seconds"] == close(
            (1 + x) * cases.seconds(self.result.variant) / cases.seconds(self.result.base) - 1
        )
        assert self.data["sigma"] == close(sigma)
        normal = Z + 0.8416212335729143  # two-sided 5 %, 80 % power
        assert self.data["seeds_needed"] == math.ceil(2 * (normal * sigma / (slope * n0 * x)) ** 2)

    def test_within_the_schedule(self):
        target = final(self.result.base.runs, 1000)
        at, length, slope = crossing(*mean_curve(self.result.variant.runs, 1300), target)
        reach = Z * self.data["sigma"] * math.sqrt(1 / 4 + 1 / 5) / slope / 1000
        e2a, x = self.data["e2a"], at / 1000 - 1
        found = [e2a[key] for key in ("step", "eval_spacing", "value", "low", "high")]
        assert found == close([at, length / 1000, x, x - reach, x + reach])
        assert (e2a["n0"], e2a["variant_horizon"], e2a["method"]) == (1000, 1300, "delta")

    def test_mirror(self):
        target = final(self.result.variant.runs, 1000)
        at, length, _ = crossing(*mean_curve(self.result.base.runs, 1000), target)
        e2b = self.data["e2b"]
        found = [e2b[key] for key in ("horizon", "step", "eval_spacing", "value")]
        assert found == close([1000, at, length / 1000, 1000 / at - 1])
        assert e2b["method"] == "bootstrap"
        assert e2b["low"] < e2b["value"] < e2b["high"]

    def test_stable_phase(self):
        levels, extra = cases.stable_phase(self.result)
        e3 = self.data["e3"]
        assert e3["levels"] == close(levels)
        assert e3["values"] == pytest.approx(extra, rel=1e-6), "a ratio minus 1 keeps fewer digits"
        assert e3["value"] == pytest.approx(float(np.median(extra)), rel=1e-6)
        assert e3["range"] == pytest.approx([min(extra), max(extra)], rel=1e-6)
        ends = re.search(r"losses ([\d.]+)\.\.([\d.]+)", e3["note"]).groups()
        assert ends == (f"{min(levels):.3f}", f"{max(levels):.3f}")

    def test_final_losses_are_paired_by_seed(self):
        own = np.array(cases.OWN[:4])
        gap = final(self.result.variant.runs, 1000) - final(self.result.base.runs, 1000)
        reach = 3.182446305284263 * own.std(ddof=1) / 2  # Student's t of three degrees of freedom, 97.5 %
        found = self.data["final"]
        assert [found[key] for key in ("difference", "low", "high")] == close([gap, gap - reach, gap + reach])
        assert (found["test"], found["paired"]) == ("paired t", True)
        assert (found["base_steps"], found["variant_steps"]) == (1000, 1000)

    def test_arms(self):
        for role, arm, label, seeds in (
            ("base", self.result.base, "old", 4),
            ("variant", self.result.variant, "new", 5),
        ):
            told = self.data[role]
            assert (told["label"], told["seeds"]) == (label, seeds)
            assert told["seconds_per_step"] == close(cases.seconds(arm))
            assert [run["name"] for run in told["runs"]] == [run.name for run in arm.runs]
            assert [run["final"] for run in told["runs"]] == [run.curve_losses[-1] for run in arm.runs]
            assert [(run["seed"], run["steps"]) for run in told["runs"]] == [(run.seed, run.steps) for run in arm.runs]
            for steps, cell in told["horizons"].items():
                losses = [run.curve_losses[-1] for run in arm.runs if run.steps == int(steps)]
                assert cell == {
                    "runs": len(losses),
                    "mean": close(np.mean(losses)),
                    "sd": close(np.std(losses, ddof=1)),
                }
            assert told["warmdown_steps"] == {steps: round(0.38 * int(steps)) for steps in told["horizons"]}
            for key in ("n_params", "flops_per_token", "tokens_per_step", "implementation"):
                assert told[key] == arm.runs[0].facts[key]
        assert [run["trunk"] for run in self.data["base"]["runs"]] == [None] * 8
        assert self.data["variant"]["runs"][1]["trunk"] == "trunk-2"
        assert self.data["ratios"] == {
            "n_params": close(1.23),
            "flops_per_token": close(1.1),
            "tokens_per_step": close(1.25),
            "seconds_per_step": close(cases.seconds(self.result.variant) / cases.seconds(self.result.base)),
        }

    def test_the_rest_of_the_file(self):
        assert self.data["metric"] == "loss"
        assert self.data["verdict"] == self.result.verdict
        assert self.data["warnings"] == [
            "tokens per step differ: 512 and 640",
            "attention implementation differ: chunked and triton",
            "the arms differ in parameters by +23.0%",
        ]
        assert self.data["options"] == {
            **dict.fromkeys(("at", "sigma", "margin", "warmdown")),
            "extrapolate": False,
            "draws": 300,
            "seed": 0,
            "confidence": 0.95,
        }
        versions = {"tnlm": tnlm.__version__, "python": platform.python_version(), "numpy": np.__version__}
        assert self.data["versions"] == versions
        assert self.data["flops_convention"] == FLOPS_CONVENTION
        json.dumps(self.data, allow_nan=False)

    def test_the_record_is_a_part_of_the_file(self):
        record = to_record(self.result)
        assert record.keys() == {"metric", "base", "variant", "final", "e1", "e2a", "e2b", "e3", "verdict", "warnings"}
        for key, part in record.items():
            whole = self.data[key]
            assert part == ({name: whole[name] for name in part} if isinstance(part, dict) else whole)
        assert record["base"] == {"label": "old", "seeds": 4}
        assert record["final"].keys() == {"difference", "low", "high", "p"}
        assert record["e2b"].keys() == {"value", "low", "high", "status"}


def lines(result):
    """The printed lines by name; the warnings as a list."""
    found = {"warning": []}
    for line in to_text(result).splitlines():
        name, text = line[:12].strip(), line[12:]
        if name == "warning":
            found["warning"].append(text)
        else:
            assert name not in found
            found[name] = text
    return found


def percent(value):
    return f"{100 * value:+.2f}%"


def interval(reading):
    return f"{percent(reading['value'])} batches [{percent(reading['low'])}, {percent(reading['high'])}]"


class TestOneSeedEach:
    """Sigma given, no common horizon: no reading is by the bootstrap, so that every field is known beforehand."""

    @cached_property
    def result(self):
        return cases.one_seed_each()

    def arm(self, label, seed, trunk, facts, cells, seconds):
        return {
            "label": label,
            "seeds": 1,
            "runs": [
                {"name": f"{label}-{seed}-{steps}", "seed": seed, "trunk": trunk, "steps": steps, "final": final}
                for steps, final in cells.items()
            ],
            "horizons": {str(steps): {"runs": 1, "mean": final, "sd": None} for steps, final in cells.items()},
            "warmdown_steps": {str(steps): round(0.38 * steps) for steps in cells},
            "seconds_per_step": seconds,
            **facts,
        }

    def readings(self):
        base, variant, sigma = self.result.base.runs, self.result.variant.runs, 0.05
        by_delta = {"status": "ok", "method": "delta", "bound": None, "censored": None}
        level, n_star, slope, x, reach = e1_by_hand(self.result, 900, sigma, lambda n_star: math.sqrt(1 + 1))
        e1 = by_delta | {"value": x, "low": x - reach, "high": x + reach, "note": "", "n0": 900.0, "n_star": n_star}
        e1 |= {"horizons": [880, 1200], "base_horizons": [900], "loss": level, "slope": slope}
        e1 |= {
            "tokens": (1 + x) * 640 / 512 - 1,
            "flops": (1 + x) * 640 * 6.6 / (512 * 6.0) - 1,
            "seconds": (1 + x) * 1.04 / 0.7 - 1,
        }
        at, length, fall = crossing(*mean_curve(variant, 1200), final(base, 900))
        value, spread = at / 900 - 1, Z * sigma * math.sqrt(1 + 1) / fall / 900
        e2a = by_delta | {"value": value, "low": value - spread, "high": value + spread, "step": at}
        e2a |= {"note": "biased by the warm-down", "n0": 900, "variant_horizon": 1200, "eval_spacing": length / 900}
        nothing = dict.fromkeys(("value", "low", "high", "bound", "censored"))
        e2b = nothing | {"status": "not comparable", "method": "none", "note": "needs one horizon that both arms have"}
        levels, extra = cases.stable_phase(self.result, (900, 1200))
        note = f"median over losses {levels[-1]:.3f}..{levels[0]:.3f}; silent about final quality"
        e3 = nothing | {"status": "ok", "method": "none: fewer than three seeds", "note": note}
        e3 |= {"value": float(np.median(extra)), "levels": levels, "values": extra, "range": [min(extra), max(extra)]}
        return {"e1": e1, "e2a": e2a, "e2b": e2b, "e3": e3}

    def expected(self):
        finals = {run.steps: float(run.curve_losses[-1]) for run in (*self.result.base.runs, *self.result.variant.runs)}
        first, *others = finals.items()
        readings = self.readings()
        gap, deviation = finals[1200] - finals[900], 0.05 * math.sqrt(2)
        x, slope = readings["e1"]["value"], readings["e1"]["slope"]
        normal = Z + 0.8416212335729143  # two-sided 5 %, 80 % power
        needed = math.ceil(2 * (normal * 0.05 / (slope * 900 * x)) ** 2)
        return {
            "metric": "loss",
            "base": self.arm("old", "7", None, cases.BASE_FACTS, dict([first]), 0.7),
            "variant": self.arm("new", "8", "eight", cases.VARIANT_FACTS, dict(others), 1.04),
            "ratios": {
                "n_params": 1.23,
                "flops_per_token": 1.1,
                "tokens_per_step": 1.25,
                "seconds_per_step": 1.04 / 0.7,
            },
            "flops_convention": FLOPS_CONVENTION,
            "final": {
                "base_steps": 900,
                "variant_steps": 1200,
                "difference": gap,
                "low": gap - Z * deviation,
                "high": gap + Z * deviation,
                "p": math.erfc(abs(gap) / deviation / math.sqrt(2)),
                "p_worse_than_margin": math.erfc((0.02 - gap) / deviation / math.sqrt(2)) / 2,
                "test": "z, given sigma",
                "paired": False,
            },
            **readings,
            "sigma": 0.05,
            "verdict": f"not resolved: about {needed} seeds per arm would be needed for {100 * x:+.2f}%",
            "seeds_needed": needed,
            "warnings": [
                "tokens per step differ: 512 and 640",
                "attention implementation differ: chunked and triton",
                "the arms differ in parameters by +23.0%",
            ],
            "options": {
                **dict.fromkeys(("at", "warmdown")),
                "sigma": 0.05,
                "margin": 0.02,
                "extrapolate": False,
                "draws": 300,
                "seed": 0,
                "confidence": 0.95,
            },
            "versions": {"tnlm": tnlm.__version__, "python": platform.python_version(), "numpy": np.__version__},
        }

    def test_the_whole_file(self, tmp_path):
        written = json.loads(write(self.result, tmp_path).read_text())
        assert written == to_dict(self.result), "nothing is lost on the way to the file"
        assert_same(written, self.expected())


def assert_same(found, expected, where="file"):
    """Both hold the same keys and values, numbers up to the rounding of short sums."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            assert_same(found[i], value, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6), where  # a ratio minus 1 keeps fewer digits
    else:
        assert (found, type(found)) == (expected, type(expected)), where


class TestText:
    """The numbers are those of the record, which the tests above compare with loops."""

    def test_shared_seeds(self):
        result = cases.shared_seeds()
        told, data = lines(result), to_dict(result)
        assert list(told) == [
            *("warning", "compare", "params", "final", "E1 matched", "E2a", "E2b", "E3 stable", "verdict", ""),
        ]
        assert re.search(r"base: old \(4 seeds\) +variant: new \(5 seeds\)", told["compare"])
        assert re.search(r"val CE nats/token, 1,024 tokens, T=128", told["compare"])
        a, b = (cases.seconds(arm) for arm in (result.base, result.variant))
        assert told["params"].split("   ") == [
            "1.00 / 1.23M (+23.0%)",
            "flops/token 6.00 / 6.60 GF (+10.0%)",
            "tokens/step 512 / 640 (+25.0%)",
            "warm-down 38.0%",
            f"seconds/step {a:.4g} / {b:.4g} ({100 * (b / a - 1):+.1f}%, chunked / triton attention)",
        ]
        old, new, gap = told["final"].split("   ")
        for text, role in ((old, "base"), (new, "variant")):
            cell = data[role]["horizons"]["1000"]
            assert text == f"{role} {cell['mean']:.5f} sd {cell['sd']:.5f} @1000"
        ends = data["final"]
        assert gap == (
            f"diff {ends['difference']:+.5f} [{ends['low']:+.5f}, {ends['high']:+.5f}] p={ends['p']:.2g} (paired t)"
        )
        e1, e2a, e2b, e3 = (data[name] for name in ("e1", "e2a", "e2b", "e3"))
        answer, n_star, n0, horizons, also = told["E1 matched"].split("   ")
        assert answer == f"{interval(e1)} by the delta method"
        assert (n_star, n0, horizons) == (f"N*={e1['n_star']:.0f}", "N0=894", "horizons 800, 1000, 1300")
        assert also == "| " + ", ".join(f"{percent(e1[key])} {key}" for key in ("tokens", "flops", "seconds"))
        assert told["E2a"].startswith(f"{interval(e2a)} by the delta method   ")
        assert told["E2b"].startswith(f"{interval(e2b)}   ")
        # the variant is evaluated every 30 steps, and its warm-down of 1,300 steps begins at 806; the base every 40
        assert told["E2a"].endswith(" 3.00% apart")
        assert told["E2b"].endswith(" 4.00% apart")
        assert told["E3 stable"].startswith(
            f"{interval(e3)} range {percent(e3['range'][0])}..{percent(e3['range'][1])}"
        )
        assert told["E3 stable"].endswith(e3["note"])
        assert told["verdict"] == data["verdict"]
        assert told["warning"] == data["warnings"]
        assert told[""] == f"flops: {FLOPS_CONVENTION}"
        assert len({interval(reading) for reading in (e1, e2a, e2b, e3)}) == 4, "each line shows its own"

    def test_one_seed_each(self):
        result = cases.one_seed_each()
        told, data = lines(result), to_dict(result)
        assert "base: old (1 seed)   variant: new (1 seed)" in told["compare"]
        old, new, gap, margin, apart = told["final"].split("   ")
        first, second = result.base.runs[0].final, result.variant.runs[1].final
        assert (old, new) == (f"base {first:.5f} @900", f"variant {second:.5f} @1200")
        reach = Z * 0.05 * math.sqrt(2)
        low, high = second - first - reach, second - first + reach
        assert gap.startswith(f"diff {second - first:+.5f} [{low:+.5f}, {high:+.5f}] p=")
        assert gap.endswith("(z, given sigma)")
        assert margin == f"worse by more than 0.02: p={data['final']['p_worse_than_margin']:.2g}"
        assert apart == "horizons differ"
        assert told["E2b"] == "not comparable   needs one horizon that both arms have"
        assert data["final"]["p_worse_than_margin"] != data["final"]["p"]
        assert (data["final"]["base_steps"], data["final"]["variant_steps"]) == (900, 1200)
        assert data["sigma"] == data["options"]["sigma"] == 0.05
        assert data["base"]["horizons"]["900"]["sd"] is None
        level, n_star, slope, x, reach = e1_by_hand(result, 900, 0.05, lambda n_star: math.sqrt(1 + 1))
        found = [data["e1"][key] for key in ("loss", "n_star", "slope", "value", "low", "high")]
        assert found == close([level, n_star, slope, x, x - reach, x + reach])

    def test_warm_down_of_one_length(self):
        base = cases.make_run(7, 900, arm="old", facts=cases.BASE_FACTS, warmdown_steps=300)
        variant = cases.make_run(8, 1200, arm="new", facts=cases.BASE_FACTS, warmdown_steps=300)
        told = lines(cases.compare_arms([base], [variant]))
        assert "warm-down 300 steps at every horizon" in told["params"]
        assert "1.00M   flops/token 6.00 GF   tokens/step 512   " in told["params"], "equal costs are said once"
        assert "(no interval: one seed)" in told["final"]

    def test_recorded_elsewhere(self):
        base = [cases.make_run(seed, 900, arm="old") for seed in (1, 2)]
        told = lines(cases.compare_arms(base, [cases.make_run(8, 1200, arm="new")]))
        assert told["compare"].endswith("val CE nats/token, curves recorded elsewhere")
        assert "params" not in told
        assert "" not in told


class TestOneHorizon:
    """One horizon of one and of two seeds, sigma given: E1 has no answer, E2a and E2b are by the delta method."""

    @cached_property
    def result(self):
        return cases.one_seed_at_one_horizon()

    @cached_property
    def data(self):
        return to_dict(self.result)

    def test_e1_is_not_bracketed(self):
        assert self.data["e1"]["value"] is None
        assert self.data["seeds_needed"] is None
        assert "not bracketed: the variant has one horizon, 1000" in to_text(self.result)

    def test_mirror_is_the_horizon_over_the_step(self):
        at, _, slope = crossing(*mean_curve(self.result.base.runs, 1000), final(self.result.variant.runs, 1000))
        x = 1000 / at - 1
        reach = Z * 0.0003 * math.sqrt(1 + 1 / 2) / slope * 1000 / at**2  # d(n / at) = n / at^2 d(at)
        e2b = self.data["e2b"]
        assert [e2b[key] for key in ("value", "low", "high")] == close([x, x - reach, x + reach])
        assert e2b["method"] == "delta"
        assert self.data["e2a"]["status"] == "not reached"
        assert self.data["e2a"]["bound"] == 0


@pytest.mark.parametrize(
    "x, sigma, said",
    [
        (0.06, 0.0001, r"resolved: the variant needs 6\.\d\d% more batches"),
        (-0.06, 0.0001, r"resolved: the variant needs 6\.\d\d% fewer batches"),
        (0.06, 0.02, r"not resolved: about (\d+) seeds per arm would be needed for \+6\.\d\d%"),
    ],
)
def test_the_verdict(x, sigma, said):
    base = cases.make_run(7, 1000, arm="old")
    variant = [cases.make_run(8, n, x=x, arm="new") for n in (850, 950, 1050, 1150)]
    result = cases.compare_arms([base], variant, cases.Options(sigma=sigma, draws=100))
    match = re.fullmatch(said, result.verdict)
    assert match
    assert match.groups() in ((), (str(result.seeds_needed),))
    e1, normal = result.e1, Z + 0.8416212335729143
    needed = 2 * (normal * sigma / (e1.detail["slope"] * 1000 * e1.value)) ** 2
    assert result.seeds_needed == max(1, math.ceil(needed))


def test_final_losses_at_the_longest_common_horizon():
    base = [cases.make_run(seed, n, arm="old") for n in (700, 900, 1000) for seed in (1, 2)]
    variant = [cases.make_run(seed, n, arm="new") for n in (1100, 900, 700) for seed in (3, 4)]
    assert cases.compare_arms(base, variant, cases.Options(draws=10)).final_steps == (900, 900)


@pytest.mark.parametrize("key, other", [("data_order", "shuffle"), ("settings", {"lr": 0.2})])
def test_seeds_of_another_order_or_other_settings_are_not_paired(key, other):
    def paired(**changes):
        base, variant = (
            [cases.make_run(seed, 1000, arm=name, facts={**cases.FACTS, **facts}) for seed in (1, 2, 3)]
            for name, facts in (("old", {}), ("new", changes))
        )
        return cases.compare_arms(base, variant[::-1], cases.Options(draws=10)).paired

    assert paired()
    assert not paired(**{key: other})
