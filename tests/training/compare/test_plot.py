"""Figures: what they draw is what the comparison says, and the page stands alone."""

import json
import re
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from tests.training.compare.test_arms import FACTS, make_arm
from tnlm.training.compare import plot
from tnlm.training.compare.arms import Options, compare_arms
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
