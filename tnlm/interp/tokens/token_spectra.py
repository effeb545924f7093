"""Spectra of one layer for the unembedding direction of every token, and bounds on them that are cheap to compute."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tnlm.checks import as_path
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
from tnlm.interp.layers.spectra import eig, form_norms, iteration_pays, krylov, squared_norms
from tnlm.interp.layers.statistics import trace_bounds
from tnlm.interp.ranking import token_ids
from tnlm.interp.tokens.block_store import BlockStore
from tnlm.interp.vocabulary import centred
from tnlm.output.progress import track


@runtime_checkable
class VocabNet(Protocol):
    """The part of an extracted model that these functions read."""

    mlp: Sequence[BilinearTensor]
    unembed: Tensor  # (d_vocab, d_model)
    tokens: range  # ids in use, from 0; the rows behind them are padding


class VocabMoments(NamedTuple):
    """Mean of what the layer adds to every token's logit, and Frobenius norm of its form: ``(d_vocab_used,)`` each."""

    mean: Tensor
    frobenius: Tensor


class VocabBounds(NamedTuple):
    """``low <= lam_min`` and ``lam_max <= high`` for every token's form, ``(d_vocab_used,)`` each."""

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
    center: bool = True,
    weights: Tensor | None = None,
    folder: str | os.PathLike | None = None,
    block: int = 256,
    max_steps: int = 192,
    seed: int = 0,
    max_bytes: int = 2**31,
) -> Eig:
    """Extreme eigenpairs of one layer for many tokens, one form ``Q_t`` per token, as `eig` has them.

    All pairs together are what the layer adds to the centred ``logit_t`` beyond its mean over ``|x|**2 == d_model``
    (that of `vocab_moments`). Exact by dense eigendecomposition where that is cheaper (`iteration_pays`: widths up to
    512, few tokens, many pairs). Else batched Lanczos on the factors: approximate, with a residual for every pair and
    in ``unfound`` a bound on every eigenvalue that is not listed.

    Rows of the unembedding that are parallel, as those of tokens that never occur, have one spectrum up to scale: pass
    ``net.parallel_tokens().unique()`` for one token of each group.

    Args:
        tokens: Ids, in the order of the result; all but padding by default.
        tol: Residual relative to the largest ``|value|`` at which a token is done.
        center: Subtract from the unembedding its mean over ``net.tokens``: a shift common to all tokens, which softmax
            does not see; before a softcap a convention.
        weights: Of the tokens in that mean, such as their counts; uniform by default.
        folder: Keeps every finished block of ``block`` tokens, and continues from those found there. A block of other
            weights or settings is an error.
        max_steps: Steps after which a token's current pairs are returned, converged or not; ``residuals`` tells.

    Returns:
        `Eig` with one row per token. Process time on 50,304 tokens: see benchmarks/results.

    Symmetries: R E P U Q QR V N L H S.

    Raises:
        ValueError: Bad ids, a layer that is no tensor, a result over ``max_bytes``, a folder of another computation.
    """
    b = _layer(net, layer)
    check_count("k", k, 1, b.d_in)
    check_count("block", block, 1)
    check_number("tol", tol, 0, above=True)
    ids = token_ids(tokens, len(net.tokens), net.unembed.device)
    check_bytes("the eigenvectors", (len(ids), b.d_in, k), b.dtype, max_bytes, "pass tokens= or a smaller k")
    directions = _directions(net, center, weights)[ids]
    dense = not iteration_pays(b.d_in, len(ids), k)
    settings: dict[str, Any] = {"layer": layer, "domain": b.domain, "k": k, "tol": tol, "which": which}
    settings |= {"max_steps": max_steps, "seed": seed, "block": block}
    store = (
        None if folder is None else BlockStore(as_path("folder", folder), settings, (b.w_l, b.w_r, b.w_d, directions))
    )
    norms2: Tensor | None = None

    def compute(start: int) -> Eig:
        nonlocal norms2
        rows = directions[start : start + block]
        if dense:
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
    net: VocabNet,
    layer: int,
    *,
    center: bool = True,
    weights: Tensor | None = None,
    gram: Tensor | None = None,
    block: int = 4096,
) -> VocabMoments:
    """Mean over inputs of what the layer adds to every token's logit, and Frobenius norm of the token's form; exact.

    The mean over ``|x|**2 == d_in`` (and over ``N(0, 1)``) is ``w_u[t] . (traces + bias)``. The norm is of ``Q_t``:
    ``sqrt(w_u[t] G_out w_u[t]^T)``, on the sphere of its traceless part, and ``sqrt(2 d / (d + 2))`` of it there is the
    standard deviation of what is added. Costs ``2 V d_out**2`` flop after the Gram. Parallel rows, see `vocab_eigs`,
    are all listed.

    Args:
        center, weights: As for `vocab_eigs`.
        gram: ``net.mlp[layer].gram("out")``, if it has been computed before.

    Symmetries: R E P U Q QR V N L H S.
    """
    b = _layer(net, layer)
    check_count("block", block, 1)
    directions = _directions(net, center, weights)
    norms = _norms(b, directions, gram, block)
    constant = b.traces() if b.bias is None else b.traces() + b.bias
    means = directions @ constant
    check_computed("the moments", means, norms)
    return VocabMoments(means, norms)


