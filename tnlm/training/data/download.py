"""Download of the published token shards, ``data get fineweb10B --shards N``: resumable and verified.

``kjj0/fineweb10B-gpt2`` holds FineWeb sample-10BT in GPT-2 ids: 103 training shards, 10,255,324,043 tokens, and
one validation shard. 9,726 steps of 524,288 tokens need 52 training shards, 10.4 GB.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tnlm.output.files import lock
from tnlm.training.data import shards

REPO = "kjj0/fineweb10B-gpt2"
N_SHARDS = 103
GPT2_HASH = "65f56afeba66a6c7fe2776ca4df879ce9966531672e05aeec0923028b75a1fd1"
"""``tnlm.text.tokenizer.get("gpt2").hash``: the vocabulary of these shards."""
_FULL_BYTES, _LAST_BYTES = 200_001_024, 110_649_110


def fineweb_files(n_shards: int) -> dict[str, int]:
    """File names and sizes in bytes: the validation shard, then the first ``n_shards`` training shards.

    Raises:
        ValueError: ``n_shards`` is not in 1..103.
    """
    if not 1 <= n_shards <= N_SHARDS:
        raise ValueError(f"shards must be in [1, {N_SHARDS}], got {n_shards}")
    files = {"fineweb_val_000000.bin": _FULL_BYTES}
    for number in range(1, n_shards + 1):
        files[f"fineweb_train_{number:06d}.bin"] = _LAST_BYTES if number == N_SHARDS else _FULL_BYTES
    return files


def get_fineweb(
    folder: str | os.PathLike, n_shards: int, *, progress: Callable[[str, int, int], None] | None = None
) -> dict[str, Any]:
    """Download the shards that are missing. The same call continues an interrupted one; only complete files get a name.

    Args:
        progress: Called as ``progress(file, done, total)`` after each file that is in place.

    Returns:
        ``folder files downloaded train_tokens val_tokens``.

    Raises:
        ValueError: No network, a refused or damaged download, too little disk, or another process that downloads into
            the folder; names files and folder.
    """
    folder, files = Path(folder), fineweb_files(n_shards)
    missing = {name: size for name, size in files.items() if _size(folder / name) != size}
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if sum(missing.values()) > free:
        raise ValueError(
            f"{folder} must have {sum(missing.values()):,} bytes free for {len(missing)} files, got {free:,}; "
            "choose fewer shards or another folder"
        )
    with lock(folder / ".lock", what=str(folder)):
        for done, name in enumerate(files):
            if name in missing:
                _download(name, missing, folder)
            if progress is not None:
                progress(name, done + 1, len(files))
        shutil.rmtree(folder / ".download", ignore_errors=True)
    tokens = {name: shards.shard_tokens(folder / name) for name in files}
    shards.write_sidecar(folder, source=REPO, d_vocab=50257, eot=50256, tokenizer={"name": "gpt2", "hash": GPT2_HASH})
    return {
        "folder": str(folder),
        "files": len(files),
        "downloaded": len(missing),
        "train_tokens": sum(n for name, n in tokens.items() if "_train_" in name),
        "val_tokens": tokens["fineweb_val_000000.bin"],
    }


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _download(name: str, missing: dict[str, int], folder: Path) -> None:
    """Fetch one file under a temporary name, check it, and then rename it."""
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        fetched = Path(hf_hub_download(REPO, name, repo_type="dataset", local_dir=folder / ".download"))
    except (OSError, httpx.HTTPError, HfHubHTTPError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT):
            raise OSError(error.errno, error.strerror, str(folder / name)) from error
        offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE") else ""
        names = ", ".join(list(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(
            f"{name} could not be fetched ({type(error).__name__}: {str(error).splitlines()[0]}).{offline} "
            f"Wanted are {len(missing)} files, {names}, from https://huggingface.co/datasets/{REPO}; put them into "
            f"{folder.resolve()} by hand, or run the same command again to continue"
        ) from error
    if _size(fetched) != missing[name]:
        found = _size(fetched)
        shutil.rmtree(folder / ".download", ignore_errors=True)
        raise ValueError(f"{name} must have {missing[name]} bytes, got {found} from {REPO}; run the command again")
    shards.shard_tokens(fetched)
    os.replace(fetched, folder / name)
