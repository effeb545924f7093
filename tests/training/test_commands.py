"""What ``tnlm-train data``, ``branch`` and ``export`` print and record, against the files they read and wrote."""

import json
import re

import pytest

import tnlm
from tests.training.small import small_config
from tnlm.training.cli import main
from tnlm.training.data import download, shards
from tnlm.training.run.loop import train
from tnlm.training.run.metrics import read_metrics


def run(capsys, *argv):
    """The record and the progress lines of a command."""
    assert main([str(word) for word in argv]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err.splitlines()


def test_data_tokenize_and_check(tmp_path, capsys):
    """300 documents in three shards; the last but one progress line comes after 256 documents."""
    texts = ["caf\u00e9 " * (n % 5) + f"document {n}" for n in range(300)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / "out"
    options = ("--tokenizer", "bytes", "--val-tokens", 700, "--shard-tokens", 3000, "--processes", 1)
    record, lines = run(capsys, "data", "tokenize", tmp_path / "t.jsonl", "--out", out, *options)
    sizes = [len(("\n\n" + text).encode()) for text in texts]  # bytes have no end-of-text id
    cut = next(n for n in range(1, 301) if sum(sizes[:n]) >= 700)
    splits = {
        name: {
            "tokens": sum(sizes[part]),
            "documents": len(sizes[part]),
            "text_bytes": sum(sizes[part]) - 2 * len(sizes[part]),
        }
        for name, part in (("train", slice(cut, None)), ("val", slice(cut)))
    }
    assert record["splits"] == splits
    facts = {key: record[key] for key in ("command", "out", "d_vocab", "eot", "source")}
    assert facts == {"command": "data tokenize", "out": str(out), "d_vocab": 256, "eot": None, "source": ["t.jsonl"]}
    assert record["tokenizer"]["name"] == "bytes"
    assert lines == [f"256 documents, {sum(sizes[:256]):,} tokens", f"300 documents, {sum(sizes):,} tokens"]

    record, lines = run(capsys, "data", "check", out)
    held = {path.name: shards.Shard(path).read() for path in sorted(out.glob("*.bin"))}
    assert len(held) > 2
    assert record == {
        "command": "data check",
        "train_tokens": splits["train"]["tokens"],
        "val_tokens": splits["val"]["tokens"],
        "shards": len(held),
        "max_id": max(max(ids) for ids in held.values()),
        "d_vocab": 256,
        "documents": None,
    }
    told = {f"{out / name}: {len(ids):,} tokens, largest id {max(ids)}" for name, ids in held.items()}
    assert set(lines) == told


def test_data_toy(tmp_path, capsys):
    options = (
        "--seq",
        9,
        "--d-vocab",
        17,
        "--period",
        3,
        5,
        "--train-sequences",
        21,
        "--val-sequences",
        4,
        "--seed",
        2,
    )
    record, _ = run(capsys, "data", "toy", "cycles", "--out", tmp_path / "toy", *options)
    assert record == {
        "command": "data toy",
        "out": str(tmp_path / "toy"),
        "d_vocab": 17,
        "eot": None,
        "tokenizer": None,
        "source": {"task": "cycles", "seq": 9, "period": [3, 5], "seed": 2},
        "splits": {"train": {"tokens": 190, "documents": 21}, "val": {"tokens": 37, "documents": 4}},
    }


def test_data_get(tmp_path, capsys, monkeypatch):
    """Two files of three are fetched; what is fetched is made here."""
    files = {"fineweb_val_000000.bin": 7, "fineweb_train_000001.bin": 11, "fineweb_train_000002.bin": 13}
    monkeypatch.setattr(download, "fineweb_files", lambda n: {name: 1024 + 2 * k for name, k in files.items()})
    monkeypatch.setattr(
        download, "_download", lambda name, missing, folder: shards.write_shard(folder / name, [1] * files[name])
    )
    shards.write_shard(tmp_path / "fineweb_train_000001.bin", [1] * 11)
    record, lines = run(capsys, "data", "get", "--shards", 2, "--out", tmp_path)
    assert record == {
        "command": "data get",
        "folder": str(tmp_path),
        "files": 3,
        "downloaded": 2,
        "train_tokens": 24,
        "val_tokens": 7,
    }
    assert lines == [f"{n}/3 {name}" for n, name in enumerate(files, start=1)]


def test_branch_and_export(tmp_path, capsys):
    """The trunk is stable up to step 12, and the branch of 16 steps up to 10: it goes on from step 8."""
    config = small_config(tmp_path, "trunk", keep_every=4)
    train(config, progress=False)
    record, _ = run(capsys, "branch", config.folder, "--steps", 16)
    folder = tmp_path / "trunk-steps16"
    assert record == {
        "command": "branch",
        "branched_from": str(config.folder / "checkpoints" / "step_000008"),
        "folder": str(folder),
        "steps": 16,
        "tokens": 16 * 24,
        "recipe": "replication",
        "bits_per_byte": None,
        "train_loss": record["train_loss"],
        "val_loss": record["val_loss"],
    }
    losses = {(e["kind"], e["step"]): e["loss"] for e in read_metrics(folder / "metrics.jsonl") if "loss" in e}
    assert (record["train_loss"], record["val_loss"]) == (losses["train", 16], losses["val", 16])

    record, _ = run(capsys, "export", config.folder, "--step", 12, "--out", tmp_path / "model")
    events = read_metrics(config.folder / "metrics.jsonl")
    at_12 = [e["loss"] for e in events if (e["kind"], e["step"]) == ("train", 12)]
    assert record == {
        "command": "export",
        "folder": str(tmp_path / "model"),
        "step": 12,
        "n_params": sum(p.numel() for p in tnlm.load(tmp_path / "model").parameters()),
        "train": at_12[0],
    }
    card = (tmp_path / "model" / "README.md").read_text()
    facts = dict(re.findall(r"^\| (\w+) \| (.*) \|$", card, flags=re.M))
    assert (facts["steps"], facts["tokens"], facts["seed"]) == ("12 of 20", str(12 * 24), "0")
    assert facts["train_loss"] == f"{at_12[0]:.4f} nats per token"
    assert (facts["recipe"], facts["data"]) == ("replication", config.data)

    record, _ = run(capsys, "export", config.folder, "--out", tmp_path / "last")
    end = {e["kind"]: e["loss"] for e in events if e["step"] == 20 and "loss" in e}
    assert (record["step"], record["train"], record["val"]) == (20, end["train"], end["val"])
    assert end["train"] != pytest.approx(end["val"], rel=1e-6)
    facts = dict(re.findall(r"^\| (\w+) \| (.*) \|$", (tmp_path / "last" / "README.md").read_text(), flags=re.M))
    assert facts["val_loss"] == f"{end['val']:.4f} nats per token"
    assert facts["train_loss"] == f"{end['train']:.4f} nats per token"
