"""A small random model."""

import pytest

from tests.tiny_models import build, tiny


@pytest.fixture(scope="module")
def model():
    return build(tiny())
