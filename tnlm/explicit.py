"""Layers and whole models of the polynomial kinds as tensor networks (`Network`).

The formula of the attention pattern is in ``Attention._pattern``, and for the kernels in ``kernels/eager.py``.

A product of tensors has one degree in each of its inputs; a transformer does not: biases are of degree 0, the residual
of degree 1, attention of degree 5. Therefore every vector is held with a constant in front, ``(1, x)``, and

- a bias is a column that reads the constant;
- ``x + mlp(x)`` is an MLP with ``1 + d_model`` more hidden units, each the product of 1 and one entry of ``(1, x)``;
- ``x + attn(x)`` is an attention with more heads, which attend to their own position with weight 1 and copy a slice of
  ``(1, x)``: *copy heads*;
- a sum of two linear maps is a product with an index ``term``, in whose term ``t`` all factors but one read the 1.

Each layer is one node, contracted once. One-hot tokens need no constant: the sum over the vocabulary is 1.
The inverse norms of normed models are inputs, ``(1, 1 / scale)`` per position or per position and head. Formulas and
costs are in ``docs/tensors.md``.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tnlm.config import NOT_POLYNOMIAL, POLYNOMIAL_ATTENTIONS, POLYNOMIAL_MLPS
from tnlm.network import DEFAULT_MAX_BYTES, Network, Operand
from tnlm.norm import RMSNorm
from tnlm.points import record
from tnlm.rotary import rotary_tables, rotate

if TYPE_CHECKING:  # the model imports this module
    from tnlm.attention import Attention
    from tnlm.mlp import MLP
    from tnlm.transformer import Transformer


def augment(x: Float[Tensor, "*axes d"]) -> Float[Tensor, "*axes one_plus_d"]:
    """``(1, x)`` along the last axis: the input of a network with biases."""
    return F.pad(x, (1, 0), value=1.0)


@dataclass(frozen=True)
class _Read:
    """The vector that a layer reads, ``(1, x, norm(x))``, as an operand; ``1`` and ``norm(x)`` may be absent.

    Without a norm, ``norm(x)`` is ``x``.
    """

    source: Operand
    d_model: int
    constant: bool = True
    normed: bool = False

    def columns(self, *, one: Tensor | None = None, raw: Tensor | None = None, read: Tensor | None = None) -> Tensor:
        """Weights ``(..., size)`` on that vector.

        Args:
            one: Weights on the 1, ``(...)``.
            raw, read: Weights on ``x`` and on ``norm(x)``, ``(..., d_model)``.
        """
        given = [one, *(matrix[..., 0] for matrix in (raw, read) if matrix is not None)]
        zero = next(torch.zeros_like(column) for column in given if column is not None)
        zeros = zero[..., None].expand(*zero.shape, self.d_model)
        parts = [(zero if one is None else one)[..., None]] if self.constant else []
        if self.normed:
            parts += [zeros if raw is None else raw, zeros if read is None else read]
        else:
            parts.append(next((matrix for matrix in (raw, read) if matrix is not None), zeros))
        return torch.cat(parts, dim=-1)


# MLP


def mlp_network(mlp: "MLP") -> Network:
    """``mlp(x)`` as a network; see `tnlm.mlp.MLP.network`."""
    read = _Read("x", mlp.d_in, constant=mlp.reads_constant)
    return _mlp(mlp, read, axes="batch", copies=int(mlp.reads_constant), name="mlp")


def mlp_tensor(mlp: "MLP", max_bytes: int = DEFAULT_MAX_BYTES) -> Float[Tensor, "d_out d_in d_in"]:
    """Dense third-order tensor, symmetric in its inputs; see `tnlm.mlp.MLP.tensor`."""
    w_d, w_l, w_r = _mlp_weights(mlp, _Read("x", mlp.d_in, constant=mlp.reads_constant), int(mlp.reads_constant))
    net = Network([(w_d, "d_out d_hidden"), (w_l, "d_hidden i"), (w_r, "d_hidden j")], "d_out i j", name="mlp tensor")
    t = net.contract(max_bytes=max_bytes)
    return (t + t.mT) / 2


def _mlp(mlp: "MLP", read: _Read, *, axes: str, copies: int, name: str) -> Network:
    w_d, w_l, w_r = _mlp_weights(mlp, read, copies)
    return Network(
        [
            (w_d, "d_out d_hidden"),
            (w_l, "d_hidden in_l"),
            (read.source, f"{axes} in_l"),
            (w_r, "d_hidden in_r"),
            (read.source, f"{axes} in_r"),
        ],
        f"{axes} d_out",
        name=name,
    )


def _mlp_weights(mlp: "MLP", read: _Read, copies: int) -> tuple[Tensor, Tensor, Tensor]:
    """``w_d, w_l, w_r`` with ``copies`` more hidden units, which hold the first entries of ``(1, x)``.

    With one copy, the 1, the output is ``mlp(x)``, and the bias is the output weight of that unit. With ``1 + d_model``
    copies, all of ``(1, x)``, the output is ``(1, x + mlp(x))``.
    """
    _require_polynomial("mlp", mlp.kind, POLYNOMIAL_MLPS)
    left = read.columns(one=_like(mlp.b_l, mlp.w_l), read=mlp.w_l)
    right = left if mlp.w_r is None else read.columns(one=_like(mlp.b_r, mlp.w_r), read=mlp.w_r)
    if not copies:
        return mlp.w_d, left, right
    whole = copies > 1
    identity = torch.eye(copies, 1 + mlp.d_in).to(mlp.w_l)
    w_l = torch.cat([left, read.columns(one=identity.new_ones(copies))])
    w_r = torch.cat([right, read.columns(one=identity[:, 0], raw=identity[:, 1:])])
    carry = identity if whole else identity.new_zeros(mlp.d_out, 1)
    if mlp.bias is not None:
        bias = F.pad(mlp.bias.to(carry.dtype), (int(whole), 0))
        carry = carry + F.pad(bias[:, None], (0, copies - 1))
    return torch.cat([F.pad(mlp.w_d, (0, 0, int(whole), 0)), carry], dim=1), w_l, w_r


def _like(bias: Tensor | None, w: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(w.dtype)


# Attention


def attention_network(attn: "Attention", seq: int, *, v_first: bool = False) -> Network:
    """``attn(x)`` as a network; see `tnlm.attention.Attention.network`."""
    if v_first and attn.lamb is None:
        raise ValueError("v_first=True needs an attention with a value residual, got one without lamb")
    read = _Read("x", attn.d_model, constant=attn.b_q1 is not None or v_first)
    first = None
    if v_first:
        entries = torch.eye(attn.d_model).to(attn.w_v)
        first = _Read("v_first", attn.d_model), _heads(attn, entries)
    return _attention(attn, seq, read, first, copies=0, prefix="")


def _attention(
    attn: "Attention",
    seq: int,
    read: _Read,
    first: tuple[_Read, Tensor] | None,
    *,
    copies: int,
    prefix: str,
) -> Network:
    """``attn(x)``, or with ``n_head + 1`` copy heads ``(1, x + attn(x))``.

    With copy heads ``d_qk`` has one more entry, which is not rotated: 1 in the copy heads, 0 in the others. The
    scores of copy heads are 1, and their mask is the unit matrix.

    Args:
        read: Input of queries, keys and values.
        first: Input of block 0's values, and the weights of these on it by head; None in block 0.
        copies: Number of copy heads.
        prefix: Put before the names of nodes and inputs.
    """
    _require_polynomial("attention", attn.kind, POLYNOMIAL_ATTENTIONS)
    rotation = _rotation(attn, seq, padded=copies > 0)
    project = partial(_query_or_key, attn, read=read, rotation=rotation, copies=copies, prefix=prefix)
    q1 = project("q1", attn.w_q1, attn.b_q1, attn.q_norm)
    k1 = project("k1", attn.w_k1, attn.b_k1, attn.k_norm)
    q2, k2 = q1, k1
    if attn.kind == "bilinear":
        q2 = project("q2", attn.w_q2, attn.b_q2, attn.q2_norm)
        k2 = project("k2", attn.w_k2, attn.b_k2, attn.k2_norm)
    value, w_o = _value(attn, read, first, copies=copies, name=f"{prefix}v")
    causal = _wide(torch.ones(seq, seq).tril().to(attn.w_v)) / attn.d_qk**2
    mask = torch.cat([causal.expand(attn.n_head, seq, seq), torch.eye(seq).to(causal).expand(copies, seq, seq)])
    operands: list[tuple[Operand, str]] = [
        (mask, "head seq_q seq_k"),
        (q1, "batch seq_q head d_qk1"),
        (k1, "batch seq_k head d_qk1"),
        (q2, "batch seq_q head d_qk2"),
        (k2, "batch seq_k head d_qk2"),
        (value, "batch seq_k head d_head"),
        (w_o, "d_model head d_head"),
    ]
    return Network(operands, "batch seq_q d_model", name=prefix[:-1] or "attn")


def _query_or_key(
    attn: "Attention",
    name: str,
    weight: Tensor,
    bias: Tensor | None,
    norm: nn.Module,
    *,
    read: _Read,
    rotation: Tensor,
    copies: int,
    prefix: str,
) -> Network:
    """Rotated queries or keys ``(batch, seq, head, d_qk)``; with QK-norm their inverse norms are an input."""
    w = _heads(attn, weight)
    weight = read.columns(one=None if bias is None else bias.view(attn.n_head, -1).to(w.dtype), read=w)
    if copies:
        ones = F.pad(w.new_ones(copies, 1), (attn.d_qk, 0))
        weight = torch.cat([F.pad(weight, (0, 0, 0, 1)), read.columns(one=ones)])
    operands: list[tuple[Operand, str]] = [
        (weight, "head d_unrotated d_read"),
        (read.source, "batch seq d_read"),
        (rotation, "seq d_qk d_unrotated"),
    ]
    if isinstance(norm, RMSNorm):
        # the input is (1, inverse norms): head n takes entry 1 + n, a copy head the 1
        one, entries = torch.eye(1 + attn.n_head).to(w).split([1, attn.n_head])
        select = torch.cat([entries, one.expand(copies, -1)])
        scale = f"{prefix}{name.removesuffix('1')}_norm.hook_scale"
        operands += [(scale, "batch seq grade"), (select, "head grade")]
    return Network(operands, "batch seq head d_qk", name=f"{prefix}{name}")


def _value(
    attn: "Attention", read: _Read, first: tuple[_Read, Tensor] | None, *, copies: int, name: str
) -> tuple[Network, Tensor]:
    """Network of the values ``(batch, seq, head, d_head)``, mixed with block 0's if ``first`` is given; and ``w_o``."""
    w_v, w_o = _heads(attn, attn.w_v), attn.w_o.clone().view(attn.d_model, attn.n_head, attn.d_head)
    weight = read.columns(read=w_v)
    if copies:
        slices = torch.eye(copies * attn.d_head, 1 + attn.d_model).to(w_v).view(copies, attn.d_head, -1)
        weight = torch.cat([weight, read.columns(one=slices[..., 0], raw=slices[..., 1:])])
        w_o = torch.cat([F.pad(w_o, (0, 0, 0, 0, 1, 0)), slices.permute(2, 0, 1)], dim=1)
    if first is None:
        return Network([(weight, "head d_head d_read"), (read.source, "batch seq d_read")], _VALUE, name=name), w_o
    # term 0 is (1 - lamb) v times the 1 of the other source, term 1 is 1 times lamb v_first; copy heads have no term 1
    source, map_first = first
    lamb = _wide(attn.lamb)  # type: ignore[arg-type]
    share = F.pad((1 - lamb).expand(attn.n_head), (0, copies), value=1.0)
    ones = w_v.new_ones(attn.n_head, attn.d_head)
    all_ones, mixed_only = (F.pad(ones, (0, 0, 0, copies), value=value) for value in (1.0, 0.0))
    value_first = F.pad(lamb * source.columns(read=map_first), (0, 0, 0, 0, 0, copies))
    operands: list[tuple[Operand, str]] = [
        (torch.stack([share[:, None, None] * weight, read.columns(one=mixed_only)]), "term head d_head d_read"),
        (read.source, "batch seq d_read"),
        (torch.stack([source.columns(one=all_ones), value_first]), "term head d_head d_first"),
        (source.source, "batch seq d_first"),
    ]
    return Network(operands, _VALUE, name=name), w_o


