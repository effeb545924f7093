"""Ablations of a running model, edited copies of it, and the change of cross-entropy that either causes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tnlm.checks import MODEL, check_kind, check_values, seeded
from tnlm.interp.checks import check_choice, check_count, check_finite
from tnlm.interp.extraction import Extracted, extract
from tnlm.interp.layers.bilinear import BilinearTensor, check_layer
from tnlm.mlp import MLP
from tnlm.output.progress import track
from tnlm.points import intervene, name_points, record, shared_copy
from tnlm.text.evaluate import token_losses
from tnlm.transformer import Transformer

Edits = Mapping[str, Callable[[Tensor], Tensor]]
"""By named point, the function that edits its value; see :func:`tnlm.points.intervene`."""
What = str | tuple[str, int]
"""A named point, or one head of it: ``("blocks.1.attn.hook_z", 3)``."""
How = Literal["zero", "mean", "resample"]

_HEADS_FIRST = ("hook_pattern", "hook_attn_scores", "hook_attn_scores2")


@torch.no_grad()
def ablate(
    net: "Extracted | Transformer",
    tokens: Int[Tensor, "batch seq"],
    what: What | Sequence[What],
    how: How = "mean",
    *,
    reference: Int[Tensor, "rows seq"] | None = None,
    seed: int = 0,
) -> Float[Tensor, "batch seq d_vocab"]:
    """Logits with the values of some points replaced, everything after them recomputed.

    Args:
        what: A point, one head of a point ``(name, head)``, or several of them, all ablated together.
        how: ``zero``; ``mean`` over rows and positions of ``reference``; or ``resample``: the value at the same
            position in another row of ``reference``, drawn with ``seed``.
        reference: Tokens whose values replace; by default ``tokens`` themselves, where ``resample`` takes another row.

    Symmetries: R E U Q QR V N L X H S. Of log-probabilities, and of points whose basis the model fixes: what a point
    inside a head or an MLP holds moves with its basis, and its mean along.

    Raises:
        ValueError: An unknown point (close matches are named), a head out of range, or a reference that does not fit.
    """
    model = net.model if isinstance(net, Extracted) else extract(net).model
    edits = ablation_edits(model, tokens, what, how, reference=reference, seed=seed)
    with intervene(model, edits):
        logits = model(tokens)
    check_finite("the logits", logits)
    return logits


def ablation_edits(
    net: "Extracted | Transformer",
    tokens: Int[Tensor, "batch seq"],
    what: What | Sequence[What],
    how: How = "mean",
    *,
    reference: Int[Tensor, "rows seq"] | None = None,
    seed: int = 0,
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The edits that :func:`ablate` makes, for :func:`tnlm.points.intervene` or :func:`delta_ce`."""
    check_choice("how", how, ("zero", "mean", "resample"))
    check_values("tokens", tokens)
    check_kind("what", what, (str, Sequence), "give a point, (point, head) or several of them")
    model = net.model if isinstance(net, Extracted) else extract(net).model
    single = isinstance(what, str) or (
        isinstance(what, tuple) and len(what) == 2 and not isinstance(what[1], str | tuple)
    )
    parts: list[What] = [what] if single else list(what)  # type: ignore[list-item, arg-type]
    if not parts:
        raise ValueError("what must name at least one point, got none")
    heads: dict[str, list[int] | None] = {}
    for part in parts:
        if not isinstance(part, str) and not (isinstance(part, tuple) and isinstance(part[-1], int) and len(part) == 2):
            raise ValueError(f"what must hold points, as names or (name, head), got {part!r}")
        name, head = (part, None) if isinstance(part, str) else part
        if head is not None and not 0 <= head < model.config.n_head:
            raise ValueError(f"head must be in [0, {model.config.n_head}), got {head} for {name}")
        known = heads.get(name, [])
        heads[name] = None if head is None or known is None else [*known, head]
    values = _replacements(model, tokens, list(heads), how, reference, seed)
    return {name: _replace(name, values.get(name), selected) for name, selected in heads.items()}


def _replacements(
    model: Transformer, tokens: Tensor, names: list[str], how: How, reference: Tensor | None, seed: int
) -> dict[str, Tensor]:
    """Values by point that an ablation puts in place; empty for zeros, after a check that the points exist."""
    if how == "zero":
        with intervene(model, {name: lambda x: x for name in names}):
            return {}
    source = tokens if reference is None else reference
    check_values("reference", source)
    if source.ndim != 2 or not source.numel():
        raise ValueError(f"reference must be (rows, seq) of at least one token, got shape {tuple(source.shape)}")
    run = record(model, source, names)
    if how == "mean":
        return {name: run[name].mean((0, 1) if _seq_axis(name) else 0, keepdim=True) for name in names}
    if source.shape[1] != tokens.shape[1]:
        raise ValueError(f"resampling needs rows of seq={tokens.shape[1]} tokens, got {source.shape[1]}")
    generator = seeded(seed)
    if reference is None:
        if len(tokens) < 2:
            raise ValueError("resampling needs another row: pass at least 2 rows, or reference=")
        shift = torch.randint(1, len(tokens), (len(tokens),), generator=generator)
        rows = (torch.arange(len(tokens)) + shift) % len(tokens)
    else:
        rows = torch.randint(0, len(source), (len(tokens),), generator=generator)
    return {name: run[name][rows.to(run[name].device)] for name in names}


def _seq_axis(name: str) -> bool:
    """Whether axis 1 is the position; patterns have heads there and are averaged over rows only, not positions."""
    return name.rpartition(".")[2] not in _HEADS_FIRST


