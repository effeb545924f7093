"""Cost of one training step by phase, against a plain re-statement of the published step on the same batches.

    OMP_NUM_THREADS=1 python benchmarks/train_step.py [--repeats 15]

The plain step is written from the formulas: attention by einsum over T x T, one float32 Newton-Schulz per matrix,
torch's fused Adam. Gate first: from the same weights both must give the same losses, to 1e-6 for two updates and to
5e-4 for five (Newton-Schulz magnifies rounding). Then updates of both alternate; figures are medians of process time
on one thread, in seconds, so that other load on the machine matters little. The overhead is what the loop does outside
forward, backward and optimiser: loader, gradient norm, agreement, log. Results are appended as JSON lines to
benchmarks/results/.
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tnlm.config import FP32_EPS
from tnlm.kernels import bilinear_attention
from tnlm.training.distributed import World
from tnlm.training.loop import Trainer
from tnlm.training.metrics import MetricsLog, Progress, Tracking
from tnlm.training.presets import TrainConfig, preset

ROOT = Path(__file__).resolve().parents[1]
GATE_STEPS = 5


class Clock:
    """Process seconds by phase of one update."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, phase: str, call: Callable) -> Callable:
        def run(*args, **kwargs):
            began = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[phase] = self.seconds.get(phase, 0.0) + time.process_time() - began

        return run


def published_attention(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor) -> Tensor:
    """``(batch, seq, n_head, d)``: both score matrices, their masked product, and its values."""
    d, seq = q1.shape[-1], q1.shape[1]
    scores = torch.einsum("bqhd,bkhd->bhqk", q1, k1) / d * (torch.einsum("bqhd,bkhd->bhqk", q2, k2) / d)
    pattern = scores.masked_fill(~torch.ones(seq, seq, dtype=torch.bool).tril(), 0)
    return torch.einsum("bhqk,bkhd->bqhd", pattern, v)


class PlainStep:
    """The published step for bilinear MLP and attention, from a copy of the trainer's weights."""

    def __init__(self, trainer: Trainer, config: TrainConfig) -> None:
        self.config, self.schedule = config, trainer.optimizers.schedule
        self.w = {n: p.detach().clone().requires_grad_() for n, p in trainer.model.named_parameters()}
        matrices = [n for n, p in self.w.items() if n.startswith("blocks.") and p.ndim == 2]
        self.momenta = {n: torch.zeros_like(self.w[n]) for n in matrices}
        rest = [p for n, p in self.w.items() if n not in self.momenta and not n.startswith(("embed", "unembed"))]
        groups = [
            {"params": [self.w["embed.w_e"]], "lr": config.lr_embed},
            {"params": [self.w["unembed.w_u"]], "lr": config.lr_head},
            {"params": rest, "lr": config.lr_scalar},
        ]
        self.adam = torch.optim.Adam(groups, betas=(config.beta1, config.beta2), eps=config.adam_eps, fused=True)
        self.rates = [group["lr"] for group in groups]
        half = config.model.d_qk // 2
        angle = torch.outer(
            torch.arange(config.seq, dtype=torch.float32), config.model.rotary_base ** (-torch.arange(half) / half)
        )
        self.cos, self.sin = (t.to(torch.bfloat16)[:, None] for t in (angle.cos(), angle.sin()))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        w, c = self.w, self.config.model
        x = x0 = F.rms_norm(w["embed.w_e"][inputs], (c.d_model,), eps=FP32_EPS)
        first = None
        for i in range(c.n_layer):
            p = {n.removeprefix(f"blocks.{i}."): t for n, t in w.items() if n.startswith(f"blocks.{i}.")}
            x = p["lambdas"][0] * x + p["lambdas"][1] * x0
            h = F.rms_norm(x, (c.d_model,), eps=FP32_EPS)
            v = self.heads(h, p["attn.w_v"])
            first = v if first is None else first
            v = (1 - p["attn.lamb"]) * v + p["attn.lamb"] * first
            z = published_attention(*(self.turned(h, p[f"attn.w_{n}"]) for n in ("q1", "k1", "q2", "k2")), v)
            x = x + z.flatten(2) @ p["attn.w_o"].mT
            h = F.rms_norm(x, (c.d_model,), eps=FP32_EPS)
            x = x + ((h @ p["mlp.w_l"].mT) * (h @ p["mlp.w_r"].mT)) @ p["mlp.w_d"].mT + p["mlp.bias"]
        logits = F.rms_norm(x, (c.d_model,), eps=FP32_EPS) @ w["unembed.w_u"].mT
        logits = c.logit_softcap * torch.tanh(logits / c.logit_softcap)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def heads(self, x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.mT).unflatten(-1, (self.config.model.n_head, -1))

    def turned(self, x: Tensor, w: Tensor) -> Tensor:
        y = self.heads(x, w)
        a, b = F.rms_norm(y, (y.shape[-1],), eps=FP32_EPS).chunk(2, -1)
        return torch.cat([a * self.cos + b * self.sin, b * self.cos - a * self.sin], -1)

    @torch.no_grad()
    def optimise(self, step: int) -> None:
        factor, momentum = self.schedule.lr_factor(step), self.schedule.momentum(step)
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.adam.step()
        for name, buffer in self.momenta.items():
            p = self.w[name]
            buffer.mul_(momentum).add_(p.grad)
            update = newton_schulz(p.grad + momentum * buffer)
            p.sub_(update, alpha=self.config.lr_matrix * factor * max(1, p.shape[0] / p.shape[1]) ** 0.5)
        for p in self.w.values():
            p.grad = None

    def step(self, step: int, inputs: Tensor, targets: Tensor, clock: Clock) -> float:
        loss = clock.timed("forward", self.forward)(inputs, targets)
        clock.timed("backward", loss.backward)()
        clock.timed("optimiser", self.optimise)(step)
        return loss.item()


