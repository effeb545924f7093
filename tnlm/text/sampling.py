"""Generates text: greedy, or sampled with temperature, top-k and top-p; earlier positions are cached."""

import math
import operator
from collections.abc import Iterable
from functools import partial
from typing import Literal, TypeVar, get_args

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from tnlm.cache import RECURRENT_ATTENTIONS, Cache, position_numbers, state_numbers
from tnlm.checks import MODEL, as_token_id, check_kind, is_integer, seeded
from tnlm.config import ModelConfig
from tnlm.text.default_tokenizer import encode_prompt, find_tokenizer
from tnlm.text.tokenizer import Tokenizer
from tnlm.transformer import TOKEN_DTYPES, Transformer, check_ids

CacheKind = Literal["auto", "kv", "recurrent", "none"]
Prompt = TypeVar("Prompt", Int[Tensor, "batch _"], str)
"""A batch of prompts as ids, or one prompt as text."""

DEFAULT_NEW_TOKENS = 64


def generate(
    model: Transformer,
    tokens: Prompt,
    max_new_tokens: int | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    stop: int | Iterable[int] | None = None,
    pad: int | None = None,
    seed: int | None = None,
    cache: CacheKind = "auto",
) -> Prompt:
    """Continue every prompt of a batch of ids, or one prompt given as text; all prompts must have the same length.

    Padding ids (``d_vocab_used`` and above) are never sampled. Hooks on named points see only the new positions,
    unless ``cache="none"``.

    Args:
        tokens: Prompts of at least one token. No end-of-text id is prepended: add it yourself if it is wanted. A text
            is read by ``tokenizer``, and its continuation ends before the tokenizer's end-of-text id, unless ``stop``
            says otherwise.
        max_new_tokens: 0 returns the prompts; prompt and continuation together must fit ``n_ctx``. None is 64, or as
            many as fit.
        tokenizer: Of a text; by default the model's (:func:`tnlm.text.find_tokenizer`).
        temperature: Divides the logits; 0 takes the most probable token and ignores ``top_k``, ``top_p`` and ``seed``.
        top_k: Keep the ``top_k`` most probable tokens; a value above the vocabulary keeps all, None is off.
        top_p: Of these, keep the smallest set of tokens whose probability reaches ``top_p``; 1 and None keep all.
        stop: A row ends after one of these ids; generation ends when every row has. Ids in the prompt do not count.
        pad: Id that fills a row after its end; None repeats the id that ended it. Prompts must not begin with it.
        seed: Makes the draws reproducible without touching torch's global generator, which None draws from.
        cache: ``kv`` keeps keys and values; ``recurrent`` keeps a state of constant size (bilinear and squared
            attention); ``none`` runs the whole sequence for every token. ``auto`` is ``recurrent`` if its state holds
            fewer numbers than the keys and values of the full length (above 5,461 tokens at ``d_qk = d_head = 128``,
            85 at 16), else ``kv``. All give the same logits up to rounding.

    Returns:
        int64 ``(batch, seq + new)``, prompts included, on the device of ``tokens``; ``new`` is below
        ``max_new_tokens`` when all rows ended early. For a text: the text and its continuation.

    Raises:
        ValueError: An argument is out of range, an id is not below ``d_vocab_used``, a prompt is empty or left-padded,
            or the logits are NaN or overflow.
    """
    check_kind("model", model, Transformer, MODEL)
    continued = partial(
        _continue, model, n=max_new_tokens, options=_options(temperature, top_k, top_p), pad=pad, seed=seed, cache=cache
    )
    if not isinstance(tokens, str):
        return continued(tokens, stop=stop)
    tokenizer = find_tokenizer(model, tokenizer)
    ids = torch.tensor([encode_prompt(tokens, tokenizer)], device=model.embed.w_e.device)
    added = continued(ids, stop=tokenizer.eot if stop is None else stop)[0, ids.shape[1] :].tolist()
    return tokens + tokenizer.decode(added[:-1] if added[-1:] == [tokenizer.eot] else added)


