"""A model and data so small that a run takes milliseconds a step; sizes pairwise different."""

from pathlib import Path

import numpy as np

from tnlm.config import ModelConfig
from tnlm.training.config import TrainConfig
from tnlm.training.data.shards import write_shard

VOCAB = 53


def write_data(folder: Path, sizes: tuple[int, ...] = (301, 157, 211), val: int = 150) -> Path:
    """Shards of ids in which each follows from the one before, with noise: something to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i, size in enumerate((val, *sizes)):
        ids = np.cumsum(rng.choice([1, 2, 7], size=size, p=[0.8, 0.1, 0.1])) % VOCAB
        write_shard(folder / (f"tiny_train_{i:06d}.bin" if i else "tiny_val_000000.bin"), ids)
    return folder


def small_config(tmp_path: Path, name: str = "run", **changes) -> TrainConfig:
    """20 steps of 4 sequences of 6 tokens; the data is written on first use."""
    data = tmp_path / "data"
    if not data.exists():
        write_data(data)
    defaults = {
        "model": ModelConfig.released(n_layer=1, n_head=2, d_model=12, d_hidden=14, d_vocab=VOCAB, n_ctx=6),
        "data": str(data),
        "tokenizer": "none",
        "steps": 20,
        "batch": 4,
        "micro_batch": 2,
        "val_every": 5,
        "val_tokens": 60,
        "log_every": 3,
        "save_every": 4,
        "threads": 1,
        "momentum_warmup_steps": 8,
        "device": "cpu",
        "out": str(tmp_path / name),
    }
    return TrainConfig(**{**defaults, **changes})
