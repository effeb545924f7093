"""Tokenization of text files into token shards, ``data tokenize``: on several processes, with a sidecar of facts.

Sources: ``.jsonl`` (one object per line, field ``text``), ``.parquet`` (column ``text``), ``.txt`` (one document
per file, or per separator), or ``-`` for standard input (one document per line). Documents keep their order.
The first documents become the validation shard, as in the published data, so growing the data keeps it.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tnlm.text.tokenizer import Tokenizer
from tnlm.training.data import shards

SEPARATOR = "\n\n"
"""Precedes each document where the tokenizer has no end-of-text id."""
_DOCUMENTS_PER_TASK = 256


def encode_document(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of one document, preceded by end-of-text, or by a blank line where the tokenizer has none."""
    if tokenizer.eot is None:
        return tokenizer.encode(SEPARATOR + text)
    return [tokenizer.eot, *tokenizer.encode(text)]


def write_facts(folder: str | os.PathLike, tokenizer: Tokenizer, **facts: Any) -> dict[str, Any]:
    """Write the tokenizer and the sidecar of a data folder: tokenizer name and hash, d_vocab, eot, and ``facts``."""
    tokenizer.save(folder)
    return shards.write_sidecar(
        folder,
        tokenizer={"name": tokenizer.name, "hash": tokenizer.hash},
        d_vocab=tokenizer.d_vocab,
        eot=tokenizer.eot,
        **facts,
    )


def read_documents(
    source: str | os.PathLike,
    *,
    field: str = "text",
    separator: str | None = None,
    stdin: Iterable[str] | None = None,
) -> Iterator[str]:
    """Read the documents of one source, in order; empty ones are dropped.

    Args:
        field: Key of a jsonl object, or column of a parquet file.
        separator: Splits a ``.txt`` file into documents; None makes it one.
        stdin: Read instead of ``sys.stdin`` for the source ``-``.

    Raises:
        ValueError: Names file and line, row or missing column.
    """
    if str(source) == "-":
        documents: Iterable[str] = (line.rstrip("\n") for line in stdin or sys.stdin)
    else:
        path = Path(source)
        if path.suffix not in (".jsonl", ".parquet", ".txt"):
            raise ValueError(f"a text source must end in .jsonl, .parquet or .txt, or be -, got {path}")
        if not path.is_file():
            raise ValueError(f"text source {path} must be a file, but there is none")
        if path.suffix == ".txt":
            documents = _read_txt(path, separator)
        else:
            documents = (_read_jsonl if path.suffix == ".jsonl" else _read_parquet)(path, field)
    return (document for document in documents if document)


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # no JSON, or no UTF-8
                raise ValueError(f"{path} line {number} must be one JSON object, got: {error}") from error
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                held = sorted(record) if isinstance(record, dict) else type(record).__name__
                raise ValueError(f"{path} line {number} must hold text under {field!r}, got {held}")
            yield record[field]


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path} needs pyarrow: pip install pyarrow") from error
    try:
        opened = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} must be a parquet file, got: {error}") from error
    with opened as file:
        if field not in file.schema_arrow.names:
            raise ValueError(f"{path} must have a column {field!r}, got {file.schema_arrow.names}")
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise ValueError(f"{path} row {row} must hold text under {field!r}, got {text!r}")
                yield text
                row += 1


def _read_txt(path: Path, separator: str | None) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text, got byte {error.start}: {error.reason}") from error
    yield from [text] if separator is None else text.split(separator)