@torch.no_grad()
def _continue(
    model: Transformer,
    tokens: Int[Tensor, "batch seq"],
    *,
    n: int | None,
    options: tuple[float, int | None, float | None],
    stop: int | Iterable[int] | None,
    pad: int | None,
    seed: int | None,
    cache: str,
) -> Int[Tensor, "batch longer"]:
    """The prompts and ``n`` new ids; ``options`` are temperature, top-k and top-p. See :func:`generate`."""
    if n is None:
        room = model.config.n_ctx - tokens.shape[1] if isinstance(tokens, Tensor) and tokens.ndim == 2 else 1
        n = min(DEFAULT_NEW_TOKENS, max(room, 1))
    limit = model.config.d_vocab_used
    assert limit is not None
    if not is_integer(n) or n < 0:
        raise ValueError(f"max_new_tokens must be an integer >= 0, got {n!r}")
    stops = torch.tensor(_stop_ids(stop, limit), dtype=torch.int64, device="cpu")
    if pad is not None:
        pad = as_token_id("pad", pad, model.config.d_vocab)
    _check_prompt(model, tokens, pad, n)
    generator = None if seed is None else seeded(seed, others=", or None")
    state = _new_cache(model, cache, tokens.shape[1] + n)

    out = tokens.long()
    running = torch.ones(out.shape[0], dtype=torch.bool, device="cpu")
    new = out
    for _ in range(n):
        logits = model(out, last=True) if state is None else model(new, cache=state, last=True)
        chosen = _draw(logits[:, -1, :limit], *options, generator)
        filler = out[:, -1].cpu() if pad is None else torch.full_like(chosen, pad)
        chosen = torch.where(running, chosen, filler)
        running &= ~torch.isin(chosen, stops)
        new = chosen[:, None].to(out.device)
        out = torch.cat([out, new], dim=1)
        if len(stops) and not running.any():
            break
    return out if n else out.clone()


def probabilities(
    logits: Shaped[Tensor, "... d_vocab"],
    *,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
) -> Float[Tensor, "... d_vocab"]:
    """Probabilities in float64 from which :func:`generate` draws: temperature, then top-k, then top-p.

    A temperature of 0 puts everything on the largest logit, the first of equal ones.

    Raises:
        ValueError: An option is out of range.
    """
    temperature, top_k, top_p = _options(temperature, top_k, top_p)
    check_kind("logits", logits, Tensor, "use torch.as_tensor")
    z = logits.double()
    z = z - z.amax(-1, keepdim=True)
    if temperature == 0:
        first = (z == 0).int().argmax(-1, keepdim=True)
        return torch.zeros_like(z).scatter(-1, first, 1.0)
    p = (z / temperature).softmax(-1)
    if top_k is not None and top_k < p.shape[-1]:
        value, index = p.topk(top_k, dim=-1)
        p = torch.zeros_like(p).scatter(-1, index, value)
    if top_p is not None and top_p < 1:
        p = p / p.sum(-1, keepdim=True)
        value, index = p.sort(dim=-1, descending=True, stable=True)
        before = value.cumsum(-1) - value
        p = torch.zeros_like(p).scatter(-1, index, value.masked_fill(before >= top_p, 0))
    return p / p.sum(-1, keepdim=True)


def _draw(
    logits: Tensor,
    temperature: float | int,
    top_k: int | None,
    top_p: float | int | None,
    generator: torch.Generator | None,
) -> Int[Tensor, " batch"]:
    """One id per row, drawn on the CPU so that a seed gives the same ids on every device."""
    logits = logits.cpu()
    largest = logits.amax(-1)
    if not largest.isfinite().all():
        row = int((~largest.isfinite()).nonzero()[0])
        raise ValueError(
            f"logits must be finite to sample from, got {largest[row]} in row {row}; check the weights for NaN or inf, "
            "or compute in a wider dtype"
        )
    p = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    if temperature == 0 or p.shape[0] == 0:
        return p.argmax(-1)
    return torch.multinomial(p, 1, generator=generator)[:, 0]


