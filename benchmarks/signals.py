"""Test that a run of two ranks leaves a complete checkpoint when it is stopped as launchers and schedulers do it.

    python benchmarks/signals.py [--repeats N]

Each run trains a tiny model on two gloo ranks under torchrun and is signalled with SIGTERM after its first steps: the
launcher alone; the workers alone; or the workers and then the launcher, 0, 5, 50 and 500 ms later (the launcher signals
its workers once more, which is what Slurm and terminals cause too). Results are appended as JSON lines to
benchmarks/results/; the exit code is 1 if a run left no complete checkpoint, or other work than its checkpoint says.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from tnlm.training.data.toy import write_cycles
from tnlm.training.run import checkpointing
from tnlm.training.run.metrics import read_metrics

MODES: dict[str, tuple[bool, float | None]] = {
    "launcher": (False, 0.0),
    "workers": (True, None),
    **{f"both, {ms} ms apart": (True, ms / 1000) for ms in (0, 5, 50, 500)},
}
"""Whether the workers are signalled, and how many seconds later the launcher is (None: never)."""
SIZES = "--model.d-model 8 --model.n-layer 1 --model.n-head 2 --model.n-ctx 8 --model.d-vocab 16".split()
STEPS = "--batch 4 --micro-batch 2 --val-tokens 64 --steps 1000000 --val-every 1000000 --log-every 1000000".split()


def launch(folder: Path, out: Path) -> subprocess.Popen[str]:
    """Two ranks under torchrun that train until they are stopped."""
    data = folder / "data"
    if not data.exists():
        with warnings.catch_warnings(action="ignore"):  # that validation repeats training does not matter here
            write_cycles(data, seq=8, d_vocab=16, period=(2, 4), train_sequences=100_000, val_sequences=20)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = ["-m", "tnlm.training.cli", "run", "--data", str(data), "--tokenizer", "none", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [*torchrun, *run, *SIZES, *STEPS], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def children(pid: int) -> list[int]:
    """Ids of the processes that ``pid`` started."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in table.splitlines() if int(line.split()[1]) == pid]


def wait_for_steps(process: subprocess.Popen[str], out: Path, steps: int) -> None:
    """Return once the run has done ``steps`` updates.

    Raises:
        RuntimeError: It ended before.
    """
    while max((event["step"] for event in read_metrics(out / "metrics.jsonl")), default=0) < steps:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended before it was signalled: {process.communicate()[1][-2000:]}")
        time.sleep(0.05)


def interrupt(folder: Path, out: Path, mode: str) -> dict[str, object]:
    """Start a run, signal it, wait for its end; returns a row about the checkpoint and log that it left."""
    workers_too, gap = MODES[mode]
    process = launch(folder, out)
    wait_for_steps(process, out, 3)
    workers = children(process.pid)
    began = time.monotonic()
    if workers_too:
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
    if gap is not None:
        time.sleep(gap)
        process.send_signal(signal.SIGTERM)
    errors = process.communicate()[1]
    path, skipped = checkpointing.find_latest(out)
    steps = [event["step"] for event in read_metrics(out / "metrics.jsonl") if event["kind"] == "train"]
    return {
        "mode": mode,
        "workers": len(workers),
        "checkpoint": path.name if path else None,
        "skipped": skipped,
        "step_is_last_of_log": path is not None and path.name == f"step_{steps[-1]:06d}",
        "latest": (out / "latest").read_text().strip() if path else None,
        "exit_code": process.returncode,
        "message": f"stopped at step {steps[-1]}" in errors,
        "seconds": round(time.monotonic() - began, 2),
    }


def is_whole(row: dict[str, object]) -> bool:
    """Whether one complete checkpoint of the last step was left, ``latest`` names it, and nothing lies beside it."""
    named = row["latest"] == f"checkpoints/{row['checkpoint']}"
    return bool(row["checkpoint"] and row["step_is_last_of_log"] and named and not row["skipped"])


def measure(repeats: int) -> Iterator[dict[str, object]]:
    """One row per run, in every mode ``repeats`` times; ``whole`` is the verdict of :func:`is_whole`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for repeat in range(repeats):
            for mode in MODES:
                out = folder / f"{repeat}-{mode.replace(' ', '-').replace(',', '')}"
                row = interrupt(folder, out, mode)
                yield {"repeat": repeat, **row, "whole": is_whole(row)}


def main() -> int:
    import record  # not at the top: a test loads this file from another folder

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    rows = record.write(record.about("signals"), measure(args.repeats))
    lost = [row for row in rows if not row["whole"]]
    print(json.dumps({"runs": len(rows), "whole": len(rows) - len(lost)}))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
