"""An explanation's rows sum to the logit, and each row is what taking the part out changes."""

import pytest
import torch

from tests.interp.test_extraction import make
from tests.limits import assert_close
from tnlm.interp.predictions.explanation import explain
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
    for row in {row.kind: row for row in e.rows}.values():
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
def test_ablation_with_the_norm_held_is_the_prediction(mlp, attention):
    model, tokens = make(mlp, attention), torch.randint(0, 11, (7,))
    before = model(tokens[None])
    e = explain(model, tokens, 3, 5, components=2)
    seen = {row.kind: row for row in e.rows}
    for row in seen.values():
        ablated = e.ablate(row)
        assert ablated.predicted == -row.value
        assert_close(ablated.held, ablated.predicted, scale=sum(abs(r.value) for r in e.rows))
        assert ablated.actual != pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(model(tokens[None]), before, rtol=0, atol=0)


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
    row = next(r for r in e.rows if r.kind == "mlp_bias" and r.layer == 0)
    mlp = model.blocks[0].mlp
    x = record(model, tokens[None], ["blocks.0.ln2.hook_normalized"])["blocks.0.ln2.hook_normalized"][0, -1]
    traces = torch.einsum("oh,hi,hi->o", *(w.detach() for w in (mlp.w_d, mlp.w_l, mlp.w_r)))
    constant = mlp.bias.detach() + traces / 30 * (x @ x)  # behind a norm the two are one

    def without(x):
        return torch.cat([x[:, :-1], x[:, -1:] - constant], 1)

    with intervene(model, {"blocks.0.hook_mlp_out": without}):
        changed = model.pre_softcap(tokens[None])[0, -1, 3].item()
    assert_close(e.ablate(row).actual, changed - e.logit, scale=sum(abs(r.value) for r in e.rows))


def test_table_and_json_name_the_parts():
    model, tokens = make(), torch.randint(0, 11, (5,))
    e = explain(model, tokens, 3, 5)
    assert "exact given the norms of this run" in e.table()
    assert "remainder" in e.table(3)
    assert f"{len(e) - 3} other rows" in e.table(3)
    assert e.to_dict()["rows"][0]["value"] == e.rows[0].value
    assert len(e.plot(top=5).data[0].x) == 6


@pytest.mark.user_error
def test_bad_prompts_are_refused():
    model = make(d_vocab_used=9)
    with pytest.raises(ValueError, match="one prompt of at least one token"):
        explain(model, torch.zeros(0, dtype=torch.long), 1)
    with pytest.raises(ValueError, match="one prompt of at least one token"):
        explain(model, torch.zeros(2, 3, dtype=torch.long), 1)
    with pytest.raises(ValueError, match=r"target must be a token id in \[0, 9\), got 9"):
        explain(model, torch.tensor([1, 2]), 9)
    with pytest.raises(ValueError, match=r"foil must be a token id in \[0, 9\), got -1"):
        explain(model, torch.tensor([1, 2]), 1, -1)
    with pytest.raises(ValueError, match=r"in \[0, 9\), got 10 at row 0, position 1"):
        explain(model, torch.tensor([1, 10]), 1)
    with pytest.raises(ValueError, match=r"none is known for 9 ids: set model.tokenizer, or pass tokenizer="):
        explain(model, torch.tensor([1, 2]), " Paris")
    with pytest.raises(ValueError, match=r"tokens must be text or a torch tensor \(seq,\), got list"):
        explain(model, [1, 2], 1)
    with pytest.raises(ValueError, match=r"components must be at least 0, or None for all; got 1\.5"):
        explain(model, torch.tensor([1, 2]), 1, components=1.5)
    with pytest.raises(ValueError, match="components must be at least 0"):
        explain(model, torch.tensor([1, 2]), 1, components=-1)
    e = explain(model, torch.tensor([1, 2]), 1)
    with pytest.raises(ValueError, match="not a row of this explanation"):
        e.ablate(e.rows[0]._replace(layer=7))
