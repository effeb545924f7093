"""Downloads from a Hub on localhost, and everything that happens without one."""

import dataclasses
import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

import tnlm
from tests.checkpoints.checkpoint_files import published_model, same_state, write_published
from tests.checkpoints.hub_cache import COMMIT, REPO, block, contents, fill, go_offline, register, use_cache
from tests.checkpoints.hub_server import Hub, serve
from tests.tiny_models import build, tiny
from tnlm.app import cli
from tnlm.checkpoints import hub, released
from tnlm.checkpoints.checkpoint import read_config
from tnlm.checkpoints.resolve import find_model

MODEL = published_model()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    return use_cache(tmp_path / "cache", monkeypatch)


@pytest.fixture
def files(tmp_path):
    """A released folder's files by name."""
    return contents(write_published(tmp_path / "files", MODEL))


@pytest.fixture
def server(cache, files, monkeypatch):
    with serve(Hub(REPO, files)) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield running
    huggingface_hub.close_session()


@pytest.fixture
def offline(monkeypatch):
    go_offline(monkeypatch)


# With a Hub


def test_download_then_cache(server, cache, files, monkeypatch):
    model = tnlm.load(REPO)
    assert same_state(model, MODEL)
    digest = hashlib.sha256(files["pytorch_model.bin"]).hexdigest()
    facts = {"repo": REPO, "revision": COMMIT, "sha256": digest}
    assert facts.items() <= model.source.items()
    assert (model.source["weights"], model.source["layout"]) == ("pytorch_model.bin", "published")
    # a commit never asks again, a branch does
    asked = len(server.requests)
    assert same_state(tnlm.load(REPO, revision=COMMIT), MODEL)
    assert len(server.requests) == asked
    tnlm.load(REPO)
    assert len(server.requests) > asked
    assert server.gets("pytorch_model.bin") == [None]


def test_our_sharded_model_from_the_hub(server, tmp_path):
    model = build(tiny(), torch.float32)
    tnlm.save(model, tmp_path / "ours", max_shard_bytes=20000)
    server.files = contents(tmp_path / "ours")
    assert same_state(tnlm.load(REPO), model)


@pytest.mark.user_error
@pytest.mark.parametrize("weight_map", [{}, ["model.safetensors"], {"embed.w_e": "../secret"}], ids=str)
def test_index_that_names_no_shards_is_refused(server, tmp_path, weight_map):
    tnlm.save(build(tiny(), torch.float32), tmp_path / "ours", max_shard_bytes=20000)
    server.files = contents(tmp_path / "ours")
    server.files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    with pytest.raises(ValueError, match=r"index.json must (hold a weight_map|name files in its own folder)"):
        tnlm.load(REPO)


@pytest.mark.user_error
def test_errors_of_the_hub(server):
    with pytest.raises(ValueError, match=r"the Hub has no repository someone/else that you can see; .*hf auth login"):
        tnlm.load("someone/else")
    with pytest.raises(ValueError, match=f"{REPO} has no revision 'v9'; leave revision= out"):
        tnlm.load(REPO, revision="v9")
    with pytest.raises(ValueError, match=r"Cannot have -- or \.\. in repo_id"):
        tnlm.load("someone/a--b")
    del server.files["pytorch_model.bin"]
    with pytest.raises(ValueError, match=f"{REPO}@{COMMIT} holds no weights: it has none of model.safetensors, "):
        tnlm.load(REPO)
    server.gated = True
    with pytest.raises(ValueError, match=f"{REPO}@.* is gated: ask for access"):
        tnlm.load(REPO)


def test_killed_download_continues(server, cache, files, monkeypatch):
    monkeypatch.setattr(hub, "RESUMED_FROM", 1000)
    get, whole = hub.http_get, files["pytorch_model.bin"]

    def die(url, file, **options):
        file.write(whole[:70_000])
        file.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "http_get", die)
    with pytest.raises(KeyboardInterrupt):
        tnlm.load(REPO)
    monkeypatch.setattr(hub, "http_get", get)
    assert same_state(tnlm.load(REPO), MODEL)
    assert server.gets("pytorch_model.bin") == ["bytes=70000-"]
    blob = cache / "models--someone--gpt2-tiny/blobs" / hashlib.sha256(whole).hexdigest()
    assert blob.read_bytes() == whole
    assert not list(cache.rglob("*.part"))


