"""The model's weights under transformer-lens's names and in its layout, (in, out) per head.

The weights of a part (``model.blocks[0].attn.W_Q``, ``model.embed.W_E``) are views of its parameters: editing one in
place, under ``torch.no_grad()``, edits the model. The weights of the whole model (``model.W_Q``, ``model.W_E``) are
copies.
"""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Shaped
from torch import Tensor, nn
from transformer_lens import FactoredMatrix

from tnlm.attention import Attention
from tnlm.lens.residual import bias_sum, target
from tnlm.mlp import MLP
from tnlm.points import Point
from tnlm.transformer import Block, Embedding, Unembedding


class LensAttention(Attention):
    """An attention layer that also has transformer-lens's weight names: views per head, ``(n_head, d_model, d)``.

    ``W_Q2`` and ``W_K2`` are those of the second query-key pair; None in a layer with one pair.
    """

    @property
    def W_Q(self) -> Shaped[Tensor, "n_head d_model d_qk"]:
        return self._split_heads(self.w_q1)

    @property
    def W_K(self) -> Shaped[Tensor, "n_head d_model d_qk"]:
        return self._split_heads(self.w_k1)

    @property
    def W_Q2(self) -> Shaped[Tensor, "n_head d_model d_qk"] | None:
        return None if self.w_q2 is None else self._split_heads(self.w_q2)

    @property
    def W_K2(self) -> Shaped[Tensor, "n_head d_model d_qk"] | None:
        return None if self.w_k2 is None else self._split_heads(self.w_k2)

    @property
    def W_V(self) -> Shaped[Tensor, "n_head d_model d_head"]:
        return self._split_heads(self.w_v)

    @property
    def W_O(self) -> Shaped[Tensor, "n_head d_head d_model"]:
        return rearrange(self.w_o, "m (h d) -> h d m", h=self.n_head)

    def _split_heads(self, w: Any) -> Tensor:
        return rearrange(w, "(h d) m -> h m d", h=self.n_head)


class LensMLP(MLP):
    """An MLP that also has transformer-lens's weight names: views; biases that the model lacks are zeros.

    With two encoders ``W_gate`` is the one that the activation acts on, as in transformer-lens, and ``W_in`` the other.
    """

    @property
    def W_in(self) -> Shaped[Tensor, "d_model d_hidden"]:
        return (self.w_r if self.gated else self.w_l).mT

    @property
    def W_out(self) -> Shaped[Tensor, "d_hidden d_model"]:
        return self.w_d.mT

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
    """A block with the marker that transformer-lens's readouts ask for."""

    hook_out_is_single_residual_stream = True


class LensEmbedding(Embedding):
    """An embedding that also has transformer-lens's weight name: ``W_E``, a view."""

    @property
    def W_E(self) -> Shaped[Tensor, "d_vocab d_model"]:
        return self.w_e


class LensUnembedding(Unembedding):
    """An unembedding that also has transformer-lens's weight names: ``W_U``, a view, and ``b_U``, zeros."""

    @property
    def W_U(self) -> Shaped[Tensor, "d_model d_vocab"]:
        return self.w_u.mT

    @property
    def b_U(self) -> Shaped[Tensor, " d_vocab"]:
        return self.w_u.new_zeros(self.w_u.shape[0])


_LENS_CLASS: dict[type[nn.Module], type[nn.Module]] = {
    Attention: LensAttention,
    MLP: LensMLP,
    Block: LensBlock,
    Embedding: LensEmbedding,
    Unembedding: LensUnembedding,
}
_PART_OF_BLOCK = {
    **dict.fromkeys(("W_Q", "W_K", "W_Q2", "W_K2", "W_V", "W_O"), "attn"),
    **dict.fromkeys(("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out"), "mlp"),
}


