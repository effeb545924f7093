# ruff: noqa: E402 (the repository and a stand-in for jaxtyping must be importable first)
"""Attention kernels against named backends of torch's SDPA and against the published T x T einsum form.

    OMP_NUM_THREADS=1 python benchmarks/attention.py            # CPU: process time of one thread
    python benchmarks/attention.py --gpu                        # one CUDA device, bf16, under ten minutes
    TRITON_INTERPRET=1 python benchmarks/attention.py --dry     # the logic of --gpu at toy sizes on a CPU

The error contract of the tests comes first, and nothing is timed when it fails. Candidates take turns within one loop;
figures are medians, ratios are within one run and name their backend. One JSON object per line, appended to
benchmarks/results/ as soon as it is measured, the most valuable first; a row that its budget does not reach says so.
The GPU run needs torch, triton, einops, opt_einsum, safetensors and this repository; jaxtyping only if installed.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
try:
    import jaxtyping  # noqa: F401
except ImportError:

    class Annotations(ModuleType):
        """Stands in for jaxtyping, which only annotations need: ``Float[Tensor, "..."]`` is ``Tensor``."""

        def __getattr__(self, name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__class_getitem__": classmethod(lambda cls, item: item[0])})

    sys.modules["jaxtyping"] = Annotations("jaxtyping")

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.kernels.attention_cases import assert_contract, operands
from tnlm.kernels import bilinear_attention, squared_attention
from tnlm.kernels.ops import causal_pairs

Shape = tuple[int, int, int, int]
"""batch, seq, n_head, d_v."""
CPU_SHAPES: tuple[Shape, ...] = ((1, 1024, 9, 128), (4, 256, 4, 32))
CROSSOVER_SHAPES: tuple[Shape, ...] = tuple((1, seq, 9, 64) for seq in (128, 256, 384, 512, 1024))
GPU_SHAPES: tuple[Shape, ...] = (
    (32, 1024, 9, 128),
    (2, 8192, 9, 128),
    (32, 1024, 18, 64),
    (8, 1024, 9, 128),
    (64, 256, 4, 32),
)
DRY_SHAPES: tuple[Shape, ...] = ((1, 33, 2, 16),)
SDPA = {
    "sdpa:default": None,
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
}
LIMITS = {"bilinear:chunked": 1.70, "squared:chunked": 1.05}
"""What a CPU run must show at the first shape, forward + backward, as a ratio to SDPA."""


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def published(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor) -> Tensor:
    """Dense scores, a mask, one einsum: how the released models were trained."""
    seq, scale = q1.shape[1], 1 / q1.shape[3]
    s1, s2 = (torch.einsum("bqhd,bkhd->bhqk", q, k) * scale for q, k in ((q1, k1), (q2, k2)))
    mask = torch.tril(torch.ones(seq, seq, device=v.device, dtype=v.dtype))
    return torch.einsum("bhqk,bkhd->bqhd", s1 * s2 * mask, v)


def candidate(name: str) -> tuple[Callable[..., Tensor], int, float]:
    """The function, its number of score factors, and its d_qk as a fraction of d_v."""
    family, _, how = name.partition(":")
    if family == "sdpa":
        return softmax, 1, 1.0
    if family == "einsum":
        return published, 2, 1.0
    function = squared_attention if family == "squared" else bilinear_attention
    fraction = 0.5 if family == "bilinear-half" else 1.0
    return lambda *x: function(*x, implementation=how), 1 if family == "squared" else 2, fraction


class Task:
    """One candidate on one shape: `run` does the forward, or forward and backward."""

    def __init__(self, name: str, shape: Shape, device: str, dtype: torch.dtype, backward: bool) -> None:
        self.name, self.backward = name, backward
        self.function, factors, fraction = candidate(name)
        batch, seq, n_head, d = shape
        d_qk = int(d * fraction)
        generator = torch.Generator(device).manual_seed(0)

        def draw(width: int) -> Tensor:
            x = torch.randn(batch, seq, n_head, width, device=device, generator=generator)
            return x.to(dtype).requires_grad_(backward)

        self.leaves = [*(draw(d_qk) for _ in range(2 * factors)), draw(d)]
        self.grad = torch.randn(shape, device=device, generator=generator).to(dtype)
        qk, v = (3 * factors, 2) if backward else (0, 0)
        pairs = batch * n_head * causal_pairs(seq, seq, True)
        self.flop = 2 * pairs * ((factors + qk) * d_qk + (1 + v) * d)
        self.seconds: list[float] = []

    def run(self) -> None:
        backend = SDPA.get(self.name)
        if backend is None:
            self._run()
        else:
            with sdpa_kernel(backend):
                self._run()

    def _run(self) -> None:
        if not self.backward:
            with torch.no_grad():
                self.function(*self.leaves)
            return
        torch.autograd.grad(self.function(*self.leaves), self.leaves, self.grad)


def clock_of(device: str) -> Callable[[Callable[[], None]], float]:
    """Seconds of one call: events between L2 flushes on a GPU, process time on a CPU."""
    if device == "cpu":

        def processor(call: Callable[[], None]) -> float:
            start = time.process_time()
            call()
            return time.process_time() - start

        return processor

    flush = torch.empty(2**28, dtype=torch.int8, device=device)

    def events(call: Callable[[], None]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3

    return events


def interleaved(tasks: list, clock: Callable, repeats: int, deadline: float) -> Iterator[dict]:
    """Warm up, then let the candidates take turns; those that cannot run are rows that say so."""
    running = []
    for task in tasks:
        try:
            for _ in range(3):
                task.run()
            running.append(task)
        except RuntimeError as error:
            yield {"candidate": task.name, "unsupported": str(error).splitlines()[0]}
    for _ in range(repeats):
        if time.monotonic() > deadline:
            break
        for task in running:
            task.seconds.append(clock(task.run))
    median = {task.name: statistics.median(task.seconds) for task in running if task.seconds}
    for task in running:
        if not task.seconds:
            yield {"candidate": task.name, "unsupported": "out of budget"}
            continue
        yield {
            "candidate": task.name,
            "repeats": len(task.seconds),
            "ms": round(median[task.name] * 1e3, 4),
            "ms_min": round(min(task.seconds) * 1e3, 4),
            "tflop_per_second": round(task.flop / median[task.name] / 1e12, 3),
            "ratio_to": {
                name: round(median[task.name] / median[name], 3)
                for name in median
                if name.startswith(("sdpa", "einsum", "step:softmax"))
            },
        }


def operator_rows(
    names: list[str], shape: Shape, device: str, dtype: torch.dtype, repeats: int, deadline: float
) -> Iterator[dict]:
    """Forward + backward first: it is worth more."""
    about = {"shape": "B{} T{} H{} D{}".format(*shape), "dtype": str(dtype).removeprefix("torch.")}
    for backward in (True, False):
        tasks = [Task(name, shape, device, dtype, backward) for name in names]
        for row in interleaved(tasks, clock_of(device), repeats, deadline):
            yield {**about, "pass": "forward+backward" if backward else "forward", **row}


class Step:
    """One training step of a whole model, AdamW included, on the same tokens."""

    def __init__(self, name: str, device: str, batch: int, **config: object) -> None:
        from tnlm.config import ModelConfig
        from tnlm.transformer import Transformer

        self.name = f"step:{name}"
        self.config = ModelConfig.released(**config)
        torch.manual_seed(0)
        self.model = Transformer(self.config, device=device)
        if device != "cpu":
            for block in self.model.blocks:
                block.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device != "cpu")
        vocabulary = self.config.d_vocab_used or self.config.d_vocab
        self.tokens = torch.randint(vocabulary, (batch, self.config.n_ctx + 1), device=device)
        self.flop = 6 * self.config.n_params * batch * self.config.n_ctx
        self.seconds: list[float] = []

    def run(self) -> None:
        with torch.autocast(self.tokens.device.type, dtype=torch.bfloat16):
            logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def step_rows(device: str, repeats: int, deadline: float, dry: bool) -> Iterator[dict]:
    small = {"n_layer": 1, "n_head": 2, "d_model": 64, "d_vocab": 11, "d_hidden": 32, "n_ctx": 33} if dry else {}
    batch, half = (1, 16) if dry else (16, 64)
    kinds = {
        "softmax": {"attention": "softmax"},
        "bilinear": {"attention": "bilinear"},
        "bilinear-half": {"attention": "bilinear", "d_qk": half},
    }
    steps = [Step(name, device, batch, **{**small, **kind}) for name, kind in kinds.items()]
    about = {"pass": "training step", "tokens": batch * steps[0].config.n_ctx, "dtype": "bfloat16"}
    params = {step.name: step.config.n_params for step in steps}
    for row in interleaved(steps, clock_of(device), repeats, deadline):
        yield {**about, "n_params": params[row["candidate"]], **row}


def gate(device: str, dtype: torch.dtype, implementations: list[str]) -> None:
    """The error contract of the tests at an odd shape; raises when anything is wrong."""
    for kind in ("bilinear", "squared"):
        for d_qk, d_v, seq in ((64, 64, 333), (64, 128, 129)) if device != "dry" else ((16, 16, 33),):
            where = "cpu" if device == "dry" else device
            tensors = [
                x.detach().to(where)
                for x in operands(kind, seq_q=seq, batch=2, n_head=8, d_qk=d_qk, d_v=d_v, dtype=dtype)
            ]
            grad = torch.randn(2, seq, 8, d_v).to(where, dtype)
            assert_contract(kind, tensors, implementations, grad)


def warm(job: tuple[str, int, int]) -> None:
    """Fill Triton's cache on disk, in a process of its own: in series, compiling would take longer than measuring."""
    kind, d_qk, d_v = job
    n = 2 if kind == "bilinear" else 1
    leaves = [
        torch.zeros(1, 64, 1, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for d in [d_qk] * (2 * n) + [d_v]
    ]
    function = bilinear_attention if n == 2 else squared_attention
    function(*leaves, implementation="triton").sum().backward()
    torch.cuda.synchronize()


def memory_growth(name: str) -> int:
    """Bytes by which one forward + backward at the first CPU shape raises the peak of this fresh process (Linux)."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

    task = Task(name, CPU_SHAPES[0], "cpu", torch.float32, backward=True)
    Task(name, (1, 8, 1, 16), "cpu", torch.float32, backward=True).run()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    task.run()
    return resident("VmHWM") - before


def cpu_rows(repeats: int) -> Iterator[dict]:
    names = ["sdpa:default", "einsum:published", "bilinear:eager", "bilinear:chunked", "bilinear-half:chunked"]
    names += ["squared:eager", "squared:chunked"]
    for shape in CPU_SHAPES:
        yield from operator_rows(names, shape, "cpu", torch.float32, repeats, float("inf"))
    for name in ("sdpa:default", "einsum:published", "bilinear:chunked", "squared:chunked"):
        command = [sys.executable, __file__, "--memory", name]
        grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        yield {"candidate": name, "pass": "memory of forward+backward", "bytes": grown}
    for shape in CROSSOVER_SHAPES:
        crossover = ["sdpa:default", "bilinear:eager", "bilinear:chunked"]
        yield from operator_rows(crossover, shape, "cpu", torch.float32, repeats, float("inf"))


def gpu_rows(repeats: int, seconds: float) -> Iterator[dict]:
    started = time.monotonic()
    pairs = [(d, d) for d in (128, 64, 32)] + [(64, 128), (32, 64)]
    jobs = [(kind, *pair) for kind in ("bilinear", "squared") for pair in pairs]
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(warm, jobs))
    yield {"pass": "compilation", "seconds": round(time.monotonic() - started, 1)}
    gate("cuda", torch.bfloat16, ["triton"])
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16).unbind()
    clock = clock_of("cuda")
    matmul = statistics.median(clock(lambda: a @ b) for _ in range(20))
    yield {"pass": "matmul 8192^3", "tflop_per_second": round(2 * 8192**3 / matmul / 1e12, 1)}
    names = [*SDPA, "bilinear:triton", "squared:triton", "bilinear-half:triton"]
    first, *others = GPU_SHAPES
    deadline = started + seconds
    yield from operator_rows(names, first, "cuda", torch.bfloat16, repeats, min(deadline, time.monotonic() + 90))
    yield from step_rows("cuda", 10, min(deadline, time.monotonic() + 240), dry=False)
    for shape in others:
        yield from operator_rows(names, shape, "cuda", torch.bfloat16, repeats, min(deadline, time.monotonic() + 60))


def dry_rows() -> Iterator[dict]:
    gate("dry", torch.float32, ["triton"])
    names = [*SDPA, "bilinear:triton", "squared:triton"]
    for shape in DRY_SHAPES:
        yield from operator_rows(names, shape, "cpu", torch.float32, 1, float("inf"))
    yield from step_rows("cpu", 1, float("inf"), dry=True)


def environment(device: str) -> dict:
    """What a figure means nothing without."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    about = {
        "benchmark": "attention",
        "date": datetime.date.today().isoformat(),
        "commit": commit or "unknown",
        "command": " ".join(["python", "benchmarks/attention.py", *sys.argv[1:]]),
        "torch": torch.__version__,
    }
    if device == "cpu":
        threads = torch.get_num_threads()
        capability = torch.backends.cpu.get_cpu_capability()
        return about | {"hardware": f"{platform.machine()} {capability}, {os.cpu_count()} CPUs, {threads} thread"}
    import triton

    return about | {
        "hardware": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def verdict(rows: list[dict]) -> list[str]:
    """What a CPU run owes, from its own rows; empty when all of it holds."""
    shape = "B{} T{} H{} D{}".format(*CPU_SHAPES[0])
    found = {r["candidate"]: r for r in rows if r.get("shape") == shape and r["pass"] == "forward+backward"}
    memory = {r["candidate"]: r["bytes"] for r in rows if "bytes" in r}
    missed = [
        f"{name} takes {ratio} of SDPA, the limit is {limit}"
        for name, limit in LIMITS.items()
        if (ratio := found[name]["ratio_to"]["sdpa:default"]) > limit
    ]
    if (ratio := found["bilinear:chunked"]["ratio_to"]["einsum:published"]) > 0.5:
        missed.append(f"bilinear:chunked takes {ratio} of the published form, the limit is 0.5")
    if not 0 < memory["bilinear:chunked"] <= memory["einsum:published"] / 2:
        missed.append("bilinear:chunked grows memory by more than half of what the published form does")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="measure on a CUDA device")
    parser.add_argument("--dry", action="store_true", help="run the logic of --gpu at toy sizes and write nothing")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=540, help="budget of --gpu")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.gpu:
        torch.set_num_threads(1)
    if options.memory:
        print(memory_growth(options.memory))
        return 0
    if options.gpu:
        rows = gpu_rows(options.repeats, options.seconds)
    elif options.dry:
        rows = dry_rows()
    else:
        gate("cpu", torch.float32, ["eager", "chunked"])
        rows = cpu_rows(options.repeats)
    about = environment("cuda" if options.gpu else "cpu")
    hardware = about["hardware"].replace(" ", "-").replace(",", "") if options.gpu else platform.machine() + "-cpu"
    path = ROOT / "benchmarks/results" / f"{about['date']}_attention_{hardware}.jsonl"
    measured = []
    for row in rows:
        measured.append(row)
        line = json.dumps(about | row)
        print(line, flush=True)
        if not options.dry:
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(line + "\n")
    missed = [] if options.gpu or options.dry else verdict(measured)
    print("\n".join(missed), file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