def test_storage_behind_a_redirect_is_told_no_token(server, monkeypatch):
    """The same server under another name stands for the storage."""
    monkeypatch.setattr(hub, "RESUMED_FROM", 1000)
    monkeypatch.setattr(hub, "build_hf_headers", lambda: {"authorization": "Bearer secret"})
    facts_of = huggingface_hub.get_hf_file_metadata

    def elsewhere(url, **options):
        facts = facts_of(url, **options)
        return dataclasses.replace(facts, location=facts.location.replace("127.0.0.1", "localhost"))

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", elsewhere)
    assert same_state(tnlm.load(REPO), MODEL)
    assert ("127.0.0.1", "Bearer secret") in server.told
    assert {token for host, token in server.told if host == "localhost"} == {None}


@pytest.mark.user_error
def test_broken_download_says_how_far_it_came(server, files, monkeypatch):
    monkeypatch.setattr(hub, "RESUMED_FROM", 1000)

    def break_off(url, file, **options):
        file.write(b"x" * 123)
        raise ConnectionResetError

    monkeypatch.setattr(hub, "http_get", break_off)
    size = len(files["pytorch_model.bin"])
    with pytest.raises(ValueError, match=rf"stopped at 123 of {size} bytes \(ConnectionResetError\); load again to"):
        tnlm.load(REPO)


def test_eight_threads_download_once(server, monkeypatch):
    monkeypatch.setattr(hub, "RESUMED_FROM", 1000)
    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(lambda _: tnlm.load(REPO), range(8)))
    assert all(same_state(model, MODEL) for model in models)
    assert server.gets("pytorch_model.bin") == [None]


# The registry's checks


def test_short_name_is_pinned_and_verified(server, files, monkeypatch):
    register(monkeypatch, MODEL.config, files)
    for name in ("tiny", REPO, "gpt2-tiny"):
        assert same_state(tnlm.load(name), MODEL)
    assert all(f"/resolve/{COMMIT}/" in path for _, path, _ in server.requests)


@pytest.mark.parametrize("name", ["tiny", REPO, "gpt2-tiny"])
def test_a_revision_that_is_asked_for_goes_before_the_recorded_one(name, server, files, monkeypatch):
    """The record is of another commit, at which the repository has nothing."""
    register(monkeypatch, MODEL.config, files, revision="f" * 40)
    with pytest.raises(ValueError, match=f"has no revision '{'f' * 40}'"):
        tnlm.load(name)
    for revision in ("main", COMMIT):
        server.requests.clear()
        assert same_state(tnlm.load(name, revision=revision), MODEL)
        assert all(f"/resolve/{revision}/" in path or f"/resolve/{COMMIT}/" in path for _, path, _ in server.requests)


