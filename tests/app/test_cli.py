"""Command tnlm, called in process on tiny saved models."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch

import tnlm
from tests.app.conftest import TEXT
from tests.checkpoints.hub_cache import go_offline, use_cache
from tests.conftest import wait_for_announcement
from tests.limits import assert_close
from tests.pages import tables_of
from tests.tiny_models import build, tiny
from tnlm import interp
from tnlm.app import cli
from tnlm.app.cli import COMMANDS, main
from tnlm.output.command import print_version
from tnlm.text import find_tokenizer, tokenizer
from tnlm.text.evaluate import byte_lengths, cross_entropy
from tnlm.training import embedded_corpus
from tnlm.training.data.tokenize import encode_document


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random byte model with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "bytes"
    model = build(tiny(d_vocab=260, d_vocab_used=256, n_ctx=64, n_layer=2), dtype=torch.float32)
    tnlm.save(model, folder)
    tokenizer.get("bytes").save(folder)
    return folder


def run(capsys, *argv):
    """Exit code, the JSON record of the last line of stdout, stderr."""
    code = main([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == (1 if code in (0, 1) else 0)
    return code, json.loads(lines[0]) if lines else None, err


def test_info_counts_without_loading(saved, capsys, monkeypatch):
    monkeypatch.setattr("tnlm.checkpoints.checkpoint.load", None)
    code, record, _ = run(capsys, "info", saved, "--seq", 10)
    config = tiny(d_vocab=260, d_vocab_used=256, n_ctx=64, n_layer=2)
    assert code == 0
    assert record["parameters"] == {"total": config.n_params, "blocks": config.n_block_params, "polynomial_share": 1.0}
    assert record["dtypes"] == {"float32": config.n_params}
    assert record["flops_per_token"] == config.flops_per_token(10)
    assert tnlm.ModelConfig.from_dict(record["config"]) == config


@pytest.mark.filterwarnings("ignore:.*ignored metadata name")
def test_overrides_say_what_a_config_does_not(golden, tmp_path, capsys):
    toy, two = str(golden / "published_toys" / "no_n_head"), ("--override", "n_head=2")
    code, record, _ = run(capsys, "info", *two, "--override", "n_ctx=99", toy)
    assert code == 0
    assert (record["config"]["n_head"], record["config"]["n_ctx"]) == (2, 99)
    assert run(capsys, "convert", toy, str(tmp_path / "out"), *two)[0] == 0
    assert tnlm.load(tmp_path / "out").config.n_head == 2
    code, _, err = run(capsys, "info", toy, "--override", "n_head")
    assert code == 2
    assert "--override takes KEY=VALUE, such as n_head=1, got 'n_head'" in err


def test_info_of_a_released_model_needs_no_network(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, record, _ = run(capsys, "info", "bilinear-bilinear-18l")
    assert code == 0
    assert record["parameters"]["total"] == 545_902_902
    assert record["dtypes"] is None


def test_tables_are_for_people(saved, text, capsys):
    assert main(["info", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "of these in blocks" in out
    assert "n_head" in out
    assert main(["eval", str(saved), "--text", str(text), "--seq", "32"]) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out
    assert "+-" in out


def test_eval_is_the_cross_entropy_of_the_text(saved, text, capsys):
    code, record, _ = run(capsys, "eval", saved, "--text", text, "--seq", 20, "--rows", 7, "--batch-size", 3)
    bytes_ = tokenizer.get("bytes")
    stream = torch.tensor(bytes_.encode(TEXT))
    expected = cross_entropy(tnlm.load(saved), stream, seq=20, rows=7, byte_lengths=byte_lengths(bytes_))
    assert code == 0
    assert_close(record["loss"], expected.loss, dtype=torch.float32)
    assert record["tokens"] == 140
    assert record["bits_per_byte"] == pytest.approx(record["loss"] / 0.6931471805599453)
    assert record["standard_error"] == pytest.approx(expected.standard_error, rel=1e-4)
    assert [b["stop"] for b in record["buckets"]] == [20]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps at a tiny size."""
    from tnlm.training.presets import preset
    from tnlm.training.run.loop import train

    folder = tmp_path_factory.mktemp("runs") / "tiny"
    config = preset("nano").with_model(n_layer=1, n_head=1, d_model=8, d_hidden=8, n_ctx=32)
    config = config.replace(
        steps=2, batch=2, micro_batch=2, val_tokens=320, val_every=2, sample_tokens=0, out=str(folder)
    )
    train(config)
    return folder


