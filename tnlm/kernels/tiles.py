"""Tile sizes of the Triton kernels: a table with one row per GPU target, dtype, function and pair of widths.

``python -m tnlm.kernels.triton_compile`` compiles every row without a GPU and checks it: no register spills, shared
memory within the target's limit, tensor-core instructions present. There is no autotuning at run time.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """Sizes of one tile (query rows, key rows) and its numbers of warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Row:
    """The tiles of the three kernels: forward, dQ, and dK with dV."""

    forward: Tile
    dq: Tile
    dkv: Tile


WIDTHS = ((16, 16), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128))
"""Pairs (d_qk, d_v) that are compiled; other widths are padded with zeros to the smallest pair that holds them."""
SHARED_MEMORY_LIMIT = {"sm_80": 101376, "sm_90": 232448, "gfx942": 65536}
"""Bytes per block. The rows of sm_80 also serve sm_86, sm_89 and sm_120, so the least limit of these counts."""

T = Tile
HALF, SINGLE = 16, 32
Rows = dict[tuple[int, int], Row]

_SINGLE_NVIDIA: dict[str, Rows] = {
    "bilinear": {
        (16, 16): Row(T(32, 32, 4, 1), T(32, 32, 8, 1), T(32, 32, 8, 1)),
        (32, 32): Row(T(64, 32, 8, 1), T(32, 32, 8, 1), T(32, 32, 8, 1)),
        (32, 64): Row(T(32, 32, 8, 1), T(32, 32, 8, 1), T(32, 32, 8, 1)),
        (64, 64): Row(T(32, 32, 8, 1), T(32, 32, 8, 1), T(32, 32, 8, 1)),
        (64, 128): Row(T(32, 32, 8, 1), T(32, 32, 8, 1), T(32, 32, 8, 1)),
        (128, 128): Row(T(16, 16, 8, 2), T(32, 16, 8, 2), T(16, 32, 16, 2)),
    },
    "squared": {
        (16, 16): Row(T(64, 32, 8, 1), T(32, 32, 8, 1), T(32, 32, 8, 1)),
        (32, 32): Row(T(64, 32, 4, 1), T(32, 32, 8, 1), T(32, 32, 8, 1)),
        (32, 64): Row(T(32, 32, 8, 1), T(32, 32, 8, 1), T(32, 32, 8, 1)),
        (64, 64): Row(T(64, 32, 8, 1), T(32, 32, 8, 1), T(32, 32, 8, 1)),
        (64, 128): Row(T(32, 32, 8, 1), T(32, 32, 8, 1), T(16, 32, 8, 2)),
        (128, 128): Row(T(32, 32, 8, 1), T(32, 16, 8, 2), T(16, 32, 8, 1)),
    },
}
"""Float32 matmuls are exact, on plain multiply-adds, whose operands fill registers: one table for both targets."""

