"""Spectra of one layer for the unembedding direction of every token, and bounds on them that are cheap to compute."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tnlm.interp.checks import (
    check_bytes,
    check_computed,
    check_count,
    check_number,
    check_real,
    check_symmetric,
    check_tensor,
    check_view,
)
from tnlm.interp.layers.bilinear import BilinearTensor
from tnlm.interp.layers.eigensolver import Eig, Which
from tnlm.interp.layers.rounding import form_error, round_down, round_up, squared_norm_error
from tnlm.interp.layers.spectra import DENSE_WIDTH, eig, form_norms, krylov, squared_norms
from tnlm.interp.layers.statistics import trace_bounds
from tnlm.interp.ranking import token_ids
from tnlm.interp.tokens.block_store import BlockStore
from tnlm.output.progress import track


@runtime_checkable
class VocabNet(Protocol):
    """The part of an extracted model that these functions read."""

    mlp: Sequence[BilinearTensor]
    unembed: Tensor  # (d_vocab, d_model)
    tokens: Any  # ids that are not padding: range, list or integer tensor


class VocabMoments(NamedTuple):
    """Trace and Frobenius norm of every token's form ``Q_t``, ``(d_vocab,)`` each, indexed by token id."""

    trace: Tensor
    frobenius: Tensor


class VocabBounds(NamedTuple):
    """``low <= lam_min`` and ``lam_max <= high`` for every token's form, ``(d_vocab,)`` each."""

    low: Tensor
    high: Tensor


def vocab_eigs(
    net: VocabNet,
    layer: int,
    k: int = 8,
    tokens: Sequence[int] | Tensor | None = None,
    tol: float = 1e-5,
    progress: bool = True,
    *,
    which: Which = "abs",
    center: bool = False,
    folder: str | os.PathLike | None = None,
    block: int = 256,
    max_steps: int = 192,
    seed: int = 0,
    max_bytes: int = 2**31,
) -> Eig:
    """Extreme eigenpairs of one layer for many tokens, one form ``Q_t`` per token.

    The layer adds ``sum_k values[k] (vectors[:, k] . x)**2`` to ``logit_t``.
    Up to width 512 by dense eigendecomposition, exact. Above, batched Lanczos on the factors: approximate, with a
    residual for every pair and in ``unfound`` a bound on every eigenvalue that is not listed.

    Args:
        tokens: Ids, in the order of the result; all but padding by default.
        tol: Residual relative to the largest ``|value|`` at which a token is done.
        center: Subtract from the unembedding its mean over ``net.tokens``: a shift common to all tokens, which softmax
            does not see.
        folder: Keeps every finished block of ``block`` tokens, and continues from those found there. A block of other
            weights or settings is an error.
        max_steps: Steps after which a token's current pairs are returned, converged or not; ``residuals`` tells.

    Returns:
        `Eig` with one row per token. Process time on 50,304 tokens: see benchmarks/results.

    Raises:
        ValueError: Bad ids, a layer that is no tensor, a result over ``max_bytes``, a folder of another computation.
    """
    b = _layer(net, layer)
    check_count("k", k, 1, b.d_in)
    check_count("block", block, 1)
    check_number("tol", tol, 0, above=True)
    ids = token_ids(net.tokens if tokens is None else tokens, len(net.unembed), net.unembed.device)
    check_bytes("the eigenvectors", (len(ids), b.d_in, k), b.dtype, max_bytes, "pass tokens= or a smaller k")
    directions = _directions(net, center)[ids]
    settings: dict[str, Any] = {"layer": layer, "k": k, "tol": tol, "which": which}
    settings |= {"max_steps": max_steps, "seed": seed, "block": block}
    store = None if folder is None else BlockStore(Path(folder), settings, (b.w_l, b.w_r, b.w_d, directions))
    norms2: Tensor | None = None

    def compute(start: int) -> Eig:
        nonlocal norms2
        rows = directions[start : start + block]
        if b.d_in <= DENSE_WIDTH:
            return eig(b, rows, k, which, "full")
        if norms2 is None:  # of all tokens at once: one Gram; not needed when every block is on disk
            norms2 = squared_norms(b, directions)
        rows_norms2 = norms2[start : start + block]
        return krylov(b, rows, rows_norms2, k, which=which, tol=tol, max_steps=max_steps, seed=seed)

    parts = []
    for start in track(range(0, len(ids), block), f"vocab_eigs, layer {layer}", enabled=progress):
        part = store.load(start) if store else None
        if part is None:
            part = compute(start)
            if store:
                store.save(start, part)
        parts.append(part)
    if not parts:
        return eig(b, directions, k, which, "full")
    return Eig(*map(torch.cat, zip(*parts, strict=True)))


