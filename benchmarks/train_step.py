"""Cost of one training step by phase, against a plain version of the published step on the same batches.

    OMP_NUM_THREADS=1 python benchmarks/train_step.py [--repeats 25]

The plain step has the structure of the published script: attention by einsum over T x T, one Newton-Schulz per matrix
(``a X + b B + c A B`` with ``B = A X``) in float32, one flat buffer of updates, torch's fused Adam. First both must
agree, from weights without zeros: the first update must have the same loss to 1e-6, each gradient to 1e-4 and the
change of each matrix to 1e-2 of its norm (five Newton-Schulz steps magnify rounding by 500), and the next four the same
loss to 5e-4. Then both take the same batches in turns of six updates. The first of a turn is left out: it starts with
the other's data in the caches, which does not happen in a run. Figures are medians of process time on one thread, in
seconds, with the quartiles of the total, so that other load on the machine matters little. ``attention`` is the part of
forward and backward between the five operands of attention and its output, told apart in the wide case; compiled code
has no such part (the plain one packs its operands there, tnlm's rotation leaves queries and keys packed). The overhead
is what the loop does outside forward, backward and optimiser: loader, gradient norm, agreement, log. Where tnlm alone
is compiled, the plain step is as it is; the published script compiles on its GPUs, so one row compiles both. Results
are appended as JSON lines to benchmarks/results/; exit code 1 when a limit is missed.

Source: train_gpt2.py of loganriggs/modded-nanogpt at d5ce2de.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import record
import torch
import torch.nn.functional as F
from torch import Tensor

import tnlm.attention
from tnlm.config import FP32_EPS, ModelConfig
from tnlm.training.config import TrainConfig
from tnlm.training.presets import preset
from tnlm.training.run.distributed import World
from tnlm.training.run.loop import Trainer
from tnlm.training.run.metrics import MetricsLog, Progress, Tracking
from tnlm.transformer import Transformer

GATE_STEPS = 5
PHASES = ("forward", "backward", "optimiser")
TURN = 5
"""Updates that count in each turn, after one that does not."""
NANO_LIMIT, ATTENTION_LIMIT, OVERHEAD_LIMIT = 1.3, 2.0, 0.03
"""Least ratio of plain to tnlm for a whole nano step (eager and compiled), and for attention in the wide case; largest
share of the loop itself."""


class Clock:
    """Process seconds of one update, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = 0.0

    def start(self) -> None:
        self._began = time.process_time()

    def stop(self, phase: str) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.process_time() - self._began

    def timed(self, phase: str, call: Callable) -> Callable:
        def run(*args, **kwargs):
            began = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[phase] = self.seconds.get(phase, 0.0) + time.process_time() - began

        return run

    def attention(self, call: Callable) -> Callable:
        """``call`` with its forward and its part of the backward pass counted as "attention"."""

        def run(*operands: Tensor, **kwargs) -> Tensor:
            operands = _Mark.apply(lambda: self.stop("attention"), *operands)
            self.start()
            out = call(*operands, **kwargs)
            self.stop("attention")
            return _Mark.apply(self.start, out)[0]

        return run


