"""Text in and text out: tokenizers, generation, and the cross-entropy of a model on a text."""

from typing import TYPE_CHECKING

from tnlm._lazy import attach

if TYPE_CHECKING:
    from tnlm.text import tokenizer as tokenizer

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, {}, ("tokenizer",))
