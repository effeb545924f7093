"""The layouts in which weights were published, each with a reader of its config and a strict conversion table."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tnlm.checkpoints.layouts.decomposition import DECOMPOSITION
from tnlm.checkpoints.layouts.published import PUBLISHED, check_asked, to_published
from tnlm.checkpoints.layouts.table import TIE, Layout, Shapes, Table
from tnlm.checkpoints.layouts.toys import CYCLE, TOY, TWO_LAYER
from tnlm.checkpoints.weightfiles import list_names
from tnlm.config import LATER_FIELDS, ModelConfig
from tnlm.transformer import Transformer

__all__ = ["LAYOUTS", "OURS", "Layout", "Table", "recognise", "structure", "tie", "to_published"]


def _read_ours(raw: Mapping[str, Any], shapes: Shapes, source: str, attention: str | None) -> ModelConfig:
    config = ModelConfig.from_dict(raw, source=source)
    if missing := sorted(config.to_dict().keys() - raw.keys() - LATER_FIELDS):
        raise ValueError(
            f"{source} must hold every field of ModelConfig, missing {', '.join(missing)}: "
            "their defaults may not be what the weights were trained with"
        )
    check_asked(config.attention, attention, source)
    _check_sizes(config, shapes, source)
    return config


def _check_sizes(config: ModelConfig, shapes: Shapes, source: str) -> None:
    """Check the config's sizes against the file's shapes before modules are built, which could fill the memory."""
    if config.n_block_params and config.n_layer > len(shapes):
        raise ValueError(f"{source}: n_layer={config.n_layer} layers cannot come from a file of {len(shapes)} tensors")
    said = {"embed.w_e": (config.d_vocab, config.d_model)}
    if config.n_layer and config.attention != "none":
        said["blocks.0.attn.w_q1"] = (config.n_head * config.d_qk, config.d_model)
    if config.n_layer and config.mlp != "none":
        said["blocks.0.mlp.w_l"] = (config.d_hidden, config.d_model)
    missing = [key for key in said if key not in shapes]
    wrong = [f"{key} {shapes[key]} instead of {want}" for key, want in said.items() if shapes.get(key, want) != want]
    if missing or wrong:
        raise ValueError(
            f"{source} does not fit the weights: missing {list_names(missing)}; wrong shape {list_names(wrong)}"
        )


def _our_table(config: ModelConfig, raw: Mapping[str, Any], shapes: Shapes) -> Table:
    table = Table()
    for name, p in structure(config).state_dict().items():
        table.add(name, name, p.shape)
    return table


class _WithoutInit(TorchFunctionMode):
    """Skips ``torch.nn.init``: meta tensors have no values, and initialising them costs a second of imports."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def structure(config: ModelConfig) -> Transformer:
    """A model without values: its parameters are on the meta device."""
    with _WithoutInit():
        return Transformer(config, device="meta")


OURS = Layout("tnlm", (r"embed\.w_e",), _read_ours, _our_table)
LAYOUTS = (OURS, PUBLISHED, DECOMPOSITION, TWO_LAYER, CYCLE, TOY)


def recognise(keys: Sequence[str], *, label: str) -> Layout:
    """The layout of a state dict, recognised by its keys.

    Raises:
        ValueError: The keys fit none; names some of them.
    """
    for layout in LAYOUTS:
        if layout.recognises(keys):
            return layout
    raise ValueError(
        f"checkpoint {label} has none of the known layouts ({', '.join(layout.name for layout in LAYOUTS)}): "
        f"its keys are {list_names(keys)}"
    )


def tie(tensors: dict[str, Tensor], table: Table, raw: Mapping[str, Any], *, label: str) -> None:
    """If the config has ``tie_word_embeddings``, add the missing unembedding to ``tensors``: it is the embedding.

    Raises:
        ValueError: The file has an unembedding that differs from the embedding.
    """
    if raw.get(TIE) is not True:
        return
    embed, head = table.rows["embed.w_e"][0][0], table.rows["unembed.w_u"][0][0]
    if embed in tensors and head in tensors and not torch.equal(tensors[embed], tensors[head]):
        raise ValueError(
            f"checkpoint {label} says {TIE}=true, but {head} differs from {embed}: one of the two is wrong"
        )
    if embed in tensors:
        tensors[head] = tensors[embed]
