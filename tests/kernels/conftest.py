"""Memory that no kernel wrote must show: fresh tensors are full of NaN where a test asks for it."""

import pytest
import torch


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every uninitialised floating tensor made from Python holds NaN, so an output left unwritten fails."""

    def poisoned(make):
        def wrapper(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
