"""Atomic writes, lock files, sha256 sums and strict JSON, for every file that this package reads and writes itself.

A kill, a full disk or a second process leaves the old file or the new one. Imports no torch.
"""

import contextlib
import datetime
import errno
import hashlib
import json
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SAVED = ".saved"
"""Subfolder with the files of a finished save that are not all moved into place yet; see :func:`tnlm.save`."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager for an atomic write: gives another path to write to, and renames it to ``path`` at the end.

    The file is flushed to disk before it is renamed, so a reader sees the old file or the whole new one. Its other
    name, ``.NAME.PID.part``, belongs to this process; a kill leaves it there. The folder must exist.

    Raises:
        OSError: The disk refuses the file; names ``path``, which is as before.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        sync(part)
        part.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file as :func:`replacing` does; its folder is created if it does not exist.

    Raises:
        OSError: The disk refuses it; names ``path``, which is as before.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    with replacing(path) as part:
        part.write_bytes(data.encode() if isinstance(data, str) else data)


def write_synced(path: Path, data: str | bytes) -> None:
    """Write a file and flush it to disk."""
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    sync(path)


def sync(path: Path) -> None:
    """Flush a file to disk; of a folder, its list of file names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file; one or two seconds per gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, *, nan: bool = False) -> dict[str, Any]:
    """The JSON object in a file, read as :func:`parse_json` does.

    Raises:
        ValueError: The file holds something else; names the path.
        OSError: The file cannot be read.
    """
    try:
        return parse_json(path.read_bytes(), nan=nan)
    except ValueError as error:
        raise ValueError(f"{path} must hold one JSON object: {error}") from None


def parse_json(text: bytes, *, nan: bool = False) -> dict[str, Any]:
    """A JSON object from UTF-8 text, read strictly: a byte-order mark is allowed, a repeated key or NaN is not.

    Args:
        nan: Allow NaN and Infinity, which Python writes for such losses although they are no JSON.

    Raises:
        ValueError: The text is no JSON, no object, repeats a key, or holds NaN or Infinity that are not allowed.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} occurs twice")
            seen[key] = value
        return seen

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique, parse_constant=None if nan else refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply to be read") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}")
    return value


@contextlib.contextmanager
def lock(path: Path, *, what: str) -> Iterator[None]:
    """Context manager that holds a lock file during its block, and removes the file afterwards.

    The operating system releases the lock when this process dies, even if the file is left. Where there are no locks
    (some network file systems, Windows) the block runs without one, with a warning.

    Args:
        what: Name of the thing that two processes must not use at once, for the error.

    Raises:
        ValueError: Another process holds it; names process, host and start.
        OSError: The file cannot be made.
    """
    if fcntl is None:
        _warn_of_no_lock(what, "this system has no flock")
        yield
        return
    descriptor = _acquire(path, what)
    try:
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(facts).encode())
        yield
    finally:
        try:
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _acquire(path: Path, what: str) -> int:
    """Descriptor of the lock file, opened and locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _flock(descriptor, what)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # The process that held the lock removed this file after we opened it: open the new one
        os.close(descriptor)


def _flock(descriptor: int, what: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{what} is in use by {_holder(descriptor)}; wait for its end, or stop it") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _warn_of_no_lock(what, os.strerror(error.errno))


def _warn_of_no_lock(what: str, why: str) -> None:
    warnings.warn(f"{what} cannot be locked ({why}): nothing keeps a second process out", stacklevel=6)


def _holder(descriptor: int) -> str:
    """The process that wrote the lock file, as a phrase for the error."""
    try:
        facts = parse_json(os.pread(descriptor, 4096, 0))
        return f"process {facts['pid']} on {facts['host']}, since {facts['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
