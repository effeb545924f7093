"""The report stands alone and says what it could not do."""

import base64
import html
import re

import numpy as np
import pytest
import torch

from tests.interp.predictions.known import ABLATED, LOGIT, PROMPT, ROWS, TARGET, TEXTS, Texts, known_model
from tests.interp.test_extraction import make
from tests.interp.tokens.test_tables import dense_path
from tests.limits import assert_close, limit
from tests.pages import figures_of, tables_of, texts_of
from tests.symmetries import SYMMETRIES
from tnlm.interp import extract, hosvd, with_mlp
from tnlm.interp.views.reporting import report
from tnlm.points import record
from tnlm.text.tokenizer import Tokenizer

KINDS = [
    ("bilinear", "bilinear"),
    ("squared", "squared"),
    ("swiglu", "softmax"),
    ("none", "bilinear"),
    ("bilinear", "none"),
]


@pytest.mark.parametrize("mlp, attention", KINDS)
def test_report_is_one_offline_file(mlp, attention, tmp_path):
    tokens = torch.randint(0, 11, (4, 8))
    page = report(make(mlp, attention), tmp_path / "deep" / "report.html", tokens=tokens, progress=False)
    text = page.read_text()
    body = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert text.count("plotly.js v") == 1
    assert not re.search(r"(src|href)=\"(?!data:)", body)
    assert "One prediction explained" in body
    assert ("of the largest logit" in body) == (mlp != "swiglu")
    assert ("has no tensor, so no spectrum" in body) == (mlp in ("swiglu", "none"))


@pytest.mark.user_error
def test_report_wants_rows_with_targets(tmp_path):
    with pytest.raises(ValueError, match=r"^tokens must be \(rows, seq \+ 1\), got shape \(3,\)$"):
        report(make(), tmp_path / "r.html", tokens=torch.zeros(3, dtype=torch.long), progress=False)
    tokens = torch.randint(0, 11, (2, 5))
    with pytest.raises(ValueError, match=r"target must be a token id in \[0, 11\), got 11"):
        report(make(), tmp_path / "r.html", tokens=tokens, target=11, progress=False)
    with pytest.raises(ValueError, match="top must be an integer at least 1, got 0"):
        report(make(), tmp_path / "r.html", tokens=tokens, top=0, progress=False)
    tokens[1, 4] = 12
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 11\), got 12"):
        report(make(), tmp_path / "r.html", tokens=tokens, progress=False)
    assert not list(tmp_path.iterdir())


KNOWN_TOKENS = torch.stack([torch.cat([PROMPT, torch.tensor([5])]), torch.tensor([6, 1, 4, 4, 3, 2])])
NAMES = ["a", " b", "c", "d\n", "<e>", " f", "g", "h", "i"]


class Letters(Tokenizer):
    def __init__(self):
        """Only what the report needs."""

    def decode(self, ids):
        return "".join(NAMES[i] for i in ids)

    def quoted(self, token):
        return repr(NAMES[token])


@pytest.fixture(scope="module")
def released():
    """A model with norms and text in which token 7 never occurs."""
    model = make(d_vocab_used=9)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 8], [0, 0, 4, 1, 6, 3, 2], [8, 6, 6, 1, 2, 2, 5]])
    return model, tokens


@pytest.fixture(scope="module")
def page(released, tmp_path_factory):
    model, tokens = released
    path = tmp_path_factory.mktemp("released") / "r.html"
    return report(model, path, tokens=tokens, tokenizer=Letters(), target=4, top=3, progress=False).read_text()


def _number(cell):
    return float(cell.replace(",", ""))


def assert_rounded(cells, numbers):
    """Cells show the numbers to four digits."""
    assert len(cells) == len(numbers)
    for cell, number in zip(cells, numbers, strict=True):
        assert _number(cell) == pytest.approx(number, rel=6e-4, abs=1e-9), cells


def _table(page, first):
    return [t for t in tables_of(page) if t[0][0] == first][-1]


