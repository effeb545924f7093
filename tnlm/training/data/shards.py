"""Token shards, the ``.bin`` files of the public runs: reading, writing, finding and checking. Imports no torch.

Layout: 256 little-endian int32, of which [0] = 20240520, [1] = 1, [2] = number of tokens and the rest 0, then
the ids as little-endian uint16; so the size is 1024 + 2 n bytes (format of karpathy/llm.c, used by
KellerJordan/modded-nanogpt). Each document is *preceded* by the end-of-text id. A file that does not have this
layout is a ``ValueError`` with its path and what was expected and found. :func:`shard_tokens` checks the header, and
:func:`check_shard` every id; training checks the ids of each batch (``TokenStream.refuse_ids`` in ``stream.py``).
"""

import contextlib
import filecmp
import glob
import hashlib
import json
import os
import re
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tnlm.checks import as_path, check_values
from tnlm.output.files import lock, read_json, replacing, write_atomically

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024
SIDECAR = "dataset.json"
_UNFINISHED = (".part", ".incomplete")
_FETCH = "fetch it again with `tnlm-train data get`"


def write_shard(path: str | os.PathLike, tokens: Sequence[int] | np.ndarray) -> None:
    """Write one shard, atomically.

    Raises:
        ValueError: ``tokens`` is empty, not one axis of integers, or holds an id outside ``[0, 65535]``.
        OSError: The disk refuses it; names the file, and leaves nothing.
    """
    if hasattr(tokens, "is_meta"):
        check_values("tokens", tokens)
    path, tokens = as_path("path", path), np.asarray(tokens)
    if tokens.ndim != 1 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"tokens of a shard must be one axis of at least one integer, got shape {tokens.shape}, {tokens.dtype}"
        )
    bad = np.flatnonzero((tokens < 0) | (tokens > 65535))
    if bad.size:
        raise ValueError(
            f"ids of a shard must fit uint16, [0, 65535], got {tokens[bad[0]]} at token {bad[0]} for {path}"
        )
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    with replacing(path) as part, part.open("wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2").tobytes())


def shard_tokens(path: str | os.PathLike, *, allow_truncated: bool = False) -> int:
    """Number of tokens of a shard, whose header is checked against the file's size. Reads 1 kB.

    Args:
        allow_truncated: Accept a body shorter than the header says, and count the whole ids it holds.

    Raises:
        ValueError: Missing, unreadable, or not a shard; says what it looks like instead.
    """
    path = Path(path)
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"shard {path} must be a file, but it {kind}")
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(f"shard {path} cannot be read: {error.strerror}") from error
    _check_magic(path, head, size)
    count = int(np.frombuffer(head, dtype="<u4", count=1, offset=8)[0])
    body = size - HEADER_BYTES
    if count == 0 or body < 2:
        raise ValueError(f"{path} must hold at least one token, got count {count} and a body of {body} bytes")
    if allow_truncated and body < 2 * count:
        return body // 2
    if body != 2 * count:
        hint = ""
        if body == 4 * count:
            hint = "; 4 bytes per token look like uint32 ids: convert them, they are not read as uint16"
        elif body < 2 * count:
            hint = f"; the file is truncated: {_FETCH}, or pass --allow-truncated to use {body // 2} tokens"
        raise ValueError(
            f"{path}: the header counts {count} tokens, so the size must be {HEADER_BYTES + 2 * count} bytes, "
            f"got {size}{hint}"
        )
    return count


