"""Train and compare five arms at nano size, with several seeds and two horizons each, on one CPU core.

Trains ``{swiglu, bilinear} x {softmax, bilinear}`` and bilinear/bilinear with ``d_qk = d_head / 2`` on the embedded
corpus: one run of 300 steps per arm and seed, and a 200-step horizon branched off its constant-rate phase. The recipe
is nano's (``tnlm-train run``); a seed draws both the initial weights and the order of the data, shared between arms.

    python scripts/small_replication.py train                      # about 2.5 CPU-minutes per arm and seed; resumes
    python scripts/small_replication.py train --seeds 0 1 --arms swiglu+softmax bilinear+bilinear
    python scripts/small_replication.py summarise                  # curves.csv and one compare.json per variant
"""

import argparse
import csv
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tnlm.training.config import TrainConfig
from tnlm.training.presets import preset
from tnlm.training.run.branch import branch_config
from tnlm.training.run.metrics import read_metrics

BASE = "swiglu+softmax"
ARMS = {
    BASE: {"mlp": "swiglu", "attention": "softmax"},
    "bilinear+softmax": {"mlp": "bilinear", "attention": "softmax"},
    "swiglu+bilinear": {"mlp": "swiglu", "attention": "bilinear"},
    "bilinear+bilinear": {"mlp": "bilinear", "attention": "bilinear"},
    "bilinear+bilinear-matched": {"mlp": "bilinear", "attention": "bilinear", "matched": True},
}
SHORT, LONG = 200, 300
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "small_replication"


def config_of(root: Path, arm: str, seed: int) -> TrainConfig:
    """Configuration of the 300-step run of one arm and seed."""
    return preset("nano", **ARMS[arm]).replace(
        seed=seed,
        steps=LONG,
        val_every=25,
        save_every=100,
        keep_every=100,
        keep_last=1,
        sample_tokens=0,
        threads=1,
        log_every=50,
        out=str(root / f"{arm}-s{seed}-n{LONG}"),
    )


def short_folder(root: Path, arm: str, seed: int) -> Path:
    return root / f"{arm}-s{seed}-n{SHORT}"


def finished(folder: Path) -> bool:
    return any(event["kind"] == "end" for event in read_metrics(folder / "metrics.jsonl"))


def train_all(root: Path, arms: list[str], seeds: list[int]) -> None:
    """Train all arms of one seed before the next, so that an interrupted call leaves complete pairs."""
    from tnlm.training import train

    for seed in seeds:
        for arm in arms:
            trunk = config_of(root, arm, seed)
            if not finished(trunk.folder):
                train(trunk)
            short = short_folder(root, arm, seed)
            if not finished(short):
                train(branch_config(trunk.folder, steps=SHORT, out=str(short)))


def summarise(root: Path) -> None:
    """Write every validation curve, and the comparison of each arm with the base."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "curves.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["group", "run", "schedule_steps", "step", "val_loss"])
        for arm in ARMS:
            for folder in folders_of(root, arm):
                horizon = int(folder.name.rpartition("-n")[2])
                seed = folder.name.rpartition("-n")[0].rpartition("-s")[2]
                events = [event for event in read_metrics(folder / "metrics.jsonl") if event["kind"] == "val"]
                rows.writerows([f"{arm}@{horizon}", seed, horizon, e["step"], f"{e['loss']:.6f}"] for e in events)
    from tnlm.training.cli import main

    base = [str(folder) for folder in folders_of(root, BASE)]
    for arm in ARMS:
        if arm != BASE:
            variant = [str(folder) for folder in folders_of(root, arm)]
            code = main(["compare", "--base", *base, "--variant", *variant, "--out", str(RESULTS / arm)])
            if code:
                sys.exit(code)


def folders_of(root: Path, arm: str) -> list[Path]:
    """Folders of the finished runs of one arm."""
    return sorted(path for path in root.glob(f"{arm}-s*-n*") if finished(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["train", "summarise"])
    parser.add_argument("--root", type=Path, default=Path("runs/small_replication"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    if args.action == "train":
        train_all(args.root, args.arms, args.seeds)
    else:
        summarise(args.root)


if __name__ == "__main__":
    main()
