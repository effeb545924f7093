"""``--dry-run``: what a run will cost, from its configuration alone. Imports no torch."""

from typing import Any

from tnlm.training.metrics import PEAK_FLOPS, clock
from tnlm.training.presets import TrainConfig

MFU = 0.4
"""Share of a GPU's peak that the time estimates assume; a guess until ``metrics.jsonl`` says better."""
CPU_FLOPS = 25e9
"""FLOP/s of one CPU thread that the estimates assume (nano on an AVX2 server: 23e9 to 30e9)."""
GPU = "NVIDIA H100"


def estimate(config: TrainConfig) -> dict[str, Any]:
    """Parameters, FLOPs, memory and time of a run.

    Memory counts parameters, gradients and optimiser state in float32 (Adam two moments, Muon one), and the activations
    of one micro-batch without recomputation, which are approximate: about 20 % either way, less under compilation.
    """
    model = config.model
    flops = model.flops_per_token()
    tokens = config.steps * config.tokens_per_step
    matrices = model.n_matmul_params - model.d_vocab * model.d_model
    state = 4 * (2 * model.n_params + matrices + 2 * (model.n_params - matrices))
    half = config.precision != "float32" and config.preset not in ("nano", "nano-pure", "nano-attention-only", "tiny")
    activations = config.micro_batch * config.seq * _activation_bytes(config, 2 if half else 4)
    seconds = {
        "cpu_thread": tokens * flops / CPU_FLOPS,
        **{f"{n}x{GPU.removeprefix('NVIDIA ')}": tokens * flops / (n * PEAK_FLOPS[GPU] * MFU) for n in (1, 8)},
    }
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
        "checkpoint_bytes": 4 * (model.n_params + matrices + 2 * (model.n_params - matrices)),
        "eta_seconds": seconds,
    }


def to_text(config: TrainConfig, facts: dict[str, Any]) -> str:
    """What :func:`estimate` found, for people."""
    model = config.model
    times = ", ".join(f"{clock(value)} on {name}" for name, value in facts["eta_seconds"].items())
    sizes = {name: f"{facts[name] / 2**30:.2f} GiB" for name in ("state_bytes", "activation_bytes", "checkpoint_bytes")}
    return "\n".join(
        (
            f"{config.preset}: {model.mlp} MLP, {model.attention} attention, recipe {config.recipe}, "
            f"in {config.folder}",
            f"parameters   {model.n_params:,}",
            f"FLOPs        {facts['flops_per_token']:,} per token (6 M + 6 T L H (n_qk d_qk + d_head)), "
            f"{facts['flops']:.3g} in all",
            f"tokens       {config.tokens_per_step:,} per step, {config.steps:,} steps, {facts['tokens']:,} in all",
            f"memory       {sizes['state_bytes']} of weights, gradients and optimiser state, about "
            f"{sizes['activation_bytes']} of activations",
            f"checkpoint   {sizes['checkpoint_bytes']}",
            f"time         about {times} (h:mm:ss; {MFU:.0%} of {PEAK_FLOPS[GPU]:.3g} FLOP/s, "
            f"{CPU_FLOPS:.2g} per thread)",
        )
    )


def _activation_bytes(config: TrainConfig, size: int) -> int:
    """Kept for backward, per token: norms, mixing and projections of each block; in half precision the logits too.

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
