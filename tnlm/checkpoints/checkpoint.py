"""Loading and saving of models.

Loading converts every published layout exactly, or raises an error: a key that is missing, unexpected or of another
shape is a ValueError (``Table.check`` in ``layouts/table.py``). Saving is atomic: it leaves the old model or the
whole new one.
"""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tnlm.checkpoints import layouts, weightfiles
from tnlm.checkpoints.card import model_card
from tnlm.checkpoints.layouts import Layout, Table, to_published
from tnlm.checkpoints.local import HISTORY, MANIFEST, MARKER, Found, is_own_weights, is_run, read_manifest
from tnlm.checkpoints.resolve import find_model, locate
from tnlm.checkpoints.weightfiles import Stored, count_nonfinite, list_names
from tnlm.checks import MODEL, TOKENIZER, as_count, as_dtype, as_path, check_kind
from tnlm.config import ModelConfig
from tnlm.output.files import SAVED, lock, read_json, sync, write_synced
from tnlm.text.default_tokenizer import saved_tokenizer
from tnlm.text.tokenizer import Tokenizer
from tnlm.transformer import Transformer

__all__ = ["load", "read_config", "save", "to_published"]

_STAGING = ".saving"
_LOCK = ".saving.lock"
_INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes in which weights may be stored and loaded: those that models compute in."""


def load(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    attention: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Transformer:
    """Load a model from a folder, a weight file, a training run, a released model's short name, or a Hub id.

    A path that exists comes first, then the short name. Every layout of ``docs/checkpoints.md`` is converted by a
    strict table: each key of the file is used exactly once, at its expected shape. Scales, signs and gains of a layout
    are folded into the weights in float64, exactly up to one rounding. Parameters own their memory: the file may be
    changed or deleted afterwards. No code is run from any file.

    Args:
        revision: Commit, branch or tag of a Hub id. None is the recorded commit of a released model, else ``main``.
        dtype: A torch dtype or its name; None gives float32. ``"checkpoint"`` keeps each tensor as stored: the released
            models then compute in bf16, as they were trained. Rotary tables are always those that the layout was
            trained with.
        attention: ``"squared"`` or ``"squared_normalized"``, for models whose files do not say which of the two.
        overrides: Keys of the file's own config that it lacks, such as ``{"n_head": 1}``. A key that it has with
            another value is replaced, with a warning.

    Returns:
        The model on ``device``; ``model.source`` is a dict that says where it came from, and ``model.tokenizer`` the
        tokenizer saved with it, or None. Peak memory is that of the
        model plus one tensor, for formats that can be memory-mapped.

    Raises:
        ValueError: Naming what was found, what was expected and the way out.
    """
    place, wanted = _check_device(device), _check_dtype(dtype)
    overrides = _check_overrides(overrides)
    found = find_model(name_or_path, revision=revision)
    stored = _read_weights(found)
    layout, config, raw = _describe(found, stored, attention, overrides)
    tensors = dict(stored.tensors)
    table = layout.make_table(config, raw, _shapes(tensors))
    layouts.tie(tensors, table, raw, label=found.label)
    # Every missing or extra key, and every wrong shape, is an error here
    table.check(_shapes(tensors), label=found.label, config=config)
    _check_values(tensors, table.checks, label=found.label)

    model = layouts.structure(config)
    state = _convert(tensors, table, model, device=place, dtype=wanted, label=found.label)
    model.load_state_dict(state, assign=True)
    said = {"overrides": dict(overrides)} if overrides else {}
    model.source = {**found.source, "weights": found.weights.name, "layout": layout.name, **said}
    model.tokenizer = saved_tokenizer(model)
    return model


def read_config(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    attention: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """The architecture of a model, without loading it: from a local file's header, or from the registry.

    A Hub id that is not in the registry is downloaded, because the published layouts need keys and shapes as well.

    Raises:
        ValueError: As :func:`load`.
    """
    overrides = _check_overrides(overrides)
    entry, _, path = locate(name_or_path, revision=revision)
    if path is None and entry is not None and revision in (None, entry.revision) and not overrides:
        return entry.config
    found = find_model(name_or_path, revision=revision)
    return _describe(found, weightfiles.read(found.weights), attention, overrides)[1]


def save(
    model: Transformer,
    folder: str | os.PathLike[str],
    *,
    card: bool | str = True,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write ``model.safetensors``, ``config.json`` and a model card; :func:`load` gives back the same bits.

    Parameters keep their dtypes (load with ``dtype="checkpoint"`` for others than float32). Weights of more than
    ``max_shard_bytes`` are split into several files with an index. The save is atomic: all files are written to a
    subfolder, which is renamed to commit the save, and are then moved into ``folder``. A process killed before the
    renaming leaves the old model, one killed after it the new model. The folder is locked meanwhile: a second save
    into it at the same time is refused.

    Args:
        card: Text of the README, True for a generated one (an existing README is kept), False for none.
        tokenizer: Tokenizer to save with the model; None keeps one that is in the folder.

    Returns:
        The folder.

    Raises:
        ValueError: A weight is NaN or infinite, the folder holds weights in another format, it is that of a training
            run, or another process is saving to it.
        OSError: The disk is full, read-only or the like; names path and cause. The files of the folder are unchanged.
    """
    folder = as_path("folder", folder)
    check_kind("model", model, Transformer, MODEL)
    check_weights(model)
    if tokenizer is not None:
        check_kind("tokenizer", tokenizer, Tokenizer, TOKENIZER)
    max_shard_bytes = as_count("max_shard_bytes", max_shard_bytes, 1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder / _LOCK, what=str(folder)):
            _save(model, folder, card, tokenizer, max_shard_bytes)
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise OSError(f"model could not be saved to {folder}: {cause}; what was there is untouched") from error
    return folder