def test_a_run_is_measured_on_its_own_validation_tokens(trained, capsys):
    code, record, _ = run(capsys, "eval", trained)
    events = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    recorded = [event for event in events if "val_loss" in event][-1]["val_loss"]
    assert code == 0
    assert (record["tokens"], record["rows"], record["seq"]) == (320, 10, 32)
    assert_close(record["loss"], recorded, dtype=torch.float32)
    assert record["bits_per_byte"] is not None
    _, halved, _ = run(capsys, "eval", trained, "--seq", 16)
    assert (halved["tokens"], halved["rows"]) == (320, 20)


def test_generate_continues_reproducibly(saved, trained, capsys):
    first = run(capsys, "generate", saved, "It is", "--seed", 3, "--max-new-tokens", 9)[1]
    assert len(first["ids"]) == 9
    assert run(capsys, "generate", saved, "It is", "--seed", 3, "--max-new-tokens", 9)[1] == first
    assert len(run(capsys, "generate", saved, "It is", "--temperature", 0)[1]["ids"]) == 59
    assert main(["generate", str(saved), "[b]It", "--temperature", "0", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("[b]It")
    code, record, _ = run(capsys, "generate", trained, "--seed", 0, "--max-new-tokens", 5)
    assert code == 0
    assert record["prompt"] == ""
    assert record["ended"] or len(record["ids"]) == 5


def test_generation_stops_at_end_of_text_and_does_not_print_it(tmp_path, capsys):
    small = tokenizer.train_bpe([TEXT], 257)
    model = build(
        tiny(d_vocab=257, d_vocab_used=257, n_layer=0, norm="none", embedding_norm=False), dtype=torch.float32
    )
    with torch.no_grad():
        model.unembed.w_u.zero_()
        model.unembed.w_u[small.eot] = model.embed.w_e[small.encode("a")[0]] * 100
    tnlm.save(model, tmp_path / "m")
    small.save(tmp_path / "m")
    record = run(capsys, "generate", tmp_path / "m", "a", "--temperature", 0)[1]
    assert (record["text"], record["ids"], record["ended"]) == ("", [small.eot], True)


def test_convert_writes_a_model_with_card_and_tokenizer(saved, tmp_path, capsys):
    code, record, _ = run(capsys, "convert", saved, tmp_path / "out")
    assert code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("model.safetensors", "config.json", "README.md", tokenizer.FILE_NAME)
    }
    before, after = tnlm.load(saved), tnlm.load(tmp_path / "out")
    assert before.config == after.config
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert str(saved) in (tmp_path / "out" / "README.md").read_text()
    assert record["parameters"] == before.config.n_params
    run(capsys, "convert", saved, tmp_path / "half", "--dtype", "bfloat16")
    assert {p.dtype for p in tnlm.load(tmp_path / "half", dtype="checkpoint").parameters()} == {torch.bfloat16}


def test_convert_that_cannot_write_the_tokenizer_leaves_the_older_model(saved, tmp_path, monkeypatch, capsys):
    run(capsys, "convert", saved, tmp_path / "m")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}

    def refused(self, folder):
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(tokenizer.Tokenizer, "save", refused)
    assert run(capsys, "convert", saved, tmp_path / "m", "--dtype", "bfloat16")[0] == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before


