"""The three checks, each seen to pass, to fail and to be skipped; the record and the table made from it."""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import tnlm
from tests.checkpoints.checkpoint_files import published_model, write_published
from tests.checkpoints.hub_cache import COMMIT, contents, fill, go_offline, register, use_cache
from tests.tiny_models import build, ids, tiny
from tnlm import kernels
from tnlm.checkpoints import released
from tnlm.checkpoints.released import CrossEntropy
from tnlm.checkpoints.verification import Check, verification_table, verify, verify_released
from tnlm.text.evaluate import cross_entropy

MODEL = published_model()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, offline."""
    go_offline(monkeypatch)
    return use_cache(tmp_path / "cache", monkeypatch)


@pytest.fixture
def files(tmp_path):
    return contents(write_published(tmp_path / "files", MODEL))


def outcome(checks):
    assert [check.name for check in checks] == ["file", "numerics", "cross_entropy"]
    return {check.name: check.status for check in checks}


@pytest.mark.parametrize(
    "changes, compared",
    [
        ({}, ["chunked", "recurrent", "explicit tensors", "float64"]),
        ({"attention": "squared"}, ["chunked", "recurrent", "explicit tensors", "float64"]),
        ({"attention": "squared_normalized"}, ["chunked", "recurrent", "float64"]),
        ({"attention": "softmax"}, ["auto", "float64"]),
        ({"attention": "none", "mlp": "squared"}, ["auto", "explicit tensors", "float64"]),
    ],
)
def test_numerics_of_a_local_model(tmp_path, changes, compared):
    tnlm.save(build(tiny(**changes), torch.float32), tmp_path)
    checks = verify(tmp_path)
    assert outcome(checks) == {"file": "skipped", "numerics": "passed", "cross_entropy": "skipped"}
    assert checks[0].detail.startswith("no recorded hash to compare with; sha256 model.safetensors ")
    for name in compared:
        assert f"{name} " in checks[1].detail
    assert ("explicit tensors" in checks[1].detail) == ("explicit tensors" in compared)


def test_numerics_see_a_wrong_implementation(tmp_path, monkeypatch):
    tnlm.save(build(tiny(), torch.float32), tmp_path)
    good = kernels.bilinear_attention
    monkeypatch.setattr("tnlm.attention.bilinear_attention", lambda *a, **o: good(*a, **{**o, "causal": False}))
    checks = verify(tmp_path)
    assert outcome(checks)["numerics"] == "failed"
    assert "differ from the definition" in checks[1].detail


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numerics_fail_on_logits_that_are_not_finite(tmp_path, monkeypatch, bad):
    """No difference from NaN is above a limit, so the comparison has to be one that NaN fails."""
    tnlm.save(build(tiny(), torch.float32), tmp_path)
    good = kernels.bilinear_attention
    monkeypatch.setattr("tnlm.attention.bilinear_attention", lambda *a, **o: good(*a, **o) * bad)
    checks = verify(tmp_path)
    assert outcome(checks)["numerics"] == "failed"
    assert "differ from the definition" in checks[1].detail


@pytest.mark.parametrize("factor", [100.0, 1e-3])
def test_figures_are_relative_to_the_largest_logit_or_to_one(tmp_path, factor):
    """Of float32 against float64, on the tokens that the seed gives; the explicit tensors on the first five."""
    model = build(tiny(logit_softcap=None), torch.float32)
    with torch.no_grad():
        model.unembed.w_u.mul_(factor)
    tnlm.save(model, tmp_path)
    figures = dict(re.findall(r"([a-z0-9 ]+) (\d\.\de[-+]\d\d)", verify(tmp_path)[1].detail.partition(":")[2]))
    tokens = torch.randint(11, (1, 17), generator=torch.Generator().manual_seed(0))
    model.set_implementation("eager")
    with torch.no_grad():
        narrow, wide = model(tokens), model.double()(tokens)
    largest = narrow.abs().max().item()
    assert (largest > 2) == (factor > 1)
    expected = (wide - narrow).abs().max().item() / max(largest, 1)
    assert 0 < expected < 1e-4
    (found,) = (float(value) for name, value in figures.items() if name.strip() == "float64")
    assert found == pytest.approx(expected, rel=0.06), "two digits"


def test_damage_fails_the_file_and_skips_the_rest(tmp_path):
    tnlm.save(build(tiny(), torch.float32), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["blocks.1.mlp.w_d"][3, 2] = torch.nan
    save_file(state, tmp_path / "model.safetensors")
    checks = verify(tmp_path)
    assert outcome(checks) == {"file": "failed", "numerics": "skipped", "cross_entropy": "skipped"}
    assert "blocks.1.mlp.w_d (1 of 210)" in checks[0].detail


def known(model, tokens, **changes):
    loss = cross_entropy(model, tokens, seq=8, rows=4).loss
    return CrossEntropy(**{"value": loss, "rows": 4, "seq": 8, "text": "ids of this test", **changes})


def test_released_model_passes_all_three(cache, files, monkeypatch):
    tokens = ids(100)
    fill(cache, files)
    register(monkeypatch, MODEL.config, files, cross_entropy=(known(MODEL, tokens),))
    checks = verify("tiny", text=tokens)
    assert outcome(checks) == {"file": "passed", "numerics": "passed", "cross_entropy": "passed"}
    assert checks[0].detail.endswith(", as recorded")
    assert checks[2].detail.endswith("(4 x 8)")
    # by the Hub's own record, when the registry has none
    register(monkeypatch, MODEL.config, files, files={name: released.File() for name in files})
    checks = verify("tiny", text=tokens)
    assert outcome(checks) == {"file": "passed", "numerics": "passed", "cross_entropy": "skipped"}
    assert checks[0].detail.endswith(", as the Hub gave")


def test_local_copy_of_a_released_model_is_known_by_its_hash(tmp_path, files, monkeypatch):
    tokens = ids(100)
    register(monkeypatch, MODEL.config, files, cross_entropy=(known(MODEL, tokens),))
    checks = verify(tmp_path / "files", text=tokens)
    assert outcome(checks) == {"file": "passed", "numerics": "passed", "cross_entropy": "passed"}
    assert checks[0].detail.endswith(", as recorded for tiny")


def test_flipped_bit_fails_the_file(cache, files, monkeypatch):
    register(monkeypatch, MODEL.config, files)
    snapshot = fill(cache, files)
    content = bytearray(files["pytorch_model.bin"])
    content[len(content) // 2] ^= 1
    (snapshot / "pytorch_model.bin").resolve().write_bytes(content)
    assert tnlm.load("tiny").config == MODEL.config  # nothing else shows it
    checks = verify("tiny")
    assert outcome(checks) == {"file": "failed", "numerics": "skipped", "cross_entropy": "skipped"}
    assert "pytorch_model.bin has sha256" in checks[0].detail


def test_cross_entropy_that_disagrees_or_cannot_be_measured(cache, files, monkeypatch):
    tokens = ids(100)
    fill(cache, files)
    near, far = known(MODEL, tokens), known(MODEL, tokens, seq=5)
    far = dataclasses.replace(far, value=cross_entropy(MODEL, tokens, seq=5, rows=4).loss + 3e-3)
    register(monkeypatch, MODEL.config, files, cross_entropy=(near, far))
    assert outcome(verify("tiny", text=tokens, protocol="4x8"))["cross_entropy"] == "passed"
    checks = verify("tiny", text=tokens, protocol="4x5")
    assert outcome(checks)["cross_entropy"] == "failed"
    measured, recorded = re.match(r"([\d.]+) nats per token, recorded ([\d.]+) \(4 x 5\)", checks[2].detail).groups()
    assert (measured, recorded) == (f"{far.value - 3e-3:.4f}", f"{far.value:.4f}")
    lower = dataclasses.replace(far, value=far.value - 6e-3)
    register(monkeypatch, MODEL.config, files, cross_entropy=(near, lower))
    assert outcome(verify("tiny", text=tokens, protocol="4x5"))["cross_entropy"] == "failed", "a loss that is too high"
    register(monkeypatch, MODEL.config, files, cross_entropy=(near, far))
    short = verify("tiny", text=tokens[:20])
    assert outcome(short)["cross_entropy"] == "skipped"
    assert short[2].detail == "needs 4 rows of 8 tokens of ids of this test; the text gives 19 tokens in 3 rows"
    assert verify("tiny")[2].detail == "needs text: 4 rows of 8 tokens of ids of this test"
    with pytest.raises(ValueError, match="protocol must be one of 4x8, 4x5, got '9x9'"):
        verify("tiny", text=tokens, protocol="9x9")


def test_text_file_is_read_with_its_documents(tmp_path, cache, monkeypatch):
    model = published_model(d_vocab=50304, n_layer=1)
    folder = write_published(tmp_path / "gpt2", model)
    content = contents(folder)
    fill(cache, content)
    text = "A first document, of some words.<|endoftext|>And a second one, which is not much longer."
    (tmp_path / "text.txt").write_text(text)
    tokens = torch.tensor(tnlm.text.tokenizer.get("gpt2").encode(text, allow_special=True))
    assert 50256 in tokens[:9]
    value = cross_entropy(model, tokens, seq=8, rows=1).loss
    recorded = CrossEntropy(value=value, rows=1, seq=8, text="two sentences")
    register(monkeypatch, model.config, content, cross_entropy=(recorded,))
    assert outcome(verify("tiny", text=tmp_path / "text.txt"))["cross_entropy"] == "passed"


def test_record_and_table(tmp_path, cache, files, monkeypatch):
    fill(cache, files)
    register(monkeypatch, MODEL.config, files)
    entry = dataclasses.replace(released.RELEASED["tiny"], name="elsewhere", repo="someone/elsewhere")
    entry = dataclasses.replace(entry, config=tiny(mlp="swiglu", attention="softmax"))
    monkeypatch.setitem(released.RELEASED, "elsewhere", entry)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "verification.json"
    record = verify_released(path, names=["tiny", "elsewhere"])
    assert json.loads(path.read_text()) == record
    assert {name: facts["state"] for name, facts in record["models"].items()} == {
        "tiny": "verified",
        "elsewhere": "not yet verified",
    }
    assert record["models"]["tiny"]["revision"] == COMMIT
    elsewhere = record["models"]["elsewhere"]
    assert (elsewhere["mlp"], elsewhere["attention"]) == ("swiglu", "softmax")
    assert (elsewhere["n_params"], elsewhere["repo"]) == (entry.config.n_params, "someone/elsewhere")
    said = elsewhere["checks"][0]["detail"]
    assert "offline mode is on" in said
    assert "the cache folder ~/cache does not hold it" in said
    # a later run keeps what it does not repeat
    register(monkeypatch, MODEL.config, files, cross_entropy=(known(MODEL, ids(100)),))
    verify_released(path, names=["tiny"])
    table = verification_table(path)
    link = "[someone/gpt2-tiny](https://huggingface.co/someone/gpt2-tiny)"
    assert f"| `tiny` | {link} | {MODEL.config.n_params:,} |" in table
    assert "| bilinear, bilinear | not yet verified | not measured |" in table
    assert f"| {entry.config.n_params:,} | swiglu, softmax | not yet verified | not measured |" in table
    verify_released(path, names=["tiny"], text=ids(100))
    assert "| bilinear, bilinear | verified | " in verification_table(path)
    register(monkeypatch, MODEL.config.replace(n_layer=3), files)
    verify_released(path, names=["tiny"])
    assert "| bilinear, bilinear | failed | not measured |" in verification_table(path)
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.user_error
def test_table_without_a_record(tmp_path):
    with pytest.raises(ValueError, match=r"verification.json must be written by `tnlm verify --released`"):
        verification_table(tmp_path / "verification.json")
    (tmp_path / "verification.json").write_text('{"models": {"x": {}}}')
    with pytest.raises(ValueError, match="KeyError"):
        verification_table(tmp_path / "verification.json")


@pytest.mark.parametrize(
    "file, numerics, cross, state",
    [
        ("passed", "passed", "passed", "verified"),
        ("passed", "passed", "skipped", "not yet verified"),
        ("skipped", "passed", "passed", "not yet verified"),
        ("passed", "skipped", "passed", "not yet verified"),
        ("failed", "skipped", "skipped", "failed"),
        ("passed", "failed", "passed", "failed"),
        ("passed", "passed", "failed", "failed"),
    ],
)
def test_the_state_of_a_model_with_a_recorded_value(file, numerics, cross, state, tmp_path, files, monkeypatch):
    names = ("file", "numerics", "cross_entropy")
    made = [Check(name=n, status=s, detail="3.1") for n, s in zip(names, (file, numerics, cross), strict=True)]
    monkeypatch.setattr("tnlm.checkpoints.verification.verify", lambda *_, **__: made)
    register(monkeypatch, MODEL.config, files, cross_entropy=(known(MODEL, ids(100)),))
    record = verify_released(tmp_path / "v.json", names=["tiny"])
    assert record["models"]["tiny"]["state"] == state
    shown = "not measured" if cross == "skipped" else "3.1"
    assert verification_table(tmp_path / "v.json").endswith(f"| {state} | {shown} |\n")
