"""Text in and text out: tokenizers, generation, and the cross-entropy of a model on a text.

Names are imported on first use; ``tnlm.text.tokenizer`` and ``tnlm.text.default_tokenizer`` import no torch.
"""

from typing import TYPE_CHECKING

from tnlm._lazy import attach

if TYPE_CHECKING:
    from tnlm.text import tokenizer as tokenizer
    from tnlm.text.default_tokenizer import encode_prompt, find_tokenizer, one_token
    from tnlm.text.evaluate import Evaluation, byte_lengths, cross_entropy, token_losses
    from tnlm.text.sampling import generate, probabilities
    from tnlm.text.tokenizer import Tokenizer, train_bpe

_HOMES = {
    "tnlm.text.default_tokenizer": ("encode_prompt", "find_tokenizer", "one_token"),
    "tnlm.text.evaluate": ("Evaluation", "byte_lengths", "cross_entropy", "token_losses"),
    "tnlm.text.sampling": ("generate", "probabilities"),
    "tnlm.text.tokenizer": ("Tokenizer", "train_bpe"),
}
_SUBMODULES = ("tokenizer",)

__all__ = [
    "Evaluation",
    "Tokenizer",
    "byte_lengths",
    "cross_entropy",
    "encode_prompt",
    "find_tokenizer",
    "generate",
    "one_token",
    "probabilities",
    "token_losses",
    "train_bpe",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, _HOMES, _SUBMODULES)
