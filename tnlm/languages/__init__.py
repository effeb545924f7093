"""Toy languages with an answer key: the exact distribution of the next token, and the rules that a model has to learn.

``tnlm-train data toy LANGUAGE`` writes one as shards with its key. Imports no torch.
"""

from tnlm.languages.copies import Induction, Retrieval
from tnlm.languages.key import KEY, LANGUAGES, Key, load_key, losses, make_key
from tnlm.languages.language import Language
from tnlm.languages.ordered import Agreement, Brackets
from tnlm.languages.rules import Axes, Candidates, Rule
from tnlm.languages.windowed import And, SkipBigrams

__all__ = [
    "KEY",
    "LANGUAGES",
    "Agreement",
    "And",
    "Axes",
    "Brackets",
    "Candidates",
    "Induction",
    "Key",
    "Language",
    "Retrieval",
    "Rule",
    "SkipBigrams",
    "load_key",
    "losses",
    "make_key",
]
