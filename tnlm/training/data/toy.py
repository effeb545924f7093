"""The toy language ``data toy cycles``: sequences that repeat a random cycle of distinct tokens.

Each sequence draws k distinct tokens in random order and repeats them to its length: ``a b c a b c a ...``. From
the second repetition on the next token is certain, and the mechanism that predicts it is known (find the token that
followed this one before: induction), so it is the smallest language for checking an interpretation.
"""

import math
import os
import warnings
from typing import Any

import numpy as np

from tnlm.training.data import shards


def cycles(n_sequences: int, *, seq: int, d_vocab: int, period: int | tuple[int, int], seed: int = 0) -> np.ndarray:
    """Sequences, (n_sequences, seq), of ids below ``d_vocab``, each a repeated cycle of ``period`` distinct ids.

    Args:
        period: Length of every cycle, or (lowest, highest), drawn uniformly for each sequence.

    Raises:
        ValueError: A period is below 2, longer than the vocabulary, or so long that no token repeats.
    """
    low, high = (period, period) if isinstance(period, int) else period
    if not 2 <= low <= high <= d_vocab or high >= seq or n_sequences < 1:
        raise ValueError(
            "a cycle must have 2 <= period <= d_vocab distinct tokens and repeat within seq, got "
            f"period {low}..{high}, d_vocab={d_vocab}, seq={seq}, n_sequences={n_sequences}"
        )
    rng = np.random.default_rng(seed)
    periods = rng.integers(low, high + 1, n_sequences)
    tokens = rng.permuted(np.tile(np.arange(d_vocab), (n_sequences, 1)), axis=1)[:, :high]
    places = np.arange(seq) % periods[:, None]
    return np.take_along_axis(tokens, places, axis=1)


def write_cycles(
    out: str | os.PathLike,
    *,
    seq: int = 32,
    d_vocab: int = 64,
    period: int | tuple[int, int] = (4, 12),
    train_sequences: int = 100_000,
    val_sequences: int = 1_000,
    seed: int = 0,
) -> dict[str, Any]:
    """Write cycles as shards ``train_000001.bin`` and ``val_000000.bin`` with a sidecar: all of them, or none.

    A training window has ``seq + 1`` tokens and overlaps the next by one, so train with ``n_ctx = seq``: each
    window is then one sequence and the first token of the next, which nothing predicts (a share 1/seq of the loss).

    Returns:
        The sidecar.

    Raises:
        ValueError: The periods do not fit, ``out`` holds other shards, or another process writes to it.

    Warns:
        UserWarning: Validation sequences that occur in training as well, with their number.
    """
    low, high = (period, period) if isinstance(period, int) else period
    train, val = (
        cycles(n, seq=seq, d_vocab=d_vocab, period=(low, high), seed=2 * seed + stream)
        for stream, n in enumerate((train_sequences, val_sequences))
    )
    trained = {row.tobytes() for row in train}
    if repeated := sum(row.tobytes() in trained for row in val):
        warnings.warn(
            f"{repeated:,} of the {val_sequences:,} validation sequences also occur in training, so their loss may be "
            f"memorised: {d_vocab} tokens have only {math.perm(d_vocab, low):,} cycles of period {low}; take a larger "
            "vocabulary, longer periods or fewer training sequences",
            stacklevel=2,
        )
    splits = {}
    with shards.all_or_none(out) as folder:
        for name, split, sequences in (("train_000001.bin", "train", train), ("val_000000.bin", "val", val)):
            # one more token closes the last window
            tokens = np.append(sequences.reshape(-1), sequences[0, 0])
            shards.write_shard(folder / name, tokens)
            splits[split] = {"tokens": len(tokens), "documents": len(sequences)}
        facts = {"task": "cycles", "seq": seq, "period": [low, high], "seed": seed}
        return shards.write_sidecar(folder, d_vocab=d_vocab, eot=None, tokenizer=None, source=facts, splits=splits)
