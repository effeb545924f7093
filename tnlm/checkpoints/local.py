"""Finds the files of a model on this disk (folder, training run or single file), and tells whether they are complete.

Two kinds of folder can be left half written. A training checkpoint is complete once its last file, :data:`MARKER`,
names all others (:func:`mark_complete`, :func:`find_defect`). A save by :func:`tnlm.save` is committed once its files
lie in the subfolder ``.saved`` with a :data:`MANIFEST`; :func:`files_in` reads those that are not moved into place yet.
"""

import json
import re
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tnlm.checkpoints.released import Released
from tnlm.checkpoints.weightfiles import SUFFIXES, list_names
from tnlm.output.files import SAVED, read_json, sha256, sync, write_synced

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pt",
)
"""Names of weight files that are looked for in a folder, in this order."""
HISTORY = "history.json"
"""Losses of a cycle toy, whose entry ``config`` describes the model."""
MARKER = "COMPLETE"
"""Last file of a training checkpoint: a JSON object with ``sizes`` and ``sha256`` of every other file, by name."""
MANIFEST = "MANIFEST.json"
"""Last file of a save in the subfolder ``.saved``: the JSON list of the names of its files."""

_STEP_FOLDER = re.compile(r"\.?step_\d+(\.part)?")
_STEP_FILE = re.compile(r"(?:state_)?step_?(\d+)\.pt")


@dataclass(frozen=True)
class Found:
    """The files of one model."""

    weights: Path
    configs: tuple[Path, ...]
    """JSON files that describe the model: the first is read, the others must agree; none if the weight file does."""
    label: str
    """Name of the model in errors: the path given, or ``repo@revision``."""
    source: dict[str, Any] = field(default_factory=dict)
    """Where the files came from, as facts for a model card."""
    rivals: tuple[Path, ...] = ()
    """Other weight files in the folder, which must hold the same tensors."""
    entry: Released | None = None
    """Record of the released model, if it was loaded by one of its names."""


def find_local(path: Path, *, label: str | None = None) -> Found:
    """The files of the model in a folder or of a single weight file; of a training run, those of its last checkpoint.

    Raises:
        ValueError: No weights, several that may be meant, or an incomplete training checkpoint.
    """
    label = label or str(path)
    if path.is_file():
        _check_complete(path.parent)
        return Found(path, tuple(_configs_beside(path)), label, {"path": str(path)})
    checkpoints = [p for p in (path / "checkpoints").glob("*") if p.is_dir() and _STEP_FOLDER.fullmatch(p.name)]
    files = files_in(path)
    if checkpoints and not any(name in files for name in WEIGHTS):
        return find_local(_newest_complete(path, checkpoints))
    _check_complete(path)
    weights, *rivals = _weights_in(path, files)
    own = [files["config.json"]] if "config.json" in files else []
    configs = tuple(dict.fromkeys([*own, *_configs_beside(weights)]))
    return Found(weights, configs, label, {"path": str(path)}, tuple(rivals))


def files_in(folder: Path) -> dict[str, Path]:
    """The files of a folder by name; those of a committed save that are not moved yet replace the older ones."""
    files = {p.name: p for p in sorted(folder.iterdir()) if p.is_file()}
    saved = folder / SAVED
    if saved.is_dir():
        names = read_manifest(saved)
        files = {name: p for name, p in files.items() if name in names or not is_own_weights(name)}
        files |= {name: saved / name for name in names if (saved / name).is_file()}
    return files


def read_manifest(saved: Path) -> list[str]:
    """The names of the files of a committed save.

    Raises:
        ValueError: The manifest is missing or no list of plain file names.
    """
    path = saved / MANIFEST
    try:
        names = json.loads(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        names = None
    # A name with a folder in it would move a file out of the model's folder
    if not isinstance(names, list) or not all(
        isinstance(n, str) and "\0" not in n and Path(n).name == n for n in names
    ):
        raise ValueError(
            f"{path} must hold a list of the names of the saved files, which it does not: remove the folder {saved} "
            "to use the files beside it"
        )
    return names


def is_own_weights(name: str) -> bool:
    """Whether :func:`tnlm.save` writes weights under this name."""
    return re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json", name) is not None


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a training run: its ``config.json`` describes the training, not only the model."""
    try:
        return {"model", "steps", "recipe"} <= read_json(folder / "config.json").keys()
    except (OSError, ValueError):
        return False


def mark_complete(folder: Path, *, step: int) -> None:
    """Flush every file of a training checkpoint to disk, then write the marker ``COMPLETE`` that names them all."""
    files = sorted(path for path in folder.iterdir() if path.name != MARKER)
    with ThreadPoolExecutor() as pool:  # the hashes are computed while the disk writes
        hashes = pool.map(sha256, files)
        for path in files:
            sync(path)
        marker = {
            "step": step,
            "sizes": {path.name: path.stat().st_size for path in files},
            "sha256": dict(zip((path.name for path in files), hashes)),
        }
    write_synced(folder / MARKER, json.dumps(marker))
    sync(folder)


def find_defect(folder: Path, *, contents: bool = False) -> str | None:
    """Why a training checkpoint is not complete, or None: its marker ``COMPLETE`` must name every file at its size.

    Args:
        contents: Compare the sha256 of every file as well, which reads all of them.
    """
    if folder.name.startswith("."):
        return "an interrupted save"
    try:
        marker = read_json(folder / MARKER)
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


def _configs_beside(weights: Path) -> list[Path]:
    """``config.json`` beside the weights or above ``checkpoints/``; ``history.json`` of the cycle toys."""
    folders = [weights.parent, *([weights.parent.parent] if weights.parent.name == "checkpoints" else [])]
    candidates = [folder / name for folder in folders for name in ("config.json", HISTORY)]
    return [p for p in candidates if p.is_file()]


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
