"""Text where ids are taken: the tokenizer that was saved with the model reads it, or an error names the way out."""

import pytest
import torch

import tnlm
from tests.tiny_models import build, tiny
from tnlm import interp, lens
from tnlm.text import sampling, tokenizer

BYTES = tokenizer.get("bytes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = build(tiny(d_vocab=260, d_vocab_used=256, n_ctx=24), dtype=torch.float32)
    return tnlm.save(model, tmp_path_factory.mktemp("text") / "m", tokenizer=BYTES)


@pytest.fixture
def model(folder):
    return tnlm.load(folder)


@pytest.fixture
def nameless(model):
    """A model whose tokenizer nobody knows."""
    return build(tiny(d_vocab=11), dtype=torch.float32)


def test_load_brings_the_saved_tokenizer(model, nameless):
    assert model.tokenizer.hash == BYTES.hash
    assert nameless.tokenizer is None
    assert lens.hook(model).tokenizer is model.tokenizer


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_dtype_by_name_is_the_dtype(folder, dtype):
    loaded = {p.dtype for p in tnlm.load(folder, dtype=dtype).parameters()}
    assert loaded == {p.dtype for p in tnlm.load(folder, dtype=getattr(torch, dtype)).parameters()}


def test_extract_takes_a_dtype_by_name(model):
    assert interp.extract(model, dtype="float64").embed.dtype == torch.float64


@pytest.mark.user_error
def test_extract_refuses_other_dtypes(model):
    for wrong in ("float8", "checkpoint", 64, torch.int64, torch.bfloat16):
        with pytest.raises(ValueError, match="dtype must be one of float32, float64 or None"):
            interp.extract(model, dtype=wrong)


def test_explain_reads_text(model):
    by_text = interp.explain(model, "Ada Lovelace", "!", "?")
    by_id = interp.explain(model, torch.tensor(list(b"Ada Lovelace")), ord("!"), ord("?"))
    assert by_text.to_dict() == by_id.to_dict()
    assert (by_text.target, by_text.foil, by_text.tokens.tolist()) == (33, 63, list(b"Ada Lovelace"))
    assert "'!' minus '?'" in by_text.title


def test_attribute_and_paths_read_text(model):
    ids = torch.tensor(list(b"Ada"))
    assert torch.equal(interp.attribute(model, "Ada", "!").values, interp.attribute(model, ids, 33).values)
    branch = [f"blocks.{model.config.n_layer - 1}.hook_mlp_out"]
    assert torch.equal(interp.paths(model, "Ada", "!", branch).values, interp.paths(model, ids, 33, branch).values)


@pytest.mark.user_error
def test_a_target_of_several_tokens_lists_them(model):
    for call in (interp.explain, interp.attribute):
        with pytest.raises(ValueError, match=r"target must be one token, got ' F', which is 2: ' ', 'F'"):
            call(model, "Ada", " F")
    with pytest.raises(ValueError, match=r"foil must be one token, got '', which is 0: none"):
        interp.explain(model, "Ada", "F", "")


@pytest.mark.user_error
def test_without_a_tokenizer_the_way_out_is_named(nameless):
    said = r"none is known for 11 ids: set model.tokenizer, or pass tokenizer= .*, or give ids"
    for call in (
        lambda: interp.explain(nameless, "Ada", 1),
        lambda: interp.explain(nameless, torch.tensor([1]), "A"),
        lambda: interp.attribute(nameless, "Ada", 1),
        lambda: interp.paths(nameless, "Ada", 1, []),
        lambda: tnlm.generate(nameless, "Ada"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(ValueError, match="must have the model's 11 ids, got 'bytes' with 256"):
        interp.explain(nameless, "Ada", 1, tokenizer=BYTES)


def test_generate_continues_text_as_its_ids(model):
    ids = tnlm.generate(model, torch.tensor([list(b"Ada")]), 5, seed=3)[0].tolist()
    assert tnlm.generate(model, "Ada", 5, seed=3) == "Ada" + BYTES.decode(ids[3:])
    assert tnlm.generate(model, "Ada", 5, seed=3, tokenizer=BYTES) == tnlm.generate(model, "Ada", 5, seed=3)


def test_generate_fills_the_context_if_no_length_is_given(model):
    assert tnlm.generate(model, torch.tensor([list(b"Ada")]), seed=1).shape == (1, 24)
    long = build(tiny(d_vocab=11, n_ctx=80), dtype=torch.float32)
    assert tnlm.generate(long, torch.tensor([[1, 2, 3]]), seed=1).shape == (1, 3 + 64)


def test_a_text_ends_before_the_end_of_text(monkeypatch):
    trained = tokenizer.train_bpe(["a b c " * 9] * 3, 259)
    size = trained.d_vocab
    model = build(tiny(d_vocab=size, d_vocab_used=size, n_ctx=24), dtype=torch.float32)
    model.tokenizer = trained
    drawn = [*trained.encode(" c"), trained.eot]
    monkeypatch.setattr(sampling, "_draw", lambda *_: torch.tensor([left.pop(0)]))
    left = [*drawn, 0, 0]
    assert tnlm.generate(model, "a b") == "a b c"
    left = [*drawn, 0, 0]
    assert tnlm.generate(model, "a b", len(drawn) + 1, stop=[]) == "a b c<|endoftext|>" + trained.decode([0])