def newton_schulz(u: Tensor) -> Tensor:
    """Five iterations in float32, as published; Jordan et al. 2024."""
    x = u / (u.norm() + 1e-7)
    x = x.mT if u.shape[0] > u.shape[1] else x
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if u.shape[0] > u.shape[1] else x


def measure_nano(repeats: int, *, compiled: bool) -> dict:
    """Medians by phase of both steps, after the gate."""
    with tempfile.TemporaryDirectory() as folder:
        config = preset("nano").replace(
            out=f"{folder}/run", threads=1, ns_dtype="float32", compile=compiled, sample_tokens=0
        )
        trainer = Trainer(config, world=World.from_environment({}), progress=False)
        trainer.folder.mkdir(parents=True, exist_ok=True)
        trainer.log = MetricsLog(trainer.folder / "metrics.jsonl")
        trainer.tracking = Tracking("none", project="benchmark", run="nano", config={})
        trainer.progress = Progress(steps=config.steps, start=0, enabled=False)
        plain = PlainStep(trainer, config)
        batches = _tap(trainer)
        clock = Clock()
        trainer.parallel = clock.timed("forward", trainer.parallel)
        trainer.optimizers.step = clock.timed("optimiser", trainer.optimizers.step)
        backward = Tensor.backward
        ours: list[dict[str, float]] = []
        theirs: list[dict[str, float]] = []
        for step in range(GATE_STEPS + repeats):
            clock.seconds = {}
            Tensor.backward = clock.timed("backward", backward)
            began = time.process_time()
            loss = trainer._update()["loss"]
            ours.append({**clock.seconds, "total": time.process_time() - began})
            Tensor.backward = backward
            inputs, targets = batches.pop()
            other = Clock()
            began = time.process_time()
            expected = plain.step(step, inputs, targets, other)
            theirs.append({**other.seconds, "total": time.process_time() - began})
            if step < GATE_STEPS and abs(loss - expected) > (1e-6 if step < 2 else 5e-4) * expected:
                sys.exit(f"no timing: the losses of update {step} differ, {loss:.7f} and {expected:.7f}")
        trainer.inputs.loader.close()
        trainer.log.close()
    kept = [_medians(rows[GATE_STEPS:]) for rows in (ours, theirs)]
    shares = [1 - sum(row[k] for k in ("forward", "backward", "optimiser")) / row["total"] for row in ours[GATE_STEPS:]]
    return {
        "case": f"nano step, bilinear MLP and attention{', torch.compile' if compiled else ''}",
        "tnlm": kept[0],
        "published": kept[1],
        "published_over_tnlm": kept[1]["total"] / kept[0]["total"],
        "overhead_share": statistics.median(shares),
    }


def _tap(trainer: Trainer) -> list[tuple[Tensor, Tensor]]:
    """The batches that the trainer reads, for the other step."""
    seen: list[tuple[Tensor, Tensor]] = []
    read = trainer.inputs.loader.next_step

    def tapped():
        windows = read()
        wide = windows[0].long()
        seen.append((wide[:, :-1], wide[:, 1:]))
        return windows

    trainer.inputs.loader.next_step = tapped
    return seen


def measure_attention(batch: int, seq: int, n_head: int, d: int, repeats: int) -> dict:
    """Forward and backward of the attention operator alone, interleaved."""
    torch.manual_seed(0)
    shape = (batch, seq, n_head, d)
    inputs = [F.normalize(torch.randn(shape), dim=-1).mul_(d**0.5).requires_grad_() for _ in range(4)]
    inputs.append(torch.randn(shape, requires_grad=True))
    candidates = {"published": published_attention, "tnlm": bilinear_attention}
    outputs = {name: call(*inputs) for name, call in candidates.items()}
    torch.testing.assert_close(outputs["tnlm"], outputs["published"], rtol=1e-4, atol=1e-4)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats + 1):
        for name, call in candidates.items():
            began = time.process_time()
            torch.autograd.grad(call(*inputs).sum(), inputs)
            seconds[name].append(time.process_time() - began)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "case": f"attention phase, batch {batch}, seq {seq}, {n_head} heads of {d}, forward + backward",
        **medians,
        "published_over_tnlm": medians["published"] / medians["tnlm"],
    }


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    facts = {
        "benchmark": "train_step",
        "date": date,
        "commit": commit,
        "command": f"python benchmarks/train_step.py --repeats {repeats}",
        "hardware": f"{platform.machine()}, 1 thread",
        "torch": torch.__version__,
        "repeats": repeats,
    }
    target = ROOT / "benchmarks" / "results" / f"{date}_train_step_{platform.machine()}-cpu.jsonl"
    with target.open("a") as file:
        for result in (
            measure_nano(repeats, compiled=False),
            measure_nano(repeats, compiled=True),
            measure_attention(4, 1024, 4, 128, max(5, repeats // 2)),
            measure_attention(8, 128, 4, 32, 3 * repeats),
        ):
            line = json.dumps({**facts, **result})
            print(line, flush=True)
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