def test_the_explanation_cell_by_cell(tmp_path):
    """The table of the explained prediction, and the prompt, title and bars beside it."""
    options = {"tokens": KNOWN_TOKENS, "tokenizer": Texts(), "target": TARGET, "progress": False}
    page = report(known_model(), tmp_path / "r.html", **options).read_text()
    header, *rows = _table(page, "part")
    assert [h.split(":")[0].split()[0] for h in header] == ["part", "adds", "share", "removed", "norms", "all"]
    assert [row[0] for row in rows[:3]] == ["L0.MLP component 1", "L1.H2 from 1 ('four ')", "direct path"]
    for row, (label, value) in zip(rows, ROWS.items(), strict=False):
        assert_rounded(row[1:], [value, value / 9.5, *ABLATED[label]])
    assert texts_of(page, "pre") == ["".join(TEXTS[t] for t in PROMPT.tolist())]
    bars, layout = figures_of(page)[-1]
    assert_close(list(bars[0]["x"][:3]), list(ROWS.values()), scale=10, dtype=torch.float32)
    assert layout["title"]["text"].startswith("logit of 'five'")
    assert "norms" not in layout["title"]["subtitle"]["text"]
    assert "9.5000" in texts_of(page, "p")[-2]
    assert f"{LOGIT:.4f}" in texts_of(page, "p")[-1]


class Words(Texts):
    """Texts of 90 characters for every token."""

    def decode(self, ids):
        return "".join(90 * NAMES[i][-1] for i in ids)


def test_of_a_long_prompt_the_last_400_characters_are_shown(tmp_path):
    page = report(known_model(), tmp_path / "r.html", tokens=KNOWN_TOKENS, tokenizer=Words(), progress=False)
    whole = Words().decode(PROMPT.tolist())
    assert len(whole) == 450
    assert texts_of(page.read_text(), "pre") == [whole[50:]]


def test_parameters_and_settings(page, released):
    model, _ = released
    header, *rows = tables_of(page)[0]
    assert header == ["part", "parameters"]
    c = model.config
    attention = c.n_layer * c.n_head * c.d_model * (4 * c.d_qk + 2 * c.d_head)
    expected = {
        "embedding and unembedding": 2 * c.d_vocab * c.d_model,
        "attention": attention,
        "MLP": c.n_layer * 3 * c.d_model * c.d_hidden,
        "scalars and biases": c.n_layer * (c.d_model + 3),
    }
    expected["all"] = sum(expected.values())
    assert {name: int(_number(cell)) for name, cell in rows} == expected
    header, *rows = tables_of(page)[1]
    assert header == ["setting", "value"]
    shown = dict(rows)
    assert shown.keys() == c.to_dict().keys()
    assert (shown["n_layer"], shown["n_head"], shown["d_model"]) == ("3", "3", "30")
    assert (shown["mlp"], shown["attention"], shown["logit_softcap"]) == ("bilinear", "bilinear", "30")


def test_mixing_scalars(page, released):
    model, _ = released
    traces, layout = figures_of(page)[0]
    assert layout["title"]["text"] == "Mixing scalars by layer"
    assert [t["name"] for t in traces] == ["residual", "embedding", "value of block 0"]
    expected = [
        [b.lambdas[0].item() for b in model.blocks],
        [b.lambdas[1].item() for b in model.blocks],
        [b.attn.lamb.item() for b in model.blocks],
    ]
    for trace, values in zip(traces, expected, strict=True):
        assert trace["x"] == [0, 1, 2]
        assert_close(_values(trace["y"]), values)
    assert (layout["xaxis"]["title"]["text"], layout["yaxis"]["title"]["text"]) == ("layer", "factor")


def _values(data):
    """Numbers of a trace, which plotly may encode."""
    if isinstance(data, dict):
        return np.frombuffer(base64.b64decode(data["bdata"]), dtype=data["dtype"]).tolist()
    return list(data)


def _dense_form(model, layer, direction):
    """The traceless form of a layer along a direction, and the absolute sum of its terms by hidden unit."""
    w_l, w_r, w_d = (getattr(model.blocks[layer].mlp, name).detach() for name in ("w_l", "w_r", "w_d"))
    for later in model.blocks[layer + 1 :]:
        direction = direction * later.lambdas[0].detach()
    form = torch.einsum("o,oh,hi,hj->ij", direction, w_d, w_l, w_r)
    form = (form + form.mT) / 2
    size = direction.abs() @ w_d.abs() @ (w_l.norm(dim=1) * w_r.norm(dim=1))
    return form - torch.eye(30, dtype=form.dtype) * form.trace() / 30, float(size)


