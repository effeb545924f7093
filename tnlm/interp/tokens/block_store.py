"""Finished blocks of a long computation over tokens, kept in a folder so that it can be continued."""

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from tnlm.interp.layers.eigensolver import Eig
from tnlm.output.files import replacing


class BlockStore:
    """Finished blocks of eigenpairs in a folder, one file each.

    A file is written whole or not at all, and holds a digest of the weights and settings that it was computed from.
    Loading a damaged block, or one of other weights or settings, is a ValueError.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], weights: tuple[Tensor, ...]) -> None:
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for w in weights:
            digest.update(f"{tuple(w.shape)} {w.dtype}".encode())
            digest.update(w.detach().cpu().contiguous().numpy().tobytes())
        self.folder, self.layer, self.device = folder, settings["layer"], weights[0].device
        self.key = digest.hexdigest()
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, start: int) -> Path:
        return self.folder / f"layer{self.layer}-{start:06d}.safetensors"

    def load(self, start: int) -> Eig | None:
        """The block that starts at token ``start``, or None where there is no file of it yet."""
        from safetensors import SafetensorError, safe_open

        path = self._path(start)
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt", device=str(self.device)) as file:
                if (file.metadata() or {}).get("key") != self.key:
                    raise ValueError(
                        f"{path} holds a block of other weights, tokens or settings; pass an empty folder, or delete it"
                    )
                return Eig(*(file.get_tensor(name) for name in Eig._fields))
        except SafetensorError as error:
            raise ValueError(f"{path} must hold a finished block, but is damaged ({error}); delete it") from error

    def save(self, start: int, part: Eig) -> None:
        """Write the block that starts at token ``start``."""
        from safetensors.torch import save_file

        tensors = {name: t.detach().contiguous() for name, t in part._asdict().items()}
        with replacing(self._path(start)) as unfinished:
            save_file(tensors, unfinished, metadata={"key": self.key})
