"""Figures of training: the comparison page, and loss curves. The only file here that imports plotly."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tnlm.output.files import write_atomically
from tnlm.output.page import AXIS, FIGURE_LAYOUT, Page
from tnlm.training.compare.arms import Comparison, Reading
from tnlm.training.compare.report import to_text
from tnlm.training.compare.runs import Arm, read_events

BASE, VARIANT, GREY = "#3b7dd8", "#e0803a", "#7f7f7f"
UNITS = {"step": "steps", "tokens": "tokens", "flops": "training FLOPs", "seconds": "seconds"}


def comparison(result: Comparison) -> go.Figure:
    """Three panels: loss against step, loss gap against step, extra batches against loss level.

    The horizontal axis of the first two can be switched to tokens, FLOPs and seconds where the runs record them;
    each arm is then drawn at its own cost of a step.
    """
    figure = make_subplots(
        rows=3,
        cols=1,
        vertical_spacing=0.1,
        subplot_titles=(
            "Validation loss (mean, band: one standard deviation over seeds)",
            "Loss gap at equal steps, variant minus base",
            "Extra batches of the variant by loss level",
        ),
    )
    panels: list[tuple[go.Scatter, int, Arm | None]] = []
    for arm, colour in ((result.base, BASE), (result.variant, VARIANT)):
        panels += [(trace, 1, arm) for trace in _curves(arm, colour)]
    panels += [(trace, 1, arm) for trace, arm in _marks(result)]
    gap = _gap(result)
    panels += [(gap, 2, result.base)] if gap is not None else []
    panels += [(trace, 3, None) for trace in _extra(result)]
    for trace, row, _ in panels:
        figure.add_trace(trace, row=row, col=1)
    shown = _window(result)
    metric = {"loss": "nats per token", "bits_per_byte": "bits per byte"}[result.base.runs[0].metric]
    figure.update_layout(**FIGURE_LAYOUT, height=1150, legend={"orientation": "h", "y": -0.06})
    figure.update_xaxes(**AXIS)
    figure.update_yaxes(**AXIS)
    figure.update_yaxes(title=metric, range=shown, row=1, col=1)
    figure.update_yaxes(title=metric, row=2, col=1)
    figure.update_yaxes(title="extra batches", tickformat="+.1%", row=3, col=1)
    figure.update_xaxes(title=UNITS["step"], row=1, col=1)
    figure.update_xaxes(title=UNITS["step"], row=2, col=1)
    figure.update_xaxes(title=f"loss level, {metric}", autorange="reversed", row=3, col=1)
    buttons = _buttons(result, panels)
    if len(buttons) > 1:
        figure.update_layout(updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.06}])
    return figure


def _curves(arm: Arm, colour: str) -> list[go.Scatter]:
    traces = []
    for horizon in arm.horizons:
        steps, losses = arm.curves(horizon)
        mean, longest = losses.mean(0), horizon == arm.horizons[-1]
        if longest and len(losses) > 1:
            sd = losses.std(0, ddof=1)
            traces.append(
                go.Scatter(
                    x=np.concatenate([steps, steps[::-1]]),
                    y=np.concatenate([mean + sd, (mean - sd)[::-1]]),
                    fill="toself",
                    mode="none",
                    fillcolor=colour,
                    opacity=0.25,
                    hoverinfo="skip",
                    showlegend=False,
                )
            )
        traces.append(
            go.Scatter(
                x=steps,
                y=mean,
                mode="lines",
                line={"color": colour, "width": 2 if longest else 1},
                name=f"{arm.role}: {arm.label}, {horizon} steps ({len(losses)} runs)",
            )
        )
    return traces


def _marks(result: Comparison) -> list[tuple[go.Scatter, Arm]]:
    """The base's final loss as a line, N0 and N* on it, and the warm-down of the longest base run shaded."""
    base, variant, e1 = result.base, result.variant, result.e1
    horizon, last = base.horizons[-1], max(base.horizons[-1], variant.horizons[-1])
    level = float(base.finals(horizon).mean())
    dotted = {"color": GREY, "dash": "dot", "width": 1}
    line = go.Scatter(x=[0, last], y=[level] * 2, mode="lines", line=dotted, name=f"final loss of the base {level:.4f}")
    marks: list[tuple[go.Scatter, Arm]] = [(line, base)]
    if e1.value is not None:
        for name, arm, colour in (("n0", base, BASE), ("n_star", variant, VARIANT)):
            marker = {"color": colour, "size": 11, "symbol": "diamond"}
            label = {"n0": "N0", "n_star": "N*"}[name]
            point = go.Scatter(x=[e1.detail[name]], y=[e1.detail["loss"]], mode="markers", marker=marker, name=label)
            marks.append((point, arm))
    start = base.stable_end(horizon, result.options.warmdown)
    if start is not None:
        low, high = _window(result)
        shade = go.Scatter(
            x=[start, horizon, horizon, start],
            y=[low, low, high, high],
            fill="toself",
            mode="none",
            fillcolor="rgba(127,127,127,0.12)",
            hoverinfo="skip",
            name="warm-down of the base",
        )
        marks.append((shade, base))
    return marks


def _window(result: Comparison) -> list[float]:
    """Range of losses to show: those from a tenth of the run on."""
    values = []
    for arm in (result.base, result.variant):
        steps, losses = arm.curves(arm.horizons[-1])
        values.append(losses.mean(0)[steps >= min(0.1 * arm.horizons[-1], steps[-1])])
    low, high = (float(f(np.concatenate(values))) for f in (np.min, np.max))
    return [low - 0.03 * (high - low), high + 0.03 * (high - low)]