_VALUE = "batch seq head d_head"


def _rotation(attn: "Attention", seq: int, *, padded: bool) -> Float[Tensor, "seq d_qk d_qk"]:
    """Rotation matrix of every position, output axis first; ``padded`` appends an entry that is not rotated."""
    unit = _wide(torch.eye(attn.d_qk).to(attn.w_v))
    cos, sin = rotary_tables(seq, attn.d_qk, base=attn.rotary_base, dtype=attn.rotary_table_dtype, device=unit.device)
    matrices = rotate(unit[:, None, None, :].expand(-1, seq, 1, -1), cos, sin)[:, :, 0].permute(1, 2, 0)
    if not padded:
        return matrices
    corner = torch.zeros(attn.d_qk + 1, attn.d_qk + 1).to(unit)
    corner[-1, -1] = 1
    return F.pad(matrices, (0, 1, 0, 1)) + corner


def _wide(x: Tensor) -> Tensor:
    """``x`` in float32 or wider, so that numbers other than 0 and 1 keep their digits in a bf16 model."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _heads(attn: "Attention", w: Tensor) -> Tensor:
    """Rows of a projection by head: ``(n_head, d, d_in)``."""
    return w.view(attn.n_head, -1, w.shape[-1])


# Whole models


def transformer_network(model: "Transformer", seq: int) -> Network:
    """Logits before the softcap as a network; see `tnlm.transformer.Transformer.network`."""
    config = model.config
    if not 0 <= seq <= config.n_ctx:
        raise ValueError(f"seq must be between 0 and n_ctx={config.n_ctx}, got {seq}")
    residual = _Residual(model.unembed.w_u, config.d_model)
    table = augment(model.embed.w_e)
    x = Network([("tokens", "batch seq d_vocab"), (table, "d_vocab d_model")], "batch seq d_model", name="embed")
    if config.embedding_norm:
        x = residual.norm(model.ln_embed, x, "ln_embed")
    x0 = x
    first: tuple[_Read, Tensor] | None = None
    blocks: list[Any] = list(model.blocks)
    for layer, block in enumerate(blocks):
        name = f"blocks.{layer}"
        if block.lambdas is not None:
            x = residual.mix(block.lambdas, x, x0, f"{name}.mix")
        if block.attn is not None:
            read = residual.read(block.ln1, x, f"{name}.ln1")
            x = _attention(block.attn, seq, read, first, copies=config.n_head + 1, prefix=f"{name}.attn.")
            if block.attn.lamb is not None and first is None:
                first = read, _heads(block.attn, block.attn.w_v)
        if block.mlp is not None:
            read = residual.read(block.ln2, x, f"{name}.ln2")
            x = _mlp(block.mlp, read, axes="batch seq", copies=1 + config.d_model, name=f"{name}.mlp")
    x = residual.norm(model.ln_final, x, "ln_final")
    operands: list[tuple[Operand, str]] = [
        (model.unembed.w_u.clone(), "d_vocab d_model"),
        (residual.entries, "d_model d"),
        (x, "batch seq d"),
    ]
    return Network(operands, "batch seq d_vocab", name="transformer")


def inverse_norms(model: "Transformer", tokens: Int[Tensor, "batch seq"]) -> dict[str, Tensor]:
    """Inverse norms of a run; see `tnlm.transformer.Transformer.inverse_norms`."""
    names = [f"{name}.hook_scale" for name, module in model.named_modules() if isinstance(module, RMSNorm)]
    seen = record(model, tokens, names)
    return {name: augment((1 / seen[name]).flatten(2)) for name in names}


class _Residual:
    """Linear maps on ``(1, x)`` that all layers share: norm, input of a layer, mixing with the embedding."""

    def __init__(self, like: Tensor, d_model: int) -> None:
        self.d_model = d_model
        unit = torch.eye(1 + d_model).to(like)
        self.entries = unit[1:]
        constant, vector = torch.zeros_like(unit), unit.clone()
        constant[0, 0], vector[0, 0] = 1, 0
        self._normed = torch.stack([constant, vector])
        nothing = torch.zeros_like(unit)
        self._both = torch.stack([torch.cat([unit, nothing[1:]]), torch.cat([nothing, unit[1:]])])
        ones = torch.zeros_like(unit)
        ones[:, 0] = 1
        self._of_x, self._of_x0 = torch.stack([unit, ones]), torch.stack([ones, unit])

    def norm(self, norm: nn.Module, x: Network, name: str) -> Network:
        """``(1, norm(x))``."""
        return self._scale(self._normed, x, name) if isinstance(norm, RMSNorm) else x

    def read(self, norm: nn.Module, x: Network, name: str) -> _Read:
        """``(1, x, norm(x))``, or ``(1, x)`` without a norm."""
        if not isinstance(norm, RMSNorm):
            return _Read(x, self.d_model)
        return _Read(self._scale(self._both, x, name), self.d_model, normed=True)

    def _scale(self, maps: Tensor, x: Network, name: str) -> Network:
        """``maps[0] x + maps[1] x / scale``; the input ``scale`` of the network is ``(1, 1 / scale)``."""
        operands: list[tuple[Operand, str]] = [
            (maps, "grade d_out d_in"),
            (f"{name}.hook_scale", "batch seq grade"),
            (x, "batch seq d_in"),
        ]
        return Network(operands, "batch seq d_out", name=name)

    def mix(self, lambdas: Tensor, x: Network, x0: Network, name: str) -> Network:
        """``(1, a x + b x0)``: term 0 is an entry of ``(1, x)`` times the 1 of x0, term 1 an entry of x0 times 1."""
        scales = torch.cat([lambdas.new_tensor([[1.0], [0.0]]), lambdas[:, None].expand(2, self.d_model)], dim=1)
        operands: list[tuple[Operand, str]] = [(scales, "term d")]
        if x is x0:
            operands.append((x, "batch seq d"))
        else:
            operands += [(self._of_x, "term d d_x"), (x, "batch seq d_x")]
            operands += [(self._of_x0, "term d d_x0"), (x0, "batch seq d_x0")]
        return Network(operands, "batch seq d", name=name)


def _require_polynomial(field: str, kind: str, polynomial: Collection[str]) -> None:
    if kind not in polynomial:
        raise ValueError(
            f"{field}={kind!r} has no tensor network: {NOT_POLYNOMIAL[kind]}; "
            f"the kinds that have one are {', '.join(kind for kind in polynomial if kind != 'none')}"
        )