def _check_magic(path: Path, head: bytes, size: int) -> None:
    start = head.lstrip()[:200].lower()
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} must be a token shard, got a git-lfs pointer: run `git lfs pull`, or {_FETCH}")
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ValueError(f"{path} must be a token shard, got an HTML page (a failed download?): {_FETCH}")
    if len(head) < HEADER_BYTES:
        raise ValueError(f"{path} is too short for a header: it must have at least {HEADER_BYTES} bytes, got {size}")
    magic, version = (int(v) for v in np.frombuffer(head, dtype="<i4", count=2))
    if magic == 20240801:
        raise ValueError(f"{path}: unsupported version: magic 20240801 is llm.c's uint32 format, wanted {MAGIC}")
    if magic != MAGIC:
        big_endian = int(np.frombuffer(head, dtype=">i4", count=1)[0]) == MAGIC
        if big_endian:
            looks = "a big-endian file: swap its byte order"
        elif all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
            looks = "plain text: tokenize it with `tnlm-train data tokenize`"
        else:
            looks = "bytes without a header, or another format"
        raise ValueError(f"{path}: magic must be {MAGIC}, got {magic}, which looks like {looks}")
    if version != VERSION:
        raise ValueError(f"{path}: unsupported version {version}, wanted {VERSION}")


class Shard:
    """One open shard, whose ids are read on demand.

    Reads by ``pread`` and not from a memory map, which ends the process with SIGBUS when the file has shrunk. The file
    stays open, so it may be replaced or removed by name. Threads may share it.

    Raises:
        ValueError: As :func:`shard_tokens`.
    """

    def __init__(self, path: str | os.PathLike, *, allow_truncated: bool = False):
        self.path = Path(path)
        self._tokens = shard_tokens(path, allow_truncated=allow_truncated)
        self._file = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self._tokens

    def read(self, start: int = 0, count: int | None = None) -> np.ndarray:
        """Tokens ``[start, start + count)`` as uint16, by default to the end.

        Raises:
            ValueError: The file has shrunk since it was opened.
        """
        count = self._tokens - start if count is None else min(count, self._tokens - start)
        ids = np.empty(count, dtype="<u2")
        into, at = ids.view(np.uint8).data, HEADER_BYTES + 2 * start
        while into:
            # one call reads less than it is asked for beyond 2 GiB, and nothing beyond the end
            n = os.preadv(self._file, [into], at)
            if n == 0:
                left = max(0, os.fstat(self._file).st_size - HEADER_BYTES) // 2
                raise ValueError(
                    f"shard {self.path} must keep the {self._tokens} tokens that it had when it was opened, but it "
                    f"ends after {left}: put it back, then run the same command again"
                )
            into, at = into[n:], at + n
        return ids

    def blocks(self, size: int = 1 << 22) -> Iterator[tuple[int, np.ndarray]]:
        """All tokens, ``size`` at a time, each with the place of its first."""
        for start in range(0, self._tokens, size):
            yield start, self.read(start, size)


def find_shards(where: str | os.PathLike, *, split: str = "train") -> list[Path]:
    """Sorted shard paths of a folder (files ``*_{split}_*.bin`` or ``{split}_*.bin``), a glob pattern, or one file.

    Unfinished downloads (``.part``, ``.incomplete``) are skipped and a numbering gap is accepted, each with a
    ``UserWarning``.

    Raises:
        ValueError: Nothing matches; lists what the folder holds.
    """
    where = str(where)
    folder = Path(where)
    if folder.is_dir():
        found = [p for p in folder.iterdir() if re.search(rf"(^|_){split}_.*\.bin$", p.name)]
        unfinished = [p.name for p in folder.iterdir() if p.name.endswith(_UNFINISHED)]
        wanted = f"{split} shards (*{split}_*.bin)"
    else:
        names = [Path(p) for p in glob.glob(where)]
        found = [p for p in names if not p.name.endswith(_UNFINISHED)]
        unfinished = [p.name for p in names if p.name.endswith(_UNFINISHED)]
        folder = folder.parent
        wanted = f"shards matching {where}"
    if unfinished:
        warnings.warn(
            f"ignored unfinished files in {folder}: {', '.join(sorted(unfinished))}; run `data get` to finish them",
            stacklevel=2,
        )
    if not found:
        holds = sorted(p.name for p in folder.iterdir())[:20] if folder.is_dir() else "no such folder"
        raise ValueError(f"no {wanted} in {folder}, which holds: {holds or 'nothing'}")
    found = sorted(found)
    _warn_of_gaps(found)
    return found


