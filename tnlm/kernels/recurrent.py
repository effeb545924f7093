"""Bilinear and squared attention in time linear in the sequence, by a state that sums over all past keys.

``(q1 . k1)(q2 . k2) = vec(q1 q2^T) . vec(k1 k2^T)``, so a query needs of the past only
``S = sum_j vec(k1_j k2_j^T) v_j^T``, which is exact. Squared attention keeps one feature of each symmetric pair,
``d (d + 1) / 2`` in all.
Rounding differs from the quadratic forms, so "auto" never chooses this. It needs fewer operations than they do past
about ``4 d**2 / 3`` tokens for equal widths d (``docs/kernels.md``).
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from jaxtyping import Inexact
from torch import Tensor

from tnlm.kernels import eager
from tnlm.kernels.precision import accumulation_dtype, narrow, without_autocast

CHUNK = 128
"""Number of recent tokens whose keys and values are kept before one matmul adds them to the state."""

Kind = Literal["bilinear", "squared"]


class State:
    """The past tokens of one attention layer in constant memory, for decoding and for many continuations of a prefix.

    Fewer than `CHUNK` last tokens are kept as keys and values; older ones are summed in ``total``.
    No tensor is changed in place, so `fork` copies nothing and autograd works through every method.

        state = State("bilinear", batch=1, n_head=9, d_qk=64, d_v=128)
        out = state.attend(q1, k1, q2, k2, v)  # one or several new tokens, (batch, new, n_head, d)

    Args:
        kind: "bilinear" (queries q1, q2 and keys k1, k2) or "squared" (q and k).
        scale: As in `bilinear_attention`.
        dtype: Dtype of the state: float32 also for float16 and bfloat16 inputs; float64 and complex inputs need theirs.

    Memory: ``batch * n_head * features * d_v`` numbers, where features is ``d_qk**2`` or ``d_qk (d_qk + 1) / 2``.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        batch: int,
        n_head: int,
        d_qk: int,
        d_v: int,
        scale: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        if kind not in ("bilinear", "squared"):
            raise ValueError(f'kind must be "bilinear" or "squared", got {kind!r}')
        if accumulation_dtype(dtype) != dtype:
            raise ValueError(f"dtype must be float32 or wider, got {dtype}: a half state drops small increments")
        self.kind = kind
        self.d_qk = d_qk
        self.scale = 1.0 / d_qk**2 if scale is None else scale
        self.seq = 0
        n_factors = 2 if kind == "bilinear" else 1
        features = d_qk**2 if kind == "bilinear" else d_qk * (d_qk + 1) // 2
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        self._total = zeros(batch, n_head, features, d_v)
        self._keys = [zeros(batch, 0, n_head, d_qk) for _ in range(n_factors)]
        self._v = zeros(batch, 0, n_head, d_v)

    def attend(self, *operands: Tensor) -> Inexact[Tensor, "batch new n_head d_v"]:
        """Append new tokens and return the attention of their queries, each over all tokens up to its own.

        Args:
            operands: ``q1, k1, q2, k2, v``, or ``q, k, v`` for squared: (batch, new, n_head, d).

        Returns:
            The last ``new`` positions of attention over the whole sequence, in the dtype of ``v``.
        """
        *factors, v = operands
        self._check_count(len(factors), 2)
        self._check(factors, v)
        out = []
        for rows in (slice(i, i + CHUNK) for i in range(0, max(v.shape[1], 1), CHUNK)):
            self._append([k[:, rows] for k in factors[1::2]], v[:, rows])
            out.append(self._answer([q[:, rows] for q in factors[0::2]], causal=True))
            self._fold_when_full()
        return narrow(torch.cat(out, dim=1), v.dtype)

    def update(self, *operands: Tensor) -> None:
        """Append tokens that have no queries: ``k1, k2, v``, or ``k, v`` for squared."""
        *keys, v = operands
        self._check_count(len(keys), 1)
        self._check(keys, v)
        for rows in (slice(i, i + CHUNK) for i in range(0, max(v.shape[1], 1), CHUNK)):
            self._append([k[:, rows] for k in keys], v[:, rows])
            self._fold_when_full()

    def query(self, *queries: Tensor) -> Inexact[Tensor, "batch seq_q n_head d_v"]:
        """Attention of ``q1, q2`` (or ``q``) over all tokens so far, in their dtype; appends nothing."""
        self._check_count(len(queries), 1)
        self._check(list(queries))
        return narrow(self._answer(list(queries), causal=False), queries[0].dtype)

    def fork(self) -> "State":
        """A second state with the same past, which it shares without a copy; the two then go on independently."""
        other = copy.copy(self)
        other._keys = list(self._keys)
        return other

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that `load_state_dict` needs, not copied: ``total``, ``seq``, ``v`` and the recent keys."""
        keys = {f"k{i + 1}": k for i, k in enumerate(self._keys)}
        return {"total": self._total, "v": self._v, "seq": torch.tensor(self.seq)} | keys

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Replace the past by a copy of a `state_dict`, whose state had the same arguments except device and dtype.

        Raises:
            ValueError: Names or shapes differ, or the saved dtype is wider than this state's.
        """
        own = self.state_dict()
        if saved.keys() != own.keys():
            raise ValueError(f"a {self.kind} state holds {sorted(own)}, got {sorted(saved)}")
        recent = saved["v"].shape[1]
        for name, x in own.items():
            shape = tuple(x.shape) if name in ("total", "seq") else (x.shape[0], recent, *x.shape[2:])
            if tuple(saved[name].shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(saved[name].shape)}")
            self._check_dtype(name, saved[name])
        self.seq = int(saved["seq"])
        self._total, self._v = (saved[name].to(own[name], copy=True) for name in ("total", "v"))
        self._keys = [saved[f"k{i + 1}"].to(k, copy=True) for i, k in enumerate(self._keys)]

    def _append(self, keys: list[Tensor], v: Tensor) -> None:
        dtype = self._total.dtype
        self._keys = [torch.cat([old, k.to(dtype)], dim=1) for old, k in zip(self._keys, keys, strict=True)]
        self._v = torch.cat([self._v, v.to(dtype)], dim=1)
        self.seq += v.shape[1]

    def _answer(self, queries: list[Tensor], *, causal: bool) -> Tensor:
        """Attention over older tokens by the state plus over recent ones by their scores, aligned bottom-right."""
        queries = [q.to(self._total.dtype) for q in queries]
        operands = [x for pair in zip(queries, self._keys, strict=True) for x in pair]
        quadratic: Callable[..., Tensor] = eager.bilinear if self.kind == "bilinear" else eager.squared
        with without_autocast(self._total.device.type):
            recent = quadratic(*operands, self._v, causal=causal, scale=self.scale)
            past = self._features(queries, query=True) @ self._total
        return recent + self.scale * past.transpose(1, 2)

    def _fold_when_full(self) -> None:
        if self._v.shape[1] < CHUNK:
            return
        with without_autocast(self._total.device.type):
            features = self._features(self._keys, query=False)
            self._total = self._total + features.mT @ self._v.transpose(1, 2)
        self._keys = [k[:, :0] for k in self._keys]
        self._v = self._v[:, :0]

    def _features(self, factors: list[Tensor], *, query: bool) -> Tensor:
        """Products of the two factors, (batch, n_head, seq, features).

        Squared has the pairs a <= b alone, and doubles those with a < b in queries, which is exact.
        """
        left, right = (x.transpose(1, 2) for x in (factors[0], factors[-1]))
        if self.kind == "bilinear":
            return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)
        a, b = torch.triu_indices(self.d_qk, self.d_qk, device=left.device)
        product = left[..., a] * left[..., b]
        return product * torch.where(a == b, 1, 2) if query else product

    def _check_count(self, n: int, per_factor: int) -> None:
        if n != per_factor * len(self._keys):
            raise ValueError(f"a {self.kind} state takes {per_factor * len(self._keys)} queries and keys here, got {n}")

    def _check(self, factors: list[Tensor], *values: Tensor) -> None:
        """Raise a ValueError unless the operands fit; called before any change, so that an error leaves the state."""
        batch, n_head, _, d_v = self._total.shape
        new = factors[0].shape[1] if factors[0].ndim == 4 else 0
        for x, d in [*((x, self.d_qk) for x in factors), *((v, d_v) for v in values)]:
            if tuple(x.shape) != (batch, new, n_head, d):
                raise ValueError(
                    f"operands of this state must be (batch={batch}, new={new}, n_head={n_head}, d={d}), "
                    f"got {tuple(x.shape)}"
                )
            if x.device != self._total.device:
                raise ValueError(f"operands must be on the device of this state, {self._total.device}, got {x.device}")
            self._check_dtype("operands", x)

    def _check_dtype(self, name: str, x: Tensor) -> None:
        own = self._total.dtype
        if torch.promote_types(x.dtype, own) != own:
            raise ValueError(f"{name} must fit a state of {own}, got {x.dtype}; make the state with dtype={x.dtype}")


