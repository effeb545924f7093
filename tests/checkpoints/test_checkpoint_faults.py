"""Wrapped keys, hostile pickles and damaged files: an exact load or an error that names path, cause and remedy."""

import argparse
import collections
import io
import json
import os
import pickle
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tnlm
from tests.checkpoints.checkpoint_files import (
    edit,
    published_config,
    published_model,
    published_state,
    same_state,
    write_published,
)
from tests.tiny_models import build, ids, tiny

MODEL = published_model()
STATE = published_state(MODEL)
KEY = "transformer.h.1.mlp.Left.weight"


# Wrapper prefixes


@pytest.mark.parametrize(
    "rename",
    [
        lambda k: f"_orig_mod.{k}",
        lambda k: f"module.{k}",
        lambda k: f"module._orig_mod.{k}",
        lambda k: f"_orig_mod.module.{k}",
        lambda k: f"model.module.{k}",
        lambda k: k.replace("h.1.", "h.1._orig_mod."),
        lambda k: k.replace("attn.c_", "attn._orig_mod.c_"),
    ],
)
def test_wrapped_keys_give_the_same_bits(tmp_path, rename):
    write_published(tmp_path, MODEL, {rename(k): t for k, t in STATE.items()})
    tokens = ids(2, 7)
    assert torch.equal(tnlm.load(tmp_path)(tokens), MODEL(tokens))


@pytest.mark.parametrize("name", ["model", "state_dict", "model_state_dict"])
def test_nested_state_dict(tmp_path, name):
    write_published(tmp_path, MODEL, {name: {f"module.{k}": t for k, t in STATE.items()}, "step": 3})
    assert same_state(tnlm.load(tmp_path), MODEL)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: {f"module.{k}" if "h.0" in k else k: t for k, t in s.items()}, "all keys or none .*'module.'"),
        (lambda s: s | {f"_orig_mod.{KEY}": s[KEY] + 1}, f"ambiguous: {KEY} and _orig_mod.{KEY} are the same"),
        (lambda s: {k: t for k, t in s.items() if k != KEY}, f"missing {KEY}; unexpected none; wrong shape none"),
        (lambda s: s | {"extra.w": s[KEY]}, "missing none; unexpected extra.w; wrong shape none"),
        (lambda s: s | {KEY: s[KEY].T}, rf"wrong shape {KEY} \(30, 120\) instead of \(120, 30\)"),
        (lambda s: {k: t for k, t in s.items() if ".h.1." not in k}, "missing .* and 4 more; .* has 1 layers, .* 2"),
        (lambda s: {"model": s, "state_dict": s}, "ambiguous: it holds state dicts under model, state_dict"),
        (lambda s: {"weights": s["lm_head.weight"]}, "has none of the known layouts .*: its keys are weights"),
        (lambda s: s | {KEY: 3.0}, rf"a state dict of plain tensors, got {KEY} \(float\)"),
        (lambda s: s | {KEY: s[KEY].int()}, rf"weights of 16 bits or more, got {KEY} \(torch.int32\)"),
        (lambda s: s | {KEY: s[KEY].to(torch.float8_e4m3fn)}, rf"16 bits or more, got {KEY} \(torch.float8_e4m3fn\)"),
        (lambda s: [1, 2], "must hold a state dict, it holds a list"),
        (lambda s: {}, "among 0 entries"),
        (lambda s: s | {KEY: s[KEY].clone().index_fill_(0, torch.tensor(3), torch.nan)}, rf"{KEY} \(30 of 3600\)"),
        (lambda s: s | {"lm_head.weight": s["lm_head.weight"] / 0}, r"NaN or infinite weights: lm_head.weight \(390"),
    ],
)
def test_keys_and_values_that_do_not_fit(tmp_path, change, message):
    write_published(tmp_path, MODEL, change(dict(STATE)))
    with pytest.raises(ValueError, match=message) as caught:
        tnlm.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_infinite_sum_of_finite_weights_is_fine(tmp_path):
    state = {**STATE, "lm_head.weight": torch.full((13, 30), 3e38)}
    assert (tnlm.load(write_published(tmp_path, MODEL, state)).unembed.w_u == 3e38).all()


def test_scalars_may_have_an_axis(tmp_path):
    state = {k: t.reshape(1) if t.ndim == 0 else t for k, t in STATE.items()}
    assert same_state(tnlm.load(write_published(tmp_path, MODEL, state)), MODEL)


