"""Read a model's weights as the tensors that the analyses take, and check that they are the model."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tnlm.attention import Attention, causal_mask
from tnlm.config import POLYNOMIAL_ATTENTIONS, POLYNOMIAL_MLPS, ModelConfig
from tnlm.interp.layers.bilinear import BilinearTensor
from tnlm.interp.layers.heads import BilinearHead
from tnlm.points import is_point, record
from tnlm.rotary import rotary_frequencies, rotary_tables, rotate
from tnlm.transformer import Transformer

T = TypeVar("T")


def extract(model_or_id: "Transformer | str | Any", *, dtype: torch.dtype | None = None) -> "Extracted":
    """The explicit tensors of a model, as views of its parameters where the dtype allows.

    Args:
        model_or_id: A :class:`tnlm.Transformer`, or anything :func:`tnlm.load` takes.
        dtype: Of every tensor; ``None`` keeps the model's, with half precision widened to float32.

    Returns:
        A view: editing one in place, it or the model's parameters, edits the other. Call ``.check(tokens)`` first.

    Raises:
        ValueError: The object is not a model, or nothing loadable.
    """
    model = model_or_id
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
    """Per layer: ``x <- lambda0 x + lambda1 x0`` and ``v <- (1 - value_mix) v + value_mix v_first``."""

    lambda0: Float[Tensor, " n_layer"]
    lambda1: Float[Tensor, " n_layer"]
    value_mix: Float[Tensor, " n_layer"]
    differential: Float[Tensor, " n_layer"]
    """Weight of the second softmax of ``differential`` attention, 0 elsewhere."""


@dataclass(frozen=True, eq=False, repr=False)
class Extracted:
    """The tensors of one model: ``.mlp[l]``, ``.attention[l].head(n)``, ``.embed``, ``.unembed``, ``.scalars``.

    Every tensor is a view of a parameter, or of another of these tensors, where the dtype and the arithmetic allow:
    read them, and ``clone()`` one before you edit it in place.
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
        """A parameter in the dtype of this object, detached: a view of it where it has that dtype."""
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
        """What each token writes into the residual stream: the embedding after its norm; without one a view of it."""
        config, rows = self.config, self.embed
        if not config.embedding_norm or config.norm == "none":
            return rows
        return rows / (rows.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()

    @property
    def tokens(self) -> range:
        """Ids that text can contain."""
        return range(self.config.d_vocab_used)

    @property
    def pad_tokens(self) -> range:
        """Rows that only pad the vocabulary; rankings leave them out."""
        return range(self.config.d_vocab_used, self.config.d_vocab)

    def check_prompt(self, what: str, tokens: Int[Tensor, " seq"], **ids: int) -> None:
        """Raise ValueError unless ``tokens`` are one prompt of this model and the named ``ids`` stand for text."""
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens must be a torch tensor (seq,), got {type(tokens).__name__}")
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"{what} takes one prompt of at least one token, (seq,), got shape {tuple(tokens.shape)}")
        limit = len(self.tokens)
        self.model.check_tokens(tokens[None], limit=limit)
        for name, token in ids.items():
            if not hasattr(token, "__index__") or not 0 <= int(token) < limit:
                raise ValueError(f"{name} must be a token id in [0, {limit}), got {token!r}")

    @cached_property
    def mlp(self) -> "Layers[BilinearTensor]":
        """``mlp[l]``: the layer as a :class:`BilinearTensor` of its normed input, bias included; its factors are views.

        Raises:
            ValueError: On access, when the kind is no polynomial, or hidden units have biases.
        """
        form = self.config.mlp_is_form
        return Layers([self._mlp_layer(l) for l in range(self.n_layer)] if form else self._mlp_reason())

    def _mlp_reason(self) -> str:
        if self.config.mlp == "none":
            return 'the model has no MLP (mlp="none")'
        if self.config.mlp in POLYNOMIAL_MLPS:
            return (
                "biases on the hidden units (mlp_hidden_bias) make an MLP a form of (1, x), which the analyses of a "
                "layer do not take; model.blocks[l].mlp.tensor() has it, and model.network(seq) the whole model"
            )
        return f"a {self.config.mlp} MLP is not polynomial, so it has no tensor; bilinear and squared ones have"

    def _mlp_layer(self, l: int) -> BilinearTensor:
        mlp = self.model.blocks[l].mlp
        w_l = self.cast(mlp.w_l)
        w_r = w_l if mlp.w_r is None else self.cast(mlp.w_r)
        return BilinearTensor(w_l, w_r, self.cast(mlp.w_d), None if mlp.bias is None else self.cast(mlp.bias))

    @cached_property
    def attention(self) -> "Layers[AttentionLayer]":
        """``attention[l].head(n)``: each head's factors."""
        if self.config.attention == "none":
            return Layers('the model has no attention (attention="none")')
        return Layers([AttentionLayer(self, l) for l in range(self.n_layer)])

    @cached_property
    def scalars(self) -> Scalars:
        """The mixing scalars of every layer; what a layer lacks is 1, 0, 0, 0."""
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
        """``c_l``: by how much a write of layer ``l`` is multiplied before the final norm, ``prod_{m>l} lambda0_m``."""
        after = torch.cat([self.scalars.lambda0[1:], self.scalars.lambda0.new_ones(min(1, self.n_layer))])
        return after.flip(0).cumprod(0).flip(0)

    @cached_property
    def embed_factor(self) -> Float[Tensor, ""]:
        """``a_N``: by how much ``x0`` itself is multiplied before the final norm."""
        a = self.scalars.lambda0.new_ones(())
        for lambda0, lambda1 in zip(self.scalars.lambda0, self.scalars.lambda1, strict=True):
            a = lambda0 * a + lambda1
        return a

    def norms(self, tokens: Int[Tensor, "batch seq"]) -> dict[str, Tensor]:
        """The norm wires of a run: for every ``...hook_scale`` point its inverse, ``(batch, seq[, n_head], 1)``."""
        names = [n for n, _ in self.model.named_modules() if is_point(n) and n.endswith("hook_scale")]
        run = record(self.model, tokens, names)
        return {name: 1 / self.cast(run[name]) for name in names}

    def check(self, tokens: Int[Tensor, "batch seq"]) -> float:
        """Largest difference between the tensors' logits and the model's, relative to the largest logit.

        Contracts the tensors with the norms of the run, and compares before the softcap, which would hide a
        difference between large logits. Exact given the norms of this run, so rounding is all that may be left: about
        1e-6 in float32, 1e-15 in float64. Above 1e-4 or 1e-10 the tensors are not the model. Cost: one forward, and
        one contraction head by head.

        Raises:
            ValueError: MLP or attention is no polynomial.
        """
        wires = self.norms(tokens)
        final = self._contract(tokens, wires) * wires.get("ln_final.hook_scale", 1)
        logits = final @ self.unembed.mT
        with torch.no_grad():
            expected = self.model.pre_softcap(tokens).to(logits.dtype)
        if not logits.numel():
            return 0.0
        difference, largest = float((logits - expected).abs().max()), float(expected.abs().max())
        return difference / largest if largest else difference

    def _contract(self, tokens: Tensor, wires: dict[str, Tensor]) -> Tensor:
        """The final residual from the extracted tensors alone, every inverse norm taken from ``wires``."""
        x0 = self.embed[tokens.long()] * wires.get("ln_embed.hook_scale", 1)
        x, first = x0, x0
        for l in range(self.n_layer):
            x = self.scalars.lambda0[l] * x + self.scalars.lambda1[l] * x0
            if self.config.attention != "none":
                normed = x * wires.get(f"blocks.{l}.ln1.hook_scale", 1)
                first = normed if l == 0 else first
                x = x + self.attention[l].contract(normed, first, wires)
            if self.config.mlp != "none":
                x = x + self.mlp[l](x * wires.get(f"blocks.{l}.ln2.hook_scale", 1))
        return x


