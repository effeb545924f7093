"""Figures hold the numbers that went in, with symmetric ranges, from any tensor."""

import base64
import json
import math

import numpy as np
import pytest
import torch

from tests.interp.test_extraction import make
from tnlm.interp.extraction import extract
from tnlm.interp.predictions.explanation import explain
from tnlm.interp.views import plot


def _json(figure):
    """Traces and layout as they are written, after the numbers of a page: plotly may encode arrays."""
    made = json.loads(figure.to_json())
    return [_decoded(trace) for trace in made["data"]], made["layout"]


def _decoded(value):
    if isinstance(value, dict) and "bdata" in value:
        shape = [int(n) for n in value.get("shape", "-1").split(",")]
        return np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"]).reshape(shape).tolist()
    if isinstance(value, dict):
        return {name: _decoded(inner) for name, inner in value.items()}
    return value


def _titles(layout):
    return [layout["title"]["text"], *(layout[axis]["title"]["text"] for axis in ("xaxis", "yaxis"))]


def test_a_spectrum_shows_its_largest_values():
    """By magnitude, with their signs, the largest ones."""
    values = torch.tensor([0.5, -3.0, 2.0, -0.25], dtype=torch.bfloat16, requires_grad=True)
    (bars,), layout = _json(plot.spectrum(values, top=3, title="t"))
    assert (bars["x"], bars["y"]) == ([0, 1, 2], [-3.0, 2.0, 0.5])
    assert bars["marker"]["color"] == [plot.NEGATIVE, plot.POSITIVE, plot.POSITIVE]
    assert _titles(layout) == ["t", "rank", "eigenvalue"]


def test_eigenvectors_show_their_highest_and_lowest_tokens():
    """Highest tokens first, lowest last, a column for each eigenvector under its eigenvalue."""
    vectors, scores = torch.eye(3)[:, [1, 0]], torch.tensor([[0.0, 5, 0], [9, 0, 0], [-4, 1, 0], [1, -2, 0]])
    (table,), layout = _json(plot.eigenvectors(vectors, [2.0, -1.0], scores, ["p", "q", "r", "s"], top=2, title="t"))
    assert table["header"]["values"] == ["", "+2", "-1"]
    assert table["cells"]["values"] == [
        ["+", "+", "-", "-"],
        ["+5.00  'p'", "+1.00  'r'", "+0.00  'q'", "-2.00  's'"],
        ["+9.00  'q'", "+1.00  's'", "+0.00  'p'", "-4.00  'r'"],
    ]
    assert layout["title"]["text"] == "t"
    assert "eigenvalue" in layout["title"]["subtitle"]["text"]


def test_an_interaction_shows_rows_down_and_columns_across():
    """Rows down, columns across, a range symmetric about 0, labels on both axes."""
    q = [[1.0, -5.0], [0.5, 2.0]]
    (heat,), layout = _json(plot.interaction(torch.tensor(q), labels=["u", "w"], title="t"))
    assert (heat["z"], heat["x"], heat["y"]) == (q, ["u", "w"], ["u", "w"])
    assert (heat["zmin"], heat["zmid"], heat["zmax"]) == (-5, 0, 5)
    assert _titles(layout) == ["t", "input", "input"]
    assert layout["yaxis"].get("autorange") == "reversed"
    assert "basis" not in layout["title"]["subtitle"]["text"]
    bare = _json(plot.interaction(torch.tensor(q)))[1]
    assert "basis" in bare["title"]["subtitle"]["text"]


