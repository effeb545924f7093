"""Configs and names that are wrong, and what is said about them."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import tnlm
from tests.checkpoints.checkpoint_files import edit, published_model, same_state, write_published
from tests.tiny_models import build, tiny
from tnlm.checkpoints.checkpoint import read_config

MODEL = published_model()


@pytest.fixture
def ours(tmp_path):
    tnlm.save(build(tiny(), torch.float32), tmp_path)
    return tmp_path


@pytest.mark.user_error
@pytest.mark.parametrize("overrides", [[("n_head", 3)], "n_head=3"])
@pytest.mark.parametrize("read", [tnlm.load, read_config])
def test_overrides_must_be_a_dict(read, overrides, ours):
    with pytest.raises(ValueError, match=r"overrides must be a dict of config keys, such as .*, got "):
        read(ours, overrides=overrides)


@pytest.mark.user_error
def test_metadata_in_our_config_is_dropped_with_one_warning(ours):
    edit(ours / "config.json", _name_or_path="x", transformers_version="4", wandb_run="r", step=3)
    said = r"config.json: ignored metadata _name_or_path, step, transformers_version, wandb_run"
    with pytest.warns(UserWarning, match=said) as caught:
        assert tnlm.load(ours).config == tiny()
    assert len(caught) == 1


@pytest.mark.user_error
def test_bookkeeping_of_a_published_config_is_dropped_with_one_warning(tmp_path):
    write_published(tmp_path, MODEL, lr=0.1, seed=3, wandb_run="r")
    with pytest.warns(UserWarning, match=r"config.json: ignored metadata lr, seed, wandb_run$") as caught:
        assert same_state(tnlm.load(tmp_path), MODEL)
    assert len(caught) == 1


def test_overrides_say_what_the_file_does_not(tmp_path):
    write_published(tmp_path, MODEL, n_head=None)
    loaded = tnlm.load(tmp_path, overrides={"n_head": 3})
    assert (loaded.config, loaded.source["overrides"]) == (MODEL.config, {"n_head": 3})
    assert tnlm.checkpoints.checkpoint.read_config(tmp_path, overrides={"n_head": 5}).n_head == 5
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    assert tnlm.load(tmp_path, overrides={**raw, "n_head": 3}).config == MODEL.config


@pytest.mark.user_error
def test_overrides_against_the_file_or_the_layout(tmp_path, ours):
    write_published(tmp_path / "published", MODEL)
    with pytest.warns(UserWarning, match=r"config.json: overrides= replaces n_head=3 by 5"):
        assert tnlm.load(tmp_path / "published", overrides={"n_head": 5}).config.n_head == 5
    with pytest.raises(ValueError, match="unexpected n_heads=3"):
        tnlm.load(tmp_path / "published", overrides={"n_heads": 3})
    with pytest.warns(UserWarning, match="replaces n_ctx=17 by 99"):
        assert tnlm.load(ours, overrides={"n_ctx": 99}).config == tiny(n_ctx=99)


@pytest.mark.user_error
def test_metadata_in_a_published_config_is_dropped_with_one_warning(tmp_path):
    write_published(tmp_path, MODEL, transformers_version="4", torch_dtype="float32")
    with pytest.warns(UserWarning, match=r"config.json: ignored metadata torch_dtype, transformers_version$") as caught:
        assert tnlm.load(tmp_path).config == MODEL.config
    assert len(caught) == 1


@pytest.mark.user_error
@pytest.mark.parametrize("key", tiny().to_dict())
def test_key_missing_from_our_config(ours, key):
    raw = json.loads((ours / "config.json").read_text())
    del raw[key]
    (ours / "config.json").write_text(json.dumps(raw))
    if key in ("final_norm", "mlp_hidden_bias"):  # fields that came later: earlier files are what the default says
        assert tnlm.load(ours).config == tiny()
        return
    said = "d_hidden must be 0 exactly" if key == "d_hidden" else rf"config.json .* ModelConfig.* missing {key}"
    with pytest.raises(ValueError, match=said):
        tnlm.load(ours)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "key", ["vocab_size", "n_layer", "n_head", "n_embd", "squared_mlp", "bilinear", "expansion_factor", "gated"]
)
def test_key_missing_from_a_published_config(tmp_path, key):
    with pytest.raises(ValueError, match=rf"config.json does not fit this layout: missing {key}; unexpected none"):
        tnlm.load(write_published(tmp_path, MODEL, **{key: None}))


@pytest.mark.user_error
@pytest.mark.parametrize(
    "key, value, message",
    [
        ("n_head", 0, "n_head must be an integer >= 1, got 0"),
        ("n_head", -1, "n_head must be an integer >= 1, got -1"),
        ("n_head", "3", "n_head must be an integer >= 1, got '3'"),
        ("n_head", 3.0, r"n_head must be an integer >= 1, got 3\.0"),
        ("n_head", True, "n_head must be an integer >= 1, got True"),
        ("n_head", 4, "d_model must be a multiple of n_head, got d_model=30, n_head=4"),
        ("device", "cuda", "unexpected device='cuda'"),
        ("rope_scale", 0.1, r"unexpected rope_scale=0\.1"),
        ("variant", "gated", "unexpected variant='gated'"),
    ],
)
@pytest.mark.parametrize("published", [True, False])
def test_bad_value_in_a_config(tmp_path, published, key, value, message):
    if published:
        write_published(tmp_path, MODEL, **{key: value})
    else:
        tnlm.save(build(tiny(), torch.float32), tmp_path)
        edit(tmp_path / "config.json", **{key: value})
    with pytest.raises(ValueError, match=message) as caught:
        tnlm.load(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": 14}, r"wrong shape .*lm_head.weight \(13, 30\) instead of \(14, 30\)"),
        ({"n_layer": 3}, "missing transformer.h.2.*The file has 2 layers, the config 3"),
        ({"n_layer": 1}, "unexpected transformer.h.1.*The file has 2 layers, the config 1"),
        ({"expansion_factor": 3}, r"Left.weight \(120, 30\) instead of \(90, 30\)"),
        ({"bilinear": False}, r"missing transformer.h.0.mlp.bias, .*; unexpected .*Left"),
        ({"gated": "no"}, "gated must be true or false, got 'no'"),
    ],
)
def test_config_that_contradicts_the_weights(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        tnlm.load(write_published(tmp_path, MODEL, **changes))


@pytest.mark.user_error
@pytest.mark.parametrize(
    "key, value, message",
    [
        ("n_layer", 2**31, "n_layer=2147483648 layers cannot come from a file of .. tensors"),
        ("d_vocab", 2**40, r"wrong shape embed.w_e \(13, 30\) instead of \(1099511627776, 30\)"),
        ("d_model", 3 * 2**40, r"wrong shape .*embed.w_e \(13, 30\) instead of \(13, 3298534883328\)"),
        ("d_hidden", 2**70, r"d_hidden must be at most 2\*\*63 - 1, got a number of 71 bits"),
        ("d_qk", 2**40, r"wrong shape blocks.0.attn.w_q1 \(12, 30\) instead of \(3298534883328, 30\)"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_built(ours, monkeypatch, key, value, message):
    edit(ours / "config.json", **{key: value})
    monkeypatch.setattr("tnlm.checkpoints.layouts.structure", lambda config: pytest.fail("modules were built"))
    with pytest.raises(ValueError, match=rf"config.json.*{message}"):
        tnlm.load(ours)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "key, value, message",
    [
        ("n_layer", 2**31, "n_layer=2147483648 layers cannot come from a file of .. tensors"),
        ("vocab_size", 2**40, r"wte.weight \(13, 30\) instead of \(1099511627776, 30\)"),
        ("n_embd", 3 * 2**40, r"c_k.weight \(30, 30\) instead of \(3298534883328, 3298534883328\)"),
        ("expansion_factor", 2**70, r"d_hidden must be at most 2\*\*63 - 1"),
    ],
)
def test_absurd_published_sizes_are_refused_before_anything_is_built(tmp_path, monkeypatch, key, value, message):
    write_published(tmp_path, MODEL, **{key: value})
    monkeypatch.setattr("tnlm.checkpoints.layouts.structure", lambda config: pytest.fail("modules were built"))
    with pytest.raises(ValueError, match=message):
        tnlm.load(tmp_path)


@pytest.mark.user_error
@pytest.mark.parametrize("key, value", [("mlp", "gelu2"), ("attention", "linear")])
def test_unknown_kind_in_our_config(ours, key, value):
    edit(ours / "config.json", **{key: value})
    with pytest.raises(ValueError, match=f"config.json: {key} must be one of .*; got '{value}'"):
        tnlm.load(ours)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "text, message",
    [
        ("[1, 2]", "must hold one JSON object: it holds a list"),
        ('{"n_layer": 1, "n_layer": 2}', "the key 'n_layer' occurs twice"),
        ('{"norm_eps": NaN}', "NaN is no JSON number"),
        ('{"n_layer": ', "must hold one JSON object: "),
        ("", "must hold one JSON object: "),
        ("\ud800".encode("utf-16", "surrogatepass"), "must hold one JSON object: "),
    ],
)
def test_config_that_is_no_json_object(ours, text, message):
    (ours / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as caught:
        tnlm.load(ours)
    assert str(ours / "config.json") in str(caught.value)


def test_config_with_a_byte_order_mark(ours):
    path = ours / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert tnlm.load(ours).config == tiny()


@pytest.mark.user_error
def test_config_is_needed(ours):
    (ours / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json beside it, and the tnlm layout needs one"):
        tnlm.load(ours)


# Paths


@pytest.mark.user_error
@pytest.mark.parametrize(
    "name", ["./missing", "/abs/missing", "C:\\m\\x", "~/missing", "a/b/c", "gone/", "model.safetensors", Path("a/b")]
)
def test_path_that_does_not_exist(name):
    with pytest.raises(ValueError, match=r"the local path .* does not exist"):
        tnlm.load(name)


@pytest.mark.user_error
def test_names_that_mean_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"'gpt2' is no existing path, no Hub id .* bilinear-bilinear-18l, "):
        tnlm.load("gpt2")
    with pytest.raises(ValueError, match="got an empty string"):
        tnlm.load("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=f"is a link to {tmp_path}/gone, which does not exist"):
        tnlm.load(tmp_path / "link")
    with pytest.raises(ValueError, match="revision= belongs to a Hub id"):
        tnlm.load(tmp_path, revision="main")


@pytest.mark.user_error
def test_folder_without_weights_or_with_several(tmp_path):
    with pytest.raises(ValueError, match=r"holds no weights: looked for model.safetensors, .*, found none$"):
        tnlm.load(tmp_path)
    write_published(tmp_path / "toy_a", MODEL)
    with pytest.raises(ValueError, match="there are some in its folders toy_a"):
        tnlm.load(tmp_path)
    for name in ("a.bin", "b.safetensors"):
        shutil.copyfile(tmp_path / "toy_a/pytorch_model.bin", tmp_path / name)
    with pytest.raises(ValueError, match=r"several weight files, name one of them: a\.bin, b\.safetensors"):
        tnlm.load(tmp_path)
    shutil.copyfile(tmp_path / "toy_a/config.json", tmp_path / "config.json")
    assert same_state(tnlm.load(tmp_path / "a.bin"), MODEL)
    (tmp_path / "b.safetensors").rename(tmp_path / "weights")
    with pytest.raises(ValueError, match=r"weights must end in one of \.safetensors, \.bin"):
        tnlm.load(tmp_path / "weights")


def test_home_and_existing_path_win(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_published(tmp_path / "bilinear-bilinear-18l", MODEL)
    assert same_state(tnlm.load("~/bilinear-bilinear-18l"), MODEL)
    assert same_state(tnlm.load("bilinear-bilinear-18l"), MODEL)