class Layers(Sequence[T], Generic[T]):
    """One item per layer, or the reason why there is none."""

    def __init__(self, items: list[T] | str) -> None:
        self._items = items

    def _check(self) -> list[T]:
        if isinstance(self._items, str):
            raise ValueError(self._items)
        return self._items

    def __getitem__(self, index: Any) -> Any:
        return self._check()[index]

    def __len__(self) -> int:
        return len(self._check())


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
        """Head ``n`` as factors, views of the parameters where the dtype allows.

        With query and key biases the maps read ``(1, x)``: the constant leg comes first.
        """
        m, net, config = self.module, self.net, self.net.config
        if not 0 <= n < m.n_head:
            raise ValueError(f"head must be in [0, {m.n_head}), got {n}")
        value = slice(n * m.d_head, (n + 1) * m.d_head)
        first = net.model.blocks[0].attn if config.value_residual and self.layer > 0 else None
        rotary = rotary_frequencies(m.d_qk, base=config.rotary_base).double()
        maps = {f"{name}{b}": self._query_or_key(name, b, n) for b in m.branches for name in ("q", "k")}
        return BilinearHead(
            **maps,
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
        m = self.module
        rows = slice(n * m.d_qk, (n + 1) * m.d_qk)
        bias = getattr(m, f"b_{name}{branch}", None)
        return self._lift(self.net.cast(getattr(m, f"w_{name}{branch}")[rows]), None if bias is None else bias[rows])

    def _lift(self, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """The map of ``(1, x)`` where biases make that the head's input, ``w`` itself elsewhere."""
        if not self.net.config.qk_bias:
            return w
        constant = w.new_zeros(len(w)) if bias is None else self.net.cast(bias)
        return torch.cat([constant[:, None], w], dim=1)

    def contract(
        self,
        x: Float[Tensor, "batch seq d_model"],
        first: Float[Tensor, "batch seq d_model"],
        wires: dict[str, Tensor],
    ) -> Float[Tensor, "batch seq d_model"]:
        """Sum over heads of ``O pattern v``; ``x`` and ``first`` are the normed inputs of this layer and of layer 0."""
        if self.net.config.attention not in POLYNOMIAL_ATTENTIONS:
            raise ValueError(f"{self.net.config.attention} attention is not a polynomial, so its pattern has no tensor")
        seq, m = x.shape[1], self.module
        dtype = getattr(torch, self.net.config.rotary_table_dtype)
        tables = rotary_tables(seq, m.d_qk, base=self.net.config.rotary_base, dtype=dtype, device=x.device)
        keep = causal_mask(seq, seq, device=x.device)
        out = torch.zeros_like(x)
        if self.net.config.qk_bias:
            x, first = (torch.cat([torch.ones_like(t[..., :1]), t], dim=-1) for t in (x, first))
        for n in range(m.n_head):
            head = self.head(n)

            def side(name: str, branch: str, head: BilinearHead = head, n: int = n) -> Tensor:
                suffix = "" if branch == "1" else branch
                scale = wires.get(f"blocks.{self.layer}.attn.{name}{suffix}_norm.hook_scale")
                projected = x @ getattr(head, f"{name}{branch}").mT
                projected = projected if scale is None else projected * scale[:, :, n]
                return rotate(projected[:, :, None], *tables)[:, :, 0]

            scores = [side("q", b) @ side("k", b).mT / m.d_qk for b in m.branches]
            pattern = (scores[0] * scores[-1]).masked_fill(~keep, 0)
            v = (1 - head.value_mix) * (x @ head.v.mT)
            if head.v0 is not None:
                v = v + head.value_mix * (first @ head.v0.mT)
            out = out + pattern @ v @ head.o.mT
        return out
