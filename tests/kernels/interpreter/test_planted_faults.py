"""Break the kernels in classic ways, one at a time: the error contract must notice each.

``python -m pytest -v tests/kernels/interpreter/test_planted_faults.py`` prints one line per mistake.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.attention_cases import assert_contract, operands, random_grad
from tests.kernels.interpreter.test_triton import guarded
from tnlm.kernels import tiles, triton_kernels, triton_launch

SOURCE = Path(triton_kernels.__file__).read_text()
FORWARD_MASK = "b_p = tl.where(o_m[:, None] + (seq_k - seq_q) >= o_n[None, :], b_p, 0.0)"
DQ_MASK = "b_a = tl.where(o_m[:, None] + (seq_k - seq_q) >= o_n[None, :], b_a, 0.0)"
FIRST_QUERY = "first = tl.maximum(n - (seq_k - seq_q), 0) // BLOCK_M * BLOCK_M"
LAST_KEY = "everyone = tl.maximum(n + BLOCK_N - 1 - (seq_k - seq_q), 0)"
LOAD_MASK = "mask=rows[:, None] < seq, other=0.0"

FAULTS = {
    "> for >= in the mask": (FORWARD_MASK, FORWARD_MASK.replace(">=", ">")),
    "dq mask dropped": (DQ_MASK, "pass"),
    "dQ1 built from S1": ("b_ds1 = (b_a * b_s2).to(b_k1.dtype)", "b_ds1 = (b_a * b_s1).to(b_k1.dtype)"),
    "factor 2 lost in squared dK": ("b_ds1 = 2.0 * b_a * b_s1", "b_ds1 = b_a * b_s1"),
    "factor 2 lost in squared dQ": ("b_ds1 = (2.0 * b_a * b_s1)", "b_ds1 = (b_a * b_s1)"),
    "load mask lost": (f", {LOAD_MASK}", ""),
    "dk,dv loop starts one block late": (FIRST_QUERY, FIRST_QUERY + " + BLOCK_M"),
    "last key of a tile forgotten": (LAST_KEY, LAST_KEY.replace("- 1", "- 2")),
    "scale lost in the recomputed G V^T": (
        "b_a = tl.dot(b_v, tl.trans(b_g), input_precision=PRECISION) * scale",
        "b_a = tl.dot(b_v, tl.trans(b_g), input_precision=PRECISION)",
    ),
    "wrong head index": ("head = (pid % n_head)", "head = (pid // n_head)"),
    "top-left alignment": (FORWARD_MASK, FORWARD_MASK.replace(" + (seq_k - seq_q)", "")),
}  # fmt: skip


def assert_kernels_keep_the_contract() -> None:
    """The suite's error contract on a few small float32 cases over several tiles, equal and unequal lengths."""
    for kind in ("bilinear", "squared"):
        for seq_q, seq_k in ((40, 40), (20, 35), (20, 34)):
            sizes = {"seq_q": seq_q, "seq_k": seq_k, "batch": 1, "n_head": 2, "d_qk": 16, "d_v": 16}
            tensors = operands(kind, **sizes, dtype=torch.float32)
            *tensors, grad = guarded([*tensors, random_grad(tensors)])
            assert_contract(kind, tensors, grad, ["triton"])


@pytest.fixture(autouse=True)
def many_tiles(monkeypatch):
    tile = tiles.Tile(16, 32, num_warps=4, num_stages=1)
    monkeypatch.setattr(tiles, "lookup", lambda *args: (tiles.Row(tile, tile, tile), (16, 16)))


def test_the_kernels_as_they_are_pass():
    assert_kernels_keep_the_contract()


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, tmp_path, monkeypatch):
    right, wrong = FAULTS[fault]
    assert SOURCE.count(right) == 1, "the fault no longer fits the source"
    path = tmp_path / "faulty_kernels.py"
    path.write_text(SOURCE.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("faulty_kernels", path)
    faulty = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "faulty_kernels", faulty)
    spec.loader.exec_module(faulty)
    for name in ("forward_kernel", "dq_kernel", "dkv_kernel"):
        monkeypatch.setattr(triton_launch, name, getattr(faulty, name))
    with pytest.raises(AssertionError, match="triton"):
        assert_kernels_keep_the_contract()
