"""An explanation's rows sum to the logit, and each row is what taking the part out changes."""

import json

import pytest
import torch

from tests.interp.predictions.known import (
    ABLATED,
    EIGENVALUES,
    FOIL,
    LOGIT,
    PROMPT,
    ROWS,
    TARGET,
    Texts,
    known_model,
)
from tests.interp.test_extraction import make
from tests.limits import assert_close
from tests.symmetries import SYMMETRIES
from tnlm.interp.predictions.explanation import explain
from tnlm.interp.views.plot import NEGATIVE, POSITIVE
from tnlm.points import intervene, record

KINDS = [
    ("bilinear", "bilinear"),
    ("squared", "squared"),
    ("swiglu", "softmax"),
    ("bilinear", "differential"),
    ("relu2", "squared_normalized"),
    ("bilinear", "none"),
    ("none", "bilinear"),
]


@pytest.mark.parametrize("mlp, attention", KINDS)
@pytest.mark.parametrize("foil", [None, 5])
def test_rows_sum_to_the_logit(mlp, attention, foil):
    model, tokens = make(mlp, attention), torch.randint(0, 11, (7,))
    e = explain(model, tokens, 3, foil, components=4)
    logits = model.pre_softcap(tokens[None])[0, -1].detach()
    assert_close(e.logit, float(logits[3] - (0 if foil is None else logits[foil])))
    assert_close(e.remainder, 0.0, scale=sum(abs(row.value) for row in e.rows))
    assert sum(abs(row.value) for row in e.rows) > 0.1
    assert [abs(r.value) for r in e.rows] == sorted((abs(r.value) for r in e.rows), reverse=True)


@pytest.mark.parametrize("changes", [{"final_norm": False}, {"mlp_hidden_bias": True}])
def test_rows_of_a_model_without_final_norm_or_with_hidden_biases(changes):
    model, tokens = make(**changes), torch.randint(0, 11, (7,))
    e = explain(model, tokens, 3, components=2)
    size = sum(abs(row.value) for row in e.rows)
    assert_close(e.logit, float(model.pre_softcap(tokens[None])[0, -1, 3].detach()), scale=size)
    assert_close(e.remainder, 0.0, scale=size)
    for row in {row.kind: row for row in e.rows if row.kind not in ("mlp", "mlp_rest")}.values():
        ablated = e.ablate(row)
        assert_close(ablated.held, ablated.predicted, scale=size)


def test_float32_sums_within_its_rounding():
    model, tokens = make(dtype=torch.float32), torch.randint(0, 11, (7,))
    e = explain(model, tokens, 3)
    assert_close(e.remainder, 0.0, scale=sum(abs(row.value) for row in e.rows), dtype=torch.float32)


def test_all_components_leave_nothing_to_the_rest_row():
    model, tokens = make(), torch.randint(0, 11, (6,))
    e = explain(model, tokens, 2, components=None)
    assert sum(row.kind == "mlp" for row in e.rows) == 3 * 30
    assert all(row.kind != "mlp_rest" for row in e.rows)
    assert_close(e.remainder, 0.0, scale=sum(abs(row.value) for row in e.rows))


@pytest.mark.parametrize("mlp, attention", KINDS[:4])
def test_ablation_with_the_norms_held_is_the_prediction_but_for_components(mlp, attention):
    model, tokens = make(mlp, attention), torch.randint(0, 11, (7,))
    before = model(tokens[None])
    e = explain(model, tokens, 3, 5, components=2)
    for row in {row.kind: row for row in e.rows}.values():
        ablated = e.ablate(row)
        assert ablated.predicted == -row.value
        assert ablated.actual != pytest.approx(0, abs=1e-12)
        if row.kind not in ("mlp", "mlp_rest") or mlp == "swiglu":
            assert_close(ablated.held, ablated.predicted, scale=e.absolute_sum)
    torch.testing.assert_close(model(tokens[None]), before, rtol=0, atol=0)