def tokenize_files(
    sources: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    tokenizer: Tokenizer,
    *,
    field: str = "text",
    separator: str | None = None,
    shard_tokens: int = 100_000_000,
    val_tokens: int = 1_000_000,
    processes: int = 1,
    stdin: Iterable[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Tokenize ``sources`` into ``val_000000.bin``, ``train_000001.bin``, ... and ``dataset.json`` under ``out``.

    They appear there once all are written, so an interrupted call leaves no shards that could be taken for the whole.
    The first ``val_tokens`` tokens are the validation shard, cut at a document's end; training shards have
    exactly ``shard_tokens`` tokens and cut documents. The result does not depend on ``processes``.

    Args:
        progress: Called as ``progress(documents, tokens)`` about every 256 documents.

    Returns:
        The sidecar: tokenizer, d_vocab, eot, and per split tokens, documents and bytes of UTF-8 text.

    Raises:
        ValueError: ``out`` already holds shards, a source is damaged, or all text is within the validation shard.
    """
    if not 1 <= shard_tokens <= 2**31 - 1 or val_tokens < 1 or processes < 1:
        raise ValueError(
            "shard_tokens must be in [1, 2**31 - 1], val_tokens and processes at least 1, got "
            f"{shard_tokens}, {val_tokens}, {processes}"
        )
    documents = itertools.chain.from_iterable(
        read_documents(source, field=field, separator=separator, stdin=stdin) for source in sources
    )
    with shards.all_or_none(out) as folder:
        writer = _SplitWriter(folder, shard_tokens=shard_tokens, val_tokens=val_tokens)
        with contextlib.closing(_encoded(documents, tokenizer, processes)) as encoded:
            for ids, text_bytes in encoded:
                writer.add(ids, text_bytes)
                if progress is not None and writer.documents % _DOCUMENTS_PER_TASK == 0:
                    progress(writer.documents, writer.tokens)
        splits = writer.close()
        if progress is not None:
            progress(writer.documents, writer.tokens)
        return write_facts(folder, tokenizer, source=[Path(s).name for s in sources], splits=splits)


class _SplitWriter:
    """Collects documents and writes the validation shard first, then training shards of exact size."""

    def __init__(self, out: Path, *, shard_tokens: int, val_tokens: int):
        self.out, self.shard_tokens, self.val_tokens = out, shard_tokens, val_tokens
        self.splits = {name: {"tokens": 0, "documents": 0, "text_bytes": 0} for name in ("train", "val")}
        self._split, self._buffered, self._shards = "val", 0, 0
        self._pending: list[np.ndarray] = []

    @property
    def documents(self) -> int:
        return sum(split["documents"] for split in self.splits.values())

    @property
    def tokens(self) -> int:
        return sum(split["tokens"] for split in self.splits.values())

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        counts = self.splits[self._split]
        counts["tokens"] += len(ids)
        counts["documents"] += 1
        counts["text_bytes"] += text_bytes
        self._pending.append(ids)
        self._buffered += len(ids)
        if self._split == "val":
            if self._buffered >= self.val_tokens:
                shards.write_shard(self.out / "val_000000.bin", np.concatenate(self._pending))
                self._split, self._pending, self._buffered = "train", [], 0
        elif self._buffered >= self.shard_tokens:
            self._flush(everything=False)

    def _flush(self, *, everything: bool) -> None:
        ids = np.concatenate(self._pending)
        whole = len(ids) // self.shard_tokens * self.shard_tokens
        for start in range(0, len(ids) if everything else whole, self.shard_tokens):
            self._shards += 1
            shards.write_shard(self.out / f"train_{self._shards:06d}.bin", ids[start : start + self.shard_tokens])
        self._pending, self._buffered = [ids[whole:]], len(ids) - whole

    def close(self) -> dict[str, dict[str, int]]:
        if self._split == "val" or self.splits["train"]["tokens"] == 0:
            raise ValueError(
                f"the text must go beyond the validation shard of val_tokens={self.val_tokens} tokens, got "
                f"{self.tokens} tokens in {self.documents} documents; lower val_tokens"
            )
        if self._buffered:
            self._flush(everything=True)
        return self.splits


def _encoded(
    documents: Iterable[str], tokenizer: Tokenizer, processes: int
) -> Generator[tuple[np.ndarray, int], None, None]:
    """(ids as uint16, bytes of text) of each document, in order; at most a few chunks are held at once."""
    if tokenizer.d_vocab > 65536:
        raise ValueError(f"shards hold uint16 ids: d_vocab must be at most 65536, got {tokenizer.d_vocab}")
    documents = iter(documents)
    chunks = iter(lambda: list(itertools.islice(documents, _DOCUMENTS_PER_TASK)), [])
    if processes == 1:
        for chunk in chunks:
            yield from _encode_chunk(tokenizer, chunk)
        return
    # spawn: a forked child may inherit locks of the tokenizer's thread pool
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start_worker, (tokenizer,)) as pool:
        waiting: deque = deque()
        for chunk in chunks:
            waiting.append(pool.submit(_work, chunk))
            if len(waiting) > 4 * processes:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _encode_chunk(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[np.ndarray, int]]:
    return [
        (
            np.array(encode_document(tokenizer, text), dtype=np.uint16),
            len(text.encode("utf-8", "surrogatepass")),
        )
        for text in texts
    ]


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer


def _work(texts: Sequence[str]) -> list[tuple[np.ndarray, int]]:
    return _encode_chunk(_worker_tokenizer, texts)