def test_convert_folds_a_published_layout_and_keeps_its_dtypes(golden, tmp_path, capsys):
    source = golden / "bilinear-mlp_bilinear-attn"
    assert run(capsys, "convert", source, tmp_path / "m")[0] == 0
    before, after = (tnlm.load(path, dtype="checkpoint") for path in (source, tmp_path / "m"))
    assert {p.dtype for p in after.parameters()} == {torch.float32, torch.bfloat16}
    assert torch.equal(after(torch.arange(10)[None]), before(torch.arange(10)[None]))


def test_explain_sums_to_the_logit(saved, tmp_path, capsys):
    code, record, _ = run(
        capsys,
        "explain",
        saved,
        "It is",
        "--target",
        "a",
        "--foil",
        "b",
        "--top",
        1000,
        "--html",
        tmp_path / "e.html",
    )
    model = tnlm.load(saved)
    logits = model.pre_softcap(torch.tensor([list(b"It is")]), last=True)[0, 0]
    assert code == 0
    scale = sum(abs(row["value"]) for row in record["rows"])
    assert_close(record["logit"], (logits[ord("a")] - logits[ord("b")]).item(), scale=scale, dtype=torch.float32)
    assert_close(sum(row["value"] for row in record["rows"]), record["logit"], scale=scale, dtype=torch.float32)
    assert "It is" in (tmp_path / "e.html").read_text()
    assert main(["explain", str(saved), "It is", "--top", "3"]) == 0
    assert (
        f"logit of {chr(int(model(torch.tensor([list(b'It is')]))[0, -1, :256].argmax()))!r}" in capsys.readouterr().out
    )


def test_report_writes_a_page(saved, text, tmp_path, capsys):
    code, record, _ = run(
        capsys, "report", saved, "--text", text, "--out", tmp_path / "r.html", "--seq", 16, "--rows", 2, "--target", "a"
    )
    assert code == 0
    assert record == {"model": str(saved), "text": str(text), "counted_in": str(text), "page": str(tmp_path / "r.html")}
    assert "<html" in (tmp_path / "r.html").read_text()


def test_the_report_of_a_run_weighs_tokens_by_its_training_shards(trained, text, tmp_path, capsys):
    tokens = find_tokenizer(tnlm.load(trained))
    ids = [i for document in embedded_corpus().train for i in encode_document(tokens, document)]
    weights = torch.tensor(ids).bincount(minlength=1024)
    rows = torch.zeros(1, 3, dtype=torch.long)
    heads = [_heads(interp.report(trained, tmp_path / "r.html", tokens=rows, tokenizer=tokens, weights=weights))]
    for options in ([], ["--text", text]):
        path = tmp_path / f"{len(options)}.html"
        code, record, _ = run(capsys, "report", trained, "--out", path, "--seq", 16, "--rows", 2, *options)
        assert code == 0
        assert record["counted_in"] == (str(text) if options else f"training shards of {trained}")
        heads.append(_heads(path))
    assert heads[0] == heads[1] != heads[2]


def _heads(page):
    return next(table for table in tables_of(page.read_text()) if table[0][0] == "head")


@pytest.mark.slow
def test_eval_runs_tasks(saved, tmp_path, capsys):
    questions = [{"context": "It is", "choices": [" a", " b"], "answer": i} for i in (0, 1)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, questions)))
    code, record, _ = run(capsys, "eval", saved, "--tasks", tmp_path / "q.jsonl")
    assert code == 0
    assert record["tasks"]["q"]["acc"] == 0.5
    assert run(capsys, "eval", saved, "--tasks", tmp_path / "missing.jsonl")[0] == 2


def test_verify_runs_its_three_checks(saved, capsys):
    code, record, _ = run(capsys, "verify", saved)
    assert code == 0
    outcome = {check["name"]: check["status"] for check in record["checks"]}
    assert outcome == {"file": "skipped", "numerics": "passed", "cross_entropy": "skipped"}
    assert record["passed"]
    assert main(["verify", str(saved)]) == 0
    assert "numerics" in capsys.readouterr().out