@pytest.mark.parametrize("layer, component", [(0, 3), (1, 0), (2, 2), (1, None)])
def test_a_component_is_removed_from_the_input_and_the_input_kept_on_the_sphere(layer, component):
    """Against the layer as loops over its hidden units, its form diagonalised densely."""
    model, tokens = make(), torch.randint(0, 11, (7,))
    e = explain(model, tokens, 3, components=4)
    wanted = ("mlp_rest" if component is None else "mlp", layer, component)
    row = next(r for r in e.rows if (r.kind, r.layer, r.component) == wanted)
    kept = {}
    points = [f"blocks.{layer}.ln2.hook_normalized", "ln_final.hook_scale"]
    with intervene(model, {p: lambda x, p=p: kept.__setitem__(p, x[0, -1].detach()) for p in points}):
        model(tokens[None])
    x, scale = kept[points[0]], kept[points[1]]
    mlp = model.blocks[layer].mlp
    read = model.unembed.w_u[3].detach() / scale
    for later in model.blocks[layer + 1 :]:
        read = read * later.lambdas[0].detach()

    def f(x):
        return float(read @ (mlp.w_d.detach() @ ((mlp.w_l.detach() @ x) * (mlp.w_r.detach() @ x))))

    unit = torch.einsum("o,oh,hi,hj->ij", read, *(w.detach() for w in (mlp.w_d, mlp.w_l, mlp.w_r)))
    form = (unit + unit.mT) / 2
    form = form - torch.eye(30, dtype=form.dtype) * form.trace() / 30
    values, vectors = torch.linalg.eigh(form)
    order = values.abs().argsort(descending=True)
    v = vectors[:, order[4:] if component is None else order[component : component + 1]]
    without = x - v @ (v.mT @ x)
    without = without * x.norm() / without.norm()
    ablated = e.ablate(row)
    parts = values * (vectors.mT @ x).square()
    own = float(parts[order[4:]].sum() if component is None else parts[order[component]])
    assert_close(ablated.predicted, -own, scale=e.absolute_sum)
    assert_close(ablated.held, f(without) - f(x), scale=e.absolute_sum)

    def edit(value):
        value[0, -1] = without

    with intervene(model, {points[0]: edit}):
        actual = model.pre_softcap(tokens[None])[0, -1, 3].item() - e.logit
    assert_close(ablated.actual, actual, scale=e.absolute_sum)
    # they do disagree
    if layer < 2:
        assert len({round(n, 6) for n in ablated}) == 3


@pytest.mark.parametrize("id", ["R", "E", "P", "Q", "QR", "V", "L", "X", "H", "S"])
def test_rows_and_ablations_do_not_move_under_symmetries(id):
    model, tokens = make(norm_eps=0.0, d_vocab_used=9), torch.randint(0, 9, (6,))
    e, moved = (explain(m, tokens, 3, components=3) for m in (model, SYMMETRIES[id](model)))
    assert len(e) == len(moved)
    scale = e.absolute_sum
    other = {r.label: r for r in moved.rows}
    for kind, row in {r.kind: r for r in e.rows}.items():
        assert_close(other[row.label].value, row.value, scale=scale, roundings=2**20)
        if kind != "direct":  # without its embedding a position is 0, which no norm divides
            assert_close(list(moved.ablate(other[row.label])), list(e.ablate(row)), scale=scale, roundings=2**24)
    assert_close(sorted(r.value for r in moved.rows), sorted(r.value for r in e.rows), scale=scale, roundings=2**20)


def test_every_row_of_the_known_model():
    """Every part, position, rank, eigenvalue and value of the known model."""
    e = explain(known_model(), PROMPT, TARGET)
    assert_close(e.logit, LOGIT, dtype=torch.float32)
    found = {row.label: row.value for row in e.rows if abs(row.value) > 1e-6}
    assert found.keys() == ROWS.keys()
    assert list(found) == sorted(ROWS, key=lambda name: -abs(ROWS[name]))
    assert_close(found, {name: ROWS[name] for name in found}, dtype=torch.float32)
    head = next(row for row in e.rows if row.label == "L1.H2 from 1")
    assert (head.kind, head.layer, head.head, head.source, head.component) == ("head", 1, 2, 1, None)
    ranked = {r.component: r.eigenvalue for r in e.rows if r.kind == "mlp" and r.layer == 0}
    assert_close([ranked[k] for k in range(3)], EIGENVALUES)


def test_rows_count_twice_where_a_later_layer_doubles_its_input():
    """Rows of the known model when layer 1 doubles its input, so that what was written before counts twice."""
    model = known_model()
    with torch.no_grad():
        model.blocks[1].lambdas.copy_(torch.tensor([2.0, 0.0]))
        # a head of layer 0 that reads token 1, at position 2 of the prompt, with pattern 1
        attn, row = model.blocks[0].attn, 1 * 4 + 1  # head 1
        attn.w_q1[row, 3] = attn.w_q2[row, 3] = 1
        attn.w_k1[row, 1] = attn.w_k2[row, 1] = 2
        attn.w_v[attn.d_head, 1] = 3
        attn.w_o[7, attn.d_head] = 5
    e = explain(model, PROMPT, TARGET)
    found = {row.label: row.value for row in e.rows if row.layer != 1}
    assert_close(found["direct path"], 2 * 0.5, dtype=torch.float32)
    assert_close(found["L0.H1 from 2"], 2 * 0.5 * 5 * 3, dtype=torch.float32)