# Ties


def test_tied_head_is_restored(tmp_path):
    state = {k: t for k, t in STATE.items() if k != "lm_head.weight"}
    model = tnlm.load(write_published(tmp_path, MODEL, state, tie_word_embeddings=True))
    assert torch.equal(model.unembed.w_u, STATE["transformer.wte.weight"])
    assert model.unembed.w_u.data_ptr() != model.embed.w_e.data_ptr()


@pytest.mark.user_error
def test_tie_that_is_contradicted_or_not_said(tmp_path):
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but lm_head.weight differs from transformer.wte"):
        tnlm.load(write_published(tmp_path, MODEL, tie_word_embeddings=True))
    state = {k: t for k, t in STATE.items() if k != "lm_head.weight"}
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        tnlm.load(write_published(tmp_path, MODEL, state, tie_word_embeddings=False))


# Pickles


class Hostile:
    """Makes a folder when unpickled by an unrestricted loader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.user_error
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "hide",
    [
        lambda bad: bad,
        lambda bad: {**STATE, KEY: bad},
        lambda bad: {"model": STATE, "config": bad},
        lambda bad: {"model": STATE, "optimizers": [{"state": {0: bad}}]},
    ],
)
def test_hostile_pickle_never_runs(tmp_path, hide, zipped):
    pwned = tmp_path / "PWNED"
    folder = tmp_path / "m"
    write_published(folder, MODEL)
    torch.save(hide(Hostile(pwned)), folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="could run code") as caught:
        tnlm.load(folder)
    assert not pwned.exists()
    assert ("posix.mkdir" in str(caught.value)) == zipped
    assert "weights_only" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    # the payload is real
    if zipped:
        torch.load(folder / "pytorch_model.bin", weights_only=False)
        assert pwned.exists()


@pytest.mark.user_error
def test_hostile_bare_pickle_never_runs(tmp_path):
    write_published(tmp_path / "m", MODEL)
    (tmp_path / "m/pytorch_model.bin").write_bytes(pickle.dumps(Hostile(tmp_path / "PWNED")))
    with pytest.raises(ValueError, match="could run code"):
        tnlm.load(tmp_path / "m")
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.user_error
@pytest.mark.parametrize(
    "value, name",
    [(argparse.Namespace(lr=1), "argparse.Namespace"), (np.float64(0.1), "numpy"), (Path("x"), "pathlib")],
)
def test_other_objects_are_named_and_refused(tmp_path, value, name):
    write_published(tmp_path, MODEL, {"model": STATE, "extra": value})
    with pytest.raises(ValueError, match=f"holds Python objects, which could run code and are not loaded: .*{name}"):
        tnlm.load(tmp_path)


def test_plain_data_beside_the_weights_is_fine(tmp_path):
    beside = {"step": 3, "losses": [0.1], "order": collections.OrderedDict(a=1), "none": None, "shape": torch.Size([2])}
    write_published(tmp_path, MODEL, {"model": collections.OrderedDict(STATE), **beside})
    assert same_state(tnlm.load(tmp_path), MODEL)


def test_allowed_class_does_not_stay_allowed(tmp_path):
    allowed = set(torch.serialization.get_safe_globals())
    tnlm.load(write_published(tmp_path, MODEL))
    assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.user_error
def test_class_of_the_right_name_runs_no_method(tmp_path, monkeypatch):
    """The stand-in has no methods, whatever the class of that name here does."""
    called = []
    cls = type("GPTConfig", (), {"__module__": "__main__", "__setstate__": lambda self, state: called.append(state)})
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", cls, raising=False)
    config = cls()
    config.__dict__.update(published_config(MODEL, step=None))
    write_published(tmp_path, MODEL, {"model": STATE, "config": config})
    assert same_state(tnlm.load(tmp_path), MODEL)
    assert not called


# Damaged files


@pytest.fixture(params=["pytorch_model.bin", "model.safetensors"])
def folder(request, tmp_path):
    """A good folder with one weight file of each format."""
    write_published(tmp_path, MODEL, name="pytorch_model.bin")
    if request.param == "model.safetensors":
        (tmp_path / "pytorch_model.bin").unlink()
        save_file({k: t.clone() for k, t in STATE.items()}, tmp_path / request.param)
    return tmp_path


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 2067738635\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n"


@pytest.mark.user_error
@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda b: b[: len(b) // 2], r"is cut off: it has {half} bytes.*download it again"),
        (lambda b: b[:-100], r"is cut off: it has {less} bytes.*download it again"),
        (lambda b: b[-100:], r"\(100 bytes\) must be a .*, it holds something else; download it again"),
        (lambda b: b[:20], r"is cut off: it has 20 bytes.*download it again"),
        (lambda b: b"", r"is empty \(0 bytes\); download it again"),
        (lambda b: b + b"xy", r"has trailing bytes: it has {more}.* {size};.*download it again"),
        (lambda b: POINTER, r"is a git-lfs pointer of \d+ bytes, not the file of 2067738635 bytes.*git lfs pull"),
        (lambda b: PAGE, r"is a web page of \d+ bytes, not weights: the download failed"),
        (lambda b: b'{"error": "not found"}', r"must be a .*, it holds something else; download it again"),
    ],
)
def test_damaged_file(folder, damage, message):
    path = next(p for p in folder.iterdir() if p.name != "config.json")
    good = path.read_bytes()
    path.write_bytes(damage(good))
    sizes = {"half": len(good) // 2, "less": len(good) - 100, "more": len(good) + 2, "size": len(good)}
    with pytest.raises(ValueError, match=message.format(**sizes)) as caught:
        tnlm.load(folder)
    assert str(path) in str(caught.value)


@pytest.mark.user_error
def test_damage_inside(folder):
    """A whole directory around damaged content, and a header that is no JSON."""
    path = next(p for p in folder.iterdir() if p.name != "config.json")
    good = path.read_bytes()
    at = good.index(b"transformer")
    path.write_bytes(good[:at] + b"\xff" * 40 + good[at + 40 :])
    with pytest.raises(ValueError, match=rf"{path} \({len(good)} bytes\) is damaged.*download it again"):
        tnlm.load(folder)


@pytest.mark.user_error
def test_format_under_the_wrong_name(folder):
    path = next(p for p in folder.iterdir() if p.name != "config.json")
    other = folder / {"model.safetensors": "pytorch_model.bin", "pytorch_model.bin": "model.safetensors"}[path.name]
    path.rename(other)
    with pytest.raises(ValueError, match=rf"{other}.* must be a .*, it holds .*; name it \.(bin|safetensors)"):
        tnlm.load(folder)


def test_legacy_pickle_of_tensors_loads(tmp_path):
    write_published(tmp_path, MODEL)
    torch.save(STATE, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same_state(tnlm.load(tmp_path), MODEL)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda b: b[: len(b) // 2], "is damaged or no torch checkpoint"),
        (lambda b: b[:20], "is damaged or no torch checkpoint"),
        (lambda b: b + b"xy", "has trailing bytes"),
    ],
)
def test_damaged_legacy_pickle(tmp_path, damage, message):
    write_published(tmp_path, MODEL)
    buffer = io.BytesIO()
    torch.save(STATE, buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "pytorch_model.bin").write_bytes(damage(buffer.getvalue()))
    with pytest.raises(ValueError, match=message):
        tnlm.load(tmp_path)


def test_archives_are_unpickled_by_one_thread_at_a_time(tmp_path, monkeypatch):
    """torch keeps one list of allowed classes for all threads: the end of one load would take away another's."""
    write_published(tmp_path, MODEL)
    lock, met, read = threading.Lock(), threading.Event(), torch.load

    def overlapping(*args, **options):
        if lock.acquire(blocking=False):
            met.wait(0.3)  # until a second thread comes, which it must not
            lock.release()
        else:
            met.set()
        return read(*args, **options)

    monkeypatch.setattr(torch, "load", overlapping)
    with ThreadPoolExecutor(2) as pool:
        assert all(same_state(model, MODEL) for model in pool.map(tnlm.load, [tmp_path, tmp_path]))
    assert not met.is_set()


