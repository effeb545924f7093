"""Caches for generation: per layer the keys and values of past positions, or one state that sums over them."""

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from jaxtyping import Shaped
from torch import Tensor

from tnlm.config import ModelConfig
from tnlm.kernels import State
from tnlm.kernels.precision import accumulation_dtype

F = TypeVar("F", bound=Callable[..., Any])

RECURRENT_ATTENTIONS = ("bilinear", "squared")
"""Attention kinds whose past is a sum over positions and can be kept in a state of constant size."""


class LayerCache:
    """Rotated keys and mixed values of one attention layer, in storage that grows by doubling.

    Copies share storage until one of them writes where another one has written: that one goes on in storage of its own.
    Memory: ``batch * n_head * (n_qk * d_qk + d_head)`` numbers per position.
    """

    def __init__(self) -> None:
        self.length = 0
        self._storage: list[Tensor] = []
        self._written = [0]  # positions of the storage that hold something; of all copies that share it

    def fork(self) -> "LayerCache":
        """A copy with the same past that can be extended alone; storage is shared until it would be overwritten."""
        return copy.copy(self)

    def extend(
        self, keys: list[Tensor], values: Shaped[Tensor, "batch new n_head d_head"]
    ) -> tuple[list[Tensor], Shaped[Tensor, "batch length n_head d_head"]]:
        """Append along ``seq``; returns all keys and values, old and new, as views of the storage.

        Raises:
            ValueError: The number of tensors, batch, sizes, dtype or device differ from those of the past.
        """
        new = [*keys, values]
        storage = self._storage or [t[:, :0] for t in new]
        check_alike(storage, new)
        start, length = self.length, self.length + values.shape[1]
        if storage[0].shape[1] < length or self._written[0] != start:
            grown = [t.new_empty(t.shape[0], max(2 * start, length), *t.shape[2:]) for t in new]
            for old, t in zip(storage, grown, strict=True):
                t[:, :start] = old[:, :start]
            storage, self._written = grown, [0]
        self._written[0] = length
        for t, n in zip(storage, new, strict=True):
            t[:, start:length] = n
        self._storage, self.length = storage, length
        *keys, values = [t[:, :length] for t in storage]
        return keys, values


