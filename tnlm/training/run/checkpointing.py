"""Checkpoints of a run: written completely or ignored, in safetensors and JSON files, which cannot hold code.

A checkpoint ``RUN/checkpoints/step_000250/`` holds

- ``model.safetensors``, ``config.json``, ``tnlm_tokenizer.json``: what :func:`tnlm.load` reads;
- ``training.safetensors``: optimiser state by parameter name, and the states of the random generators;
- ``training.json``: step, position in the stream, fingerprint of the data, versions;
- ``COMPLETE``: written last, with the size and the sha256 of every other file.

It is written under a temporary name and renamed once complete, and renamed before it is removed, so a kill at any
moment leaves complete checkpoints and at worst folders that :func:`recover` names and removes at the next start.
``RUN/latest`` holds the path of the newest. Sizes are compared whenever a checkpoint is looked for, contents when
training continues from it or exports it: reading it costs one or two seconds per gigabyte.
"""

import contextlib
import json
import random
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tnlm
from tnlm.checkpoints.local import find_defect, mark_complete
from tnlm.output.files import read_json, sync, write_atomically, write_synced
from tnlm.text.tokenizer import Tokenizer
from tnlm.training.run.outcomes import SaveError
from tnlm.training.run.retention import kept_steps
from tnlm.transformer import Transformer

_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its path, its step, and its contents beside the model."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def model_state(self) -> dict[str, Tensor]:
        """The parameters by name, as stored.

        Raises:
            ValueError: The file is damaged.
        """
        return _read_tensors(self.path / "model.safetensors")


def save(
    run: Path,
    *,
    step: int,
    model: Transformer,
    tokenizer: Tokenizer | None,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> Path:
    """Write the checkpoint of ``step`` and point ``latest`` at it; a complete one of that step stays as it is.

    Args:
        tensors: Optimiser state by name.
        facts: Plain JSON values.

    Raises:
        SaveError: Disk full, read-only, or any other refusal of the file system, with path and cause.
    """
    target = run / "checkpoints" / f"step_{step:06d}"
    part = target.with_name(f".{target.name}.part")
    try:
        if find_defect(target, contents=True) is None:
            _point_latest_at(target)
            return target
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        tnlm.save(model, part, tokenizer=tokenizer, max_shard_bytes=2**62)
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, part / "training.safetensors")
        write_synced(part / "training.json", json.dumps({"step": step, **facts}, indent=1))
        mark_complete(part, step=step)
        if target.exists():
            _remove(target)
        part.rename(target)
        sync(target.parent)
        _point_latest_at(target)
    except Exception as error:
        # safetensors has an error class of its own for a full disk, and its text names no path
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        with contextlib.suppress(OSError):
            shutil.rmtree(part)
        if isinstance(error, OSError) or "safetensors" in type(error).__module__:
            raise SaveError(f"checkpoint {target} could not be written: {cause}") from error
        raise
    return target


