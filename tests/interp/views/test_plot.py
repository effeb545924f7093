"""Figures hold the numbers that went in, with symmetric ranges, from any tensor."""

import json

import numpy as np
import pytest
import torch

from tests.interp.test_extraction import make
from tnlm.interp.extraction import extract
from tnlm.interp.predictions.explanation import explain
from tnlm.interp.views import plot


def test_spectrum_is_ordered_by_magnitude_and_signed():
    figure = plot.spectrum(torch.tensor([0.5, -3.0, 2.0], dtype=torch.bfloat16, requires_grad=True))
    assert list(figure.data[0].y) == [-3.0, 2.0, 0.5]
    assert figure.data[0].marker.color == (plot.NEGATIVE, plot.POSITIVE, plot.POSITIVE)


def test_attention_shares_a_symmetric_range_and_blanks_the_future():
    pattern = torch.randn(3, 5, 5).tril()
    figure = plot.attention(pattern, [pattern * 2, -pattern], labels=list("aabcd"))
    assert len(figure.data) == 9
    for trace in figure.data:
        assert trace.zmin == -trace.zmax
        assert np.isnan(np.array(trace.z, dtype=float)[0, 1:]).all()
        assert len(set(trace.x)) == 5
    assert figure.data[2].zmax == pytest.approx(pattern.abs().max().item())
    named = plot.attention(pattern[:2], heads=[5, 3])
    assert [a.text for a in named.layout.annotations] == ["head 5 pattern", "head 3 pattern"]


def test_attention_weighted_by_the_norms_of_values():
    pattern, norms = torch.tensor([[[2.0, 0], [-1, 3]]]), torch.tensor([[10.0, 100.0]])
    figure = plot.attention(pattern, value_norms=norms)
    assert figure.data[1].z.tolist()[1] == [-10, 300]
    assert figure.layout.annotations[1].text == "head 0 pattern x |v|"


def test_logit_lens_shows_the_likeliest_token_and_its_probability():
    logits = torch.tensor([[[0.0, 2.0, 0.0], [3.0, 0.0, 0.0]]]).log1p()
    figure = plot.logit_lens(logits.bfloat16().requires_grad_(), ["a", "b", "c"], labels=["x", "x"])
    assert [list(row) for row in figure.data[0].text] == [["b", "a"]]
    assert figure.data[0].z.tolist()[0] == pytest.approx([3 / 5, 4 / 6], abs=0.01)


def test_interaction_and_similarity_are_centred_at_zero():
    q = torch.randn(4, 4)
    heat = plot.interaction(q + q.T, labels=["x", "x", "y", "z"]).data[0]
    assert heat.zmid == 0
    assert heat.zmax == pytest.approx((q + q.T).abs().max().item())
    assert plot.similarity(torch.zeros(2, 3), rows=["a", "b"], columns=["c", "d", "e"]).data[0].zmax == 1


def test_eigenvectors_list_the_extreme_tokens():
    vectors, scores = torch.eye(3)[:, :2], torch.tensor([[0.0, 5, 0], [9, 0, 0], [-4, 1, 0], [1, -2, 0]])
    cells = plot.eigenvectors(vectors, [2.0, -1.0], scores, ["p", "q", "r", "s"], top=1).data[0].cells.values
    assert list(cells[0]) == ["+", "-"]
    assert list(cells[1]) == ["+9.00  'q'", "-4.00  'r'"]
    assert list(cells[2]) == ["+5.00  'p'", "-2.00  's'"]


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
def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="values must be finite, got 1 NaN"):
        plot.spectrum([1.0, float("nan")])
    with pytest.raises(ValueError, match="q must have 2 axes"):
        plot.interaction(torch.zeros(3))
    with pytest.raises(ValueError, match="factors must have the pattern's shape"):
        plot.attention(torch.zeros(1, 2, 2), [torch.zeros(1, 3, 3)])
    with pytest.raises(ValueError, match="heads must name each of the 1 heads, got 2"):
        plot.attention(torch.zeros(1, 2, 2), heads=[0, 1])
    with pytest.raises(ValueError, match=r"value_norms must be \(n_head, seq_k\) = \(1, 2\), got \(1, 3\)"):
        plot.attention(torch.zeros(1, 2, 2), value_norms=torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"names must have 4 entries, as logits \(2, 3, 4\), got 3"):
        plot.logit_lens(torch.zeros(2, 3, 4), ["a", "b", "c"])
    with pytest.raises(ValueError, match="probabilities must be finite"):
        plot.logit_lens(torch.full((1, 1, 2), float("nan")), ["a", "b"])
    with pytest.raises(ValueError, match="a figure takes at most"):
        plot.interaction(torch.zeros(3000, 3000))
    with pytest.raises(ValueError, match="one value per entry"):
        plot.truncation([1, 2], {"a": [0.0]})
    with pytest.raises(ValueError, match="labels"):
        plot.interaction(torch.zeros(2, 2), labels=["a"])
