"""Spectra of one layer's forms for every token of the vocabulary, without a dense form in the released sizes."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
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
from tnlm.interp.layers.rounding import form_error, round_down, round_up, squared_norm_error
from tnlm.interp.layers.spectra import _DENSE_WIDTH, Eig, Which, eig, form_norms, krylov, squared_norms
from tnlm.interp.layers.statistics import trace_bounds
from tnlm.interp.tokens.ranking import token_ids
from tnlm.output.files import replacing


@runtime_checkable
class VocabNet(Protocol):
    """The part of an extracted model that these functions read."""

    mlp: Sequence[BilinearTensor]
    unembed: Tensor  # (d_vocab, d_model)
    tokens: Any  # ids that are not padding: range, list or integer tensor


class VocabMoments(NamedTuple):
    """Of every token's form ``Q_t``: its trace and Frobenius norm, ``(d_vocab,)`` each, indexed by token id."""

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
    """Extreme eigenpairs of ``Q_t`` for many tokens: ``logit_t`` gets ``sum_k values (vectors . x)**2`` from the layer.

    Up to width 512 by dense eigendecomposition, exact. Above, batched Lanczos on the factors: approximate, with a
    residual for every pair and in ``unfound`` a bound on every eigenvalue that is not listed.

    Args:
        tokens: Ids, in the order of the result; all but padding by default.
        tol: Residual relative to the largest ``|value|`` at which a token is done.
        center: Subtract from the unembedding its mean over those ``net.tokens``: a shift common to all tokens, to which
            softmax is blind.
        folder: Keeps every finished block of ``block`` tokens, and continues from those found there. A block of other
            weights or settings is an error, not a reuse.
        max_steps: Steps after which a token is returned as it is, residuals telling.

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
    dense = b.d_in <= _DENSE_WIDTH
    settings = dict(layer=layer, k=k, tol=tol, which=which, max_steps=max_steps, seed=seed, block=block)  # noqa: C408
    store = None if folder is None else _Store(Path(folder), settings, (b.w_l, b.w_r, b.w_d, directions))
    norms2 = None
    parts = []
    for start in _progress(range(0, len(ids), block), f"vocab_eigs, layer {layer}", progress):
        part = store.load(start) if store else None
        if part is None:
            rows = directions[start : start + block]
            if dense:
                part = eig(b, rows, k, which, "full")
            else:
                norms2 = squared_norms(b, directions) if norms2 is None else norms2
                norms = norms2[start : start + block]
                part = krylov(b, rows, norms, k, which=which, tol=tol, max_steps=max_steps, seed=seed)
            if store:
                store.save(start, part)
        parts.append(part)
    if not parts:
        return eig(b, directions, k, which, "full")
    return Eig(*map(torch.cat, zip(*parts, strict=True)))


def vocab_moments(
    net: VocabNet, layer: int, *, center: bool = False, gram: Tensor | None = None, block: int = 4096
) -> VocabMoments:
    """Trace and Frobenius norm of every token's form, exact, from ``b.traces()`` and the output Gram alone.

    ``tr Q_t = w_u[t] . m`` and ``||Q_t||_F**2 = w_u[t] G_out w_u[t]^T``: ``2 V d_out**2`` flop after the Gram. Padding
    rows stay at their ids; drop them in rankings.

    Args:
        gram: ``net.mlp[layer].gram("out")`` when it is at hand.
    """
    b = _layer(net, layer)
    check_count("block", block, 1)
    if gram is None:
        gram = b.gram("out")
    check_tensor("gram", gram, (b.d_out, b.d_out), b.w_l)
    check_symmetric("gram", gram)
    directions = _directions(net, center)
    norms = torch.cat([form_norms(rows, gram) for rows in directions.split(block)])
    traces = directions @ b.traces()
    check_computed("the moments", traces, norms := norms.to(b.dtype))
    return VocabMoments(traces, norms)


def vocab_bounds(net: VocabNet, layer: int, *, center: bool = False, gram: Tensor | None = None) -> VocabBounds:
    """Certified ends of every token's spectrum without one eigenvalue, from its trace and Frobenius norm.

    On ``|x|**2 = r`` the layer writes into ``logit_t`` between ``r low`` and ``r high`` (plus the bias, times what
    later layers and the final norm make of it). Brackets from the other side are in `trace_bounds`.

    Certified for the directions as they are, with every rounding allowed for (docs/mathematics.md) and the ends rounded
    outwards. The Gram is computed in float64. One that is passed is taken to carry the rounding of its dtype: in
    float32 that is an allowance which may be larger than the spectrum.
    """
    b = _layer(net, layer)
    dtype = torch.float64 if gram is None else b.dtype
    directions = _directions(net, center)
    wide = SimpleNamespace(mlp=[b.to(torch.float64)], unembed=directions.double(), tokens=net.tokens)
    if gram is not None:
        check_tensor("gram", gram, (b.d_out, b.d_out), b.w_l)
        gram = gram.double()
    trace, frobenius = vocab_moments(wide, 0, gram=gram)
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


def _layer(net: VocabNet, layer: int) -> BilinearTensor:
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


def _progress(starts: range, title: str, show: bool):
    if not show:
        return starts
    from rich.console import Console
    from rich.progress import track

    return track(starts, description=title, console=Console(stderr=True), transient=True)


class _Store:
    """Finished blocks on disk, each written whole or not at all, each knowing what it was computed from."""

    def __init__(self, folder: Path, settings: dict[str, Any], weights: tuple[Tensor, ...]) -> None:
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for w in weights:
            digest.update(f"{tuple(w.shape)} {w.dtype}".encode())
            digest.update(w.detach().cpu().contiguous().numpy().tobytes())
        self.folder, self.layer, self.device = folder, settings["layer"], weights[0].device
        self.key = digest.hexdigest()
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, start: int) -> Path:
        return self.folder / f"layer{self.layer}-{start:06d}.safetensors"

    def load(self, start: int) -> Eig | None:
        from safetensors import safe_open

        path = self._path(start)
        if not path.exists():
            return None
        with safe_open(path, "pt", device=str(self.device)) as file:
            if (file.metadata() or {}).get("key") != self.key:
                raise ValueError(
                    f"{path} holds a block of other weights, tokens or settings; pass an empty folder, or delete it"
                )
            return Eig(*(file.get_tensor(name) for name in Eig._fields))

    def save(self, start: int, part: Eig) -> None:
        from safetensors.torch import save_file

        path = self._path(start)
        tensors = {name: t.detach().contiguous() for name, t in part._asdict().items()}
        with replacing(path) as unfinished:
            save_file(tensors, unfinished, metadata={"key": self.key})
