"""The answer key of a toy language, ``key.json``: its rules, its candidates, and the losses that they explain."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlm.checks import as_path, check_kind
from tnlm.languages.copies import Induction, Retrieval
from tnlm.languages.language import Language
from tnlm.languages.ordered import Agreement, Brackets
from tnlm.languages.rules import Axes, Candidates, Rule, candidates, rule_from_json, rule_to_json
from tnlm.languages.windowed import And, SkipBigrams
from tnlm.output.files import read_json, write_atomically

KEY = "key.json"
LANGUAGES: dict[str, type[Language]] = {
    language.name: language for language in (SkipBigrams, And, Induction, Retrieval, Brackets, Agreement)
}
"""The toy languages by name."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """What ``key.json`` holds: the language, how often its tokens occur, its losses, rules and candidates."""

    language: str
    """Name of the language, one of LANGUAGES."""
    options: dict[str, Any]
    """Its options without the seed."""
    seed: int
    d_vocab: int
    seq: int
    """Tokens of a sequence."""
    counts: tuple[float, ...]
    """Occurrences of each id in the training shard."""
    losses: dict[str, Any]
    """What :func:`losses` gives for the validation shard."""
    rules: tuple[Rule, ...]
    decoys: tuple[Rule, ...]
    """Planted structure that is no true candidate."""
    axes: tuple[Axes, ...]
    """Axes of the lists of candidates."""

    def candidates(self) -> tuple[Candidates, ...]:
        """The lists of candidates, one for each kind and context, with the rules of the language marked.

        Up to 130,000 rows for the languages at their default sizes, in a few milliseconds.
        """
        return tuple(candidates(axes, self.rules) for axes in self.axes)

    def generator(self) -> Language:
        """The language, which makes the data again."""
        return LANGUAGES[self.language](**self.options, seed=self.seed)

    def save(self, path: str | os.PathLike) -> None:
        """Write the key as JSON, atomically; an infinite strength is null."""
        values = vars(self) | {
            "rules": [rule_to_json(rule) for rule in self.rules],
            "decoys": [rule_to_json(rule) for rule in self.decoys],
            "axes": [axes._asdict() for axes in self.axes],
        }
        write_atomically(as_path("path", path), json.dumps(values, allow_nan=False))


def make_key(language: Language, counts: np.ndarray, found: Mapping[str, Any]) -> Key:
    """The key of a language whose training shard has these counts, and its validation shard these losses."""
    return Key(
        language=language.name,
        options=language.options,
        seed=language.seed,
        d_vocab=language.d_vocab,
        seq=language.seq,
        counts=tuple(float(count) for count in counts),
        losses=dict(found),
        rules=language.rules,
        decoys=language.decoys,
        axes=language.axes,
    )


def load_key(path: str | os.PathLike) -> Key:
    """The key in a file, or in the ``key.json`` of a data folder.

    Raises:
        ValueError: There is no such file, or it is no key.
    """
    path = as_path("path", path)
    path = path / KEY if path.is_dir() else path
    try:
        values = read_json(path)
    except OSError as error:
        raise ValueError(
            f"{path} must be the key of a toy language, but cannot be read: {error.strerror}; "
            "`tnlm-train data toy LANGUAGE --out DIR` writes one"
        ) from None
    try:
        if values["language"] not in LANGUAGES:
            raise ValueError(f"unknown language {values['language']!r}; known: {', '.join(LANGUAGES)}")
        return _key_from_json(values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must hold the key of a toy language, but it does not fit: {error!r}") from None


def _key_from_json(values: dict[str, Any]) -> Key:
    rules, decoys = (tuple(rule_from_json(rule) for rule in values[name]) for name in ("rules", "decoys"))
    axes = tuple(
        Axes(
            kind=row["kind"],
            sources=tuple(map(tuple, row["sources"])),
            targets=tuple(row["targets"]),
            signs=tuple(row["signs"]),
            offsets=tuple(row["offsets"]),
            context=row["context"],
        )
        for row in values["axes"]
    )
    return Key(**{**values, "counts": tuple(values["counts"]), "rules": rules, "decoys": decoys, "axes": axes})


def losses(language: Language, counts: np.ndarray, tokens: np.ndarray, entropy: np.ndarray) -> dict[str, Any]:
    """Cross-entropies of a sample, in nats per target; the first token of each sequence is no target.

    A window of training has one target more, the first token of the next sequence, which is left out.

    Args:
        counts: Occurrences of each id in the training text.
        tokens, entropy: What ``language.sample`` gave.

    Returns:
        ``unigram``, the loss of the counts (one added to each); ``optimal``, the least possible, the mean entropy;
        ``optimal_error``, its standard error over sequences; ``contexts``, for each rule the number of ``targets`` that
        it applies to and the mean ``unigram`` and ``optimal`` loss there (None without targets).
    """
    check_kind("language", language, Language, "tnlm.languages.LANGUAGES has them by name")
    code = -np.log((counts + 1) / (counts + 1).sum())[tokens[:, 1:]]
    best = entropy[:, 1:]
    targets, unigram, optimal = np.zeros((3, len(language.rules)))
    for t in range(1, language.seq):
        applies = language.holds(tokens[:, :t])
        targets += applies.sum(0)
        unigram += code[:, t - 1] @ applies
        optimal += best[:, t - 1] @ applies
    contexts = [
        {"targets": int(n), "unigram": u / n if n else None, "optimal": o / n if n else None}
        for n, u, o in zip(targets.tolist(), unigram.tolist(), optimal.tolist(), strict=True)
    ]
    return {
        "unigram": float(code.mean()),
        "optimal": float(best.mean()),
        "optimal_error": float(best.mean(1).std() / np.sqrt(len(best))),
        "contexts": contexts,
    }