def _new_cache(model: Transformer, kind: str, length: int) -> Cache | None:
    config = model.config
    if kind not in get_args(CacheKind):
        raise ValueError(f"cache must be one of {', '.join(get_args(CacheKind))}; got {kind!r}")
    if (
        kind == "auto"
        and config.attention in RECURRENT_ATTENTIONS
        and not any(b.attn.pattern_wanted for b in model.blocks)
    ):
        kind = "recurrent" if length * position_numbers(config) > state_numbers(config) else "kv"
    return None if kind == "none" else Cache(config, recurrent=kind == "recurrent")


def _options(
    temperature: float | int, top_k: int | None, top_p: float | int | None
) -> tuple[float, int | None, float | None]:
    """The three options as numbers of Python, whatever library they came from.

    Raises:
        ValueError: One is no number or out of range.
    """
    t, p = _as_float(temperature), None if top_p is None else _as_float(top_p)
    if not 0 <= t < math.inf:
        raise ValueError(f"temperature must be a finite number >= 0 (0 is greedy), got {temperature!r}")
    if top_k is not None and (not is_integer(top_k) or top_k < 1):
        raise ValueError(f"top_k must be an integer >= 1, or None for off, got {top_k!r}")
    if p is not None and not 0 < p <= 1:
        raise ValueError(
            f"top_p must be above 0 and at most 1, or None for off, got {top_p!r}; temperature=0 is greedy"
        )
    return t, None if top_k is None else operator.index(top_k), p


def _check_prompt(model: Transformer, tokens: Tensor, pad: int | None, max_new_tokens: int) -> None:
    config = model.config
    assert config.d_vocab_used is not None
    if isinstance(tokens, Tensor) and tokens.is_meta:
        raise ValueError("tokens must hold values, got a tensor on the meta device; generate from ids on cpu or cuda")
    dense = isinstance(tokens, Tensor) and tokens.layout == torch.strided
    if dense and tokens.dtype in TOKEN_DTYPES and tokens.ndim == 2:
        _refuse_left_padding(tokens[:, :1].cpu(), config, pad)
    model.check_tokens(tokens, limit=config.d_vocab_used)
    if tokens.shape[1] == 0:
        raise ValueError("every prompt must hold at least one token, got seq=0; begin with the end-of-text id")
    check_ids(tokens.cpu(), config.d_vocab_used)
    if tokens.shape[1] + max_new_tokens > config.n_ctx:
        raise ValueError(
            f"prompt and continuation must fit n_ctx={config.n_ctx}, got {tokens.shape[1]} + {max_new_tokens} tokens; "
            f"max_new_tokens may be at most {config.n_ctx - tokens.shape[1]} here"
        )


def _refuse_left_padding(first: Int[Tensor, "batch one"], config: ModelConfig, pad: int | None) -> None:
    padded = (first >= config.d_vocab_used) & (first < config.d_vocab)
    if pad is not None:
        padded |= first == pad
    if padded.any():
        row = int(padded.nonzero()[0, 0])
        raise ValueError(
            f"prompts must not be left-padded: row {row} begins with padding id {int(first[row, 0])}. No softmax "
            "divides the attention, so a padding token would add to every output; batch prompts of one length instead"
        )


def _stop_ids(stop: int | Iterable[int] | None, limit: int) -> list[int]:
    if stop is None:
        return []
    if isinstance(stop, Tensor) and not stop.is_meta:
        stop = stop.tolist()
    return [as_token_id("stop", i, limit) for i in (stop if isinstance(stop, Iterable) else [stop])]


def _as_float(value: object) -> float:
    """A real number of any library as a float; NaN if it is none, or too large for one."""
    if not hasattr(value, "__float__") or isinstance(value, bool | Tensor):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
