# ruff: noqa: E402 (the repository and a stand-in for jaxtyping must be importable first)
"""Attention kernels against named backends of torch's SDPA and against the published T x T einsum form.

    OMP_NUM_THREADS=1 python benchmarks/attention.py            # CPU: process time of one thread
    python benchmarks/attention.py --busy                       # CPU: two threads, alone and beside other processes
    python benchmarks/attention.py --gpu                        # one CUDA device, bf16, under ten minutes
    TRITON_INTERPRET=1 python benchmarks/attention.py --dry     # all that --gpu does, at toy sizes on a CPU

First the limits on errors are tested as in the tests, and nothing is timed if that fails. Candidates take turns within
one loop; figures are medians with their quartiles, ratios are within one run and name their backend. Each row is a JSON
object in a line, written to --out as soon as it is measured, the most valuable first. A row that did not fit into its
time budget says so.
The GPU run needs torch, triton, einops, opt_einsum, safetensors and this repository; jaxtyping only if installed.
In a copy of the repository without its history, give --commit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
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

from benchmarks import processes, record
from tests.kernels.attention_cases import assert_contract, operands, random_grad
from tnlm.kernels import bilinear_attention, squared_attention
from tnlm.kernels.ops import causal_pairs

Shape = tuple[int, int, int, int]
"""batch, seq, n_head, d_v."""
CPU_SHAPES: tuple[Shape, ...] = ((1, 1024, 9, 128), (4, 256, 4, 32))
CROSSOVER_SHAPES: tuple[Shape, ...] = (
    (1, 128, 9, 64),
    (8, 96, 4, 32),
    (8, 128, 4, 32),
    (1, 160, 2, 16),
    (4, 192, 4, 128),
    (4, 192, 9, 64),
    (1, 256, 2, 16),
    (1, 256, 9, 64),
    (1, 384, 9, 64),
    (1, 1024, 9, 64),
)
"""Shapes around which "auto" on a CPU changes from eager to chunked: the table of docs/kernels.md."""


@dataclass(frozen=True)
class Plan:
    """Settings of a run of the Triton kernels; shapes come in the order of their value."""

    device: str
    dtype: torch.dtype
    gate: tuple[tuple[int, int, int], ...]
    """d_qk, d_v and seq of the tests that come first."""
    shapes: tuple[Shape, ...]
    matmul: int
    """Size of the square matmul whose rate is the upper bound."""
    step_batch: int
    step_half: int
    """d_qk at which bilinear attention has as many parameters as softmax attention."""
    step_model: dict
    """Changes to the published architecture."""
    step_backend: str


GPU = Plan(
    device="cuda",
    dtype=torch.bfloat16,
    gate=((128, 128, 257), (64, 128, 129), (64, 64, 333)),
    shapes=((32, 1024, 9, 128), (2, 8192, 9, 128), (32, 1024, 18, 64), (8, 1024, 9, 128), (64, 256, 4, 32)),
    matmul=8192,
    step_batch=16,
    step_half=64,
    step_model={},
    step_backend="inductor",
)
DRY = Plan(
    device="cpu",
    dtype=torch.float32,
    gate=((16, 16, 33),),
    shapes=((1, 33, 2, 16), (1, 17, 2, 16)),
    matmul=16,
    step_batch=1,
    step_half=16,
    step_model={"n_layer": 2, "n_head": 2, "d_model": 64, "d_vocab": 11, "d_hidden": 32, "n_ctx": 33},
    step_backend="aot_eager",
)
SDPA = {
    "sdpa:default": None,
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
}
LIMITS = {"bilinear:chunked": 1.70, "squared:chunked": 1.05}
"""Largest allowed time at the first CPU shape, forward + backward, as a ratio to SDPA."""

BUSY_THREADS, BUSY_PROCESSES, BUSY_LIMIT = 2, 3, 2.0
"""Beside so many busy processes, the ratio to SDPA may be at most so many times the ratio without them."""


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def published(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor) -> Tensor:
    """Attention by dense scores, a mask and one einsum, as in the training of the released models."""
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
    """One candidate on one shape; `run` does the forward, or the forward and backward."""

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


class Processor:
    """Process time of a call on a CPU. Memory is measured by `memory_growth`, in a process of its own."""

    def seconds(self, call: Callable[[], None]) -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    def growth(self, call: Callable[[], None]) -> dict:
        call()
        return {}


class Clock(Processor):
    """Wall time of a call, which includes waiting for a thread that is not running; process time would not."""

    def seconds(self, call: Callable[[], None]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


class Cuda:
    """Time of a call between two CUDA events, and its increase of the peak of allocated memory.

    Zeroing 4 GiB first flushes L2, and takes long enough for the host to queue the call before the clock starts.
    """

    def __init__(self, device: str = "cuda", flush_bytes: int = 2**32) -> None:
        self.flush = torch.empty(flush_bytes, dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], None]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3

    def growth(self, call: Callable[[], None]) -> dict:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return {"bytes": torch.cuda.max_memory_allocated() - before}


Meter = Processor | Cuda
WARM_UPS = 3
LEAST_REPEATS = 3
"""Repeats of a candidate that was warmed up within its budget, even if the budget is used up by then."""


def interleaved(tasks: list, meter: Meter, repeats: int, deadline: float) -> Iterator[dict]:
    """Rows of the candidates, which are warmed up and then take turns; one that cannot run, or is late, says so."""
    memory: dict[str, dict] = {}
    for task in tasks:
        if time.monotonic() > deadline:
            yield {"candidate": task.name, "unsupported": "out of budget"}
            continue
        try:
            for _ in range(WARM_UPS):
                grown = meter.growth(task.run)
            memory[task.name] = grown
        except Exception as error:
            yield {"candidate": task.name, "unsupported": f"{type(error).__name__}: {error}".splitlines()[0]}
    running = [task for task in tasks if task.name in memory]
    for turn in range(repeats):
        if turn >= LEAST_REPEATS and time.monotonic() > deadline:
            break
        for task in running:
            task.seconds.append(meter.seconds(task.run))
    median = {task.name: statistics.median(task.seconds) for task in running}
    for task in running:
        ordered = sorted(task.seconds)
        yield {
            "candidate": task.name,
            "repeats": len(ordered),
            "ms": round(median[task.name] * 1e3, 4),
            "ms_min": round(ordered[0] * 1e3, 4),
            "ms_quartiles": [round(ordered[len(ordered) * i // 4] * 1e3, 4) for i in (1, 3)],
            "tflop_per_second": round(task.flop / median[task.name] / 1e12, 3),
            **memory[task.name],
            "ratio_to": {
                name: round(median[task.name] / median[name], 3)
                for name in median
                if name.startswith(("sdpa", "einsum", "step:softmax"))
            },
        }


def operator_rows(
    names: list[str],
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    meter: Meter,
    repeats: int,
    deadline: float = float("inf"),
) -> Iterator[dict]:
    """Rows of the candidates on one shape: forward + backward first, since it is worth more, then forward."""
    about = {"shape": "B{} T{} H{} D{}".format(*shape), "dtype": str(dtype).removeprefix("torch.")}
    for backward in (True, False):
        tasks = [Task(name, shape, device, dtype, backward) for name in names]
        for row in interleaved(tasks, meter, repeats, deadline):
            yield {**about, "pass": "forward+backward" if backward else "forward", **row}


class Step:
    """One training step of a whole model, AdamW included, on the same tokens; blocks are compiled one by one."""

    def __init__(self, name: str, plan: Plan, **kind: object) -> None:
        from tnlm.config import ModelConfig
        from tnlm.transformer import Transformer

        self.name = f"step:{name}"
        self.config = ModelConfig.released(**{**plan.step_model, **kind})
        torch.manual_seed(0)
        self.model = Transformer(self.config, device=plan.device)
        for block in self.model.blocks:
            block.compile(backend=plan.step_backend, dynamic=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        vocabulary = self.config.d_vocab_used or self.config.d_vocab
        self.tokens = torch.randint(vocabulary, (plan.step_batch, self.config.n_ctx + 1), device=plan.device)
        self.flop = 6 * self.config.n_params * plan.step_batch * self.config.n_ctx
        self.seconds: list[float] = []

    def run(self) -> None:
        with torch.autocast(self.tokens.device.type, dtype=torch.bfloat16):
            logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def step_rows(plan: Plan, meter: Meter, repeats: int, deadline: float) -> Iterator[dict]:
    """Rows of training steps. Softmax attention is that of ``sdpa:default``; bilinear-half has as many parameters."""
    kinds = {
        "softmax": {"attention": "softmax"},
        "bilinear": {"attention": "bilinear"},
        "bilinear-half": {"attention": "bilinear", "d_qk": plan.step_half},
    }
    steps = [Step(name, plan, **kind) for name, kind in kinds.items()]
    about = {"pass": "training step", "tokens": plan.step_batch * steps[0].config.n_ctx, "dtype": "bfloat16 autocast"}
    params = {step.name: step.config.n_params for step in steps}
    for row in interleaved(steps, meter, repeats, deadline):
        yield {**about, "n_params": params[row["candidate"]], **row}


def gate(device: str, dtype: torch.dtype, sizes: tuple[tuple[int, int, int], ...], implementations: list[str]) -> None:
    """Run the tests' comparison of outputs and gradients with the definition; raises if an error is too large."""
    for kind in ("bilinear", "squared"):
        for d_qk, d_v, seq in sizes:
            tensors = operands(kind, seq_q=seq, batch=2, n_head=8, d_qk=d_qk, d_v=d_v, dtype=dtype)
            tensors = [x.detach().to(device) for x in tensors]
            assert_contract(kind, tensors, random_grad(tensors), implementations)


