"""transformers and lm-eval: loading, generation, masks, tokenizers and tasks agree with the model itself."""

import json
from pathlib import Path

import datasets.config
import lm_eval.tasks
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import constants
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, StaticCache, pipeline

import tnlm
from tests.limits import assert_close
from tests.tiny_models import ATTENTIONS, build, ids, tiny
from tnlm.checkpoints import hub
from tnlm.config import ModelConfig
from tnlm.integrations import hf
from tnlm.points import intervene
from tnlm.text import tokenizer

TOKENS = ids(2, 5)
CONFIGS = {attention: tiny(attention=attention) for attention in ATTENTIONS} | {
    "plain": tiny(mlp="swiglu", attention="softmax", x0_mixing=False, value_residual=False, mlp_bias=False),
    "pure": tiny(norm="none", qk_norm=False, embedding_norm=False, logit_softcap=None, d_vocab_used=13),
    "no layers": tiny(n_layer=0, mlp="relu2"),
    "no final norm, hidden biases": tiny(final_norm=False, mlp_hidden_bias=True),
}


@pytest.fixture
def model():
    return build(tiny(), dtype=torch.float32)


@pytest.fixture
def wrapped(model):
    return hf.wrap(model)


def bytes_model(n_ctx=64, **changes):
    return build(tiny(d_vocab=256, d_vocab_used=256, n_ctx=n_ctx, **changes), dtype=torch.float32)


# Loading and saving


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_config_saves_loads_and_generates(config, tmp_path):
    model = build(config, dtype=torch.float32)
    tnlm.save(model, tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(loaded) is hf.TnlmForCausalLM
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS))
    assert not any(p.is_meta for p in loaded.parameters())
    assert not any(isinstance(value, torch.Tensor) for m in loaded.modules() for value in vars(m).values())
    loaded.save_pretrained(tmp_path / "theirs")
    again = tnlm.load(tmp_path / "theirs")
    assert again.config == config
    assert torch.equal(again(TOKENS), model(TOKENS))
    expected = tnlm.generate(model, TOKENS, 7, temperature=0)
    for use_cache in (True, False):
        assert torch.equal(loaded.generate(TOKENS, max_new_tokens=7, do_sample=False, use_cache=use_cache), expected)


def test_files_carry_no_code_and_the_config_is_ours(wrapped, tmp_path):
    wrapped.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"model_type": "tnlm", **wrapped.config.model_config.to_dict()}
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert AutoConfig.from_pretrained(tmp_path).model_config == tiny()
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert list(fresh.state_dict()) == list(wrapped.state_dict()) == list(wrapped.transformer.state_dict())


def test_wrapping_shares_the_parameters(model, wrapped):
    theirs = dict(model.named_parameters())
    assert all(p is theirs[name] for name, p in wrapped.named_parameters())
    assert torch.equal(wrapped(TOKENS).logits, model(TOKENS))
    wrapped(TOKENS, labels=TOKENS).loss.backward()
    assert model.embed.w_e.grad.abs().max() > 0


