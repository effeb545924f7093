"""Token shards: the corruption matrix, one row per kind of damage."""

import os
import resource

import numpy as np
import pytest

from tnlm.training.data import shards


def header(magic=shards.MAGIC, version=1, count=1000, dtype="<i4"):
    values = np.zeros(256, dtype=np.dtype(dtype))
    values[:3] = magic, version, np.uint32(count).astype(np.int32)
    return values.tobytes()


def body(n, dtype="<u2"):
    return (np.arange(n) % 97).astype(dtype).tobytes()


GOOD = header() + body(1000)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 200001024\n"
DAMAGE = {
    "empty": (b"", "too short for a header: it must have at least 1024 bytes, got 0"),
    "1023 bytes": (GOOD[:1023], "too short for a header.* got 1023"),
    "magic 0": (header(magic=0) + body(1000), "magic must be 20240520, got 0, .*without a header"),
    "byte-swapped": (header(dtype=">i4") + body(1000), "got -1999096831, .*big-endian file"),
    "no header": (body(2000), "magic must be 20240520, .*without a header"),
    "text": (b"once upon a time\n" * 200, "plain text: tokenize it"),
    "git-lfs pointer": (LFS, "git-lfs pointer: run `git lfs pull`"),
    "long git-lfs pointer": (LFS + b"x" * 2000, "git-lfs pointer"),
    "html": (b"<!DOCTYPE html><html>404</html>" * 50, "HTML page"),
    "version 2": (header(version=2) + body(1000), "unsupported version 2, wanted 1"),
    "llama 3 format": (header(magic=20240801, version=7) + body(1000, "<u4"), "unsupported version: .*uint32"),
    "one token short": (header() + body(999), "counts 1000 tokens.* must be 3024 bytes, got 3022; .*truncated"),
    "one token more": (header() + body(1001), "counts 1000 tokens.* must be 3024 bytes, got 3026$"),
    "odd byte": (GOOD + b"\0", "must be 3024 bytes, got 3025"),
    "odd byte short": (GOOD[:-1], "must be 3024 bytes, got 3023; the file is truncated"),
    "count 0": (header(count=0), "at least one token, got count 0"),
    "half an id": (header() + b"\0", "at least one token, got count 1000 and a body of 1 bytes"),
    "no body": (header(), "at least one token, got count 1000 and a body of 0"),
    "negative count": (header(count=2**31) + body(1000), "counts 2147483648 tokens"),
    "uint32 body": (header() + body(1000, "<u4"), "4 bytes per token look like uint32"),
}


@pytest.mark.user_error
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(tmp_path, damage):
    data, message = DAMAGE[damage]
    path = tmp_path / "x_train_000001.bin"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        shards.shard_tokens(path)
    assert str(path) in str(error.value)
    with pytest.raises(ValueError, match=message):
        shards.check_shard(path, d_vocab=256)


@pytest.mark.user_error
def test_paths_that_are_no_files(tmp_path):
    with pytest.raises(ValueError, match=f"shard {tmp_path} must be a file, but it is a folder"):
        shards.shard_tokens(tmp_path)
    with pytest.raises(ValueError, match=r"shard .*absent.bin must be a file, but it does not exist"):
        shards.shard_tokens(tmp_path / "absent.bin")


@pytest.mark.user_error
def test_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    path.write_bytes(GOOD)

    def deny(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shards.Path, "open", deny)  # chmod does not stop root
    with pytest.raises(ValueError, match=r"x.bin cannot be read: Permission denied"):
        shards.shard_tokens(path)


@pytest.mark.parametrize("cut", [2, 3, 500])
def test_allow_truncated_uses_the_whole_ids_left(tmp_path, cut):
    path = tmp_path / "x.bin"
    path.write_bytes(GOOD[:-cut])
    kept = shards.Shard(path, allow_truncated=True).read()
    assert len(kept) == 1000 - (cut + 1) // 2
    np.testing.assert_array_equal(kept, (np.arange(1000) % 97)[: len(kept)])


def test_write_and_read_back(tmp_path):
    ids = np.array([0, 50256, 65535, 7], dtype=np.int64)
    shards.write_shard(tmp_path / "x.bin", ids)
    np.testing.assert_array_equal(shards.Shard(tmp_path / "x.bin").read(), ids)
    assert (tmp_path / "x.bin").stat().st_size == 1024 + 2 * 4
    assert os.listdir(tmp_path) == ["x.bin"], "no temporary may stay"
    assert np.frombuffer((tmp_path / "x.bin").read_bytes(), "<i4", 3).tolist() == [20240520, 1, 4]