def test_a_failed_check_is_exit_code_1(saved, tmp_path, capsys):
    shutil.copytree(saved, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, record, _ = run(capsys, "verify", tmp_path / "m")
    assert code == 1
    assert not record["passed"]
    assert record["checks"][0]["status"] == "failed"


def test_verify_released_records_the_outcome(tmp_path, capsys, monkeypatch):
    """Offline with an empty cache every file is missing, which is no failure."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = "Elriggs/gpt2-bilinear-sqrd-attn-18l-9h-1152embd"
    code, record, _ = run(capsys, "verify", name, "--released", "--out", tmp_path / "v.json")
    assert code == 0
    assert record["models"] == json.loads((tmp_path / "v.json").read_text())["models"]
    assert [facts["state"] for facts in record["models"].values()] == ["not yet verified"]
    assert list(record["models"]) == ["bilinear-bilinear-18l"]


# What goes wrong


@pytest.mark.user_error
@pytest.mark.parametrize(
    "argv, message",
    [
        (["info", "./missing"], "the local path ./missing does not exist"),
        (["info", "no-such-model"], "no existing path, no Hub id"),
        (["info", "SAVED", "--seq", "0"], "seq must be at least 1, got 0"),
        (["verify"], "which model? Name one, or pass --released"),
        (["verify", "./missing"], "the local path ./missing does not exist"),
        (["verify", "unheard-of", "--released"], "'unheard-of' is no released model; those are bilinear-bilinear-18l"),
        (["verify", "--released", "--revision", "main"], "leave out --revision and --attention"),
        (["eval", "SAVED"], "which text? Pass --text FILE"),
        (["eval", "SAVED", "--text", "TEXT", "--limit", "3"], "--limit belongs to --tasks"),
        (
            ["eval", "SAVED", "--tasks", "q.json", "--text", "TEXT", "--seq", "3"],
            "--text, --seq cannot go with --tasks",
        ),
        (["eval", "SAVED", "--text", "TEXT", "--device", "banana"], "device must be one that torch knows"),
        (["eval", "SAVED", "--text", "./missing.txt"], "No such file or directory: 'missing.txt'"),
        (["eval", "SAVED", "--text", "TEXT", "--seq", "65"], "seq must be between 1 and n_ctx=64, got 65"),
        (["eval", "SAVED", "--text", "TEXT", "--rows", "0"], "rows must be an integer in [1, 2**63)"),
        (["eval", "SAVED", "--text", "TEXT", "--tokenizer", "gpt2"], "must have the model's 256 ids, got 'gpt2'"),
        (["eval", "SAVED", "--text", "TEXT", "--tokenizer", "./none"], 'tokenizer must be "gpt2", "bytes"'),
        (["eval", "SAVED", "--text", "SAVED"], "Is a directory"),
        (["generate", "SAVED"], "an empty prompt begins with end-of-text, which tokenizer 'bytes' lacks"),
        (["generate", "SAVED", "x" * 64], "max_new_tokens may be at most 0 here"),
        (["generate", "SAVED", "x" * 65], "at most n_ctx=64 tokens, got 65"),
        (["generate", "SAVED", "x", "--temperature", "-1"], "temperature must be"),
        (["generate", "SAVED", "x", "--top-p", "nan"], "top_p must be"),
        (
            ["explain", "SAVED", "x", "--target", "ab"],
            "target must be one token, got 'ab', which is 2: 'a', 'b'",
        ),
        (["explain", "SAVED", "x", "--top", "-1"], "top must be at least 0, got -1"),
        (["explain", "SAVED", "x", "--foil", ""], "foil must be one token, got '', which is 0: none"),
        (["report", "SAVED", "--text", "TEXT", "--rows", "0"], "at least one row of seq + 1 tokens, got rows=0"),
        (["report", "SAVED", "--text", "TEXT", "--seq", "1000"], "got rows=8, seq=1000 and"),
        (["convert", "SAVED", "TEXT"], "text.txt"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_mistakes_are_one_message_and_exit_code_2(saved, text, capsys, argv, message):
    argv = [str({"SAVED": saved, "TEXT": text}.get(word, word)) for word in argv]
    code = main(argv)
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("tnlm: ")


@pytest.mark.user_error
@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["inspect"],
        ["info"],
        ["info", "x", "--unknown"],
        ["generate", "x", "--top-k", "many"],
        ["info", "x", "--attention", "softmax"],
    ],
    ids=str,
)
def test_wrong_flags_are_exit_code_2(capsys, argv):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err


def test_text_that_is_no_utf8_is_refused(saved, tmp_path, capsys):
    (tmp_path / "latin.txt").write_bytes("caf\u00e9 au lait".encode("latin-1"))
    assert run(capsys, "eval", saved, "--text", tmp_path / "latin.txt")[0] == 2


def test_a_model_without_a_known_tokenizer_says_so(tmp_path, text, capsys):
    tnlm.save(build(tiny(), dtype=torch.float32), tmp_path / "m")
    code, _, err = run(capsys, "eval", tmp_path / "m", "--text", text)
    assert code == 2
    assert "no tokenizer was saved with the model, and none is known for 11 ids: set" in err


def test_a_byte_vocabulary_needs_no_tokenizer_file(saved, tmp_path, text, capsys):
    shutil.copytree(saved, tmp_path / "m")
    (tmp_path / "m" / tokenizer.FILE_NAME).unlink()
    assert run(capsys, "eval", tmp_path / "m", "--text", text)[0] == 0


@pytest.mark.filterwarnings("default")
def test_warnings_are_short_lines_on_stderr(tmp_path, capsys):
    model = build(tiny(d_vocab=256, d_vocab_used=256, n_layer=1, n_head=1, d_model=4, d_qk=2, d_hidden=1, n_ctx=520))
    tnlm.save(model, tmp_path / "m")
    (tmp_path / "long.txt").write_text("x" * 600)
    code, _, err = run(capsys, "eval", tmp_path / "m", "--text", tmp_path / "long.txt")
    assert code == 0
    assert "tnlm: warning: released models with bilinear attention predict badly beyond position 512" in err


def test_a_run_is_not_overwritten(trained, capsys):
    """Its config.json says how to train on; that of a model would take its place."""
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    code, _, err = run(capsys, "convert", trained, trained)
    assert code == 2
    assert "is the folder of a training run, whose config.json would be lost; name another" in err
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


@pytest.mark.filterwarnings("default")
def test_other_validation_tokens_than_the_run_had_are_a_warning(trained, tmp_path, capsys):
    run_folder = tmp_path / "run"
    shutil.copytree(trained, run_folder)
    code, _, err = run(capsys, "eval", run_folder, "--rows", 2)
    assert code == 0
    assert "warning" not in err
    for path in run_folder.glob("checkpoints/*/training.json"):
        recorded = json.loads(path.read_text())["val_fingerprint"]
        path.write_text(path.read_text().replace(recorded, "0" * 64))
    code, _, err = run(capsys, "eval", run_folder, "--rows", 2)
    assert code == 0
    assert "tnlm: warning: the validation tokens are not those that" in err
    assert f"is {recorded[:16]}, and " in err


def test_verify_of_what_cannot_be_had_is_not_a_success(tmp_path, capsys, monkeypatch):
    go_offline(monkeypatch)
    use_cache(tmp_path, monkeypatch)
    code, record, _ = run(capsys, "verify", "bilinear-bilinear-18l")
    assert code == 1
    assert not record["passed"]
    assert {check["status"] for check in record["checks"]} == {"skipped"}


def test_tables_cut_nothing_off(saved, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["verify", str(saved)]) == 0
    digest = sha256((saved / "model.safetensors").read_bytes()).hexdigest()
    assert digest in re.sub(r"[^0-9a-z]", "", capsys.readouterr().out)


def in_bash(line):
    """A line of bash, with the commands of this environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "-c", line]
    return subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["info MODEL", "info MODEL --json", "info --help"])
