"""Text for a hooked model: ids of texts, texts of ids, and the unembedding directions of tokens."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int, Shaped
from torch import Tensor

from tnlm.config import ModelConfig
from tnlm.text.default_tokenizer import find_tokenizer, one_token
from tnlm.text.tokenizer import Tokenizer
from tnlm.transformer import Transformer, check_ids


class TextMethods:
    """transformer-lens's methods between text and token ids, a base class of :class:`tnlm.lens.hooked.HookedModel`."""

    config: ModelConfig
    embed: Any
    unembed: Any
    _tokenizer: Tokenizer | None
    _held: list[Transformer]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer given to :func:`tnlm.lens.hook`, else that of :func:`tnlm.text.find_tokenizer`.

        Raises:
            ValueError: There is none, or its vocabulary is not that of the model.
        """
        self._tokenizer = find_tokenizer(self._held[0], self._tokenizer)
        return self._tokenizer

    def to_tokens(self, input: str | list[str], prepend_bos: bool | None = False) -> Int[Tensor, "batch seq"]:
        """Token ids ``(batch, seq)`` of one text, or of several texts that have equally many tokens.

        ``prepend_bos`` is off, unlike in transformer-lens: these models were trained without a beginning-of-sequence
        token. ``True`` puts the end-of-text id first, which in training precedes each document.

        Raises:
            ValueError: The texts differ in their number of tokens. They are not padded: attention without softmax
                would read the padding.
        """
        rows = [self.tokenizer.encode(text) for text in ([input] if isinstance(input, str) else input)]
        if prepend_bos:
            if self.tokenizer.eot is None:
                raise ValueError(f"tokenizer {self.tokenizer.name!r} has no end-of-text id to prepend")
            rows = [[self.tokenizer.eot, *row] for row in rows]
        lengths = sorted({len(row) for row in rows})
        if len(lengths) != 1:
            raise ValueError(f"texts of one batch must have equally many tokens, got {lengths}; run them one by one")
        return torch.tensor(rows, dtype=torch.int64, device=self.embed.w_e.device)

    def to_string(self, tokens: Int[Tensor, "*batch seq"] | Sequence[int] | int) -> str | list[str]:
        """The text of one id or of one sequence of ids; for a batch, a list of texts."""
        tokens = torch.as_tensor(tokens)
        if tokens.ndim > 1:
            return [self.tokenizer.decode(row) for row in tokens.tolist()]
        return self.tokenizer.decode(tokens.reshape(-1).tolist())

    def to_str_tokens(self, input: str | Int[Tensor, " seq"], prepend_bos: bool | None = False) -> list[str]:
        """The text of each token."""
        tokens = self.to_tokens(input, prepend_bos) if isinstance(input, str) else torch.as_tensor(input)
        return [self.tokenizer.decode([token]) for token in tokens.reshape(-1).tolist()]

    def to_single_token(self, text: str) -> int:
        """The id of a text that is exactly one token.

        Raises:
            ValueError: The text is several tokens, or none.
        """
        return one_token("text", text, self.tokenizer)

    def tokens_to_residual_directions(self, tokens: str | int | Int[Tensor, "*any"]) -> Shaped[Tensor, "*any d_model"]:
        """Copies of the unembedding rows of some tokens; logits before the softcap are dot products with them."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        ids = torch.as_tensor(tokens, device=self.embed.w_e.device)
        self._check_ids(ids.reshape(1, -1))
        return F.embedding(ids, self.unembed.w_u)

    def _check_ids(self, tokens: Int[Tensor, "batch seq"]) -> None:
        assert self.config.d_vocab_used is not None
        if tokens.device.type != "meta":
            check_ids(tokens, self.config.d_vocab_used)