def _warn_of_gaps(paths: list[Path]) -> None:
    numbers = [int(match.group(1)) for path in paths if (match := re.search(r"_(\d+)\.bin$", path.name))]
    missing = sorted(set(range(min(numbers), max(numbers))) - set(numbers)) if numbers else []
    if missing:
        warnings.warn(
            f"shards in {paths[0].parent} are not numbered without gaps: {missing[:10]} missing of "
            f"{min(numbers)}..{max(numbers)}; the stream joins its neighbours",
            stacklevel=3,
        )


def refuse_duplicates(train: Sequence[Path], validation: Sequence[Path] = ()) -> None:
    """Raise ``ValueError`` when two shards are one file or have equal contents, validation included."""
    seen: dict[tuple, Path] = {}
    for path in [*validation, *train]:
        key = tuple(shard_identity(path).values())[1:]
        if key not in seen:
            seen[key] = path
            continue
        other = seen[key]
        if not filecmp.cmp(path, other, shallow=False):
            continue
        if other in validation:
            raise ValueError(f"{path} is among the training shards and is the validation shard {other}")
        raise ValueError(f"each training shard must be given once, got {path} with the content of {other}")


def shard_identity(path: str | os.PathLike) -> dict[str, Any]:
    """Name, size and sha256 of the first and last 4 kB of a file: it changes with the content, and is cheap to read."""
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(4096))
        file.seek(max(0, size - 4096))
        digest.update(file.read(4096))
    return {"name": path.name, "size": size, "sha256_ends": digest.hexdigest()}


def fingerprint(identities: Sequence[dict[str, Any]]) -> str:
    """One hash of the :func:`shard_identity` of several shards, in order."""
    return hashlib.sha256(json.dumps(identities).encode()).hexdigest()


@dataclass(frozen=True)
class ShardReport:
    """Facts of one checked shard, as ``data check`` prints them."""

    path: Path
    tokens: int
    max_id: int
    documents: int | None
    """End-of-text ids; None when the tokenizer has none."""


def check_shard(
    path: str | os.PathLike, *, d_vocab: int | None, eot: int | None = None, allow_truncated: bool = False
) -> ShardReport:
    """Read a whole shard and check every id. Costs one pass over the file (0.1 s per 100M tokens, cached).

    Raises:
        ValueError: The file is no shard, or ``id 51000 >= vocab 50304 in SHARD at token N``.
    """
    shard = Shard(path, allow_truncated=allow_truncated)
    max_id, documents = 0, 0
    for start, block in shard.blocks():
        max_id = max(max_id, int(block.max()))
        if d_vocab is not None and max_id >= d_vocab:
            refuse_id(block, d_vocab, path, start)
        documents += int(np.count_nonzero(block == eot)) if eot is not None else 0
    if eot is not None and not np.any(shard.read(0, 1_000_000) == eot):
        warnings.warn(
            f"{path} holds no end-of-text id {eot} in its first million tokens: another tokenizer?", stacklevel=2
        )
    return ShardReport(Path(path), len(shard), max_id, None if eot is None else documents)