def kernels_of(plan: Plan) -> list[tuple[str, int, int]]:
    """Kind, d_qk and d_v of every kernel that a run calls, the slowest to compile first."""
    used = {(kind, d_qk, d_v) for d_qk, d_v, _ in plan.gate for kind in ("bilinear", "squared")}
    for *_, d in plan.shapes:
        used |= {("bilinear", d, d), ("squared", d, d), ("bilinear", d // 2, d)}
    return sorted(used, key=lambda job: (-job[1] - job[2], job))


def warm(device: str, dtype: torch.dtype, kind: str, d_qk: int, d_v: int) -> str | None:
    """Compile one kernel into Triton's cache on disk; returns the reason if that fails, else None.

    Called in several processes: one after the other, compiling would take longer than measuring.
    """
    n = 2 if kind == "bilinear" else 1
    try:
        leaves = [
            torch.zeros(1, 64, 1, d, device=device, dtype=dtype, requires_grad=True) for d in [d_qk] * (2 * n) + [d_v]
        ]
        function = bilinear_attention if n == 2 else squared_attention
        function(*leaves, implementation="triton").sum().backward()
        return None
    except Exception as error:
        return f"{kind} {d_qk},{d_v}: {type(error).__name__}: {error}".splitlines()[0]


def memory_growth(name: str) -> int:
    """Bytes by which one forward + backward at the first CPU shape raises the peak of this new process (Linux)."""
    task = Task(name, CPU_SHAPES[0], "cpu", torch.float32, backward=True)
    Task(name, (1, 8, 1, 16), "cpu", torch.float32, backward=True).run()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = processes.memory("VmRSS")
    task.run()
    return processes.memory("VmHWM") - before


def cpu_rows(repeats: int) -> Iterator[dict]:
    """Rows of a CPU run: time and memory at its shapes, then the shapes around which "auto" changes."""
    names = ["sdpa:default", "einsum:published", "bilinear:eager", "bilinear:chunked", "bilinear-half:chunked"]
    names += ["squared:eager", "squared:chunked"]
    for shape in CPU_SHAPES:
        yield from operator_rows(names, shape, "cpu", torch.float32, Processor(), repeats)
    for name in names:
        grown = int(processes.run_again(__file__, "--memory", name))
        about = {"shape": "B{} T{} H{} D{}".format(*CPU_SHAPES[0]), "dtype": "float32"}
        yield {**about, "candidate": name, "pass": "memory of forward+backward", "repeats": 1, "bytes": grown}
    for shape in CROSSOVER_SHAPES:
        crossover = ["sdpa:default", "bilinear:eager", "bilinear:chunked"]
        yield from operator_rows(crossover, shape, "cpu", torch.float32, Processor(), repeats)


def busy_rows(repeats: int) -> Iterator[dict]:
    """Rows of the first CPU shape on several threads, alone and then beside busy processes."""
    names = ["sdpa:default", *LIMITS]
    for n in (0, BUSY_PROCESSES):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
        try:
            for row in operator_rows(names, CPU_SHAPES[0], "cpu", torch.float32, Clock(), repeats):
                yield {"threads": BUSY_THREADS, "busy_processes": n, **row}
        finally:
            for other in others:
                other.kill()
                other.wait()


def busy_verdict(rows: list[dict]) -> list[str]:
    """The limits that a run of `busy_rows` missed, in words."""
    ratio = {
        (row["candidate"], row["busy_processes"]): row["ratio_to"]["sdpa:default"]
        for row in rows
        if row["pass"] == "forward+backward"
    }
    return [
        f"{name} takes {ratio[name, BUSY_PROCESSES]} of SDPA beside {BUSY_PROCESSES} busy processes and "
        f"{ratio[name, 0]} alone, the limit is {BUSY_LIMIT} times as much"
        for name in LIMITS
        if ratio[name, BUSY_PROCESSES] > BUSY_LIMIT * ratio[name, 0]
    ]


def triton_rows(plan: Plan, meter: Meter | None, repeats: int, seconds: float) -> Iterator[dict]:
    """Rows of a Triton run: compilation, the first shape, training steps, other shapes, each within its time budget.

    ``meter`` is None for that of the plan's device; it is made after the compiling processes have ended.
    """
    started = time.monotonic()
    jobs = kernels_of(plan)
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        reasons = [pool.submit(warm, plan.device, plan.dtype, *job) for job in jobs]
        failed = [reason for done in reasons if (reason := done.result())]
    compiled = time.monotonic() - started
    gate(plan.device, plan.dtype, plan.gate, ["triton"])
    yield {"pass": "compilation", "seconds": round(compiled, 1), "failed": failed}
    meter = meter or (Processor() if plan.device == "cpu" else Cuda())
    a, b = torch.randn(2, plan.matmul, plan.matmul, device=plan.device, dtype=plan.dtype).unbind()
    rate = 2 * plan.matmul**3 / statistics.median(meter.seconds(lambda: a @ b) for _ in range(20))
    yield {"pass": f"matmul {plan.matmul}^3", "repeats": 20, "tflop_per_second": round(rate / 1e12, 1)}
    names = [*SDPA, "bilinear:triton", "squared:triton", "bilinear-half:triton", "einsum:published"]
    deadline = started + seconds

    def within(budget: float) -> float:
        return min(deadline, time.monotonic() + budget)

    first, *others = plan.shapes
    yield from operator_rows(names, first, plan.device, plan.dtype, meter, repeats, within(90))
    yield from step_rows(plan, meter, repeats, within(240))
    for shape in others:
        yield from operator_rows(names, shape, plan.device, plan.dtype, meter, repeats, within(60))


def verdict(rows: list[dict]) -> list[str]:
    """The limits that a CPU run missed, in words, from its own rows."""
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
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--gpu", action="store_true", help="measure on a CUDA device")
    mode.add_argument("--busy", action="store_true", help="measure on a busy CPU too, with several threads")
    mode.add_argument("--dry", action="store_true", help="all that --gpu does, interpreted at toy sizes on a CPU")
    parser.add_argument("--repeats", type=int, default=20, help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=540, help="budget of --gpu, default %(default)s")
    parser.add_argument(
        "--out", type=Path, help="folder of the record, default benchmarks/results; without it --dry writes nothing"
    )
    parser.add_argument("--commit", help="commit to record, default that of the repository")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.gpu:
        torch.set_num_threads(1)
    if options.memory:
        print(memory_growth(options.memory))
        return 0
    if options.gpu or options.dry:
        rows = triton_rows(GPU if options.gpu else DRY, None, options.repeats, options.seconds)
    else:
        if options.busy:
            torch.set_num_threads(BUSY_THREADS)
        gate("cpu", torch.float32, ((64, 64, 333), (64, 128, 129)), ["eager", "chunked"])
        rows = busy_rows(options.repeats) if options.busy else cpu_rows(options.repeats)
    about = record.about("attention", device="cuda" if options.gpu else "cpu", commit=options.commit)
    name = {"benchmark": "attention-busy"} if options.busy else {}
    path = None if options.dry and not options.out else record.path(about | name, options.out)
    measured = []
    for row in rows:
        measured.append(row)
        print(json.dumps(about | row), flush=True)
        if path:  # a second run on the same day replaces the first
            path.write_text("".join(json.dumps(about | row) + "\n" for row in measured))
    missed = []
    if not (options.gpu or options.dry):
        missed = busy_verdict(measured) if options.busy else verdict(measured)
    print("\n".join(missed), file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