def find_latest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, or None; and the newer ones that were skipped, each with the reason."""
    skipped = [f"{path.name}: an interrupted save" for path in sorted((run / "checkpoints").glob(".step_*.part"))]
    for path in _by_age(run):
        defect = find_defect(path)
        if defect is None:
            return path, skipped
        skipped.append(f"{path.name}: {defect}")
    return None, skipped


def recover(run: Path) -> tuple[Path | None, list[str]]:
    """Repair the checkpoints of a run after a kill or a disk error, and return the newest undamaged one.

    Contents are compared with their hashes. Damaged checkpoints are renamed to ``step_N.damaged``, with a warning, and
    count no more; unfinished files and folders are removed; ``latest`` names the checkpoint that is returned. Only the
    process that holds the run's lock may call this.

    Returns:
        The newest undamaged checkpoint, None if none was made; and the names of what was removed.

    Raises:
        ValueError: There are checkpoints and all are damaged; nothing is changed then.
    """
    damaged: dict[Path, str] = {}
    newest = None
    for path in _by_age(run):
        defect = find_defect(path, contents=True)
        if defect is None:
            newest = path
            break
        damaged[path] = defect
    reasons = "; ".join(f"{path.name}: {defect}" for path, defect in damaged.items())
    if damaged and newest is None:
        raise ValueError(
            f"{run} holds no checkpoint that training can continue from ({reasons}); remove {run / 'checkpoints'} to "
            "start from the beginning"
        )
    if damaged:
        warnings.warn(f"{run} continues from {newest.name}, passed over {reasons}", stacklevel=2)
    for path in damaged:
        aside = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    unfinished = sorted([*run.glob(".*.part"), *(run / "checkpoints").glob(".*.part")])
    for path in unfinished:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if newest is not None:
        _point_latest_at(newest)
    return newest, [path.name for path in unfinished]


def check(path: Path) -> None:
    """Compare the files of a checkpoint with the sizes and hashes in its marker.

    Raises:
        ValueError: It is incomplete or damaged.
    """
    if (defect := find_defect(path, contents=True)) is not None:
        raise ValueError(f"checkpoint {path} cannot be used: {defect}")


def complete_steps(run: Path) -> list[int]:
    """Steps of all complete checkpoints, ascending."""
    return [_step(path) for path in reversed(_by_age(run)) if find_defect(path) is None]


def load(path: Path) -> Checkpoint:
    """Read a complete checkpoint.

    Raises:
        ValueError: It is incomplete or damaged.
    """
    defect = find_defect(path)
    if defect is not None:
        raise ValueError(f"checkpoint {path} is not complete: {defect}")
    try:
        facts = read_json(path / "training.json")
        step = int(facts["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint file {path / 'training.json'} cannot be read: {error}") from error
    return Checkpoint(path=path, step=step, tensors=_read_tensors(path / "training.safetensors"), facts=facts)


def prune(run: Path, *, keep_last: int, keep_every: int | None, stable_end: int | None = None) -> None:
    """Remove the complete checkpoints that :func:`tnlm.training.run.retention.kept_steps` does not name."""
    complete = [path for path in _by_age(run) if find_defect(path) is None]
    kept = kept_steps(map(_step, complete), keep_last=keep_last, keep_every=keep_every, stable_end=stable_end)
    for path in complete:
        if _step(path) not in kept:
            _remove(path)


def random_state() -> dict[str, Tensor]:
    """The states of the generators of torch, numpy and python, as plain tensors."""
    python = random.getstate()
    legacy: Any = np.random.get_state()  # noqa: NPY002
    state = {
        "random.torch": torch.get_rng_state(),
        "random.python": torch.tensor([python[0], *python[1]], dtype=torch.int64),
        "random.numpy": torch.tensor([*legacy[1].tolist(), legacy[2]], dtype=torch.int64),
    }
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(tensors: Mapping[str, Tensor]) -> None:
    """Set the random generators to a state returned by :func:`random_state`.

    Raises:
        ValueError: A state is missing.
    """
    names = ("random.torch", "random.python", "random.numpy")
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"the checkpoint must hold the states of all random generators, missing {', '.join(missing)}")
    torch.set_rng_state(tensors["random.torch"].cpu())
    version, *internal = tensors["random.python"].tolist()
    random.setstate((version, tuple(internal), None))
    *key, position = tensors["random.numpy"].tolist()
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, 0, 0.0))  # noqa: NPY002
    if torch.cuda.is_available() and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"].cpu())


def _by_age(run: Path) -> list[Path]:
    """Folders whose name is a checkpoint's, newest first."""
    folder = run / "checkpoints"
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])  # type: ignore[index]


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # safetensors has an error class of its own
        raise ValueError(
            f"checkpoint file {path} cannot be read ({error}); remove its folder to resume from the one before"
        ) from error


def _remove(path: Path) -> None:
    """Remove a checkpoint, renamed first: a kill while it is removed leaves no damaged checkpoint."""
    removed = path.with_name(f".{path.name}.removed.part")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed)


def _point_latest_at(path: Path) -> None:
    write_atomically(path.parents[1] / "latest", f"checkpoints/{path.name}\n")
