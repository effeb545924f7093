"""What the commands print for people: tables parsed cell by cell and compared with an independent computation."""

import json
import math
import re

import pytest
import torch

import tnlm
from tests.app.conftest import TEXT
from tests.limits import assert_close
from tests.pages import figures_of, texts_of
from tests.tiny_models import build, tiny
from tnlm.app.cli import main
from tnlm.checkpoints import verification
from tnlm.text import tokenizer

SIZES = {"d_vocab": 310, "d_vocab_used": 300, "n_ctx": 150, "n_layer": 2}


@pytest.fixture(scope="module")
def vocabulary():
    """Tokens of one to several bytes, and an end-of-text id."""
    return tokenizer.train_bpe([TEXT], 300)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, vocabulary):
    """A model whose MLPs alone are no polynomials, and one of whose tensors is stored in bfloat16."""
    folder = tmp_path_factory.mktemp("models") / "small"
    model = build(tiny(**SIZES, mlp="swiglu"), dtype=torch.float32)
    model.embed.w_e.data = model.embed.w_e.data.bfloat16()
    tnlm.save(model, folder)
    vocabulary.save(folder)
    return folder


def both(monkeypatch, capsys, *argv):
    """Tables of a command by title without spaces, as rows of cells; all that it prints; and its JSON record."""
    monkeypatch.setenv("COLUMNS", "300")
    assert main([*map(str, argv), "--json"]) in (0, 1)
    record = json.loads(capsys.readouterr().out)
    assert main([*map(str, argv)]) in (0, 1)
    printed = capsys.readouterr().out
    tables, title = {}, ""
    for line in printed.splitlines():
        if cells := re.findall(r"[\u2502\u2503]\s*(.*?)\s*(?=[\u2502\u2503])", line):
            tables.setdefault(title, []).append(cells)
        elif not re.match(r"\s*[\u2500-\u257f]", line):  # a rule
            # a title that is longer than its table is folded
            title = ("" if title in tables else title) + "".join(line.split())
    return tables, printed, record


def sizes_of(model, part=""):
    return sum(p.numel() for name, p in model.named_parameters() if name.startswith(part))


def test_info(saved, monkeypatch, capsys):
    tables, _, record = both(monkeypatch, capsys, "info", saved, "--seq", 10)
    model = tnlm.load(saved)
    config = model.config
    blocks = sizes_of(model, "blocks.")
    mlp = sum(sizes_of(model, f"blocks.{layer}.mlp") for layer in range(2))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name != "embed.w_e")
    flops = 6 * matrices + 6 * 10 * 2 * 3 * (2 * 4 + 10)
    embedding = 310 * 30
    assert tables[str(saved)][:4] == [
        ["parameters", f"{sizes_of(model):,}"],
        ["of these in blocks", f"{blocks:,}"],
        ["polynomial layers, share of the blocks", f"{100 * (1 - mlp / blocks):.1f}%"],
        ["training FLOPs per token at 10 tokens", f"{flops:,}"],
    ]
    ((name, stored),) = tables[str(saved)][4:]
    assert name == "stored as"
    assert re.findall(r"float32 \(([\d,]+)\)", stored) == [f"{sizes_of(model) - embedding:,}"]
    assert re.findall(r"bfloat16 \(([\d,]+)\)", stored) == [f"{embedding:,}"]
    assert {name for name, _ in tables["configuration"]} == config.to_dict().keys()
    for name, value in tables["configuration"]:
        wanted = config.to_dict()[name]
        assert value == (f"{wanted:g}" if isinstance(wanted, float) else str(wanted))
    assert record == {
        "model": str(saved),
        "parameters": {"total": sizes_of(model), "blocks": blocks, "polynomial_share": pytest.approx(1 - mlp / blocks)},
        "flops_per_token": flops,
        "seq": 10,
        "dtypes": {"bfloat16": embedding, "float32": sizes_of(model) - embedding},
        "config": config.to_dict(),
    }
    assert both(monkeypatch, capsys, "info", saved)[2]["seq"] == 150


def losses_by_hand(model, ids, seq):
    """Loss and position of every predicted token, in windows of ``seq``."""
    for start in range(0, len(ids) - 1, seq):
        window = torch.tensor(ids[start : start + seq + 1])
        logits = model(window[None, :-1])[0].double()
        for position, target in enumerate(window[1:].tolist()):
            yield start // seq, position, (logits[position].logsumexp(0) - logits[position, target]).item()


