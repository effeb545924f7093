"""The embedded corpus: help topics and docstrings of the standard library, which every CPython carries.

Nothing to download or to ship, so training runs offline anywhere. The text is read in place from source files
(so it does not depend on ``-OO``) and differs between Python versions: its sha256 and the version are recorded,
and losses of two versions are not comparable. Documents are the help topics in key order, then docstrings in
order of file and line; the last 10 % of the documents are validation.
"""

import ast
import hashlib
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tnlm.text.tokenizer import Tokenizer, train_bpe
from tnlm.training.data import shards, tokenize

MIN_CHARACTERS = 200_000
BPE_VOCAB = 1024
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    """Documents of the two splits, with the hash and Python version that identify them."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    sha256: str
    """Hash of :attr:`text` in UTF-8."""
    python: str

    @property
    def text(self) -> str:
        """All documents, joined with blank lines."""
        return "\n\n".join(self.train + self.validation)


@cache
def embedded_corpus() -> Corpus:
    """Read the corpus of this Python, about 2.2 MB of text. Costs about two CPU-seconds, once per process.

    Raises:
        ValueError: Fewer than 200,000 characters are found, as on distributions that strip these modules.
    """
    documents = [*_topics(), *docstrings(Path(sysconfig.get_paths()["stdlib"]))]
    characters = sum(map(len, documents))
    if characters < MIN_CHARACTERS:
        raise ValueError(
            f"the embedded corpus must have at least {MIN_CHARACTERS} characters, got {characters} in "
            f"{len(documents)} documents: this Python ships without its help topics or library sources. "
            "Give text of your own with --data"
        )
    cut = len(documents) - len(documents) // 10
    corpus = Corpus(tuple(documents[:cut]), tuple(documents[cut:]), "", platform.python_version())
    sha256 = hashlib.sha256(corpus.text.encode("utf-8", "replace")).hexdigest()
    return Corpus(corpus.train, corpus.validation, sha256, corpus.python)


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return [topics[key].strip() for key in sorted(topics) if topics[key].strip()]


def docstrings(root: Path) -> Iterator[str]:
    """Docstrings below ``root``, files in sorted order, each file from top to bottom.

    Test folders, installed packages and files that do not parse are skipped.
    """
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escape sequences in library sources
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        yield from _docstrings_of(tree)


def _docstrings_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
        text := ast.get_docstring(node)
    ):
        yield text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _docstrings_of(child)


def cache_folder() -> Path:
    """Folder of the cache: ``$TNLM_CACHE``, else ``$XDG_CACHE_HOME/tnlm``, else ``~/.cache/tnlm``."""
    if os.environ.get("TNLM_CACHE"):
        return Path(os.environ["TNLM_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tnlm"


def embedded_tokenizer() -> Tokenizer:
    """The byte-pair vocabulary of 1,024 trained on the training split; kept in the cache by the corpus' hash.

    Costs about two CPU-seconds on first use. An unwritable cache only costs that again.
    """
    corpus = embedded_corpus()
    folder = cache_folder() / f"bpe{BPE_VOCAB}-{corpus.sha256[:16]}"
    try:
        return Tokenizer.load(folder)
    except ValueError:
        tokenizer = train_bpe(corpus.train, BPE_VOCAB)
    try:
        tokenizer.save(folder)
    except OSError as error:
        warnings.warn(f"the trained vocabulary was not kept: {folder} cannot be written ({error})", stacklevel=2)
    return tokenizer


def count_tokens(tokenizer: Tokenizer) -> int:
    """Number of tokens of the training split. Costs about a CPU-second."""
    return sum(len(tokenize.encode_document(tokenizer, document)) for document in embedded_corpus().train)


def write_embedded(folder: str | os.PathLike, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the corpus as shards ``train_000001.bin`` and ``val_000000.bin`` with sidecar and tokenizer.

    A folder that already holds exactly this corpus under this tokenizer is left as it is.

    Returns:
        The facts of the sidecar ``dataset.json``.
    """
    folder, corpus = Path(folder), embedded_corpus()
    identity = {"corpus_sha256": corpus.sha256, "python": corpus.python}
    facts = shards.read_sidecar(folder)
    if (
        facts is not None
        and {k: facts.get(k) for k in identity} == identity
        and facts["tokenizer"]["hash"] == tokenizer.hash
        and (folder / "train_000001.bin").is_file()
        and (folder / "val_000000.bin").is_file()
    ):
        return facts
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split, name, documents in (
        ("train", "train_000001.bin", corpus.train),
        ("val", "val_000000.bin", corpus.validation),
    ):
        ids = [token for document in documents for token in tokenize.encode_document(tokenizer, document)]
        shards.write_shard(folder / name, ids)
        counts[split] = {
            "tokens": len(ids),
            "documents": len(documents),
            "text_bytes": sum(len(d.encode("utf-8", "replace")) for d in documents),
        }
    return tokenize.write_facts(folder, tokenizer, source="embedded corpus", splits=counts, **identity)
