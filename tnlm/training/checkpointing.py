"""Checkpoints of a run: complete or ignored, in files of plain tensors and JSON that nothing can hide code in.

A checkpoint ``RUN/checkpoints/step_000250/`` holds

- ``model.safetensors``, ``config.json``, ``tnlm_tokenizer.json``: what :func:`tnlm.load` reads;
- ``training.safetensors``: optimiser state by parameter name, and the states of the random generators;
- ``training.json``: step, position in the stream, fingerprint of the data, versions;
- ``COMPLETE``: written last, with the size of every other file.

It is written under a temporary name and renamed once complete, so a kill at any moment leaves the older ones untouched
and at worst a folder that the next start names and removes. ``RUN/latest`` holds the path of the newest.
"""

import contextlib
import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tnlm
from tnlm.tokenizer import Tokenizer
from tnlm.training.outcomes import SaveError
from tnlm.training.retention import kept_steps
from tnlm.transformer import Transformer

MARKER = "COMPLETE"
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """What a complete checkpoint holds beside the model."""

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
    if find_defect(target) is None:
        return target
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        tnlm.save(model, part, max_shard_bytes=2**62)
        if tokenizer is not None:
            tokenizer.save(part)
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, part / "training.safetensors")
        _write(part / "training.json", json.dumps({"step": step, **facts}, indent=1))
        sizes = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
        for path in part.iterdir():
            _sync(path)
        _write(part / MARKER, json.dumps({"step": step, "sizes": sizes}))
        _sync(part)
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
        _sync(target.parent)
        _replace(run / "latest", f"checkpoints/{target.name}\n")
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
    """The newest complete checkpoint of a run, and what was passed over on the way, each with its reason."""
    skipped = [f"{path.name}: an interrupted save" for path in sorted((run / "checkpoints").glob(".step_*.part"))]
    for path in _by_age(run):
        defect = find_defect(path)
        if defect is None:
            return path, skipped
        skipped.append(f"{path.name}: {defect}")
    return None, skipped


def find_defect(path: Path) -> str | None:
    """Why the folder is no complete checkpoint, or None: the marker must name every file at its size."""
    try:
        sizes = json.loads((path / MARKER).read_text())["sizes"]
    except FileNotFoundError:
        return f"no {MARKER} marker"
    except (OSError, ValueError, KeyError, TypeError):
        return f"unreadable {MARKER} marker"
    for name, size in sizes.items():
        actual = (path / name).stat().st_size if (path / name).is_file() else None
        if actual is None:
            return f"{name} is missing"
        if actual != size:
            return f"{name} has {actual} bytes of {size}"
    return None


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
        facts = json.loads((path / "training.json").read_text())
        step = int(facts["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint file {path / 'training.json'} cannot be read: {error}") from error
    return Checkpoint(path=path, step=step, tensors=_read_tensors(path / "training.safetensors"), facts=facts)


def prune(run: Path, *, keep_last: int, keep_every: int | None, stable_end: int | None = None) -> None:
    """Remove the complete checkpoints that :func:`tnlm.training.retention.kept_steps` does not name."""
    complete = [path for path in _by_age(run) if find_defect(path) is None]
    kept = kept_steps(map(_step, complete), keep_last=keep_last, keep_every=keep_every, stable_end=stable_end)
    for path in complete:
        if _step(path) not in kept:
            # without its marker a half-removed folder is no checkpoint
            (path / MARKER).unlink()
            shutil.rmtree(path)


def remove_interrupted(run: Path) -> None:
    """Remove what interrupted saves left behind."""
    for path in (run / "checkpoints").glob(".step_*.part"):
        shutil.rmtree(path)


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
    """Set the generators from :func:`random_state`.

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
    """Folders named like checkpoints, newest first."""
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


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    _write(part, text)
    part.replace(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