@pytest.mark.user_error
def test_download_with_another_hash_is_refused(server, files, monkeypatch):
    """One bit flipped: the file's own structure does not show it."""
    flipped = bytearray(files["pytorch_model.bin"])
    flipped[len(flipped) // 2] ^= 1
    entry = register(monkeypatch, MODEL.config, files)
    server.files["pytorch_model.bin"] = bytes(flipped)
    wanted = entry.files["pytorch_model.bin"].sha256
    with pytest.raises(ValueError, match=f"must have sha256 {wanted}, it has .*: the download was damaged; delete"):
        tnlm.load("tiny")


@pytest.mark.user_error
def test_cached_file_of_another_size_is_refused(cache, files, monkeypatch, offline):
    register(monkeypatch, MODEL.config, files)
    size = len(files["pytorch_model.bin"])
    fill(cache, {**files, "pytorch_model.bin": files["pytorch_model.bin"] + b"x"})
    with pytest.raises(ValueError, match=f"must have {size} bytes, it has {size + 1}: the download was damaged"):
        tnlm.load("tiny")


@pytest.mark.user_error
def test_another_architecture_than_recorded_is_refused(cache, files, monkeypatch, offline):
    fill(cache, files)
    register(monkeypatch, MODEL.config.replace(n_layer=3, mlp="swiglu"), files)
    with pytest.raises(ValueError, match=r"not the model recorded as tiny: n_layer=2 instead of 3, mlp='bilinear'"):
        tnlm.load("tiny")
    register(monkeypatch, MODEL.config.replace(n_layer=3), files, confirmed=False)
    assert same_state(tnlm.load("tiny"), MODEL)


@pytest.mark.user_error
def test_entry_without_a_commit_names_the_one_it_took(cache, files, monkeypatch, offline):
    fill(cache, files)
    register(monkeypatch, MODEL.config, files, revision=None)
    with pytest.warns(UserWarning, match=f'recorded for tiny: took {REPO}@{COMMIT}; pass revision="{COMMIT}'):
        assert same_state(tnlm.load("tiny"), MODEL)


def test_registry_settles_what_the_files_cannot_tell(cache, tmp_path, monkeypatch, offline):
    model = published_model(mlp="relu2", attention="squared_normalized")
    folder = write_published(tmp_path / "squared", model)
    content = contents(folder)
    fill(cache, content)
    register(monkeypatch, model.config, content)
    assert tnlm.load(REPO).config.attention == "squared_normalized"
    monkeypatch.delitem(released.RELEASED, "tiny")
    with pytest.raises(ValueError, match=r'pass attention="squared"'):
        tnlm.load(REPO)


# Without one


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_offline_from_a_cache_made_by_hand(cache, files, offline, revision):
    fill(cache, files)
    assert same_state(tnlm.load(REPO, revision=revision), MODEL)


def test_pinned_and_cached_needs_no_connection(cache, files, monkeypatch):
    block(monkeypatch)
    fill(cache, files)
    assert same_state(tnlm.load(REPO, revision=COMMIT), MODEL)


def test_offline_writes_nothing(cache, files, offline):
    fill(cache, files)
    paths = sorted(cache.rglob("*"))
    times = [path.stat().st_mtime_ns for path in paths]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert same_state(tnlm.load(REPO), MODEL)
    assert sorted(cache.rglob("*")) == paths
    assert [path.stat().st_mtime_ns for path in paths] == times
    for path in paths:
        path.chmod(0o755)


def test_eight_threads_offline(cache, files, offline):
    fill(cache, files)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: same_state(tnlm.load(REPO), MODEL), range(8)))


@pytest.mark.user_error
@pytest.mark.parametrize("missing", ["everything", "blob", "weights", "config"])
def test_offline_and_not_cached(cache, files, offline, missing):
    if missing != "everything":
        snapshot = fill(cache, files)
        name = "config.json" if missing == "config" else "pytorch_model.bin"
        (snapshot / name).resolve().unlink()
        if missing != "blob":
            (snapshot / name).unlink()
    file = "config.json" if missing in ("everything", "config") else r"model.safetensors or .* or pytorch_model.bin"
    with pytest.raises(ValueError) as caught:
        tnlm.load(REPO)
    message = str(caught.value)
    assert re.search(f"cannot get {file}.* of {REPO}@", message)
    assert f"offline mode is on (HF_HUB_OFFLINE), and the cache folder {cache} does not hold it" in message
    assert f"run: hf download {REPO}" in message


@pytest.mark.user_error
def test_no_connection_is_told_at_once(cache, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)  # between the library's retries
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    said = rf"cannot get config.json of {REPO}@main: the Hub could not be reached \(ConnectError\), .*{cache}"
    with pytest.raises(ValueError, match=said):
        tnlm.load(REPO)
    assert waits == []
    assert not hub.is_reachable()


def test_a_server_that_answers_is_reachable(server):
    assert hub.is_reachable()


@pytest.mark.user_error
@pytest.mark.parametrize("call", [tnlm.load, read_config, find_model, lambda name: cli.main(["info", name])])
def test_mistyped_folder_is_a_path_and_the_hub_is_not_asked(call, cache, tmp_path, monkeypatch, capsys):
    block(monkeypatch)  # any connection is an error
    (tmp_path / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    said = r'there is no frst in the folder runs, which holds first; revision="main" says that runs/frst is a Hub id'
    try:
        assert call("runs/frst") == 2
    except ValueError as error:
        told = str(error)
    else:
        told = capsys.readouterr().err
    assert re.search(said, told), told


def test_a_revision_says_that_a_name_in_a_folder_is_a_hub_id(server, tmp_path, monkeypatch):
    (tmp_path / REPO).parent.mkdir()
    monkeypatch.chdir(tmp_path)
    assert same_state(tnlm.load(REPO, revision="main"), MODEL)


@pytest.mark.user_error
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_cache_that_cannot_be_written(server, cache):
    cache.mkdir(mode=0o555)
    with pytest.raises(ValueError, match=r"the cache folder .* cannot be written .*; set HF_HUB_CACHE"):
        tnlm.load(REPO)
