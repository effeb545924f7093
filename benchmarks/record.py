"""What a figure means nothing without, and the file it is written to."""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def about(benchmark: str) -> dict:
    """Date, commit, command, hardware and versions of this run."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or "unknown",
        "command": " ".join(["python", f"benchmarks/{benchmark}.py", *sys.argv[1:]]),
        "hardware": f"{processor()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} thread",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """Name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write(facts: dict, rows: Iterable[dict]) -> list[dict]:
    """Append each row, as it comes, with the facts to benchmarks/results/DATE_NAME_HARDWARE.jsonl; returns them."""
    label = "-".join(facts["hardware"].split(",")[0].replace("(R)", "").replace("@", "").split())
    path = ROOT / "benchmarks" / "results" / f"{facts['date']}_{facts['benchmark']}_{label}.jsonl"
    path.parent.mkdir(exist_ok=True)
    written = []
    with path.open("a") as file:
        for row in rows:
            line = json.dumps({**facts, **row})
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()
            written.append(row)
    return written
