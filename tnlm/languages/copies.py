"""Languages that copy a token from earlier: induction and retrieval."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from tnlm.languages.language import Language, ids
from tnlm.languages.rules import Axes, Rule


def follower(prefix: np.ndarray) -> np.ndarray:
    """What followed the newest earlier occurrence of each prefix's last token: (n,) ids, -1 where there is none."""
    n, t = prefix.shape
    found = np.full(n, -1)
    for k in range(t - 1):
        found = np.where(prefix[:, k] == prefix[:, -1], prefix[:, k + 1], found)
    return found


@dataclass(frozen=True, kw_only=True)
class Induction(Language):
    """A token repeats what followed its newest earlier occurrence with probability ``copy``; exempt tokens never do.

    There is no period, so no clock can replace the match.
    """

    name: ClassVar[str] = "induction"
    d_vocab: int = 32
    """Number of ids."""
    seq: int = 48
    """Tokens of a sequence."""
    copy: float = 0.7
    """Probability of the copy."""
    n_exempt: int = 8
    """Tokens after which nothing is copied."""
    spread: float = 0.3
    """Standard deviation of the logarithm of the base frequencies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.copy < 1 or self.n_exempt >= self.d_vocab:
            raise ValueError(
                "induction must have 0 < copy < 1 and at least one token that is not exempt, got "
                f"copy={self.copy}, n_exempt={self.n_exempt}, d_vocab={self.d_vocab}"
            )

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        odds = (1 - self.copy) * self._base
        odds = np.log((self.copy + odds) / odds)
        return tuple(
            Rule("induction", (query, value), value, strength=float(odds[value]))
            for query in ids(np.flatnonzero(self._copies))
            for value in range(self.d_vocab)
            if value != query
        )

    @property
    def axes(self) -> tuple[Axes, ...]:
        every = tuple(range(self.d_vocab))
        return (Axes("induction", (every, every), every),)

    def holds(self, prefix: np.ndarray) -> np.ndarray:
        if prefix.shape[1] < 2:
            return np.zeros((len(prefix), len(self.rules)), dtype=bool)
        query, value = np.array([rule.sources for rule in self.rules]).T
        return (prefix[:, -1:] == query) & (follower(prefix)[:, None] == value)

    def _clean_probs(self, prefix: np.ndarray) -> np.ndarray:
        p = np.tile(self._base, (len(prefix), 1))
        if prefix.shape[1] >= 2:
            value = follower(prefix)
            rows = np.flatnonzero((value >= 0) & self._copies[prefix[:, -1]])
            p[rows] *= 1 - self.copy
            p[rows, value[rows]] += self.copy
        return p

    @cached_property
    def _copies(self) -> np.ndarray:
        """(d_vocab,) bool: whether the token is followed by a copy."""
        copies = np.ones(self.d_vocab, dtype=bool)
        copies[self._rng().permutation(self.d_vocab)[: self.n_exempt]] = False
        return copies

    @cached_property
    def _base(self) -> np.ndarray:
        base = np.exp(np.random.default_rng([self.seed, 2**32 + 1]).normal(0, self.spread, self.d_vocab))
        return base / base.sum()


@dataclass(frozen=True, kw_only=True)
class Retrieval(Language):
    """``key value`` pairs with distinct keys, then ``? key`` and the value of that key, for keys among them."""

    name: ClassVar[str] = "retrieval"
    n_keys: int = 12
    """Keys."""
    n_values: int = 12
    """Values."""
    n_pairs: int = 6
    """Pairs of a sequence."""
    n_queries: int = 12
    """Queries of a sequence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.n_pairs <= self.n_keys or not self.n_values or not self.n_queries:
            raise ValueError(
                "retrieval must have 1 <= n_pairs <= n_keys, values and queries, got "
                f"n_pairs={self.n_pairs}, n_keys={self.n_keys}, n_values={self.n_values}, n_queries={self.n_queries}"
            )

    @property
    def d_vocab(self) -> int:
        return 1 + self.n_keys + self.n_values

    @property
    def seq(self) -> int:
        return 2 * self.n_pairs + 3 * self.n_queries

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        strength = math.inf
        if self.noise:
            rare = self.noise / self.d_vocab
            strength = math.log((1 - self.noise + rare) / rare)
        keys, values = ids(self._groups["keys"]), ids(self._groups["values"])
        return tuple(Rule("retrieval", (key, key, value), value, strength=strength) for key in keys for value in values)

    @property
    def axes(self) -> tuple[Axes, ...]:
        keys, values = ids(self._groups["keys"]), ids(self._groups["values"])
        return (Axes("retrieval", (keys, keys, values), values),)

    def holds(self, prefix: np.ndarray) -> np.ndarray:
        key, _, value = np.array([rule.sources for rule in self.rules]).T
        if self._place(prefix) != "answer":
            return np.zeros((len(prefix), len(self.rules)), dtype=bool)
        return (prefix[:, -1:] == key) & (self._answer(prefix)[:, None] == value)

    def _place(self, prefix: np.ndarray) -> str:
        """What stands after a prefix of this length."""
        asked = prefix.shape[1] - 2 * self.n_pairs
        return ("query", "asked", "answer")[asked % 3] if asked >= 0 else ("key", "value")[asked % 2]

    def _answer(self, prefix: np.ndarray) -> np.ndarray:
        """The value that followed the asked key among the pairs, (n,); -1 where noise left none."""
        found = np.full(len(prefix), -1)
        for k in range(0, 2 * self.n_pairs, 2):
            found = np.where(prefix[:, k] == prefix[:, -1], prefix[:, k + 1], found)
        return found

    def _clean_probs(self, prefix: np.ndarray) -> np.ndarray:
        n, place = len(prefix), self._place(prefix)
        keys, values = (self._mask(self._groups[name]) for name in ("keys", "values"))
        allowed = np.tile(values, (n, 1))
        if place == "query":
            allowed = np.tile(self._mask(self._groups["query"]), (n, 1))
        elif place in ("key", "asked"):
            used = np.zeros((n, self.d_vocab), dtype=bool)
            np.put_along_axis(used, prefix[:, : 2 * self.n_pairs : 2], True, axis=1)
            allowed = keys & (used if place == "asked" else ~used)
        elif place == "answer":
            answer = self._answer(prefix)
            rows = np.flatnonzero(answer >= 0)
            allowed[rows] = False
            allowed[rows, answer[rows]] = True
        # noise may have left no key to ask for
        allowed = np.where(allowed.any(1, keepdims=True), allowed, keys)
        return allowed / allowed.sum(1, keepdims=True)

    def _mask(self, members: np.ndarray) -> np.ndarray:
        mask = np.zeros(self.d_vocab, dtype=bool)
        mask[members] = True
        return mask

    @cached_property
    def _groups(self) -> dict[str, np.ndarray]:
        return self._roles({"query": 1, "keys": self.n_keys, "values": self.n_values})
