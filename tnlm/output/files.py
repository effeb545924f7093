"""Files that no kill, full disk or second process may spoil: atomic writes, locks, folders with a marker.

Imports no torch.
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

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MARKER = "COMPLETE"
"""Written last into a training checkpoint: a JSON object with ``sizes`` and ``sha256`` of every other file, by name."""
SAVED = ".saved"
"""Folder of a finished save whose files have not all been moved into place; see :func:`tnlm.save`."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file under another name, flush it to disk, then rename it: a reader sees the old file or the new one.

    The folder is made. The other name, ``.NAME.PID.part``, belongs to this process; a kill leaves it there.

    Raises:
        OSError: The disk refuses it; names ``path``, which is as before.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(part, data)
        part.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_synced(path: Path, data: str | bytes) -> None:
    """Write a file and flush it to disk."""
    with path.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file, or the list of a folder's files, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file; one or two seconds per gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_defect(folder: Path, *, contents: bool = False) -> str | None:
    """Why a training checkpoint is not complete, or None if it is: its marker must name every file at its size.

    Args:
        contents: Compare the sha256 of every file as well, which reads all of them.
    """
    if folder.name.startswith("."):
        return "an interrupted save"
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        sizes, hashes = dict(marker["sizes"]), dict(marker["sha256"]) if contents else {}
    except FileNotFoundError:
        return f"no {MARKER} marker"
    except (OSError, ValueError, KeyError, TypeError):
        return f"unreadable {MARKER} marker"
    for name, size in sizes.items():
        path = folder / name
        try:
            if (actual := path.stat().st_size) != size:
                return f"{name} has {actual} bytes of {size}"
            if contents and sha256(path) != hashes.get(name):
                return f"{name} is damaged: its sha256 is not the recorded one"
        except FileNotFoundError:  # perhaps just now: a live run removes its old checkpoints
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


@contextlib.contextmanager
def lock(path: Path, *, what: str) -> Iterator[None]:
    """Hold a lock file for the time of a block, and remove it afterwards.

    The kernel holds the lock, so the death of this process releases it, whatever is left of the file. Where there are
    no locks (some network file systems, Windows) the block runs without one, with a warning.

    Args:
        what: What must not be used by two processes at once, for the error.

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
    """The lock file, open and locked."""
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
        # Whoever held it removed the file between our opening and our locking it
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
    """Who wrote the lock file."""
    try:
        facts = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {facts['pid']} on {facts['host']}, since {facts['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