class LayerState:
    """The past of one bilinear or squared attention layer as a state: constant memory, exact up to rounding.

    Memory: :func:`state_numbers` per row of the batch, in float32 or wider.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._state: State | None = None
        self._like: list[Tensor] = []

    def fork(self) -> "LayerState":
        """A copy with the same past that can be extended alone."""
        other = copy.copy(self)
        other._state = None if self._state is None else self._state.fork()
        return other

    def answer(
        self, qk: list[Tensor], v: Shaped[Tensor, "batch new n_head d_head"]
    ) -> Shaped[Tensor, "batch new n_head d_head"]:
        """Append new keys and values; returns attention's output for the new queries, each over all keys up to its own.

        Raises:
            ValueError: The number of tensors, batch, sizes, dtype or device differ from those of the past.
        """
        new = [*qk, v]
        if self._state is None:
            batch, _, n_head, d_v = v.shape
            sizes = {"batch": batch, "n_head": n_head, "d_qk": qk[0].shape[-1], "d_v": d_v}
            self._state = State(self.kind, **sizes, dtype=accumulation_dtype(v.dtype), device=v.device)  # type: ignore[arg-type]
            self._like = [t.new_empty(t.shape[0], 0, *t.shape[2:]) for t in new]
        check_alike(self._like, new)
        return self._state.attend(*new)


class Cache:
    """The past of a whole model: one :class:`LayerCache` per block, or with ``recurrent`` one :class:`LayerState`.

    ``length`` is the number of positions seen. A forward that fails or is interrupted leaves the cache unchanged, see
    :func:`all_or_nothing`. Copies by :mod:`copy` can be extended independently, with the model
    that filled it. It cannot be pickled: it belongs to that model in this process.

    Args:
        config: Config of the model that fills and reads it; a model with another one is refused.

    Raises:
        ValueError: ``recurrent`` with an attention kind that has no such state.
    """

    layers: Sequence[LayerCache | LayerState]
    _filled_by: weakref.ref[Tensor] | None = None
    """The embedding of the model that filled it."""

    def __init__(self, config: ModelConfig, *, recurrent: bool = False) -> None:
        if recurrent and config.attention not in RECURRENT_ATTENTIONS:
            raise ValueError(
                f"a recurrent state needs attention in {RECURRENT_ATTENTIONS}, got {config.attention!r}: "
                'the other kinds normalise each row, which is no sum over keys; use the key-value cache ("kv")'
            )
        self.config = config
        if recurrent:
            self.layers = [LayerState(config.attention) for _ in range(config.n_layer)]
        else:
            self.layers = [LayerCache() for _ in range(config.n_layer)]
        self.length = 0

    def fork(self) -> "Cache":
        """A copy with the same past that can be extended alone."""
        other = object.__new__(Cache)
        other.adopt(self)
        other.layers = [layer.fork() for layer in self.layers]
        return other

    __copy__ = fork

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cache":
        other = self.fork()
        other.layers = copy.deepcopy(self.layers, memo)
        return other

    def __reduce__(self) -> str:
        raise ValueError(
            "a cache belongs to the model that filled it, in this process, and cannot be pickled; save the tokens, and "
            "fill a new cache with them"
        )

    def adopt(self, trial: "Cache") -> None:
        """Take over the positions that a fork was extended by. Forks made before this cannot be adopted afterwards."""
        vars(self).update(vars(trial))  # one operation, so that a signal cannot come between the layers and the length

    def advance(self, new: int) -> None:
        """Count ``new`` more positions."""
        self.length += new

    def claim(self, config: ModelConfig, embedding: Tensor) -> None:
        """Refuse a model that this cache was not made for, or another one than that which has filled it.

        Args:
            embedding: Of the model, which is known by it: the views of a model share its parameters.

        Raises:
            ValueError: Naming the fields that differ.
        """
        if config != self.config:
            own, other = asdict(self.config), asdict(config)
            names = [name for name in own if own[name] != other[name]]
            made, got = (", ".join(f"{name}={values[name]!r}" for name in names) for values in (own, other))
            raise ValueError(f"this cache was made for a model with {made}, got one with {got}; begin a new one")
        if self._filled_by is None:
            self._filled_by = weakref.ref(embedding)
        elif self._filled_by() is not embedding:
            raise ValueError(
                "a cache serves the model that filled it, got another one of the same config; begin a new one"
            )


def all_or_nothing(forward: F) -> F:
    """Decorator of a model's method: it extends ``cache`` when it returns, and leaves it unchanged when it raises."""

    @functools.wraps(forward)
    def run(model: Any, *args: Any, cache: Cache | None = None, **options: Any) -> Any:
        if cache is None:
            return forward(model, *args, **options)
        trial = cache.fork()
        trial.claim(model.config, model.embed.w_e)
        out = forward(model, *args, cache=trial, **options)
        cache.adopt(trial)
        return out

    return run  # type: ignore[return-value]


def check_alike(held: Iterable[Tensor], new: Iterable[Tensor]) -> None:
    """Raise if tensors ``(batch, seq, n_head, d)`` cannot be appended to those held.

    Raises:
        ValueError: Their number, or batch, n_head, d, dtype or device of one, is another.
    """
    said = [
        ", ".join(f"({t.shape[0]}, seq, {t.shape[2]}, {t.shape[3]}) {t.dtype} {t.device}" for t in tensors)
        for tensors in (held, new)
    ]
    if said[0] != said[1]:
        raise ValueError(
            f"a cache serves one model and one batch (batch, seq, n_head, d): it holds {said[0]}; got {said[1]}; "
            "begin a new one"
        )


def state_numbers(config: ModelConfig) -> int:
    """Entries in the state of one layer: per head ``d_qk**2 d_head``, or ``d_qk (d_qk + 1) / 2 d_head`` for squared."""
    d_qk = config.d_qk
    assert d_qk is not None
    features = d_qk**2 if config.attention == "bilinear" else d_qk * (d_qk + 1) // 2
    return config.n_head * features * config.d_head


def position_numbers(config: ModelConfig) -> int:
    """Entries in the keys and values of one position in one layer."""
    assert config.d_qk is not None
    return config.n_head * (config.n_qk * config.d_qk + config.d_head)
