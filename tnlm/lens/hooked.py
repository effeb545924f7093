"""The hooked model: a transformer-lens ``HookedRootModule`` over the forward and the parameters of a ``Transformer``.

``hook(model)`` makes it. Names, shapes and tools are those of transformer-lens. Where its analyses assume something
that is not true of these models (x0 mixing, value residual, softcap), :class:`tnlm.lens.residual.ResidualParts`
replaces them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import Slice
from transformer_lens.utilities.activation_functions import SOFTCAP_DISABLED

from tnlm.checks import MODEL, check_kind
from tnlm.lens.activations import Positions, ResidualCache, close_matches
from tnlm.lens.text import TextMethods
from tnlm.lens.weights import ModelWeights, shared_view
from tnlm.points import Point, refuse_compiled
from tnlm.text.sampling import generate
from tnlm.text.tokenizer import Tokenizer
from tnlm.transformer import Transformer

MAX_CACHE_BYTES = 2**34
"""Largest cache that :meth:`HookedModel.run_with_cache` makes by default: 16 GiB."""
Names = str | Sequence[str] | Callable[[str], bool] | None
"""One name of a point, several, or a predicate on names; None is all of them."""


def hook(model: "Transformer | HookedModel", *, tokenizer: Tokenizer | None = None) -> "HookedModel":
    """A model for transformer-lens's tools that shares every parameter with ``model`` and takes hooks at every point.

    The module structure is copied; parameters and plain torch hooks are shared. Training one trains both, and hooks
    registered on ``model`` act in the returned model too. It always computes attention by its definition
    (``implementation="eager"``), so every point exists and the logits do not depend on which points have hooks.

    Args:
        tokenizer: Used for text; ``None`` means the model's (:func:`tnlm.text.find_tokenizer`), loaded at the first
            text.

    Raises:
        ValueError: ``model`` is not a :class:`tnlm.Transformer`, or it or a part of it is compiled.
    """
    check_kind("model", model, torch.nn.Module, MODEL)
    refuse_compiled(model)
    if isinstance(model, HookedModel):
        return model
    if not isinstance(model, Transformer):
        inner = "; pass its .module" if hasattr(model, "module") else ""
        raise ValueError(f"hook(model) needs a tnlm.Transformer, got {type(model).__name__}{inner}")
    return HookedModel(shared_view(model, _Point), tokenizer)


class HookedModel(ModelWeights, TextMethods, HookedRootModule):
    """A :class:`tnlm.Transformer` with transformer-lens's methods and weight names, made by :func:`hook`.

    Logits are those after the softcap, except where a method says otherwise. Weights are in transformer-lens's layout,
    (in, out) per head: those of the whole model (``W_E``, ``W_Q``) are copies, those of a part
    (``blocks[0].attn.W_Q``) are views of its parameters.

    A hook gets a copy of the value at its point. What it edits in place, or returns, is passed on from that point, and
    changes neither other parts of the model nor anything that was cached. A value of another shape, dtype or device is
    a ValueError, except that a real value may become complex of the same precision.
    """

    def __init__(self, view: Transformer, tokenizer: Tokenizer | None) -> None:
        super().__init__()
        # In a list, which torch does not register as a submodule: that would put a prefix before every point's name.
        self._held = [view]
        self._modules = view._modules
        self.config = view.config
        self._tokenizer = tokenizer
        view.set_implementation("eager")
        self.eval()
        self.setup()

    @property
    def _view(self) -> Transformer:
        """The transformer that computes; its submodules are those of this model."""
        return self._held[0]

    # Running

    @torch.compiler.disable(reason="hooks do not fire inside a compiled graph; compile the plain model")
    def forward(
        self,
        input: Int[Tensor, "batch seq"] | Int[Tensor, " seq"] | str | list[str],
        return_type: Literal["logits", "loss", "both"] | None = "logits",
        *,
        loss_per_token: bool = False,
    ) -> Any:
        """Logits ``(batch, seq, d_vocab)``, the mean next-token cross-entropy in nats, both as a pair, or None.

        Args:
            input: Token ids, one text, or several texts with equally many tokens.
            loss_per_token: Return the cross-entropy at each position, ``(batch, seq - 1)``, instead of the mean.

        Raises:
            ValueError: An id is not below ``d_vocab_used``, or :class:`tnlm.Transformer` refuses the input.
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
        """Always a ValueError: compiled code ignores hooks."""
        raise ValueError("hooks do not fire inside a compiled graph; compile the plain model, hook the eager one")

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[tuple[str | Callable, Callable]] = (),
        bwd_hooks: Sequence[tuple[str | Callable, Callable]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator["HookedModel"]:
        """A context in which the given hooks are installed; they are removed at its end, also after an error.

        Hooks that were there before stay.

        Raises:
            ValueError: An entry is not a pair ``(name, function)``, a name is not a point (the message lists close
                matches), or a part of the model is compiled.
        """
        refuse_compiled(self)
        for pair in (*fwd_hooks, *bwd_hooks):
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not callable(pair[1]):
                raise ValueError(f"hooks must be a list of pairs (name, function), got {pair!r} in it")
            self.names(pair[0])
        with super().hooks(list(fwd_hooks), list(bwd_hooks), reset_hooks_end, clear_contexts):
            yield self

    def add_hook(self, name: str | Callable[[str], bool], hook: Callable, *args: Any, **options: Any) -> None:
        """Install a hook that stays until ``reset_hooks()``; arguments are those of transformer-lens.

        Raises:
            ValueError: The name is not a point, or a part of the model is compiled.
        """
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
        """Result of one forward with temporary hooks.

        A hook is called as ``f(value, hook=point)``. What it returns replaces the value; after ``None`` the value that
        it was given is used, with its edits in place.

        Raises:
            ValueError: See :meth:`hooks`; or backward hooks are given that would be removed before any backward pass.
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
        """Result of one forward, and a cache with a detached copy of every activation.

        Args:
            names_filter: Names of points, one or several, or a predicate on names; ``None`` means all points.
            incl_bwd: Also run backward from the loss (``return_type="loss"``) and keep each gradient as ``NAME_grad``;
                gradients are added to the ``grad`` of the parameters.
            pos_slice: Positions to keep; for scores and patterns these are positions of queries.
            max_bytes: Largest size of the cache; two or three arrays per layer grow with ``n_head * seq**2``.

        Raises:
            ValueError: The filter selects no point or names an unknown one, the cache would exceed ``max_bytes``,
                ``remove_batch_dim`` with more than one row, or ``incl_bwd`` without gradients or without a loss.
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
        """``(cache, fwd_hooks, bwd_hooks)``: hooks that fill ``cache`` with detached copies; they are not installed."""
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
        """A dict that every forward fills until ``reset_hooks()``; arguments are those of transformer-lens."""
        refuse_compiled(self)
        return super().add_caching_hooks(self.names(names_filter), *args, **options)

    def names(self, names_filter: Names = None) -> list[str]:
        """Names of the points that a filter selects; a predicate and ``None`` give them in the order of the modules.

        Raises:
            ValueError: A name is unknown (the message lists close matches), or nothing is selected.
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
                raise ValueError(f"the model has no point {name!r}; close: {close_matches(name, self.hook_dict)}")
        if not wanted:
            raise ValueError("the filter must select a point, got an empty list; None selects all")
        return wanted

    def generate(
        self, input: Int[Tensor, "batch seq"] | str, max_new_tokens: int = 10, **options: Any
    ) -> Int[Tensor, "batch longer"] | str:
        """The sequence continued by :func:`tnlm.generate`, with the hooks active: ids for ids, text for text.

        Hooks see only the new positions of each step; with ``cache="none"`` they see the whole sequence.
        """
        out = generate(self._view, self._tokens(input), max_new_tokens, **options)
        return self.tokenizer.decode(out[0].tolist()) if isinstance(input, str) else out

    # Configuration

    @property
    def cfg(self) -> TransformerBridgeConfig:
        """The configuration under transformer-lens's names, read only: each access makes a new one."""
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
        """The softcap, as an attribute under which transformer-lens's readouts look for it."""
        return SimpleNamespace(apply_output_logits_transform=self._view.softcap)

    # Checks

    def _tokens(self, input: Tensor | str | list[str]) -> Int[Tensor, "batch seq"]:
        """Checked token ids of an input, ``(batch, seq)``, on the model's device."""
        texts = [input] if isinstance(input, str) else input
        if not isinstance(input, Tensor) and not (isinstance(texts, list) and all(isinstance(t, str) for t in texts)):
            raise ValueError(f"input must be ids in a tensor, a text or a list of texts, got {type(input).__name__}")
        tokens = input if isinstance(input, Tensor) else self.to_tokens(input)
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        self._view.check_tokens(tokens, limit=self.config.d_vocab_used)
        self._check_ids(tokens)
        return tokens.to(self.embed.w_e.device)

    def _check_bytes(self, names: list[str], tokens: Tensor, max_bytes: int, copies: int) -> None:
        """Raise a ValueError if a cache of the named points would hold more than ``max_bytes``."""
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


class _Point(Point, HookPoint):
    """A transformer-lens hook point in place of a plain model's point, whose torch hooks it runs too."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self._plain = [plain]  # in a list, which torch does not register as a submodule

    def forward(self, x: Tensor) -> Tensor:
        return self._plain[0](x)