def _gap(result: Comparison) -> go.Scatter | None:
    """Gap of the mean curves at the two horizons whose final losses are compared; None without a common step."""
    arms = zip((result.base, result.variant), result.final_steps)
    (base_steps, base), (steps, variant) = (arm.curves(horizon) for arm, horizon in arms)
    common = np.intersect1d(base_steps[base_steps > 0], steps)
    if not common.size:
        return None
    gap = variant.mean(0)[np.isin(steps, common)] - base.mean(0)[np.isin(base_steps, common)]
    return go.Scatter(x=common, y=gap, mode="lines", line={"color": GREY}, name="gap of the mean curves")


def _extra(result: Comparison) -> list[go.Scatter]:
    """Traces of the readings: E3 by level, E1 with its interval, E2a and E2b marked as biased."""
    traces = []
    if "levels" in result.e3.detail:
        detail = result.e3.detail
        line = {"color": GREY, "width": 2}
        traces.append(
            go.Scatter(x=detail["levels"], y=detail["values"], mode="lines", line=line, name="E3 stable phase")
        )
    level = float(result.base.finals(result.base.horizons[-1]).mean())
    for name, reading, colour, symbol in (
        ("E1 matched schedule", result.e1, VARIANT, "diamond"),
        ("E2a within schedule (biased)", result.e2a, "#c8508f", "circle-open"),
        ("E2b mirror (biased)", result.e2b, "#8a6fd1", "square-open"),
    ):
        if reading.value is not None:
            traces.append(_point(name, reading, reading.detail.get("loss", level), colour, symbol))
    return traces


def _point(name: str, reading: Reading, level: float, colour: str, symbol: str) -> go.Scatter:
    value, bars = reading.value, None
    assert value is not None
    if reading.low is not None and reading.high is not None:
        bars = {"symmetric": False, "array": [reading.high - value], "arrayminus": [value - reading.low]}
    marker = {"color": colour, "size": 11, "symbol": symbol}
    return go.Scatter(x=[level], y=[value], error_y=bars, mode="markers", marker=marker, name=name)


def _buttons(result: Comparison, panels: Sequence[tuple[go.Scatter, int, Arm | None]]) -> list[dict[str, Any]]:
    """One button per unit that both arms know; it rewrites the x of every trace of the first two panels."""
    buttons = []
    switched = [i for i, (_, _, arm) in enumerate(panels) if arm is not None]
    for unit, title in UNITS.items():
        costs = {id(arm): _cost(arm, unit) for arm in (result.base, result.variant)}
        if None in costs.values():
            continue
        x = [(np.asarray(panels[i][0].x, float) * costs[id(panels[i][2])]).tolist() for i in switched]
        layout = {"xaxis.title.text": title, "xaxis2.title.text": title}
        buttons.append({"label": unit, "method": "update", "args": [{"x": x}, layout, switched]})
    return buttons


def _cost(arm: Arm, unit: str) -> float | int | None:
    tokens, flops = arm.fact("tokens_per_step"), arm.fact("flops_per_token")
    if unit == "tokens":
        return tokens
    if unit == "flops":
        return tokens * flops if tokens and flops else None
    return arm.seconds_per_step if unit == "seconds" else 1.0


def write_comparison_page(result: Comparison, path: str | os.PathLike) -> Path:
    """One self-contained HTML file: the figure and the text of the comparison."""
    page = Page(f"{result.variant.label} against {result.base.label}")
    page.text(result.verdict)
    page.code(to_text(result))
    page.figure(comparison(result))
    page.text(
        "E1 compares complete schedules and is the answer. E2a and E2b read steps inside a warm-down and are biased; "
        "E3 has no schedule bias but says nothing about final quality.",
        note=True,
    )
    return page.write(Path(path))


def write_png(figure: go.Figure, path: str | os.PathLike) -> Path:
    """Write a figure as PNG, twice the size on screen.

    Raises:
        ValueError: kaleido or its browser is missing; names the cause. The HTML page needs neither.
    """
    path = Path(path)
    try:
        image = figure.to_image(format="png", scale=2, width=900, height=figure.layout.height or 500)
    except (ImportError, ValueError, RuntimeError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"a PNG needs kaleido and Chrome (pip install kaleido), got: {cause}") from error
    write_atomically(path, image)
    return path


def loss_curves(
    folders: Sequence[str | os.PathLike], *, smooth: int = 25, log_x: bool = False, title: str = "Loss"
) -> go.Figure:
    """Training loss (raw, and averaged over ``smooth`` steps) and validation loss of run folders, one colour each."""
    figure = go.Figure()
    colours = FIGURE_LAYOUT["colorway"]
    for i, folder in enumerate(folders):
        events, name, colour = read_events(Path(folder) / "metrics.jsonl"), Path(folder).name, colours[i % len(colours)]
        train, val = ([e for e in events if e["kind"] == kind] for kind in ("train", "val"))
        steps, losses = [e["step"] for e in train], np.array([e["loss"] for e in train])
        faint = {"color": colour, "width": 1}
        figure.add_scatter(
            x=steps, y=losses, mode="lines", line=faint, opacity=0.3, showlegend=False, name=f"{name} raw"
        )
        figure.add_scatter(x=steps, y=_smoothed(losses, smooth), line={"color": colour}, mode="lines", name=name)
        marker = {"color": colour, "size": 8}
        x, y = [e["step"] for e in val], [e["loss"] for e in val]
        figure.add_scatter(x=x, y=y, mode="markers", marker=marker, name=f"{name}, validation")
    figure.update_layout(**FIGURE_LAYOUT, title=title)
    figure.update_xaxes(**AXIS, title="steps", type="log" if log_x else "linear")
    figure.update_yaxes(**AXIS, title="nats per token")
    return figure


def _smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last ``window`` values, of fewer at the start."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)