@pytest.mark.user_error
def test_loading_is_strict(model, tmp_path):
    from safetensors.torch import load_file, save_file

    tnlm.save(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    w_l = state.pop("blocks.1.mlp.w_l")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing blocks\.1\.mlp\.w_l; unexpected none"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    save_file(
        {**state, "blocks.1.mlp.w_l": w_l, "odd": w_l.clone()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ValueError, match=r"missing none; unexpected odd"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.user_error
def test_configs_are_strict():
    values = tiny().to_dict()
    with pytest.raises(ValueError, match="neither tnlm nor transformers knows: d_modle"):
        hf.TnlmConfig(**values, d_modle=3)
    with pytest.raises(ValueError, match="missing d_model"):
        hf.TnlmConfig(**{key: value for key, value in values.items() if key != "d_model"})
    with pytest.raises(ValueError, match="d_model must be a multiple of n_head"):
        hf.TnlmConfig(**{**values, "n_head": 7})
    with pytest.raises(ValueError, match=r"needs a tnlm.Transformer, got Linear"):
        hf.wrap(torch.nn.Linear(2, 3))


def test_the_usual_names_of_sizes_work(wrapped):
    config = wrapped.config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (13, 30, 7)
    assert (config.num_hidden_layers, config.num_attention_heads, config.head_dim) == (3, 3, 10)
    assert config.max_position_embeddings == 17


# Forward: masks, caches, options


def test_right_padding_is_exact(model, wrapped):
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    padded = TOKENS.masked_fill(mask == 0, 12)  # a padding id: what stands there does not matter
    logits = wrapped(padded, attention_mask=mask).logits
    assert torch.equal(logits[0], model(TOKENS)[0])
    assert_close(logits[1, :3], model(TOKENS[1:, :3])[0])
    ones = torch.ones_like(mask)
    assert torch.equal(wrapped(TOKENS, attention_mask=ones).logits, model(TOKENS))


@pytest.mark.user_error
@pytest.mark.parametrize("row", [[0, 0, 1, 1, 1], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
def test_left_padding_and_holes_are_refused(wrapped, row):
    mask = torch.tensor([[1, 1, 1, 1, 1], row])
    for run in (wrapped, lambda *args, **options: wrapped.generate(*args, max_new_tokens=2, **options)):
        with pytest.raises(ValueError, match=r"padding must be on the right: .* batch_size=1"):
            run(TOKENS, attention_mask=mask)


@pytest.mark.user_error
def test_generating_after_right_padding_is_refused(wrapped):
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with pytest.raises(ValueError, match="padding must be on the right"):
        wrapped.generate(TOKENS, attention_mask=mask, max_new_tokens=3, do_sample=False)


def test_a_cache_gives_the_whole_run(model, wrapped):
    cache = DynamicCache(config=wrapped.config)
    first = wrapped(TOKENS[:, :3], cache=cache, use_cache=True).logits
    rest = wrapped(TOKENS[:, 3:], cache=cache, use_cache=True, attention_mask=torch.ones(2, 5)).logits
    assert_close(torch.cat([first, rest], 1), model(TOKENS))
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("place", ["blocks.1.attn.hook_z", "ln_final.hook_scale"])
def test_a_forward_that_fails_leaves_the_cache_as_it_was(model, wrapped, place):
    def interrupt(value):
        raise KeyboardInterrupt

    cache, out = DynamicCache(config=wrapped.config), []
    for piece, other in zip(TOKENS.split([3, 2], dim=1), TOKENS.flip(0).split([3, 2], dim=1), strict=True):
        length = cache.get_seq_length()
        with intervene(model, {place: interrupt}), pytest.raises(KeyboardInterrupt):
            wrapped(other, cache=cache)
        assert cache.get_seq_length() == length
        out.append(wrapped(piece, cache=cache).logits)
    assert_close(torch.cat(out, 1), model(TOKENS))


@pytest.mark.user_error
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_layer": 2}, r"n_layer=3 layers, got \[3, 3\]; it was filled by another model"),
        ({"n_layer": 4}, r"n_layer=3 layers, got \[3, 3, 3, 3\]; it was filled by another model"),
        ({"attention": "softmax"}, r"it holds .*; got .*; begin a new one"),
        ({"d_qk": 6}, r"it holds .*; got .*; begin a new one"),
    ],
)
def test_a_cache_of_another_model_is_refused(wrapped, changes, message):
    cache = DynamicCache()
    hf.wrap(build(tiny(**changes), torch.float32))(TOKENS[:, :3], cache=cache)
    with pytest.raises(ValueError, match=message):
        wrapped(TOKENS[:, 3:], cache=cache)


@pytest.mark.user_error
def test_a_cache_of_another_batch_is_refused(wrapped):
    cache = DynamicCache()
    wrapped(TOKENS[:, :3], cache=cache)
    with pytest.raises(ValueError, match=r"it holds \(2, seq, .*; got \(1, seq,"):
        wrapped(TOKENS[:1, 3:], cache=cache)


def test_beams_reorder_the_cache(wrapped):
    runs = [
        wrapped.generate(TOKENS, max_new_tokens=6, num_beams=3, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*runs)


@pytest.mark.user_error
def test_what_would_be_ignored_is_refused(wrapped):
    with pytest.raises(ValueError, match=r"must be \(batch, past \+ seq\) = \(2, 5\), got \(2, 9\)"):
        wrapped(TOKENS, attention_mask=torch.ones(2, 9))
    with pytest.raises(ValueError, match="cache must be a DynamicCache, got StaticCache"):
        wrapped(TOKENS, cache=StaticCache(config=wrapped.config, max_cache_len=9))
    with pytest.raises(ValueError, match=r"forward has no output_hidden_states, position_ids; .* tnlm.lens.hook"):
        wrapped(TOKENS, output_hidden_states=True, position_ids=TOKENS, output_attentions=False)


@pytest.mark.user_error
@pytest.mark.parametrize("bad", [-1, 11, 2**31])
def test_bad_ids_are_refused(wrapped, bad):
    with pytest.raises(ValueError, match=rf"token ids must be in \[0, 11\), got {bad} at row 0, position 1"):
        wrapped(torch.tensor([[3, bad]]))


def test_loss_and_selected_logits(model, wrapped):
    labels = TOKENS.clone()
    labels[1, 3:] = -100
    out = wrapped(TOKENS, labels=labels)
    expected = F.cross_entropy(model(TOKENS)[:, :-1].reshape(-1, 13), labels[:, 1:].reshape(-1))
    assert_close(out.loss, expected)
    whole = model(TOKENS)
    assert_close(wrapped(TOKENS, logits_to_keep=1).logits, whole[:, -1:])
    assert torch.equal(wrapped(TOKENS, logits_to_keep=2).logits, whole[:, -2:])
    assert torch.equal(wrapped(TOKENS, logits_to_keep=torch.tensor([0, 3])).logits, whole[:, [0, 3]])
    assert torch.equal(wrapped(TOKENS, return_dict=False)[0], whole)


def test_padding_ids_are_never_generated(model, wrapped):
    with torch.no_grad():
        model.unembed.w_u[11:] = 50 * model.unembed.w_u[3]
        model.unembed.w_u[12] *= -1
    plain = model(TOKENS)[:, -1].argmax(-1)
    assert (plain >= 11).any()
    assert wrapped.generate(TOKENS, max_new_tokens=8, do_sample=True, suppress_tokens=[3])[:, 5:].max() < 11
    assert not (wrapped.generate(TOKENS, max_new_tokens=8, do_sample=True, suppress_tokens=[3])[:, 5:] == 3).any()


# Tokenizers


TEXTS = [
    "The parser, it's here: 1234 times!",
    "  two  spaces\n\n\ttabs\r\n",
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600 \u0301e",
    "<|endoftext|> is plain text",
    "don't DON'T I'll we've x'x 's",
    "\x00\x7f \u00a0nbsp\u2003em \u200b",
    "",
]


@pytest.fixture(scope="module")
def trained():
    text = "the cat sat on the mat, the cat's hat; don't panic, 42 parsers continue downwards, however improbably "
    return tokenizer.train_bpe([text * 9], 290)


@pytest.mark.parametrize("name", ["gpt2", "bytes", "trained", "own"])
def test_tokenizers_agree_id_for_id(name, trained, tmp_path):
    if name == "own":  # " plain" is no join of two tokens: only a whole word gives it
        tokens = [*(bytes([byte]) for byte in range(256)), b" plain", b"he", b"er", b"here"]
        ours = tokenizer.Tokenizer("own", tokens, eot=True)
        assert 256 in ours.encode("is plain text")
    else:
        ours = trained if name == "trained" else tokenizer.get(name)
    theirs = hf.hf_tokenizer(ours, n_ctx=64)
    theirs.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == loaded(text)["input_ids"] == ours.encode(text), text
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert len(theirs) == ours.d_vocab
    assert theirs.eos_token_id == theirs.pad_token_id == ours.eot
    assert loaded.model_max_length == 64
    assert loaded.padding_side == "right"


def test_pipeline_continues_text():
    model = bytes_model()
    run = pipeline("text-generation", model=hf.wrap(model), tokenizer=hf.hf_tokenizer(tokenizer.get("bytes")))
    text = run("ab c", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    prompt = torch.tensor([tokenizer.get("bytes").encode("ab c")])
    assert text == tokenizer.get("bytes").decode(tnlm.generate(model, prompt, 5, temperature=0)[0].tolist())


# lm-eval


def test_log_likelihoods_are_direct_sums(trained):
    model = build(tiny(d_vocab=300, d_vocab_used=290, n_ctx=64), dtype=torch.float32)
    lm = HFLM(
        hf.wrap(model), backend="causal", tokenizer=hf.hf_tokenizer(trained), batch_size=2, device="cpu", max_length=64
    )
    pairs = [("the cat", " sat on the mat"), ("the", " hat"), ("don't panic", " 42"), ("", "the cat's")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = lm.loglikelihood(requests, disable_tqdm=True)
    for (context, continuation), (value, _) in zip(pairs, found, strict=True):
        prefix = trained.encode(context) or [trained.eot]
        end = trained.encode(continuation)
        log_p = model(torch.tensor([prefix + end])).log_softmax(-1)[0]
        expected = sum(log_p[len(prefix) + i - 1, token].item() for i, token in enumerate(end))
        assert_close(value, expected, dtype=torch.float32)


def test_a_file_of_questions_runs_offline(tmp_path, monkeypatch, trained):
    def no_network(*args, **options):
        raise AssertionError("the network was asked for")

    asked, answer = [], HFLM.loglikelihood

    def spy(lm, requests, **options):
        asked.extend(request.args for request in requests)
        return answer(lm, requests, **options)

    monkeypatch.setattr("socket.socket.connect", no_network)
    monkeypatch.setattr(HFLM, "loglikelihood", spy)
    model = build(tiny(d_vocab=290, d_vocab_used=290, n_ctx=64), dtype=torch.float32)
    rows = [{"context": f"the {i} cat", "choices": [" sat", " on the mat", " hat."], "answer": i % 3} for i in range(7)]
    lines = tmp_path / "cats.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "same.json").write_text(json.dumps(rows))
    scores = hf.evaluate_tasks(model, trained, [str(lines), str(tmp_path / "same.json")], batch_size=3)
    right = 0
    for row in rows:
        start, sums = trained.encode(row["context"]), []
        for choice in row["choices"]:
            end = trained.encode(choice)
            log_p = model(torch.tensor([start + end])).log_softmax(-1)[0]
            sums.append(sum(log_p[len(start) + i - 1, token].item() for i, token in enumerate(end)))
        right += max(range(3), key=sums.__getitem__) == row["answer"]
    assert scores["cats"]["acc"] == pytest.approx(right / 7)
    assert scores["cats"].keys() == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    assert scores["cats"] == scores["same"]
    assert set(asked) == {(row["context"], choice) for row in rows for choice in row["choices"]}
    few = hf.evaluate_tasks(bytes_model(), tokenizer.get("bytes"), [str(lines)], limit=2)
    assert few["cats"]["acc"] in (0.0, 0.5, 1.0)


def test_tasks_of_the_hub_need_no_waiting_without_a_connection(monkeypatch):
    """The Hub's libraries are in offline mode, so that they read their cache at once, and a task that is not there is
    one message."""

    def simple_evaluate(*_, **__):
        assert constants.HF_HUB_OFFLINE
        assert datasets.config.HF_HUB_OFFLINE
        raise ConnectionError("couldn't reach EleutherAI/lambada_openai")

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **_: manager(include_defaults=False))
    monkeypatch.setattr(manager, "match_tasks", lambda self, names: names)
    monkeypatch.setattr(lm_eval, "simple_evaluate", simple_evaluate)
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    with pytest.raises(ValueError, match="the Hub cannot be reached: couldn't reach EleutherAI/lambada_openai"):
        hf.evaluate_tasks(bytes_model(), tokenizer.get("bytes"), ["lambada_openai"])
    assert before == (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)


@pytest.mark.user_error
def test_tasks_are_checked_before_anything_runs(tmp_path, monkeypatch):
    model, tok, manager = bytes_model(), tokenizer.get("bytes"), lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **_: manager(include_defaults=False))  # quick to index
    path = tmp_path / "q.json"

    def refused(message, tasks=(str(path),)):
        with pytest.raises(ValueError, match=message):
            hf.evaluate_tasks(model, tok, list(tasks))

    refused("must name at least one task", [])
    refused("no file of questions at .*q.json")
    refused("lm-eval has no task hellaswagg; `lm-eval ls tasks` lists them", ["hellaswagg"])
    for text, message in (
        ("{", "must be JSON: "),
        ("[]", "must hold a list of questions, got list of length 0"),
        ('[{"context": "a", "choices": ["b"]}]', "question 0: must be .* got {'context'"),
        ('[{"context": "a", "choices": ["b", ""], "answer": 0}]', "question 0: must be"),
        ('[{"context": "a", "choices": ["b"], "answer": 1}]', "question 0: must be"),
    ):
        path.write_text(text)
        refused(message)
    path.write_text('[{"context": "a", "choices": ["b"], "answer": 0}]')
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "q.json"
    other.write_text(path.read_text())
    refused("names of their own", [str(path), str(other)])


def test_config_of_the_released_models_is_understood():
    config = hf.TnlmConfig(**ModelConfig.released().to_dict())
    assert config.vocab_size == 50304
    assert config.model_config == ModelConfig.released()


def test_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    scope = {}
    exec(page.split("```python\n")[1].split("```")[0], scope)
    assert scope["out"].shape == (1, 8)


def test_weights_that_are_not_finite_are_neither_written_nor_loaded(tmp_path):
    model = build(tiny(), torch.float32)
    with torch.no_grad():
        model.blocks[1].mlp.w_d[3, 2] = 1e6
    hf.wrap(model).save_pretrained(tmp_path / "good")
    with pytest.raises(ValueError, match=r"finite weights, got NaN or infinity in blocks\.1\.mlp\.w_d \(1 of "):
        AutoModelForCausalLM.from_pretrained(tmp_path / "good", dtype=torch.float16)
    with pytest.raises(ValueError, match=r"converted to float16 .* No file was written"):
        hf.wrap(model).half().save_pretrained(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