def _save(
    model: Transformer, folder: Path, card: bool | str, tokenizer: Tokenizer | None, max_shard_bytes: int
) -> None:
    staging = folder / _STAGING
    try:
        foreign = [p.name for p in folder.iterdir() if p.name.startswith("pytorch_model.") or p.name == "model.pt"]
        if foreign:
            raise ValueError(
                f"{folder} already holds {list_names(foreign)}, a second format beside it would be ambiguous"
            )
        if is_run(folder):
            raise ValueError(f"{folder} is the folder of a training run, whose config.json would be lost; name another")
        if (folder / MARKER).exists():
            raise ValueError(f"{folder} is a checkpoint of a training run, which would be lost; name another folder")
        finish_save(folder)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        _write_weights(model, staging, max_shard_bytes)
        write_synced(staging / "config.json", model.config.to_json())
        if tokenizer is not None:
            tokenizer.save(staging)
        if isinstance(card, str) or (card and not (folder / "README.md").exists()):
            text = card if isinstance(card, str) else model_card(model.config, source=model.source)
            write_synced(staging / "README.md", text)
        for path in staging.iterdir():
            sync(path)
        write_synced(staging / MANIFEST, json.dumps(sorted(path.name for path in staging.iterdir())))
        sync(staging)
        staging.rename(folder / SAVED)
        finish_save(folder)
    except (OSError, SafetensorError):
        shutil.rmtree(staging, ignore_errors=True)
        raise


def finish_save(folder: Path) -> None:
    """Move the files of a committed save into place; does nothing if there is none."""
    saved = folder / SAVED
    if not saved.is_dir():
        return
    names = read_manifest(saved)
    for path in list(folder.iterdir()):
        if is_own_weights(path.name) and path.name not in names:
            path.unlink()
    for name in names:
        if (saved / name).exists():
            (saved / name).replace(folder / name)
    # Renamed before it is removed: a kill in between would leave a committed save with files missing
    saved.rename(folder / _STAGING)
    shutil.rmtree(folder / _STAGING)
    sync(folder)


