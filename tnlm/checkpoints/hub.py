"""Downloads from the Hugging Face Hub: pinned to a commit, verified, resumed, and found again without a connection.

Transport, cache and progress bar (stderr) are huggingface_hub's. Here is which files are wanted, from which commit,
what is said when they cannot be had, and that a large download continues where a killed one stopped, which the library
gave up in version 2. Nothing is fetched at import.
"""

import dataclasses
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers

from tnlm.checkpoints.released import File, Released
from tnlm.checkpoints.resolve import WEIGHTS, Found, find_local
from tnlm.checkpoints.weightfiles import INDEX_SUFFIX, read_json, shard_names
from tnlm.output.files import sha256

RESUMED_FROM = 64 * 2**20
"""Bytes from which on a download is kept when interrupted."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


class Unavailable(ValueError):
    """The Hub cannot be reached, or does not show what was asked for: nothing is known about the file itself."""


def find(repo: str, *, revision: str | None = None, entry: Released | None = None) -> Found:
    """The model of a repository, from the cache if it is there, else downloaded.

    Args:
        revision: Commit, branch or tag; None is the recorded commit of a released model, else ``main``.
        entry: The registry's entry: its files are checked, by size always and by sha256 after a download.

    Raises:
        ValueError: No such repository, revision or file, or no way to get it; naming cache and command.
    """
    pinned = entry.revision if entry is not None else None
    config = fetch(repo, "config.json", revision=revision or pinned)
    # All files from one commit, even when a branch moves meanwhile
    commit = _commit_of(config) if config is not None else revision or pinned or "main"
    names = [name for name in entry.files if name != "config.json"] if entry is not None else WEIGHTS
    weights = fetch_first(repo, names, revision=commit)
    folder, commit = weights.parent, _commit_of(weights)
    if weights.name.endswith(INDEX_SUFFIX):
        for shard in shard_names(weights, read_json(weights).get("weight_map") or {}):
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


def fetch_first(repo: str, names: Sequence[str], *, revision: str) -> Path:
    """The first of several files that the repository has; one in the cache is taken without a connection.

    Raises:
        ValueError: It has none of them, or that cannot be known.
    """
    for name in names:
        if isinstance(cached := _cached(repo, name, revision), Path):
            return cached
    for name in names:
        if (path := fetch(repo, name, revision=revision, wanted=names)) is not None:
            return path
    raise ValueError(f"{repo}@{revision} holds no weights: it has none of {', '.join(names)}")


def fetch(repo: str, name: str, *, revision: str | None = None, wanted: Sequence[str] = ()) -> Path | None:
    """One file, in the cache; None if the repository does not have it.

    A commit that is cached is used as it is; a branch is asked for anew unless offline mode is on.

    Args:
        wanted: Names that would serve as well, for the error.
    """
    cached = _cached(repo, name, revision)
    if cached is not None and (constants.is_offline_mode() or _COMMIT.fullmatch(revision or "")):
        return cached if isinstance(cached, Path) else None
    at = f"{repo}@{revision or 'main'}"
    try:
        _fetch_blob(repo, name, revision)
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
    """Refuse a file of another size than recorded.

    Raises:
        ValueError: Naming both sizes and the file to delete.
    """
    size = path.stat().st_size
    if recorded.size is not None and size != recorded.size:
        raise ValueError(
            f"{path} must have {recorded.size} bytes, it has {size}: the download was damaged; "
            f"delete {path.resolve()} and load again"
        )


class _Interrupted(Exception):
    """A large download stopped; what came is kept."""


def _fetch_blob(repo: str, name: str, revision: str | None) -> None:
    """Put a large file's content into the cache, continuing an earlier attempt; the library then finds it there.

    Small files, and any trouble in asking for the file, are left to the library.
    """
    url = huggingface_hub.hf_hub_url(repo, name, revision=revision)
    headers = build_hf_headers()
    try:
        facts = huggingface_hub.get_hf_file_metadata(url, headers=headers)
    except Exception:
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
        headers.pop("authorization", None)  # the storage behind a redirect is not told who asks
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
    """What the Hub said a file's sha256 is: the cache names large files by it. None elsewhere, and for small files."""
    name = path.resolve().name
    return name if re.fullmatch(r"[0-9a-f]{64}", name) else None


def _check_download(path: Path, repo: str, name: str) -> None:
    """Size and sha256 of a fresh download, where recorded for this very commit."""
    from tnlm.checkpoints import released

    entry = released.find(repo)
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
    """The file's path in the cache, False if the cache knows that the repository lacks it, None if it knows nothing."""
    cached = huggingface_hub.try_to_load_from_cache(repo, name, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    return None if cached is None else False


def _commit_of(path: Path) -> str:
    """The cache keeps ``snapshots/COMMIT/FILE``."""
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
