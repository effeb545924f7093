"""A small random model, and its lens."""

import pytest

from tests.tiny_models import build, tiny
from tnlm import lens


@pytest.fixture
def model():
    return build(tiny())


@pytest.fixture
def hooked(model):
    return lens.hook(model)
