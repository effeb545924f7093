"""These tests run Triton's interpreter, which must be on before Triton decorates a kernel: a process of their own.

``python -m pytest tests/kernels/interpreter``; the rest of the suite does not collect this folder.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest

from tests.kernels.interpreter import bfloat16


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter of triton 3.6 makes numbers of arrays of one element (needs NumPy below 2.4).
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.fixture(scope="session")
def exact_bfloat16() -> None:
    """The interpreter multiplies bit patterns of bfloat16 and truncates casts to it: mend both, or skip."""
    reason = bfloat16.mend()
    if reason:
        pytest.skip(f"the bfloat16 remedy does not fit this triton: {reason}")
