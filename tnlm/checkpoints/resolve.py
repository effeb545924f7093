"""Resolves the name or path of a model to its files: on this disk, of a released model, or of a Hub repository."""

import os
import re
from pathlib import Path

from tnlm.checkpoints import released
from tnlm.checkpoints.local import Found, find_local
from tnlm.checkpoints.released import Released
from tnlm.checkpoints.weightfiles import SUFFIXES, list_names
from tnlm.checks import check_kind


def find_model(name_or_path: str | os.PathLike[str], *, revision: str | None = None) -> Found:
    """The files of an existing path, else of a released model's short name, else of a Hub id ``owner/name``.

    The files of released models and Hub ids are downloaded, unless they are in the cache. A name in an existing folder
    is a path, unless ``revision`` says that it is a Hub id.

    Raises:
        ValueError: Nothing is found under the name, or the files found are not those of a model.
    """
    entry, repo, path = locate(name_or_path, revision=revision)
    if path is not None:
        return find_local(path)
    from tnlm.checkpoints import hub  # huggingface_hub takes a second to import, and local models do not need it

    return hub.find_in_repository(repo, revision=revision, entry=entry)


def locate(
    name_or_path: str | os.PathLike[str], *, revision: str | None = None
) -> tuple[Released | None, str, Path | None]:
    """Record of the released model, Hub id, existing path: one of the last two. No file is read or downloaded."""
    check_kind("name_or_path", name_or_path, (str, os.PathLike), "give a path, a Hub id or a short name")
    text = os.fspath(name_or_path)
    if not text:
        raise ValueError(f"a path, a Hub id or one of {', '.join(released.RELEASED)} is needed, got an empty string")
    path = Path(text).expanduser()
    if path.exists():
        if revision is not None:
            raise ValueError(f"revision= belongs to a Hub id, and {text} is a local path; leave it out")
        return None, "", path
    if path.is_symlink():
        raise ValueError(f"{text} is a link to {os.readlink(path)}, which does not exist")
    entry = released.find_released(text)
    if entry is not None:
        return entry, entry.repo, None
    if isinstance(name_or_path, os.PathLike) or is_path_like(text):
        raise ValueError(f"the local path {text} does not exist (looked for {path.absolute()})")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        raise ValueError(
            f"{text!r} is no existing path, no Hub id (owner/name) and no released model; "
            f"those are {', '.join(released.RELEASED)}"
        )
    if revision is None and path.parent.is_dir():
        raise ValueError(
            f"there is no {path.name} in the folder {path.parent}, which holds "
            f'{list_names(p.name for p in path.parent.iterdir())}; revision="main" says that {text} is a Hub id'
        )
    return None, text, None


def is_path_like(text: str) -> bool:
    """Whether a string can only be meant as a local path."""
    return (
        text.startswith((".", "/", "~"))
        or "\\" in text
        or text.count("/") > 1
        or text.endswith(("/", *SUFFIXES))
        or re.match(r"[A-Za-z]:", text) is not None
    )
