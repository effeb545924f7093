"""Figures of the analyses: tensors in, a plotly ``Figure`` out, nothing shown or written.

Colour ranges of signed quantities are symmetric about zero; backgrounds are transparent and the text grey, so a figure
reads in light and dark. Tensors may be bf16, need gradients, or live on a device. Subtitles say which kind of exact, or
what is shown.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

from tnlm.output.page import AXIS, FIGURE_LAYOUT

if TYPE_CHECKING:
    from tnlm.interp.extraction import Extracted
    from tnlm.interp.predictions.explanation import Explanation

DIVERGING = "RdBu_r"
POSITIVE, NEGATIVE = "#c0392b", "#2f6fb7"
_LIMIT = 2**22


def spectrum(values: Tensor | Sequence[float | int], *, title: str = "Eigenvalues", top: int = 64) -> go.Figure:
    """Signed eigenvalues of one direction, by falling magnitude: (k,)."""
    v = _array("values", values, 1)
    v = v[np.argsort(-np.abs(v), kind="stable")][:top]
    bars = go.Bar(x=np.arange(len(v)), y=v, marker_color=_signs(v), hovertemplate="rank %{x}: %{y:.4g}<extra></extra>")
    return _styled(go.Figure(bars), title, "exact: of the symmetric part of the weights", x="rank", y="eigenvalue")


def eigenvectors(
    vectors: Tensor,
    values: Tensor | Sequence[float | int],
    scores: Tensor,
    labels: Sequence[str],
    *,
    top: int = 8,
    title: str = "Leading eigenvectors as tokens",
) -> go.Figure:
    """For each eigenvector the tokens of highest and lowest score: scores, not eigenvectors over tokens.

    Args:
        vectors: (d_model, k).
        values: (k,).
        scores: What each token writes, (n_tokens, d_model); padding rows left out.
        labels: (n_tokens,).
        top: Tokens at either end.
    """
    v, lam, rows = _array("vectors", vectors, 2), _array("values", values, 1), _array("scores", scores, 2)
    if rows.shape[1] != v.shape[0] or len(labels) != len(rows) or len(lam) != v.shape[1]:
        raise ValueError(
            "vectors must be (d_model, k), values (k,), scores (n_tokens, d_model) and labels (n_tokens,), "
            f"got {v.shape}, {lam.shape}, {rows.shape}, {len(labels)}"
        )
    token_scores = rows @ v
    columns = []
    for k in range(v.shape[1]):
        order = np.argsort(token_scores[:, k], kind="stable")
        ends = [*order[::-1][:top], *order[:top][::-1]]
        columns.append([f"{token_scores[t, k]:+.2f}  {labels[t]!r}" for t in ends])
    sign = ["+"] * min(top, len(rows)) + ["-"] * min(top, len(rows))
    table = go.Table(
        header={"values": ["", *(f"{value:+.3g}" for value in lam)], "align": "left"},
        cells={"values": [sign, *columns], "align": "left"},
        columnwidth=[0.2] + [1.0] * len(columns),
    )
    for part in (table.header, table.cells):
        part.fill, part.line = {"color": "rgba(127,127,127,0.08)"}, {"color": "rgba(127,127,127,0.35)"}
    figure = _styled(go.Figure(table), title, "header: eigenvalue; an eigenvector's sign is free")
    return figure.update_layout(height=150 + 44 * min(top, len(rows)), margin_b=10)


def interaction(q: Tensor, *, labels: Sequence[str] | None = None, title: str = "Interaction matrix") -> go.Figure:
    """Heatmap of one symmetric form between coordinates, which depends on their basis, or named features: (n, n)."""
    m = _array("q", q, 2)
    if labels is not None and m.shape != (len(labels), len(labels)):
        raise ValueError(f"labels must name both axes of q, got {len(labels)} labels for shape {m.shape}")
    axis = None if labels is None else _unique(labels)
    heat = _heatmap(m, x=axis, y=axis)
    basis = "depends on the basis of the input" if labels is None else "of the symmetric part of the weights"
    figure = _styled(go.Figure(heat), title, f"exact: {basis}", x="input", y="input")
    return figure.update_yaxes(autorange="reversed")


def attention(
    pattern: Tensor,
    factors: Sequence[Tensor] = (),
    *,
    value_norms: Tensor | None = None,
    labels: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    title: str = "Signed attention pattern",
) -> go.Figure:
    """Heatmaps in one row per head: score factors, pattern, pattern times value norms; masked entries are blank.

    Args:
        pattern: (n_head, seq_q, seq_k), signed.
        factors: Score factors of the same shape (``hook_attn_scores``, ``hook_attn_scores2``), or none.
        value_norms: Norms of the values, (n_head, seq_k): adds ``pattern x |v|``, since a large weight on a small
            value moves little (Kobayashi et al. 2020, arXiv:2004.10102).
        labels: One per position.
        heads: What to call the heads, 0, 1, ... by default.
    """
    maps = [_array("factors", f, 3) for f in factors] + [_array("pattern", pattern, 3)]
    if any(m.shape != maps[-1].shape for m in maps):
        raise ValueError(f"factors must have the pattern's shape, got {[m.shape for m in maps]}")
    n_head, seq_q, seq_k = maps[-1].shape
    names = [f"factor {i + 1}" for i in range(len(factors))] + ["pattern"]
    if value_norms is not None:
        norms = _array("value_norms", value_norms, 2)
        if norms.shape != (n_head, seq_k):
            raise ValueError(f"value_norms must be (n_head, seq_k) = {(n_head, seq_k)}, got {norms.shape}")
        maps.append(maps[-1] * norms[:, None])
        names.append("pattern x |v|")
    if heads is not None and len(heads) != n_head:
        raise ValueError(f"heads must name each of the {n_head} heads, got {len(heads)}")
    titles = [f"head {n} {name}" for n in (range(n_head) if heads is None else heads) for name in names]
    figure = make_subplots(rows=max(n_head, 1), cols=len(maps), subplot_titles=titles or None, shared_yaxes=True)
    masked = ~np.tril(np.ones((seq_q, seq_k), dtype=bool), seq_k - seq_q)
    limits = [_limit(m[:, ~masked]) for m in maps]
    axis = None if labels is None else _unique(labels)
    for n in range(n_head):
        for column, (m, limit) in enumerate(zip(maps, limits, strict=True), start=1):
            blank = np.where(masked, np.nan, m[n])
            last = n == 0 and column == len(maps)
            figure.add_trace(_heatmap(blank, x=axis, y=axis, limit=limit, showscale=last), row=n + 1, col=column)
    figure = _styled(figure, title, "of this run; rows are not normalised; range shared per column")
    figure.update_yaxes(autorange="reversed").update_yaxes(automargin=True, title="query", col=1)
    figure.update_xaxes(title="key", row=max(n_head, 1))
    return figure.update_layout(height=170 + 240 * max(n_head, 1), margin_t=110)  # head titles under the subtitle


def logit_lens(
    logits: Tensor,
    names: Sequence[str],
    *,
    layers: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    title: str = "Logit lens",
) -> go.Figure:
    """The likeliest next token at every layer and position, coloured by its probability.

    Args:
        logits: (n_layer, seq, d_vocab), such as transformer-lens' ``logit_lens`` reads from a hooked run.
        names: Text of each token id, d_vocab of them.
        layers: One name per row, 0, 1, ... by default; the last is drawn on top.
        labels: One per position, what was read there.
    """
    if logits.ndim != 3:
        raise ValueError(f"logits must be (n_layer, seq, d_vocab), got shape {tuple(logits.shape)}")
    sizes = {
        "layers": (layers, logits.shape[0]),
        "labels": (labels, logits.shape[1]),
        "names": (names, logits.shape[2]),
    }
    for what, (given, size) in sizes.items():
        if given is not None and len(given) != size:
            raise ValueError(f"{what} must have {size} entries, as logits {tuple(logits.shape)}, got {len(given)}")
    probability, best = logits.detach().float().softmax(-1).max(-1)
    heat = go.Heatmap(
        z=_array("probabilities", probability, 2).astype(np.float32),
        text=[[names[i] for i in row] for row in best.tolist()],
        texttemplate="%{text}",
        hovertemplate="%{x}, %{y}: %{text}, probability %{z:.3f}<extra></extra>",
        x=None if labels is None else _unique(labels),
        y=None if layers is None else _unique(layers),
        colorscale="Viridis",
        zmin=0,
        zmax=1,
    )
    figure = _styled(go.Figure(heat), title, "of this run; the last row is the model itself", x="position", y="layer")
    return figure.update_layout(height=170 + 30 * logits.shape[0])


def explanation(e: "Explanation", *, top: int = 20) -> go.Figure:
    """The ``top`` rows of an explanation as signed bars, and the sum of all others; hovering shows their shares."""
    rows = list(e.rows[:top])
    labels = _unique([e.label(r) for r in rows])
    values = [r.value for r in rows]
    notes = [f"{e.share(r):+.1%} of the absolute sum" for r in rows]
    if len(e) > top:
        labels.append(f"{len(e) - top} other rows")
        values.append(sum(r.value for r in e.rows[top:]))
        notes.append("sum of these rows")
    bars = go.Bar(
        y=labels,
        x=values,
        orientation="h",
        marker_color=_signs(np.array(values)),
        customdata=notes,
        hovertemplate="%{y}: %{x:.4g}, %{customdata}<extra></extra>",
    )
    figure = _styled(go.Figure(bars), f"{e.title}: {e.logit:+.3f}", e.summary, x="added to the logit")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure.update_layout(height=160 + 22 * len(labels))


def similarity(matrix: Tensor, *, rows: Sequence[str], columns: Sequence[str], title: str = "Similarity") -> go.Figure:
    """Heatmap of cosines in [-1, 1]: (len(rows), len(columns))."""
    m = _array("matrix", matrix, 2)
    if m.shape != (len(rows), len(columns)):
        raise ValueError(f"matrix must be (len(rows), len(columns)), got {m.shape}, {len(rows)}, {len(columns)}")
    figure = go.Figure(_heatmap(m, x=_unique(columns), y=_unique(rows), limit=1.0))
    return _styled(figure, title, "cosine of two functions of the weights").update_yaxes(autorange="reversed")


def truncation(
    kept: Sequence[float | int],
    curves: Mapping[str, Sequence[float | int]],
    *,
    errors: Mapping[str, Sequence[float | int]] | None = None,
    title: str = "Truncation",
    y: str = "change of cross-entropy (nats)",
) -> go.Figure:
    """Cost against what is kept: one line per name, with standard errors where given."""
    figure = go.Figure()
    for name, values in curves.items():
        if len(values) != len(kept):
            raise ValueError(f"curve {name!r} must have one value per entry of kept={len(kept)}, got {len(values)}")
        error = {"type": "data", "array": list(errors[name])} if errors and name in errors else None
        figure.add_scatter(x=list(kept), y=list(values), name=name, mode="lines+markers", error_y=error)
    return _styled(figure, title, "approximate models, measured on held-out tokens", x="components kept", y=y)


def lambdas(net: "Extracted", *, title: str = "Mixing scalars by layer") -> go.Figure:
    """``lambda0`` (residual), ``lambda1`` (embedding) and the value mix of every layer, which depend on its scale.

    A scale can move from one layer's scalars and writes to another's without a change of any logit.
    """
    layers, step = list(range(net.n_layer)), 1 + net.n_layer // 20
    figure = go.Figure()
    scalars = {
        "residual": net.scalars.lambda0,
        "embedding": net.scalars.lambda1,
        "value of block 0": net.scalars.value_mix,
    }
    for name, values in scalars.items():
        figure.add_scatter(x=layers, y=_array(name, values, 1), name=name, mode="lines+markers")
    return _styled(
        figure, title, "exact: read from the weights; depends on the scale of each layer", x="layer", y="factor"
    ).update_xaxes(tick0=0, dtick=step)


def lines(
    curves: Mapping[str, tuple[Tensor | Sequence[float | int | str], Tensor | Sequence[float | int]]],
    *,
    title: str,
    x: str,
    y: str,
    subtitle: str = "",
) -> go.Figure:
    """Named lines, each a pair of x and y values: numbers or tensors of one axis, of equal length; x may be texts."""
    figure = go.Figure()
    for name, (xs, ys) in curves.items():
        texts = not isinstance(xs, Tensor) and any(isinstance(x, str) for x in xs)
        across = list(xs) if texts else _array(f"x of {name!r}", xs, 1).tolist()
        up = _array(f"y of {name!r}", ys, 1).tolist()
        if len(across) != len(up):
            raise ValueError(f"the line {name!r} must have as many x as y values, got {len(across)} and {len(up)}")
        figure.add_scatter(x=across, y=up, name=name, mode="lines+markers")
    return _styled(figure, title, subtitle, x=x, y=y)


def _array(name: str, x: Tensor | Sequence[float | int | str], ndim: int) -> np.ndarray:
    array = x.detach().cpu().double().numpy() if isinstance(x, Tensor) else np.asarray(x, dtype=float)
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got shape {array.shape}")
    if array.size > _LIMIT:
        raise ValueError(f"{name} has {array.size:,} entries, a figure takes at most {_LIMIT:,}; plot a slice of it")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, got {int((~np.isfinite(array)).sum())} NaN or infinite entries")
    return array


def _limit(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0)) or 1.0


def _heatmap(m: np.ndarray, *, x: object, y: object, limit: float | None = None, showscale: bool = True) -> go.Heatmap:
    limit = _limit(m) if limit is None else limit
    return go.Heatmap(
        z=m.astype(np.float32), x=x, y=y, colorscale=DIVERGING, zmin=-limit, zmax=limit, zmid=0, showscale=showscale
    )


def _signs(v: np.ndarray) -> list[str]:
    return [POSITIVE if value > 0 else NEGATIVE for value in v]


def _unique(labels: Sequence[str]) -> list[str]:
    """Labels made different by invisible marks, as plotly draws equal category names at one place."""
    seen: dict[str, int] = {}
    out = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        out.append(label + "\u200b" * (seen[label] - 1))
    return out


def _styled(figure: go.Figure, title: str, subtitle: str, *, x: str = "", y: str = "") -> go.Figure:
    figure.update_layout(template="none", title={"text": title, "subtitle": {"text": subtitle}}, **FIGURE_LAYOUT)
    figure.update_xaxes(title=x or None, **AXIS).update_yaxes(title=y or None, **AXIS)
    return figure
