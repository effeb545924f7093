"""The ahead-of-time check finds what must not ship: tiles known to spill, not to fit, or to miss the tensor cores."""

import pytest
import torch

from tests.kernels.attention_cases import SHAPES_CHECKED
from tnlm.kernels import tiles

pytest.importorskip("triton", reason="compiling needs the triton wheel")
if SHAPES_CHECKED:
    pytest.skip("Triton cannot compile the runtime checks of shapes", allow_module_level=True)

from tnlm.kernels.triton_compile import KERNELS, Job, compile_job, jobs, main

BAD = {
    "dq": (tiles.Tile(64, 64, 4, 2), "B of stack, .* spill stores"),
    "forward": (tiles.Tile(128, 128, 8, 2), "262144 B of shared memory, the limit is 232448"),
}


def wide(kernel: str) -> Job:
    return Job("sm_90", "bilinear", torch.bfloat16, (128, 128), kernel, causal=True)


@pytest.fixture
def table(monkeypatch):
    """Put a tile into the sm_90 row of width 128."""

    def put(tile: tiles.Tile) -> None:
        rows = tiles.TABLE["sm_90", tiles.HALF, "bilinear"]
        monkeypatch.setitem(rows, (128, 128), tiles.Row(tile, tile, tile))

    return put


@pytest.mark.parametrize("kernel", BAD)
def test_a_tile_that_must_not_ship_is_found(kernel, table):
    tile, fault = BAD[kernel]
    table(tile)
    result = compile_job(wide(kernel))
    with pytest.raises(AssertionError, match=fault):
        assert not result.faults


def test_the_shipped_row_passes_and_one_too_narrow_for_wgmma_fails(table, capsys):
    assert compile_job(wide("forward")).faults == []
    table(tiles.Tile(32, 64, 4, 2))
    assert main(["--only", "sm_90 bilinear bf16 128,128 causal forward", "--jobs", "1"]) == 0
    # The pool's processes read the shipped table; this one the changed one.
    assert "wanted wgmma alone" in str(compile_job(wide("forward")))
    assert "1 kernels for 1 targets, 0 failed" in capsys.readouterr().err


def test_what_is_checked():
    quick, everything = jobs(), jobs(everything=True)
    for kind in ("bilinear", "squared"):
        for dtype in (torch.bfloat16, torch.float32):
            for kernel in KERNELS:
                for widths in tiles.WIDTHS:
                    assert Job("sm_90", kind, dtype, widths, kernel, causal=True) in quick
                assert Job("sm_80", kind, dtype, (128, 128), kernel, causal=True) in quick
    assert set(quick) <= set(everything)
    assert {job.target for job in everything} == {"sm_80", "sm_89", "sm_90", "sm_120", "gfx942"}
    assert {job.dtype for job in everything} == {torch.bfloat16, torch.float16, torch.float32}
    assert {job.causal for job in everything} == {True, False}
