"""Inputs of a run: training loader, validation set and tokenizer, opened from the names in its configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from tnlm.checks import as_path
from tnlm.text import tokenizer as tokenizers
from tnlm.text.tokenizer import Tokenizer
from tnlm.training.config import TrainConfig, load_config
from tnlm.training.data import shards
from tnlm.training.data.sources import find_data
from tnlm.training.data.stream import Loader, Order, TokenStream, Validation
from tnlm.training.run.distributed import World


@dataclass(frozen=True)
class Inputs:
    """The data that one rank reads, with its tokenizer."""

    loader: Loader
    validation: Validation
    tokenizer: Tokenizer | None
    facts: dict[str, Any]
    """JSON values that identify the data: recorded in the run's ``start`` event."""
    text_bytes: int | None
    """Bytes of text in the validation tokens; None without a tokenizer."""


def open_inputs(config: TrainConfig, world: World) -> Inputs:
    """Find, check and open the data and the tokenizer, before the first step.

    Raises:
        ValueError: Shards are missing or damaged, the vocabulary is not the model's, or there are too few tokens.
    """
    train, validation, sidecar = find_data(config, world)
    shards.refuse_duplicates(train, validation)
    tokenizer = find_tokenizer(config, train[0].parent, sidecar)
    d_vocab = sidecar.get("d_vocab", tokenizer.d_vocab if tokenizer is not None else config.model.d_vocab_used)
    if d_vocab != config.model.d_vocab_used:
        raise ValueError(
            f"the model must have the vocabulary of the data, got d_vocab={config.model.d_vocab_used} and "
            f"{d_vocab} ids in {train[0].parent}; pass --model.d-vocab {d_vocab}"
        )
    stream, held_out = (TokenStream(paths, allow_truncated=config.allow_truncated) for paths in (train, validation))
    order: Order = "shuffle" if config.shuffle else "published" if config.recipe == "replication-exact" else "stream"
    loader = Loader(
        stream,
        seq=config.seq,
        batch=config.batch,
        micro_batch=config.micro_batch,
        d_vocab=d_vocab,
        rank=world.rank,
        world_size=world.size,
        order=order,
        seed=config.seed,
        bos_align=config.bos_align,
        eot=tokenizer.eot if tokenizer is not None else None,
    )
    evaluated = Validation(held_out, seq=config.seq, tokens=config.val_tokens, d_vocab=d_vocab)
    facts: dict[str, Any] = {
        "source": config.data,
        "shards": len(train),
        "tokens": len(stream),
        "windows": loader.windows if order != "published" else None,
        "tokens_dropped": loader.tokens_dropped if order != "published" else None,
        "fingerprint": stream.fingerprint,
        "shards_read": loader.shards_read(config.steps),
        "order": order,
        "val_file": validation[0].name,
        "val_fingerprint": evaluated.fingerprint,
        "tokenizer": tokenizer.name if tokenizer is not None else None,
        "tokenizer_hash": tokenizer.hash if tokenizer is not None else None,
        **{key: sidecar[key] for key in ("corpus_sha256", "python") if key in sidecar},
    }
    text_bytes = evaluated.text_bytes(tokenizer) if tokenizer is not None else None
    return Inputs(loader, evaluated, tokenizer, facts, text_bytes)


def token_counts(run: str | Path) -> Int64[Tensor, " d_vocab_used"]:
    """How often each id occurs in the training shards that the configuration of a run names.

    For ``weights=`` and ``token_weights=`` of :mod:`tnlm.interp`. All of these shards are counted, also where the run
    read a part of them or repeated them. Reads every shard: about half a second per 100M tokens.

    Args:
        run: Folder of a training run.

    Raises:
        ValueError: The folder holds no run, shards are missing or damaged, or a token is no id of the model.
    """
    config = load_config(as_path("run", run) / "config.json")
    train, _, _ = find_data(config, World.from_environment())
    return TokenStream(train, allow_truncated=config.allow_truncated).counts(config.model.d_vocab_used)


def find_tokenizer(config: TrainConfig, folder: Path, sidecar: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer beside the shards, else the one their sidecar names, else the configuration's; None for ``none``.

    Raises:
        ValueError: There is none of that name.
    """
    if config.tokenizer == "none" or sidecar.get("tokenizer", {}) is None:
        return None
    if (folder / tokenizers.FILE_NAME).is_file():
        return Tokenizer.load(folder)
    name = sidecar["tokenizer"]["name"] if "tokenizer" in sidecar else config.tokenizer
    try:
        return tokenizers.get(name)
    except ValueError as error:
        raise ValueError(f"{error}. Without text, samples and bits per byte: --tokenizer none") from None