class ModelWeights:
    """Weights of a whole model, as copies made at each access; gradients reach the parameters through them.

    A base class of :class:`tnlm.lens.hooked.HookedModel`, which has ``embed``, ``blocks`` and ``unembed``.
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

    # No property for each name: torch hides the text of an AttributeError that is raised inside a module's property.
    def __getattr__(self, name: str) -> Any:
        """``W_Q``, ``W_in`` and the other weights of a block: those of every block, stacked along ``n_layer``."""
        part = _PART_OF_BLOCK.get(name)
        if part is None:
            return super().__getattr__(name)  # type: ignore[misc]
        found = [getattr(getattr(block, part), name, None) for block in self.blocks]
        weights = [w for w in found if w is not None]
        if len(weights) < len(found):
            raise AttributeError(f"this model has no {name}: it is no part of every block's {part}")
        return torch.stack(weights)

    @property
    def QK(self) -> FactoredMatrix:
        """``W_Q W_K^T`` of the first query-key pair, ``(n_layer, n_head, d_model, d_model)``, without ``1 / d_qk``.

        QK-norm and rotation act between the two factors in the forward and are not part of it.
        """
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def QK2(self) -> FactoredMatrix:
        """``W_Q2 W_K2^T`` of the second query-key pair (bilinear and differential attention); otherwise as ``QK``."""
        return FactoredMatrix(self.W_Q2, self.W_K2.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """Map of a head from its own layer's normed input to its output per unit of pattern: ``(1 - lamb) W_V W_O``.

        The value residual adds :attr:`OV_first` times block 0's normed input; the two sum to ``attn_out``. In block 0
        both inputs are the same, and ``OV`` is the whole map.
        """
        return FactoredMatrix(self.own_share()[:, None, None, None] * self.W_V, self.W_O)

    @property
    def OV_first(self) -> FactoredMatrix:
        """Map of a head from block 0's normed input, ``lamb W_V[0] W_O``; zero without value residual."""
        w_v = self.W_V
        return FactoredMatrix((1 - self.own_share())[:, None, None, None] * w_v[:1], self.W_O)

    def own_share(self) -> Shaped[Tensor, " n_layer"]:
        """``1 - lamb`` of each block: the share of its own values in the mix with block 0's; 1 in block 0."""
        own = [torch.ones_like(b.attn.w_v[0, 0]) if b.attn.lamb is None else 1 - b.attn.lamb[0] for b in self.blocks]
        return torch.stack([torch.ones_like(own[0]), *own[1:]])

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Shaped[Tensor, " d_model"]:
        """Sum of the MLP output biases below ``layer``, each with the factors of the mixing that follows it.

        These models add no other bias to the residual stream.
        """
        layer, end = target(layer, len(self.blocks), mlp_input=mlp_input, mixed=False)
        w_e = self.embed.w_e
        return w_e.new_zeros(w_e.shape[1]) + (bias_sum(self.blocks, layer, end) if include_mlp_biases else 0)


def shared_view(
    module: nn.Module, make_point: Callable[[nn.Module], nn.Module], seen: dict[int, nn.Module] | None = None
) -> Any:
    """The same module with submodules of its own that have transformer-lens's names and points made by ``make_point``.

    Parameters, buffers and hook registries are those of ``module``, by identity. A module that occurs twice stays one.
    """
    seen = {} if seen is None else seen
    if id(module) not in seen:
        new = seen[id(module)] = _shallow_copy(module, _LENS_CLASS.get(type(module), type(module)))
        new._modules = {}
        for name, child in module._modules.items():
            if child is None:
                new._modules[name] = None
            elif isinstance(child, Point):
                new._modules[name] = make_point(child)
            else:
                new._modules[name] = shared_view(child, make_point, seen)
    return seen[id(module)]


def _shallow_copy(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A module of class ``kind`` with the attributes of ``module``, of whose class it is a subclass.

    Made without ``__init__``, which would allocate and draw parameters.
    """
    new = kind.__new__(kind)
    new.__setstate__(module.__dict__)
    return new
