"""What every toy language has: options, rules, the exact distribution of its next token, and samples."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tnlm.languages.rules import Axes, Rule

BLOCK = 4096
"""Sequences that are sampled at once: 4 MB for each array over 128 tokens."""


@dataclass(frozen=True, kw_only=True)
class Language:
    """Base of the toy languages: a distribution over sequences that is known exactly.

    Every sequence stands for itself: nothing crosses its ends. The language is a function of its options and its seed;
    the ids that have a role are drawn with the seed.

    Raises:
        ValueError: The options contradict each other.
    """

    name: ClassVar[str]
    noise: float = 0.0
    """Probability of a token drawn uniformly from the vocabulary instead."""
    seed: int = 0
    """Seed of the language: which tokens have a role, and its rules."""

    def __post_init__(self) -> None:
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise must be a probability below 1, got noise={self.noise}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be an integer of at least 0, got seed={self.seed!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and field.name != "seed" and value < 0:
                raise ValueError(f"{field.name} must be at least 0, got {field.name}={value}")
        if self.seq < 2 or not 2 <= self.d_vocab <= 65536:
            raise ValueError(
                "a language must have sequences of at least 2 tokens and 2 to 65536 ids, got "
                f"seq={self.seq}, d_vocab={self.d_vocab}; change the sizes that they follow from"
            )

    @property
    def d_vocab(self) -> int:
        """Number of ids."""
        raise NotImplementedError

    @property
    def seq(self) -> int:
        """Tokens of a sequence."""
        raise NotImplementedError

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that a model has to learn, in a fixed order."""
        raise NotImplementedError

    @property
    def decoys(self) -> tuple[Rule, ...]:
        """Structure that is planted beside the rules, and is no true candidate."""
        return ()

    @property
    def axes(self) -> tuple[Axes, ...]:
        """Axes of the lists of candidates, one for each kind and context."""
        raise NotImplementedError

    @property
    def options(self) -> dict[str, Any]:
        """All options but the seed, as JSON values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "seed"}

    def holds(self, prefix: np.ndarray) -> np.ndarray:
        """Which rules apply to the token after each prefix: (n, rules) bool from (n, t) ids."""
        raise NotImplementedError

    def probs(self, prefix: np.ndarray) -> np.ndarray:
        """Exact distribution of the token after each prefix: (n, d_vocab) from (n, t) ids."""
        return (1 - self.noise) * self._clean_probs(prefix) + self.noise / self.d_vocab

    def sample(self, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """``n`` sequences, and the entropy of the distribution that each of their tokens was drawn from.

        Samples with one seed agree in their leading blocks of 4,096 sequences, whatever ``n`` is.

        Returns:
            Ids (n, seq), int64; entropy (n, seq) in nats.

        Raises:
            ValueError: ``n`` is not at least 1.
        """
        if n < 1:
            raise ValueError(f"a sample must have at least one sequence, got n={n}")
        blocks = [
            self._sample(min(BLOCK, n - start), np.random.default_rng([self.seed, seed, start]))
            for start in range(0, n, BLOCK)
        ]
        tokens, entropy = zip(*blocks, strict=True)
        return np.concatenate(tokens), np.concatenate(entropy)

    def _sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        tokens, entropy = np.zeros((n, self.seq), dtype=np.int64), np.zeros((n, self.seq))
        for t in range(self.seq):
            p = self.probs(tokens[:, :t])
            entropy[:, t] = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
            total = p.cumsum(1)
            # <= and not <: a token of probability 0 is never drawn
            tokens[:, t] = (total <= rng.random((n, 1)) * total[:, -1:]).sum(1)
        return tokens, entropy

    def _clean_probs(self, prefix: np.ndarray) -> np.ndarray:
        """:meth:`probs` without noise."""
        raise NotImplementedError

    def _rng(self) -> np.random.Generator:
        """Generator of the language itself, apart from those of its samples."""
        return np.random.default_rng([self.seed, 2**32])

    def _roles(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """The vocabulary divided at random into named groups of ids of the given sizes, each in random order."""
        order = self._rng().permutation(sum(sizes.values()))
        return dict(zip(sizes, np.split(order, np.cumsum(list(sizes.values()))[:-1]), strict=True))


def ids(tokens: np.ndarray) -> tuple[int, ...]:
    """An array of ids as a sorted tuple of Python's integers."""
    return tuple(sorted(int(token) for token in tokens))