class _Mark(torch.autograd.Function):
    """The identity, whose backward calls ``event`` once all gradients have come."""

    @staticmethod
    def forward(ctx: Any, event: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.event = event
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.event()
        return None, *grads


def published_attention(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor) -> Tensor:
    """Bilinear attention ``(batch, seq, n_head, d)`` by both score matrices and their masked product, as published."""
    d, seq = q1.shape[-1], q1.shape[1]
    first = torch.einsum("bqhd,bkhd->bhqk", q1, k1)
    second = torch.einsum("bqhd,bkhd->bhqk", q2, k2)
    pattern = (first / d) * (second / d)
    future = torch.ones(seq, seq, dtype=torch.bool).tril().logical_not()
    z = torch.einsum("bhqk,bkhd->bhqd", pattern.masked_fill_(future, 0), v)
    return z.transpose(1, 2).contiguous()


def newton_schulz(u: Tensor) -> Tensor:
    """Five Newton-Schulz iterations, as published except for the dtype, float32. Source: Jordan et al. 2024."""
    x = u / (u.norm() + 1e-7)
    x = x.mT if u.shape[0] > u.shape[1] else x
    for _ in range(5):
        a = x @ x.mT
        b = a @ x
        x = 3.4445 * x - 4.7750 * b + 2.0315 * a @ b
    return x.mT if u.shape[0] > u.shape[1] else x


class PlainStep:
    """The published step for bilinear MLP and attention, from a copy of the trainer's weights."""

    def __init__(self, trainer: Trainer, config: TrainConfig, *, compiled: bool) -> None:
        self.config, self.schedule = config, trainer.optimizers.schedule
        self.w = {n: p.detach().clone().requires_grad_() for n, p in trainer.model.named_parameters()}
        matrices = [n for n, p in self.w.items() if n.startswith("blocks.") and p.ndim == 2]
        self.momenta = {n: torch.zeros_like(self.w[n]) for n in matrices}
        rest = [p for n, p in self.w.items() if n not in self.momenta and not n.startswith(("embed", "unembed"))]
        groups = (
            ([self.w["embed.w_e"]], config.lr_embed),
            ([self.w["unembed.w_u"]], config.lr_head),
            (rest, config.lr_scalar),
        )
        betas = (config.beta1, config.beta2)
        self.adams = [torch.optim.Adam(p, lr=lr, betas=betas, eps=config.adam_eps, fused=True) for p, lr in groups]
        self.rates = [lr for _, lr in groups]
        half = config.model.d_qk // 2
        angle = torch.outer(
            torch.arange(config.seq, dtype=torch.float32), 1.0 / config.model.rotary_base ** (torch.arange(half) / half)
        )
        self.cos, self.sin = (t.to(torch.bfloat16)[:, None] for t in (angle.cos(), angle.sin()))
        self.attention = published_attention
        self.loss, self.newton_schulz = self.forward, newton_schulz
        if compiled:
            self.loss, self.newton_schulz = torch.compile(self.forward), torch.compile(newton_schulz)

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
            z = self.attention(*(self.turned(h, p[f"attn.w_{n}"]) for n in ("q1", "k1", "q2", "k2")), v)
            x = x + z.flatten(2) @ p["attn.w_o"].mT
            h = F.rms_norm(x, (c.d_model,), eps=FP32_EPS)
            x = x + (((h @ p["mlp.w_l"].mT) * (h @ p["mlp.w_r"].mT)) @ p["mlp.w_d"].mT + p["mlp.bias"])
        logits = F.rms_norm(x, (c.d_model,), eps=FP32_EPS) @ w["unembed.w_u"].mT
        logits = c.logit_softcap * torch.tanh(logits / c.logit_softcap)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def heads(self, x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.mT).unflatten(-1, (self.config.model.n_head, -1))

    def turned(self, x: Tensor, w: Tensor) -> Tensor:
        y = self.heads(x, w)
        a, b = F.rms_norm(y, (y.shape[-1],), eps=FP32_EPS).chunk(2, -1)
        return torch.cat([a * self.cos + b * self.sin, a * (-self.sin) + b * self.cos], -1)

    @torch.no_grad()
    def optimise(self, step: int) -> None:
        factor, momentum = self.schedule.lr_factor(step), self.schedule.momentum(step)
        for p in self.w.values():
            p.grad /= self.config.batch // self.config.micro_batch
        for adam, rate in zip(self.adams, self.rates, strict=True):
            adam.param_groups[0]["lr"] = rate * factor
            adam.step()
        flat, place = torch.zeros(sum(buffer.numel() for buffer in self.momenta.values())), 0
        for name, buffer in self.momenta.items():
            p = self.w[name]
            buffer.mul_(momentum).add_(p.grad)
            update = self.newton_schulz(p.grad.add(buffer, alpha=momentum))
            update = update * max(1, p.shape[0] / p.shape[1]) ** 0.5
            flat[place : place + p.numel()] = update.flatten()
            place += p.numel()
        for name, update in zip(self.momenta, flat.split([b.numel() for b in self.momenta.values()]), strict=True):
            self.w[name].sub_(update.view_as(self.w[name]), alpha=self.config.lr_matrix * factor)
        for p in self.w.values():
            p.grad = None

    def step(self, step: int, inputs: Tensor, targets: Tensor, clock: Clock) -> float:
        loss = clock.timed("forward", self.loss)(inputs, targets)
        clock.timed("backward", loss.backward)()
        clock.timed("optimiser", self.optimise)(step)
        return loss.item()


class Pair:
    """tnlm's step, as its training loop runs it, and the plain one, with the same weights and batches."""

    def __init__(self, config: TrainConfig, *, plain_compiled: bool, attention_shows: bool) -> None:
        self.attention_shows = attention_shows
        self.trainer = Trainer(config, world=World.from_environment({}), initial=_filled(config), progress=False)
        self.trainer.folder.mkdir(parents=True, exist_ok=True)
        self.trainer.log = MetricsLog(self.trainer.folder / "metrics.jsonl")
        self.trainer.tracking = Tracking("none", project="benchmark", run="step", config={})
        self.trainer.progress = Progress(steps=config.steps, start=0, enabled=False)
        self.plain = PlainStep(self.trainer, config, compiled=plain_compiled)
        self._parallel, self._optimise = self.trainer.parallel, self.trainer.optimizers.step
        self._read, self._windows = self.trainer.inputs.loader.next_step, deque[Tensor]()
        self.trainer.inputs.loader.next_step = self._next_step  # type: ignore[method-assign]

    def close(self) -> None:
        self.trainer.inputs.loader.close()
        self.trainer.log.close()  # type: ignore[union-attr]

    def _next_step(self) -> Any:
        windows = self._read()
        (window,) = windows
        self._windows.append(window)
        return windows

    def ours(self) -> tuple[float, dict[str, float]]:
        """Loss and process seconds by phase of one update."""
        clock, backward, attention = Clock(), Tensor.backward, tnlm.attention.bilinear_attention
        self.trainer.parallel = clock.timed("forward", self._parallel)
        self.trainer.optimizers.step = clock.timed("optimiser", self._optimise)  # type: ignore[method-assign]
        Tensor.backward = clock.timed("backward", backward)  # type: ignore[method-assign]
        if self.attention_shows:
            tnlm.attention.bilinear_attention = clock.attention(attention)
        try:
            began = time.process_time()
            loss = self.trainer._update()["loss"]
            return loss, {**clock.seconds, "total": time.process_time() - began}
        finally:
            Tensor.backward, tnlm.attention.bilinear_attention = backward, attention  # type: ignore[method-assign]

    def theirs(self, step: int) -> tuple[float, dict[str, float]]:
        """Loss and process seconds of the plain step, on the oldest batch that only :meth:`ours` has used."""
        clock, wide = Clock(), self._windows.popleft().long()
        if self.attention_shows:
            self.plain.attention = clock.attention(published_attention)
        began = time.process_time()
        loss = self.plain.step(step, wide[:, :-1], wide[:, 1:], clock)
        return loss, {**clock.seconds, "total": time.process_time() - began}

    def gate(self) -> None:
        """End the program unless the first updates of both agree."""
        named = dict(self.trainer.model.named_parameters())
        before = {n: p.detach().clone() for n, p in named.items()}
        gradients: dict[Tensor, Tensor] = {}

        def keep(p: Tensor) -> None:
            gradients[p] = p.grad.clone()  # type: ignore[union-attr]

        every = (*named.values(), *self.plain.w.values())
        hooks = [p.register_post_accumulate_grad_hook(keep) for p in every]
        for step in range(GATE_STEPS):
            loss, expected = self.ours()[0], self.theirs(step)[0]
            limit = 1e-6 if step == 0 else 5e-4
            if abs(loss - expected) > limit * expected:
                sys.exit(f"no timing: losses of update {step} must agree to {limit}, got {loss:.7f} and {expected:.7f}")
            if step == 0:
                for name, p in named.items():
                    q = self.plain.w[name]
                    _close(gradients[p], gradients[q], 1e-4, f"gradient of {name}")
                    if name in self.plain.momenta:
                        _close(p - before[name], q - before[name], 1e-2, f"update of {name}")
                for hook in hooks:
                    hook.remove()

    def measure(self, repeats: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        """Seconds by phase of ``repeats`` updates of tnlm and of the plain step, in turns, after :meth:`gate`."""
        self.gate()
        ours, theirs = [], []
        for turn in range(-(-repeats // TURN)):
            ours += [self.ours()[1] for _ in range(1 + TURN)][1:]
            steps = range(turn * (1 + TURN), (turn + 1) * (1 + TURN))
            theirs += [self.theirs(GATE_STEPS + i)[1] for i in steps][1:]
        return ours, theirs


def _filled(config: TrainConfig) -> dict[str, Tensor]:
    """Weights without zeros: the output maps of a new model are zero, and so are most of its gradients."""
    torch.manual_seed(1)
    model = Transformer(config.model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    return model.state_dict()


def _close(ours: Tensor, expected: Tensor, limit: float, what: str) -> None:
    error, norm = (ours - expected).norm().item(), expected.norm().item()
    if not error <= limit * norm + 1e-6:  # block 0's lamb mixes a value with itself: its gradient is rounding
        sys.exit(f"no timing: the {what} must agree to {limit} of its norm {norm:.2e}, got {error:.2e}")


def nano(folder: str, *, compiled: bool) -> TrainConfig:
    return preset("nano").replace(
        out=f"{folder}/nano", threads=1, ns_dtype="float32", compile=compiled, sample_tokens=0
    )


def wide(folder: str) -> TrainConfig:
    """Four layers of width 512 with heads of 128 at T=1024, four sequences a step."""
    model = ModelConfig.released(n_layer=4, n_head=4, d_model=512, d_vocab=1024, n_ctx=1024)
    return nano(folder, compiled=False).replace(
        model=model, batch=4, micro_batch=4, val_tokens=8192, out=f"{folder}/wide"
    )


def rows(repeats: int) -> Iterator[dict]:
    cases: tuple[tuple[str, Callable, bool, int], ...] = (
        ("nano", lambda f: nano(f, compiled=False), False, repeats),
        ("nano, compiled", lambda f: nano(f, compiled=True), False, repeats),
        ("nano, both compiled", lambda f: nano(f, compiled=True), True, repeats),
        ("4 layers, width 512, T=1024, batch 4", wide, False, max(TURN, 2 * repeats // 5)),
    )
    for case, make, plain_compiled, count in cases:
        with tempfile.TemporaryDirectory() as folder:
            config = make(folder)
            pair = Pair(config, plain_compiled=plain_compiled, attention_shows=make is wide)
            try:
                ours, theirs = pair.measure(count)
            finally:
                pair.close()
        yield {"case": case, "repeats": count, "config": _config(config), **summary(ours, theirs)}


def _config(config: TrainConfig) -> dict:
    model = config.model
    sizes = {name: getattr(model, name) for name in ("n_layer", "n_head", "d_model", "d_hidden", "d_vocab", "n_params")}
    return {"mlp": model.mlp, "attention": model.attention, **sizes, "seq": config.seq, "batch": config.batch}


def summary(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict:
    """Medians in seconds, quartiles of the total, ratios of the medians, and the loop's share of the total."""
    medians = [{k: round(statistics.median(row[k] for row in rows), 5) for k in rows[0]} for rows in (ours, theirs)]
    ratios = {k: round(medians[1][k] / medians[0][k], 3) for k in medians[1]}
    spread = [[round(q, 5) for q in statistics.quantiles([row["total"] for row in rows])] for rows in (ours, theirs)]
    overhead = statistics.median(1 - sum(row[k] for k in PHASES) / row["total"] for row in ours)
    return {
        "tnlm": medians[0],
        "published": medians[1],
        "published_over_tnlm": ratios,
        "quartiles_tnlm": spread[0],
        "quartiles_published": spread[1],
        "overhead_share": round(overhead, 4),
    }


def missed(found: list[dict]) -> list[str]:
    """The limits that a run missed, in words, from its rows."""
    eager, compiled, _, large = found
    ratios = {
        "nano": (eager["published_over_tnlm"]["total"], NANO_LIMIT),
        "nano, compiled": (compiled["published_over_tnlm"]["total"], NANO_LIMIT),
        "attention at width 512": (large["published_over_tnlm"]["attention"], ATTENTION_LIMIT),
    }
    problems = [f"{what}: {x} times faster, wanted {limit}" for what, (x, limit) in ratios.items() if x < limit]
    if eager["overhead_share"] > OVERHEAD_LIMIT:
        problems.append(
            f"the loop's share of a nano step is {eager['overhead_share']}, at most {OVERHEAD_LIMIT} wanted"
        )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    problems = missed(record.write(record.about("train_step"), rows(repeats)))
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
