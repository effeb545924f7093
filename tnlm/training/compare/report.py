"""Reports of a comparison: text, one JSON record, and ``compare.json``, whose keys ``docs/comparison.md`` documents."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

import tnlm
from tnlm.output.files import write_atomically
from tnlm.training.compare.arms import Comparison, Reading
from tnlm.training.compare.runs import Arm

FLOPS_CONVENTION = "6 M + 6 T L H (n_qk d_qk + d_head) per token, M without the embedding, causal half not discounted"


def to_dict(result: Comparison) -> dict[str, Any]:
    """A comparison as JSON values: extra batches as fractions, losses in the metric, None where there is no value."""
    options = result.options
    return {
        "metric": result.base.runs[0].metric,
        "base": _arm(result.base),
        "variant": _arm(result.variant),
        "ratios": {
            key: _ratio(result.base.fact(key), result.variant.fact(key))
            for key in ("n_params", "flops_per_token", "tokens_per_step")
        }
        | {"seconds_per_step": _ratio(result.base.seconds_per_step, result.variant.seconds_per_step)},
        "flops_convention": FLOPS_CONVENTION,
        "final": {
            "base_steps": result.final_steps[0],
            "variant_steps": result.final_steps[1],
            "difference": result.final.value,
            "low": result.final.low,
            "high": result.final.high,
            "p": result.final.p,
            "p_worse_than_margin": result.final.p_worse,
            "test": result.final.test,
            "paired": result.paired,
        },
        **{key: _reading(getattr(result, key)) for key in ("e1", "e2a", "e2b", "e3")},
        "sigma": result.sigma,
        "verdict": result.verdict,
        "seeds_needed": result.seeds_needed,
        "warnings": result.warnings,
        "options": {key: getattr(options, key) for key in options.__dataclass_fields__},
        "versions": {"tnlm": tnlm.__version__, "python": platform.python_version(), "numpy": np.__version__},
    }


def to_record(result: Comparison) -> dict[str, Any]:
    """The readings, final losses, verdict and warnings of a comparison, under the keys of :func:`to_dict`."""
    whole = to_dict(result)
    ends = ("value", "low", "high", "status")
    return {
        "metric": whole["metric"],
        **{arm: {key: whole[arm][key] for key in ("label", "seeds")} for arm in ("base", "variant")},
        "final": {key: whole["final"][key] for key in ("difference", "low", "high", "p")},
        **{name: {key: whole[name][key] for key in ends} for name in ("e1", "e2a", "e2b", "e3")},
        "verdict": whole["verdict"],
        "warnings": whole["warnings"],
    }


def _reading(reading: Reading) -> dict[str, Any]:
    fixed = ("value", "low", "high", "status", "method", "bound", "censored", "note")
    return {key: getattr(reading, key) for key in fixed} | reading.detail


def _arm(arm: Arm) -> dict[str, Any]:
    return {
        "label": arm.label,
        "seeds": arm.seeds,
        "runs": [
            {
                "name": Path(run.name).name,
                "seed": run.seed,
                "trunk": run.trunk and Path(run.trunk).name,
                "steps": run.steps,
                "final": run.final,
            }
            for run in arm.runs
        ],
        "horizons": {
            str(n): {
                "runs": len(finals),
                "mean": float(finals.mean()),
                "sd": float(finals.std(ddof=1)) if len(finals) > 1 else None,
            }
            for n in arm.horizons
            for finals in [arm.finals(n)]
        },
        "warmdown_steps": {str(n): arm.cell(n)[0].warmdown_steps for n in arm.horizons},
        "seconds_per_step": arm.seconds_per_step,
        **arm.runs[0].facts,
    }


def _ratio(base: float | int | None, variant: float | int | None) -> float | None:
    return variant / base if base and variant else None


def to_text(result: Comparison) -> str:
    """The table that ``tnlm-train compare`` prints."""
    base, variant = result.base, result.variant
    unit = {"loss": "val CE nats/token", "bits_per_byte": "val bits/byte"}[base.runs[0].metric]
    head = [f"base: {base.label} ({_seeds(base)})", f"variant: {variant.label} ({_seeds(variant)})"]
    if base.fact("recipe"):
        tokens = f"{base.fact('val_tokens'):,} tokens, T={base.fact('seq')}"
        head.append(f"recipe {base.fact('recipe')}   {unit}, {tokens}")
    else:
        head.append(f"{unit}, curves recorded elsewhere")
    lines = [("compare", "   ".join(head))]
    if base.fact("n_params") and variant.fact("n_params"):
        lines.append(("params", _costs(base, variant)))
    lines.append(("final", _final(result)))
    lines.append(("E1 matched", _e1(result)))
    lines.append(("E2a", f"{_value(result.e2a)}   {_why(result.e2a)}"))
    lines.append(("E2b", f"{_value(result.e2b)}   {_why(result.e2b)}"))
    e3 = f"{_value(result.e3)}"
    if "range" in result.e3.detail:
        e3 += " range {:+.2f}%..{:+.2f}%".format(*(100 * v for v in result.e3.detail["range"]))
    lines.append(("E3 stable", f"{e3}   {_why(result.e3)}"))
    lines.append(("verdict", result.verdict))
    lines += [("warning", text) for text in result.warnings]
    if base.fact("flops_per_token"):
        lines.append(("", f"flops: {FLOPS_CONVENTION}"))
    return "\n".join(f"{name:<12}{text}".rstrip() for name, text in lines)


def _seeds(arm: Arm) -> str:
    return f"{arm.seeds} seed{'s' if arm.seeds != 1 else ''}"


def _costs(base: Arm, variant: Arm) -> str:
    parts = []
    for key, scale, suffix, name in (
        ("n_params", 1e6, "M", ""),
        ("flops_per_token", 1e9, " GF", "flops/token "),
        ("tokens_per_step", 1, "", "tokens/step "),
    ):
        a, b = base.fact(key), variant.fact(key)
        digits = 0 if scale == 1 else 2
        if a == b:
            parts.append(f"{name}{a / scale:,.{digits}f}{suffix}")
        else:
            parts.append(f"{name}{a / scale:,.{digits}f} / {b / scale:,.{digits}f}{suffix} ({100 * (b / a - 1):+.1f}%)")
    known = [(n, run.steps) for run in [*base.runs, *variant.runs] if (n := run.warmdown_steps) is not None]
    shares = sorted({round(100 * warmdown / steps, 1) for warmdown, steps in known})
    lengths = {warmdown for warmdown, _ in known}
    if len(lengths) == 1 and len(shares) > 1:
        parts.append(f"warm-down {lengths.pop():,} steps at every horizon")
    elif known:
        parts.append(f"warm-down {', '.join(str(share) for share in shares)}%")
    a, b = base.seconds_per_step, variant.seconds_per_step
    if a and b:
        kernels = f"{base.fact('implementation')} / {variant.fact('implementation')} attention"
        parts.append(f"seconds/step {a:.4g} / {b:.4g} ({100 * (b / a - 1):+.1f}%, {kernels})")
    return "   ".join(parts)


def _final(result: Comparison) -> str:
    parts = []
    for arm, n in zip((result.base, result.variant), result.final_steps):
        finals = arm.finals(n)
        sd = f" sd {finals.std(ddof=1):.5f}" if len(finals) > 1 else ""
        parts.append(f"{arm.role} {finals.mean():.5f}{sd} @{n}")
    final = result.final
    gap = f"diff {final.value:+.5f}"
    if final.low is not None:
        gap += f" [{final.low:+.5f}, {final.high:+.5f}] p={final.p:.2g} ({final.test})"
    else:
        gap += " (no interval: one seed)"
    if final.p_worse is not None:
        gap += f"   worse by more than {result.options.margin:g}: p={final.p_worse:.2g}"
    if result.final_steps[0] != result.final_steps[1]:
        gap += "   horizons differ"
    return "   ".join([*parts, gap])


def _e1(result: Comparison) -> str:
    e1 = result.e1
    n0 = f"N0={e1.detail['n0']:.0f}" if e1.detail["n0"] is not None else "no N0"
    horizons = "horizons " + ", ".join(str(n) for n in result.variant.horizons)
    if e1.value is None:
        return f"not bracketed: {e1.note}   {n0}   {horizons}"
    text = f"{_value(e1)}   N*={e1.detail['n_star']:.0f}   {n0}   {horizons}"
    same = [f"{100 * v:+.2f}% {key}" for key in ("tokens", "flops", "seconds") if (v := e1.detail[key]) is not None]
    return text + ("   | " + ", ".join(same) if same else "")


def _value(reading: Reading) -> str:
    if reading.value is None:
        return reading.status
    ends = [f"{100 * v:+.2f}%" if v is not None else "censored" for v in (reading.low, reading.high)]
    if reading.method.startswith("none"):
        interval = f"({reading.method})"
    else:
        interval = f"[{ends[0]}, {ends[1]}]"
    text = f"{100 * reading.value:+.2f}% batches {interval}"
    if reading.method == "delta":
        text += " by the delta method"
    if reading.censored:
        text += f" ({100 * reading.censored:.1f}% of draws censored)"
    return text + (", extrapolated" if reading.status == "extrapolated" else "")


def _why(reading: Reading) -> str:
    spacing = reading.detail.get("eval_spacing")
    return reading.note + (f"; evaluations {100 * spacing:.2f}% apart" if spacing else "")


def write(result: Comparison, folder: str | os.PathLike) -> Path:
    """Write ``compare.json`` into ``folder`` (created), atomically; returns its path."""
    path = Path(folder) / "compare.json"
    write_atomically(path, json.dumps(to_dict(result), indent=1, allow_nan=False) + "\n")
    return path
