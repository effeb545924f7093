"""The attention kinds: bilinear and squared are polynomials, the others are the baselines they are compared with."""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from tnlm.cache import LayerCache, LayerState
from tnlm.config import ModelConfig
from tnlm.kernels import Implementation, bilinear_attention, squared_attention
from tnlm.kernels.precision import accumulation_dtype, narrow
from tnlm.mlp import linear
from tnlm.network import Network
from tnlm.norm import HALF, NoNorm, RMSNorm
from tnlm.points import Point, listened
from tnlm.rotary import Rotation

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
    head, rotation, pattern. ``implementation`` is passed to :mod:`tnlm.kernels`, except that ``"eager"`` is the
    definition below for every kind: it forms scores, pattern and per-head results, so its bits do not depend on who
    listens. The others form them only when ``hook_attn_scores``, ``hook_attn_scores2`` or ``hook_pattern``, and
    ``hook_result``, are listened to. Half precision is accumulated in float32.

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
        self.kind = config.attention
        self.implementation: Implementation = implementation
        self.n_head, self.d_model, self.d_head = config.n_head, config.d_model, config.d_head
        self.d_qk: int = config.d_qk
        self.rotary_base, self.rotary_table_dtype = config.rotary_base, getattr(torch, config.rotary_table_dtype)
        self.branches = ("1", "2")[: config.n_qk]
        new: dict[str, Any] = {"dtype": dtype, "device": device}
        d_qk_all = self.n_head * self.d_qk
        for b in self.branches:
            for name in ("q", "k"):
                setattr(self, f"w_{name}{b}", nn.Parameter(torch.empty(d_qk_all, self.d_model, **new)))
                if config.qk_bias:
                    setattr(self, f"b_{name}{b}", nn.Parameter(torch.empty(d_qk_all, **new)))
        self.w_v = nn.Parameter(torch.empty(self.d_model, self.d_model, **new))
        self.w_o = nn.Parameter(torch.empty(self.d_model, self.d_model, **new))
        self.lamb = nn.Parameter(torch.empty(1, **new)) if config.value_residual else None
        if self.kind == "differential":
            self.bilinear_lamb = nn.Parameter(torch.empty(1, **new))
        for b in self.branches:
            suffix = _suffix(b)
            for name in ("q", "k"):
                setattr(self, f"hook_{name}{suffix}", Point())
                setattr(self, f"{name}{suffix}_norm", RMSNorm(config.norm_eps) if config.qk_norm else NoNorm())
                setattr(self, f"hook_rot_{name}{suffix}", Point())
            setattr(self, f"hook_attn_scores{suffix}", Point())
        self.hook_v = Point()
        self.hook_v_mixed = Point()
        self.hook_pattern = Point()
        self.hook_z = Point()
        self.hook_result = Point()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, p in self.named_parameters(recurse=False):
            if name == "w_o" or name.startswith("b_"):
                nn.init.zeros_(p)
            elif name == "lamb":
                nn.init.constant_(p, 0.5)
            elif name == "bilinear_lamb":
                nn.init.constant_(p, 0.8)
            else:
                nn.init.uniform_(p, -(self.d_model**-0.5), self.d_model**-0.5)

    def forward(
        self,
        x: Shaped[Tensor, "batch seq d_model"],
        v_first: Shaped[Tensor, "batch seq n_head d_head"] | None,
        tables: tuple[Float[Tensor, "seq half"], Float[Tensor, "seq half"]],
        cache: LayerCache | LayerState | None = None,
    ) -> tuple[Shaped[Tensor, "batch seq d_model"], Shaped[Tensor, "batch seq n_head d_head"]]:
        """The attention's output and the value that later blocks mix with (this block's own if ``v_first`` is None)."""
        v = self.hook_v(self._heads(linear(x, self.w_v)))
        if v_first is None:
            v_first = v
        if self.lamb is not None:
            lamb = self.lamb.to(x.dtype)  # half precision rounds in the published order
            v = (1 - lamb) * v + lamb * v_first if v.dtype in HALF else torch.lerp(v, v_first, lamb)
        v = self.hook_v_mixed(v)
        turned = Rotation(*tables)
        qk = [self._query_or_key(x, name, b, turned) for b in self.branches for name in ("q", "k")]
        if isinstance(cache, LayerState):
            if self.pattern_wanted:
                raise ValueError(
                    "a recurrent state forms no pattern, but a hook listens to scores or pattern; "
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
        first, second = (_softmax_attention(q, k, v, scale=1 / self.d_qk) for q, k in ((q1, k1), (q2, k2)))
        return first - self.bilinear_lamb.to(v.dtype) * second

    def network(self, seq: int, *, v_first: bool = False) -> Network:
        """``attn(x)`` at positions ``0..seq`` as named tensors, with one node for each of q, k (per branch) and v.

        Exact; with QK-norm exact given the norms of this run. Inputs: ``x``, ``(batch, seq, d_model)``, with QK biases
        or a value residual ``(batch, seq, 1 + d_model)``: the constant 1 in front, as :func:`tnlm.explicit.augment`
        makes it. With QK-norm ``q_norm.hook_scale`` (``k_norm``, ``q2_norm``, ``k2_norm``), ``(batch, seq, 1 +
        n_head)``: 1, then each head's *inverse* norm.

        Args:
            seq: Number of positions; mask, scale and rotation are constants of the network.
            v_first: Mix with block 0's value, the input ``v_first`` ``(batch, seq, 1 + d_model)``: 1, then the value's
                heads side by side. Without it the network is that of block 0, where mixing changes nothing.

        Cost: ``cost({"batch": ...})`` tells; about that of the eager implementation.

        Raises:
            ValueError: The kind is not a polynomial, or ``v_first`` without a value residual.
        """
        from tnlm.explicit import attention_network

        return attention_network(self, seq, v_first=v_first)

    @property
    def pattern_wanted(self) -> bool:
        """Whether scores and pattern must be formed: a hook listens to one, or the definition is asked for."""
        points = [getattr(self, f"hook_attn_scores{_suffix(b)}") for b in self.branches]
        return self.implementation == "eager" or listened(self.hook_pattern, *points)

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "batch seq (n_head d) -> batch seq n_head d", n_head=self.n_head)

    def _query_or_key(self, x: Tensor, name: str, branch: str, turned: Rotation) -> Tensor:
        suffix = _suffix(branch)
        projected = linear(x, getattr(self, f"w_{name}{branch}"), getattr(self, f"b_{name}{branch}", None))
        projected = getattr(self, f"hook_{name}{suffix}")(self._heads(projected))
        normed = getattr(self, f"{name}{suffix}_norm")(projected)
        return getattr(self, f"hook_rot_{name}{suffix}")(turned(normed))

    def _pattern(self, qk: list[Tensor]) -> Shaped[Tensor, "batch n_head seq_q seq_k"]:
        """The definition, with every named point: what the kernels compute without forming it."""
        root = self.kind in ("softmax", "squared_normalized")
        scale = self.d_qk**-0.5 if root else 1 / self.d_qk
        scores = []
        for b, q, k in zip(self.branches, qk[::2], qk[1::2], strict=True):
            point = getattr(self, f"hook_attn_scores{_suffix(b)}")
            scores.append(point(torch.einsum("bqhd,bkhd->bhqk", q, k) * scale))
        keep = causal_mask(scores[0].shape[-2], scores[0].shape[-1], device=scores[0].device)
        if self.kind == "softmax":
            pattern = _masked_softmax(scores[0], keep)
        elif self.kind == "differential":
            pattern = _masked_softmax(scores[0], keep) - self.bilinear_lamb.to(qk[0].dtype) * _masked_softmax(
                scores[1], keep
            )
        else:
            pattern = (scores[0] * scores[-1]).masked_fill(~keep, 0)
            if self.kind == "squared_normalized":
                pattern = pattern / (pattern.sum(-1, keepdim=True) + ROW_EPS)
        return self.hook_pattern(pattern)

    def _squared_normalized(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A quotient of two squared attentions, below it that of a column of ones; never in half precision."""
        wide = [t.float() if t.dtype in HALF else t for t in (q, k, v)]
        values = torch.cat([wide[2], torch.ones_like(wide[2][..., :1])], dim=-1)
        out = squared_attention(wide[0], wide[1], values, scale=1 / self.d_qk, implementation=self.implementation)
        return (out[..., :-1] / (out[..., -1:] + ROW_EPS)).to(v.dtype)

    def extra_repr(self) -> str:
        return f"kind={self.kind}, n_head={self.n_head}, d_head={self.d_head}, d_qk={self.d_qk}"


def causal_mask(seq_q: int, seq_k: int, *, device: torch.device | None = None) -> Tensor:
    """(seq_q, seq_k), true where query i may see key j: aligned bottom-right, so the last query sees every key."""
    return torch.ones(seq_q, seq_k, dtype=torch.bool, device=device).tril(seq_k - seq_q)


def _suffix(branch: str) -> str:
    """Points of branch 1 carry no suffix (``hook_q``), those of branch 2 a 2 (``hook_q2``), as in transformer-lens."""
    return "" if branch == "1" else branch


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
