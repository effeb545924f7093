"""Similarity of two layers or stacks of layers as functions, and its distribution under chance."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tnlm.checks import seeded
from tnlm.interp.checks import check_bytes
from tnlm.interp.layers.bilinear import BilinearTensor, check_layer, unit_scale
from tnlm.interp.layers.grams import cross_gram
from tnlm.interp.layers.heads import BilinearHead
from tnlm.network import Network

Kind = Literal["sym", "gaussian", "sphere", "complex", "tree"]
Map = BilinearTensor | Sequence[BilinearTensor] | Network | Callable[[Tensor], Tensor]

KINDS = get_args(Kind)
GIVEN = "coordinates as given"
_SAMPLES = 4096
_CHUNK = 512


class Similarity(NamedTuple):
    """Cosine in [-1, 1] and its standard error (0 in closed form): scalars, or one entry per layer; float64."""

    value: Tensor
    error: Tensor
    basis: str = GIVEN
    """What is compared: weights in the coordinates of their inputs, which two models do not share, or ``tokens``."""
    parts: tuple[str, ...] = ()
    """Of models: what each entry of ``value`` is about, such as ``mlp 0``."""
    chance: Tensor | None = None
    """Of models: ``(permutations, parts)``, ``value`` with the tokens of one model renamed at random."""


class HaarNull(NamedTuple):
    """Mean and variance of ``<S_a, S_b>`` when one input space is turned at random; z-score of the real value."""

    mean: Tensor
    variance: Tensor
    z: Tensor


def map_similarity(
    a: Map,
    b: Map,
    kind: Kind = "sym",
    samples: int | None = None,
    per_layer: bool = False,
    seed: int = 0,
    *,
    residual: bool = False,
    d_in: int | None = None,
    max_bytes: int = 2**30,
) -> Similarity:
    """Cosine of two layers, stacks, networks or functions in the coordinates of their inputs.

    Arguments are those of `tnlm.interp.similarity`, which documents them.
    """
    if per_layer:
        return _per_layer(a, b, kind, residual)
    stacks = [_stack(m, kind) for m in (a, b)]
    if None not in stacks and samples is None:
        exact = _closed_form(kind, stacks, residual, max_bytes)
        if exact is not None:
            return cosine(*exact)
    if kind in ("sym", "tree"):
        raise ValueError(
            f'kind="{kind}" has a closed form only, for layers without residual'
            + (" and at most two of them" if kind == "sym" else "")
            + '; use kind="complex", which agrees with it degree by degree'
        )
    width = next((stack[0].d_in for stack in stacks if stack), d_in)
    if width is None:
        raise ValueError("d_in must be given to sample two functions, got None")
    maps = [_function(m) if stack is None else _forward(stack, residual) for m, stack in zip((a, b), stacks)]
    like = next((stack[0].w_l for stack in stacks if stack), None)
    return _sampled(maps, kind, width, samples or _SAMPLES, seed, like)


def haar_null(a: BilinearTensor, b: BilinearTensor) -> HaarNull:
    """Chance level of ``<S_a, S_b>`` in the basis in which both layers are given, so for layers of one model; exact.

    One input space is rotated by a Haar-random orthogonal matrix: mean ``m_a . m_b / d`` with the traces ``m``;
    variance ``2 <G0_a, G0_b> / ((d - 1)(d + 2))`` with the Grams ``G0`` of the traceless parts. On the sphere ``S`` is
    the traceless one of :meth:`~BilinearTensor.canonical`. Where the variance is 0, so is z. Two output Grams and one
    inner product.

    Symmetries: R E P U Q QR V N L H S.
    """
    check_layer(a, real=True)
    check_layer(b, real=True)
    (a, size_a), (b, size_b) = unit_scale(a), unit_scale(b)
    a, b = a.canonical(), b.canonical()
    value, size, d = a.inner(b), size_a * size_b, a.d_in
    traces = [layer.traces().double() for layer in (a, b)]
    mean = traces[0] @ traces[1] / d
    grams = [layer.gram("out").double() - torch.outer(m, m) / d for layer, m in zip((a, b), traces)]
    # in one dimension there is no rotation, and both traceless parts are zero
    variance = (2 * (grams[0] * grams[1]).sum() / (max(d - 1, 1) * (d + 2))).clamp_min(0)
    z = torch.where(variance > 0, (value - mean) / torch.where(variance > 0, variance, 1).sqrt(), 0)
    return HaarNull(mean * size, variance * size**2, z)


def head_product(x: BilinearHead, y: BilinearHead, distances: Sequence[int]) -> Tensor:
    """Inner product of two heads in one basis: of patterns, summed over distances, times value circuits."""
    patterns = torch.stack([x.inner(y, distance) for distance in distances]).sum()
    values = x.ov().inner(y.ov())
    if x.v0 is not None and y.v0 is not None:
        values = values + x.ov("first").inner(y.ov("first"))
    return patterns * values


def _function(m: Map) -> Callable[[Tensor], Tensor]:
    """A plain function of ``(n, d_in)``."""
    if not isinstance(m, Network):
        return m  # type: ignore[return-value]
    if len(m.inputs) != 1 or len(next(iter(m.inputs.values()))) != 2:
        inputs = ", ".join(f"{name} ({' '.join(indices)})" for name, indices in m.inputs.items())
        raise ValueError(
            f"a Network must have one input (batch, d_in) to be compared, got {inputs or 'none'}; "
            "pass a function of (n, d_in) that contracts it"
        )
    (name,) = m.inputs
    return lambda x: m.contract({name: x})


def _stack(m: Map, kind: Kind) -> list[BilinearTensor] | None:
    """The layers of a map; None for a plain function."""
    if isinstance(m, BilinearTensor):
        # the bias and the scale of the factors are no part of the tensor
        return [(unit_scale(m)[0] if kind in ("sym", "tree") else m).canonical()]
    if not isinstance(m, Sequence):
        if not callable(m) and not isinstance(m, Network):
            raise ValueError(
                "a map must be a layer, a sequence of layers, a Network or a function, and a model is compared with a "
                f"model, got {type(m).__name__}"
            )
        return None
    if not m or not all(isinstance(layer, BilinearTensor) for layer in m):
        raise ValueError("a stack must hold at least one BilinearTensor and nothing else")
    for lower, upper in itertools.pairwise(m):
        if lower.d_out != upper.d_in:
            raise ValueError(f"a layer of d_out={lower.d_out} cannot feed one of d_in={upper.d_in}")
    return list(m)


def _per_layer(a: Map, b: Map, kind: Kind, residual: bool) -> Similarity:
    if not isinstance(a, Sequence) or not isinstance(b, Sequence) or len(a) != len(b) or not a:
        raise ValueError("per_layer needs two stacks of the same number of layers")
    rows = [map_similarity(x, y, kind, residual=residual) for x, y in zip(a, b)]
    return Similarity(torch.stack([row.value for row in rows]), torch.stack([row.error for row in rows]))


def cosine(ab: Tensor, aa: Tensor, bb: Tensor) -> Similarity:
    """Cosine from three inner products; the roots are taken first, as the product of the norms may overflow."""
    if float(aa) <= 0 or float(bb) <= 0:
        raise ValueError("a map that is zero has no similarity to anything")
    value = ab.real / aa.real.sqrt() / bb.real.sqrt()
    return Similarity(value, torch.zeros_like(value))


def _closed_form(kind: Kind, stacks: list, residual: bool, max_bytes: int) -> tuple[Tensor, ...] | None:
    """``ab, aa, bb`` in closed form, or None where there is none."""
    a, b = stacks
    if len(a) == len(b) == 1 and not (residual and kind in ("sym", "tree")):
        if residual and a[0].d_in != a[0].d_out:
            raise ValueError(f"a residual needs d_in == d_out, got {a[0].d_in} and {a[0].d_out}")
        return tuple(_layer_inner(x, y, kind, residual) for x, y in ((a[0], b[0]), (a[0], a[0]), (b[0], b[0])))
    if residual or len(a) != len(b):
        return None
    if kind == "tree":
        return tuple(_tree_inner(x, y) for x, y in ((a, b), (a, a), (b, b)))
    if kind == "sym" and len(a) == 2:
        return tuple(_two_layer_inner(x, y, max_bytes) for x, y in ((a, b), (a, a), (b, b)))
    return None


def _layer_inner(a: BilinearTensor, b: BilinearTensor, kind: Kind, residual: bool) -> Tensor:
    if kind == "sym" or kind == "tree":
        return a.inner(b).real
    if kind == "complex":
        total = 2 * a.inner(b).real
        if a.bias is not None and b.bias is not None:
            total = total + (a.bias * b.bias.conj()).sum().real
    else:
        total = a.inner(b, kind).real
    return total + a.d_in if residual else total


def _tree_inner(a: list[BilinearTensor], b: list[BilinearTensor]) -> Tensor:
    gram = cross_gram(a[0], b[0])
    for x, y in zip(a[1:], b[1:]):
        gram = cross_gram(x, y, gram)
    return torch.trace(gram).real.double()


def _two_layer_inner(a: list[BilinearTensor], b: list[BilinearTensor], max_bytes: int) -> Tensor:
    """Inner product of ``f2(f1(x))`` over all 24 orders of its 4 legs: 3 pairings, two of them equal."""
    p, q, d = a[0].d_out, b[0].d_out, a[0].d_in
    if b[0].d_in != d or a[1].d_out != b[1].d_out:
        raise ValueError("stacks must have the same input and output widths to be compared")
    shape = (p, q, max(d * d, p * q))
    check_bytes("the table of crossed legs", shape, a[0].dtype, max_bytes, 'use kind="complex"')
    a, b = ([replace(layer, bias=None) for layer in stack] for stack in (a, b))
    lower_a, lower_b = a[0].tensor(max_bytes), b[0].tensor(max_bytes).conj()
    products = torch.einsum("aij,ejl->aeil", lower_a, lower_b)
    crossed = torch.einsum("aeil,bcli->abce", products, products)
    upper_a, upper_b = a[1].tensor(max_bytes), b[1].tensor(max_bytes).conj()
    cross = torch.einsum("oab,abce,oce->", upper_a, crossed, upper_b)
    return (_tree_inner(a, b) + 2 * cross.real.double()) / 3


def _forward(layers: list[BilinearTensor], residual: bool) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = x + layer(x) if residual else layer(x)
        return x

    return run


def _sampled(maps: list, kind: Kind, d: int, samples: int, seed: int, like: Tensor | None) -> Similarity:
    generator = seeded(seed)
    real = torch.float64 if like is None else like.dtype.to_real()
    columns = []
    for start in range(0, samples, _CHUNK):
        shape = (min(_CHUNK, samples - start), d)
        x = torch.randn(shape, generator=generator, dtype=torch.complex128 if kind == "complex" else torch.float64)
        if kind == "sphere":
            x = x * (d**0.5 / x.norm(dim=1, keepdim=True))
        x = x.to(real.to_complex() if kind == "complex" else real)
        x = x if like is None else x.to(like.device)
        y, z = (m(x).reshape(len(x), -1) for m in maps)
        if y.shape != z.shape:
            raise ValueError(f"maps must have the same output width, got {y.shape[1]} and {z.shape[1]}")
        wide = torch.promote_types(y.dtype, torch.float64)
        y, z = y.to(wide), z.to(wide)
        columns.append(torch.stack([(y * z.conj()).real.sum(1), y.abs().square().sum(1), z.abs().square().sum(1)]))
    sums = torch.cat(columns, dim=1)
    total = sums.sum(1)
    if not bool(torch.isfinite(total).all()):
        raise ValueError("a map gave NaN or infinite values on the samples")
    value = cosine(*total).value
    ab, aa, bb = total[:, None] - sums
    dropped = ab / aa.sqrt() / bb.sqrt()
    error = ((samples - 1) / samples * (dropped - dropped.mean()).square().sum()).sqrt()
    return Similarity(value, error)
