"""One thread, and seeds for every test."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"
SHARED = Path(__file__).resolve().parents[1].parent / "shared"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def shared() -> Path:
    """The folder of real texts and recorded runs beside the repository; tests that want it skip without it."""
    if not SHARED.is_dir():
        pytest.skip(f"no folder {SHARED.name!r} beside the repository")
    return SHARED


@pytest.fixture
def golden() -> Path:
    """Small recorded outputs of the public training code, kept in the repository."""
    return GOLDEN


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Fill every parameter with noise: fresh output maps are zero, and identities would hold as 0 == 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            fan = p.shape[-1] if p.ndim > 1 else 4
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / fan**0.5)
    return model
