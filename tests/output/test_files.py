"""Atomic writes, strict JSON and locks, with a second process, a full disk and a file system without locks."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tnlm.output.files import lock, read_json, replacing, write_atomically


def test_a_failed_write_leaves_the_old_file_alone_and_names_it(tmp_path, monkeypatch):
    path = tmp_path / "new folder" / "a.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.json'$"):
        write_atomically(path, b"new")
    assert [(p.name, p.read_text()) for p in path.parent.iterdir()] == [("a.json", "old")]


def test_a_block_that_fails_replaces_nothing_and_keeps_its_error(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")

    def fail():
        with replacing(path) as part:
            part.write_text("half")
            raise KeyError("other")

    with pytest.raises(KeyError, match="other"):
        fail()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "old")]
    with replacing(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "new")]


@pytest.mark.user_error
@pytest.mark.parametrize(
    "text, said",
    [
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ('{"b": {"a": 1, "a": 1}}', "the key 'a' occurs twice"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ("[1]", "it holds a list"),
        ("{", "Expecting property name"),
    ],
)
def test_json_that_is_read_in_two_ways_or_no_object_is_refused(tmp_path, text, said):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"a\.json must hold one JSON object: {said}"):
        read_json(path)


def test_json_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": [1, 2.5, null]}')
    assert read_json(path) == {"a": [1, 2.5, None]}


@pytest.mark.user_error
def test_a_held_lock_refuses_and_a_released_one_leaves_nothing(tmp_path):
    path = tmp_path / ".lock"
    with lock(path, what="the thing"):
        with pytest.raises(ValueError, match=rf"the thing is in use by process {os.getpid()} on \S+, since \d{{4}}-"):
            lock(path, what="the thing").__enter__()
        path.write_text("no JSON")
        with pytest.raises(ValueError, match="the thing is in use by another process; wait for its end, or stop it"):
            lock(path, what="the thing").__enter__()
    assert not list(tmp_path.iterdir())
    path.write_text("left by a kill")
    with lock(path, what="the thing"):
        assert f'"pid": {os.getpid()}' in path.read_text()


def test_a_lock_file_removed_while_it_was_waited_for_is_not_taken(tmp_path, monkeypatch):
    """Between our opening the file and our locking it, the holder ended and a third process made the file anew."""
    path, flock, replaced = tmp_path / ".lock", fcntl.flock, []

    def replace_first(descriptor: int, operation: int) -> None:
        if not replaced:
            replaced.append(path.unlink())
            path.touch()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replace_first)
    with lock(path, what="the thing"), pytest.raises(ValueError, match="in use"):
        lock(Path(path), what="the thing").__enter__()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    done = []
    said = r"the thing cannot be locked \(No locks available\): nothing keeps a second process out"
    with pytest.warns(UserWarning, match=said), lock(tmp_path / ".lock", what="the thing"):
        done.append(True)
    assert done
    assert not list(tmp_path.iterdir())