def vocab_bounds(
    net: VocabNet, layer: int, *, center: bool = True, weights: Tensor | None = None, gram: Tensor | None = None
) -> VocabBounds:
    """Certified bounds on every token's spectrum from its trace and Frobenius norm, without computing eigenvalues.

    On ``|x|**2 = d_in`` the layer adds between ``d_in low`` and ``d_in high`` to ``logit_t`` (times the factors of
    later layers and of the final norm), plus the bias, and for ``domain="sphere"`` plus the trace: together the mean of
    `vocab_moments`. `trace_bounds` also gives the bounds from the other side.

    Certified for the directions as they are: every rounding is allowed for (docs/mathematics.md) and the ends are
    rounded outwards. The Gram is computed in float64. A Gram that is passed is assumed to carry the rounding of its
    dtype; in float32 the allowance for it may be larger than the spectrum.

    Args:
        center, weights: As for `vocab_eigs`.

    Symmetries: R E P U Q QR V N L H S.
    """
    b = _layer(net, layer)
    dtype = torch.float64 if gram is None else b.dtype
    directions = _directions(net, center, weights)
    if gram is not None:
        check_tensor("gram", gram, (b.d_out, b.d_out), b.w_l)
    wide, rows = b.to(torch.float64), directions.double()
    frobenius = _norms(wide, rows, None if gram is None else gram.double())
    brackets = trace_bounds(
        rows @ (wide.traces() - wide.shift() * b.d_in),
        frobenius,
        b.d_in,
        trace_error=form_error(b, directions, torch.float64),
        squares_error=squared_norm_error(b, directions, dtype),
    )
    low, high = round_down(brackets.min_low, b.dtype), round_up(brackets.max_high, b.dtype)
    check_computed("the bounds", low, high)
    return VocabBounds(low, high)


def _norms(b: BilinearTensor, directions: Tensor, gram: Tensor | None, block: int = 4096) -> Tensor:
    """Frobenius norm of every row's form, without the shift."""
    gram = b.gram("out") if gram is None else gram
    check_tensor("gram", gram, (b.d_out, b.d_out), b.w_l)
    check_symmetric("gram", gram)
    shift = b.shift()
    gram = gram - b.d_in * torch.outer(shift, shift)
    return torch.cat([form_norms(rows, gram) for rows in directions.split(block)]).to(b.dtype)


def _layer(net: VocabNet, layer: int) -> BilinearTensor:
    """The layer's tensor, after the checks that all functions of this module need."""
    check_view(net, "mlp", "unembed", "tokens")
    check_count("layer", layer, 0, len(net.mlp) - 1)
    b = net.mlp[layer]
    check_real(f"layer {layer}", b.w_l)
    check_tensor("unembed", net.unembed, (None, b.d_out), b.w_l)
    return b


def _directions(net: VocabNet, center: bool, weights: Tensor | None) -> Tensor:
    """Rows of the unembedding of the ids in use, minus their mean over the tokens (not over the width) when centred."""
    rows = net.unembed[: len(net.tokens)]
    return centred(rows, weights) if center else rows
