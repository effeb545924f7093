"""Attention: the bilinear and squared kinds are polynomials, the others are the baselines they are compared with."""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from tnlm.cache import LayerCache, LayerState
from tnlm.config import ModelConfig
from tnlm.explicit import attention_network
from tnlm.kernels import Implementation, Rotation, bilinear_attention, linear, squared_attention
from tnlm.kernels.precision import HALF, accumulation_dtype, narrow
from tnlm.network import Network
from tnlm.norm import NoNorm, RMSNorm
from tnlm.points import Point, listened

ROW_EPS = 1e-8
"""Added to the row sum of ``squared_normalized`` (loganriggs/modded-nanogpt at a1a8c1d)."""


class Attention(nn.Module):
    """Causal multi-head attention, ``O sum_j P_ij v_j``, whose pattern ``P`` depends on the kind.

    With ``s = q.k`` and ``r = q2.k2`` after QK-norm and rotation, ``d = d_qk``, and ``j <= i``:

    - ``bilinear``: ``(s / d)(r / d)``, signed, rows unnormalised; a polynomial without QK-norm.
    - ``squared``: ``(s / d)**2``; likewise.
    - ``squared_normalized``: ``w / (sum_j w + 1e-8)`` with ``w = s**2 / d``.
    - ``softmax``: ``softmax_j(s / sqrt(d))``.
    - ``differential``: ``softmax_j(s / d) - bilinear_lamb softmax_j(r / d)``.

    Order: value residual (``v <- (1 - lamb) v + lamb v_first``, ``v_first`` being block 0's raw value), QK-norm per
    head, rotation, pattern. Kinds with one query-key pair hold None for the parameters and points of the second.

    ``implementation`` is passed to :mod:`tnlm.kernels`, except that ``"eager"`` is the definition in this file for
    every kind: it forms scores, pattern and per-head results, so that hooks do not change its bits. The others form
    scores and pattern only when ``hook_attn_scores``, ``hook_attn_scores2`` or ``hook_pattern`` has a hook, and
    per-head results only when ``hook_result`` has one. Half precision is accumulated in float32.

    Source: ``train_gpt2.py`` of loganriggs/modded-nanogpt at d5ce2de.
    """

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
        self.kind = config.attention
        self.implementation: Implementation = implementation
        self.n_head, self.d_model, self.d_head = config.n_head, config.d_model, config.d_head
        self.d_qk: int = config.d_qk
        self.rotary_base, self.rotary_table_dtype = config.rotary_base, getattr(torch, config.rotary_table_dtype)
        two = config.n_qk == 2
        self.branches = ("1", "2") if two else ("1",)

        def weight(d_out: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(d_out, config.d_model, **factory_kwargs))

        def vector(size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, **factory_kwargs))

        def norm() -> nn.Module:
            return RMSNorm(config.norm_eps) if config.qk_norm else NoNorm()

        # the order of the lines is that of the parameters and points: optimisers and recordings depend on it;
        # Any: None with one pair, and read only with two
        d_qk_all = self.n_head * self.d_qk
        self.w_q1 = weight(d_qk_all)
        self.b_q1 = vector(d_qk_all) if config.qk_bias else None
        self.w_k1 = weight(d_qk_all)
        self.b_k1 = vector(d_qk_all) if config.qk_bias else None
        self.w_q2: Any = weight(d_qk_all) if two else None
        self.b_q2 = vector(d_qk_all) if two and config.qk_bias else None
        self.w_k2: Any = weight(d_qk_all) if two else None
        self.b_k2 = vector(d_qk_all) if two and config.qk_bias else None
        self.w_v = weight(self.d_model)
        self.w_o = weight(self.d_model)
        self.lamb = vector(1) if config.value_residual else None
        self.bilinear_lamb: Any = vector(1) if self.kind == "differential" else None

        self.hook_q = Point()
        self.q_norm = norm()
        self.hook_rot_q = Point()
        self.hook_k = Point()
        self.k_norm = norm()
        self.hook_rot_k = Point()
        self.hook_attn_scores = Point()
        self.hook_q2: Any = Point() if two else None
        self.q2_norm: Any = norm() if two else None
        self.hook_rot_q2: Any = Point() if two else None
        self.hook_k2: Any = Point() if two else None
        self.k2_norm: Any = norm() if two else None
        self.hook_rot_k2: Any = Point() if two else None
        self.hook_attn_scores2: Any = Point() if two else None
        self.hook_v = Point()
        self.hook_v_mixed = Point()
        self.hook_pattern = Point()
        self.hook_z = Point()
        self.hook_result = Point()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform queries, keys and values in ``+-1/sqrt(d_model)``; output and biases 0; published mixing scalars."""
        for w in (self.w_q1, self.w_k1, self.w_q2, self.w_k2, self.w_v):
            if w is not None:
                nn.init.uniform_(w, -(self.d_model**-0.5), self.d_model**-0.5)
        for p in (self.w_o, self.b_q1, self.b_k1, self.b_q2, self.b_k2):
            if p is not None:
                nn.init.zeros_(p)
        if self.lamb is not None:
            nn.init.constant_(self.lamb, 0.5)
        if self.bilinear_lamb is not None:
            nn.init.constant_(self.bilinear_lamb, 0.8)

    def forward(
        self,
        x: Shaped[Tensor, "batch seq d_model"],
        v_first: Shaped[Tensor, "batch seq n_head d_head"] | None,
        tables: tuple[Float[Tensor, "seq half"], Float[Tensor, "seq half"]],
        cache: LayerCache | LayerState | None = None,
    ) -> tuple[Shaped[Tensor, "batch seq d_model"], Shaped[Tensor, "batch seq n_head d_head"]]:
        """The attention's output and the value that later blocks mix with (this block's own if ``v_first`` is None).

        ``tables`` are the cosines and sines of :func:`tnlm.rotary.rotary_tables`.
        """
        v = self.hook_v(self._heads(linear(x, self.w_v)))
        if v_first is None:
            v_first = v
        if self.lamb is not None:
            lamb = self.lamb.to(x.dtype)  # half precision rounds in the published order
            v = (1 - lamb) * v + lamb * v_first if v.dtype in HALF else torch.lerp(v, v_first, lamb)
        v = self.hook_v_mixed(v)
        # Rotary embedding: each query and key is projected, normed, then rotated
        rotate, heads = Rotation(*tables), self._heads
        q1 = self.hook_rot_q(rotate(self.q_norm(self.hook_q(heads(linear(x, self.w_q1, self.b_q1))))))
        k1 = self.hook_rot_k(rotate(self.k_norm(self.hook_k(heads(linear(x, self.w_k1, self.b_k1))))))
        qk = [q1, k1]
        if self.w_q2 is not None:
            q2 = self.hook_rot_q2(rotate(self.q2_norm(self.hook_q2(heads(linear(x, self.w_q2, self.b_q2))))))
            k2 = self.hook_rot_k2(rotate(self.k2_norm(self.hook_k2(heads(linear(x, self.w_k2, self.b_k2))))))
            qk += [q2, k2]
        if isinstance(cache, LayerState):
            if self.pattern_wanted:
                raise ValueError(
                    "a recurrent state forms no pattern, but a point of scores or pattern has a hook; "
                    'use the key-value cache ("kv") or none'
                )
            z = cache.answer(qk, v)
        else:
            if cache is not None:
                qk[1::2], v = cache.extend(qk[1::2], v)
            z = self.attend(qk, v)
        z = self.hook_z(z)
        if self.implementation == "eager" or listened(self.hook_result):
            w_o = rearrange(
                self.w_o.to(z.dtype), "d_model (n_head d_head) -> n_head d_head d_model", n_head=self.n_head
            )
            result = self.hook_result(torch.einsum("bshd,hdm->bshm", z, w_o))
            return result.sum(2), v_first
        return linear(rearrange(z, "batch seq n_head d_head -> batch seq (n_head d_head)"), self.w_o), v_first

    def attend(
        self, qk: list[Tensor], v: Shaped[Tensor, "batch seq_k n_head d_head"]
    ) -> Shaped[Tensor, "batch seq_q n_head d_head"]:
        """``z_i = sum_j P_ij v_j``; ``qk`` is ``[q1, k1]`` or ``[q1, k1, q2, k2]``; the last query sees every key."""
        if self.pattern_wanted:
            wide = accumulation_dtype(v.dtype)
            z = torch.einsum("bhqk,bkhd->bqhd", self._pattern([t.to(wide) for t in qk]), v.to(wide))
            return narrow(z, v.dtype)
        if self.kind == "bilinear":
            q1, k1, q2, k2 = qk
            return bilinear_attention(q1, k1, q2, k2, v, implementation=self.implementation)
        if self.kind == "squared":
            return squared_attention(qk[0], qk[1], v, implementation=self.implementation)
        if self.kind == "squared_normalized":
            return self._squared_normalized(qk[0], qk[1], v)
        if self.kind == "softmax":
            return _softmax_attention(qk[0], qk[1], v, scale=self.d_qk**-0.5)
        q1, k1, q2, k2 = qk
        first = _softmax_attention(q1, k1, v, scale=1 / self.d_qk)
        second = _softmax_attention(q2, k2, v, scale=1 / self.d_qk)
        return first - self.bilinear_lamb.to(v.dtype) * second

    def network(self, seq: int, *, v_first: bool = False) -> Network:
        """``attn(x)`` at positions ``0..seq`` as a network, with one node for each of q, k (of each pair) and v.

        Exact; with QK-norm exact given the norms of this run. Inputs: ``x``, ``(batch, seq, d_model)``, with QK biases
        or a value residual ``(batch, seq, 1 + d_model)``: the constant 1 in front, as :func:`tnlm.explicit.augment`
        makes it. With QK-norm ``q_norm.hook_scale`` (``k_norm``, ``q2_norm``, ``k2_norm``), ``(batch, seq, 1 +
        n_head)``: 1, then each head's *inverse* norm.

        Args:
            seq: Number of positions; mask, scale and rotation are constants of the network.
            v_first: Mix with block 0's value, the input ``v_first`` ``(batch, seq, 1 + d_model)``: 1, then the value's
                heads side by side. Without it the network is that of block 0, where mixing changes nothing.

        Cost: given by ``cost({"batch": ...})``; about that of the eager implementation.

        Raises:
            ValueError: The kind is not a polynomial, or ``v_first`` without a value residual.
        """
        return attention_network(self, seq, v_first=v_first)

    @property
    def pattern_wanted(self) -> bool:
        """Whether scores and pattern must be formed: one of their points has a hook, or the definition is asked for."""
        points = (self.hook_pattern, self.hook_attn_scores, self.hook_attn_scores2)
        return self.implementation == "eager" or listened(*(p for p in points if p is not None))

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "batch seq (n_head d) -> batch seq n_head d", n_head=self.n_head)

    def _pattern(self, qk: list[Tensor]) -> Shaped[Tensor, "batch n_head seq_q seq_k"]:
        """The attention pattern of every kind by its definition (the formula), through every named point.

        The kernels do not form it; their own definition of two kinds is ``tnlm/kernels/eager.py``.
        """
        scale = self.d_qk**-0.5 if self.kind in ("softmax", "squared_normalized") else 1 / self.d_qk
        scores = self.hook_attn_scores(torch.einsum("bqhd,bkhd->bhqk", qk[0], qk[1]) * scale)
        scores2 = scores
        if self.hook_attn_scores2 is not None:
            scores2 = self.hook_attn_scores2(torch.einsum("bqhd,bkhd->bhqk", qk[2], qk[3]) * scale)
        keep = causal_mask(scores.shape[-2], scores.shape[-1], device=scores.device)
        if self.kind == "softmax":
            pattern = _masked_softmax(scores, keep)
        elif self.kind == "differential":
            lamb = self.bilinear_lamb.to(qk[0].dtype)
            pattern = _masked_softmax(scores, keep) - lamb * _masked_softmax(scores2, keep)
        else:
            pattern = (scores * scores2).masked_fill(~keep, 0)
            if self.kind == "squared_normalized":
                pattern = pattern / (pattern.sum(-1, keepdim=True) + ROW_EPS)
        return self.hook_pattern(pattern)

    def _squared_normalized(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Squared attention of the values divided by that of a column of ones; half precision in float32."""
        q, k, wide = (t.to(accumulation_dtype(t.dtype)) for t in (q, k, v))
        values = torch.cat([wide, torch.ones_like(wide[..., :1])], dim=-1)
        out = squared_attention(q, k, values, scale=1 / self.d_qk, implementation=self.implementation)
        return (out[..., :-1] / (out[..., -1:] + ROW_EPS)).to(v.dtype)

    def extra_repr(self) -> str:
        return f"kind={self.kind}, n_head={self.n_head}, d_head={self.d_head}, d_qk={self.d_qk}"


def causal_mask(seq_q: int, seq_k: int, *, device: torch.device | None = None) -> Tensor:
    """(seq_q, seq_k), true where query i may see key j: aligned bottom-right, so the last query sees every key."""
    return torch.ones(seq_q, seq_k, dtype=torch.bool, device=device).tril(seq_k - seq_q)


def _masked_softmax(scores: Tensor, keep: Tensor) -> Tensor:
    return scores.masked_fill(~keep, float("-inf")).softmax(-1)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """torch's SDPA on ``(batch, seq, n_head, d)``, causal and aligned bottom-right."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    seq_q, seq_k = q.shape[-2], k.shape[-2]
    if seq_q == seq_k:
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        keep = None if seq_q == 1 else causal_mask(seq_q, seq_k, device=q.device)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=scale)
    return z.transpose(1, 2)