def test_predicted_held_and_actual_change_of_the_known_model():
    """Predicted, held and actual of every part of the known model; for two parts they disagree."""
    e = explain(known_model(), PROMPT, TARGET)
    for label, expected in ABLATED.items():
        row = next(row for row in e.rows if row.label == label)
        assert_close(list(e.ablate(row)), list(expected), scale=10, dtype=torch.float32)


def test_the_table_cell_by_cell():
    """The printed table, cell by cell."""
    e = explain(known_model(), PROMPT, TARGET, tokenizer=Texts())
    head, summary, columns, *rows = e.table(3).splitlines()
    assert head == "logit of 'five': -8.5000"
    assert columns.split() == ["value", "share", "part"]
    assert summary.startswith("exact;")
    assert "norms" not in summary
    assert "sum to 9.5000" in summary
    assert "1.12 times" in summary
    assert [row.split(None, 2) for row in rows[:3]] == [
        ["-6.0000", "-63.2%", "L0.MLP component 1"],
        ["-3.0000", "-31.6%", "L1.H2 from 1 ('four ')"],
        ["+0.5000", "+5.3%", "direct path"],
    ]
    assert rows[3].split() == ["+0.0000", str(len(e) - 3), "other", "rows"]
    assert e.table(1).splitlines()[4].split() == ["-2.5000", str(len(e) - 1), "other", "rows"]
    assert rows[4].split()[1] == "remainder"
    assert abs(float(rows[4].split()[0])) < 1e-9
    pair = explain(known_model(), PROMPT, TARGET, FOIL, tokenizer=Texts())
    assert pair.table(3).splitlines()[0] == "logit of 'five' minus 'six': -16.5000"
    values = [line.split(None, 2)[0] for line in pair.table(3).splitlines()[3:6]]
    assert values == ["-9.0000", "-4.0000", "-3.5000"]


def test_the_record_number_by_number():
    """The dictionary, number by number."""
    e = explain(known_model(), PROMPT, TARGET, tokenizer=Texts())
    record = e.to_dict(3)
    assert json.loads(e.to_json(3)) == record
    assert (record["target"], record["foil"], record["tokens"]) == (5, None, [2, 4, 1, 0, 3])
    assert record["exactness"] == "exact"
    assert_close(
        [record[n] for n in ("logit", "absolute_sum", "cancellation")], [-8.5, 9.5, 9.5 / 8.5], dtype=torch.float32
    )
    assert abs(record["remainder"]) < 1e-9
    rows = record["rows"]
    assert [r["label"] for r in rows] == ["L0.MLP component 1", "L1.H2 from 1 ('four ')", "direct path"]
    assert [r["kind"] for r in rows] == ["mlp", "head", "direct"]
    assert [(r["layer"], r["head"], r["source"], r["component"]) for r in rows] == [
        (0, None, None, 1),
        (1, 2, 1, None),
        (None, None, None, None),
    ]
    assert_close([r["value"] for r in rows], [-6.0, -3.0, 0.5], dtype=torch.float32)
    assert_close([r["share"] for r in rows], [-6 / 9.5, -3 / 9.5, 0.5 / 9.5], dtype=torch.float32)
    assert_close(rows[0]["eigenvalue"], -1.5)
    assert len(e.to_dict()["rows"]) == len(e)


def test_the_figure_bar_by_bar():
    """The bars, their order, names, colours, notes and titles."""
    figure = json.loads(explain(known_model(), PROMPT, TARGET, tokenizer=Texts()).plot(top=2).to_json())
    (bars,), layout = figure["data"], figure["layout"]
    assert bars["orientation"] == "h"
    assert bars["y"][:2] == ["L0.MLP component 1", "L1.H2 from 1 ('four ')"]
    assert bars["y"][2].endswith("other rows")
    assert_close(list(bars["x"]), [-6.0, -3.0, 0.5], scale=10, dtype=torch.float32)
    assert bars["marker"]["color"] == [NEGATIVE, NEGATIVE, POSITIVE]
    assert [note.split()[0] for note in bars["customdata"]] == ["-63.2%", "-31.6%", "sum"]
    assert layout["title"]["text"] == "logit of 'five': -8.500"
    assert "9.5" in layout["title"]["subtitle"]["text"]
    assert "norms" not in layout["title"]["subtitle"]["text"]
    assert layout["xaxis"]["title"]["text"] == "added to the logit"
    assert layout["yaxis"].get("autorange") == "reversed"