def test_parts_and_blocks(tmp_path):
    ids = np.arange(1000)
    shards.write_shard(tmp_path / "x.bin", ids)
    shard = shards.Shard(tmp_path / "x.bin")
    assert len(shard) == 1000
    for start, count in ((0, 1), (990, 10), (13, 500)):
        np.testing.assert_array_equal(shard.read(start, count), ids[start : start + count])
    np.testing.assert_array_equal(shard.read(995, 50), ids[995:], "at most what there is")
    blocks = list(shard.blocks(300))
    assert [(start, len(block)) for start, block in blocks] == [(0, 300), (300, 300), (600, 300), (900, 100)]
    np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), ids)


@pytest.mark.user_error
def test_a_shard_that_shrinks_while_it_is_open_is_an_error(tmp_path):
    """A memory map would end the process with SIGBUS; replacing the file by name changes nothing."""
    path = tmp_path / "x.bin"
    shards.write_shard(path, np.arange(10_000))
    shard = shards.Shard(path)
    os.truncate(path, 1024 + 2 * 4000)
    np.testing.assert_array_equal(shard.read(3000, 1000), np.arange(3000, 4000))
    with pytest.raises(ValueError, match=r"x.bin must keep the 10000 tokens .* it ends after 4000: put it back"):
        shard.read(3500, 1000)
    with pytest.raises(ValueError, match=r"x.bin must keep the 10000 tokens .* it ends after 4000: put it back"):
        shard.read(9000, 10)
    shards.write_shard(path, np.arange(5))
    np.testing.assert_array_equal(shard.read(0, 9), np.arange(9))


