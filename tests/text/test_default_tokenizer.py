"""Which tokenizer a model is read with: the one asked for, the one saved nearest to it, or by its number of ids."""

import pytest
import torch

import tnlm
from tests.tiny_models import build, tiny
from tnlm.text import tokenizer as tokenizers
from tnlm.text.default_tokenizer import encode_prompt, find_tokenizer, folders_of, one_token, saved_tokenizer
from tnlm.text.tokenizer import Tokenizer

TEXT = "the cat sat on the mat, and the dog sat on the cat. " * 9


@pytest.fixture(scope="module")
def own():
    return tokenizers.train_bpe([TEXT], 270)


@pytest.fixture(scope="module")
def other():
    return tokenizers.train_bpe([TEXT[::-1]], 270)


@pytest.fixture
def run(tmp_path):
    """A model two folders below ``run``, as a checkpoint is."""
    folder = tmp_path / "run" / "models" / "fourth"
    tnlm.save(build(tiny(d_vocab=280, d_vocab_used=270), torch.float32), folder)
    return folder


def test_the_nearest_folder_is_asked_first(run, own, other):
    model = tnlm.load(run)
    assert folders_of(model) == [run, run.parent, run.parent.parent]
    assert saved_tokenizer(model) is None
    other.save(run.parent.parent)
    assert find_tokenizer(tnlm.load(run)).hash == other.hash
    own.save(run)
    model = tnlm.load(run)
    assert find_tokenizer(model).hash == own.hash
    assert find_tokenizer(model, str(run.parent.parent)).hash == other.hash


class Found(Tokenizer):
    """A name and a number of ids, nothing to encode with."""

    def __init__(self, name, d_vocab):
        self.name, self.d_vocab = name, d_vocab


@pytest.mark.parametrize("used, name", [(50257, "gpt2"), (256, "bytes")])
def test_a_model_saved_without_one_is_read_by_its_number_of_ids(used, name, monkeypatch):
    monkeypatch.setattr(tokenizers, "get", lambda asked: Found(asked, used))
    model = tnlm.Transformer(tiny(d_vocab=used, d_vocab_used=used, n_layer=0), device="meta")
    assert find_tokenizer(model).name == name


@pytest.mark.user_error
def test_a_tokenizer_of_another_size_is_refused(run, own):
    own.save(run)
    with pytest.raises(ValueError, match="the model's 270 ids, got 'bytes' with 256"):
        find_tokenizer(tnlm.load(run), "bytes")


def test_prompts_and_single_tokens(own):
    assert encode_prompt("", own) == [own.eot]
    assert encode_prompt("the cat", own) == own.encode("the cat")
    assert one_token("target", " the", own) == own.encode(" the")[0]
    with pytest.raises(ValueError, match=r"foil must be one token, got 'xyz', which is 3: 'x', 'y', 'z'"):
        one_token("foil", "xyz", own)
