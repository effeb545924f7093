"""A ``tnlm.Transformer`` as a transformers model, with that library's loading, generation, caches and masks."""

import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from tnlm.cache import Cache, LayerCache, check_alike
from tnlm.checkpoints.checkpoint import check_weights
from tnlm.config import METADATA_KEYS, ModelConfig
from tnlm.transformer import Transformer, check_ids

_MODEL_FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))
_TRANSFORMERS_KEYS = {
    *(field.name for field in dataclasses.fields(PreTrainedConfig)),
    *GenerationConfig().to_dict(),
    *METADATA_KEYS,
    *"attn_implementation experts_implementation name_or_path num_labels output_attentions use_cache".split(),
}


class TnlmConfig(PreTrainedConfig):
    """A transformers configuration with the fields of :class:`tnlm.ModelConfig`; both write the same ``config.json``.

    Raises:
        ValueError: A field is missing, has a value that :class:`tnlm.ModelConfig` refuses, or is known to neither
            library.
    """

    model_type = "tnlm"
    keys_to_ignore_at_inference = ["cache"]
    attribute_map = {
        "vocab_size": "d_vocab",
        "hidden_size": "d_model",
        "intermediate_size": "d_hidden",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "head_dim": "d_head",
        "max_position_embeddings": "n_ctx",
    }

    def __init__(self, **values: Any) -> None:
        known = {*_TRANSFORMERS_KEYS, *_MODEL_FIELDS}
        unknown = sorted(key for key in values if key not in known and not key.startswith("_"))
        if unknown:
            raise ValueError(f"config has keys that neither tnlm nor transformers knows: {', '.join(unknown)}")
        config = ModelConfig.from_dict({key: values.pop(key) for key in _MODEL_FIELDS if key in values})
        others = {key: value for key, value in values.items() if key not in METADATA_KEYS}
        super().__init__(**others, **config.to_dict())  # which makes every field an attribute

    @property
    def model_config(self) -> ModelConfig:
        """The same configuration as tnlm's own class."""
        return ModelConfig.from_dict({key: getattr(self, key) for key in _MODEL_FIELDS})

    @property
    def d_head(self) -> int:
        return self.model_config.d_head

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "tnlm", **self.model_config.to_dict()}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class TnlmForCausalLM(PreTrainedModel, GenerationMixin):
    """A :class:`tnlm.Transformer` with the methods of a transformers model and unchanged parameter names.

    Padding ids (``d_vocab_used`` and above) are refused as input and never generated.
    """

    config_class = TnlmConfig
    config: TnlmConfig
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]

    def __init__(self, config: TnlmConfig, transformer: Transformer | None = None) -> None:
        super().__init__(config)
        transformer = Transformer(config.model_config) if transformer is None else transformer
        # In a list, which torch does not register as a submodule: that would put a prefix before parameter names.
        self._held = [transformer]
        self._modules = transformer._modules
        self.post_init()

    @property
    def transformer(self) -> Transformer:
        """The wrapped model; its submodules are those of this one."""
        return self._held[0]

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """The model of a folder or repository, as in transformers, but every weight must be found.

        Raises:
            ValueError: Weights are missing, unexpected, of another shape, or not finite in the requested dtype.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **options)
        model, info = loaded
        wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(wrong.values()):
            said = "; ".join(f"{kind.split('_')[0]} {', '.join(keys) or 'none'}" for kind, keys in wrong.items())
            raise ValueError(f"the weights do not fit the config: {said}. tnlm.load converts published layouts")
        check_weights(model)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        """Write the model to a folder, as in transformers; a ValueError before writing if a weight is not finite."""
        check_weights(self)
        super().save_pretrained(*args, **options)

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: :class:`tnlm.Transformer` initialises itself, and loading is strict."""

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.unembed

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Tensor | None = None,
        labels: Int[Tensor, "batch seq"] | None = None,
        cache: DynamicCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits after the softcap; with ``labels`` also the mean next-token cross-entropy in nats.

        Args:
            attention_mask: (batch, past + seq), 1 for tokens and 0 for padding on the right, which is exact: no token
                sees a later one. Ids at masked positions are ignored.
            labels: Ids to predict, not shifted; those that are -100 are left out of the mean.
            cache: Keys and values of the earlier positions, a ``DynamicCache`` of transformers.
            logits_to_keep: Number of last positions to return logits for, or the indices of positions; 0 means all.

        Raises:
            ValueError: Padding on the left or a hole in the mask, an id out of range, a cache of another class or
                model, or an option that this model does not have.
        """
        ignored = sorted(name for name, value in others.items() if value is not None and value is not False)
        if ignored:
            raise ValueError(
                f"forward has no {', '.join(ignored)}; for activations use tnlm.lens.hook(model.transformer)"
            )
        past = (
            _Past(cache, self.config.model_config) if cache is not None and (use_cache is None or use_cache) else None
        )
        start = 0 if past is None else past.length
        if attention_mask is not None:
            input_ids = _apply_mask(attention_mask, input_ids, start, stateless=_stateless(self.config))
        if input_ids.device.type != "meta" and not torch.compiler.is_compiling():
            self.transformer.check_tokens(input_ids, start=start, limit=self.config.d_vocab_used)
            check_ids(input_ids, self.config.d_vocab_used)
        last = isinstance(logits_to_keep, int) and logits_to_keep == 1
        logits = self.transformer(input_ids, cache=past, last=last)
        if not last:
            logits = logits[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().mT, labels[:, 1:].long())
        out = CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)
        return out.to_tuple() if return_dict is False else out

    def generate(self, *args: Any, **options: Any) -> Any:
        """Generated ids, as in transformers, except that padding ids are never generated."""
        padding = list(range(self.config.d_vocab_used, self.config.d_vocab))
        if padding:
            options["suppress_tokens"] = [*(options.get("suppress_tokens") or []), *padding]
        return super().generate(*args, **options)


def wrap(model: Transformer) -> TnlmForCausalLM:
    """A transformers model that runs ``model`` itself, with the same modules and parameters.

    Raises:
        ValueError: ``model`` is not a :class:`tnlm.Transformer`.
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"wrap(model) needs a tnlm.Transformer, got {type(model).__name__}")
    return TnlmForCausalLM(TnlmConfig(**model.config.to_dict()), model)


