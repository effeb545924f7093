"""Estimate of what a run will cost, from its configuration alone: ``--dry-run``. Imports no torch."""

from typing import Any

from tnlm.training.config import TrainConfig
from tnlm.training.data.sources import count_tokens
from tnlm.training.run.metrics import PEAK_FLOPS, clock
from tnlm.training.run.retention import kept_steps, saved_steps

MFU = 0.4
"""Share of a GPU's peak that the time estimates assume; a guess until ``metrics.jsonl`` says better."""
CPU_FLOPS = 25e9
"""FLOP/s of one CPU thread that the estimates assume (nano on an AVX2 server: 23e9 to 30e9)."""
GPU = "NVIDIA H100"
CPU_PARAMS = 10_000_000
"""Where precision and device are automatic, models up to this size are taken to train on a CPU, in float32."""
METRICS_BYTES = 256
"""Approximate size of a step in ``metrics.jsonl``; validations come on top."""


def estimate(config: TrainConfig) -> dict[str, Any]:
    """Parameters, FLOPs, memory, disk, time and passes over the data of a run.

    Memory counts parameters, gradients and optimiser state in float32 (Adam two moments, Muon one), and the activations
    of one micro-batch without recomputation, which are approximate: about 20 % either way, less under compilation.
    Disk counts what the finished run keeps; one more checkpoint lies there while it is written.
    """
    model = config.model
    flops = model.flops_per_token()
    tokens = config.steps * config.tokens_per_step
    matrices = model.n_matmul_params - model.d_vocab * model.d_model
    state = 4 * (2 * model.n_params + matrices + 2 * (model.n_params - matrices))
    activations = config.micro_batch * config.seq * _activation_bytes(config, 2 if _is_half(config) else 4)
    seconds = {
        "cpu_thread": tokens * flops / CPU_FLOPS,
        **{f"{n}x{GPU.removeprefix('NVIDIA ')}": tokens * flops / (n * PEAK_FLOPS[GPU] * MFU) for n in (1, 8)},
    }
    checkpoint = 4 * (model.n_params + matrices + 2 * (model.n_params - matrices))
    kept = sorted(
        kept_steps(
            saved_steps(config),
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            stable_end=config.schedule.stable_end,
        )
    )
    log = METRICS_BYTES * config.steps
    held, problem = _training_tokens(config)
    return {
        "command": "run",
        "dry_run": True,
        "folder": str(config.folder),
        "n_params": model.n_params,
        "flops_per_token": flops,
        "tokens_per_step": config.tokens_per_step,
        "steps": config.steps,
        "tokens": tokens,
        "flops": tokens * flops,
        "state_bytes": state,
        "activation_bytes": activations,
        "checkpoint_bytes": checkpoint,
        "kept_steps": kept,
        "metrics_bytes": log,
        "disk_bytes": len(kept) * checkpoint + log,
        "export_bytes": 4 * model.n_params,
        "train_tokens": held,
        "epochs": tokens / held if held else None,
        "data_problem": problem,
        "eta_seconds": seconds,
    }


def _is_half(config: TrainConfig) -> bool:
    """Whether activations will be bf16; a guess where precision or device are automatic."""
    if config.precision != "auto":
        return config.precision == "bfloat16"
    if config.device != "auto":
        return not config.device.startswith("cpu")
    return config.model.n_params > CPU_PARAMS


def _training_tokens(config: TrainConfig) -> tuple[int | None, str | None]:
    """Number of training tokens, or the reason why it is not known."""
    try:
        return count_tokens(config), None
    except ValueError as error:
        return None, str(error)


def to_text(config: TrainConfig, facts: dict[str, Any]) -> str:
    """The result of :func:`estimate` as lines of text."""
    model = config.model
    times = ", ".join(f"{clock(value)} on {name}" for name, value in facts["eta_seconds"].items())
    sizes = {name.removesuffix("_bytes"): _size(value) for name, value in facts.items() if name.endswith("_bytes")}
    kept = facts["kept_steps"]
    return "\n".join(
        (
            f"{config.preset}: {model.mlp} MLP, {model.attention} attention, recipe {config.recipe}, "
            f"in {config.folder}",
            f"parameters   {model.n_params:,}",
            f"FLOPs        {facts['flops_per_token']:,} per token (6 M + 6 T L H (n_qk d_qk + d_head)), "
            f"{facts['flops']:.3g} in all",
            f"tokens       {config.tokens_per_step:,} per step, {config.steps:,} steps, {facts['tokens']:,} in all",
            f"memory       {sizes['state']} of weights, gradients and optimiser state, about "
            f"{sizes['activation']} of activations",
            f"data         {_passes(config, facts)}",
            f"disk         {sizes['disk']} when done: {len(kept)} checkpoints of {sizes['checkpoint']} kept (steps "
            f"{_listed(kept)}) and {sizes['metrics']} of metrics; one more checkpoint while saving; an export takes "
            f"{sizes['export']}",
            f"time         about {times} (h:mm:ss; {MFU:.0%} of {PEAK_FLOPS[GPU]:.3g} FLOP/s, "
            f"{CPU_FLOPS:.2g} per thread)",
        )
    )


def _passes(config: TrainConfig, facts: dict[str, Any]) -> str:
    if facts["epochs"] is None:
        return f"not here, so the passes over it are not known: {facts['data_problem']}"
    least = "at least " if config.bos_align else ""
    repeats = ": tokens come more than once" if facts["epochs"] > 1 else ""
    return f"{least}{facts['epochs']:.2f} epochs of {facts['train_tokens']:,} tokens{repeats}"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


def _listed(steps: list[int]) -> str:
    listed = [f"{step:,}" for step in steps]
    return ", ".join(listed if len(listed) <= 6 else [*listed[:3], "...", *listed[-2:]])


def _activation_bytes(config: TrainConfig, size: int) -> int:
    """Bytes kept for backward, per token: norms, mixing, projections of each block; in half precision the logits too.

    In float32 the closed gradients of ``tnlm.kernels`` keep less, and the loss keeps no logits.
    """
    model, half = config.model, size == 2
    activated = model.mlp not in ("bilinear", "squared")
    if half:
        stream, projections, hidden = 12.0, 6, 3 + model.mlp_gated
    else:
        stream, projections, hidden = 9.0 if model.norm == "rms" else 7.0, 4 if model.qk_norm else 2, 2 + activated
    attention = projections * model.n_qk * model.n_head * model.d_qk
    block = stream * model.d_model + attention * (model.attention != "none") + hidden * model.d_hidden
    return int(size * model.n_layer * block) + (model.d_vocab * 2 * (size + 2) if half else 0)
