"""Publishes a model on the Hugging Face Hub: uploads the files of :func:`tnlm.save` in one commit."""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from tnlm.checkpoints.card import model_card
from tnlm.checkpoints.checkpoint import save
from tnlm.text.tokenizer import Tokenizer
from tnlm.transformer import Transformer

_REPO_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def push_to_hub(
    model: Transformer,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload a tnlm model",
    create_pr: bool = False,
    tokenizer: Tokenizer | None = None,
    card: bool | str = True,
    license: str | None = None,
    training: Mapping[str, Any] | None = None,
    verification: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> str:
    """Upload weights, configuration and model card to a Hub repository in one commit, and return the commit.

    The repository is created if it does not exist. Weight files of an earlier push that this one does not replace are
    deleted in the same commit. The token is that of ``hf auth login`` or ``HF_TOKEN``. No code is uploaded, and none
    is needed to load the model.

    Args:
        repo_id: ``owner/name``.
        private: Whether a new repository is private; None is the owner's default. An existing one is not changed.
        revision: A branch, created if it does not exist; None is ``main``.
        create_pr: Open a pull request instead of committing.
        tokenizer: Also upload ``tnlm_tokenizer.json``.
        card: Text of the README, True for :func:`tnlm.checkpoints.card.model_card` (an existing README is kept),
            False for none.
        license, training, verification: Facts for the card.

    Returns:
        The commit, 40 hexadecimal digits: ``tnlm.load(repo_id, revision=...)`` is pinned to it.

    Raises:
        ValueError: ``repo_id`` is not of that form, offline mode is on, or the Hub refuses; says what to do.
    """
    if not _REPO_ID.fullmatch(repo_id):
        raise ValueError(f'repo_id must be "owner/name", got {repo_id!r}; tnlm.save(model, folder) writes to a folder')
    if constants.is_offline_mode():
        raise ValueError(
            f"cannot push to {repo_id}: offline mode is on (HF_HUB_OFFLINE); tnlm.save(model, folder) writes the files"
        )
    text = card
    if card is True:
        text = model_card(
            model.config,
            repo_id=repo_id,
            source=model.source,
            training=training,
            verification=verification,
            license=license,
        )
    with tempfile.TemporaryDirectory(prefix="tnlm-push-") as folder:
        save(model, folder, card=text, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes)
        return _upload(
            Path(folder),
            repo_id,
            private=private,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
            keep_readme=card is True,
        )


def _upload(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None,
    revision: str | None,
    commit_message: str,
    create_pr: bool,
    keep_readme: bool,
) -> str:
    """Upload the files of a folder in one commit; returns it.

    Args:
        keep_readme: Leave out the README if the repository has one.
    """
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        if keep_readme and api.file_exists(repo_id, "README.md", revision=revision):
            (folder / "README.md").unlink()
        done = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
            delete_patterns=["model*.safetensors", "model.safetensors.index.json"],
        )
    except HfHubHTTPError as error:
        raise ValueError(f"cannot push to {repo_id}: {_explain(error)}") from error
    except Exception as error:  # the classes of a broken connection are the transport's, and change with it
        raise ValueError(
            f"cannot push to {repo_id}: the Hub could not be reached ({type(error).__name__}: {error}); nothing "
            "was committed, push again, or write the files with tnlm.save(model, folder)"
        ) from error
    return done.oid


def _explain(error: HfHubHTTPError) -> str:
    """Why the Hub refused, and what to do."""
    status = error.response.status_code
    if status in (401, 403):
        return f"no permission ({status}); run `hf auth login` with a token that may write there"
    return f"the Hub answered {status}: {error.server_message or error}"
