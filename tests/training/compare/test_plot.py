"""Figures: what they draw is what the comparison says, and the page stands alone."""

import json
import math
import re
from functools import cached_property
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from tests.pages import figures_of, texts_of
from tests.training.compare import cases
from tests.training.compare.test_arms import FACTS, make_arm, make_run
from tnlm.training.compare import plot
from tnlm.training.compare.arms import Options, compare_arms
from tnlm.training.compare.report import to_dict, to_text
from tnlm.training.compare.runs import load_curves

CURVES = Path(__file__).with_name("speedrun_curves.csv")
OPTIONS = Options(draws=200)


@pytest.fixture(scope="module")
def result():
    costlier = {**FACTS, "flops_per_token": 6600}
    variant = make_arm([900, 1000, 1100], x=0.03, sigma=0.001, name="v", facts=costlier, seconds_per_step=0.6)
    return compare_arms(make_arm([1000], sigma=0.001, facts=FACTS), variant, OPTIONS)


def trace(figure, name):
    (found,) = [t for t in figure.data if t.name == name]
    return found


def test_panels_show_the_readings(result):
    figure = plot.comparison(result)
    assert trace(figure, "N0").x == (1000,)
    assert trace(figure, "N*").x[0] == pytest.approx(result.e1.detail["n_star"])
    point = trace(figure, "E1 matched schedule")
    assert point.y[0] == result.e1.value
    assert point.y[0] + point.error_y.array[0] == pytest.approx(result.e1.high)
    assert point.y[0] - point.error_y.arrayminus[0] == pytest.approx(result.e1.low)
    np.testing.assert_allclose(trace(figure, "E3 stable phase").y, result.e3.detail["values"])
    assert trace(figure, "E2a within schedule (biased)").y[0] == result.e2a.value
    base, variant = (trace(figure, f"{n}, 1000 steps (3 runs)") for n in ("base: base", "variant: v"))
    assert trace(figure, "variant: v, 1100 steps (3 runs)").x[-1] == 1100
    gap = trace(figure, "gap of the mean curves")
    assert gap.x[-1] == 1000, "the horizon that both arms have"
    np.testing.assert_allclose(gap.y, (np.array(variant.y) - np.array(base.y))[1:])


def test_units_rescale_each_arm_by_its_own_cost(result):
    figure = plot.comparison(result)
    buttons = {b.label: b.args for b in figure.layout.updatemenus[0].buttons}
    assert list(buttons) == ["step", "tokens", "flops", "seconds"]
    names = [t.name for t in figure.data]
    for unit, base_cost, variant_cost in (
        ("tokens", 512, 512),
        ("flops", 512 * 6000, 512 * 6600),
        ("seconds", 0.5, 0.6),
    ):
        x, _, indices = buttons[unit]
        moved = dict(zip(indices, x["x"]))
        assert moved[names.index("N0")] == [1000 * base_cost]
        assert moved[names.index("N*")][0] == pytest.approx(result.e1.detail["n_star"] * variant_cost)
        assert names.index("E1 matched schedule") not in moved, "the third panel's axis is a loss"


def test_curves_from_elsewhere_have_steps_only():
    elsewhere = compare_arms(load_curves(CURVES, ["short"]), load_curves(CURVES, ["long"]), OPTIONS)
    figure = plot.comparison(elsewhere)
    assert not figure.layout.updatemenus
    names = {t.name for t in figure.data}
    assert "N*" not in names
    assert "E2a within schedule (biased)" in names


def test_the_page_is_self_contained(result, tmp_path):
    page = plot.write_comparison_page(result, tmp_path / "a" / "page.html").read_text()
    assert "E1 matched" in page
    assert result.verdict in page
    assert len(page) > 1_000_000, "plotly's script must be inside"
    assert not re.findall(r'<(?:script|link)[^>]+(?:src|href)="http', page)


@pytest.mark.user_error
def test_png_without_kaleido_says_so(tmp_path, monkeypatch):
    def absent(self, **kwargs):
        raise ValueError("\nImage export requires kaleido\nmore")

    monkeypatch.setattr(go.Figure, "to_image", absent)
    with pytest.raises(ValueError, match=r"needs kaleido and Chrome .*got: Image export requires kaleido"):
        plot.write_png(go.Figure(), tmp_path / "x.png")


