"""Reads weight files (safetensors, torch archives, shards): finds damage before use, and runs no code from them.

Tensors are memory-mapped where the format allows it, so that reading them costs little before they are used:
:func:`tnlm.load` copies each one into a parameter that owns its memory.
"""

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tnlm.output.files import parse_json, read_json

NESTED = ("model", "model_state_dict", "state_dict")
"""Keys of an archive under which training code stores the state dict."""
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
INDEX_SUFFIX = ".index.json"
PREFIXES = ("module.", "model.")
"""Prefixes that wrappers add to every key; ``_orig_mod`` (torch.compile) may stand before any part of one."""

_ALLOWED_CLASS = "__main__.GPTConfig"
_pickles = threading.Lock()  # all threads share the list of allowed classes of torch.load


@dataclass(frozen=True)
class Stored:
    """Content of a weight file: the state dict without prefixes in its keys, and the config if the file has one."""

    tensors: dict[str, Tensor]
    config: dict[str, Any] | None


class PickledConfig:
    """Stands for the config class of the published training script, which archives refer to by name."""


def read(path: Path) -> Stored:
    """Read a ``.safetensors`` file, a torch archive, or an index of shards.

    Raises:
        ValueError: Naming the path, what is wrong with the file, and the way out.
    """
    tensors, config = (_read_shards(path), None) if path.name.endswith(INDEX_SUFFIX) else _read_file(path)
    return Stored(strip_prefixes(tensors, path), config)


def count_nonfinite(t: Tensor) -> int:
    """Number of NaN and infinite entries of a tensor."""
    # Any of them makes the sum NaN or infinite; a finite sum needs no second pass. Finite entries may overflow too
    return 0 if t.sum().isfinite() else int((~torch.isfinite(t)).sum())


def list_names(names: Iterable[str], *, limit: int = 8) -> str:
    """``a, b, c and 5 more``, sorted; ``none`` when empty."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return (", ".join(ordered[:limit]) or "none") + rest


def strip_prefixes(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The same tensors under keys without the prefixes that wrappers add.

    Raises:
        ValueError: Two keys become equal, or only some carry ``module.`` or ``model.``.
    """
    plain: dict[str, str] = {}
    for key in tensors:
        stripped = ".".join(part for part in key.split(".") if part != "_orig_mod")
        if stripped in plain:
            raise ValueError(
                f"{path} is ambiguous: {plain[stripped]} and {key} are the same parameter; delete one of the two"
            )
        plain[stripped] = key
    while True:
        wrapped = {p: [key for key in plain if key.startswith(p)] for p in PREFIXES}
        prefix = next((p for p, keys in wrapped.items() if keys), None)
        if prefix is None:
            return {key: tensors[original] for key, original in plain.items()}
        if len(wrapped[prefix]) < len(plain):
            bare = next(key for key in plain if not key.startswith(prefix))
            raise ValueError(
                f"{path}: either all keys or none may start with {prefix!r}, got {wrapped[prefix][0]} beside {bare}; "
                "save the unwrapped model"
            )
        plain = {key.removeprefix(prefix): original for key, original in plain.items()}


def same_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str | None:
    """The first difference between two state dicts, in words, or None."""
    if a.keys() != b.keys():
        return f"only one of them has {list_names(a.keys() ^ b.keys())}"
    unequal = (key for key in a if a[key].shape != b[key].shape or not torch.equal(a[key], b[key]))
    key = next(unequal, None)
    return None if key is None else f"{key} is not the same in both"


# Formats


def _read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    content = _check_content(path)
    if content == "safetensors":
        return _read_safetensors(path), None
    return _state_dict(_read_torch(path, zipped=content == "zip"), path)


def _check_content(path: Path) -> str:
    """Kind of a weight file, by name and first bytes: ``safetensors``, ``zip`` or ``pickle``.

    Raises:
        ValueError: The file is empty, a git-lfs pointer, a web page, or not of the kind that its name says.
    """
    if path.is_dir():
        raise ValueError(f"{path} must be a file of weights, it is a folder")
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(512)
    if size == 0:
        raise ValueError(f"{path} is empty (0 bytes); download it again")
    if head.startswith(b"version https://git-lfs"):
        wanted = next((line[5:].decode() for line in head.splitlines() if line.startswith(b"size ")), "unknown")
        raise ValueError(
            f"{path} is a git-lfs pointer of {size} bytes, not the file of {wanted} bytes it stands for; "
            "run `git lfs pull` in its folder"
        )
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ValueError(f"{path} is a web page of {size} bytes, not weights: the download failed; download it again")
    content = _content(head)
    named = "safetensors" if path.suffix == ".safetensors" else "torch" if path.suffix in TORCH_SUFFIXES else None
    if named is None:
        raise ValueError(f"{path} must end in one of {', '.join(SUFFIXES)}; rename it if it holds weights")
    if named == "safetensors" and content != "safetensors":
        what = {"zip": "a torch archive", "pickle": "a pickle"}.get(content, "something else")
        way = "name it .bin" if content in ("zip", "pickle") else "download it again"
        raise ValueError(f"{path} ({size} bytes) must be a safetensors file, it holds {what}; {way}")
    if named == "torch" and content not in ("zip", "pickle"):
        what = "safetensors" if content == "safetensors" else "something else"
        way = "name it .safetensors" if content == "safetensors" else "download it again"
        raise ValueError(f"{path} ({size} bytes) must be a torch archive, it holds {what}; {way}")
    return content


