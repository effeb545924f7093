"""One thread unless asked for more, a seed for every test, and the marker of numerically sensitive modules."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import threading
from pathlib import Path

import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

GOLDEN = Path(__file__).parent / "golden"
SHARED = Path(__file__).resolve().parents[1].parent / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test whose module compares within a limit of :mod:`tests.limits`: the ones another host may fail."""
    for item in items:
        names = vars(item.module) if isinstance(item, pytest.Function) else {}
        if any(getattr(value, "__module__", None) == "tests.limits" for value in names.values()):
            item.add_marker(pytest.mark.numeric)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say the order of the tests, which pytest-randomly does not under ``-q``."""
    terminalreporter.write_line(f"order of the tests: --randomly-seed={config.getoption('randomly_seed', 'none')}")


def wait_for_announcement() -> None:
    """Wait until what :func:`tnlm.output.progress.announce` says after a delay is said, however slow the machine."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()


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
