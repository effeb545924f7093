"""The weights of a model as the tensors that the analyses take, with a check that these reproduce the model."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from tnlm.attention import Attention
from tnlm.checks import as_dtype, as_token_id
from tnlm.config import POLYNOMIAL_MLPS, ModelConfig
from tnlm.interp.contraction import contract
from tnlm.interp.layers.bilinear import BilinearTensor, Domain
from tnlm.interp.layers.heads import BilinearHead
from tnlm.interp.vocabulary import PARALLEL, centred, parallel_groups
from tnlm.rotary import rotary_frequencies
from tnlm.text.default_tokenizer import encode_prompt, find_tokenizer, one_token
from tnlm.text.tokenizer import Tokenizer
from tnlm.transformer import Transformer

T = TypeVar("T")


def extract(
    model_or_id: "Transformer | Extracted | str | Any", *, dtype: torch.dtype | str | None = None
) -> "Extracted":
    """Extract the explicit tensors of a model, as views of its parameters where the dtype allows.

    Args:
        model_or_id: A :class:`tnlm.Transformer`, anything that :func:`tnlm.load` takes, or what this function returned.
        dtype: Of every tensor, float32 or float64, or its name; ``None`` keeps the model's, with half precision widened
            to float32, and that of an :class:`Extracted`.

    Returns:
        The tensors are the weights as they are stored, in the basis of the residual stream, and share memory with the
        model's parameters: an edit in place changes both. Call ``.check(tokens)`` first.

    Raises:
        ValueError: The object is not a model, or nothing loadable.
    """
    if dtype is not None:
        dtype = as_dtype("dtype", dtype, (torch.float32, torch.float64), others=" or None")
    model = model_or_id
    if isinstance(model, Extracted):
        return model if dtype is None or dtype == model.dtype else Extracted(model=model.model, dtype=dtype)
    if not isinstance(model, Transformer):
        if isinstance(model, torch.nn.Module) or not isinstance(model, str | os.PathLike):
            raise ValueError(
                f"extract needs a tnlm.Transformer, got {type(model).__name__}; pass the eager model, no wrapper of it"
            )
        from tnlm.checkpoints.checkpoint import load

        model = load(model)
    return Extracted(model=model, dtype=dtype)


@dataclass(frozen=True)
class Scalars:
    """Mixing scalars by layer: ``x <- lambda0 x + lambda1 x0`` and ``v <- (1 - value_mix) v + value_mix v_first``."""

    lambda0: Float[Tensor, " n_layer"]
    lambda1: Float[Tensor, " n_layer"]
    value_mix: Float[Tensor, " n_layer"]
    differential: Float[Tensor, " n_layer"]
    """Weight of the second softmax of ``differential`` attention, 0 elsewhere."""


@dataclass(frozen=True, eq=False, repr=False)
class Extracted:
    """The tensors of one model: ``.mlp[layer]``, ``.attention[layer].head(n)``, ``.embed``, ``.unembed``, ``.scalars``.

    Where the dtype and the arithmetic allow, a tensor is a view of a parameter or of another of these tensors:
    ``clone()`` one before you edit it in place.
    """

    model: Transformer
    dtype: torch.dtype | None = None

    def __repr__(self) -> str:
        c = self.config
        return f"Extracted({c.n_layer} layers, mlp={c.mlp}, attention={c.attention}, {self.embed.dtype})"

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def n_layer(self) -> int:
        return self.config.n_layer

    def cast(self, p: Tensor) -> Tensor:
        """A parameter in the dtype of this object, detached; a view where it already has that dtype."""
        p = p.detach()
        return p.to(self.dtype) if self.dtype is not None else p.to(torch.promote_types(p.dtype, torch.float32))

    @cached_property
    def embed(self) -> Float[Tensor, "d_vocab d_model"]:
        """``w_e`` as a view, before the embedding norm; padding rows included (see :attr:`pad_tokens`)."""
        return self.cast(self.model.embed.w_e)

    @cached_property
    def unembed(self) -> Float[Tensor, "d_vocab d_model"]:
        """``w_u`` as a view: logits before the softcap are ``w_u`` times the normed final residual."""
        return self.cast(self.model.unembed.w_u)

    @cached_property
    def x0(self) -> Float[Tensor, "d_vocab d_model"]:
        """Write of each token into the residual stream: the embedding after its norm, a view where there is no norm."""
        config, rows = self.config, self.embed
        if not config.embedding_norm or config.norm == "none":
            return rows
        return rows / (rows.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()

    @property
    def tokens(self) -> range:
        """Ids of the tokens that text can contain."""
        return range(self.config.d_vocab_used)

    @property
    def pad_tokens(self) -> range:
        """Ids that only pad the vocabulary; rankings leave them out."""
        return range(self.config.d_vocab_used, self.config.d_vocab)

    def unembed_centred(
        self, weights: Real[Tensor, " d_vocab_used"] | None = None
    ) -> Float[Tensor, "d_vocab_used d_model"]:
        """Rows of the unembedding of the ids in use, minus their mean.

        One vector added to every row shifts all logits alike. Without a softcap no probability sees that, so the
        centred rows are fixed by the model; before a softcap centring is a convention.

        Symmetries: R E P U Q QR V N L X H S.

        Args:
            weights: Of the tokens in the mean, at least 0, such as how often each occurs; uniform by default.
        """
        return centred(self.unembed[: len(self.tokens)], weights)

    def parallel_tokens(self, cosine: float = PARALLEL) -> Int[Tensor, " d_vocab_used"]:
        """Smallest id whose centred unembedding row points the same way, for every id in use.

        Tokens that training never shows are pushed alike and end up parallel, so lists of strongest tokens fill with
        them; ``parallel_tokens().unique()`` has one id of each group. Costs ``d_vocab_used**2 d_model`` flop.

        Symmetries: R E P U Q QR V N L X H S.

        Args:
            cosine: At least that of two rows which count as parallel.
        """
        return parallel_groups(self.unembed_centred(), cosine)

    def read_prompt(self, what: str, tokens: Tensor | str, tokenizer: Tokenizer | None = None) -> Int[Tensor, " seq"]:
        """Ids of one prompt, given as text or as ids ``(seq,)`` or ``(1, seq)``.

        Args:
            what: Name of the function that takes the prompt, in errors.
            tokenizer: Of the text; by default the model's (:func:`tnlm.text.find_tokenizer`).

        Raises:
            ValueError: Not one prompt of this model, or an id that no text contains.
        """
        if isinstance(tokens, str):
            ids_of_text = encode_prompt(tokens, find_tokenizer(self.model, tokenizer))
            tokens = torch.tensor(ids_of_text, device=self.model.embed.w_e.device)
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens must be text or a torch tensor (seq,), got {type(tokens).__name__}")
        if tokens.ndim == 2 and len(tokens) == 1:
            tokens = tokens[0]
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"{what} takes one prompt of at least one token, (seq,), got shape {tuple(tokens.shape)}")
        self.model.check_tokens(tokens[None], limit=len(self.tokens))
        return tokens

    def read_token(self, name: str, token: int | str, tokenizer: Tokenizer | None = None) -> int:
        """Id of one token, given as text or id; ``name`` is its name in errors.

        Raises:
            ValueError: A text that is not one token, or an id that no text contains.
        """
        if isinstance(token, str):
            return one_token(name, token, find_tokenizer(self.model, tokenizer))
        return as_token_id(name, token, len(self.tokens))

    @cached_property
    def mlp(self) -> "Layers[BilinearTensor]":
        """The MLPs: ``mlp[layer]`` is a :class:`BilinearTensor` of the layer's normed input, bias included.

        Its factors are views of the parameters where the dtype allows.

        Raises:
            ValueError: On access, when the kind is no polynomial, or hidden units have biases.
        """
        if not self.config.mlp_is_form:
            return Layers.missing(self._mlp_reason())
        return Layers([self._mlp_layer(layer) for layer in range(self.n_layer)])

    def _mlp_reason(self) -> str:
        """Why the MLPs have no tensors."""
        if self.config.mlp == "none":
            return 'the model has no MLP (mlp="none")'
        if self.config.mlp in POLYNOMIAL_MLPS:
            return (
                "biases on the hidden units (mlp_hidden_bias) make an MLP a form of (1, x), which the analyses of a "
                "layer do not take; model.blocks[layer].mlp.tensor() has it, and model.network(seq) the whole model"
            )
        return (
            f"{', '.join(self.config.why_not_polynomial('mlp'))}, so it has no tensor; bilinear and squared MLPs have"
        )

    def _mlp_layer(self, layer: int) -> BilinearTensor:
        mlp = self.model.blocks[layer].mlp
        w_l = self.cast(mlp.w_l)
        w_r = w_l if mlp.w_r is None else self.cast(mlp.w_r)
        bias = None if mlp.bias is None else self.cast(mlp.bias)
        domain: Domain = "sphere" if self.config.norm == "rms" else "space"
        return BilinearTensor(w_l, w_r, self.cast(mlp.w_d), bias, domain=domain)

    @cached_property
    def attention(self) -> "Layers[AttentionLayer]":
        """The attention layers: ``attention[layer].head(n)`` is a :class:`BilinearHead`."""
        if self.config.attention == "none":
            return Layers.missing('the model has no attention (attention="none")')
        return Layers([AttentionLayer(self, layer) for layer in range(self.n_layer)])

    @cached_property
    def scalars(self) -> Scalars:
        """The mixing scalars of every layer; 1, 0, 0, 0 where a layer has none."""
        blocks = self.model.blocks
        like: dict[str, Any] = {"dtype": self.unembed.dtype, "device": self.unembed.device}
        lambdas = [torch.tensor([1.0, 0.0], **like) if b.lambdas is None else self.cast(b.lambdas) for b in blocks]

        def scalar(name: str) -> Tensor:
            found = [getattr(b.attn, name, None) for b in blocks]
            values = [torch.zeros(1, **like) if p is None else self.cast(p) for p in found]
            return torch.cat(values) if values else torch.zeros(0, **like)

        stacked = torch.stack(lambdas) if lambdas else torch.zeros(0, 2, **like)
        return Scalars(stacked[:, 0], stacked[:, 1], scalar("lamb"), scalar("bilinear_lamb"))

    @cached_property
    def write_factors(self) -> Float[Tensor, " n_layer"]:
        """Factor ``c_l = prod_{m>l} lambda0_m`` of every layer: by it later layers multiply what layer ``l`` writes."""
        after = torch.cat([self.scalars.lambda0[1:], self.scalars.lambda0.new_ones(min(1, self.n_layer))])
        return after.flip(0).cumprod(0).flip(0)

    @cached_property
    def embed_factor(self) -> Float[Tensor, ""]:
        """Factor ``a_N`` by which all layers together multiply ``x0`` before the final norm."""
        a = self.scalars.lambda0.new_ones(())
        for lambda0, lambda1 in zip(self.scalars.lambda0, self.scalars.lambda1, strict=True):
            a = lambda0 * a + lambda1
        return a

    def inverse_norms(self, tokens: Int[Tensor, "batch seq"]) -> dict[str, Tensor]:
        """The inverse norms of a run, as :meth:`Transformer.inverse_norms` gives them, in the dtype of this object.

        Symmetries: R P U QR V L H S.
        """
        return {name: self.cast(value) for name, value in self.model.inverse_norms(tokens).items()}

    def check(self, tokens: Int[Tensor, "batch seq"]) -> float:
        """Largest difference between the tensors' logits and the model's, relative to the largest logit.

        The tensors are contracted with the inverse norms of the run. Logits are compared before the softcap, which
        would hide a difference between large ones. Exact given the norms of this run, so the difference is rounding:
        about 1e-6 in float32, 1e-15 in float64. Above 1e-4 or 1e-10 the tensors are not those of the model. Cost: one
        forward, and one contraction head by head.

        Raises:
            ValueError: MLP or attention is no polynomial.
        """
        logits = contract(self, tokens, self.inverse_norms(tokens))
        with torch.no_grad():
            expected = self.model.pre_softcap(tokens).to(logits.dtype)
        if not logits.numel():
            return 0.0
        difference, largest = float((logits - expected).abs().max()), float(expected.abs().max())
        return difference / largest if largest else difference


class Layers(Sequence[T], Generic[T]):
    """One item per layer; for a model that has none, every access raises a ValueError with the reason."""

    def __init__(self, items: Sequence[T], *, reason: str | None = None) -> None:
        self._items, self._reason = items, reason

    @classmethod
    def missing(cls, reason: str) -> "Layers[T]":
        """No items, for this reason."""
        return cls([], reason=reason)

    def _checked(self) -> Sequence[T]:
        if self._reason is not None:
            raise ValueError(self._reason)
        return self._items

    def __getitem__(self, index: Any) -> Any:
        return self._checked()[index]

    def __len__(self) -> int:
        return len(self._checked())


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """The heads of one layer."""

    net: Extracted
    layer: int

    @property
    def module(self) -> Attention:
        return self.net.model.blocks[self.layer].attn  # type: ignore[return-value]

    def __len__(self) -> int:
        return self.module.n_head

    def head(self, n: int) -> BilinearHead:
        """The factor matrices of head ``n``, views of the parameters where the dtype allows.

        With query and key biases the maps act on ``(1, x)``: the first input coordinate is the constant.
        """
        m, net, config = self.module, self.net, self.net.config
        if not 0 <= n < m.n_head:
            raise ValueError(f"head must be in [0, {m.n_head}), got {n}")
        value = slice(n * m.d_head, (n + 1) * m.d_head)
        first = net.model.blocks[0].attn if config.value_residual and self.layer > 0 else None
        rotary = rotary_frequencies(m.d_qk, base=config.rotary_base).double()
        maps = {f"{name}{branch}": self._query_or_key(name, branch, n) for branch in m.branches for name in ("q", "k")}
        return BilinearHead(
            q1=maps["q1"],
            k1=maps["k1"],
            q2=maps.get("q2"),
            k2=maps.get("k2"),
            v=self._lift(net.cast(m.w_v[value])),
            v0=None if first is None else self._lift(net.cast(first.w_v[value])),
            o=net.cast(m.w_o[:, value]),
            value_mix=0.0 if first is None else float(net.scalars.value_mix[self.layer]),
            rotary=rotary.to(m.w_v.device),
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            attention=config.attention,  # type: ignore[arg-type]
        )

    def _query_or_key(self, name: str, branch: str, n: int) -> Tensor:
        """The query or key map (``name`` "q" or "k") of head ``n`` in one branch."""
        m = self.module
        rows = slice(n * m.d_qk, (n + 1) * m.d_qk)
        bias = getattr(m, f"b_{name}{branch}", None)
        return self._lift(self.net.cast(getattr(m, f"w_{name}{branch}")[rows]), None if bias is None else bias[rows])

    def _lift(self, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """``w`` and its bias as one map of ``(1, x)`` in models with query and key biases; ``w`` itself in others."""
        if not self.net.config.qk_bias:
            return w
        constant = w.new_zeros(len(w)) if bias is None else self.net.cast(bias)
        return torch.cat([constant[:, None], w], dim=1)