def _content(head: bytes) -> str:
    # 8 bytes of header length, then "{". Checked first, because a length may begin with the first byte of a pickle
    if head[6:9] == b"\0\0{":
        return "safetensors"
    return "zip" if head.startswith(b"PK\x03\x04") else "pickle" if head.startswith(b"\x80") else "unknown"


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header_bytes = file.read(min(length, size))
    if 8 + length > size:
        raise ValueError(
            f"{path} is cut off: it has {size} bytes, its header alone needs {8 + length}; download it again"
        )
    try:
        header = parse_json(header_bytes)
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError):
        raise ValueError(
            f"{path} ({size} bytes) is damaged: its header is no safetensors header; download it again"
        ) from None
    if size != expected:
        damage = "is cut off" if size < expected else "has trailing bytes"
        raise ValueError(f"{path} {damage}: it has {size} bytes, its header says {expected}; download it again")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in header if key != "__metadata__"}
    except SafetensorError as error:
        raise ValueError(f"{path} ({size} bytes) is damaged ({error}); download it again") from None


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Tensors of all shards that an index names; each must lie beside it and hold the keys that it says."""
    weight_map = read_index(index)
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        shard = index.parent / name
        if not shard.is_file():
            raise ValueError(f"{shard} is missing, and {index.name} names it; download it again")
        part, _ = _read_file(shard)
        said = {key for key, file in weight_map.items() if file == name}
        if part.keys() != said:
            raise ValueError(
                f"{shard} does not hold what {index.name} says: missing {list_names(said - part.keys())}; "
                f"unexpected {list_names(part.keys() - said)}. Download both again"
            )
        tensors |= part
    return tensors


def read_index(path: Path) -> dict[str, str]:
    """The name of the shard that holds each tensor, from an index of shards.

    Raises:
        ValueError: The file holds no such map, or a value is not the plain name of a file in its folder.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} must hold a weight_map from tensor names to files; download it again")
    for name in weight_map.values():
        plain = isinstance(name, str) and name == os.path.basename(name.replace("\\", "/"))
        if not plain or name in ("", ".", ".."):
            raise ValueError(f"{path} must name files in its own folder, got {name!r}; do not use this checkpoint")
    return weight_map


def _read_torch(path: Path, *, zipped: bool) -> Any:
    """Content of a torch archive or legacy pickle, read by the loader that makes tensors and plain data only."""
    size = path.stat().st_size
    if zipped:
        _check_zip_end(path, size)
    try:
        allowed = torch.serialization.safe_globals([(PickledConfig, _ALLOWED_CLASS)])
        with _pickles, allowed, path.open("rb") as file:
            # Mapping needs a path, and works for archives only
            loaded = torch.load(path if zipped else file, map_location="cpu", weights_only=True, mmap=zipped)
            rest = 0 if zipped else size - file.tell()
    except Exception as error:
        # torch's own text is left out: for some files it advises to switch the protection off
        if zipped and (classes := _foreign_classes(path)):
            raise ValueError(
                f"{path} holds Python objects, which could run code and are not loaded: {list_names(classes)}. "
                "Ask its owner for a state dict of tensors, best as .safetensors"
            ) from None
        legacy = "" if zipped else ", or a legacy pickle with objects that are not loaded because they could run code"
        raise ValueError(
            f"{path} ({size} bytes) is damaged or no torch checkpoint{legacy} ({type(error).__name__}); "
            "download it again"
        ) from None
    if rest:
        raise ValueError(
            f"{path} has trailing bytes: it has {size}, its content ends at {size - rest}; download it again"
        )
    return loaded


def _check_zip_end(path: Path, size: int) -> None:
    """Check that a zip archive is whole: it ends in a record of fixed size after the list of its files."""
    with path.open("rb") as file:
        start = max(0, size - 22 - 65535)
        file.seek(start)
        tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + 22:
        raise ValueError(
            f"{path} is cut off: it has {size} bytes, and the directory that ends such a file is missing; "
            "download it again"
        )
    expected = start + at + 22 + int.from_bytes(tail[at + 20 : at + 22], "little")
    if size != expected:
        damage = "is cut off" if size < expected else "has trailing bytes"
        raise ValueError(f"{path} {damage}: it has {size} bytes, its directory ends at {expected}; download it again")


def _foreign_classes(path: Path) -> set[str]:
    """Classes that an archive refers to besides tensors and plain data; nothing is run to find them."""
    try:
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - {_ALLOWED_CLASS}
    except Exception:  # its directory is whole, its content is not
        return set()


def _state_dict(loaded: Any, path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The state dict in a loaded object, bare or under one of :data:`NESTED`, and the config beside it."""
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} must hold a state dict, it holds a {type(loaded).__name__}")
    nested = [key for key in NESTED if isinstance(loaded.get(key), dict)]
    if len(nested) > 1:
        raise ValueError(f"{path} is ambiguous: it holds state dicts under {list_names(nested)}; keep one of them")
    state, config = (loaded[nested[0]], loaded.get("config")) if nested else (loaded, None)
    if isinstance(config, PickledConfig):
        config = dict(vars(config))
    wrong = [f"{key} ({type(t).__name__})" for key, t in state.items() if type(t) not in (Tensor, torch.nn.Parameter)]
    if wrong or not state:
        raise ValueError(
            f"{path} must hold a state dict of plain tensors, got {list_names(wrong)} among {len(state)} entries; "
            "save model.state_dict(), with distributed tensors gathered"
        )
    return {str(key): t.detach() for key, t in state.items()}, config if isinstance(config, dict) else None