def bilinear(
    q1: Inexact[Tensor, "batch seq_q n_head d_qk"],
    k1: Inexact[Tensor, "batch seq_k n_head d_qk"],
    q2: Inexact[Tensor, "batch seq_q n_head d_qk"],
    k2: Inexact[Tensor, "batch seq_k n_head d_qk"],
    v: Inexact[Tensor, "batch seq_k n_head d_v"],
    *,
    causal: bool,
    scale: float,
) -> Inexact[Tensor, "batch seq_q n_head d_v"]:
    """The result of `eager.bilinear` in time linear in seq; autograd keeps ``seq / CHUNK`` states for backward."""
    return _attend("bilinear", [q1, q2], [k1, k2], v, causal=causal, scale=scale)


def squared(
    q: Inexact[Tensor, "batch seq_q n_head d_qk"],
    k: Inexact[Tensor, "batch seq_k n_head d_qk"],
    v: Inexact[Tensor, "batch seq_k n_head d_v"],
    *,
    causal: bool,
    scale: float,
) -> Inexact[Tensor, "batch seq_q n_head d_v"]:
    """The result of `eager.squared` in time linear in seq; autograd keeps ``seq / CHUNK`` states for backward."""
    return _attend("squared", [q], [k], v, causal=causal, scale=scale)


def _attend(kind: Kind, queries: list[Tensor], keys: list[Tensor], v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attention by a new state: keys before the first query are added first; queries before the first key give 0."""
    batch, seq_k, n_head, d_v = v.shape
    seq_q, d_qk = queries[0].shape[1], queries[0].shape[3]
    dtype = accumulation_dtype(v.dtype)
    state = State(kind, batch=batch, n_head=n_head, d_qk=d_qk, d_v=d_v, scale=scale, dtype=dtype, device=v.device)
    prefix = max(seq_k - seq_q, 0) if causal else seq_k
    state.update(*(k[:, :prefix] for k in keys), v[:, :prefix])
    if not causal:
        return state.query(*queries)
    blind = max(seq_q - seq_k, 0)
    pairs = zip(queries, keys, strict=True)
    operands = [x for q, k in pairs for x in (q[:, blind:], k[:, prefix:])]
    seeing = state.attend(*operands, v[:, prefix:])
    return torch.cat([seeing.new_zeros(batch, blind, n_head, d_v), seeing], dim=1)
