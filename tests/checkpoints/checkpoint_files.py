"""Small checkpoints written as others would have written them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny_models import build
from tnlm.checkpoints.checkpoint import to_published
from tnlm.config import ModelConfig
from tnlm.transformer import Transformer


def published_model(**changes: Any) -> Transformer:
    """The released architecture at n_head 3, d_head 10, 13 ids: random in every parameter, float32."""
    sizes = {"d_vocab": 13, "n_layer": 2, "n_head": 3, "d_model": 30}
    return build(ModelConfig.released(**{**sizes, **changes}), torch.float32)


def published_config(model: Transformer, **changes: Any) -> dict[str, Any]:
    """Its ``config.json``; a change of None removes the key."""
    c = model.config
    config = {
        "vocab_size": c.d_vocab,
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "n_embd": c.d_model,
        "squared_mlp": c.mlp == "squared",
        "bilinear": c.mlp in ("bilinear", "swiglu"),
        "expansion_factor": 4,
        "gated": c.mlp == "swiglu",
        "squared_attn": c.attention in ("bilinear", "squared", "squared_normalized"),
        "bilinear_attn": c.attention in ("bilinear", "differential"),
        "step": 9726,
    }
    return {key: value for key, value in {**config, **changes}.items() if value is not None}


def published_state(model: Transformer) -> dict[str, Tensor]:
    return to_published(model.state_dict(), model.config)


def write_published(
    folder: Path, model: Transformer, state: Any = None, name: str = "pytorch_model.bin", **changes: Any
) -> Path:
    """A folder as on the Hub; ``state`` instead of the model's own, changes to the config."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(published_state(model) if state is None else state, folder / name)
    (folder / "config.json").write_text(json.dumps(published_config(model, **changes)))
    return folder


def same_state(a: Transformer, b: Transformer) -> bool:
    """Equal bits, dtypes and names."""
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(one[k].dtype == two[k].dtype and torch.equal(one[k], two[k]) for k in one)


def edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