def check_data(
    where: str | os.PathLike,
    *,
    d_vocab: int | None = None,
    allow_truncated: bool = False,
    progress: Callable[[ShardReport], None] | None = None,
) -> dict[str, Any]:
    """Read and check every shard of a folder or glob, and the validation shards of the same folder.

    Args:
        d_vocab: Limit of the ids; by default that of the sidecar, and without one only the largest id is reported.
        progress: Called with the report of each shard.

    Returns:
        ``train_tokens val_tokens shards max_id d_vocab documents``.

    Raises:
        ValueError: Lists what is wrong with each damaged shard.
    """
    train = find_shards(where)
    folder = train[0].parent
    has_val = any(re.search(r"(^|_)val_.*\.bin$", p.name) for p in folder.iterdir())
    val = find_shards(folder, split="val") if has_val else []
    facts = read_sidecar(folder) or {}
    d_vocab = d_vocab if d_vocab is not None else facts.get("d_vocab")
    problems, reports = [], {}
    for path in [*val, *train]:
        try:
            reports[path] = check_shard(path, d_vocab=d_vocab, eot=facts.get("eot"), allow_truncated=allow_truncated)
        except ValueError as error:
            problems.append(str(error))
        else:
            if progress is not None:
                progress(reports[path])
    if not problems:
        try:
            refuse_duplicates(train, val)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    documents = [report.documents for report in reports.values()]
    return {
        "train_tokens": sum(reports[p].tokens for p in train),
        "val_tokens": sum(reports[p].tokens for p in val),
        "shards": len(reports),
        "max_id": max(report.max_id for report in reports.values()),
        "d_vocab": d_vocab,
        "documents": None if None in documents else sum(documents),
    }


def refuse_id(ids: np.ndarray, d_vocab: int, path: str | os.PathLike, start: int) -> None:
    """Raise ``ValueError`` for the first id of ``ids`` outside the vocabulary; ``start`` is the place of ``ids[0]``."""
    place = int(np.argmax(ids >= d_vocab))
    raise ValueError(f"id {ids[place]} >= vocab {d_vocab} in {path} at token {start + place}")


MOVING_NAMES = ".names.json"
"""File in the folder of finished shards that names all of them while they move to their place."""


@contextlib.contextmanager
def all_or_none(out: str | os.PathLike) -> Iterator[Path]:
    """Context manager that fills a data folder: gives a subfolder to write to, whose files move to ``out`` at the end.

    If the block fails or is killed, ``out`` has no shards. ``out`` is locked meanwhile. After a kill while the files
    move, the next call removes those that had moved.

    Raises:
        ValueError: ``out`` holds shards, or another process writes to it.
    """
    out = Path(out)
    part, whole = out / ".unfinished", out / ".moving"
    out.mkdir(parents=True, exist_ok=True)
    with lock(out / ".lock", what=str(out)):
        # Only what the killed call wrote itself: other shards in the folder are the user's
        for name in _names_moving(whole):
            if not (whole / name).exists():
                (out / name).unlink(missing_ok=True)
        shutil.rmtree(whole, ignore_errors=True)
        if held := sorted(p.name for p in out.glob("*.bin")):
            raise ValueError(f"{out} must hold no shards yet, got {held[:5]}; remove them or choose another folder")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            yield part
            names = sorted(path.name for path in part.iterdir())
            write_atomically(part / MOVING_NAMES, json.dumps(names))
            part.rename(whole)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        # The validation shard comes last: without it nothing trains on a part of the data
        for name in names:
            (whole / name).replace(out / name)
        shutil.rmtree(whole)


def _names_moving(whole: Path) -> list[str]:
    """The files that a killed :func:`all_or_none` was moving out of ``whole``; none if all had moved."""
    if not (whole / MOVING_NAMES).exists():
        return []
    names = json.loads((whole / MOVING_NAMES).read_text())
    return names if any((whole / name).exists() for name in names) else []


def write_sidecar(folder: str | os.PathLike, **facts: Any) -> dict[str, Any]:
    """Merge ``facts`` into the folder's ``dataset.json`` (tokenizer, d_vocab, eot, ...), atomically; returns all."""
    path = Path(folder) / SIDECAR
    merged = {**(read_sidecar(folder) or {}), **facts}
    write_atomically(path, json.dumps(merged, indent=1))
    return merged


def read_sidecar(folder: str | os.PathLike) -> dict[str, Any] | None:
    """Read the folder's ``dataset.json``, which holds the vocabulary size of its shards; None if there is none."""
    path = Path(folder) / SIDECAR
    if not path.is_file():
        return None
    return read_json(path)
