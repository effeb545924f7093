"""The transformer: embedding, blocks and unembedding, in the order of the equations."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from tnlm.attention import Attention
from tnlm.cache import Cache, LayerCache, LayerState, all_or_nothing
from tnlm.config import ModelConfig
from tnlm.explicit import inverse_norms, transformer_network
from tnlm.kernels import Implementation, linear
from tnlm.mlp import MLP
from tnlm.network import Network
from tnlm.norm import NoNorm, RMSNorm
from tnlm.points import Point, hooked, name_points
from tnlm.rotary import rotary_tables

if TYPE_CHECKING:
    from tnlm.text.tokenizer import Tokenizer

TOKEN_DTYPES = (torch.int64, torch.int32)


class Embedding(nn.Module):
    """Embedding of tokens: rows of ``w_e`` (d_vocab, d_model), initialised N(0, 1)."""

    def __init__(
        self,
        d_vocab: int,
        d_model: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.w_e = nn.Parameter(torch.empty(d_vocab, d_model, dtype=dtype, device=device))
        nn.init.normal_(self.w_e)

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Shaped[Tensor, "batch seq d_model"]:
        return F.embedding(tokens, self.w_e)


class Unembedding(nn.Module):
    """Unembedding ``w_u x``; ``w_u`` (d_vocab, d_model) starts at zero, so that the first loss is ``ln d_vocab``."""

    def __init__(
        self,
        d_vocab: int,
        d_model: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.w_u = nn.Parameter(torch.zeros(d_vocab, d_model, dtype=dtype, device=device))

    def forward(self, x: Shaped[Tensor, "batch seq d_model"]) -> Shaped[Tensor, "batch seq d_vocab"]:
        return linear(x, self.w_u)


class Block(nn.Module):
    """One layer: ``x <- a x + b x0;  x <- x + attn(norm(x));  x <- x + mlp(norm(x))``, with ``(a, b) = lambdas``."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        factory_kwargs: dict[str, Any] = {"dtype": dtype, "device": device}
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0], **factory_kwargs)) if config.x0_mixing else None
        self.hook_resid_pre = Point()
        self.hook_resid_mixed = Point()
        self.attn = self.mlp = None
        if config.attention != "none":
            self.ln1 = _norm(config)
            self.attn = Attention(config, **factory_kwargs)
            self.hook_attn_out = Point()
        if config.mlp != "none":
            self.hook_resid_mid = Point()
            self.ln2 = _norm(config)
            self.mlp = MLP(
                kind=config.mlp,
                bias=config.mlp_bias,
                hidden_bias=config.mlp_hidden_bias,
                d_in=config.d_model,
                d_hidden=config.d_hidden,
                d_out=config.d_model,
                **factory_kwargs,
            )
            self.hook_mlp_out = Point()
        self.hook_resid_post = Point()

    def forward(
        self,
        x: Shaped[Tensor, "batch seq d_model"],
        x0: Shaped[Tensor, "batch seq d_model"],
        v_first: Shaped[Tensor, "batch seq n_head d_head"] | None,
        tables: tuple[Tensor, Tensor],
        cache: LayerCache | LayerState | None = None,
    ) -> tuple[Shaped[Tensor, "batch seq d_model"], Shaped[Tensor, "batch seq n_head d_head"] | None]:
        x = self.hook_resid_pre(x)
        if self.lambdas is not None:
            lambdas = self.lambdas.to(x.dtype)
            x = lambdas[0] * x + lambdas[1] * x0
        x = self.hook_resid_mixed(x)
        if self.attn is not None:
            out, v_first = self.attn(self.ln1(x), v_first, tables, cache)
            x = x + self.hook_attn_out(out)
        if self.mlp is not None:
            x = self.hook_resid_mid(x)
            x = x + self.hook_mlp_out(self.mlp(self.ln2(x)))
        return self.hook_resid_post(x), v_first


