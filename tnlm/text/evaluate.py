"""Cross-entropy of a model on tokens, each of which is predicted exactly once."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tnlm.checks import MODEL, TOKENIZER, as_count, check_kind, check_values, is_integer
from tnlm.config import ModelConfig
from tnlm.output.progress import track
from tnlm.text.tokenizer import Tokenizer
from tnlm.transformer import Transformer

LONG = 512
"""Largest number of positions on which the released models with bilinear attention predict well."""


class NonFiniteLoss(ValueError):
    """A model gave a loss that is NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Mean loss of the positions ``start <= position < stop``, in nats per token."""

    start: int
    stop: int
    loss: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of :func:`cross_entropy`."""

    loss: float
    """Nats per predicted token: the sum over all of them, divided by their number."""
    standard_error: float | None
    """Standard error of ``loss``, from the differences between rows; None for a single row."""
    tokens: int
    """Predicted tokens."""
    rows: int
    seq: int
    buckets: tuple[Bucket, ...]
    bits_per_byte: float | None
    """``loss / ln 2 * tokens / bytes``, comparable between tokenizers; None if the bytes are not known."""

    def to_dict(self) -> dict[str, Any]:
        """All values as JSON data."""
        return asdict(self)


@torch.no_grad()
def cross_entropy(
    model: Transformer,
    tokens: Int[Tensor, " stream"] | Int[Tensor, "rows seq_plus_1"],
    *,
    seq: int | None = None,
    rows: int | None = None,
    batch_size: int = 4,
    byte_lengths: Sequence[int] | None = None,
    progress: bool = False,
) -> Evaluation:
    """Mean next-token loss of a model on tokens, over all ``d_vocab`` logits, in windows of ``seq`` tokens.

    A flat stream is cut into windows: row r reads ``tokens[r seq : (r + 1) seq]`` and predicts each next token, so that
    every token but the first is predicted exactly once; the last window may be shorter. Each row of a matrix is a
    window, whose last token is only predicted. Sums are in float64.

    Args:
        tokens: int64 or int32 ids below ``d_vocab_used``, on any device.
        seq: Window of a stream; None is ``n_ctx``, or the whole stream if that is shorter. A matrix has its own.
        rows: Number of windows to use, from the first; None uses all.
        batch_size: Rows per forward.
        byte_lengths: Bytes of each id (:func:`byte_lengths`), to report bits per byte.
        progress: Show progress on stderr after two seconds.

    Raises:
        ValueError: Nothing to predict, a value out of range, an id not below ``d_vocab_used``, or a loss that is NaN
            or infinite.

    Warns:
        UserWarning: Windows above 512 tokens with the released architecture and bilinear attention.
    """
    check_kind("model", model, Transformer, MODEL)
    check_values("tokens", tokens)
    rows = None if rows is None else as_count("rows", rows, 1, others=", or None for all")
    batch_size = as_count("batch_size", batch_size, 1)
    windows = _windows(tokens, model.config, seq=seq, rows=rows)
    if byte_lengths is not None:
        check_kind("byte_lengths", byte_lengths, Sequence, "tnlm.text.byte_lengths(tokenizer) gives it")
    if byte_lengths is not None and len(byte_lengths) < model.config.d_vocab_used:
        raise ValueError(
            f"byte_lengths must cover d_vocab_used={model.config.d_vocab_used} ids, got {len(byte_lengths)}; "
            "is this the model's tokenizer?"
        )
    width = len(windows[0]) - 1
    if message := long_context_warning(model.config, width):
        warnings.warn(message, UserWarning, stacklevel=2)

    sums = _sum_losses(model, windows, batch_size=batch_size, byte_lengths=byte_lengths, progress=progress)
    total = sum(sums.row_counts)
    loss = sum(sums.rows) / total
    at_position = [sum(n > p for n in sums.row_counts) for p in range(width)]
    return Evaluation(
        loss=loss,
        standard_error=_standard_error(sums.rows, sums.row_counts),
        tokens=total,
        rows=len(sums.rows),
        seq=width,
        buckets=position_buckets(sums.positions, at_position),
        bits_per_byte=loss / math.log(2) * total / sums.n_bytes if sums.n_bytes else None,
    )


