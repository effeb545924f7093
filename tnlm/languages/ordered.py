"""Languages in which it counts which of two earlier tokens came first: brackets and agreement."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from tnlm.languages.language import Language, ids
from tnlm.languages.rules import Axes, Rule


@dataclass(frozen=True, kw_only=True)
class Brackets(Language):
    """Openers, fillers and closers of several kinds: a closer is that of the innermost open bracket."""

    name: ClassVar[str] = "brackets"
    n_kinds: int = 6
    """Kinds of brackets."""
    n_fillers: int = 8
    """Fillers."""
    depth: int = 3
    """Brackets that may be open at once."""
    seq: int = 48
    """Tokens of a sequence."""
    p_open: float = 0.3
    """Probability of an opener, where one may stand."""
    p_close: float = 0.3
    """Probability of a closer, where one may stand."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.p_open, self.p_close) <= 0 or self.p_open + self.p_close >= 1:
            raise ValueError(
                f"p_open and p_close must be above 0 and below 1 together, got {self.p_open} and {self.p_close}"
            )
        if not self.n_kinds or not self.n_fillers or not self.depth:
            raise ValueError(
                "brackets must have kinds, fillers and a depth of at least 1, got "
                f"n_kinds={self.n_kinds}, n_fillers={self.n_fillers}, depth={self.depth}"
            )

    @property
    def d_vocab(self) -> int:
        return 2 * self.n_kinds + self.n_fillers

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        openers, closers = self._groups["openers"].tolist(), self._groups["closers"].tolist()
        rare = self.noise / self.d_vocab
        strength = math.log(((1 - self.noise) * self.p_close + rare) / rare) if rare else math.inf
        return tuple(
            Rule("bracket", (openers[i], openers[j]), closers[k], strength=strength, context=context)
            for context in ("open", "closed")
            for i in range(self.n_kinds)
            for j in range(self.n_kinds)
            for k in [j if context == "open" else i]
        )

    @property
    def axes(self) -> tuple[Axes, ...]:
        openers, closers = ids(self._groups["openers"]), ids(self._groups["closers"])
        return tuple(Axes("bracket", (openers, openers), closers, context=context) for context in ("open", "closed"))

    def holds(self, prefix: np.ndarray) -> np.ndarray:
        height, stack, closed = self._read(prefix)
        rows = np.arange(len(prefix))
        top, below, inner = stack[rows, height], stack[rows, np.maximum(height - 1, 0)], closed[rows, height]
        kind = self._kinds()
        columns = []
        for rule in self.rules:
            first, second = (kind[source] for source in rule.sources)
            if rule.context == "open":
                columns.append((height >= 2) & (below == first) & (top == second))
            else:
                columns.append((height >= 1) & (top == first) & (inner == second))
        return np.stack(columns, 1)

    def _clean_probs(self, prefix: np.ndarray) -> np.ndarray:
        height, stack, _ = self._read(prefix)
        rows = np.arange(len(prefix))
        up, down = self.p_open * (height < self.depth), self.p_close * (height > 0)
        p = np.zeros((len(prefix), self.d_vocab))
        p[:, self._groups["openers"]] = up[:, None] / self.n_kinds
        p[:, self._groups["fillers"]] = (1 - up - down)[:, None] / self.n_fillers
        p[rows, self._groups["closers"][stack[rows, height]]] = down
        return p

    def _kinds(self) -> np.ndarray:
        """(d_vocab,): the kind of each opener; n_kinds of a closer, whichever it is; -1 of a filler."""
        kind = np.full(self.d_vocab, -1)
        kind[self._groups["openers"]] = np.arange(self.n_kinds)
        kind[self._groups["closers"]] = self.n_kinds
        return kind

    def _read(self, prefix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Number of open brackets (n,); kind of the bracket at each height (n, heights), valid from 1 to that number;
        and kind of the last bracket that was closed directly inside each of them, -1 for none.

        A closer closes the innermost bracket, and an opener opens one, also where noise put them.
        """
        n, t = prefix.shape
        rows, height = np.arange(n), np.zeros(n, dtype=np.int64)
        stack = np.zeros((n, t + 2), dtype=np.int64)
        closed = np.full((n, t + 2), -1)
        for kind in self._kinds()[prefix].T:
            opens, closes = (kind >= 0) & (kind < self.n_kinds), (kind == self.n_kinds) & (height > 0)
            inner = stack[rows, height]
            height = height + opens - closes
            stack[rows[opens], height[opens]] = kind[opens]
            closed[rows[opens], height[opens]] = -1
            closed[rows[closes], height[closes]] = inner[closes]
        return height, stack, closed

    @cached_property
    def _groups(self) -> dict[str, np.ndarray]:
        return self._roles({"openers": self.n_kinds, "closers": self.n_kinds, "fillers": self.n_fillers})


@dataclass(frozen=True, kw_only=True)
class Agreement(Language):
    """Sentences of a subject, a distractor after a marker, in either order, fillers and a verb that agrees.

    The verb has the form of the subject's class. A noun after the marker is the distractor, which is nearer to the
    verb in half of the sentences. An invariant noun has no class: the verb's form is uniform.
    """

    name: ClassVar[str] = "agreement"
    n_classes: int = 6
    """Classes of nouns, and forms of the verb."""
    n_nouns: int = 4
    """Nouns of a class."""
    n_invariant: int = 4
    """Nouns without a class."""
    n_fillers: int = 4
    """Fillers."""
    filler: float = 0.25
    """Probability of a filler at each place but after the marker."""
    seq: int = 48
    """Tokens of a sequence, which holds several sentences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.filler < 1 or not self.n_classes or not self.n_nouns or not self.n_fillers:
            raise ValueError(
                "agreement must have classes, nouns, fillers and 0 <= filler < 1, got "
                f"n_classes={self.n_classes}, n_nouns={self.n_nouns}, n_fillers={self.n_fillers}, filler={self.filler}"
            )

    @property
    def d_vocab(self) -> int:
        return 1 + self._n_all_nouns + self.n_classes + self.n_fillers

    @property
    def _n_all_nouns(self) -> int:
        return self.n_classes * self.n_nouns + self.n_invariant

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        rare = self.noise / self.d_vocab
        likely = (1 - self.noise) * (1 - self.filler) + rare
        strength = math.log(likely / rare) if rare else math.inf
        return tuple(
            Rule("agreement", (subject, distractor), self._form(subject), strength=strength)
            for subject in ids(self._groups["nouns"])
            for distractor in ids(self._groups["nouns"])
            if self._class[subject] < self.n_classes
        )

    @property
    def axes(self) -> tuple[Axes, ...]:
        nouns, forms = ids(self._groups["nouns"]), ids(self._groups["forms"])
        return (Axes("agreement", (nouns, nouns), forms),)

    def holds(self, prefix: np.ndarray) -> np.ndarray:
        subject, distractor, _ = self._read(prefix)
        first, second = np.array([rule.sources for rule in self.rules]).T
        return (subject[:, None] == first) & (distractor[:, None] == second)

    def _clean_probs(self, prefix: np.ndarray) -> np.ndarray:
        n = len(prefix)
        subject, distractor, marked = self._read(prefix)
        nouns, forms = self._groups["nouns"], self._groups["forms"]
        p = np.zeros((n, self.d_vocab))
        p[:, self._groups["fillers"]] = self.filler / self.n_fillers
        rest = 1 - self.filler
        noun = np.where(subject < 0, np.where(distractor < 0, rest / 2, rest), 0)
        marker = np.where(distractor < 0, np.where(subject < 0, rest / 2, rest), 0)
        p[:, nouns] = noun[:, None] / len(nouns)
        p[:, self._groups["marker"]] = marker[:, None]
        whole = (subject >= 0) & (distractor >= 0)
        group = np.where(whole, self._class[subject], -1)
        p[:, forms] += np.where(group == self.n_classes, rest / self.n_classes, 0)[:, None]
        rows = np.flatnonzero((group >= 0) & (group < self.n_classes))
        p[rows, forms[group[rows]]] += rest
        after_marker = np.zeros(self.d_vocab)
        after_marker[nouns] = 1 / len(nouns)
        return np.where(marked[:, None], after_marker, p)

    def _read(self, prefix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Subject and distractor of the unfinished sentence, -1 for none yet, and whether the marker came last.

        A noun takes its place anew, and a verb ends the sentence, also where noise put them.
        """
        n = len(prefix)
        subject, distractor, marked = np.full(n, -1), np.full(n, -1), np.zeros(n, dtype=bool)
        marker, forms = self._groups["marker"][0], self._groups["forms"]
        for token in prefix.T:
            noun, ends = self._class[token] >= 0, np.isin(token, forms)
            subject = np.where(noun & ~marked, token, np.where(ends, -1, subject))
            distractor = np.where(noun & marked, token, np.where(ends, -1, distractor))
            marked = token == marker
        return subject, distractor, marked

    def _form(self, noun: int) -> int:
        """The verb's form of a noun's class."""
        return int(self._groups["forms"][self._class[noun]])

    @cached_property
    def _class(self) -> np.ndarray:
        """(d_vocab,): the class of each noun, n_classes of an invariant one, -1 of another token."""
        group = np.full(self.d_vocab, -1)
        group[self._groups["nouns"]] = np.minimum(np.arange(self._n_all_nouns) // self.n_nouns, self.n_classes)
        return group

    @cached_property
    def _groups(self) -> dict[str, np.ndarray]:
        return self._roles(
            {"marker": 1, "nouns": self._n_all_nouns, "forms": self.n_classes, "fillers": self.n_fillers}
        )
