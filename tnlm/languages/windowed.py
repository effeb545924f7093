"""Languages whose rules act within the last tokens and add log-odds: skip-bigrams, and pairs that act together."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from tnlm.languages.language import Language, ids
from tnlm.languages.rules import Axes, Rule

RAISED = 13.0
"""Base frequency of the targets of negative rules over the median: in the text they stay above 5 times the median."""


@dataclass(frozen=True, kw_only=True)
class Windowed(Language):
    """A token is drawn from the softmax of a base, to which every rule that applies adds its strength.

    A ``pair`` rule applies once for each occurrence of its source among the last ``reach`` tokens (``once``: however
    often it occurred), at an offset when the source stands there. ``and`` applies when both sources occurred, the decoy
    ``xor`` when exactly one did.
    """

    d_vocab: int = 128
    """Number of ids."""
    seq: int = 48
    """Tokens of a sequence."""
    reach: int = 16
    """Tokens that a rule looks back."""
    spread: float = 0.5
    """Standard deviation of the logarithm of the base frequencies."""

    def holds(self, prefix: np.ndarray) -> np.ndarray:
        return self._effects(prefix)[:, : len(self.rules)] > 0

    def _clean_probs(self, prefix: np.ndarray) -> np.ndarray:
        logits = np.log(self._base) + self._effects(prefix) @ self._nats
        p = np.exp(logits - logits.max(1, keepdims=True))
        return p / p.sum(1, keepdims=True)

    def _effects(self, prefix: np.ndarray) -> np.ndarray:
        """How often each rule and decoy applies after each prefix, (n, rules + decoys)."""
        n, t = prefix.shape
        count = np.zeros((n, self.d_vocab))
        for k in range(max(0, t - self.reach), t):
            count[np.arange(n), prefix[:, k]] += 1
        seen = count > 0
        planted = (*self.rules, *self.decoys)
        effects = np.zeros((n, len(planted)))
        for column, rule in enumerate(planted):
            first, second = rule.sources[0], rule.sources[-1]
            if rule.offset:
                effects[:, column] = prefix[:, t - rule.offset] == first if t >= rule.offset else 0
            elif rule.kind == "pair":
                effects[:, column] = seen[:, first] if self._counts_once else count[:, first]
            elif rule.kind == "and":
                effects[:, column] = seen[:, first] & seen[:, second]
            else:
                effects[:, column] = seen[:, first] ^ seen[:, second]
        return effects

    @property
    def _counts_once(self) -> bool:
        return True

    @property
    def _base(self) -> np.ndarray:
        """Frequencies without any rule, (d_vocab,)."""
        raise NotImplementedError

    @cached_property
    def _nats(self) -> np.ndarray:
        """(rules + decoys, d_vocab): what one application adds to each log-odds."""
        planted = (*self.rules, *self.decoys)
        nats = np.zeros((len(planted), self.d_vocab))
        for row, rule in zip(nats, planted, strict=True):
            row[rule.target] = rule.sign * rule.strength
        return nats


@dataclass(frozen=True, kw_only=True)
class SkipBigrams(Windowed):
    """Sources raise or lower targets, anywhere within the last tokens or at one exact offset."""

    name: ClassVar[str] = "skip-bigrams"
    n_anywhere: int = 48
    """Positive rules that hold anywhere within the reach."""
    n_offset: int = 24
    """Positive rules that hold at one offset of 1 to 4, between sources and targets of the others."""
    n_negative: int = 12
    """Negative rules that hold anywhere, on frequent targets that no positive rule raises."""
    n_next: int = 12
    """Rules at offset 1 from sources of the others to targets of their own: decoys for whoever counts neighbours."""
    share: float = 0.4
    """Share of the anywhere rules whose source and target another rule has as well."""
    strength: float = 2.0
    """Nats that a rule adds, for each occurrence of its source."""
    once: bool = False
    """A source counts once, however often it occurred: an OR, which attention without softmax learns less well."""

    def __post_init__(self) -> None:
        super().__post_init__()
        distinct = self._n_distinct
        if not 0 <= self.share < 1 or not self.reach or distinct + self._n_frequent + 1 >= self.d_vocab:
            raise ValueError(
                "skip-bigrams must have 0 <= share < 1, reach >= 1 and two ids more than targets, got "
                f"share={self.share}, reach={self.reach}, d_vocab={self.d_vocab} for {distinct} targets of positive "
                f"rules and {self._n_frequent} of negative ones; take fewer rules or more ids"
            )
        if self.n_next > distinct or self.n_anywhere + self.n_offset > max(distinct, distinct * (distinct - 1)):
            raise ValueError(
                f"{distinct} distinct sources and targets must have room for all rules, got n_next={self.n_next}, "
                f"n_anywhere={self.n_anywhere}, n_offset={self.n_offset}; take fewer, or a smaller share"
            )
        if self.n_negative > self._n_frequent * (self.d_vocab - 1):
            raise ValueError(f"there must be room for n_negative={self.n_negative} rules on {self._n_frequent} targets")

    @property
    def _n_distinct(self) -> int:
        return max(1, round(self.n_anywhere * (1 - self.share))) if self.n_anywhere else 0

    @property
    def _n_frequent(self) -> int:
        return (self.n_negative + 1) // 2

    @property
    def _counts_once(self) -> bool:
        return self.once

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self._drawn[0]

    @property
    def axes(self) -> tuple[Axes, ...]:
        every = tuple(range(self.d_vocab))
        return (Axes("pair", (every,), every, signs=(1, -1), offsets=(0, 1, 2, 3, 4)),)

    @property
    def _base(self) -> np.ndarray:
        return self._drawn[1]

    @cached_property
    def _drawn(self) -> tuple[tuple[Rule, ...], np.ndarray]:
        """Rules and base frequencies."""
        rng = self._rng()
        every = np.arange(self.d_vocab)
        sources = rng.permutation(every)[: self._n_distinct]
        targets = sources
        while (targets == sources).any():
            targets, frequent, free = np.split(rng.permutation(every), np.cumsum([self._n_distinct, self._n_frequent]))
        base = np.exp(rng.normal(0, self.spread, self.d_vocab))
        base[frequent] = RAISED * np.median(base)
        taken: set[tuple[int, int]] = set()

        def draw(n: int, sources: np.ndarray, targets: np.ndarray, sign: int, offset: int = 0) -> list[Rule]:
            """``n`` rules between pairs that have none yet; ``offset`` is its largest value."""
            rules: list[Rule] = []
            while len(rules) < n:
                a, b = int(rng.choice(sources)), int(rng.choice(targets))
                if a == b or (a, b) in taken:
                    continue
                taken.add((a, b))
                at = int(rng.integers(1, offset + 1)) if offset else 0
                rules.append(Rule("pair", (a,), b, sign, at, self.strength))
            return rules

        # each source and target once, then the share of the rules that use one again
        taken.update((int(a), int(b)) for a, b in zip(sources, targets, strict=True))
        rules = [Rule("pair", (int(a),), int(b), 1, 0, self.strength) for a, b in zip(sources, targets, strict=True)]
        rules += draw(self.n_anywhere - len(rules), sources, targets, 1)
        rules += draw(self.n_offset, sources, targets, 1, 4)
        rules += draw(self.n_negative, every, frequent, -1)
        for a in rng.permutation(sources)[: self.n_next]:
            rules += draw(1, a[None], free, 1, 1)
        return tuple(rules), base / base.sum()


@dataclass(frozen=True, kw_only=True)
class And(Windowed):
    """Two sources together raise a target; one alone does nothing."""

    name: ClassVar[str] = "and"
    d_vocab: int = 64
    """Number of ids."""
    n_rules: int = 12
    """Rules."""
    n_single: int = 4
    """Decoys: a source of the rules that raises a target alone."""
    n_xor: int = 1
    """Decoys: two sources of the rules that raise a target when exactly one of them occurred."""
    share: float = 0.25
    """Share of the places for sources that are filled by a source of another rule."""
    strength: float = 4.0
    """Nats that a rule adds; half of them for a decoy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        n = self._n_sources
        if not 0 <= self.share < 1 or not self.reach or n > self.d_vocab or self.n_rules + self.n_xor > n * (n - 1) / 4:
            raise ValueError(
                "and must have 0 <= share < 1, reach >= 1, and ids for all sources, whose pairs must be at least twice "
                f"the rules, got share={self.share}, reach={self.reach}, d_vocab={self.d_vocab}, {n} sources, "
                f"n_rules={self.n_rules}, n_xor={self.n_xor}; take a smaller share or more ids"
            )

    @property
    def _n_sources(self) -> int:
        return max(3, round(2 * self.n_rules * (1 - self.share)))

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self._drawn[0]

    @property
    def decoys(self) -> tuple[Rule, ...]:
        return self._drawn[1]

    @property
    def axes(self) -> tuple[Axes, ...]:
        every = tuple(range(self.d_vocab))
        return (Axes("and", (every, every), every),)

    @property
    def _base(self) -> np.ndarray:
        return self._drawn[2]

    @cached_property
    def _drawn(self) -> tuple[tuple[Rule, ...], tuple[Rule, ...], np.ndarray]:
        """Rules, decoys and base frequencies."""
        rng = self._rng()
        base = np.exp(rng.normal(0, self.spread, self.d_vocab))
        sources = rng.permutation(self.d_vocab)[: self._n_sources]
        taken: set[tuple[int, ...]] = set()

        def draw(n: int, kind: str, size: int, strength: float) -> tuple[Rule, ...]:
            rules: list[Rule] = []
            while len(rules) < n:
                members = ids(rng.choice(sources, size, replace=False))
                target = int(rng.integers(self.d_vocab))
                if members not in taken and target not in members:
                    taken.add(members)
                    rules.append(Rule(kind, members, target, strength=strength))
            return tuple(rules)

        rules = draw(self.n_rules, "and", 2, self.strength)
        decoys = draw(min(self.n_single, len(sources)), "pair", 1, self.strength / 2)
        return rules, decoys + draw(self.n_xor, "xor", 2, self.strength / 2), base / base.sum()
