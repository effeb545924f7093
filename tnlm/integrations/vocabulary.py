"""The tokenizers of :mod:`tnlm.text.tokenizer` as transformers tokenizers with the same ids."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tnlm.text.tokenizer import EOT_TEXT, Tokenizer, _printable_bytes


def hf_tokenizer(tokenizer: Tokenizer, *, n_ctx: int | None = None) -> PreTrainedTokenizerFast:
    """A transformers tokenizer that gives the same ids for the same text.

    As in :mod:`tnlm.text.tokenizer`, no BOS is added and the text of a special token is read as plain text. The
    end-of-text id, if there is one, is used as BOS (never added), EOS and padding, on the right.

    Args:
        n_ctx: Longest sequence of the model, recorded as ``model_max_length``.

    Text must be Unicode without lone surrogates, which transformers refuses. Takes about a second for GPT-2.
    """
    to_char = {byte: char for char, byte in _printable_bytes().items()}
    size = tokenizer.d_vocab - (tokenizer.eot is not None)
    tokens = ["".join(to_char[byte] for byte in tokenizer.token_bytes(i)) for i in range(size)]
    ids = {token: i for i, token in enumerate(tokens)}
    # Ranks allow any two neighbours to merge whose bytes together are a token, the lowest id first.
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    backend = Backend(models.BPE(vocab=ids, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    special = {}
    if tokenizer.eot is not None:
        backend.add_special_tokens([AddedToken(EOT_TEXT, special=True, normalized=False)])
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), EOT_TEXT)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=n_ctx or int(1e30),
        padding_side="right",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **special,
    )
