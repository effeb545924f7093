"""Compile every row of the tile table for its GPU, without a GPU, and report rows that would run slowly or not at all.

``python -m tnlm.kernels.triton_compile`` checks all sm_90 rows and the widest sm_80 rows, ``--all`` every target,
float16 beside bfloat16, and attention that is not causal. Needs only the triton wheel, which carries ptxas and
cuobjdump. A row fails when registers spill to the stack, when its shared memory exceeds the target's limit, or when
no tensor-core instruction is left. Prints one line per kernel and exits 1 on any failure.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tnlm.kernels import tiles, triton_kernels
from tnlm.kernels.triton_launch import kernel_constants

KERNELS = {
    "forward": triton_kernels.forward_kernel,
    "dq": triton_kernels.dq_kernel,
    "dkv": triton_kernels.dkv_kernel,
}
COMPILER_TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SERVED_BY = {"sm_89": "sm_80", "sm_120": "sm_80"}
"""Targets without rows of their own, and the targets whose rows they use."""
TRITON_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
POINTERS = ("q1", "k1", "q2", "k2", "v", "out", "grad", "dq1", "dq2", "dk1", "dk2", "dv")


@dataclass(frozen=True)
class Job:
    """One kernel of one row, to be compiled for one target."""

    target: str
    kind: str
    dtype: torch.dtype
    widths: tuple[int, int]
    kernel: str
    causal: bool

    @property
    def tile(self) -> tiles.Tile:
        rows = tiles.TABLE[SERVED_BY.get(self.target, self.target), torch.finfo(self.dtype).bits, self.kind]
        return getattr(rows[self.widths], self.kernel)


@dataclass(frozen=True)
class Result:
    """Resources of one compiled kernel, and its faults; a row without faults may be used."""

    job: Job
    registers: int
    stack: int
    shared: int
    seconds: float
    faults: list[str]

    def __str__(self) -> str:
        job, tile = self.job, self.job.tile
        text = (
            f"{job.target} {job.kind} {TRITON_TYPES[job.dtype]} {job.widths[0]},{job.widths[1]} "
            f"{'causal' if job.causal else 'full'} {job.kernel} {tile.block_m}x{tile.block_n},{tile.num_warps},"
            f"{tile.num_stages}: {self.registers} registers, {self.shared} B shared, {self.seconds:.1f} s"
        )
        return text + (f"  FAILED: {'; '.join(self.faults)}" if self.faults else "")


def jobs(*, everything: bool = False) -> list[Job]:
    """The kernels to check, the slowest to compile first."""
    targets = COMPILER_TARGETS if everything else ("sm_90", "sm_80")
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if everything else (torch.bfloat16, torch.float32)
    causal = (True, False) if everything else (True,)
    axes = (targets, ("bilinear", "squared"), dtypes, tiles.WIDTHS, KERNELS, causal)
    found = [Job(*axis) for axis in itertools.product(*axes)]
    if not everything:
        found = [job for job in found if job.target == "sm_90" or job.widths == (128, 128)]
    return sorted(found, key=lambda job: (job.dtype != torch.float32, -sum(job.widths), str(job)))


def compile_job(job: Job) -> Result:
    """Compile one kernel as a run would; returns its resources and faults."""
    start = time.perf_counter()
    try:
        compiled = triton.compile(
            _source(job),
            target=COMPILER_TARGETS[job.target],
            options={"num_warps": job.tile.num_warps, "num_stages": job.tile.num_stages},
        )
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Result(job, 0, 0, 0, time.perf_counter() - start, [f"does not compile: {lines[-1]}"])
    shared = compiled.metadata.shared
    inspect = _inspect_amd if job.target == "gfx942" else _inspect_nvidia
    registers, stack, faults = inspect(compiled, job)
    limit = tiles.SHARED_MEMORY_LIMIT[SERVED_BY.get(job.target, job.target)]
    if shared > limit:
        faults.append(f"{shared} B of shared memory, the limit is {limit}")
    return Result(job, registers, stack, shared, time.perf_counter() - start, faults)


def _source(job: Job) -> ASTSource:
    """A kernel with types, constants and divisibility as the launcher guarantees: 16 for pointers and strides."""
    kernel = KERNELS[job.kernel]
    constants = kernel_constants(job.kind, job.tile, job.dtype, job.widths, job.causal)
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = f"*{TRITON_TYPES[job.dtype]}" if name in POINTERS else "fp32" if name == "scale" else "i32"
        if name in POINTERS or name.startswith("stride_"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)


def _inspect_nvidia(compiled, job: Job) -> tuple[int, int, list[str]]:
    """Registers and stack from cuobjdump, spill stores and tensor-core instructions from the machine code."""
    binaries = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output(binaries / "cuobjdump", "--dump-resource-usage", file.name)
        code = _output(binaries / "nvdisasm", "-c", file.name)
    registers, stack = (_number(rf"{name}:(\d+)", usage) for name in ("REG", "STACK"))
    stores, wgmma, mma = (len(re.findall(rf"\b{op}\b", code)) for op in ("STL", "HGMMA", "HMMA"))
    faults = [f"{stack} B of stack, {stores} spill stores"] if stack or stores else []
    if job.target == "sm_90" and "sm_90a" not in compiled.asm["ptx"]:
        faults.append("PTX is not for sm_90a")
    # Float32 matmuls are exact ("ieee"), which no tensor core does.
    if job.dtype != torch.float32:
        if job.target == "sm_90" and (wgmma == 0 or mma > 0):
            faults.append(f"{wgmma} wgmma and {mma} mma instructions, wanted wgmma alone")
        if job.target != "sm_90" and mma == 0:
            faults.append("no mma instruction")
    return registers, stack, faults


def _inspect_amd(compiled, job: Job) -> tuple[int, int, list[str]]:
    """Vector registers, spills and matrix instructions from the assembly text."""
    text = compiled.asm["amdgcn"]
    registers, spills = (_number(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count"))
    faults = [f"{spills} vector registers spilled"] if spills else []
    if "v_mfma" not in text:
        faults.append("no mfma instruction")
    return registers, spills, faults


def _number(pattern: str, text: str) -> int:
    """The number that a pattern finds in a tool's report; a report without it is an error, not a zero."""
    found = re.search(pattern, text)
    assert found, f"no {pattern} in the report"
    return int(found[1])


def _output(*command: object) -> str:
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every target, dtype and mask")
    parser.add_argument("--only", default="", help="check only rows whose line contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compiler processes")
    args = parser.parse_args(argv)
    wanted = [job for job in jobs(everything=args.all) if args.only in str(Result(job, 0, 0, 0, 0.0, []))]
    failed = 0
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_job, job) for job in wanted]):
            result = done.result()
            failed += bool(result.faults)
            print(result, flush=True)
    print(f"{len(wanted)} kernels for {len({job.target for job in wanted})} targets, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
