"""Verifies a model by three checks (file, numerics, cross-entropy on known text), and records the outcomes."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import tnlm
from tnlm.checkpoints import hub
from tnlm.checkpoints.checkpoint import load
from tnlm.checkpoints.local import Found
from tnlm.checkpoints.released import RELEASED, TOLERANCE, CrossEntropy, Released, find_released_by_sha256
from tnlm.checkpoints.resolve import find_model
from tnlm.checkpoints.weightfiles import INDEX_SUFFIX, read_index
from tnlm.config import POLYNOMIAL_ATTENTIONS
from tnlm.kernels import Implementation
from tnlm.output.files import read_json, sha256, write_atomically
from tnlm.text.evaluate import NonFiniteLoss, cross_entropy
from tnlm.text.tokenizer import get
from tnlm.transformer import Transformer

Status = Literal["passed", "failed", "skipped"]

SEQ = 33
"""Number of random tokens on which implementations are compared: no multiple of any tile of the kernels."""
NETWORK_SEQ = 5
"""Number of these tokens on which the explicit tensors are compared, whose cost grows fast with it."""
RELATIVE = 1e-3
"""Largest difference allowed between two ways to the same logits, as a share of the largest logit."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Outcome of one check; ``detail`` holds the measured numbers, or why the check failed or was skipped."""

    name: Literal["file", "numerics", "cross_entropy"]
    status: Status
    detail: str


def verify(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    attention: str | None = None,
    text: str | os.PathLike[str] | Tensor | None = None,
    protocol: str | None = None,
    device: torch.device | str = "cpu",
) -> list[Check]:
    """Check a model; returns the outcomes of three checks, in this order.

    - ``file``: the sha256 of the weights is the recorded one, which also identifies a local copy of a released model;
      and the file loads: structure, keys, shapes, finite weights.
    - ``numerics``: on random tokens, every attention implementation, the explicit tensors of the whole network (if its
      layers are polynomials) and the forward in float64 give the logits of the definition in float32.
    - ``cross_entropy``: on ``text``, the loss is the recorded one of a released model, within 2e-3 nats.

    Memory: about four times the float32 model, for the explicit tensors.

    Args:
        text: A UTF-8 file, documents separated by ``<|endoftext|>``, for the GPT-2 tokenizer; or ids, a stream or
            ``(rows, seq + 1)``. It must be the text on which the recorded value was measured.
        protocol: Which recorded value, as ``600x512`` (rows x tokens); None is the first one.
    """
    entry = None
    try:
        found = find_model(name_or_path, revision=revision)
        file, entry = _check_file(found)
        if file.status == "failed":
            return [file, *_skip("the file is damaged")]
        model = load(name_or_path, revision=revision, attention=attention, device=device)
    except hub.Unavailable as error:
        return [Check(name="file", status="skipped", detail=str(error)), *_skip("no file")]
    except ValueError as error:
        return [Check(name="file", status="failed", detail=str(error)), *_skip("the file does not load")]
    text_check = _check_cross_entropy(model, entry, text, protocol)
    return [file, _check_numerics(model), text_check]


