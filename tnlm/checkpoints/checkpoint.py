"""Models from files and back: every published layout loads exactly or not at all, and a save is complete or absent."""

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
from tnlm.checkpoints.layouts import Layout, to_published
from tnlm.checkpoints.resolve import MANIFEST, SAVED, Found, find, is_own_weights, is_run, locate
from tnlm.checkpoints.weightfiles import Stored, count_nonfinite, list_names, read_json
from tnlm.config import ModelConfig
from tnlm.output import files
from tnlm.text.tokenizer import Tokenizer
from tnlm.transformer import Transformer

__all__ = ["load", "read_config", "save", "to_published"]

_STAGING = ".saving"
_LOCK = ".saving.lock"
_INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What weights may be stored and loaded in: dtypes that can be computed with."""


def load(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    attention: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Transformer:
    """A model from a folder, a file, a training run, a released model's short name, or a Hub id; in that order.

    Every layout of ``docs/checkpoints.md`` is converted by a strict table: each key is accounted for, once, at its
    shape. What a layout expresses by scales, signs or gains is folded into the weights in float64, exactly up to one
    rounding. Parameters own their memory: the file may change or vanish afterwards. No code is run from any file.

    Args:
        revision: Commit, branch or tag of a Hub id; released models are pinned, None takes their recorded commit.
        dtype: None gives float32. ``"checkpoint"`` keeps each tensor as stored: the released models compute in bf16
            then, as they were trained. Rotary tables are as the layout was trained in every case.
        attention: ``"squared"`` or ``"squared_normalized"``, for the models whose files do not say which.
        overrides: Keys of the file's own config, such as ``{"n_head": 1}``, for what it does not say; one that it
            says otherwise is replaced, with a warning.

    Returns:
        The model on ``device``; ``model.source`` is a dict of where it came from. Peak memory is the model plus one
        tensor, for formats that can be mapped.

    Raises:
        ValueError: Naming what was found, what was expected and the way out.
    """
    place, wanted = _check_device(device), _check_dtype(dtype)
    overrides = _check_overrides(overrides)
    found = find(name_or_path, revision=revision)
    stored = _read_weights(found)
    layout, config, raw = _describe(found, stored, attention, overrides)
    tensors = dict(stored.tensors)
    table = layout.make_table(config, raw, _shapes(tensors))
    layouts.tie(tensors, table, raw, label=found.label)
    table.check(_shapes(tensors), label=found.label, config=config)
    _check_values(tensors, table.checks, label=found.label)

    model = layouts.structure(config)
    state: dict[str, Tensor] = {}
    nonfinite: dict[str, int] = {}
    too_large: dict[str, str] = {}
    for name, p in model.state_dict().items():
        keys, _ = table.rows[name]
        # Just before they are copied: the second reading then comes from the processor's cache
        nonfinite |= {key: count_nonfinite(tensors[key]) for key in keys if key not in nonfinite}
        made = table.make(name, tensors).reshape(p.shape)
        like = tensors[keys[0] if keys else table.rows["embed.w_e"][0][0]]
        state[name] = _own(made, device=place, dtype=wanted or like.dtype)
        if state[name].dtype != made.dtype and (n := count_nonfinite(state[name])):
            too_large[name] = f"{name} ({n} of {made.numel()})"
    if bad := [f"{key} ({n} of {tensors[key].numel()})" for key, n in nonfinite.items() if n]:
        raise ValueError(f"checkpoint {found.label} holds NaN or infinite weights: {list_names(bad)}; it is of no use")
    if too_large:
        dtype = state[next(iter(too_large))].dtype
        raise ValueError(
            f"checkpoint {found.label} has weights too large for {dtype} (|w| <= {torch.finfo(dtype).max:.5g}): "
            f"{list_names(too_large.values())}; load it in a wider dtype"
        )
    model.load_state_dict(state, assign=True)
    # past nn.Module's own __setattr__, whose annotation knows tensors and modules only
    said = {"overrides": dict(overrides)} if overrides else {}
    object.__setattr__(model, "source", {**found.source, "weights": found.weights.name, "layout": layout.name, **said})
    return model


def read_config(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    attention: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """The architecture alone: of a local model from headers, of a released one from the registry, without weights.

    A Hub id that is neither has its weights downloaded, because in the published layouts they are part of the answer.

    Raises:
        ValueError: As :func:`load`.
    """
    overrides = _check_overrides(overrides)
    entry, _, path = locate(name_or_path, revision=revision)
    if path is None and entry is not None and revision in (None, entry.revision) and not overrides:
        return entry.config
    found = find(name_or_path, revision=revision)
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

    Parameters keep their dtypes (load with ``dtype="checkpoint"`` for others than float32). Above ``max_shard_bytes``
    the weights are split, with an index. The save is atomic: all is written to a folder inside ``folder``, whose
    renaming is the commit, and then moved into place; killed before that, the old model loads, killed after, the new.
    The folder is locked meanwhile: of two saves into it at once, the second is refused.

    Args:
        card: Text of the README, True for one made from what is known (an existing README stays), False for none.
        tokenizer: Saved with the model, for what reads or writes text; None leaves one that is there.

    Returns:
        The folder.

    Raises:
        ValueError: A weight is NaN or infinite, the folder holds weights in a format that is not written here, is
            that of a training run, or another process saves to it.
        OSError: Disk full, read-only and the like, with path and cause; what was there is untouched.
    """
    folder = Path(folder)
    check_weights(model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with files.lock(folder / _LOCK, what=str(folder)):
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
        if (folder / files.MARKER).exists():
            raise ValueError(f"{folder} is a checkpoint of a training run, which would be lost; name another folder")
        finish_save(folder)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        _write_weights(model, staging, max_shard_bytes)
        files.write_synced(staging / "config.json", model.config.to_json())
        if tokenizer is not None:
            tokenizer.save(staging)
        if isinstance(card, str) or (card and not (folder / "README.md").exists()):
            text = card if isinstance(card, str) else model_card(model.config, source=getattr(model, "source", None))
            files.write_synced(staging / "README.md", text)
        for path in staging.iterdir():
            files.sync(path)
        files.write_synced(staging / MANIFEST, json.dumps(sorted(path.name for path in staging.iterdir())))
        files.sync(staging)
        staging.rename(folder / SAVED)
        finish_save(folder)
    except (OSError, SafetensorError):
        shutil.rmtree(staging, ignore_errors=True)
        raise


def finish_save(folder: Path) -> None:
    """Move the files of a committed save into place; a no-op without one."""
    saved = folder / SAVED
    if not saved.is_dir():
        return
    names = json.loads((saved / MANIFEST).read_text())
    for path in list(folder.iterdir()):
        if is_own_weights(path.name) and path.name not in names:
            path.unlink()
    for name in names:
        if (saved / name).exists():
            (saved / name).replace(folder / name)
    # Renamed first: half removed, it would still count as committed
    saved.rename(folder / _STAGING)
    shutil.rmtree(folder / _STAGING)
    files.sync(folder)


def check_weights(model: torch.nn.Module) -> None:
    """Raise ValueError if a parameter or buffer is NaN or infinite: `load` refuses such files."""
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
    """Layout and architecture, from config and keys together; and the part of the config that describes the model."""
    layout = layouts.recognise(list(stored.tensors), label=found.label)
    block = layout.block
    if stored.config is not None:
        raw, source = stored.config, f"config in {found.weights}"
    elif found.config is not None:
        raw, source = read_json(found.config), str(found.config)
        block = "config" if found.config.name == "history.json" else block
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
    if dtype in _DTYPES:
        return dtype
    names = ", ".join(map(str, _DTYPES))
    raise ValueError(f'dtype must be one of {names}, "checkpoint" or None (float32), got {dtype!r}')


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
    files.write_synced(folder / _INDEX, json.dumps(index, indent=2) + "\n")


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