def _centred_target(model, tokens, target):
    w_u = model.unembed.w_u.detach()[:9]
    return w_u[target] - sum(w_u[t] for t in tokens.flatten().tolist()) / tokens.numel()


def test_spectra_and_their_tokens(page, released):
    model, tokens = released
    u = _centred_target(model, tokens, 4)
    (traces, layout), (tables, _) = figures_of(page)[1:3]
    assert "'<e>'" in html.unescape(layout["title"]["text"])
    assert (layout["xaxis"]["title"]["text"], layout["yaxis"]["title"]["text"]) == ("rank", "|eigenvalue|")
    assert "traceless" in layout["title"]["subtitle"]["text"]
    largest = []
    for layer, trace in enumerate(traces):
        form, size = _dense_form(model, layer, u)
        values = torch.linalg.eigvalsh(form).abs().sort(descending=True).values
        assert trace["name"] == f"layer {layer}"
        assert trace["x"] == list(range(30))
        assert_close(_values(trace["y"]), values.tolist(), scale=size)
        largest.append(float(values[0]))
    strongest = max(range(3), key=largest.__getitem__)
    assert f"<p>Layer {strongest} holds the largest eigenvalue" in page
    values, vectors = torch.linalg.eigh(_dense_form(model, strongest, u)[0])
    order = values.abs().argsort(descending=True)[:3]
    header, columns = tables[0]["header"]["values"], tables[0]["cells"]["values"]
    assert_rounded([h.replace("+", "") for h in header[1:]], [float(f"{v:.3g}") for v in values[order].tolist()])
    x0 = model.embed.w_e.detach()
    x0 = x0 / (x0.square().mean(1, keepdim=True) + model.config.norm_eps).sqrt()
    shown = sorted(set(tokens.flatten().tolist()))
    assert columns[0] == ["+"] * 8 + ["-"] * 8
    for k, column in zip(order, columns[1:], strict=True):
        scores = {t: float(x0[t] @ vectors[:, k]) for t in shown}
        sign = 1 if float(column[0].split()[0]) == pytest.approx(max(scores.values()), abs=6e-3) else -1
        ranked = sorted(shown, key=lambda t: -sign * scores[t])
        assert column == [f"{sign * scores[t]:+.2f}  {NAMES[t]!r}" for t in (*ranked[:8], *ranked[-8:])]


def test_heads_cell_by_cell(page, released):
    """Over the tokens of the text, which are centred by their counts."""
    model, tokens = released
    _assert_heads(page, model, tokens.flatten().bincount(minlength=9))


def test_heads_of_the_most_frequent_tokens(released, tmp_path, monkeypatch):
    """Given counts in place of those of the text, and more tokens than are ranked: here 3, in no order of their ids."""
    model, tokens = released
    monkeypatch.setattr("tnlm.interp.views.reporting._RANKED", 3)
    counts = torch.tensor([2, 40, 0, 7, 9, 1, 2, 30, 5])
    options = {"tokens": tokens, "tokenizer": Letters(), "weights": counts, "progress": False}
    page = report(model, tmp_path / "r.html", **options).read_text()
    _assert_heads(page, model, torch.tensor([0, 40, 0, 0, 9, 0, 0, 30, 0]))


def _assert_heads(page, model, counts):
    ids = [t for t in range(9) if counts[t]]
    header, *rows = _table(page, "head")
    assert header == ["head", "root mean square", "strongest: read", "moved", "by"]
    assert [row[0] for row in rows] == [f"L{layer}.H{head}" for layer in range(3) for head in range(3)]
    for row in rows:
        dense = dense_path(model, int(row[0][1]), int(row[0][4]), counts)[ids][:, ids]
        off = dense.masked_fill(torch.eye(len(ids), dtype=torch.bool), 0)
        target, source = divmod(int(off.abs().argmax()), len(ids))
        assert row[2:4] == [repr(NAMES[ids[source]]), repr(NAMES[ids[target]])]
        assert_rounded([row[1], row[4]], [float(dense.square().mean().sqrt()), float(dense[target, source])])
    assert any(f"the {len(ids)} tokens" in text for text in texts_of(page, "p"))


