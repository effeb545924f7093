"""Where notebooks get their model and text."""

from pathlib import Path

import pytest
import torch

import tnlm
from tnlm.app import specimens
from tnlm.training.data.corpus import embedded_corpus
from tnlm.training.presets import preset


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setenv(specimens.TINY, "1")
    monkeypatch.chdir(tmp_path)


def test_preset_is_itself_unless_tiny(monkeypatch):
    monkeypatch.delenv(specimens.TINY, raising=False)
    assert specimens.training_config("nano", seed=3) == preset("nano").replace(seed=3, sample_tokens=0)
    monkeypatch.setenv(specimens.TINY, "1")
    small = specimens.training_config("nano", mlp="swiglu", attention="softmax")
    assert (small.model.d_model, small.model.mlp, small.model.attention) == (32, "swiglu", "softmax")
    assert small.model.d_hidden == 128


def test_trains_a_preset_reads_held_out_text_and_leaves_nothing(tiny, tmp_path):
    specimen = specimens.get("nano", rows=3, seq=40)
    text = "".join(embedded_corpus().validation[:3])
    eot = specimen.tokenizer.eot
    assert specimen.tokens.shape == (3, 41)
    assert int(specimen.tokens[0, 0]) == eot, "documents follow the end-of-text id"
    decoded = specimen.tokenizer.decode([t for t in specimen.tokens.flatten().tolist() if t != eot])
    assert decoded[:80] == text[:80]
    with torch.no_grad():
        logits = specimen.model(specimen.tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), specimen.tokens[:, 1:].flatten())
    assert loss < 6.5, "trained: a uniform guess costs ln 1024 = 6.93"
    assert list(tmp_path.iterdir()) == []


def test_reads_any_model_that_load_reads(tmp_path):
    model = tnlm.Transformer(tnlm.ModelConfig.released(n_layer=1, n_head=1, d_model=8, d_vocab=256, n_ctx=16))
    tnlm.save(model, tmp_path / "mine")
    specimen = specimens.get(str(tmp_path / "mine"), rows=2)
    assert specimen.tokenizer.name == "bytes"
    assert specimen.tokens.shape == (2, 17), "windows fit the model's context"
    assert torch.equal(specimen.model.embed.w_e, model.embed.w_e)
    assert not specimen.model.training


def test_a_folder_comes_before_a_preset_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tnlm.Transformer(tnlm.ModelConfig.released(n_layer=1, n_head=1, d_model=8, d_vocab=256, n_ctx=16))
    tnlm.save(model, Path("nano"))
    assert specimens.get("nano", rows=1).model.config == model.config


@pytest.mark.user_error
def test_more_windows_than_text(tmp_path):
    model = tnlm.Transformer(tnlm.ModelConfig.released(n_layer=1, n_head=1, d_model=8, d_vocab=256, n_ctx=16))
    tnlm.save(model, tmp_path)
    with pytest.raises(ValueError, match=r"100000000 windows of 17 tokens need 1700000000, the held-out text has \d+"):
        specimens.get(str(tmp_path), rows=10**8)
