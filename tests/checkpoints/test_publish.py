"""Pushing to the Hub: what is uploaded, and what is said when it cannot be. No network."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError

import tnlm
from tests.tiny_models import build, ids, tiny
from tnlm.checkpoints import publish
from tnlm.text import tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Records calls; keeps a copy of what an upload would have sent."""

    def __init__(self, copy, *, readme=False, error=None):
        self.copy, self.readme, self.error, self.calls = copy, readme, error, []

    def create_repo(self, repo_id, **options):
        self.calls.append(("create_repo", repo_id, options))
        if self.error is not None:
            raise self.error

    def create_branch(self, repo_id, **options):
        self.calls.append(("create_branch", repo_id, options))

    def file_exists(self, repo_id, name, *, revision):
        return self.readme

    def upload_folder(self, **options):
        shutil.copytree(options["folder_path"], self.copy)
        self.calls.append(("upload_folder", options["repo_id"], options))
        return SimpleNamespace(oid=COMMIT)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(publish.constants, "is_offline_mode", lambda: False)

    def use(**options):
        hub = Hub(tmp_path / "uploaded", **options)
        monkeypatch.setattr(publish, "HfApi", lambda: hub)
        return hub

    return use


@pytest.fixture
def model():
    return build(tiny(), dtype=torch.float32)


def test_what_is_uploaded_loads_back(hub, model):
    fake = hub()
    commit = publish.push_to_hub(
        model, "someone/tiny", private=True, license="mit", training={"data": "none"}, tokenizer=tokenizer.get("bytes")
    )
    assert commit == COMMIT
    assert [call[0] for call in fake.calls] == ["create_repo", "upload_folder"]
    assert fake.calls[0][2] == {"private": True, "exist_ok": True}
    names = sorted(path.name for path in fake.copy.iterdir())
    assert names == ["README.md", "config.json", "model.safetensors", "tnlm_tokenizer.json"]
    assert torch.equal(tnlm.load(fake.copy)(ids(2, 5)), model(ids(2, 5)))
    card = (fake.copy / "README.md").read_text()
    assert 'tnlm.load("someone/tiny")' in card
    assert 'license: "mit"' in card
    assert "auto_map" not in (fake.copy / "config.json").read_text()
    upload = fake.calls[1][2]
    assert upload["delete_patterns"] == ["model*.safetensors", "model.safetensors.index.json"]
    assert not Path(upload["folder_path"]).exists()


def test_branches_shards_and_cards(hub, model):
    fake = hub(readme=True)
    publish.push_to_hub(model, "someone/tiny", revision="step-5", max_shard_bytes=20_000, commit_message="Step 5")
    assert [call[0] for call in fake.calls] == ["create_repo", "create_branch", "upload_folder"]
    assert fake.calls[1][2] == {"branch": "step-5", "exist_ok": True}
    assert (fake.calls[2][2]["revision"], fake.calls[2][2]["commit_message"]) == ("step-5", "Step 5")
    names = sorted(path.name for path in fake.copy.iterdir())
    assert "README.md" not in names, "a card that is there already stays"
    assert sum(name.endswith(".safetensors") for name in names) > 1
    assert "model.safetensors.index.json" in names


def test_a_card_of_ones_own_is_uploaded(hub, model):
    fake = hub(readme=True)
    publish.push_to_hub(model, "someone/tiny", card="mine", create_pr=True, revision="main")
    assert (fake.copy / "README.md").read_text() == "mine"
    assert [call[0] for call in fake.calls] == ["create_repo", "upload_folder"]
    assert fake.calls[1][2]["create_pr"] is True


@pytest.mark.user_error
@pytest.mark.parametrize("repo_id", ["tiny", "./a/b", "a/b/c", "/abs/tiny", "~/x", "a/../b", "owner/", "C:\\m\\x"])
def test_repository_ids_are_checked_first(hub, model, repo_id):
    fake = hub()
    with pytest.raises(
        ValueError, match=re.escape(f'repo_id must be "owner/name", got {repo_id!r}; tnlm.save(model, folder)')
    ):
        publish.push_to_hub(model, repo_id)
    assert fake.calls == []


@pytest.mark.user_error
def test_offline_mode_is_named(hub, model, monkeypatch):
    fake = hub()
    monkeypatch.setattr(publish.constants, "is_offline_mode", lambda: True)
    with pytest.raises(ValueError, match=r"someone/tiny: offline mode is on \(HF_HUB_OFFLINE\); tnlm.save"):
        publish.push_to_hub(model, "someone/tiny")
    assert fake.calls == []


@pytest.mark.user_error
@pytest.mark.parametrize(
    "status, message",
    [
        (403, r"cannot push to someone/tiny: no permission \(403\); run `hf auth login`"),
        (500, "the Hub answered 500: too many files"),
    ],
)
def test_refusals_say_what_to_do(hub, model, status, message):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    hub(error=HfHubHTTPError("refused", response=response, server_message="too many files"))
    with pytest.raises(ValueError, match=message):
        publish.push_to_hub(model, "someone/tiny")


@pytest.mark.user_error
def test_a_broken_connection_is_named(hub, model):
    hub(error=ConnectionError("no route"))
    with pytest.raises(ValueError, match=r"could not be reached \(ConnectionError: no route\); nothing was committed"):
        publish.push_to_hub(model, "someone/tiny")
