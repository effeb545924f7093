"""How often tokens occur in the data of a run, found from its folder."""

import json

import pytest

from tnlm.training import preset, token_counts
from tnlm.training.data import shards


@pytest.fixture
def run(tmp_path):
    """A run folder that was configured for six ids and two shards, beside the validation shard."""
    (tmp_path / "data").mkdir()
    for name, tokens in {"train_000001": [5, 3, 3, 0], "train_000002": [3, 1], "val_000000": [4, 4]}.items():
        shards.write_shard(tmp_path / "data" / f"{name}.bin", tokens)
    config = preset("nano").with_model(d_vocab=8, d_vocab_used=6).replace(data=str(tmp_path / "data"), tokenizer="none")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def test_training_shards_are_counted_and_no_others(run):
    assert token_counts(run).tolist() == token_counts(str(run)).tolist() == [1, 1, 0, 3, 0, 1]


@pytest.mark.user_error
def test_errors_name_what_is_missing(run, tmp_path):
    with pytest.raises(ValueError, match=r"config file .*no-run/config\.json cannot be read"):
        token_counts(tmp_path / "no-run")
    shards.write_shard(tmp_path / "data" / "train_000003.bin", [2, 6])
    with pytest.raises(ValueError, match=r"id 6 >= vocab 6 in .*train_000003\.bin at token 1"):
        token_counts(run)
    for path in (tmp_path / "data").glob("train*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"train shards .*val_000000\.bin"):
        token_counts(run)
