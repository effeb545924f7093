"""Weights in the layout and under the names of transformer-lens, (in, out) per head.

Those of a part (``model.blocks[0].attn.W_Q``, ``model.embed.W_E``) are views of its parameters: editing one in place,
under ``torch.no_grad()``, edits the model. Those of the whole model (``model.W_Q``, ``model.W_E``) are copies.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Shaped
from torch import Tensor, nn

from tnlm.attention import Attention
from tnlm.lens.residual import bias_sum, target
from tnlm.mlp import MLP
from tnlm.points import Point
from tnlm.transformer import Block, Embedding, Unembedding


class LensAttention(Attention):
    """Weights per head as views ``(n_head, d_model, d)``; None for the second pair of a kind with one."""

    W_Q = property(lambda self: self._into_heads(self.w_q1))
    W_K = property(lambda self: self._into_heads(self.w_k1))
    W_Q2 = property(lambda self: self._into_heads(self.w_q2))
    W_K2 = property(lambda self: self._into_heads(self.w_k2))
    W_V = property(lambda self: self._into_heads(self.w_v))
    W_O = property(lambda self: rearrange(self.w_o, "m (h d) -> h d m", h=self.n_head))

    def _into_heads(self, w: Tensor | None) -> Tensor | None:
        return None if w is None else rearrange(w, "(h d) m -> h m d", h=self.n_head)


class LensMLP(MLP):
    """Views. ``W_gate`` is what the activation acts on when there are two encoders, as in transformer-lens."""

    W_in = property(lambda self: (self.w_r if self.gated else self.w_l).mT)
    W_out = property(lambda self: self.w_d.mT)

    @property
    def W_gate(self) -> Shaped[Tensor, "d_model d_hidden"] | None:
        return self.w_l.mT if self.gated else None

    @property
    def b_in(self) -> Shaped[Tensor, " d_hidden"]:
        bias = self.b_r if self.gated else self.b_l
        return self.w_l.new_zeros(self.d_hidden) if bias is None else bias

    @property
    def b_gate(self) -> Shaped[Tensor, " d_hidden"] | None:
        return self.b_l if self.gated else None

    @property
    def b_out(self) -> Shaped[Tensor, " d_model"]:
        return self.w_d.new_zeros(self.d_out) if self.bias is None else self.bias


class LensBlock(Block):
    hook_out_is_single_residual_stream = True  # transformer-lens's readouts ask for it


class LensEmbedding(Embedding):
    """``W_E`` is a view."""

    W_E = property(lambda self: self.w_e)


class LensUnembedding(Unembedding):
    """``W_U`` is a view; ``b_U`` does not exist here and is zero."""

    W_U = property(lambda self: self.w_u.mT)
    b_U = property(lambda self: self.w_u.new_zeros(self.w_u.shape[0]))


_NAMED = {
    Attention: LensAttention,
    MLP: LensMLP,
    Block: LensBlock,
    Embedding: LensEmbedding,
    Unembedding: LensUnembedding,
}
_ATTENTION_WEIGHTS = ("W_Q", "W_K", "W_Q2", "W_K2", "W_V", "W_O")
_MLP_WEIGHTS = ("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out")


class ModelWeights:
    """The weights of a whole model, for a root module with ``embed``, ``blocks`` and ``unembed``.

    All are copies, made at each access; gradients reach the parameters through them.
    """

    embed: LensEmbedding
    blocks: Any
    unembed: LensUnembedding

    @property
    def W_E(self) -> Shaped[Tensor, "d_vocab d_model"]:
        return self.embed.W_E.clone()

    @property
    def W_U(self) -> Shaped[Tensor, "d_model d_vocab"]:
        return self.unembed.W_U.clone()

    @property
    def b_U(self) -> Shaped[Tensor, " d_vocab"]:
        return self.unembed.b_U

    def __getattr__(self, name: str) -> Any:
        """``W_Q`` and the like: the weight of every block, stacked along ``n_layer``."""
        part = {**dict.fromkeys(_ATTENTION_WEIGHTS, "attn"), **dict.fromkeys(_MLP_WEIGHTS, "mlp")}.get(name)
        if part is None:
            return super().__getattr__(name)  # type: ignore[misc]
        found = [getattr(getattr(block, part), name, None) for block in self.blocks]
        weights = [w for w in found if w is not None]
        if len(weights) < len(found):
            raise AttributeError(f"this model has no {name}: it is no part of every block's {part}")
        return torch.stack(weights)

    def own_share(self) -> Shaped[Tensor, " n_layer"]:
        """``1 - lamb`` of each block: how much of its values is its own; 1 in block 0, whose first value is its own."""
        own = [torch.ones_like(b.attn.w_v[0, 0]) if b.attn.lamb is None else 1 - b.attn.lamb[0] for b in self.blocks]
        return torch.stack([torch.ones_like(own[0]), *own[1:]])

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Shaped[Tensor, " d_model"]:
        """The MLP biases of the layers below ``layer``, each with the factor of the mixing since; no other exists."""
        layer, end = target(layer, len(self.blocks), mlp_input=mlp_input, mixed=False)
        w_e = self.embed.w_e
        return w_e.new_zeros(w_e.shape[1]) + (bias_sum(self.blocks, layer, end) if include_mlp_biases else 0)


def view(module: nn.Module, point: Callable[[nn.Module], nn.Module], seen: dict[int, nn.Module] | None = None) -> Any:
    """The same module with submodules of its own, its points made by ``point``.

    Parameters, buffers and hook registries are those of ``module``, by identity. A module met twice stays one.
    """
    seen = {} if seen is None else seen
    if id(module) not in seen:
        new = seen[id(module)] = copy.copy(module)
        new.__class__ = _NAMED.get(type(module), type(module))
        new._modules = {}
        for name, child in module._modules.items():
            swap = isinstance(child, Point)
            new._modules[name] = None if child is None else point(child) if swap else view(child, point, seen)
    return seen[id(module)]
