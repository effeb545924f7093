"""Loading a checkpoint of the released 546M shape: time against ``torch.load`` of the same file, and peak memory.

    python benchmarks/loading.py [--repeats N] [--folder DIR]

The file (2.07 GB, random weights, the released layout and dtypes) is written once and read from the page cache. Each
reading has a process of its own, of one thread unless OMP_NUM_THREADS says otherwise; ours and ``torch.load`` take
turns. Memory is anonymous memory (``RssAnon``, sampled), which is what a process must own; pages of the mapped file are
not counted. Then the file is overwritten with zeros, and the loaded parameters must not change. Results are appended as
JSON lines to benchmarks/results/.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import processes
import record
import torch

import tnlm
from tnlm.checkpoints.checkpoint import to_published

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["tests/checkpoints/test_checkpoint.py", "tests/checkpoints/test_checkpoint_layouts.py"]
CONFIG = tnlm.ModelConfig.released()
HOWS = ("torch.load", "float32", "checkpoint")
TIME_LIMIT, MEMORY_LIMIT = 1.3, 1.15
"""Of ``torch.load``, and of the float32 model."""


def write_checkpoint(folder: Path) -> None:
    """Write a folder in the released layout, random: 545,902,902 parameters, of which 57,970,998 in bf16."""
    generator = torch.Generator().manual_seed(0)
    shapes = tnlm.Transformer(CONFIG, device="meta").state_dict()
    state = {}
    for name, t in shapes.items():
        half = name == "embed.w_e" or name.endswith(("lambdas", "lamb", "bias"))
        w = torch.randn(t.shape, generator=generator) / t.shape[-1] ** 0.5
        state[name] = w.bfloat16() if half else w
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(to_published(state, CONFIG), folder / "pytorch_model.bin")
    flags = {"squared_mlp": False, "bilinear": True, "gated": False, "squared_attn": True, "bilinear_attn": True}
    sizes = {"vocab_size": 50304, "n_layer": 18, "n_head": 9, "n_embd": 1152, "expansion_factor": 4, "step": 9726}
    (folder / "config.json").write_text(json.dumps({**sizes, **flags}))


def read(how: str, folder: Path) -> object:
    """The contents of the checkpoint, read by ``torch.load``, or by ``tnlm.load`` as float32 or as saved."""
    if how == "torch.load":
        return torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return tnlm.load(folder, dtype="checkpoint" if how == "checkpoint" else None)


def measure_time(how: str, folder: Path) -> dict[str, float]:
    """Wall and CPU seconds of one reading in this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    kept = read(how, folder)
    seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    assert kept is not None
    return seconds


def measure_memory(how: str, folder: Path) -> int:
    """Peak anonymous memory of one reading above the start, in bytes. Sampling slows it, so it is not timed."""
    start = peak = processes.memory("RssAnon")
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, processes.memory("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    kept = read(how, folder)
    done.set()
    sampler.join()
    assert kept is not None
    return max(peak, processes.memory("RssAnon")) - start


def owns_memory(folder: Path) -> bool:
    """Whether the loaded parameters keep their values when the file is overwritten."""
    model = tnlm.load(folder)
    before = [p.detach().double().sum().item() for p in model.parameters()]
    path = folder / "pytorch_model.bin"
    with path.open("r+b") as file:
        zeros = bytes(2**24)
        for _ in range(path.stat().st_size // len(zeros)):
            file.write(zeros)
    return before == [p.detach().double().sum().item() for p in model.parameters()]


def measured(what: str, folder: Path) -> str:
    """One measurement, as JSON, in a process of its own."""
    return processes.run_again(__file__, "--measure", what, "--folder", str(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the 2 GB file goes (default: a temporary folder)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure == "write":
        write_checkpoint(options.folder)
        return 0
    if options.measure == "ownership":
        print(json.dumps(owns_memory(options.folder)))
        return 0
    if options.measure:
        what, how = options.measure.split(":")
        print(json.dumps({"time": measure_time, "memory": measure_memory}[what](how, options.folder)))
        return 0

    subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *TESTS], cwd=ROOT, check=True, stdout=sys.stderr)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        measured("write", folder)
        times: dict[str, list[dict[str, float]]] = {how: [] for how in HOWS}
        for _ in range(options.repeats):
            for how in HOWS:
                times[how].append(json.loads(measured(f"time:{how}", folder)))
        peaks = {how: json.loads(measured(f"memory:{how}", folder)) for how in HOWS}
        size = (folder / "pytorch_model.bin").stat().st_size
        owns = json.loads(measured("ownership", folder))
    records = [summary(how, times, peaks[how]) for how in HOWS]
    torch.set_num_threads(1)
    facts = {
        **record.about("loading"),
        "config": "released 18 layers, 9 heads, width 1152, bilinear/bilinear",
        "n_params": CONFIG.n_params,
        "file_bytes": size,
        "parameters_own_their_memory": owns,
    }
    record.write(facts, records)
    ours = next(r for r in records if r["how"] == "float32")
    good = ours["cpu_over_torch_load"] <= TIME_LIMIT and ours["memory_over_float32_model"] <= MEMORY_LIMIT and owns
    return 0 if good else 1


def summary(how: str, times: dict[str, list[dict[str, float]]], peak: int) -> dict:
    """The row of one way of reading: medians and spreads. The limit is on CPU time, which other load disturbs least."""
    row: dict[str, object] = {"how": how, "repeats": len(times[how])}
    for clock in ("cpu", "wall"):
        seconds, base = ([run[clock] for run in times[name]] for name in (how, "torch.load"))
        row[f"{clock}_seconds"] = round(statistics.median(seconds), 3)
        row[f"{clock}_spread"] = round(max(seconds) - min(seconds), 3)
        row[f"{clock}_over_torch_load"] = round(statistics.median(seconds) / statistics.median(base), 3)
    memory = {"peak_anonymous_bytes": peak, "memory_over_float32_model": round(peak / (4 * CONFIG.n_params), 3)}
    return {**row, **memory}


if __name__ == "__main__":
    sys.exit(main())