def test_attention_shows_the_past_of_every_head():
    """Each head's maps in order, the future blank, a range shared per column, its heads, tokens and norms named."""
    pattern = torch.tensor([[[2.0, 9, 9], [-1, 3, 9], [0.5, 4, -6]], [[1, 9, 9], [7, -2, 9], [0.25, 5, 8]]])
    factor, norms = 10 * pattern + 1, torch.tensor([[10.0, 100, 1000], [1, 2, 3]])
    figure = plot.attention(pattern, [factor], value_norms=norms, labels=["a", "b", "a"], heads=[5, 3], title="t")
    traces, layout = _json(figure)
    names = [f"head {n} {what}" for n in (5, 3) for what in ("factor 1", "pattern", "pattern x |v|")]
    assert [a["text"] for a in layout["annotations"]] == names
    expected = [m for n in range(2) for m in (factor[n], pattern[n], pattern[n] * norms[n])]
    limits = [81, 8, 6000]
    for n, (trace, m) in enumerate(zip(traces, expected, strict=True)):
        shown = [[math.nan if j > i else float(m[i, j]) for j in range(3)] for i in range(3)]
        assert np.array_equal(np.array(trace["z"], dtype=float), np.array(shown), equal_nan=True)
        assert trace["x"] == trace["y"] == ["a", "b", "a\u200b"]
        assert (trace["zmin"], trace["zmax"]) == (-limits[n % 3], limits[n % 3])
        assert trace["showscale"] == (n == 2)
    assert layout["title"]["text"] == "t"
    assert layout["yaxis4"]["title"]["text"] == "query"
    assert [layout[f"xaxis{n}"]["title"].get("text") for n in (4, 5, 6)] == ["key"] * 3
    plain = _json(plot.attention(pattern))[1]
    assert [a["text"] for a in plain["annotations"]] == ["head 0 pattern", "head 1 pattern"]


def test_a_logit_lens_shows_the_likeliest_tokens():
    """The likeliest token and its probability, by layer and position."""
    logits = torch.tensor([[[0.0, 2, 0], [3, 0, 0]], [[0, 0, 4], [0, 1, 0]]]).log1p().bfloat16().requires_grad_()
    (heat,), layout = _json(plot.logit_lens(logits, ["a", "b", "c"], layers=["m", "n"], labels=["x", "x"], title="t"))
    assert heat["text"] == [["b", "a"], ["c", "b"]]
    assert np.allclose(heat["z"], [[3 / 5, 4 / 6], [5 / 7, 2 / 4]], atol=0.01)
    assert (heat["x"], heat["y"], heat["zmin"], heat["zmax"]) == (["x", "x\u200b"], ["m", "n"], 0, 1)
    assert _titles(layout) == ["t", "position", "layer"]


def test_a_similarity_shows_a_matrix_that_is_not_square():
    """Rows and columns of a matrix that is not square."""
    m = [[0.1, 0.2, 0.3], [-0.4, 0.5, 0.6]]
    (heat,), layout = _json(plot.similarity(torch.tensor(m), rows=["a", "b"], columns=["c", "d", "e"], title="t"))
    assert np.allclose(heat["z"], m)
    assert (heat["x"], heat["y"], heat["zmin"], heat["zmax"]) == (["c", "d", "e"], ["a", "b"], -1, 1)
    assert layout["title"]["text"] == "t"


def test_a_truncation_shows_costs_and_errors():
    """What is kept across, the cost up, errors as bars of their own length."""
    curves, errors = {"a": [0.0, 0.1, 0.7], "b": [0.2, 0.3, 0.4]}, {"b": [0.01, 0.02, 0.03]}
    (a, b), layout = _json(plot.truncation([8, 4, 1], curves, errors=errors, title="t"))
    assert [t["name"] for t in (a, b)] == ["a", "b"]
    assert (a["x"], a["y"], b["x"], b["y"]) == ([8, 4, 1], curves["a"], [8, 4, 1], curves["b"])
    assert b["error_y"] == {"type": "data", "array": [0.01, 0.02, 0.03]}
    assert "array" not in a.get("error_y", {})
    assert _titles(layout) == ["t", "components kept", "change of cross-entropy (nats)"]