def token_losses(
    logits: Float[Tensor, "batch seq d_vocab"], targets: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """``-log softmax(logits)[target]`` in nats, in float32 or wider.

    Raises:
        ValueError: ``targets`` are no ids of the shape of ``logits`` without its last axis.
    """
    for name, x in (("logits", logits), ("targets", targets)):
        check_kind(name, x, Tensor, "use torch.as_tensor")
    fit = logits.ndim == 3 and logits.shape[:2] == targets.shape and logits.device == targets.device
    if targets.dtype != torch.int64 or not logits.is_floating_point() or not fit:
        raise ValueError(
            "logits must be floating (batch, seq, d_vocab) and targets int64 (batch, seq) on one device, got "
            f"{logits.dtype} of {tuple(logits.shape)} on {logits.device}, and {targets.dtype} of "
            f"{tuple(targets.shape)} on {targets.device}"
        )
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def byte_lengths(tokenizer: Tokenizer) -> list[int]:
    """Number of bytes of the text of each id; 0 for the end-of-text id."""
    check_kind("tokenizer", tokenizer, Tokenizer, TOKENIZER)
    return [0 if i == tokenizer.eot else len(tokenizer.token_bytes(i)) for i in range(tokenizer.d_vocab)]


def long_context_warning(config: ModelConfig, seq: int) -> str | None:
    """Text of a warning if a model predicts badly in windows of ``seq`` tokens, see :data:`LONG`; else None."""
    released = config.has_final_norm and config.qk_norm and config.x0_mixing and config.value_residual
    if seq <= LONG or config.attention != "bilinear" or not released:
        return None
    return (
        f"released models with bilinear attention predict badly beyond position {LONG}, got windows of {seq} tokens; "
        f"compare the buckets, or evaluate with seq={LONG}"
    )


@dataclass(frozen=True)
class _LossSums:
    """Sums of losses over rows and over positions, in nats."""

    rows: list[float]
    row_counts: list[int]
    """Predicted tokens of each row."""
    positions: list[float]
    n_bytes: int
    """Bytes of all predicted tokens; 0 if their lengths are not known."""


def _sum_losses(
    model: Transformer,
    windows: list[Tensor],
    *,
    batch_size: int,
    byte_lengths: Sequence[int] | None,
    progress: bool,
) -> _LossSums:
    """Run the model on all windows and sum its losses in float64.

    Raises:
        NonFiniteLoss: A loss is NaN or infinite; names its row.
    """
    device = model.unembed.w_u.device
    row_sums: list[float] = []
    row_counts: list[int] = []
    by_position = torch.zeros(len(windows[0]) - 1, dtype=torch.float64, device="cpu")
    n_bytes = 0
    for batch in track(_batches(windows, batch_size), "evaluating", enabled=progress):
        stacked = torch.stack(batch).long()
        targets = stacked[:, 1:]
        losses = token_losses(model(stacked[:, :-1].to(device)), targets.to(device)).double().cpu()
        if not losses.isfinite().all():
            row = len(row_sums) + int((~losses.isfinite()).any(1).nonzero()[0])
            raise NonFiniteLoss(
                f"losses must be finite, got NaN or infinity in row {row}: the weights are not finite, or the logits "
                f"overflow in {model.unembed.w_u.dtype}; check the weights, or use a wider dtype"
            )
        row_sums += losses.sum(1).tolist()
        row_counts += [targets.shape[1]] * len(batch)
        by_position[: losses.shape[1]] += losses.sum(0)
        if byte_lengths is not None:
            n_bytes += int(torch.tensor(byte_lengths, device=targets.device)[targets].sum())
    return _LossSums(row_sums, row_counts, by_position.tolist(), n_bytes)


def _windows(tokens: Tensor, config: ModelConfig, *, seq: int | None, rows: int | None) -> list[Tensor]:
    """Windows of ``seq + 1`` ids, of which the model reads all but the last; the last window may be shorter."""
    if seq is not None and not is_integer(seq):
        raise ValueError(f"seq must be an integer, or None for the longest window, got {seq!r}")
    if tokens.ndim == 2:
        if seq is not None and seq != tokens.shape[1] - 1:
            raise ValueError(
                f"a matrix of tokens is (rows, seq + 1), got shape {tuple(tokens.shape)} and seq={seq}; "
                "flatten it, or leave seq out"
            )
        seq, stream = tokens.shape[1] - 1, tokens
    elif tokens.ndim == 1:
        seq = min(config.n_ctx, len(tokens) - 1) if seq is None else seq
        stream = tokens[None]
    else:
        raise ValueError(f"tokens must be a stream or (rows, seq + 1), got shape {tuple(tokens.shape)}")
    if stream.shape[1] < 2 or stream.shape[0] == 0:
        raise ValueError(f"at least two tokens are needed to predict one, got shape {tuple(tokens.shape)}")
    if not 1 <= seq <= config.n_ctx:
        raise ValueError(f"seq must be between 1 and n_ctx={config.n_ctx}, got {seq}")
    if tokens.ndim == 2:
        windows = list(tokens)
    else:
        windows = [tokens[start : start + seq + 1] for start in range(0, len(tokens) - 1, seq)]
    windows = windows[:rows]
    _check_ids(windows, config)
    return windows


def _check_ids(windows: list[Tensor], config: ModelConfig) -> None:
    limit = config.d_vocab_used
    assert limit is not None
    used = torch.cat(windows)
    if used.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens must be int64 or int32, got {used.dtype}; convert with .long() if they are ids")
    bad = (used < 0) | (used >= limit)
    if bad.any():
        place = int(bad.nonzero()[0])
        raise ValueError(
            f"token ids must be in [0, {limit}), got {int(used[place])} in window {place // len(windows[0])}; "
            "was the text encoded with the model's tokenizer?"
        )


def _batches(windows: list[Tensor], size: int) -> list[list[Tensor]]:
    """Groups of at most ``size`` windows of one length; a shorter last window is a group of its own."""
    whole = [w for w in windows if len(w) == len(windows[0])]
    tail = windows[len(whole) :]
    return [whole[i : i + size] for i in range(0, len(whole), size)] + ([tail] if tail else [])


def _standard_error(sums: list[float], counts: list[int]) -> float | None:
    """Standard error of ``sum(sums) / sum(counts)``, with rows as independent samples; None for a single row."""
    n = len(sums)
    if n < 2:
        return None
    loss = sum(sums) / sum(counts)
    spread = sum((s - loss * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return math.sqrt(spread * n / (n - 1)) / sum(counts)


def position_buckets(sums: list[float], counts: list[int]) -> tuple[Bucket, ...]:
    """Mean losses of the positions 0..63, 64..127, 128..255 and so on, from one sum and count per position."""
    buckets, start, stop = [], 0, 64
    while start < len(sums):
        stop = min(stop, len(sums))
        tokens = sum(counts[start:stop])
        buckets.append(Bucket(start=start, stop=stop, loss=sum(sums[start:stop]) / tokens, tokens=tokens))
        start, stop = stop, 2 * stop
    return tuple(buckets)