def test_eval(saved, text, vocabulary, monkeypatch, capsys):
    """Two windows of 70 tokens; position 64 begins a second bucket."""
    tables, _, record = both(monkeypatch, capsys, "eval", saved, "--text", text, "--seq", 70, "--rows", 2)
    ids = vocabulary.encode(TEXT)[:141]
    assert len(ids) == 141
    with torch.no_grad():
        found = list(losses_by_hand(tnlm.load(saved, dtype=torch.float64), ids, 70))
    losses = [loss for _, _, loss in found]
    mean = sum(losses) / 140
    n_bytes = sum(len(vocabulary.token_bytes(i)) for i in ids[1:])
    bits = mean / math.log(2) * 140 / n_bytes
    rows = [sum(loss for row, _, loss in found if row == wanted) / 70 for wanted in (0, 1)]
    error = abs(rows[0] - rows[1]) / 2
    (_, spread), *others = tables[f"{saved}on{text}"]
    assert spread == f"{record['loss']:.4f} +- {record['standard_error']:.4f}"
    assert others == [
        ["bits per byte", f"{record['bits_per_byte']:.4f}"],
        ["predicted tokens", "140"],
        ["windows", "2 of 70 tokens"],
    ]
    assert_close([record["loss"], record["bits_per_byte"]], [mean, bits], scale=mean, dtype=torch.float32)
    assert_close(record["standard_error"], error, scale=mean, dtype=torch.float32)
    assert (record["tokens"], record["rows"], record["seq"]) == (140, 2, 70)
    head, *buckets = tables["byposition"]
    assert head == ["positions", "nats per token", "tokens"]
    for (label, loss, tokens), (start, stop), bucket in zip(
        buckets, ((0, 64), (64, 70)), record["buckets"], strict=True
    ):
        inside = [loss for _, position, loss in found if start <= position < stop]
        assert (label, loss, tokens) == (f"{start}-{stop - 1}", f"{bucket['loss']:.4f}", str(len(inside)))
        assert (bucket["start"], bucket["stop"], bucket["tokens"]) == (start, stop, len(inside))
        assert_close(bucket["loss"], sum(inside) / len(inside), dtype=torch.float32)


def test_generate(saved, vocabulary, monkeypatch, capsys):
    _, printed, record = both(
        monkeypatch, capsys, "generate", saved, "It is", "--temperature", 0, "--max-new-tokens", 7
    )
    model, ids = tnlm.load(saved), vocabulary.encode("It is")
    expected = []
    for _ in range(7):
        expected.append(int(model(torch.tensor([ids + expected]))[0, -1, :300].argmax()))
    assert record == {
        "model": str(saved),
        "prompt": "It is",
        "text": vocabulary.decode(expected),
        "ids": expected,
        "ended": False,
    }
    assert printed == f"It is{vocabulary.decode(expected)}\n"


def test_verify(saved, monkeypatch, capsys):
    """The outcomes are made here, so that no two columns could be mistaken for each other."""
    made = [
        verification.Check(name="file", status="passed", detail="sha256 abc"),
        verification.Check(name="numerics", status="failed", detail="chunked 3.0e-01"),
        verification.Check(name="cross_entropy", status="skipped", detail="no value"),
    ]
    monkeypatch.setattr(verification, "verify", lambda *_, **__: made)
    tables, _, record = both(monkeypatch, capsys, "verify", saved)
    assert tables[str(saved)] == [
        ["check", "outcome", "figures or reason"],
        ["file", "passed", "sha256 abc"],
        ["numerics", "failed", "chunked 3.0e-01"],
        ["cross_entropy", "skipped", "no value"],
    ]
    checks = [{"name": check.name, "status": check.status, "detail": check.detail} for check in made]
    assert record == {"model": str(saved), "passed": False, "checks": checks}


