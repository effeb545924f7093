"""The embedded corpus: exact reading of a small tree, and the rules on the real one."""

import hashlib

import pytest

from tnlm.text.tokenizer import Tokenizer, get
from tnlm.training.data import corpus, shards

SOURCES = {
    "b.py": '"""b"""\nclass A:\n    """A\n    body"""\n    def f(self):\n        """f"""\nif 1:\n    def g(): "g"\n',
    "a/z.py": 'async def h():\n    """h"""\n    try:\n        pass\n    except E:\n        def i(): "i"\n',
    "a/broken.py": '"""never"""\ndef (',
    "a/nul.py": '"""never"""\0',
    "test/t.py": '"""never"""',
    "a/tests/t.py": '"""never"""',
    "site-packages/p.py": '"""never"""',
    "a/text.txt": '"""never"""',
    "c.py": 'X = "\\d"\n"""no docstring"""\n',
}


@pytest.fixture
def tree(tmp_path):
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_docstrings_in_order_of_file_and_line(tree):
    assert list(corpus.docstrings(tree)) == ["h", "i", "b", "A\nbody", "f", "g"]


@pytest.fixture
def small(monkeypatch):
    """The first 60 help topics stand for the whole corpus: reading the library takes seconds."""
    topics = corpus._topics()[:60]
    monkeypatch.setattr(corpus, "_topics", lambda: topics)
    monkeypatch.setattr(corpus, "docstrings", lambda root: iter(()))
    corpus.embedded_corpus.cache_clear()
    yield topics
    corpus.embedded_corpus.cache_clear()


def test_the_real_corpus():
    found = corpus.embedded_corpus()
    n = len(found.train) + len(found.validation)
    assert n > 5000
    assert len(found.text) > 1_500_000
    assert len(found.validation) == n // 10
    assert found.sha256 == hashlib.sha256(found.text.encode()).hexdigest()
    assert found.train[0].startswith('The "assert" statement')
    assert "never" not in found.train[:79]


def test_splits_are_disjoint_and_ordered(small):
    found = corpus.embedded_corpus()
    assert [*found.train, *found.validation] == small
    assert len(found.validation) == 6


@pytest.mark.user_error
def test_a_stripped_python_is_named(monkeypatch, small):
    monkeypatch.setattr(corpus, "_topics", list)
    with pytest.raises(ValueError, match=r"at least 200000 characters, got 0 in 0 documents.*--data"):
        corpus.embedded_corpus()


def test_tokenizer_is_cached_by_the_corpus(small, tmp_path, monkeypatch):
    monkeypatch.setenv("TNLM_CACHE", str(tmp_path))
    first = corpus.embedded_tokenizer()
    assert (first.d_vocab, first.eot) == (1024, 1023)
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"bpe1024-{corpus.embedded_corpus().sha256[:16]}"
    monkeypatch.setattr(corpus, "train_bpe", None)  # the second call must not train
    assert corpus.embedded_tokenizer().hash == first.hash


def test_an_unwritable_cache_warns(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TNLM_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert corpus.embedded_tokenizer().d_vocab == 1024


@pytest.mark.parametrize("variable, expected", [("TNLM_CACHE", ""), ("XDG_CACHE_HOME", "tnlm")])
def test_cache_folder(monkeypatch, tmp_path, variable, expected):
    monkeypatch.delenv("TNLM_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert corpus.cache_folder() == tmp_path / expected


def test_write_embedded(small, tmp_path):
    facts = corpus.write_embedded(tmp_path, get("bytes"))
    found = corpus.embedded_corpus()
    for split, name, documents in (
        ("train", "train_000001.bin", found.train),
        ("val", "val_000000.bin", found.validation),
    ):
        ids = shards.Shard(tmp_path / name).read()
        assert bytes(ids.tolist()).decode() == "".join("\n\n" + d for d in documents)
        assert facts["splits"][split] == {
            "tokens": len(ids),
            "documents": len(documents),
            "text_bytes": sum(len(d.encode()) for d in documents),
        }
    assert facts["corpus_sha256"] == found.sha256
    assert (facts["d_vocab"], facts["eot"]) == (256, None)
    assert Tokenizer.load(tmp_path).hash == facts["tokenizer"]["hash"]


def test_write_embedded_keeps_what_fits_and_replaces_what_does_not(small, tmp_path):
    corpus.write_embedded(tmp_path, get("bytes"))
    stamp = (tmp_path / "train_000001.bin").stat().st_mtime_ns
    corpus.write_embedded(tmp_path, get("bytes"))
    assert (tmp_path / "train_000001.bin").stat().st_mtime_ns == stamp
    shards.write_sidecar(tmp_path, corpus_sha256="another")
    corpus.write_embedded(tmp_path, get("bytes"))
    assert (tmp_path / "train_000001.bin").stat().st_mtime_ns != stamp
