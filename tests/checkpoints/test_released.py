"""The registry: what it says, against what is known of the models by other ways."""

import re

import pytest

from tnlm.checkpoints import released
from tnlm.checkpoints.released import RELEASED, File

PUBLISHED_COUNTS = {
    "bilinear-bilinear-18l": 545_902_902,
    "bilinear-softmax-18l": 498_127_158,
    "swiglu-softmax-18l": 498_127_158,
    "swiglu-bilinear-18l": 545_902_902,
    "relu2-squared-12l": 162_210_852,
    "bilinear-squared-12l": 190_522_404,
    "bilinear-softmax-12l": 190_522_404,
}


def test_parameter_counts():
    assert {name: entry.n_params for name, entry in RELEASED.items()} == PUBLISHED_COUNTS


@pytest.mark.parametrize("name", RELEASED)
def test_entry_is_whole(name):
    entry = RELEASED[name]
    assert entry.name == name
    assert re.fullmatch(r"Elriggs/[\w.-]+", entry.repo)
    assert entry.revision is None or re.fullmatch(r"[0-9a-f]{40}", entry.revision)
    assert list(entry.files) == ["config.json", "pytorch_model.bin"]
    assert all(f.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", f.sha256) for f in entry.files.values())
    # the 18-layer models are what the shorter names call "sqrd-attn" in another sense
    assert entry.config.attention != "squared"
    for name_or_repo in (name, entry.repo, entry.repo.split("/")[1]):
        assert released.find_released(name_or_repo) is entry


def test_recorded_file_holds_the_parameters():
    """Sizes of tensors: bf16 embedding, scalars and biases, float32 matrices; the rest of the file is its directory."""
    entry = RELEASED["bilinear-bilinear-18l"]
    c = entry.config
    half = c.d_vocab * c.d_model + c.n_layer * (3 + c.d_model)
    raw = 2 * half + 4 * (c.n_params - half)
    assert raw == 2_067_669_612
    assert 0 < entry.files["pytorch_model.bin"].size - raw < 100_000


def test_nothing_else_is_found():
    assert released.find_released("gpt2") is None
    assert released.find_released("Elriggs/gpt2-bilinear-swiglu-18l-9h-1152embd") is None


def test_size_is_checked(tmp_path):
    from tnlm.checkpoints.hub import check_size

    (tmp_path / "f").write_bytes(b"abc")
    check_size(tmp_path / "f", File(size=3))
    check_size(tmp_path / "f", File())
    with pytest.raises(ValueError, match=r"f must have 4 bytes, it has 3: .* delete"):
        check_size(tmp_path / "f", File(size=4))
