"""Test that training killed with SIGKILL at random moments, again and again, ends as if it had never been killed.

    python benchmarks/kills.py [--kills N] [--seed N]

A run that saves at every step is started, killed up to a second after its first new checkpoint, and started again. When
it finishes, its losses and the bits of its weights are compared with those of an uninterrupted run, and nothing may lie
beside its checkpoints. After each kill a complete checkpoint must be there, with the contents its hashes say, no older
than the one before. One JSON line per kill and per finished run is appended to benchmarks/results/; the exit code is 1
if one of them is not whole.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import record

from tnlm.checkpoints.local import find_defect
from tnlm.output.files import sha256
from tnlm.training.data.toy import write_cycles
from tnlm.training.run.checkpointing import complete_steps
from tnlm.training.run.metrics import read_metrics

STEPS = 200
SIZES = "--model.d-model 8 --model.n-layer 1 --model.n-head 2 --model.n-ctx 8 --model.d-vocab 16".split()
FLAGS = f"--batch 4 --micro-batch 2 --val-tokens 64 --steps {STEPS} --val-every 100 --save-every 1 --threads 1".split()


def launch(data: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start a training run, or resume it."""
    command = [sys.executable, "-m", "tnlm.training.cli", "run", "--data", str(data), "--tokenizer", "none"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, *SIZES, *FLAGS, "--out", str(out)], env=environment, **quiet)


def newest(out: Path) -> int:
    """Step of the newest complete checkpoint whose contents have the recorded hashes; 0 if there is none."""
    steps = [0, *complete_steps(out)]
    return max(s for s in steps if s == 0 or not find_defect(out / "checkpoints" / f"step_{s:06d}", contents=True))


def what_is_left(out: Path) -> tuple[list[tuple[int, float]], str, list[str]]:
    """Losses, sha256 of the trained weights, and temporary files that a finished run should not have."""
    losses = [(e["step"], e["loss"]) for e in read_metrics(out / "metrics.jsonl") if e["kind"] == "train"]
    weights = sha256(out / (out / "latest").read_text().strip() / "model.safetensors")
    return losses, weights, sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.name.startswith("."))


def measure(kills: int, rng: random.Random, folder: Path) -> Iterator[dict[str, object]]:
    """One row per kill and one per finished run; ``whole`` says whether all is as it should be."""
    data = folder / "data"
    with warnings.catch_warnings(action="ignore"):  # that validation repeats training does not matter here
        write_cycles(data, seq=8, d_vocab=16, period=(2, 4), train_sequences=100_000, val_sequences=20)
    launch(data, folder / "whole").wait()
    expected = what_is_left(folder / "whole")
    done = 0
    for run in itertools.count():
        out = folder / f"run{run}"
        while not (out / "latest").exists() or newest(out) < STEPS:
            began, process = newest(out), launch(data, out)
            try:
                while process.poll() is None and (done == kills or max([0, *complete_steps(out)]) <= began):
                    time.sleep(0.05)
                time.sleep(rng.uniform(0, 1))
            finally:
                process.kill()
            if process.wait() == 0:
                continue
            done += 1
            after = newest(out)
            leftovers = [p.name for p in (out / "checkpoints").iterdir() if p.name.startswith(".")]
            yield {"kill": done, "run": run, "from": began, "to": after, "left": leftovers, "whole": after >= began}
        yield {"finished": run, "whole": what_is_left(out) == expected and expected[2] == []}
        if done == kills:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = record.write(record.about("kills"), measure(args.kills, random.Random(args.seed), Path(name)))
    lost = [row for row in rows if not row["whole"]]
    print(json.dumps({"rows": len(rows), "whole": len(rows) - len(lost)}))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
