"""May two arms be compared? Refusals and warnings, each with what differs."""

from collections.abc import Sequence
from typing import Any

from tnlm.training.runs import Arm, Run

_WITHIN_AN_ARM = ("model", "n_params", "flops_per_token")
_ALWAYS_EQUAL = ("recipe", "dtype")
_EQUAL_FOR_LOSS = ("val_fingerprint", "val_tokens", "seq", "tokenizer_hash")
"""Bits per byte compare across these, with a warning."""
_WARNED = ("tokens_per_step", "data_fingerprint", "data_order", "implementation", "hyperparameters", "version")
_WORDS = {
    "val_fingerprint": "validation tokens (by hash)",
    "val_tokens": "number of validation tokens",
    "seq": "sequence length",
    "tokenizer_hash": "vocabulary (by hash)",
    "tokens_per_step": "tokens per step",
    "data_fingerprint": "training data",
    "data_order": "data order",
    "implementation": "attention implementation",
    "hyperparameters": "hyper-parameters",
    "version": "code version",
    "n_params": "parameter count",
    "flops_per_token": "FLOPs per token",
}


def check(base: Arm, variant: Arm) -> list[str]:
    """Refuse what cannot be compared; return what should be said of the rest.

    Raises:
        ValueError: Names the differing fact and both values, and the way out where there is one.
    """
    runs = [*base.runs, *variant.runs]
    both = {run.name for run in base.runs} & {run.name for run in variant.runs}
    if both:
        raise ValueError(f"a run must be in one arm only, got {', '.join(sorted(both))} in both")
    for arm in (base, variant):
        for key in _WITHIN_AN_ARM:
            _refuse(arm.runs, key, f"all runs of the {arm.role} arm must have one", "give them as two arms")
    metrics = {run.metric for run in runs}
    if len(metrics) > 1:
        raise ValueError(f"all runs must be read by one metric, got {', '.join(sorted(metrics))}")
    for key in _ALWAYS_EQUAL:
        _refuse(runs, key, "compared runs must have one", "train both arms alike")
    warnings = []
    for key in _EQUAL_FOR_LOSS:
        if metrics == {"loss"}:
            hint = "compare them with --metric bits_per_byte" if key == "tokenizer_hash" else "evaluate both alike"
            _refuse(runs, key, "compared runs must have one", hint)
        else:
            warnings += _differences(runs, key)
    for key in _WARNED:
        warnings += _differences(runs, key)
    warnings += _warmdown(runs)
    params = [arm.fact("n_params") for arm in (base, variant)]
    if all(params) and abs(params[1] / params[0] - 1) > 0.01:
        warnings.append(f"the arms differ in parameters by {100 * (params[1] / params[0] - 1):+.1f}%")
    if not all(run.facts for run in runs):
        warnings.append("curves recorded elsewhere: that the runs are comparable is not checked")
    return warnings


def is_paired(base: Arm, variant: Arm) -> bool:
    """Do the arms share seeds and data order, so that each seed is one joint draw?"""
    facts = {(run.facts.get("data_fingerprint"), run.facts.get("data_order")) for run in [*base.runs, *variant.runs]}
    known = len(facts) == 1 and None not in next(iter(facts))
    seeds = [
        {(run.seed, run.steps) for run in arm.runs if run.steps in set(base.horizons) & set(variant.horizons)}
        for arm in (base, variant)
    ]
    return known and seeds[0] == seeds[1] and bool(seeds[0])


def _groups(runs: Sequence[Run], key: str) -> list[tuple[Any, str]]:
    """Distinct known values of a fact, each with the first run that has it."""
    found: list[tuple[Any, str]] = []
    for run in runs:
        value = run.facts.get(key)
        if value is not None and all(value != other for other, _ in found):
            found.append((value, run.name))
    return found


def _refuse(runs: Sequence[Run], key: str, rule: str, way_out: str) -> None:
    found = _groups(runs, key)
    if len(found) > 1:
        listed = " and ".join(f"{value} ({name})" for value, name in found[:2])
        raise ValueError(f"{rule} {_WORDS.get(key, key)}, got {listed}; {way_out}")


def _differences(runs: Sequence[Run], key: str) -> list[str]:
    found = _groups(runs, key)
    if len(found) < 2:
        return []
    first, second = found[0][0], found[1][0]
    if isinstance(first, dict) and isinstance(second, dict):
        keys = [k for k in sorted(first.keys() | second.keys()) if first.get(k) != second.get(k)]
        first, second = ({k: value.get(k) for k in keys} for value in (first, second))
    return [f"{_WORDS[key]} differ: {first} and {second}"]


def _warmdown(runs: Sequence[Run]) -> list[str]:
    """One rule is the same number of steps, or one fraction that rounds to every number."""
    known = sorted({(n, run.steps) for run in runs if (n := run.warmdown_steps) is not None})
    if len({n for n, _ in known}) <= 1:
        return []
    if max((n - 0.5) / steps for n, steps in known) <= min((n + 0.5) / steps for n, steps in known):
        return []
    listed = [f"{n} of {steps}" for n, steps in known]
    return [f"warm-down rules differ: {', '.join(listed)} steps"]