@pytest.mark.user_error
@pytest.mark.parametrize("offsets", [[0, "8"], [0, None], [0, [8]], [0]])
def test_safetensors_offsets_that_are_no_numbers(tmp_path, offsets):
    header = json.dumps({"embed.w_e": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match="is damaged: its header is no safetensors header; download it again"):
        tnlm.load(tmp_path)


def test_safetensors_length_that_begins_like_a_pickle(tmp_path):
    """The header's length is the first byte of the file, and 0x80 begins a pickle."""
    tensors = {k: t.clone() for k, t in STATE.items()}
    write_published(tmp_path, MODEL)
    (tmp_path / "pytorch_model.bin").unlink()
    for pad in range(0, 256, 8):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"pad": "x" * pad})
        if (tmp_path / "model.safetensors").read_bytes()[0] == 0x80:
            break
    assert (tmp_path / "model.safetensors").read_bytes()[0] == 0x80
    assert same_state(tnlm.load(tmp_path), MODEL)


@pytest.mark.user_error
def test_two_formats_side_by_side(tmp_path):
    write_published(tmp_path, MODEL)
    save_file({k: t.clone() for k, t in STATE.items()}, tmp_path / "model.safetensors")
    assert same_state(tnlm.load(tmp_path), MODEL)
    save_file({**{k: t.clone() for k, t in STATE.items()}, KEY: STATE[KEY] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=rf"model.safetensors and pytorch_model.bin, which differ: {KEY} is not the same"
    ):
        tnlm.load(tmp_path)
    save_file({"embed.w_e": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"which differ: only one of them has embed\.w_e, lm_head"):
        tnlm.load(tmp_path)


# Shards


@pytest.fixture
def shards(tmp_path):
    model = build(tiny(), torch.float32)
    tnlm.save(model, tmp_path, max_shard_bytes=20000)
    return tmp_path


@pytest.mark.user_error
def test_damaged_shards(shards):
    index = shards / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first = shards / weight_map["embed.w_e"]
    good = first.read_bytes()
    first.write_bytes(good[:-4])
    with pytest.raises(
        ValueError, match=rf"{first} is cut off: it has {len(good) - 4} bytes, its header says {len(good)}"
    ):
        tnlm.load(shards)
    save_file({"other": torch.zeros(3)}, first)
    with pytest.raises(ValueError, match=r"does not hold what .*index.json says: missing .* more; unexpected other"):
        tnlm.load(shards)
    first.unlink()
    with pytest.raises(ValueError, match=f"{first} is missing, and model.safetensors.index.json names it"):
        tnlm.load(shards)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "a\\b.safetensors", "..", "a/b", "", 3, ["a"]]
)
def test_shard_outside_the_folder(shards, name):
    edit(shards / "model.safetensors.index.json", weight_map={"embed.w_e": name})
    with pytest.raises(ValueError, match="must name files in its own folder, got " + re.escape(repr(name))):
        tnlm.load(shards)


