"""Which files a name or a path means: a folder, a single file, a training run, a released model, a Hub repository."""

import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tnlm.checkpoints import released
from tnlm.checkpoints.released import Released
from tnlm.checkpoints.weightfiles import SUFFIXES, list_names
from tnlm.output.files import SAVED, find_defect

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pt",
)
"""Names looked for in a folder, in this order."""
MANIFEST = "MANIFEST.json"

_STEP_FOLDER = re.compile(r"\.?step_\d+(\.part)?")
_STEP_FILE = re.compile(r"(?:state_)?step_?(\d+)\.pt")


@dataclass(frozen=True)
class Found:
    """The files of one model."""

    weights: Path
    config: Path | None
    """The JSON file that describes it; None when the weight file itself must."""
    label: str
    """What errors call it: the path given, or ``repo@revision``."""
    source: dict[str, Any] = field(default_factory=dict)
    """Where it came from, as facts for a model card."""
    rivals: tuple[Path, ...] = ()
    """Other weight files in the folder, which must hold the same tensors."""
    entry: Released | None = None


def find(name_or_path: str | os.PathLike[str], *, revision: str | None = None) -> Found:
    """An existing path, else a short name of the registry, else a Hub id ``owner/name``, which is downloaded.

    Raises:
        ValueError: Nothing is found under the name, or what is found is no model.
    """
    entry, repo, path = locate(name_or_path, revision=revision)
    if path is not None:
        return find_local(path)
    from tnlm.checkpoints import hub

    if entry is None and (parent := Path(repo).parent).is_dir():
        warnings.warn(
            f"there is no folder {repo} ({parent} holds {list_names(p.name for p in parent.iterdir())}); "
            "asking the Hub for a repository of that name",
            UserWarning,
            stacklevel=3,
        )
    return hub.find(repo, revision=revision, entry=entry)


def locate(
    name_or_path: str | os.PathLike[str], *, revision: str | None = None
) -> tuple[Released | None, str, Path | None]:
    """What a name means, without reading anything: the registry's entry, the repository, the existing path."""
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
    entry = released.find(text)
    if entry is not None:
        return entry, entry.repo, None
    if isinstance(name_or_path, os.PathLike) or is_path_like(text):
        raise ValueError(f"the local path {text} does not exist (looked for {path.absolute()})")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        raise ValueError(
            f"{text!r} is no existing path, no Hub id (owner/name) and no released model; "
            f"those are {', '.join(released.RELEASED)}"
        )
    return None, text, None


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a training run: its ``config.json`` describes the training, not only the model."""
    try:
        return {"model", "steps", "recipe"} <= json.loads((folder / "config.json").read_bytes()).keys()
    except (OSError, ValueError, AttributeError):
        return False


def is_path_like(text: str) -> bool:
    """Whether a string can only be meant as a local path."""
    return (
        text.startswith((".", "/", "~"))
        or "\\" in text
        or text.count("/") > 1
        or text.endswith(("/", *SUFFIXES))
        or re.match(r"[A-Za-z]:", text) is not None
    )


def find_local(path: Path, *, label: str | None = None) -> Found:
    """The model that a folder or a file holds.

    Raises:
        ValueError: No weights, several that may be meant, or an incomplete training checkpoint.
    """
    label = label or str(path)
    if path.is_file():
        _check_complete(path.parent)
        return Found(path, _config_beside(path), label, {"path": str(path)})
    checkpoints = [p for p in (path / "checkpoints").glob("*") if p.is_dir() and _STEP_FOLDER.fullmatch(p.name)]
    files = files_in(path)
    if checkpoints and not any(name in files for name in WEIGHTS):
        return find_local(_newest_complete(path, checkpoints))
    _check_complete(path)
    weights, *rivals = _weights_in(path, files)
    return Found(
        weights, files.get("config.json") or _config_beside(weights), label, {"path": str(path)}, tuple(rivals)
    )


def files_in(folder: Path) -> dict[str, Path]:
    """The files of a folder by name, those of a committed but unfinished save taking precedence."""
    files = {p.name: p for p in sorted(folder.iterdir()) if p.is_file()}
    saved = folder / SAVED
    if saved.is_dir():
        names = json.loads((saved / MANIFEST).read_text())
        files = {name: p for name, p in files.items() if name in names or not is_own_weights(name)}
        files |= {name: saved / name for name in names if (saved / name).is_file()}
    return files


def is_own_weights(name: str) -> bool:
    """Whether :func:`tnlm.save` writes weights under this name."""
    return re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json", name) is not None


def _weights_in(folder: Path, files: Mapping[str, Path]) -> list[Path]:
    """The weight file to read, then others of the fixed names that are there as well."""
    if named := [files[name] for name in WEIGHTS if name in files]:
        return named
    steps = [*folder.glob("*.pt"), *folder.glob("checkpoints/*.pt")]
    numbered = {int(m[1]): p for p in steps if (m := _STEP_FILE.fullmatch(p.name))}
    if numbered:
        return [numbered[max(numbered)]]
    others = [p for name, p in files.items() if name.endswith(SUFFIXES)]
    if len(others) == 1:
        return others
    if others:
        raise ValueError(f"{folder} holds several weight files, name one of them: {list_names(p.name for p in others)}")
    below = sorted({str(p.parent.relative_to(folder)) for s in SUFFIXES for p in folder.glob(f"*/*{s}")})
    hint = f"; there are some in its folders {list_names(below)}" if below else ""
    raise ValueError(
        f"{folder} holds no weights: looked for {', '.join(WEIGHTS)}, step files and single {'/'.join(SUFFIXES)} "
        f"files, found {list_names(files)}{hint}"
    )


def _config_beside(weights: Path) -> Path | None:
    """``config.json`` beside the weights or above ``checkpoints/``; ``history.json`` of the cycle toys."""
    folders = [weights.parent, *([weights.parent.parent] if weights.parent.name == "checkpoints" else [])]
    candidates = [folder / name for folder in folders for name in ("config.json", "history.json")]
    return next((p for p in candidates if p.is_file()), None)


def _newest_complete(run: Path, checkpoints: list[Path]) -> Path:
    skipped: list[str] = []
    for path in sorted(checkpoints, key=lambda p: int(re.sub(r"\D", "", p.name)), reverse=True):
        defect = find_defect(path)
        if defect is None:
            if skipped:
                warnings.warn(
                    f"{run}: loading {path.name}, passed over {'; '.join(skipped)}", UserWarning, stacklevel=5
                )
            return path
        skipped.append(f"{path.name} ({defect})")
    raise ValueError(f"{run} holds no complete checkpoint: {'; '.join(skipped)}")


def _check_complete(folder: Path) -> None:
    if _STEP_FOLDER.fullmatch(folder.name) and (defect := find_defect(folder)):
        raise ValueError(
            f"checkpoint {folder} is not complete: {defect}; load the run folder to get its newest complete one"
        )
