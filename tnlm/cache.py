"""What generation keeps between forwards: keys and values, or a state that sums over them, for every layer."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Shaped
from torch import Tensor

from tnlm.config import ModelConfig
from tnlm.kernels import State
from tnlm.norm import HALF

if TYPE_CHECKING:
    from tnlm.attention import Attention

RECURRENT_ATTENTIONS = ("bilinear", "squared")
"""Kinds whose past is a sum over positions, and so fits a state of constant size."""


class LayerCache:
    """Rotated keys and mixed values of one attention layer, in storage that grows by doubling.

    Memory: ``batch * n_head * (n_qk * d_qk + d_head)`` numbers per position.
    """

    def __init__(self) -> None:
        self.length = 0
        self._storage: list[Tensor] = []

    def extend(self, new: list[Tensor]) -> list[Tensor]:
        """Append along ``seq`` and return everything held so far, as views ``(batch, length, n_head, d)``."""
        if self._storage and self._storage[0].shape[0] != new[0].shape[0]:
            raise ValueError(
                f"a cache serves one batch: it holds {self._storage[0].shape[0]} rows, got {new[0].shape[0]}; "
                "begin a new one"
            )
        start, self.length = self.length, self.length + new[0].shape[1]
        if not self._storage or self._storage[0].shape[1] < self.length:
            grown = [t.new_empty(t.shape[0], max(2 * start, self.length), *t.shape[2:]) for t in new]
            for old, t in zip(self._storage, grown, strict=False):
                t[:, :start] = old[:, :start]
            self._storage = grown
        for t, n in zip(self._storage, new, strict=True):
            t[:, start : self.length] = n
        return [t[:, : self.length] for t in self._storage]

    def attend(
        self, attention: "Attention", qk: list[Tensor], v: Shaped[Tensor, "batch new n_head d_head"]
    ) -> Shaped[Tensor, "batch new n_head d_head"]:
        """Append the new keys and values, then attend from the new queries to all of them."""
        *keys, values = self.extend([*qk[1::2], v])
        return attention.attend([t for pair in zip(qk[::2], keys, strict=True) for t in pair], values)


class LayerState:
    """The past of one bilinear or squared attention layer as a state: constant memory, exact up to rounding.

    Memory: :func:`state_numbers` per row of the batch, in float32 or wider.
    """

    def __init__(self) -> None:
        self._state: State | None = None

    def attend(
        self, attention: "Attention", qk: list[Tensor], v: Shaped[Tensor, "batch new n_head d_head"]
    ) -> Shaped[Tensor, "batch new n_head d_head"]:
        """Answer the new queries from the state, which then includes the new keys and values."""
        if attention.pattern_wanted:
            raise ValueError(
                "a recurrent state forms no pattern, but a hook listens to scores or pattern; "
                'use the key-value cache ("kv") or none'
            )
        if self._state is None:
            batch, _, n_head, d_v = v.shape
            dtype = torch.float32 if v.dtype in HALF else v.dtype
            sizes = {"batch": batch, "n_head": n_head, "d_qk": qk[0].shape[-1], "d_v": d_v}
            self._state = State(attention.kind, **sizes, dtype=dtype, device=v.device)  # type: ignore[arg-type]
        return self._state.attend(*qk, v)


class Cache:
    """One :class:`LayerCache`, or with ``recurrent`` one :class:`LayerState`, per block; ``length`` positions seen.

    Raises:
        ValueError: ``recurrent`` with an attention kind that has no such state.
    """

    def __init__(self, config: ModelConfig, *, recurrent: bool = False) -> None:
        if recurrent and config.attention not in RECURRENT_ATTENTIONS:
            raise ValueError(
                f"a recurrent state needs attention in {RECURRENT_ATTENTIONS}, got {config.attention!r}: "
                'a row-wise normaliser is no sum over keys; use the key-value cache ("kv")'
            )
        layer = LayerState if recurrent else LayerCache
        self.layers: list[LayerCache | LayerState] = [layer() for _ in range(config.n_layer)]
        self.length = 0

    def advance(self, new: int) -> None:
        self.length += new


def state_numbers(config: ModelConfig) -> int:
    """Numbers in the state of one layer: per head, ``d_qk**2 d_head``; squared needs ``d_qk (d_qk + 1) / 2 d_head``."""
    d_qk = config.d_qk
    assert d_qk is not None
    features = d_qk**2 if config.attention == "bilinear" else d_qk * (d_qk + 1) // 2
    return config.n_head * features * config.d_head


def position_numbers(config: ModelConfig) -> int:
    """Numbers that the keys and values of one position take in one layer."""
    assert config.d_qk is not None
    return config.n_head * (config.n_qk * config.d_qk + config.d_head)
