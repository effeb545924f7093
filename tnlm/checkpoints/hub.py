"""Downloads models from the Hugging Face Hub: pinned to a commit, verified, resumed, and read from the cache offline.

Transport, cache and progress bar (on stderr) are those of huggingface_hub. This module decides which files to fetch
and from which commit, writes the error messages, and continues an interrupted large download, which huggingface_hub
no longer does since version 2.
"""

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers

from tnlm.checkpoints.local import WEIGHTS, Found, find_local
from tnlm.checkpoints.released import File, Released, find_released
from tnlm.checkpoints.weightfiles import INDEX_SUFFIX, read_index
from tnlm.output.files import sha256

RESUMED_FROM = 64 * 2**20
"""Size in bytes from which on an interrupted download is kept and continued."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


class Unavailable(ValueError):
    """The Hub cannot be reached or does not give access, so that nothing is known about the file itself."""


def find_in_repository(repo: str, *, revision: str | None = None, entry: Released | None = None) -> Found:
    """The files of the model in a Hub repository, from the cache if they are there, else downloaded.

    Args:
        revision: Commit, branch or tag; None is the recorded commit of a released model, else ``main``.
        entry: Record of the released model: its files are checked, by size always and by sha256 after a download.

    Raises:
        ValueError: No such repository, revision or file, or it cannot be downloaded; names the cache folder and the
            command that downloads it.
    """
    pinned = entry.revision if entry is not None else None
    config = fetch(repo, "config.json", revision=revision or pinned)
    # All files from one commit, even when a branch moves meanwhile
    commit = _commit_of(config) if config is not None else revision or pinned or "main"
    names = [name for name in entry.files if name != "config.json"] if entry is not None else WEIGHTS
    weights = fetch_first(repo, names, revision=commit)
    folder, commit = weights.parent, _commit_of(weights)
    if weights.name.endswith(INDEX_SUFFIX):
        for shard in sorted(set(read_index(weights).values())):
            if fetch(repo, shard, revision=commit) is None:
                raise ValueError(f"{repo}@{commit} has no file {shard}, which its {weights.name} names")
    if entry is not None and entry.revision is None and revision is None:
        warnings.warn(
            f'no commit is recorded for {entry.name}: took {repo}@{commit}; pass revision="{commit}" to keep it',
            UserWarning,
            stacklevel=5,
        )
    if entry is not None and entry.revision == commit:
        for name, recorded in entry.files.items():
            check_size(folder / name, recorded)
    source = {"repo": repo, "revision": commit}
    if digest := recorded_sha256(weights):
        source["sha256"] = digest
    found = find_local(folder, label=f"{repo}@{commit[:7]}")
    return dataclasses.replace(found, source=source, entry=entry)


def is_reachable() -> bool:
    """Whether the Hub answers one request; False in offline mode."""
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # the classes of a broken connection are the transport's, and change with it
        return False
    return True


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[bool]:
    """Offline mode of huggingface_hub if the Hub does not answer, which would be tried for half a minute at every file.

    The value says whether it is on.
    """
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = not is_reachable()
    try:
        yield constants.HF_HUB_OFFLINE
    finally:
        constants.HF_HUB_OFFLINE = before


def fetch_first(repo: str, names: Sequence[str], *, revision: str) -> Path:
    """Path of the first of several files that the repository has; one in the cache is taken without a connection.

    Raises:
        ValueError: It has none of them, or the Hub cannot be asked.
    """
    for name in names:
        if isinstance(cached := _cached(repo, name, revision), Path):
            return cached
    for name in names:
        if (path := fetch(repo, name, revision=revision, wanted=names)) is not None:
            return path
    raise ValueError(f"{repo}@{revision} holds no weights: it has none of {', '.join(names)}")


def fetch(repo: str, name: str, *, revision: str | None = None, wanted: Sequence[str] = ()) -> Path | None:
    """Path of one file in the cache, downloaded if need be; None if the repository does not have it.

    A cached file of a commit is used without asking the Hub; one of a branch only if offline mode is on.

    Args:
        wanted: Names of files that could be used instead, for the error.
    """
    cached = _cached(repo, name, revision)
    if cached is not None and (constants.is_offline_mode() or _COMMIT.fullmatch(revision or "")):
        return cached if isinstance(cached, Path) else None
    at = f"{repo}@{revision or 'main'}"
    try:
        _fetch_blob(repo, name, revision, needed=cached is None)
        path = Path(huggingface_hub.hf_hub_download(repo, name, revision=revision))
    except errors.RemoteEntryNotFoundError:
        return None
    except errors.GatedRepoError:
        raise Unavailable(f"{at} is gated: ask for access on its page, then run `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise Unavailable(
            f"the Hub has no repository {repo} that you can see; check the name, or run `hf auth login` if it is "
            "private"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{repo} has no revision {revision!r}; leave revision= out for its main branch") from None
    except PermissionError as error:
        raise ValueError(
            f"the cache folder {error.filename or constants.HF_HUB_CACHE} cannot be written ({error.strerror}); "
            "set HF_HUB_CACHE to a folder of yours"
        ) from None
    except _Interrupted as error:
        raise Unavailable(f"the download of {name} from {at} stopped at {error}; load again to continue it") from error
    except Exception as error:  # the classes of a broken connection are the transport's, and change with it
        raise Unavailable(_unreachable(error, repo, wanted or [name], revision)) from error
    if cached is None:
        _check_download(path, repo, name)
    return path


def check_size(path: Path, recorded: File) -> None:
    """Check that a file has the recorded size.

    Raises:
        ValueError: It has another; names both sizes and the file to delete.
    """
    size = path.stat().st_size
    if recorded.size is not None and size != recorded.size:
        raise ValueError(
            f"{path} must have {recorded.size} bytes, it has {size}: the download was damaged; "
            f"delete {path.resolve()} and load again"
        )


class _Interrupted(Exception):
    """A large download stopped; the part that was received is kept."""


def _fetch_blob(repo: str, name: str, revision: str | None, *, needed: bool) -> None:
    """Download a large file into the cache, continuing an earlier attempt; huggingface_hub then finds it there.

    Small files, and errors when asking for the file's size, are left to huggingface_hub. Only a connection that cannot
    be made is an error if the file is ``needed``: huggingface_hub would try again for half a minute.
    """
    url = huggingface_hub.hf_hub_url(repo, name, revision=revision)
    headers = build_hf_headers()
    try:
        facts = huggingface_hub.get_hf_file_metadata(url, headers=headers)
    except errors.HfHubHTTPError:
        return
    except Exception:
        if needed and not is_reachable():
            raise
        return
    if facts.etag is None or (facts.size or 0) < RESUMED_FROM:
        return
    cache = Path(constants.HF_HUB_CACHE)
    folder = repo_folder_name(repo_id=repo, repo_type="model")
    blob = cache / folder / "blobs" / facts.etag
    part = blob.with_name(f"{facts.etag}.part")
    lock = cache / ".locks" / folder / f"{facts.etag}.part.lock"
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    if urlsplit(facts.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is for the Hub, not for the storage that it redirects to
    with WeakFileLock(lock):
        if blob.exists():
            return
        done = part.stat().st_size if part.exists() else 0
        try:
            with part.open("ab") as file:
                http_get(
                    facts.location,
                    file,
                    resume_size=done,
                    headers=headers,
                    expected_size=facts.size,
                    displayed_filename=name,
                )
        except Exception as error:
            raise _Interrupted(f"{part.stat().st_size} of {facts.size} bytes ({type(error).__name__})") from error
        part.rename(blob)


def recorded_sha256(path: Path) -> str | None:
    """The sha256 that the Hub gave for a large file: its name in the cache. None for small files and outside of it."""
    name = path.resolve().name
    return name if re.fullmatch(r"[0-9a-f]{64}", name) else None


def _check_download(path: Path, repo: str, name: str) -> None:
    """Compare size and sha256 of a new download with those recorded for this commit, if they are."""
    entry = find_released(repo)
    recorded = entry.files.get(name) if entry is not None and entry.revision == _commit_of(path) else None
    if recorded is None:
        return
    check_size(path, recorded)
    if recorded.sha256 is not None and (found := sha256(path)) != recorded.sha256:
        raise ValueError(
            f"{path} must have sha256 {recorded.sha256}, it has {found}: the download was damaged; "
            f"delete {path.resolve()} and load again"
        )


def _cached(repo: str, name: str, revision: str | None) -> Path | bool | None:
    """Path of the file in the cache; False if the cache says that the repository lacks it, None if it says nothing."""
    cached = huggingface_hub.try_to_load_from_cache(repo, name, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    return None if cached is None else False


def _commit_of(path: Path) -> str:
    """Commit of a file in the cache, whose path ends in ``snapshots/COMMIT/FILE``."""
    return path.parent.name


def _unreachable(error: Exception, repo: str, names: Sequence[str], revision: str | None) -> str:
    if constants.is_offline_mode():
        why = "offline mode is on (HF_HUB_OFFLINE)"
    else:
        why = f"the Hub could not be reached ({type(error.__cause__ or error).__name__})"
    pin = f" --revision {revision}" if revision else ""
    return (
        f"cannot get {' or '.join(names)} of {repo}@{revision or 'main'}: {why}, and the cache folder "
        f"{constants.HF_HUB_CACHE} does not hold it. With a connection, run: hf download {repo}{pin}"
    )