@pytest.mark.parametrize("call, most", [("explain", 2), ("ablate", 3)])
def test_the_stated_number_of_forwards(call, most):
    model = known_model()
    e, forwards = explain(model, PROMPT, TARGET), []
    model.embed.register_forward_hook(lambda *_: forwards.append(1))
    explain(model, PROMPT, TARGET) if call == "explain" else e.ablate(e.rows[0])
    assert len(forwards) == most
    words = {2: "two forwards", 3: "three forwards"}[most]
    assert words in (explain if call == "explain" else type(e).ablate).__doc__.lower()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "exact given the norms of this run"),
        ({"attention": "softmax"}, "exact given the norms and patterns of this run"),
        ({"pure": True}, "exact"),
        ({"norm": "none", "qk_norm": True}, "exact given the norms of this run"),
        ({"norm": "none", "qk_norm": True, "attention": "none"}, "exact"),
        ({"norm": "none", "qk_norm": False, "attention": "softmax"}, "exact given the patterns of this run"),
    ],
)
def test_what_is_held_fixed_is_said(changes, words):
    e = explain(make(**changes), torch.tensor([1, 2, 3]), 4)
    assert e.exactness == words
    assert e.table().splitlines()[1].startswith(words + ";")
    assert e.to_dict()["exactness"] == words
    assert e.plot().layout.title.subtitle.text.startswith(words + ";")


def test_the_softcap_is_named_where_there_is_one():
    tokens = torch.tensor([1, 2, 3])
    assert "before the softcap" in explain(make(), tokens, 4).table()
    assert "softcap" not in explain(make(logit_softcap=None), tokens, 4).table()


def test_last_layer_parts_of_a_norm_free_model_act_as_predicted():
    model, tokens = make(pure=True), torch.randint(0, 11, (7,))
    e = explain(model, tokens, 3, components=3)
    last = [row for row in e.rows if row.layer == 2 and row.kind != "head"]
    assert last
    for row in last:
        assert_close(e.ablate(row).actual, -row.value, scale=sum(abs(r.value) for r in e.rows))


def test_actual_change_recomputes_everything_after_the_write():
    model, tokens = make(), torch.randint(0, 11, (7,))
    e = explain(model, tokens, 3)
    row = next(r for r in e.rows if r.kind == "mlp_constant" and r.layer == 0)
    mlp = model.blocks[0].mlp
    x = record(model, tokens[None], ["blocks.0.ln2.hook_normalized"])["blocks.0.ln2.hook_normalized"][0, -1]
    traces = torch.einsum("oh,hi,hi->o", *(w.detach() for w in (mlp.w_d, mlp.w_l, mlp.w_r)))
    constant = mlp.bias.detach() + traces / 30 * (x @ x)  # behind a norm the two are one

    def without(x):
        return torch.cat([x[:, :-1], x[:, -1:] - constant], 1)

    with intervene(model, {"blocks.0.hook_mlp_out": without}):
        changed = model.pre_softcap(tokens[None])[0, -1, 3].item()
    assert_close(e.ablate(row).actual, changed - e.logit, scale=sum(abs(r.value) for r in e.rows))


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda model, e: explain(model, torch.zeros(0, dtype=torch.long), 1), "one prompt of at least one token"),
        (lambda model, e: explain(model, torch.zeros(2, 3, dtype=torch.long), 1), "one prompt of at least one token"),
        (lambda model, e: explain(model, torch.tensor([1, 2]), 9), r"target must be a token id in \[0, 9\), got 9"),
        (lambda model, e: explain(model, torch.tensor([1, 2]), 1, -1), r"foil must be a token id in \[0, 9\), got -1"),
        (lambda model, e: explain(model, torch.tensor([1, 10]), 1), r"in \[0, 9\), got 10 at row 0, position 1"),
        (
            lambda model, e: explain(model, torch.tensor([1, 2]), " Paris"),
            r"none is known for 9 ids: set model.tokenizer, or pass tokenizer=",
        ),
        (lambda model, e: explain(model, [1, 2], 1), r"tokens must be text or a torch tensor \(seq,\), got list"),
        (
            lambda model, e: explain(model, torch.tensor([1, 2]), 1, components=1.5),
            r"components must be at least 0, or None for all; got 1\.5",
        ),
        (lambda model, e: explain(model, torch.tensor([1, 2]), 1, components=-1), "components must be at least 0"),
        (lambda model, e: e.ablate(e.rows[0]._replace(layer=7)), "not a row of this explanation"),
    ],
)
def test_bad_prompts_are_refused(call, text):
    model = make(d_vocab_used=9)
    e = explain(model, torch.tensor([1, 2]), 1)
    with pytest.raises(ValueError, match=text):
        call(model, e)