def test_lambdas_show_each_scalar_under_its_name():
    """Each scalar under its name, layer by layer."""
    model = make()
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            block.lambdas[0], block.lambdas[1] = layer + 1, 10 * layer + 5
            block.attn.lamb[0] = layer / 8
    traces, layout = _json(plot.lambdas(extract(model), title="t"))
    assert {t["name"]: (t["x"], t["y"]) for t in traces} == {
        "residual": ([0, 1, 2], [1, 2, 3]),
        "embedding": ([0, 1, 2], [5, 15, 25]),
        "value of block 0": ([0, 1, 2], [0, 0.125, 0.25]),
    }
    assert _titles(layout) == ["t", "layer", "factor"]


def test_lines_show_pairs_under_their_names():
    """Pairs of x and y under their names."""
    curves = {"a": ([1, 2], [3.0, 4.5]), "b": ([5], [6.0])}
    traces, layout = _json(plot.lines(curves, title="t", x="steps", y="nats", subtitle="s"))
    assert {t["name"]: (t["x"], t["y"]) for t in traces} == curves
    assert _titles(layout) == ["t", "steps", "nats"]
    assert layout["title"]["subtitle"]["text"] == "s"


def test_every_figure_is_small_json_readable_on_both_backgrounds():
    model = make()
    figures = [
        plot.spectrum([1.0, -2.0]),
        plot.truncation([4, 2], {"a": [0.0, 0.1]}, errors={"a": [0.01, 0.02]}),
        plot.lambdas(extract(model)),
        plot.lines({"a": ([1, 2], [3.0, 4.0])}, title="t", x="x", y="y"),
        plot.explanation(explain(model, torch.tensor([1, 2, 3]), 4), top=3),
    ]
    for figure in figures:
        layout = json.loads(figure.to_json())["layout"]
        assert layout["paper_bgcolor"] == "rgba(0,0,0,0)"
        assert layout["font"]["color"] == "#7f7f7f"
        assert len(figure.to_json()) < 100_000


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: plot.spectrum([1.0, float("nan")]), "values must be finite, got 1 NaN"),
        (lambda: plot.interaction(torch.zeros(3)), "q must have 2 axes"),
        (lambda: plot.attention(torch.zeros(1, 2, 2), [torch.zeros(1, 3, 3)]), "factors must have the pattern's shape"),
        (lambda: plot.attention(torch.zeros(1, 2, 2), heads=[0, 1]), "heads must name each of the 1 heads, got 2"),
        (
            lambda: plot.attention(torch.zeros(1, 2, 2), value_norms=torch.zeros(1, 3)),
            r"value_norms must be \(n_head, seq_k\) = \(1, 2\), got \(1, 3\)",
        ),
        (
            lambda: plot.logit_lens(torch.zeros(2, 3, 4), ["a", "b", "c"]),
            r"names must have 4 entries, as logits \(2, 3, 4\), got 3",
        ),
        (lambda: plot.logit_lens(torch.full((1, 1, 2), float("nan")), ["a", "b"]), "probabilities must be finite"),
        (lambda: plot.interaction(torch.zeros(3000, 3000)), "a figure takes at most"),
        (lambda: plot.truncation([1, 2], {"a": [0.0]}), "one value per entry"),
        (lambda: plot.interaction(torch.zeros(2, 2), labels=["a"]), "labels"),
    ],
)
def test_bad_input_is_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("top, shown", [(2, 2), (5, 5), (9, 7)])
def test_the_table_of_eigenvectors_grows_with_its_rows(top, shown):
    vectors, scores = torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    figure = plot.eigenvectors(vectors, torch.tensor([3.0, 2.0, 1.0]), scores, labels=list("abcdefg"), top=top)
    signs = figure.data[0].cells.values[0]
    assert list(signs) == ["+"] * shown + ["-"] * shown
    assert (figure.layout.height, figure.layout.margin.b) == (150 + 22 * len(signs), 10)  # pixels


def test_lines_may_stand_over_texts():
    (trace,) = plot.lines({"a": (["one", "two"], [1, 4])}, title="t", x="", y="y").to_dict()["data"]
    assert (trace["x"], trace["y"]) == (["one", "two"], [1, 4])
