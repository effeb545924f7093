"""Rules of a language, and the lists of candidates among which a tool has to find them. Imports no torch."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

KINDS = {"pair": 1, "and": 2, "induction": 2, "retrieval": 3, "bracket": 2, "agreement": 2}
"""Kind of a rule: the number of its sources."""


class Rule(NamedTuple):
    """One rule of a language: the sources, at earlier places, change the log-odds of the target."""

    kind: str
    """``pair``: a source raises or lowers a target. ``and``: two sources, in any order, do when both occurred.
    ``induction``: (query, value), the value followed the query earlier. ``retrieval``: (query, key, value), the value
    followed the key earlier. ``bracket``: (first, second), two openers. ``agreement``: (subject, distractor)."""
    sources: tuple[int, ...]
    target: int
    sign: int = 1
    offset: int = 0
    """Tokens from the source to the target; 0: anywhere within the reach of the language. Kind ``pair`` only."""
    strength: float = math.inf
    """Change of the target's log-odds in nats, without sign; infinite where the target becomes certain."""
    context: str = ""
    """Kind ``bracket``: ``open``, both are open; ``closed``, the second is closed again."""


class Axes(NamedTuple):
    """The values that each part of a candidate may have; their product is the list of candidates."""

    kind: str
    sources: tuple[tuple[int, ...], ...]
    targets: tuple[int, ...]
    signs: tuple[int, ...] = (1,)
    offsets: tuple[int, ...] = (0,)
    context: str = ""


class Candidates(NamedTuple):
    """Possible rules of one kind and context, one a row."""

    kind: str
    sources: np.ndarray  # (n, k)
    offset: np.ndarray  # (n,), 0 = anywhere
    target: np.ndarray  # (n,)
    sign: np.ndarray  # (n,)
    true: np.ndarray  # (n,), bool: a rule of the language
    context: str = ""


def candidates(axes: Axes, rules: Iterable[Rule]) -> Candidates:
    """The product of the axes, with the rules of the language marked.

    Left out are rows that name no rule: a source that is its own target (``pair``, ``and``), an unordered pair given
    twice (``and``), a value that is the query (``induction``); and the offsets of a pair that holds anywhere, because
    there it holds at each of them.
    """
    rules = [rule for rule in rules if (rule.kind, rule.context) == (axes.kind, axes.context)]
    columns = np.array(
        np.meshgrid(*axes.sources, axes.offsets, axes.targets, axes.signs, indexing="ij"), dtype=np.int64
    ).reshape(len(axes.sources) + 3, -1)
    *sources, offset, target, _ = columns
    keep = np.ones(columns.shape[1], dtype=bool)
    if axes.kind in ("pair", "and"):
        keep &= np.all([source != target for source in sources], axis=0)
    if axes.kind == "and":
        keep &= sources[0] < sources[1]
    if axes.kind == "induction":
        keep &= sources[0] != sources[1]
    anywhere = {(*rule.sources, rule.target) for rule in rules if not rule.offset}
    if axes.kind == "pair":
        keep &= ~((offset > 0) & _among(np.stack([*sources, target]), anywhere))
    columns = columns[:, keep]
    true = _among(columns, {(*rule.sources, rule.offset, rule.target, rule.sign) for rule in rules})
    *sources, offset, target, sign = columns
    return Candidates(axes.kind, np.stack(sources, 1), offset, target, sign, true, axes.context)


def _among(columns: np.ndarray, rows: set[tuple[int, ...]]) -> np.ndarray:
    """Which columns of an array (k, n) are in a set of k-tuples."""
    if not rows:
        return np.zeros(columns.shape[1], dtype=bool)
    listed = np.array(sorted(rows)).T
    low = np.minimum(columns.min(1), listed.min(1))[:, None]
    sizes = tuple((np.maximum(columns.max(1), listed.max(1))[:, None] - low + 1)[:, 0])
    return np.isin(np.ravel_multi_index(tuple(columns - low), sizes), np.ravel_multi_index(tuple(listed - low), sizes))


def rule_to_json(rule: Rule) -> dict[str, Any]:
    """Plain JSON values of a rule; an infinite strength is null."""
    return rule._asdict() | {"strength": None if math.isinf(rule.strength) else rule.strength}


def rule_from_json(values: dict[str, Any]) -> Rule:
    """The rule of :func:`rule_to_json`."""
    strength = math.inf if values["strength"] is None else values["strength"]
    return Rule(**{**values, "sources": tuple(values["sources"]), "strength": strength})