def verify_released(
    path: str | os.PathLike[str] = "verification.json",
    *,
    names: Iterable[str] | None = None,
    text: str | os.PathLike[str] | Tensor | None = None,
    protocol: str | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Check every released model, or those of ``names``, and write the outcomes to ``path``; returns all it then holds.

    Outcomes of other models that are in the file are kept. Models that are not in the cache are downloaded, about 2 GB
    for each of the larger ones.
    """
    path = Path(path)
    outcomes = {}
    for name in RELEASED if names is None else names:
        checks = verify(name, text=text, protocol=protocol, device=device)
        outcomes[name] = _summary(RELEASED[name], checks)
    # Read after the checks, which take long, to keep what another process has written in the meantime
    record: dict[str, Any] = {"models": {}, **(read_json(path) if path.exists() else {})}
    record["models"] |= outcomes
    write_atomically(path, json.dumps(record, indent=2) + "\n")
    return record


def verification_table(path: str | os.PathLike[str] = "verification.json") -> str:
    """Markdown table of the outcomes that :func:`verify_released` wrote.

    Raises:
        ValueError: The file is missing or not of this form, with the command that writes it.
    """
    try:
        models = read_json(Path(path))["models"]
        rows = [_row(name, facts) for name, facts in models.items()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be written by `tnlm verify --released`: {error!r}") from None
    head = "| name | repository | parameters | MLP, attention | state | cross-entropy |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows]) + "\n"


def _row(name: str, facts: Mapping[str, Any]) -> str:
    ce = next(check for check in facts["checks"] if check["name"] == "cross_entropy")
    where = f"[{facts['repo']}](https://huggingface.co/{facts['repo']})"
    measured = ce["detail"] if ce["status"] != "skipped" else "not measured"
    kinds = f"{facts['mlp']}, {facts['attention']}"
    return f"| `{name}` | {where} | {facts['n_params']:,} | {kinds} | {facts['state']} | {measured} |"


def _summary(entry: Released, checks: list[Check]) -> dict[str, Any]:
    """Outcomes of one model as JSON: it is verified if no check failed, and none that can be made was skipped."""
    outcome = {check.name: check.status for check in checks}
    if "failed" in outcome.values():
        state = "failed"
    elif outcome["file"] == outcome["numerics"] == "passed" and (
        outcome["cross_entropy"] == "passed" or not entry.cross_entropy
    ):
        state = "verified"
    else:
        state = "not yet verified"
    return {
        "state": state,
        "repo": entry.repo,
        "revision": entry.revision,
        "n_params": entry.n_params,
        "mlp": entry.config.mlp,
        "attention": entry.config.attention,
        "tnlm_version": tnlm.__version__,
        "torch_version": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        # The record is published, so it must not name anyone's home folder
        "checks": [{k: v.replace(str(Path.home()), "~") for k, v in asdict(check).items()} for check in checks],
    }


def _skip(why: str) -> list[Check]:
    return [
        Check(name="numerics", status="skipped", detail=why),
        Check(name="cross_entropy", status="skipped", detail=why),
    ]


# The three checks


def _check_file(found: Found) -> tuple[Check, Released | None]:
    """Compare the sha256 of each weight file with the registry's, or with the one that the Hub gave.

    Also returns the record of the released model, which a local copy is identified with by its sha256.
    """
    entry, folder = found.entry, found.weights.parent
    pinned = entry is not None and entry.revision == found.source["revision"]
    names = [found.weights.name]
    if found.weights.name.endswith(INDEX_SUFFIX):
        names = sorted(set(read_index(found.weights).values()))
    unknown, good = [], []
    for name in names:
        digest = sha256(folder / name)
        wanted, by = hub.recorded_sha256(folder / name), "the Hub gave"
        if pinned and entry is not None and entry.files[name].sha256 is not None:
            wanted, by = entry.files[name].sha256, "recorded"
        if wanted is None and found.entry is None and (copied := find_released_by_sha256(digest)) is not None:
            entry, wanted, by = copied, digest, f"recorded for {copied.name}"
        if wanted is None:
            unknown.append(f"{name} {digest}")
        elif digest != wanted:
            return Check(name="file", status="failed", detail=f"{name} has sha256 {digest}, {by} {wanted}"), entry
        else:
            good.append(f"{name} {digest}, as {by}")
    if unknown:
        detail = f"no recorded hash to compare with; sha256 {'; '.join(unknown)}"
        return Check(name="file", status="skipped", detail=detail), entry
    return Check(name="file", status="passed", detail=f"sha256 {'; '.join(good)}"), entry


@torch.no_grad()
def _check_numerics(model: Transformer) -> Check:
    """Compare all ways to compute the logits, on random tokens; the model is in float64 afterwards."""
    config = model.config
    device = model.embed.w_e.device
    assert config.d_vocab_used is not None
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.d_vocab_used, (1, min(SEQ, config.n_ctx)), generator=generator).to(device)
    model.set_implementation("eager")
    wanted = model(tokens)
    errors: dict[str, float] = {}
    for name in _implementations(config.attention, device):
        model.set_implementation(name)
        errors[name] = _distance(model(tokens), wanted)
    if config.layers_polynomial:
        few = tokens[:, :NETWORK_SEQ]
        one_hot = F.one_hot(few, config.d_vocab).to(wanted.dtype)
        logits = model.network(few.shape[1]).contract({"tokens": one_hot, **model.inverse_norms(few)})
        errors["explicit tensors"] = _distance(model.softcap(logits), wanted[:, :NETWORK_SEQ])
    model.set_implementation("eager")
    errors["float64"] = _distance(model.double()(tokens), wanted)
    # not "error > RELATIVE", which a NaN would pass
    bad = [name for name, error in errors.items() if not error <= RELATIVE]
    figures = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    if bad:
        return Check(name="numerics", status="failed", detail=f"differ from the definition, relative: {figures}")
    return Check(name="numerics", status="passed", detail=f"relative to the definition: {figures}")


def _implementations(attention: str, device: torch.device) -> tuple[Implementation, ...]:
    """Implementations to compare with "eager": all kernels of polynomial attention, else the one of "auto"."""
    if attention not in (*POLYNOMIAL_ATTENTIONS, "squared_normalized") or attention == "none":
        return ("auto",)
    return ("auto", "chunked", "recurrent", *(("triton",) if device.type == "cuda" else ()))


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, divided by the largest value of ``wanted`` or by 1, whichever is larger."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1))


def _check_cross_entropy(
    model: Transformer, entry: Released | None, text: str | os.PathLike[str] | Tensor | None, protocol: str | None
) -> Check:
    recorded = entry.cross_entropy if entry is not None else ()
    if not recorded:
        return Check(name="cross_entropy", status="skipped", detail="no value is recorded for this model")
    known = recorded[0] if protocol is None else _protocol(recorded, protocol)
    needs = f"{known.rows} rows of {known.seq} tokens of {known.text}"
    if text is None:
        return Check(name="cross_entropy", status="skipped", detail=f"needs text: {needs}")
    tokens = text if isinstance(text, Tensor) else _read_tokens(Path(text))
    if tokens.ndim == 1:
        tokens = tokens[: known.rows * known.seq + 1]
    try:
        measured = cross_entropy(model, tokens, seq=known.seq, rows=known.rows, progress=True)
    except NonFiniteLoss as error:
        return Check(name="cross_entropy", status="failed", detail=str(error))
    if (measured.rows, measured.tokens) != (known.rows, known.rows * known.seq):
        detail = f"needs {needs}; the text gives {measured.tokens} tokens in {measured.rows} rows"
        return Check(name="cross_entropy", status="skipped", detail=detail)
    detail = f"{measured.loss:.4f} nats per token, recorded {known.value:.4f} ({known.rows} x {known.seq})"
    passed = abs(measured.loss - known.value) <= TOLERANCE
    return Check(name="cross_entropy", status="passed" if passed else "failed", detail=detail)


def _protocol(recorded: tuple[CrossEntropy, ...], name: str) -> CrossEntropy:
    by_name = {f"{known.rows}x{known.seq}": known for known in recorded}
    if name not in by_name:
        raise ValueError(f"protocol must be one of {', '.join(by_name)}, got {name!r}")
    return by_name[name]


def _read_tokens(path: Path) -> Tensor:
    return torch.tensor(get("gpt2").encode(path.read_text(encoding="utf-8"), allow_special=True))