@pytest.mark.user_error
@pytest.mark.parametrize("weight_map", [{}, [], None])
def test_index_without_a_map(shards, weight_map):
    edit(shards / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(ValueError, match="must hold a weight_map"):
        tnlm.load(shards)


def test_published_file_is_not_touched(tmp_path):
    folder = write_published(tmp_path, MODEL)
    before = (folder / "pytorch_model.bin").read_bytes()
    with torch.no_grad():
        for p in tnlm.load(folder, dtype="checkpoint").parameters():
            p.zero_()
    assert (folder / "pytorch_model.bin").read_bytes() == before


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_model_that_is_not_finite_never_replaces_a_good_one(tmp_path, bad):
    model = build(tiny(), torch.float32)
    tnlm.save(model, tmp_path / "good")
    before = {path.name: path.read_bytes() for path in (tmp_path / "good").iterdir()}
    with torch.no_grad():
        model.blocks[1].mlp.w_d[3, 2] = bad
    for name in ("good", "new"):
        with pytest.raises(ValueError, match=r"NaN or infinity in blocks\.1\.mlp\.w_d \(1 of "):
            tnlm.save(model, tmp_path / name)
    assert {path.name: path.read_bytes() for path in (tmp_path / "good").iterdir()} == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "stored, dtype, value",
    [(torch.float32, torch.float16, 1e6), (torch.float64, torch.float32, 1e39), (torch.float64, torch.bfloat16, 1e39)],
)
def test_weights_too_large_for_the_dtype_are_named(tmp_path, stored, dtype, value):
    model = build(tiny(), stored)
    with torch.no_grad():
        model.blocks[1].mlp.w_d[3, 2] = value
    tnlm.save(model, tmp_path)
    with pytest.raises(ValueError, match=rf"too large for {dtype} .*: blocks\.1\.mlp\.w_d \(1 of .*wider dtype"):
        tnlm.load(tmp_path, dtype=dtype)
    assert tnlm.load(tmp_path, dtype="checkpoint").blocks[1].mlp.w_d[3, 2].item() == pytest.approx(value)
