"""The transformer-lens interface: the same forward and the same parameters, with a hook at every named point.

``hook(model)`` gives a transformer-lens ``HookedRootModule``. Names, shapes and tools are transformer-lens's; what its
analyses assume and these models do otherwise (x0 mixing, value residual, softcap) is handled: see
:class:`tnlm.lens.residual.ResidualParts`. The only module that imports transformer_lens.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Int, Shaped
from torch import Tensor, nn
from transformer_lens import ActivationCache, FactoredMatrix, HookedRootModule
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import Slice
from transformer_lens.utilities.activation_functions import SOFTCAP_DISABLED

from tnlm.config import ModelConfig
from tnlm.lens.residual import ResidualParts
from tnlm.lens.weights import ModelWeights, view
from tnlm.points import Point, refuse_compiled
from tnlm.text import tokenizer as tokenizers
from tnlm.text.sampling import generate
from tnlm.text.tokenizer import Tokenizer
from tnlm.transformer import Transformer, check_ids

MAX_CACHE_BYTES = 2**34
Names = str | Sequence[str] | Callable[[str], bool] | None
"""One name of a point, several, or a predicate on names; None is all of them."""
Positions = int | tuple | list | Tensor | Slice | None
"""transformer-lens's slices: an index, the arguments of ``slice``, several indices; None is everything."""


def hook(model: "Transformer | HookedModel", *, tokenizer: Tokenizer | None = None) -> "HookedModel":
    """A hooked view of ``model``: every named point takes hooks, every parameter is the model's own.

    The structure is copied, parameters and plain torch hooks are shared: training one trains both, and hooks that you
    registered on ``model`` act here too. The view always computes attention by its definition
    (``implementation="eager"``), so that each point exists and the arithmetic does not depend on who listens.

    Args:
        tokenizer: Reads text; ``None`` is GPT-2's for models with its 50257 ids, looked for when text first comes.

    Raises:
        ValueError: Not a :class:`tnlm.Transformer`, or compiled as a whole or in part.
    """
    refuse_compiled(model)
    if isinstance(model, HookedModel):
        return model
    if not isinstance(model, Transformer):
        inner = "; pass its .module" if hasattr(model, "module") else ""
        raise ValueError(f"hook(model) needs a tnlm.Transformer, got {type(model).__name__}{inner}")
    return HookedModel(view(model, _Point), tokenizer)


