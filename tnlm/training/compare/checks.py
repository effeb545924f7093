"""Checks of whether two arms may be compared: errors and warnings that name what differs."""

from collections.abc import Sequence
from typing import Any

from tnlm.training.compare.runs import Arm, Run

_WITHIN_AN_ARM = ("model", "n_params", "flops_per_token")
_ALWAYS_EQUAL = ("recipe", "dtype")
_EQUAL_FOR_LOSS = ("val_fingerprint", "val_tokens", "seq", "tokenizer_hash")
"""Bits per byte compare across these, with a warning."""
_WARNED = ("tokens_per_step", "data_order", "implementation", "settings", "version")
_PAIRED = ("data_order", "settings")
"""Facts that two runs of one seed share, beside the data, when they are one joint draw."""
_LABEL = ("mlp", "attention")
"""Fields of the model that name an arm, and are shown with it."""
_WORDS = {
    "val_fingerprint": "validation tokens (by hash)",
    "val_tokens": "number of validation tokens",
    "seq": "sequence length",
    "tokenizer_hash": "vocabulary (by hash)",
    "tokens_per_step": "tokens per step",
    "data_fingerprint": "training data",
    "data_order": "data order",
    "implementation": "attention implementation",
    "settings": "training settings",
    "version": "code version",
    "n_params": "parameter count",
    "flops_per_token": "FLOPs per token",
}


def check(base: Arm, variant: Arm) -> list[str]:
    """Check that two arms can be compared, and return warnings about what differs.

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
    if not _same_data(runs):
        warnings += _differences(runs, "data_fingerprint")
    for key in _WARNED:
        warnings += _differences(runs, key)
    warnings += _warmdown(runs)
    beside = [{k: v for k, v in model.items() if k not in _LABEL} for model, _ in _groups(runs, "model")]
    if told := _told(beside):
        warnings.append(f"models differ in more than {' and '.join(_LABEL)}: {told}")
    params = [arm.fact("n_params") for arm in (base, variant)]
    if all(params) and abs(params[1] / params[0] - 1) > 0.01:
        warnings.append(f"the arms differ in parameters by {100 * (params[1] / params[0] - 1):+.1f}%")
    if not all(run.facts for run in runs):
        warnings.append("curves recorded elsewhere: that the runs are comparable is not checked")
    return warnings


def is_paired(base: Arm, variant: Arm) -> bool:
    """Whether the arms share seeds, data order and settings, so that each seed is one joint draw."""
    runs = [*base.runs, *variant.runs]
    known = _same_data(runs) and all(
        len(_groups(runs, key)) == 1 and all(run.facts.get(key) is not None for run in runs) for key in _PAIRED
    )
    seeds = [
        {(run.seed, run.steps) for run in arm.runs if run.steps in set(base.horizons) & set(variant.horizons)}
        for arm in (base, variant)
    ]
    return known and seeds[0] == seeds[1] and bool(seeds[0])


def _same_data(runs: Sequence[Run]) -> bool:
    """Whether the runs are known to read the same shards, each up to its last step."""
    read = [shards for run in runs if (shards := run.facts.get("shards_read")) is not None]
    if len(read) < len(runs):
        prints = {run.facts.get("data_fingerprint") for run in runs}
        return len(prints) == 1 and None not in prints
    longest = max(read, key=len)
    return all(longest[: len(shards)] == shards for shards in read)


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
        (first, a), (second, b) = found[:2]
        listed = (
            f"{_told([first, second])} ({a}, {b})" if isinstance(first, dict) else f"{first} ({a}) and {second} ({b})"
        )
        raise ValueError(f"{rule} {_WORDS.get(key, key)}, got {listed}; {way_out}")


def _differences(runs: Sequence[Run], key: str) -> list[str]:
    told = _told([value for value, _ in _groups(runs, key)])
    return [f"{_WORDS[key]} differ: {told}"] if told else []


def _told(values: Sequence[Any]) -> str:
    """``a and b`` of distinct values, or ``key a and b`` of every entry that differs between dicts; "" of one value."""
    if not all(isinstance(value, dict) for value in values):
        return " and ".join(map(str, values)) if len(values) > 1 else ""
    parts = []
    for key in sorted({key for value in values for key in value}):
        distinct = list(dict.fromkeys(str(value.get(key)) for value in values))
        if len(distinct) > 1:
            parts.append(f"{key} {' and '.join(distinct)}")
    return "; ".join(parts)


def _warmdown(runs: Sequence[Run]) -> list[str]:
    """A warning if the warm-downs have neither one number of steps nor one fraction that rounds to every number."""
    known = sorted({(n, run.steps) for run in runs if (n := run.warmdown_steps) is not None})
    if len({n for n, _ in known}) <= 1:
        return []
    if max((n - 0.5) / steps for n, steps in known) <= min((n + 0.5) / steps for n, steps in known):
        return []
    listed = [f"{n} of {steps}" for n, steps in known]
    return [f"warm-down rules differ: {', '.join(listed)} steps"]