def check_weights(model: torch.nn.Module) -> None:
    """Check that all parameters and buffers are finite, because :func:`load` refuses a file with others.

    Raises:
        ValueError: Some are NaN or infinite; names them.
    """
    counts = {name: (count_nonfinite(_whole(t)), t.numel()) for name, t in model.state_dict().items()}
    if bad := [f"{name} ({n} of {size})" for name, (n, size) in counts.items() if n]:
        raise ValueError(
            f"the model must have finite weights, got NaN or infinity in {list_names(bad)}; if it was converted to "
            "float16 the weights were too large for it, use bfloat16 or float32. No file was written"
        )


# Reading


def _read_weights(found: Found) -> Stored:
    stored = weightfiles.read(found.weights)
    for rival in found.rivals:
        if difference := weightfiles.same_tensors(stored.tensors, weightfiles.read(rival).tensors):
            raise ValueError(
                f"{found.label} holds {found.weights.name} and {rival.name}, which differ: {difference}. Delete one"
            )
    return stored


def _describe(
    found: Found, stored: Stored, attention: str | None, overrides: Mapping[str, Any]
) -> tuple[Layout, ModelConfig, dict[str, Any]]:
    """Layout and architecture, from config and keys together, and the part of the config that describes the model."""
    layout = layouts.recognise(list(stored.tensors), label=found.label)
    block = layout.block
    if stored.config is not None:
        raw, source = stored.config, f"config in {found.weights}"
    elif found.configs:
        raw, source = _read_json(found.configs[0]), str(found.configs[0])
        block = "config" if found.configs[0].name == HISTORY else block
    elif overrides:
        raw, source, block = {}, "overrides", None
    else:
        raise ValueError(
            f"{found.label} has no config.json beside it, and the {layout.name} layout needs one; "
            "overrides={...} can say all that it would"
        )
    if block is not None:
        if not isinstance(raw.get(block), dict):
            raise ValueError(f"{source} must hold a block {block!r}, got the keys {', '.join(raw) or 'none'}")
        raw, source = raw[block], f"{source}, block {block}"
    if stored.config is None:
        _check_other_configs(found, layout, raw, source, overrides)
    replaced = sorted(key for key in overrides if key in raw and raw[key] != overrides[key])
    if replaced:
        changes = ", ".join(f"{key}={raw[key]!r} by {overrides[key]!r}" for key in replaced)
        warnings.warn(f"{source}: overrides= replaces {changes}", UserWarning, stacklevel=3)
    raw = {**raw, **overrides}
    if attention is None and found.entry is not None and raw.get("squared_attn") and not raw.get("bilinear_attn"):
        attention = found.entry.config.attention
    config = layout.read_config(raw, _shapes(stored.tensors), source, attention)
    if found.entry is not None:
        found.entry.check(config, label=found.label)
    return layout, config, raw


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a config, or in a history, whose losses may be NaN."""
    return read_json(path, nan=path.name == HISTORY)


def _check_other_configs(
    found: Found, layout: Layout, raw: Mapping[str, Any], source: str, overrides: Mapping[str, Any]
) -> None:
    """Refuse other config files that describe another architecture, unless overrides decide what differs."""
    if layout.differences is None:
        return
    for path in found.configs[1:]:
        other: Any = None
        with contextlib.suppress(ValueError):  # a file that is no JSON object describes nothing
            other = _read_json(path)
            other = other.get("config") if path.name == HISTORY else other
        if not isinstance(other, Mapping):
            continue
        if keys := [key for key in layout.differences(raw, other) if key not in overrides]:
            differing = ", ".join(f"{key}={raw[key]!r} and {other[key]!r}" for key in keys)
            raise ValueError(
                f"{source} and {path} describe different models: {differing}. Delete one, or decide with overrides="
            )


def _convert(
    tensors: Mapping[str, Tensor],
    table: Table,
    model: Transformer,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    label: str,
) -> dict[str, Tensor]:
    """The state dict of ``model`` from the tensors of a file, each in memory of its own.

    Args:
        dtype: None keeps that of the stored tensor; of a parameter that no stored tensor makes, that of the embedding.

    Raises:
        ValueError: A stored tensor is not finite, or becomes infinite in ``dtype``; names all of them.
    """
    state: dict[str, Tensor] = {}
    nonfinite: dict[str, int] = {}
    too_large: dict[str, str] = {}
    for name, p in model.state_dict().items():
        keys, _ = table.rows[name]
        # Counted just before the tensors are copied: the copy then reads them from the processor's cache
        nonfinite |= {key: count_nonfinite(tensors[key]) for key in keys if key not in nonfinite}
        made = table.make(name, tensors).reshape(p.shape)
        like = tensors[keys[0] if keys else table.rows["embed.w_e"][0][0]]
        state[name] = _own(made, device=device, dtype=dtype or like.dtype)
        if state[name].dtype != made.dtype and (n := count_nonfinite(state[name])):
            too_large[name] = f"{name} ({n} of {made.numel()})"
    if bad := [f"{key} ({n} of {tensors[key].numel()})" for key, n in nonfinite.items() if n]:
        raise ValueError(f"checkpoint {label} holds NaN or infinite weights: {list_names(bad)}; it is of no use")
    if too_large:
        narrow = state[next(iter(too_large))].dtype
        raise ValueError(
            f"checkpoint {label} has weights too large for {narrow} (|w| <= {torch.finfo(narrow).max:.5g}): "
            f"{list_names(too_large.values())}; load it in a wider dtype"
        )
    return state


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(t.shape) for key, t in tensors.items()}


def _check_values(tensors: Mapping[str, Tensor], checks: Mapping[str, Any], *, label: str) -> None:
    others = [f"{key} ({t.dtype})" for key, t in tensors.items() if t.dtype not in _DTYPES]
    if others:
        raise ValueError(
            f"checkpoint {label} must hold floating-point weights of 16 bits or more, got {list_names(others)}"
        )
    for key, check in checks.items():
        if key in tensors and (defect := check(tensors[key])):
            raise ValueError(f"checkpoint {label}: {key} {defect}")


def _own(t: Tensor, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A contiguous copy in memory of its own, whatever file or larger tensor ``t`` is a view of."""
    return torch.empty(t.shape, device=device, dtype=dtype).copy_(t)