def test_loss_curves(tmp_path):
    events = [{"kind": "train", "step": s, "loss": float(s % 7)} for s in range(1, 31)]
    more = {"bits_per_byte": None, "val_tokens": 60}
    events += [{"kind": "val", "step": step, "loss": loss, **more} for step, loss in ((0, 5.0), (30, 2.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    figure = plot.loss_curves([tmp_path], smooth=7, log_x=True)
    raw, smooth, val = figure.data
    assert list(raw.y[:3]) == [1.0, 2.0, 3.0]
    np.testing.assert_allclose(smooth.y[6:], 3.0)
    assert smooth.y[1] == 1.5
    assert (list(val.x), list(val.y)) == ([0, 30], [5.0, 2.0])
    assert figure.layout.xaxis.type == "log"


def numbers(values):
    return np.asarray(values, float)


class TestComparisonFigure:
    """Every trace, axis and button against the curves of the runs; readings against the record."""

    @cached_property
    def result(self):
        return cases.shared_seeds()

    @cached_property
    def figure(self):
        return plot.comparison(self.result)

    def test_curves_and_bands(self):
        bands = [t for t in self.figure.data if t.fill == "toself" and not t.showlegend and t.name is None]
        assert len(bands) == 2, "one for the longest horizon of each arm"
        for arm, name, band, count in (
            (self.result.base, "base: old", bands[0], {700: 4, 1000: 4}),
            (self.result.variant, "variant: new", bands[1], {800: 4, 1000: 4, 1300: 5}),
        ):
            lines = [t for t in self.figure.data if t.name and t.name.startswith(name)]
            assert [t.name for t in lines] == [f"{name}, {n} steps ({k} runs)" for n, k in count.items()]
            for line, n in zip(lines, count, strict=True):
                steps, losses = cases.mean_curve(arm.runs, n)
                np.testing.assert_array_equal(line.x, steps)
                np.testing.assert_allclose(line.y, losses, rtol=1e-12)
                assert (line.yaxis, line.mode) == ("y", "lines")
            every = np.array([run.curve_losses for run in arm.runs if run.steps == n])
            around = [every.mean(0) + every.std(0, ddof=1), (every.mean(0) - every.std(0, ddof=1))[::-1]]
            np.testing.assert_allclose(band.y, np.concatenate(around), rtol=1e-12)
            np.testing.assert_array_equal(band.x, [*steps, *steps[::-1]])
            assert band.fillcolor == lines[-1].line.color
        assert len({t.line.color for t in self.figure.data if t.name and "steps (" in t.name}) == 2

    def test_marks(self):
        level, n0 = cases.final(self.result.base.runs, 1000), math.sqrt(800 * 1000)
        n_star, _ = cases.steps_to(self.result.variant.runs, cases.loss_at(self.result.base.runs, n0))
        for name, x in (("N0", n0), ("N*", n_star)):
            point = trace(self.figure, name)
            np.testing.assert_allclose([*point.x, *point.y], [x, cases.loss_at(self.result.base.runs, n0)], rtol=1e-9)
        line = trace(self.figure, f"final loss of the base {level:.4f}")
        assert (line.x, line.y) == ((0, 1300), pytest.approx((level, level)))
        shade = trace(self.figure, "warm-down of the base")
        assert shade.x == (620, 1000, 1000, 620)
        assert shade.y[:2] + shade.y[2:] == (
            *[self.figure.layout.yaxis.range[0]] * 2,
            *[self.figure.layout.yaxis.range[1]] * 2,
        )

    def test_the_window_holds_the_curves_from_a_tenth_on(self):
        """Of the longest runs of both arms, with 3 % of its height on either side."""
        seen = []
        for arm, n in ((self.result.base, 1000), (self.result.variant, 1300)):
            steps, losses = cases.mean_curve(arm.runs, n)
            seen += [loss for step, loss in zip(steps, losses) if step >= n / 10]
        margin = 0.03 * (max(seen) - min(seen))
        assert self.figure.layout.yaxis.range == pytest.approx((min(seen) - margin, max(seen) + margin))

    def test_gap(self):
        gap = trace(self.figure, "gap of the mean curves")
        curves = [dict(zip(*cases.mean_curve(arm.runs, 1000))) for arm in (self.result.base, self.result.variant)]
        common = sorted(step for step in curves[0].keys() & curves[1].keys() if step)
        assert (gap.yaxis, list(gap.x)) == ("y2", common)
        np.testing.assert_allclose(gap.y, [curves[1][step] - curves[0][step] for step in common], rtol=1e-9)

    def test_readings(self):
        levels, extra = cases.stable_phase(self.result)
        line = trace(self.figure, "E3 stable phase")
        np.testing.assert_allclose(line.x, levels, rtol=1e-9)
        np.testing.assert_allclose(line.y, extra, rtol=1e-6)
        data, base = to_dict(self.result), self.result.base.runs
        for name, key, level in (
            ("E1 matched schedule", "e1", cases.loss_at(base, math.sqrt(800 * 1000))),
            ("E2a within schedule (biased)", "e2a", cases.final(base, 1000)),
            ("E2b mirror (biased)", "e2b", cases.final(base, 1000)),
        ):
            point, told = trace(self.figure, name), data[key]
            assert point.yaxis == "y3"
            assert (point.x[0], point.y[0]) == (pytest.approx(level), told["value"])
            assert point.error_y.symmetric is False
            assert point.y[0] + point.error_y.array[0] == pytest.approx(told["high"], abs=1e-15)
            assert point.y[0] - point.error_y.arrayminus[0] == pytest.approx(told["low"], abs=1e-15)

    def test_axes(self):
        layout = self.figure.layout
        titles = {name: layout[name].title.text for name in ("xaxis", "yaxis", "xaxis2", "yaxis2", "xaxis3", "yaxis3")}
        assert titles == {
            "xaxis": "steps",
            "yaxis": "nats per token",
            "xaxis2": "steps",
            "yaxis2": "nats per token",
            "xaxis3": "loss level, nats per token",
            "yaxis3": "extra batches",
        }
        assert layout.xaxis3.autorange == "reversed", "training goes to the right"
        assert layout.yaxis3.tickformat.endswith("%")
        heads = [text.text for text in layout.annotations]
        for head, words in zip(heads, ("Validation loss", "variant minus base", "Extra batches"), strict=True):
            assert words in head

    def test_bits_per_byte_are_named(self):
        runs = [[make_run(seed, 1000, arm=arm, metric="bits_per_byte") for seed in (1, 2)] for arm in ("old", "new")]
        layout = plot.comparison(compare_arms(*runs, OPTIONS)).layout
        assert layout.yaxis.title.text == layout.yaxis2.title.text == "bits per byte"
        assert layout.xaxis3.title.text == "loss level, bits per byte"

    def test_every_unit_of_every_trace(self):
        a, b = (cases.seconds(arm) for arm in (self.result.base, self.result.variant))
        costs = {
            "step": (1, 1, "steps"),
            "tokens": (512, 640, "tokens"),
            "flops": (512 * 6e9, 640 * 6.6e9, "training FLOPs"),
            "seconds": (a, b, "seconds"),
        }
        upper = [i for i, t in enumerate(self.figure.data) if t.yaxis != "y3"]
        of_variant = {"variant: new", "N*"}
        bands = [i for i, t in enumerate(self.figure.data) if t.name is None]
        buttons = self.figure.layout.updatemenus[0].buttons
        assert [button.label for button in buttons] == list(costs)
        for button in buttons:
            base_cost, variant_cost, title = costs[button.label]
            moved, layout, indices = button.args
            assert list(indices) == upper
            assert layout == {"xaxis.title.text": title, "xaxis2.title.text": title}
            for i, x in zip(indices, moved["x"], strict=True):
                name = self.figure.data[i].name
                variant = name.split(",")[0] in of_variant if name else i == bands[1]
                np.testing.assert_allclose(x, numbers(self.figure.data[i].x) * (variant_cost if variant else base_cost))

    def test_the_page_holds_the_figure_and_the_text(self, tmp_path):
        page = plot.write_comparison_page(self.result, tmp_path / "page.html").read_text()
        ((traces, layout),) = figures_of(page)
        assert traces == json.loads(self.figure.to_json())["data"]
        assert layout["xaxis3"]["title"]["text"] == "loss level, nats per token"
        assert texts_of(page, "pre") == [to_text(self.result)]
        assert texts_of(page, "h1") == ["new against old"]
        assert texts_of(page, "p")[0] == self.result.verdict


def test_loss_curves_of_two_runs_have_their_names_colours_and_axes(tmp_path):
    for number, name in enumerate(("first", "second"), start=1):
        (tmp_path / name).mkdir()
        events = [{"kind": "train", "step": step, "loss": number * 10 + step} for step in (1, 2, 3)]
        events.append({"kind": "val", "step": 3, "loss": number, "bits_per_byte": 9.0, "val_tokens": 60})
        text = "".join(json.dumps(event) + "\n" for event in events)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    figure = plot.loss_curves([tmp_path / "first", tmp_path / "second"], smooth=2, title="Two runs")
    for number, name in enumerate(("first", "second"), start=1):
        raw, mean, val = (trace(figure, label) for label in (f"{name} raw", name, f"{name}, validation"))
        assert [list(t.x) for t in (raw, mean, val)] == [[1, 2, 3], [1, 2, 3], [3]]
        at = 10 * number
        assert (list(raw.y), list(mean.y), list(val.y)) == (
            [at + 1, at + 2, at + 3],
            [at + 1, at + 1.5, at + 2.5],
            [number],
        )
        assert raw.line.color == mean.line.color == val.marker.color
        assert (raw.mode, mean.mode, val.mode) == ("lines", "lines", "markers")
    assert len({t.line.color for t in figure.data if t.mode == "lines"}) == 2
    layout = figure.layout
    assert (layout.title.text, layout.xaxis.title.text, layout.yaxis.title.text) == (
        "Two runs",
        "steps",
        "nats per token",
    )
    assert layout.xaxis.type == "linear"
