"""What generation keeps between forwards: keys and values of every layer."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Shaped
from torch import Tensor

if TYPE_CHECKING:
    from tnlm.attention import Attention


class LayerCache:
    """Rotated keys and mixed values of one attention layer, in storage that grows by doubling.

    Memory: ``batch * n_head * (n_qk * d_qk + d_head)`` numbers per position.
    """

    def __init__(self) -> None:
        self.length = 0
        self._storage: list[Tensor] = []

    def extend(self, new: list[Tensor]) -> list[Tensor]:
        """Append along ``seq`` and return everything held so far, as views ``(batch, length, n_head, d)``."""
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


class Cache:
    """One :class:`LayerCache` per block; ``length`` positions have been seen."""

    def __init__(self, n_layer: int) -> None:
        self.layers = [LayerCache() for _ in range(n_layer)]
        self.length = 0

    def advance(self, new: int) -> None:
        self.length += new

    @torch.no_grad()
    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) batch rows, for sampling several continuations of one prefix."""
        for layer in self.layers:
            layer._storage = [t[rows] for t in layer._storage]