class _PastLayer(LayerCache):
    """One layer of a transformers cache, with keys of all query-key pairs side by side.

    Keys are ``(batch, n_head, seq, n_qk * d_qk)`` there.
    """

    def __init__(self, cache: DynamicCache, layer: int) -> None:
        self.cache, self.layer = cache, layer

    def extend(self, keys: list[Tensor], values: Tensor) -> tuple[list[Tensor], Tensor]:
        joined, n_qk = torch.cat(keys, dim=-1), len(keys)
        if self.layer < len(self.cache.layers) and (past := self.cache.layers[self.layer]).get_seq_length():
            check_alike([past.keys.transpose(1, 2), past.values.transpose(1, 2)], [joined, values])
        joined, values = self.cache.update(joined.transpose(1, 2), values.transpose(1, 2), self.layer)
        return list(joined.transpose(1, 2).chunk(n_qk, dim=-1)), values.transpose(1, 2)


class _Past(Cache):
    """A transformers cache as a :class:`tnlm.cache.Cache`.

    transformers's layers replace their tensors and never write into them, so shallow copies of the layers make a fork.
    """

    def __init__(self, cache: DynamicCache, config: ModelConfig) -> None:
        if not isinstance(cache, DynamicCache):
            raise ValueError(
                f"cache must be a DynamicCache, got {type(cache).__name__}: unused slots would count as keys, since no "
                "softmax masks them"
            )
        self.cache, self.config = cache, config
        lengths = [layer.get_seq_length() for layer in cache.layers]
        if any(lengths) and lengths != config.n_layer * lengths[:1]:
            raise ValueError(
                f"cache must hold as many positions in each of n_layer={config.n_layer} layers, got {lengths}; "
                "it was filled by another model: begin a new one"
            )
        self.layers = [_PastLayer(cache, layer) for layer in range(config.n_layer)]

    @property
    def length(self) -> int:  # type: ignore[override]
        return int(self.cache.get_seq_length())

    def fork(self) -> "_Past":
        trial = copy.copy(self.cache)
        trial.layers = [copy.copy(layer) for layer in self.cache.layers]
        return _Past(trial, self.config)

    def adopt(self, trial: Cache) -> None:
        self.cache.layers = trial.cache.layers  # type: ignore[attr-defined]

    def advance(self, new: int) -> None:
        """Does nothing: every layer has grown in :meth:`_PastLayer.extend`."""


def _stateless(config: TnlmConfig) -> bool:
    """Whether no position sees another, so that a cache has nothing to keep."""
    return config.attention == "none" or config.n_layer == 0


def _apply_mask(
    mask: Tensor, tokens: Int[Tensor, "batch seq"], start: int, *, stateless: bool
) -> Int[Tensor, "batch seq"]:
    """The tokens with id 0 at masked positions, which no unmasked position sees.

    Raises:
        ValueError: The mask has another shape, or a token follows a masked position.
    """
    batch, seq = tokens.shape
    if mask.ndim != 2 or mask.shape[0] != batch or (mask.shape[1] != start + seq and not stateless):
        raise ValueError(
            f"attention_mask must be (batch, past + seq) = ({batch}, {start + seq}), got {tuple(mask.shape)}; with "
            "fewer tokens than the mask covers, pass the cache of the others"
        )
    seen = mask.bool()
    if torch.compiler.is_compiling() or mask.device.type == "meta":
        return tokens
    if not seen[:, 0].all() or (seen[:, 1:] & ~seen[:, :-1]).any():
        raise ValueError(
            "padding must be on the right: these positions are counted from the first token, and rotary tables rounded "
            'to bf16 are not the same after a shift. Set padding_side="right"; to generate, batch prompts of one '
            "length or take batch_size=1"
        )
    return tokens.masked_fill(~seen[:, -seq:], 0)