class HookedModel(ModelWeights, HookedRootModule):
    """What :func:`hook` returns: a :class:`tnlm.Transformer` with transformer-lens's methods and weight names.

    Logits are those after the softcap, except where a method says otherwise. Weights come in transformer-lens's
    layout, (in, out) per head: those of the whole model (``W_E``, ``W_Q``) as copies, those of a part
    (``blocks[0].attn.W_Q``) as views of its parameters.

    A hook gets a tensor of its own: what it edits in place or returns goes on from its point, and changes neither other
    parts of the model nor anything that was cached. A value of another shape, dtype or device is a ValueError.
    """

    def __init__(self, view: Transformer, tokenizer: Tokenizer | None) -> None:
        super().__init__()
        self.__dict__["_view"] = view  # not a submodule: its children are ours, without a prefix
        self.__dict__["_modules"] = view._modules
        self._tokenizer = tokenizer
        view.set_implementation("eager")
        self.eval()
        self.setup()

    # Running

    @torch.compiler.disable(reason="hooks do not fire inside a compiled graph; compile the plain model")
    def forward(
        self,
        input: Int[Tensor, "batch seq"] | Int[Tensor, " seq"] | str | list[str],
        return_type: Literal["logits", "loss", "both"] | None = "logits",
        *,
        loss_per_token: bool = False,
    ) -> Any:
        """Logits ``(batch, seq, d_vocab)``, the mean next-token cross-entropy in nats, both, or None.

        Raises:
            ValueError: An id is not below ``d_vocab_used``, or the input is refused by :class:`tnlm.Transformer`.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(f'return_type must be "logits", "loss", "both" or None, got {return_type!r}')
        tokens = self._tokens(input)
        logits = self._view(tokens)
        if return_type in ("logits", None):
            return logits if return_type else None
        if tokens.shape[1] < 2:
            raise ValueError(f"a loss needs at least 2 tokens, got {tokens.shape[1]}")
        reduction = "none" if loss_per_token else "mean"
        loss = F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:].long(), reduction=reduction)
        return loss if return_type == "loss" else (logits, loss)

    def compile(self, *args: Any, **options: Any) -> None:
        raise ValueError("hooks do not fire inside a compiled graph; compile the plain model, hook the eager one")

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[tuple[str | Callable, Callable]] = (),
        bwd_hooks: Sequence[tuple[str | Callable, Callable]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator["HookedModel"]:
        """Hooks that are removed when the context ends, whatever happened inside; nobody else's are touched.

        Raises:
            ValueError: Not pairs, a name is no point (close matches are named), or a part was compiled meanwhile.
        """
        refuse_compiled(self)
        for pair in (*fwd_hooks, *bwd_hooks):
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not callable(pair[1]):
                raise ValueError(f"hooks must be a list of pairs (name, function), got {pair!r} in it")
            self.names(pair[0])
        with super().hooks(list(fwd_hooks), list(bwd_hooks), reset_hooks_end, clear_contexts):
            yield self

    def add_hook(self, name: str | Callable[[str], bool], hook: Callable, *args: Any, **options: Any) -> None:
        """A hook that stays until ``reset_hooks()``; see transformer-lens. Unknown names are refused."""
        refuse_compiled(self)
        self.names(name)
        super().add_hook(name, hook, *args, **options)

    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: Sequence[tuple[str | Callable, Callable]] = (),
        bwd_hooks: Sequence[tuple[str | Callable, Callable]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """One forward with temporary hooks, called as ``f(value, hook=point)``; what they return replaces the value.

        Raises:
            ValueError: See :meth:`hooks`; or backward hooks that would be gone before any backward pass.
        """
        if bwd_hooks and reset_hooks_end:
            raise ValueError(
                "bwd_hooks must outlive the forward: use `with model.hooks(bwd_hooks=...): model(x, "
                'return_type="loss").backward()`, or pass reset_hooks_end=False'
            )
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*model_args, **model_kwargs)

    def run_with_cache(  # type: ignore[override]
        self,
        input: Int[Tensor, "batch seq"] | Int[Tensor, " seq"] | str | list[str],
        *model_args: Any,
        names_filter: Names = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Positions = None,
        max_bytes: int = MAX_CACHE_BYTES,
        **model_kwargs: Any,
    ) -> tuple[Any, "ResidualCache"]:
        """One forward and every activation it passed, detached.

        Args:
            names_filter: Names of points, one or several, or a predicate on names; ``None`` is all of them.
            incl_bwd: Also run backward from the loss (``return_type="loss"``) and keep each gradient as ``NAME_grad``;
                it adds to the parameters' ``grad``.
            pos_slice: Positions to keep: queries in scores and patterns.
            max_bytes: Refuse to hold more; two arrays per layer grow with ``n_head * seq**2``.

        Raises:
            ValueError: The filter names or matches no point, or the cache would exceed ``max_bytes``.
        """
        tokens = self._tokens(input)
        if remove_batch_dim and tokens.shape[0] != 1:
            raise ValueError(f"remove_batch_dim=True needs a batch of 1, got {tokens.shape[0]}")
        if incl_bwd and not torch.is_grad_enabled():
            raise ValueError("incl_bwd=True needs gradients, which are switched off here: leave torch.no_grad()")
        if incl_bwd and "loss" not in (*model_args, model_kwargs.get("return_type")):
            raise ValueError('incl_bwd=True needs a scalar to differentiate: pass return_type="loss"')
        names = self.names(names_filter)
        self._check_bytes(names, tokens, max_bytes, copies=1 + incl_bwd)
        values, fwd, bwd = self.get_caching_hooks(
            names, incl_bwd, device, remove_batch_dim=remove_batch_dim, pos_slice=pos_slice
        )
        with self.hooks(fwd, bwd, reset_hooks_end, clear_contexts):
            out = self(tokens, *model_args, **model_kwargs)
            if incl_bwd:
                out.backward()
        return out, ResidualCache(values, self, has_batch_dim=not remove_batch_dim)

    def get_caching_hooks(  # type: ignore[override]
        self,
        names_filter: Names = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Positions = None,
    ) -> tuple[dict[str, Tensor], list, list]:
        """``(cache, fwd_hooks, bwd_hooks)``: hooks that fill ``cache`` with copies, not yet installed."""
        values: dict[str, Tensor] = {} if cache is None else cache
        positions = Slice.unwrap(pos_slice)

        def keep(value: Tensor, hook: HookPoint, suffix: str) -> None:
            assert hook.name is not None
            # (batch, seq, ...) at every point but scores and pattern, which are (batch, n_head, seq_q, seq_k).
            axis = 2 if hook.name.endswith(("hook_pattern", "hook_attn_scores", "hook_attn_scores2")) else 1
            value = positions.apply(value.detach().to(device), dim=axis)
            values[hook.name + suffix] = value[0] if remove_batch_dim else value

        names = self.names(names_filter)
        fwd = [(name, partial(keep, suffix="")) for name in names]
        return values, fwd, [(name, partial(keep, suffix="_grad")) for name in names] if incl_bwd else []

    def add_caching_hooks(self, names_filter: Names = None, *args: Any, **options: Any) -> dict[str, Tensor]:
        """Hooks that fill the returned dict on every forward until ``reset_hooks()``; see transformer-lens."""
        refuse_compiled(self)
        return super().add_caching_hooks(self.names(names_filter), *args, **options)

    def names(self, names_filter: Names = None) -> list[str]:
        """The points that a filter selects, in the order of the forward's modules.

        Raises:
            ValueError: A name is unknown (close matches are named), or nothing is selected.
        """
        if names_filter is None:
            return list(self.hook_dict)
        if callable(names_filter):
            chosen = [name for name in self.hook_dict if names_filter(name)]
            if not chosen:
                raise ValueError(f"the filter must select a point; none of {len(self.hook_dict)} names passed it")
            return chosen
        if not isinstance(names_filter, Iterable):
            raise ValueError(f"names must be a name, several, a predicate or None for all, got {names_filter!r}")
        wanted = [names_filter] if isinstance(names_filter, str) else list(names_filter)
        for name in wanted:
            if name not in self.hook_dict:
                raise ValueError(f"the model has no point {name!r}; close: {_close(name, self.hook_dict)}")
        if not wanted:
            raise ValueError("the filter must select a point, got an empty list; None selects all")
        return wanted

    def generate(
        self, input: Int[Tensor, "batch seq"] | str, max_new_tokens: int = 10, **options: Any
    ) -> Int[Tensor, "batch longer"] | str:
        """:func:`tnlm.generate` through the hooks; text in, text out.

        Hooks see only the new positions; ``cache="none"`` shows them the whole sequence at every step.
        """
        out = generate(self._view, self._tokens(input), max_new_tokens, **options)
        return self.tokenizer.decode(out[0].tolist()) if isinstance(input, str) else out

    # Text

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer given to :func:`hook`, or GPT-2's.

        Raises:
            ValueError: None was given and the vocabulary is not GPT-2's.
        """
        if self._tokenizer is None:
            if self.config.d_vocab_used != 50257:
                raise ValueError(
                    f"no tokenizer is known for {self.config.d_vocab_used} ids; pass token ids, or hook(model, "
                    "tokenizer=tnlm.text.tokenizer.get(...))"
                )
            self._tokenizer = tokenizers.get("gpt2")
        return self._tokenizer

    def to_tokens(self, input: str | list[str], prepend_bos: bool | None = False) -> Int[Tensor, "batch seq"]:
        """Ids of one text or of several that have equally many tokens, ``(batch, seq)``.

        ``prepend_bos`` is off, unlike in transformer-lens: these models were trained without a first token of their
        own. ``True`` puts the end-of-text id first, which in training precedes each document.

        Raises:
            ValueError: The texts differ in length: padding is not neutral for attention without softmax.
        """
        rows = [self.tokenizer.encode(text) for text in ([input] if isinstance(input, str) else input)]
        if prepend_bos:
            if self.tokenizer.eot is None:
                raise ValueError(f"tokenizer {self.tokenizer.name!r} has no end-of-text id to prepend")
            rows = [[self.tokenizer.eot, *row] for row in rows]
        lengths = sorted({len(row) for row in rows})
        if len(lengths) != 1:
            raise ValueError(f"texts of one batch must have equally many tokens, got {lengths}; run them one by one")
        return torch.tensor(rows, dtype=torch.int64, device=self.embed.w_e.device)

    def to_string(self, tokens: Int[Tensor, "*batch seq"] | Sequence[int] | int) -> str | list[str]:
        """Text of one id or one sequence; a list of texts for a batch."""
        tokens = torch.as_tensor(tokens)
        if tokens.ndim > 1:
            return [self.tokenizer.decode(row) for row in tokens.tolist()]
        return self.tokenizer.decode(tokens.reshape(-1).tolist())

    def to_str_tokens(self, input: str | Int[Tensor, " seq"], prepend_bos: bool | None = False) -> list[str]:
        """The text of each token."""
        tokens = self.to_tokens(input, prepend_bos) if isinstance(input, str) else torch.as_tensor(input)
        return [self.tokenizer.decode([token]) for token in tokens.reshape(-1).tolist()]

    def to_single_token(self, text: str) -> int:
        """The id of a text that is exactly one token.

        Raises:
            ValueError: It is several, or none.
        """
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            raise ValueError(f"{text!r} must be one token, got {len(ids)}: {self.to_str_tokens(text)}")
        return ids[0]

    def tokens_to_residual_directions(self, tokens: str | int | Int[Tensor, "*any"]) -> Shaped[Tensor, "*any d_model"]:
        """Unembedding rows of some tokens, as copies: what the final residual is compared with, before the softcap."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        ids = torch.as_tensor(tokens, device=self.embed.w_e.device)
        self._check_ids(ids.reshape(1, -1))
        return F.embedding(ids, self.unembed.w_u)

    # Weights, as transformer-lens names and lays them out

    @property
    def config(self) -> ModelConfig:
        return self._view.config

    @property
    def cfg(self) -> TransformerBridgeConfig:
        """The configuration in transformer-lens's words, made anew at each access: read it, do not write to it."""
        c, cap = self.config, self.config.logit_softcap
        return TransformerBridgeConfig(
            d_model=c.d_model,
            d_head=c.d_head,
            n_layers=c.n_layer,
            n_ctx=c.n_ctx,
            n_heads=c.n_head,
            d_vocab=c.d_vocab,
            d_vocab_out=c.d_vocab,
            d_mlp=c.d_hidden,
            act_fn=c.mlp,
            eps=c.norm_eps,
            attn_only=c.mlp == "none",
            gated_mlp=c.mlp_gated,
            normalization_type="RMSPre" if c.norm == "rms" else None,
            uses_rms_norm=c.norm == "rms",
            use_qk_norm=c.qk_norm,
            use_attn_result=True,
            positional_embedding_type="rotary",
            default_prepend_bos=False,
            tokenizer_prepends_bos=False,
            model_name="tnlm",
            n_params=c.n_params,
            device=str(self.embed.w_e.device),
            dtype=self.embed.w_e.dtype,
            output_logits_soft_cap=SOFTCAP_DISABLED if cap is None else cap,
        )

    @property
    def adapter(self) -> SimpleNamespace:
        """Where transformer-lens's readouts look for what follows the unembedding: the softcap."""
        return SimpleNamespace(apply_output_logits_transform=self._view.softcap)

    @property
    def QK(self) -> FactoredMatrix:
        """``W_Q W_K^T`` of branch 1, ``(n_layer, n_head, d_model, d_model)``, without the factor ``1 / d_qk``.

        QK-norm and rotation lie between the two factors in the forward and are not part of it.
        """
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def QK2(self) -> FactoredMatrix:
        """The same of branch 2: bilinear and differential attention."""
        return FactoredMatrix(self.W_Q2, self.W_K2.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """What a head writes per unit of pattern from its own layer's normed input, ``(1 - lamb) W_V W_O``.

        The value residual adds :attr:`OV_first` times block 0's normed input; the two sum to ``attn_out``. In block 0
        both inputs are one, and its ``OV`` is all of it.
        """
        return FactoredMatrix(self.own_share()[:, None, None, None] * self.W_V, self.W_O)

    @property
    def OV_first(self) -> FactoredMatrix:
        """What a head writes from block 0's normed input, ``lamb W_V[0] W_O``; zero without value residual."""
        w_v = self.W_V
        return FactoredMatrix((1 - self.own_share())[:, None, None, None] * w_v[:1], self.W_O)

    # Checks

    def _tokens(self, input: Tensor | str | list[str]) -> Int[Tensor, "batch seq"]:
        texts = [input] if isinstance(input, str) else input
        if not isinstance(input, Tensor) and not (isinstance(texts, list) and all(isinstance(t, str) for t in texts)):
            raise ValueError(f"input must be ids in a tensor, a text or a list of texts, got {type(input).__name__}")
        tokens = input if isinstance(input, Tensor) else self.to_tokens(input)
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        self._view.check_tokens(tokens, limit=self.config.d_vocab_used)
        self._check_ids(tokens)
        return tokens.to(self.embed.w_e.device)

    def _check_ids(self, tokens: Int[Tensor, "batch seq"]) -> None:
        assert self.config.d_vocab_used is not None
        if tokens.device.type != "meta":
            check_ids(tokens, self.config.d_vocab_used)

    def _check_bytes(self, names: list[str], tokens: Tensor, max_bytes: int, copies: int) -> None:
        c, (batch, seq) = self.config, tokens.shape
        square = dict.fromkeys(("hook_attn_scores", "hook_attn_scores2", "hook_pattern"), c.n_head * seq)
        wide = dict.fromkeys(("hook_pre", "hook_pre_linear", "hook_post"), c.d_hidden)
        width = {**square, **wide, "hook_result": c.n_head * c.d_model, "hook_scale": 1}
        numbers = batch * seq * sum(width.get(name.rpartition(".")[2], c.d_model) for name in names)
        needed = copies * numbers * (self._view.compute_dtype or self.embed.w_e.dtype).itemsize
        if needed > max_bytes:
            raise ValueError(
                f"this cache would hold about {needed:,} bytes (batch={batch}, seq={seq}, {len(names)} points), "
                f"max_bytes={max_bytes:,}; name fewer points in names_filter, shorten the batch, or raise max_bytes"
            )


class ResidualCache(ResidualParts, ActivationCache):
    """Activations of one run, with transformer-lens's analyses; decompositions are those of :class:`ResidualParts`.

    No two entries share memory with each other or with the model: an entry may be edited in place.
    """

    def __getitem__(self, key: str | tuple) -> Tensor:
        """By full name, or transformer-lens's shorthand: ``cache["pattern", 0]``, ``cache["scale", 1, "ln2"]``."""
        if key in self.cache_dict:
            return self.cache_dict[key]
        if isinstance(key, tuple) and len(key) > 1 and key[1] is not None:
            name, layer, *kind = key
            layer = layer + self.model.config.n_layer if layer < 0 else layer
            # transformer-lens would read "k2" as the keys of layer 2.
            kinds = [f"{kind[0]}."] if kind and kind[0] else ["", "attn.", "mlp."]
            for full in (f"blocks.{layer}.{k}hook_{name}" for k in kinds):
                if full in self.cache_dict:
                    return self.cache_dict[full]
            key = (name, layer, *kind)
        try:
            return super().__getitem__(key)
        except KeyError as error:
            name = error.args[0]
            close = _close(name, self.cache_dict)
            raise KeyError(f"{name!r} was not cached; close: {close}. run_with_cache must cache it") from None

    def apply_slice_to_batch_dim(self, batch_slice: Positions) -> "ResidualCache":  # type: ignore[override]
        """The activations of some rows; an index or a range gives views of this cache's, as slicing does in torch."""
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        return type(self)(sliced.cache_dict, self.model, has_batch_dim=sliced.has_batch_dim)

    def _get_cached_ln_scale(self, layer: Any, *args: Any, **options: Any) -> Tensor:
        if layer == self.model.config.n_layer and not self.model.config.final_norm:
            return self["hook_embed"].new_ones(())
        return super()._get_cached_ln_scale(layer, *args, **options)

    def _ensure_head_results(self) -> bool:
        name = "blocks.{}.attn.hook_result"
        layers = [i for i, block in enumerate(self.model.blocks) if block.attn is not None]
        missing = [i for i in layers if name.format(i) not in self.cache_dict]
        self.cache_dict |= {name.format(i): self._result(i) for i in missing}
        return not missing

    def _slice(self, positions: Positions) -> Slice:
        return positions if isinstance(positions, Slice) else Slice(positions)


class _Point(Point, HookPoint):
    """transformer-lens's point, which also passes through the plain model's, where users may have hooks too."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self._plain = [plain]  # in a list: not a submodule

    def forward(self, x: Tensor) -> Tensor:
        return self._plain[0](x)


def _close(name: Any, known: Any) -> str:
    found = difflib.get_close_matches(str(name), known, n=3) or [full for full in known if str(name) in full]
    return ", ".join((found or list(known))[:3])