class Transformer(nn.Module):
    """A causal language model: ``model(tokens)`` gives logits ``(batch, seq, d_vocab)`` after the softcap.

    Fresh output maps (``w_o``, ``w_d``, ``w_u``) are zero. ``compute_dtype`` set to bf16 casts the embedding, and with
    it every activation, while the parameters keep their dtype; ``None`` computes in the embedding's dtype.

    Args:
        config: The architecture.
        implementation: Attention implementation, see :mod:`tnlm.kernels`.

    Source: ``train_gpt2.py`` of loganriggs/modded-nanogpt at d5ce2de; Sharkey 2023, arXiv:2305.03452.
    """

    source: Mapping[str, Any] | None = None
    """Where :func:`tnlm.load` took the weights from, as facts for a model card; None for a model made in memory."""
    tokenizer: "Tokenizer | None" = None
    """Tokenizer of text that is given in place of ids; :func:`tnlm.load` sets the one that was saved with the model."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        implementation: Implementation = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        factory_kwargs: dict[str, Any] = {"dtype": dtype, "device": device}
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.embed = Embedding(config.d_vocab, config.d_model, **factory_kwargs)
        self.hook_embed_raw = Point()
        if config.embedding_norm:
            self.ln_embed = _norm(config)
        self.hook_embed = Point()
        blocks = nn.ModuleList(Block(config, **factory_kwargs) for _ in range(config.n_layer))
        self.blocks: Sequence[Block] = blocks  # type: ignore[assignment]
        self.ln_final = _norm(config) if config.final_norm else NoNorm()
        self.unembed = Unembedding(config.d_vocab, config.d_model, **factory_kwargs)
        name_points(self)
        self.set_implementation(implementation)

    def set_implementation(self, implementation: Implementation) -> None:
        """Choose the attention implementation of every block; see :mod:`tnlm.kernels`."""
        for block in self.blocks:
            if block.attn is not None:
                block.attn.implementation = implementation

    @all_or_nothing
    def forward(
        self, tokens: Int[Tensor, "batch seq"], *, cache: Cache | None = None, last: bool = False
    ) -> Shaped[Tensor, "batch seq_out d_vocab"]:
        """Logits after the softcap, in the dtype of the activations.

        Args:
            tokens: int64 or int32 ids below ``d_vocab``; checked in eager mode on CPU. With ``cache``, the new ones.
            cache: Cache of the positions before; extended in place, unless the forward fails.
            last: Return only the logits of the last position, ``(batch, 1, d_vocab)``, as generation needs.

        Raises:
            ValueError: ``tokens`` is not 2-D of integers, an id is out of range, or the sequence exceeds ``n_ctx``;
                or ``cache`` was made for or filled by another model or batch.
        """
        return self.softcap(self.pre_softcap(tokens, cache=cache, last=last))

    @all_or_nothing
    def pre_softcap(
        self, tokens: Int[Tensor, "batch seq"], *, cache: Cache | None = None, last: bool = False
    ) -> Shaped[Tensor, "batch seq_out d_vocab"]:
        """Logits before the softcap; attribute these, since they are linear in the final residual given its norm."""
        return self.unembed(self.final_residual(tokens, cache=cache, last=last))

    @all_or_nothing
    def final_residual(
        self, tokens: Int[Tensor, "batch seq"], *, cache: Cache | None = None, last: bool = False
    ) -> Shaped[Tensor, "batch seq_out d_model"]:
        """Input of the unembedding: the last residual stream after its norm."""
        start = 0 if cache is None else cache.length
        self.check_tokens(tokens, start=start)
        x = self.run(self.embedding(tokens), start=start, cache=cache)
        return self.ln_final(x[:, -1:] if last else x)

    def run_with_cache(self, tokens: Int[Tensor, "batch seq"], **options: Any) -> tuple[Any, Any]:
        """Logits of one forward, and a cache of every activation by its name; see :meth:`tnlm.lens.HookedModel`."""
        from tnlm import lens

        return lens.hook(self).run_with_cache(tokens, **options)

    def embedding(self, tokens: Int[Tensor, "batch seq"]) -> Shaped[Tensor, "batch seq d_model"]:
        """``x0``: the first residual stream, which every block mixes with (``x0_mixing``)."""
        x = self.hook_embed_raw(self.embed(tokens))
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        return self.hook_embed(self.ln_embed(x) if self.config.embedding_norm else x)

    @all_or_nothing
    def run(
        self, x0: Shaped[Tensor, "batch seq d_model"], *, start: int = 0, cache: Cache | None = None
    ) -> Shaped[Tensor, "batch seq d_model"]:
        """The residual stream after the last block, computed from ``x0``, whose first position is ``start``.

        Raises:
            ValueError: ``cache`` has seen another number of positions than ``start``.
        """
        config, seq = self.config, x0.shape[1]
        if cache is not None and start != cache.length:
            raise ValueError(f"start must be the number of positions in the cache, {cache.length}, got {start}")
        dtype = getattr(torch, config.rotary_table_dtype)
        tables = rotary_tables(
            seq,
            config.d_qk,
            base=config.rotary_base,
            dtype=dtype,
            device=x0.device,
            start=start,
        )
        # A torch hook on a block may edit what the block is given, and x0 enters every block
        x = x0.clone() if hooked(*self.blocks) else x0
        v_first = None
        for i, block in enumerate(self.blocks):
            x, v = block(x, x0, v_first, tables, None if cache is None else cache.layers[i])
            v_first = v if config.value_residual else None
        if cache is not None:
            cache.advance(seq)
        return x

    def softcap(self, z: Shaped[Tensor, "... d_vocab"]) -> Shaped[Tensor, "... d_vocab"]:
        """The softcap of logits, ``c tanh(z / c)``; the identity when ``logit_softcap`` is None.

        Strictly monotone, not polynomial. The training loss applies it in ``tnlm/kernels/cross_entropy.py`` instead.
        """
        cap = self.config.logit_softcap
        return z if cap is None else cap * torch.tanh(z / cap)

    def network(self, seq: int) -> Network:
        """Logits before the softcap as nested tensor networks, one node per sub-layer, at positions ``0..seq``.

        Exact without norms and QK-norm, else exact given the norms of this run. Inputs: ``tokens``, one-hot
        ``(batch, seq, d_vocab)``, and the inverse norms, which :meth:`inverse_norms` records. Output ``(batch, seq,
        d_vocab)``. The tensors are made from the current parameters, and gradients reach these::

            one_hot = F.one_hot(tokens, config.d_vocab).to(model.embed.w_e)
            z = model.network(seq).contract({"tokens": one_hot, **model.inverse_norms(tokens)})
            assert torch.allclose(model.softcap(z), model(tokens))

        One einsum, by ``flatten()``, is possible for one- and two-layer models without MLP and one-layer models with
        one: a block has degree 10 in its input, 5 without MLP. Deeper ones stay nested.

        Cost: about four times the FLOPs and memory of the forward, since the residual is copied by extra heads and
        hidden units; given by ``network(seq).cost({"batch": 1})``, also on the meta device.

        Raises:
            ValueError: MLP or attention is not a polynomial, or ``seq`` is over ``n_ctx``.
        """
        return transformer_network(self, seq)

    def inverse_norms(self, tokens: Int[Tensor, "batch seq"]) -> dict[str, Tensor]:
        """Inverse norms of the run on ``tokens``: the inputs of :meth:`network` besides the tokens. No gradient.

        Named after the point that is inverted (``blocks.0.ln1.hook_scale``, ``blocks.0.attn.q_norm.hook_scale``), with
        a 1 in front: ``(1, 1 / scale)`` of shape ``(batch, seq, 2)``, and ``(batch, seq, 1 + n_head)`` for QK-norms.
        Empty for a model without norms. With norms of a run in bf16 the contraction has the rounding errors of that
        run: some percent of the logits after a few layers. In float32 it agrees up to float32 rounding.

        Raises:
            ValueError: As forward; or the model is compiled, so that hooks do not fire.
        """
        return inverse_norms(self, tokens)

    def check_tokens(self, tokens: Tensor, *, start: int = 0, limit: int | None = None) -> None:
        """Raise if forward cannot read ``tokens``; ids must be below ``limit`` (default ``d_vocab``).

        Raises:
            ValueError: Names the value, its place and the limit.
        """
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens must be a torch tensor (batch, seq), got {type(tokens).__name__}")
        if tokens.layout != torch.strided:
            raise ValueError(f"tokens must be a dense tensor, got {tokens.layout}; convert with .to_dense()")
        if tokens.ndim != 2:
            raise ValueError(
                f"tokens must be (batch, seq), got shape {tuple(tokens.shape)}; add a batch axis with [None]"
            )
        if tokens.dtype not in TOKEN_DTYPES:
            raise ValueError(f"tokens must be int64 or int32, got {tokens.dtype}; convert with .long() if they are ids")
        if start + tokens.shape[1] > self.config.n_ctx:
            raise ValueError(
                f"a sequence may have at most n_ctx={self.config.n_ctx} tokens, got {start + tokens.shape[1]}; "
                "shorten it, or load the model with a larger n_ctx in its config"
            )
        skip = (
            torch.compiler.is_compiling()
            or type(tokens) is not Tensor  # fake tensors have no values
            or torch._C._functorch.is_functorch_wrapped_tensor(tokens)
        )
        if not skip and tokens.device.type == "cpu" and tokens.numel():
            check_ids(tokens, self.config.d_vocab if limit is None else limit)

    def extra_repr(self) -> str:
        return f"{self.config.n_params:,} parameters"


def check_ids(tokens: Int[Tensor, "batch seq"], limit: int) -> None:
    """Raise if an id is outside ``[0, limit)``.

    Raises:
        ValueError: Names the first such id, its place and the limit.
    """
    bad = (tokens < 0) | (tokens >= limit)
    if bad.any():
        row, position = bad.nonzero()[0].tolist()
        raise ValueError(
            f"token ids must be in [0, {limit}), got {int(tokens[row, position])} at row {row}, position {position}"
        )


def _norm(config: ModelConfig) -> nn.Module:
    return RMSNorm(config.norm_eps) if config.norm == "rms" else NoNorm()
