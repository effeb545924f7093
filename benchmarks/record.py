"""Facts about the run and the machine that every figure needs, and the file of records. Needs torch alone."""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def about(benchmark: str, *, device: str = "cpu", commit: str | None = None) -> dict:
    """Date, commit (that of the checkout by default), command, versions, and the hardware that was measured."""
    facts = {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or output("git", "-C", ROOT, "rev-parse", "HEAD"),
        "command": " ".join(["python", f"benchmarks/{benchmark}.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
    }
    if device == "cpu":
        threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
        return facts | {"hardware": f"{processor()}, {capability}, {os.cpu_count()} CPUs, {threads} thread"}
    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return facts | {
        "hardware": torch.cuda.get_device_name(),
        "driver": driver[0],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def output(*command: object) -> str:
    """What a command prints; "unknown" if it prints nothing or does not exist."""
    try:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def version(package: str) -> str:
    """Version of an installed package, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """Name of the processor, or its architecture if the system does not tell the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def path(facts: dict, folder: Path | None = None) -> Path:
    """The file ``DATE_NAME_HARDWARE.jsonl`` in ``folder``, by default ``benchmarks/results``; makes the folder."""
    folder = folder or ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    hardware = "-".join(facts["hardware"].split(",")[0].replace("(R)", "").replace("@", "").split())
    return folder / f"{facts['date']}_{facts['benchmark']}_{hardware}.jsonl"


def write(facts: dict, rows: Iterable[dict]) -> list[dict]:
    """Append each row, with the facts, to the file as soon as it comes, and print it; returns the rows."""
    written = []
    with path(facts).open("a") as file:
        for row in rows:
            line = json.dumps({**facts, **row})
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()
            written.append(row)
    return written