def test_attention_of_the_last_layer(page, released):
    model, tokens = released
    traces, layout = figures_of(page)[3]
    points = [f"blocks.2.attn.{name}" for name in ("hook_attn_scores", "hook_attn_scores2", "hook_pattern")]
    run = record(model, tokens[:1, :-1], points)
    assert layout["title"]["text"].startswith("Layer 2")
    titles = [a["text"] for a in layout["annotations"]]
    assert titles == [f"head {n} {what}" for n in range(3) for what in ("factor 1", "factor 2", "pattern")]
    for n, trace in enumerate(traces):
        head, column = divmod(n, 3)
        shown = np.array(_values(trace["z"]), dtype=float).reshape(6, 6)
        values = run[points[column]][0, head].numpy()
        assert np.allclose(np.tril(values), np.where(np.isnan(shown), 0, shown), rtol=1e-6, atol=1e-6)
        assert [label.strip("\u200b") for label in trace["x"]] == [NAMES[t] for t in tokens[0, :-1].tolist()]


def test_truncation_cell_by_cell(page, released):
    model, tokens = released
    header, *rows = _table(page, "rank")
    assert [h.split()[0] for h in header] == ["rank", "change", "standard", "KL"]
    assert [int(_number(row[0])) for row in rows] == [30, 22, 15, 8, 3]
    (line,), layout = figures_of(page)[4]
    assert layout["xaxis"]["title"]["text"] == "components kept"
    assert layout["yaxis"]["title"]["text"] == "change of cross-entropy (nats)"
    assert "layer 2" in layout["title"]["text"]
    assert line["x"] == [30, 22, 15, 8, 3]
    tucker = hosvd(extract(model).mlp[2], 30, 30)
    before = model(tokens[:, :-1]).detach().log_softmax(-1)
    for n, (rank, *cells) in enumerate(rows):
        small = with_mlp(model, {2: tucker.reconstruct(int(rank), int(rank))})
        after = small(tokens[:, :-1]).detach().log_softmax(-1)
        changes = []
        for row in range(3):
            losses = [float(before[row, i, tokens[row, i + 1]] - after[row, i, tokens[row, i + 1]]) for i in range(6)]
            changes.append(sum(losses) / 6)
        mean = sum(changes) / 3
        error = (sum((c - mean) ** 2 for c in changes) / 2 / 3) ** 0.5
        kl = float((before.exp() * (before - after)).sum(-1).mean())
        if int(rank) == 30:
            # losses of some nats are in float32
            assert all(abs(_number(cell)) < limit(torch.float32, 6, scale=10) for cell in cells), cells
            continue
        assert_rounded(cells, [mean, error, kl])
        assert _values(line["y"])[n] == pytest.approx(mean)
        assert _values(line["error_y"]["array"])[n] == pytest.approx(error)


def test_the_error_of_the_tensors_is_that_of_the_check(page, released):
    model, tokens = released
    (text,) = [text for text in texts_of(page, "p") if "largest difference" in text]
    assert f"{extract(model).check(tokens[:1, :-1]):.1e}" in text
    assert any("exact given the norms of a run" in text for text in texts_of(page, "p"))


def test_heads_do_not_move_with_scores_or_embeddings(released, tmp_path):
    """No column holds the scale of a query or of an embedding row."""
    _, tokens = released
    model = make(d_vocab_used=9, norm_eps=0.0)
    pages = [
        report(m, tmp_path / f"{n}.html", tokens=tokens, target=4, progress=False).read_text()
        for n, m in enumerate((model, *(SYMMETRIES[id](model) for id in ("E", "Q"))))
    ]
    first, *others = (_table(page, "head") for page in pages)
    for other in others:
        assert [row[:1] + row[2:4] for row in other] == [row[:1] + row[2:4] for row in first]
        for row, expected in zip(other[1:], first[1:], strict=True):
            assert_rounded([row[1], row[4]], [_number(expected[1]), _number(expected[4])])