def _check_device(device: torch.device | str) -> torch.device:
    check_kind("device", device, (str, torch.device), "such as cpu or cuda:0")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be one that torch knows, such as cpu or cuda:0, got {device!r}") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f'device="{device}" needs a CUDA device, and torch sees none; use device="cpu"')
    return place


def _check_overrides(overrides: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ValueError(f'overrides must be a dict of config keys, such as {{"n_head": 1}}, got {overrides!r}')
    return overrides or {}


def _check_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype asked for; None for that of each stored tensor."""
    if dtype is None:
        return torch.float32
    if dtype == "checkpoint":
        return None
    return as_dtype("dtype", dtype, _DTYPES, others=', "checkpoint" or None (float32)')


# Writing


def _write_weights(model: Transformer, folder: Path, max_shard_bytes: int) -> None:
    """One file, or shards of at most ``max_shard_bytes`` with an index; tensors in the order of the state dict."""
    shards: list[dict[str, Tensor]] = [{}]
    total = room = 0
    for name, t in model.state_dict().items():
        size = t.numel() * t.element_size()
        if shards[-1] and size > room:
            shards.append({})
        if not shards[-1]:
            room = max_shard_bytes
        shards[-1][name] = t
        room, total = room - size, total + size
    if len(shards) == 1:
        _save_shard(shards[0], folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _save_shard(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_synced(folder / _INDEX, json.dumps(index, indent=2) + "\n")


def _save_shard(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Plain full tensors, each in storage of its own: tied parameters are written twice, distributed ones gathered."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, t in tensors.items():
        whole = _whole(t).detach().cpu().contiguous()
        plain[name] = whole.clone() if whole.untyped_storage().data_ptr() in seen else whole
        seen.add(whole.untyped_storage().data_ptr())
    save_file(plain, path, metadata={"format": "pt"})


def _whole(t: Tensor) -> Tensor:
    """All of a tensor that may be distributed over ranks."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t
