"""Text files into shards: every source, exact layout, any number of processes, damaged input."""

import io
import json

import numpy as np
import pytest

from tnlm.text.tokenizer import get, train_bpe
from tnlm.training.data import shards, tokenize

DOCUMENTS = [f"document {i} says caf\u00e9 {'x' * (i % 7)}" for i in range(600)]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(DOCUMENTS, 280)


def write_jsonl(path, documents, field="text"):
    path.write_text("".join(json.dumps({field: d, "id": 1}) + "\n" for d in documents) + "\n")
    return path


def read_back(folder):
    return [shards.Shard(p).read() for p in sorted(folder.glob("*.bin"), key=lambda p: (p.name[0] != "v", p.name))]


def test_layout(tmp_path, bpe):
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    facts = tokenize.tokenize_files([source], tmp_path / "out", bpe, shard_tokens=1000, val_tokens=500)
    val, *train = read_back(tmp_path / "out")
    stream = [t for d in DOCUMENTS for t in [bpe.eot, *bpe.encode(d)]]
    np.testing.assert_array_equal(np.concatenate([val, *train]), stream)
    assert len(val) >= 500
    assert stream[len(val)] == bpe.eot, "the validation shard must end with a document"
    assert [len(t) for t in train[:-1]] == [1000] * (len(train) - 1)
    assert 0 < len(train[-1]) <= 1000
    assert [t[0] for t in (val, train[0])] == [bpe.eot, bpe.eot]
    splits = facts["splits"]
    assert splits["val"]["documents"] + splits["train"]["documents"] == 600
    assert splits["val"]["tokens"] == len(val)
    assert splits["val"]["text_bytes"] + splits["train"]["text_bytes"] == sum(len(d.encode()) for d in DOCUMENTS)
    assert facts["tokenizer"] == {"name": "bpe280", "hash": bpe.hash}
    assert (facts["d_vocab"], facts["eot"]) == (280, 279)
    assert get(tmp_path / "out").hash == bpe.hash


def test_bytes_separate_documents_with_a_blank_line(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["ab", "cd", "ef"])
    tokenize.tokenize_files([source], tmp_path / "out", get("bytes"), val_tokens=1)
    val, train = read_back(tmp_path / "out")
    assert bytes(val.tolist()) == b"\n\nab"
    assert bytes(train.tolist()) == b"\n\ncd\n\nef"


def test_any_number_of_processes_gives_the_same_files(tmp_path, bpe):
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    seen = []
    for processes in (1, 2):
        tokenize.tokenize_files(
            [source],
            tmp_path / str(processes),
            bpe,
            val_tokens=500,
            processes=processes,
            progress=lambda documents, tokens: seen.append((documents, tokens)),
        )
    assert [p.read_bytes() for p in sorted((tmp_path / "1").iterdir())] == [
        p.read_bytes() for p in sorted((tmp_path / "2").iterdir())
    ]
    assert [documents for documents, _ in seen] == [256, 512, 600] * 2


def test_every_source(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", "b"], "n": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("one\n---\ntwo")
    assert list(tokenize.read_documents(tmp_path / "a.parquet")) == ["a", "b"]
    assert list(tokenize.read_documents(tmp_path / "a.txt")) == ["one\n---\ntwo"]
    assert list(tokenize.read_documents(tmp_path / "a.txt", separator="\n---\n")) == ["one", "two"]
    assert list(tokenize.read_documents("-", stdin=io.StringIO("x\n\ny\n"))) == ["x", "y"]
    write_jsonl(tmp_path / "a.jsonl", ["q", ""], field="body")
    assert list(tokenize.read_documents(tmp_path / "a.jsonl", field="body")) == ["q"]


def test_nothing_is_left_of_a_call_that_failed(tmp_path, bpe):
    """Shards of half the text would be taken for all of it."""
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    out, damaged = tmp_path / "out", tmp_path / "b.jsonl"
    damaged.write_text(source.read_text() + "no JSON\n")

    def interrupt(documents, tokens):
        assert sorted(p.name for p in out.iterdir()) == [".lock", ".unfinished"]
        assert list((out / ".unfinished").glob("train_*.bin"))
        with pytest.raises(ValueError, match=r"out is in use by process \d+ on .*, since "):
            tokenize.tokenize_files([source], out, bpe, shard_tokens=500, val_tokens=500)
        raise KeyboardInterrupt

    for sources, progress, error in (([source], interrupt, KeyboardInterrupt), ([damaged], None, ValueError)):
        with pytest.raises(error):
            tokenize.tokenize_files(sources, out, bpe, shard_tokens=500, val_tokens=500, progress=progress)
        assert list(out.iterdir()) == []
    (out / ".unfinished").mkdir()  # as a kill leaves it
    (out / ".unfinished" / "train_000009.bin").touch()
    tokenize.tokenize_files([source], out, bpe, shard_tokens=100_000, val_tokens=500)
    assert sorted(p.name for p in out.iterdir()) == [
        "dataset.json",
        "tnlm_tokenizer.json",
        "train_000001.bin",
        "val_000000.bin",
    ]


@pytest.mark.user_error
@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl line 2 must be one JSON object"),
        ("a.jsonl", b'{"body": "a"}\n', r"line 1 must hold text under 'text', got \['body'\]"),
        ("a.jsonl", b"[1]\n", "line 1 must hold text under 'text', got list"),
        ("a.csv", b"a", r"must end in .jsonl, .parquet or .txt"),
        ("a.txt", None, "must be a file, but there is none"),
        ("a.jsonl", b'{"text": "ab"}\n{"text": "\xe9"}\n', r"a\.jsonl line 2 .* got: 'utf-8' codec can't decode"),
        ("b.parquet", b"PAR1 but no table", r"b\.parquet must be a parquet file, got: "),
        ("a.txt", b"ab\xe9", r"a\.txt must be UTF-8 text, got byte 2"),
    ],
)
def test_damaged_sources(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(tokenize.read_documents(tmp_path / name))


@pytest.mark.user_error
@pytest.mark.parametrize(
    "field, message",
    [("body", r"must have a column 'body', got \['text'\]"), ("text", "row 1 must hold text under 'text', got None")],
)
def test_a_parquet_table_without_the_text(field, message, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=message):
        list(tokenize.read_documents(tmp_path / "a.parquet", field=field))


@pytest.mark.user_error
def test_other_user_errors(tmp_path, bpe):
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:3])
    with pytest.raises(
        ValueError, match=r"of val_tokens=1000000 tokens, got \d+ tokens in 3 documents; lower val_tokens$"
    ):
        tokenize.tokenize_files([source], tmp_path / "out", bpe)
    with pytest.raises(
        ValueError, match=r"^shard_tokens must be in \[1, 2\*\*31 - 1\], val_tokens .* got 0, 1000000, 1$"
    ):
        tokenize.tokenize_files([source], tmp_path / "out", bpe, shard_tokens=0)
    shards.write_shard(tmp_path / "out" / "old.bin", [1])
    with pytest.raises(ValueError, match=r"must hold no shards yet, got \['old.bin'\]"):
        tokenize.tokenize_files([source], tmp_path / "out", bpe)
