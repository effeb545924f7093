"""Operands, the definition in loops, and the error contract that every implementation is held to."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.limits import assert_within, limit, unit_roundoff
from tnlm.kernels import bilinear_attention, squared_attention

FUNCTIONS = {"bilinear": bilinear_attention, "squared": squared_attention}
SHAPES_CHECKED = hasattr(bilinear_attention, "__wrapped__")
"""Whether annotations are checked at run time, by code that neither Dynamo nor Triton can read."""
LENGTHS = (1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129, 1000)
HALF = (torch.bfloat16, torch.float16)
LIMITS = {dtype: unit_roundoff(dtype) + limit(torch.float32, 16) for dtype in HALF}
LIMITS |= {dtype: limit(dtype, 16) for dtype in (torch.float32, torch.float64)}
"""Largest error of an output or a gradient: a norm, relative to that of the same sum over absolute values.

In a norm the errors of the entries average, as those of 16 roundings at most. Half precision is summed in float32, and
rounded once.
"""


def operands(
    kind: str,
    *,
    seq_q: int,
    seq_k: int | None = None,
    batch: int = 2,
    n_head: int = 3,
    d_qk: int = 4,
    d_v: int = 10,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Noise for q1, k1, q2, k2, v or q, k, v, requiring gradients; drawn in float64, then rounded."""
    seq_k = seq_q if seq_k is None else seq_k
    draw = torch.complex128 if dtype.is_complex else torch.float64
    shapes = [(seq_q, d_qk), (seq_k, d_qk)] * (2 if kind == "bilinear" else 1) + [(seq_k, d_v)]
    return [torch.randn(batch, seq, n_head, d, dtype=draw).to(dtype).requires_grad_() for seq, d in shapes]


def random_grad(tensors: list[Tensor]) -> Tensor:
    """Noise for the gradient that comes in, in the shape of the output."""
    q, v = tensors[0], tensors[-1]
    return torch.randn(*q.shape[:3], v.shape[3], device=v.device).to(v.dtype)


def outputs_and_gradients(
    kind: str, tensors: list[Tensor], grad: Tensor | None = None, **options: object
) -> list[Tensor]:
    """The output, then the gradient of each operand for the incoming gradient ``grad`` (ones by default)."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = FUNCTIONS[kind](*leaves, **options)
    grad = torch.ones_like(out) if grad is None else grad
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def loops(kind: str, tensors: list[Tensor], *, causal: bool, scale: float) -> Tensor:
    """The sum of the definition, one pair of positions at a time."""
    q1, k1, q2, k2, v = tensors if kind == "bilinear" else [*tensors[:2], *tensors[:2], tensors[2]]
    (batch, seq_q, n_head, _), seq_k = q1.shape, v.shape[1]
    out = v.new_zeros(batch, seq_q, n_head, v.shape[3])
    for i in range(seq_q):
        for j in range(seq_k):
            if not causal or j <= i + seq_k - seq_q:
                score = (q1[:, i] * k1[:, j]).sum(-1) * (q2[:, i] * k2[:, j]).sum(-1) * scale
                out[:, i] += score[..., None] * v[:, j]
    return out


def assert_contract(kind: str, tensors: list[Tensor], grad: Tensor, implementations: Sequence[str]) -> None:
    """Errors against float64 within the limit of the dtype, and within twice those of eager above half of it.

    An error is a norm relative to that of the same sum over absolute values: relative to the value itself, a sum
    that happens to cancel would fail at any precision.
    """
    wide = [x.detach().double() for x in tensors]
    want = outputs_and_gradients(kind, wide, grad.double(), implementation="eager")
    size = outputs_and_gradients(kind, [x.abs() for x in wide], grad.double().abs(), implementation="eager")

    def errors(implementation: str) -> list[float]:
        got = outputs_and_gradients(kind, tensors, grad, implementation=implementation)
        return [((a.double() - b).norm() / c.norm()).item() for a, b, c in zip(got, want, size, strict=True)]

    largest, eager = LIMITS[grad.dtype], errors("eager")
    for implementation in implementations:
        for error, reference in zip(eager if implementation == "eager" else errors(implementation), eager, strict=True):
            assert_within(error, largest, implementation)
            assert error <= max(2 * reference, largest / 2), implementation


def in_nan_buffer(x: Tensor, rows: int = 3) -> Tensor:
    """The same numbers as a view whose neighbours in memory, on every side, are NaN."""
    batch, seq, n_head, d = x.shape
    shape = (batch + 2, seq + 2 * rows, n_head + 2, d + 32)
    buffer = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    view = buffer[1:-1, rows:-rows, 1:-1, 16:-16]
    view.copy_(x.detach())
    return view


def misaligned(x: Tensor) -> Tensor:
    """The same numbers, packed, at an address that is no multiple of 16 bytes."""
    buffer = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
    view = buffer[1:].view_as(x).copy_(x.detach())
    assert view.data_ptr() % 16
    return view


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "seq last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "every second head": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "every second number": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "storage offset": lambda x: torch.cat([x[:1], x])[1:],
    "fused": lambda x: torch.cat([x, x, x], dim=3)[..., x.shape[3] : 2 * x.shape[3]],
    "flipped twice": lambda x: x.flip(1).flip(1),
    "NaN around": in_nan_buffer,
}
"""Layouts of the same numbers; kernels see strides, offsets and neighbours that a packed tensor never has."""