@pytest.mark.parametrize(
    "statuses, passed",
    [
        (("passed", "passed", "passed"), True),
        (("passed", "passed", "skipped"), True),
        (("skipped", "passed", "skipped"), True),
        (("skipped", "skipped", "skipped"), False),
        (("passed", "failed", "passed"), False),
        (("failed", "skipped", "skipped"), False),
    ],
)
def test_what_passes(statuses, passed, saved, monkeypatch, capsys):
    names = ("file", "numerics", "cross_entropy")
    made = [verification.Check(name=n, status=s, detail="") for n, s in zip(names, statuses, strict=True)]
    monkeypatch.setattr(verification, "verify", lambda *_, **__: made)
    assert main(["verify", str(saved), "--json"]) == (0 if passed else 1)
    assert json.loads(capsys.readouterr().out)["passed"] is passed


def test_verify_released(tmp_path, monkeypatch, capsys):
    models = {
        "one": {"state": "verified", "repo": "someone/one"},
        "two": {"state": "not yet verified", "repo": "someone/two"},
    }
    monkeypatch.setattr(verification, "verify_released", lambda *_, **__: {"models": models})
    out = tmp_path / "v.json"
    tables, _, record = both(monkeypatch, capsys, "verify", "--released", "--out", out)
    assert tables[str(out)] == [
        ["model", "state", "repository"],
        ["one", "verified", "someone/one"],
        ["two", "not yet verified", "someone/two"],
    ]
    assert record == {"passed": True, "file": str(out), "models": models}
    models["two"]["state"] = "failed"
    assert both(monkeypatch, capsys, "verify", "--released", "--out", out)[2]["passed"] is False


def test_convert(saved, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    tables, _, record = both(monkeypatch, capsys, "convert", saved, out)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    params = sizes_of(tnlm.load(saved))
    rows = dict(tables[str(out)])
    assert (rows["parameters"], rows["bytes"], rows["tokenizer"]) == (f"{params:,}", f"{size:,}", "bpe300")
    assert (rows["path"], rows["weights"]) == (str(saved), "model.safetensors")
    assert (record["folder"], record["parameters"], record["bytes"]) == (str(out), params, size)
    assert record["source"] == {key: rows[key] for key in record["source"]}
    assert 2 * params < size < 5 * params, "two or four bytes a parameter"


def test_explain(saved, vocabulary, tmp_path, monkeypatch, capsys):
    """The rows in print are those of the record, in its order, and of the page, whose figure has as many bars."""
    page = tmp_path / "e.html"
    argv = ("explain", saved, "It is a", "--top", 6, "--html", page)
    _, printed, record = both(monkeypatch, capsys, *argv)
    ids = vocabulary.encode("It is a")
    assert record["tokens"] == ids
    assert record["target"] == int(tnlm.load(saved)(torch.tensor([ids]))[0, -1, :300].argmax())
    assert record["foil"] is None
    assert (record["model"], record["prompt"]) == (str(saved), "It is a")
    assert len(record["rows"]) == 6
    sizes = [abs(row["value"]) for row in record["rows"]]
    assert sizes == sorted(sizes, reverse=True)
    head = printed.splitlines()[0]
    assert vocabulary.quoted(record["target"]) in head
    assert f"{record['logit']:+.4f}" in head
    shown = [line for line in printed.splitlines() if any(line.rstrip().endswith(r["label"]) for r in record["rows"])]
    for line, row in zip(shown, record["rows"], strict=True):
        assert line.split()[0] == f"{row['value']:+.4f}"
    assert printed.splitlines()[-1] == f"figure: {page}"
    written = page.read_text()
    (table,) = texts_of(written, "pre")
    assert table.splitlines() == printed.splitlines()[:-1]
    assert repr("It is a") in texts_of(written, "p")[0]
    assert len(figures_of(written)) == 1


def test_explain_never_targets_padding(saved, tmp_path, vocabulary, capsys):
    """The row of a padding id in the unembedding is made the largest."""
    model = tnlm.load(saved, dtype="checkpoint")
    with torch.no_grad():
        model.unembed.w_u[305] = 0
        logits = model(torch.tensor([vocabulary.encode("It is")]))[0, -1]
        direction = model.unembed.w_u[int(logits.argmax())]
        model.unembed.w_u[305] = 9 * direction
        assert int(model(torch.tensor([vocabulary.encode("It is")]))[0, -1].argmax()) == 305
    tnlm.save(model, tmp_path / "m")
    vocabulary.save(tmp_path / "m")
    assert main(["explain", str(tmp_path / "m"), "It is", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == int(logits[:300].argmax())