def test_a_reader_that_leaves_is_no_error(saved, command):
    done = in_bash(f"tnlm {command.replace('MODEL', str(saved))} | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 141
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flag", ["", "--json"])
def test_output_that_cannot_be_written_is_one_message(saved, flag):
    done = in_bash(f"tnlm info {saved} {flag} > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "tnlm: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    "argv, patched, said",
    [
        (["verify", "SAVED"], "tnlm.checkpoints.verification.verify", "verifying SAVED ...\n"),
        (["verify", "--released"], "tnlm.checkpoints.verification.verify_released", "verifying released models ...\n"),
        (["generate", "SAVED", "x"], "tnlm.text.sampling.generate", "generating ...\n"),
        (["explain", "SAVED", "x"], "tnlm.interp.explain", "explaining ...\n"),
        (["convert", "SAVED", "OUT"], "tnlm.checkpoints.checkpoint.save", "writing OUT ...\n"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_takes_long_says_what_it_does(saved, tmp_path, capsys, monkeypatch, argv, patched, said):
    """The step that takes long is made to take longer than the delay, then fails."""

    def slow(*_, **__):
        wait_for_announcement()
        raise ValueError("enough")

    monkeypatch.setattr(patched, slow)
    monkeypatch.setattr("tnlm.output.progress.DELAY", 0.1)
    names = {"SAVED": str(saved), "OUT": str(tmp_path / "out")}
    for name, path in names.items():
        argv, said = [path if word == name else word for word in argv], said.replace(name, path)
    main(argv)
    err = [line for line in capsys.readouterr().err.splitlines(keepends=True) if not line.startswith("loading")]
    assert err == [said, "tnlm: enough\n"]


def test_ctrl_c_in_the_terminal_is_one_line(saved):
    """The signal itself, once a process of its own says that the command is at work; it then waits for the signal."""
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored\n"
        "import tnlm.app.cli, tnlm.text.sampling\n"
        "def draw(*args):\n"
        "    print('at work', file=sys.stderr, flush=True)\n"
        "    time.sleep(600)\n"
        "tnlm.text.sampling._draw = draw\n"
        "sys.exit(tnlm.app.cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "generate", str(saved), "It is", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said = []
        for line in process.stderr:  # a slow machine may announce the loading first
            said.append(line)
            if line == "at work\n":
                process.send_signal(signal.SIGINT)
        assert said[-1] == "tnlm: interrupted\n", said
        assert said[-2] == "at work\n", said
        assert process.stdout.read() == ""
    assert process.returncode == 130


def test_ctrl_c_is_clean(saved, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("tnlm.checkpoints.checkpoint.load", interrupt)
    assert main(["generate", str(saved), "x"]) == 130
    assert capsys.readouterr() == ("", "tnlm: interrupted\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_examples(capsys, command):
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"$ tnlm {command} " in out
    assert command == "demo" or "MODEL" in out.splitlines()[0], "positional arguments are named by what they are"
    assert "None" not in out, "what may be left out has no default to name"
    assert "default: )" not in out


def test_examples_in_help_and_docs_parse(monkeypatch):
    """Every example line is a command line that the parser accepts."""
    docs = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    helps = [made.__doc__ for made in COMMANDS.values()]
    lines = [
        line.strip() for source in (*helps, docs) for line in source.splitlines() if line.strip().startswith("$ tnlm ")
    ]
    assert len(lines) > 20
    assert {line.split()[2] for line in lines} == COMMANDS.keys()
    for made in COMMANDS.values():
        monkeypatch.setattr(made, "execute", lambda self: {})
    for line in lines:
        assert main(shlex.split(line.removeprefix("$ tnlm "))) == 0, line


def test_module_runs_as_a_script(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tnlm", "--help"])
    assert cli.main() == 0
    assert "eval" in capsys.readouterr().out


@pytest.mark.parametrize("argv, own", [(None, ["--version"]), (["--version"], ["explain"])])
def test_the_version_is_read_from_the_arguments_given_or_else_the_process(argv, own, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tnlm", *own])
    assert print_version("tnlm", argv)
    assert capsys.readouterr().out.splitlines()[0] == f"tnlm {tnlm.__version__}"
