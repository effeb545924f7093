"""Shards of the data that a configuration names. Imports no torch."""

import sys
from pathlib import Path
from typing import Any

from tnlm.text import tokenizer as tokenizers
from tnlm.text.tokenizer import Tokenizer
from tnlm.training.config import TrainConfig
from tnlm.training.data import corpus, shards
from tnlm.training.run.distributed import World, on_main


def find_data(config: TrainConfig, world: World) -> tuple[list[Path], list[Path], dict[str, Any]]:
    """Training shards, validation shards, and the sidecar of their folder (empty if there is none)."""
    where = on_main(lambda: _write_corpus(config), world) if config.data == "corpus" else _shards_folder(config)
    train = shards.find_shards(where)
    folder = train[0].parent
    validation = shards.find_shards(config.val_data or folder, split="val")
    return train, validation, shards.read_sidecar(folder) or {}


def _write_corpus(config: TrainConfig) -> Path:
    tokenizer = _corpus_tokenizer(config)
    name = f"{tokenizer.name}-{corpus.embedded_corpus().sha256[:16]}"
    try:
        folder = corpus.cache_folder() / "corpus" / name
        corpus.write_embedded(folder, tokenizer)
    except OSError as error:
        folder = config.folder / "data"
        print(f"the cache cannot be written ({error}): the corpus goes to {folder}", file=sys.stderr)
        corpus.write_embedded(folder, tokenizer)
    return folder


def count_tokens(config: TrainConfig) -> int:
    """Number of training tokens of the data; writes nothing.

    The embedded corpus is tokenized for it, in a few CPU-seconds; of shards the headers are read.

    Raises:
        ValueError: There are no shards, or one is damaged.
    """
    if config.data == "corpus":
        return corpus.count_tokens(_corpus_tokenizer(config))
    paths = shards.find_shards(_shards_folder(config))
    return sum(shards.shard_tokens(path, allow_truncated=config.allow_truncated) for path in paths)


def _shards_folder(config: TrainConfig) -> str | Path:
    """Folder or glob of the shards: ``config.data``, or the cache for a published data set."""
    if config.data != "fineweb10B":
        return config.data
    folder = corpus.cache_folder() / "fineweb10B"
    if not folder.is_dir():
        raise ValueError(
            f"--data fineweb10B reads {folder}, which is not there: fetch it with `tnlm-train data get fineweb10B`, "
            "or give the folder of your shards"
        )
    return folder


def _corpus_tokenizer(config: TrainConfig) -> Tokenizer:
    if config.tokenizer not in ("bytes", "bpe1024"):
        raise ValueError(f'the embedded corpus is read as "bpe1024" or "bytes", got tokenizer={config.tokenizer!r}')
    return tokenizers.get("bytes") if config.tokenizer == "bytes" else corpus.embedded_tokenizer()
