"""Finds the tokenizer of a model, and encodes prompts and single tokens. Imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnlm.checks import MODEL, TOKENIZER, check_kind
from tnlm.text import tokenizer as tokenizers
from tnlm.text.tokenizer import FILE_NAME, Tokenizer

if TYPE_CHECKING:
    from tnlm.transformer import Transformer

BY_SIZE = {50257: "gpt2", 256: "bytes"}
"""Default tokenizers by number of ids, for models saved without one."""


def source_of(model: "Transformer") -> dict[str, Any]:
    """Where the weights came from, as :func:`tnlm.load` records it; empty for a model made in memory."""
    return dict(model.source or {})


def folders_of(model: "Transformer") -> list[Path]:
    """The folder of local weights and the two above it, because a checkpoint lies in ``run/checkpoints/step``."""
    path = source_of(model).get("path")
    return [] if path is None else [Path(path), *Path(path).parents[:2]]


def saved_tokenizer(model: "Transformer") -> Tokenizer | None:
    """The tokenizer saved beside the weights or in the run folder above them; None if there is none."""
    return next((Tokenizer.load(folder) for folder in folders_of(model) if (folder / FILE_NAME).is_file()), None)


def find_tokenizer(model: "Transformer", given: Tokenizer | str | None = None) -> Tokenizer:
    """The tokenizer of a model: the given one (or its name or path), else ``model.tokenizer``, else by number of ids.

    Raises:
        ValueError: There is none, or its vocabulary is not that of the model.
    """
    from tnlm.transformer import Transformer  # torch, which a model has imported

    check_kind("model", model, Transformer, MODEL)
    used = model.config.d_vocab_used
    if given is not None:
        found = given if isinstance(given, Tokenizer) else tokenizers.get(given)
    elif model.tokenizer is not None:
        found = model.tokenizer
    elif used in BY_SIZE:
        found = tokenizers.get(BY_SIZE[used])
    else:
        raise ValueError(
            f"no tokenizer was saved with the model, and none is known for {used} ids: set "
            "model.tokenizer, or pass tokenizer= (--tokenizer PATH), or give ids"
        )
    if found.d_vocab != used:
        raise ValueError(
            f"the tokenizer must have the model's {used} ids, got {found.name!r} with {found.d_vocab}; pass another "
            "tokenizer= (--tokenizer)"
        )
    return found


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a prompt. Special text is read as plain text and nothing is prepended; an empty prompt is end-of-text.

    Raises:
        ValueError: The prompt is empty and the tokenizer has no such id.
    """
    check_kind("prompt", prompt, str, "ids need no encoding")
    check_kind("tokenizer", tokenizer, Tokenizer, TOKENIZER)
    if prompt:
        return tokenizer.encode(prompt)
    if tokenizer.eot is None:
        raise ValueError(f"an empty prompt begins with end-of-text, which tokenizer {tokenizer.name!r} lacks: --prompt")
    return [tokenizer.eot]


def one_token(name: str, text: str, tokenizer: Tokenizer) -> int:
    """The id of a text that is exactly one token; ``name`` is its name in errors.

    Raises:
        ValueError: The text is no token or several; shows them.
    """
    check_kind(name, text, str, "give the text of one token")
    check_kind("tokenizer", tokenizer, Tokenizer, TOKENIZER)
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        pieces = ", ".join(tokenizer.quoted(i) for i in ids)
        raise ValueError(f"{name} must be one token, got {text!r}, which is {len(ids)}: {pieces or 'none'}")
    return ids[0]
