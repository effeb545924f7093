"""A text for the commands."""

from pathlib import Path

import pytest

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune.\n" * 5


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path