@pytest.mark.user_error
@pytest.mark.parametrize(
    "tokens, message",
    [
        ([1, 70000], "got 70000 at token 1"),
        ([-1], "got -1 at token 0"),
        (np.array([1.0]), "one axis of at least one integer"),
        (np.zeros((2, 2), int), "one axis"),
        (np.array([], int), "at least one integer"),
    ],
)
def test_writer_refuses_what_does_not_fit(tmp_path, tokens, message):
    with pytest.raises(ValueError, match=message):
        shards.write_shard(tmp_path / "x.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path):
    shards.write_shard(tmp_path / "x.bin", [1, 2])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*x\.bin'"):
            shards.write_shard(tmp_path / "x.bin", range(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["x.bin"]
    assert shards.shard_tokens(tmp_path / "x.bin") == 2


class TestCheck:
    def test_report(self, tmp_path):
        shards.write_shard(tmp_path / "x.bin", [9, 1, 2, 9, 3])
        report = shards.check_shard(tmp_path / "x.bin", d_vocab=10, eot=9)
        assert (report.tokens, report.max_id, report.documents) == (5, 9, 2)

    @pytest.mark.user_error
    def test_id_beyond_the_vocabulary(self, tmp_path):
        shards.write_shard(tmp_path / "x.bin", [1, 2, 51000, 3])
        with pytest.raises(ValueError, match=r"id 51000 >= vocab 50304 in .*x.bin at token 2"):
            shards.check_shard(tmp_path / "x.bin", d_vocab=50304)

    def test_no_end_of_text(self, tmp_path):
        shards.write_shard(tmp_path / "x.bin", [1, 2])
        with pytest.warns(UserWarning, match="no end-of-text id 50256"):
            shards.check_shard(tmp_path / "x.bin", d_vocab=50304, eot=50256)


class TestCheckData:
    def test_report_of_a_folder(self, tmp_path):
        held = {"train_000001.bin": [9, 1, 9, 2, 11], "train_000002.bin": [9, 3, 4], "val_000000.bin": [9, 5]}
        for name, ids in held.items():
            shards.write_shard(tmp_path / name, ids)
        shards.write_sidecar(tmp_path, d_vocab=12, eot=9)
        seen = []
        report = shards.check_data(tmp_path, progress=seen.append)
        assert report == {
            "train_tokens": 8,
            "val_tokens": 2,
            "shards": 3,
            "max_id": 11,
            "d_vocab": 12,
            "documents": 4,
        }
        assert [(r.path.name, r.tokens, r.max_id, r.documents) for r in seen] == [
            ("val_000000.bin", 2, 9, 1),
            ("train_000001.bin", 5, 11, 2),
            ("train_000002.bin", 3, 9, 1),
        ]

    @pytest.mark.user_error
    def test_all_problems_are_listed(self, tmp_path):
        shards.write_shard(tmp_path / "train_000001.bin", [1, 300])
        (tmp_path / "train_000002.bin").write_bytes(b"")
        with pytest.raises(ValueError, match=r"(?s)id 300 >= vocab 256 in .*000001.bin.*\n.*000002.bin is too short"):
            shards.check_data(tmp_path, d_vocab=256)

    @pytest.mark.user_error
    def test_validation_among_the_training_shards(self, tmp_path):
        shards.write_shard(tmp_path / "train_000001.bin", [1, 2])
        shards.write_shard(tmp_path / "val_000000.bin", [1, 2])
        with pytest.raises(
            ValueError, match=r"train_000001.bin is among .* and is the validation shard .*val_000000.bin"
        ):
            shards.check_data(tmp_path)


class TestFind:
    @staticmethod
    def fill(folder, *names):
        for i, name in enumerate(names):
            shards.write_shard(folder / name, [1, i])

    def test_folder_glob_and_file(self, tmp_path):
        self.fill(tmp_path, "f_val_000000.bin", "f_train_000002.bin", "f_train_000001.bin")
        expected = [tmp_path / "f_train_000001.bin", tmp_path / "f_train_000002.bin"]
        assert shards.find_shards(tmp_path) == expected
        assert shards.find_shards(tmp_path / "f_train_*.bin") == expected
        assert shards.find_shards(expected[0]) == expected[:1]
        assert shards.find_shards(tmp_path, split="val") == [tmp_path / "f_val_000000.bin"]

    @pytest.mark.user_error
    def test_nothing_found_lists_the_folder(self, tmp_path):
        self.fill(tmp_path, "f_val_000000.bin")
        with pytest.raises(ValueError, match=r"no train shards .* which holds: \['f_val_000000.bin'\]"):
            shards.find_shards(tmp_path)
        with pytest.raises(ValueError, match=r"matching .*which holds: no such folder"):
            shards.find_shards(tmp_path / "absent" / "*.bin")

    def test_unfinished_downloads_are_ignored_with_a_hint(self, tmp_path):
        self.fill(tmp_path, "train_000001.bin", "train_000002.bin.part")
        for where in (tmp_path, tmp_path / "*"):
            with pytest.warns(UserWarning, match=r"unfinished files .*train_000002.bin.part"):
                assert shards.find_shards(where) == [tmp_path / "train_000001.bin"]

    def test_a_gap_is_reported(self, tmp_path):
        self.fill(tmp_path, "train_000001.bin", "train_000003.bin")
        with pytest.warns(UserWarning, match=r"\[2\] missing of 1..3"):
            assert len(shards.find_shards(tmp_path)) == 2

    @pytest.mark.user_error
    def test_duplicates(self, tmp_path):
        self.fill(tmp_path, "train_000001.bin", "train_000002.bin", "val_000000.bin")
        train, val = shards.find_shards(tmp_path), shards.find_shards(tmp_path, split="val")
        shards.refuse_duplicates(train, val)
        with pytest.raises(
            ValueError, match=r"given once, got .*train_000001.bin with the content of .*train_000001.bin"
        ):
            shards.refuse_duplicates([*train, train[0]], val)
        with pytest.raises(
            ValueError, match=r"val_000000.bin is among .* and is the validation shard .*val_000000.bin"
        ):
            shards.refuse_duplicates([*train, val[0]], val)
        (tmp_path / "train_000003.bin").write_bytes(val[0].read_bytes())
        with pytest.raises(ValueError, match=r"train_000003.bin is among the training shards"):
            shards.refuse_duplicates([*train, tmp_path / "train_000003.bin"], val)

    def test_equal_ends_are_no_duplicate(self, tmp_path):
        a = np.ones(10_000, int)
        b = a.copy()
        b[5000] = 2
        shards.write_shard(tmp_path / "a.bin", a)
        shards.write_shard(tmp_path / "b.bin", b)
        paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
        ends = {shards.shard_identity(path)["sha256_ends"] for path in paths}
        assert len(ends) == 1, "what is read first does not tell them apart"
        shards.refuse_duplicates(paths)  # raises where they are one


def test_fingerprint_sees_name_size_and_ends(tmp_path):
    for name, tokens in {"a.bin": [1, 2, 3], "b.bin": [1, 2, 4], "c.bin": [1, 2]}.items():
        shards.write_shard(tmp_path / name, tokens)
    paths = [tmp_path / name for name in ("a.bin", "b.bin", "c.bin")]
    lists = ([paths[0]], [paths[1]], [paths[2]], paths, paths[::-1])
    prints = [shards.fingerprint([shards.shard_identity(path) for path in some]) for some in lists]
    assert len(set(prints)) == 5
    assert prints[3] == shards.fingerprint([shards.shard_identity(path) for path in paths])


def test_sidecar(tmp_path):
    assert shards.read_sidecar(tmp_path) is None
    shards.write_sidecar(tmp_path, d_vocab=256)
    shards.write_sidecar(tmp_path, eot=None)
    assert shards.read_sidecar(tmp_path) == {"d_vocab": 256, "eot": None}


@pytest.mark.user_error
@pytest.mark.parametrize("text", ["{", "[1]"])
def test_damaged_sidecar(tmp_path, text):
    (tmp_path / shards.SIDECAR).write_text(text)
    with pytest.raises(ValueError, match=r"dataset.json must hold one JSON object"):
        shards.read_sidecar(tmp_path)