def _replace(name: str, value: Tensor | None, heads: list[int] | None) -> Callable[[Tensor], Tensor]:
    """Edit that puts ``value`` (zero for None) in place of a point, or of some heads of it."""
    axis = 2 if _seq_axis(name) else 1

    def edit(x: Tensor) -> Tensor:
        new = torch.zeros_like(x) if value is None else value.to(x.dtype).expand_as(x)
        if heads is None:
            return new
        if x.ndim != 4:
            raise ValueError(f"{name} has no head axis, its shape is {tuple(x.shape)}; ablate the whole point")
        chosen = torch.zeros(x.shape[axis], dtype=torch.bool, device=x.device)
        chosen[heads] = True
        return torch.where(chosen.view(-1, *[1] * (3 - axis)), new, x)

    return edit


@dataclass(frozen=True)
class DeltaCE:
    """Change of the cross-entropy on held-out tokens, in nats per token."""

    mean: float
    """Edited minus base; positive is worse."""
    error: float | None
    """Standard error over sequences of the paired difference; None with one sequence."""
    kl: float
    """Mean ``KL(base || edited)`` of the next-token distributions."""
    base: float
    edited: float


@torch.no_grad()
def delta_ce(
    net: "Extracted | Transformer",
    edited: "Transformer | Edits",
    tokens: Int[Tensor, "rows seq_plus_1"],
    *,
    batch_size: int = 8,
    progress: bool = False,
) -> DeltaCE:
    """Change of the cross-entropy on held-out text by an edit, paired by sequence.

    Symmetries: R E U Q QR V N L X H S.

    Args:
        edited: An edited copy (:func:`with_mlp`), or edits at named points (:func:`ablation_edits`).
        tokens: Held-out rows; each predicts its last ``seq`` tokens from the first ``seq``. Released models with two
            query-key pairs: at most 512 positions.

    Raises:
        ValueError: ``tokens`` is not a matrix of at least 2 columns, or the models have different vocabularies.
    """
    model = net.model if isinstance(net, Extracted) else extract(net).model
    check_count("batch_size", batch_size, 1)
    if not isinstance(edited, nn.Module | Mapping):
        raise ValueError(f"edited must be a model or edits by point, got {type(edited).__name__}")
    check_values("tokens", tokens)
    if tokens.ndim != 2 or tokens.shape[1] < 2 or not len(tokens):
        raise ValueError(f"tokens must be (rows, seq + 1) with at least one target each, got {tuple(tokens.shape)}")
    for part in (tokens[:, :-1], tokens[:, 1:]):
        model.check_tokens(part, limit=model.config.d_vocab_used)
    if isinstance(edited, nn.Module) and edited.config.d_vocab != model.config.d_vocab:
        raise ValueError(f"both models need one vocabulary, got {model.config.d_vocab} and {edited.config.d_vocab}")
    base_rows, edited_rows, kl = [], [], 0.0
    for rows in track(tokens.split(batch_size), "cross-entropy", enabled=progress):
        inputs, targets = rows[:, :-1], rows[:, 1:].long()
        base = model(inputs)
        if isinstance(edited, nn.Module):
            after = edited(inputs)
        else:
            with intervene(model, edited):
                after = model(inputs)
        check_finite("the logits of the model", base)
        check_finite("the logits of the edited model", after)
        base_rows.append(token_losses(base, targets).double().mean(1))
        edited_rows.append(token_losses(after, targets).double().mean(1))
        p, q = base.double().log_softmax(-1), after.double().log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum(-1).mean(1).sum())
    before, later = torch.cat(base_rows), torch.cat(edited_rows)
    difference = later - before
    error = float(difference.std() / math.sqrt(len(difference))) if len(difference) > 1 else None
    return DeltaCE(float(difference.mean()), error, kl / len(tokens), float(before.mean()), float(later.mean()))


def with_mlp(model: Transformer, layers: Mapping[int, BilinearTensor]) -> Transformer:
    """A copy whose MLPs at ``layers`` are replaced; every other parameter is shared with the original, not copied.

    Takes any :class:`BilinearTensor` of the layer's widths, such as rank truncations (:func:`hosvd`, :func:`truncate`),
    CP replacements (:func:`cp`) and edits by one eigen-component (:func:`remove`).

    Symmetries: R E U Q QR V N L X H S.

    Raises:
        ValueError: No such layer, or widths that do not fit.
    """
    check_kind("model", model, Transformer, MODEL)
    check_kind("layers", layers, Mapping, "give {layer: BilinearTensor}")
    edited = shared_copy(model)
    width = model.config.d_model
    for layer, tensor in layers.items():
        if not 0 <= layer < model.config.n_layer or model.blocks[layer].mlp is None:
            raise ValueError(f"the model has no MLP at layer {layer}; layers are 0..{model.config.n_layer - 1}")
        check_layer(tensor, real=True)
        if (tensor.d_in, tensor.d_out) != (width, width):
            raise ValueError(f"the layer must map d_model={width} to itself, got {tensor.d_in} to {tensor.d_out}")
        old = model.blocks[layer].mlp
        new = MLP(
            kind="bilinear",
            d_in=width,
            d_hidden=tensor.d_hidden,
            d_out=width,
            bias=tensor.bias is not None,
            dtype=old.w_d.dtype,
            device=old.w_d.device,
        )
        with torch.no_grad():
            for name in ("w_l", "w_r", "w_d", "bias"):
                value = getattr(tensor, name)
                if value is not None:
                    getattr(new, name).copy_(value)
        edited.blocks[layer].mlp = new
    name_points(edited)
    return edited