TABLE: dict[tuple[str, int, str], Rows] = {
    ("sm_90", HALF, "bilinear"): {
        (16, 16): Row(T(128, 64, 4, 3), T(64, 64, 4, 2), T(64, 64, 4, 2)),
        (32, 32): Row(T(128, 64, 4, 3), T(64, 64, 4, 2), T(64, 64, 4, 2)),
        (32, 64): Row(T(128, 64, 8, 3), T(64, 64, 4, 2), T(64, 64, 8, 2)),
        (64, 64): Row(T(128, 64, 8, 3), T(64, 64, 4, 2), T(64, 64, 8, 2)),
        (64, 128): Row(T(128, 64, 8, 2), T(64, 64, 8, 2), T(32, 64, 8, 2)),
        (128, 128): Row(T(128, 64, 8, 2), T(128, 32, 8, 2), T(32, 64, 8, 2)),
    },
    ("sm_90", HALF, "squared"): {
        (16, 16): Row(T(128, 64, 4, 3), T(64, 64, 4, 2), T(64, 64, 4, 2)),
        (32, 32): Row(T(128, 64, 4, 3), T(64, 64, 4, 2), T(64, 64, 4, 2)),
        (32, 64): Row(T(128, 64, 8, 3), T(64, 64, 4, 2), T(64, 64, 8, 2)),
        (64, 64): Row(T(128, 64, 8, 3), T(64, 64, 4, 2), T(64, 64, 8, 2)),
        (64, 128): Row(T(128, 64, 8, 3), T(64, 64, 8, 2), T(64, 64, 8, 2)),
        (128, 128): Row(T(128, 64, 8, 3), T(64, 64, 8, 2), T(64, 64, 8, 2)),
    },
    ("sm_90", SINGLE, "bilinear"): _SINGLE_NVIDIA["bilinear"],
    ("sm_90", SINGLE, "squared"): _SINGLE_NVIDIA["squared"],
    ("sm_80", HALF, "bilinear"): {
        (16, 16): Row(T(64, 64, 4, 2), T(64, 64, 4, 2), T(32, 64, 4, 2)),
        (32, 32): Row(T(64, 64, 4, 2), T(64, 64, 4, 2), T(32, 64, 4, 2)),
        (32, 64): Row(T(64, 32, 4, 2), T(64, 32, 4, 2), T(32, 32, 4, 2)),
        (64, 64): Row(T(64, 32, 4, 2), T(64, 32, 4, 2), T(32, 32, 4, 2)),
        (64, 128): Row(T(64, 32, 4, 2), T(64, 32, 8, 2), T(32, 32, 8, 2)),
        (128, 128): Row(T(64, 32, 8, 2), T(64, 32, 8, 2), T(32, 32, 8, 2)),
    },
    ("sm_80", HALF, "squared"): {
        (16, 16): Row(T(64, 64, 4, 2), T(64, 64, 4, 2), T(32, 32, 4, 2)),
        (32, 32): Row(T(64, 64, 4, 2), T(64, 64, 4, 2), T(32, 64, 4, 2)),
        (32, 64): Row(T(64, 32, 4, 2), T(64, 32, 4, 2), T(32, 32, 4, 2)),
        (64, 64): Row(T(64, 32, 4, 2), T(64, 32, 4, 2), T(32, 32, 4, 2)),
        (64, 128): Row(T(64, 32, 4, 2), T(64, 32, 4, 2), T(32, 32, 4, 2)),
        (128, 128): Row(T(64, 32, 8, 2), T(64, 32, 8, 2), T(32, 32, 4, 2)),
    },
    ("sm_80", SINGLE, "bilinear"): _SINGLE_NVIDIA["bilinear"],
    ("sm_80", SINGLE, "squared"): _SINGLE_NVIDIA["squared"],
    ("gfx942", HALF, "bilinear"): dict.fromkeys(WIDTHS, Row(T(64, 32, 4, 2), T(64, 32, 4, 2), T(32, 32, 4, 2))),
    ("gfx942", HALF, "squared"): dict.fromkeys(WIDTHS, Row(T(64, 32, 4, 2), T(64, 32, 4, 2), T(32, 32, 4, 2))),
    ("gfx942", SINGLE, "bilinear"): dict.fromkeys(WIDTHS, Row(T(64, 32, 8, 1), T(32, 32, 4, 1), T(32, 32, 4, 1))),
    ("gfx942", SINGLE, "squared"): dict.fromkeys(WIDTHS, Row(T(64, 32, 8, 1), T(32, 32, 4, 1), T(32, 32, 4, 1))),
}


def target_of(device: torch.device) -> str | None:
    """The target whose rows a device uses; None for a GPU without rows, and sm_90 for the interpreter on a CPU."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName
        return "gfx942" if arch.startswith("gfx942") else None
    major, _ = torch.cuda.get_device_capability(device)
    return {8: "sm_80", 9: "sm_90", 12: "sm_80"}.get(major)


def lookup(target: str | None, kind: str, dtype: torch.dtype, d_qk: int, d_v: int) -> tuple[Row, tuple[int, int]]:
    """The row and the pair of compiled widths for heads of d_qk and d_v; a ValueError if there is none."""
    reason = why_not(target, d_qk, d_v)
    if target is None or reason:
        raise ValueError(f"triton attention {reason}")
    widths = min((w for w in WIDTHS if w[0] >= d_qk and w[1] >= d_v), key=lambda w: (sum(w), w))
    return TABLE[target, torch.finfo(dtype).bits, kind][widths], widths


def why_not(target: str | None, d_qk: int, d_v: int) -> str | None:
    """The reason why the table has no row, with the way out; None when it has one."""
    if target is None:
        return 'has no tiles for this GPU; use "chunked", or "auto"'
    if max(d_qk, d_v) > 128:
        return f'needs d_qk and d_v up to 128, got {d_qk} and {d_v}; use "chunked"'
    return None
