"""Random layers and heads in float64, pairwise different sizes."""

from dataclasses import replace

import torch
from torch import Tensor

from tnlm.interp import BilinearHead, BilinearTensor

SHAPES = [(2, 3, 5), (7, 5, 3), (1, 1, 1)]  # d_out, d_in, d_hidden


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_layer(
    d_out: int = 3,
    d_in: int = 5,
    d_hidden: int = 7,
    bias: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> BilinearTensor:
    shapes = [(d_hidden, d_in), (d_hidden, d_in), (d_out, d_hidden), (d_out,)][: 4 if bias else 3]
    return BilinearTensor(*(noise(*s, seed=10 * seed + n, dtype=dtype) for n, s in enumerate(shapes)))


def on_sphere(b: BilinearTensor) -> BilinearTensor:
    """The same layer, its inputs of squared length ``d_in``."""
    return replace(b, domain="sphere")


def sphere_points(n: int, d: int, seed: int = 0) -> Tensor:
    """Random inputs of squared length ``d``."""
    x = noise(n, d, seed=seed)
    return x * (d**0.5 / x.norm(dim=1, keepdim=True))


def shifted(b: BilinearTensor, c: Tensor) -> BilinearTensor:
    """``b`` with ``c[o] |x|**2`` added to every output and ``c[o] d_in`` taken from its bias: equal on the sphere."""
    eye = torch.eye(b.d_in, dtype=b.dtype)
    identity = BilinearTensor(eye, eye, c[:, None].expand(-1, b.d_in), -b.d_in * c, domain=b.domain)
    return b + identity


def monomial(i: int, j: int, d_in: int) -> BilinearTensor:
    """``f(x) = x_i x_j``, one output."""
    eye = torch.eye(d_in, dtype=torch.float64)
    return BilinearTensor(eye[i : i + 1], eye[j : j + 1], torch.ones(1, 1, dtype=torch.float64))


def dense(b: BilinearTensor) -> Tensor:
    """The symmetric tensor by the definition, on its own."""
    t = torch.einsum("oh,hi,hj->oij", b.w_d, b.w_l, b.w_r)
    return (t + t.transpose(1, 2)) / 2


def gauged(b: BilinearTensor, seed: int = 0) -> BilinearTensor:
    """The same function under a random order, scale and left-right swap of the hidden units."""
    h = b.d_hidden
    order = torch.randperm(h, generator=torch.Generator().manual_seed(seed))
    p, q = noise(h, seed=seed), noise(h, seed=seed + 1)
    w_l, w_r = b.w_l * p[:, None], b.w_r * q[:, None]
    swap = (torch.arange(h) % 2 == 0)[:, None]
    w_l, w_r = torch.where(swap, w_r, w_l), torch.where(swap, w_l, w_r)
    return replace(b, w_l=w_l[order], w_r=w_r[order], w_d=(b.w_d / (p * q))[:, order])


def make_head(
    attention: str = "bilinear",
    d_in: int = 7,
    d_qk: int = 4,
    d_head: int = 3,
    d_out: int = 5,
    first: bool = True,
    seed: int = 0,
    **changes,
) -> BilinearHead:
    shapes = {"q1": (d_qk, d_in), "k1": (d_qk, d_in), "q2": (d_qk, d_in), "k2": (d_qk, d_in)}
    if attention not in ("bilinear", "differential"):
        shapes = {name: shapes[name] for name in ("q1", "k1")}
    shapes |= {"v": (d_head, d_in), "o": (d_out, d_head)} | ({"v0": (d_head, d_in)} if first else {})
    maps = {name: noise(*shape, seed=20 * seed + n) for n, (name, shape) in enumerate(shapes.items())}
    rotary = torch.linspace(1.0, 0.3, d_qk // 2, dtype=torch.float64)
    settings = {"value_mix": 0.3 if first else 0.0, "rotary": rotary, "attention": attention}
    return BilinearHead(**(maps | settings | changes))
