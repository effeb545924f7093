"""A cache of the Hub made by hand, and a registry entry for what it holds."""

import dataclasses
import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tnlm.checkpoints import released
from tnlm.checkpoints.released import File, Released
from tnlm.config import ModelConfig

REPO = "someone/gpt2-tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder the Hub's cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return folder


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline mode on, and any connection an error."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    block(monkeypatch)


def block(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def fill(cache: Path, content: Mapping[str, bytes]) -> Path:
    """A cache made by hand: refs/main, a snapshot of links, blobs."""
    repo = cache / ("models--" + REPO.replace("/", "--"))
    snapshot = repo / "snapshots" / COMMIT
    for folder in (repo / "refs", repo / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs/main").write_text(COMMIT)
    for name, data in content.items():
        blob = repo / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def register(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig, content: Mapping[str, bytes], **changes: Any
) -> Released:
    """Put the repository into the registry, its files with their true sizes and hashes."""
    facts = {name: File(size=len(b), sha256=hashlib.sha256(b).hexdigest()) for name, b in content.items()}
    entry = Released(name="tiny", repo=REPO, revision=COMMIT, config=config, files=facts)
    entry = dataclasses.replace(entry, **changes)
    monkeypatch.setitem(released.RELEASED, "tiny", entry)
    return entry