def vocab_moments(
    net: VocabNet, layer: int, *, center: bool = False, gram: Tensor | None = None, block: int = 4096
) -> VocabMoments:
    """Trace and Frobenius norm of every token's form, exact.

    From the traces and the output Gram of the layer: ``tr Q_t = w_u[t] . m`` and ``||Q_t||_F**2 = w_u[t] G_out
    w_u[t]^T``. Costs ``2 V d_out**2`` flop after the Gram. Padding tokens are included, so that the index is the token
    id; leave them out of rankings.

    Args:
        gram: ``net.mlp[layer].gram("out")``, if it has been computed before.
    """
    b = _layer(net, layer)
    check_count("block", block, 1)
    return _moments(b, _directions(net, center), gram, block)


def vocab_bounds(net: VocabNet, layer: int, *, center: bool = False, gram: Tensor | None = None) -> VocabBounds:
    """Certified bounds on every token's spectrum from its trace and Frobenius norm, without computing eigenvalues.

    On ``|x|**2 = r`` the layer adds between ``r low`` and ``r high`` to ``logit_t`` (plus the bias, times the factors
    of later layers and of the final norm). `trace_bounds` also gives the bounds from the other side.

    Certified for the directions as they are: every rounding is allowed for (docs/mathematics.md) and the ends are
    rounded outwards. The Gram is computed in float64. A Gram that is passed is assumed to carry the rounding of its
    dtype; in float32 the allowance for it may be larger than the spectrum.
    """
    b = _layer(net, layer)
    dtype = torch.float64 if gram is None else b.dtype
    directions = _directions(net, center)
    if gram is not None:
        check_tensor("gram", gram, (b.d_out, b.d_out), b.w_l)
    trace, frobenius = _moments(b.to(torch.float64), directions.double(), None if gram is None else gram.double())
    brackets = trace_bounds(
        trace,
        frobenius,
        b.d_in,
        trace_error=form_error(b, directions, torch.float64),
        squares_error=squared_norm_error(b, directions, dtype),
    )
    low, high = round_down(brackets.min_low, b.dtype), round_up(brackets.max_high, b.dtype)
    check_computed("the bounds", low, high)
    return VocabBounds(low, high)


def _moments(b: BilinearTensor, directions: Tensor, gram: Tensor | None, block: int = 4096) -> VocabMoments:
    if gram is None:
        gram = b.gram("out")
    check_tensor("gram", gram, (b.d_out, b.d_out), b.w_l)
    check_symmetric("gram", gram)
    norms = torch.cat([form_norms(rows, gram) for rows in directions.split(block)]).to(b.dtype)
    traces = directions @ b.traces()
    check_computed("the moments", traces, norms)
    return VocabMoments(traces, norms)


def _layer(net: VocabNet, layer: int) -> BilinearTensor:
    """The layer's tensor, after the checks that all functions of this module need."""
    check_view(net, "mlp", "unembed", "tokens")
    check_count("layer", layer, 0, len(net.mlp) - 1)
    b = net.mlp[layer]
    check_real(f"layer {layer}", b.w_l)
    check_tensor("unembed", net.unembed, (None, b.d_out), b.w_l)
    return b


def _directions(net: VocabNet, center: bool) -> Tensor:
    """Rows of the unembedding, minus their mean over the tokens (not over the width) when centred."""
    if not center:
        return net.unembed
    return net.unembed - net.unembed[token_ids(net.tokens, len(net.unembed), net.unembed.device)].mean(0)
