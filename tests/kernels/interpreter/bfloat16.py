"""Teach Triton's interpreter bfloat16: its dot multiplies bit patterns, its casts truncate (triton issue 11584).

A test-only remedy around three methods of its builder. Afterwards casts equal PyTorch's bit for bit, and a dot of
bfloat16 operands is the exact float32 one, as on a GPU.
"""

import numpy as np
import torch
import triton
import triton.language as tl


def widen(data: np.ndarray) -> np.ndarray:
    """bfloat16 bits, as uint16, to float32."""
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrow(data: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, to nearest even."""
    rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def mend() -> str | None:
    """Patch the interpreter; the reason when that does not work with this triton."""
    try:
        _patch()
        return _disagreement()
    except (ImportError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _patch() -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, float_to_float, dot = (
        getattr(InterpreterBuilder, name) for name in ("cast_impl", "create_fp_to_fp", "create_dot")
    )
    if hasattr(cast, "mended"):
        return

    def converted(source, target):
        """The cast between bfloat16 and float32, None for any other."""
        pair = source.dtype.scalar, target.scalar
        if pair == (tl.bfloat16, tl.float32):
            return TensorHandle(widen(source.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return TensorHandle(narrow(source.data), tl.bfloat16)
        return None

    def mended_cast(self, source, target):
        # A handle's truth value is that of its numbers, so only `is None` may decide.
        result = converted(source, target)
        return cast(self, source, target) if result is None else result

    def mended_float_to_float(self, source, target, rounding_mode):
        result = converted(source, target)
        return float_to_float(self, source, target, rounding_mode) if result is None else result

    def mended_dot(self, a, b, *rest):
        wide = (TensorHandle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, *wide, *rest)

    mended_cast.mended = True
    InterpreterBuilder.cast_impl = mended_cast
    InterpreterBuilder.create_fp_to_fp = mended_float_to_float
    InterpreterBuilder.create_dot = mended_dot


@triton.jit
def _probe_kernel(x, y, rounded, product, N: tl.constexpr):
    offsets = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    b_x = tl.load(x + offsets)
    b_y = tl.load(y + offsets)
    tl.store(rounded + offsets, b_x.to(tl.bfloat16))
    tl.store(product + offsets, tl.dot(b_x.to(tl.bfloat16), b_y))


def _disagreement() -> str | None:
    """Compare a cast, subnormals and ties included, and a dot with PyTorch's."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    x[0, :4] = torch.tensor([1e-39, 1 + 2**-8, 1 + 3 * 2**-8, 0.0])
    y = x.flip(0).bfloat16()
    rounded, product = torch.empty_like(y), torch.empty_like(x)
    _probe_kernel[(1,)](x, y, rounded, product, N=16)
    if not torch.equal(rounded, x.bfloat16()):
        return "casts still differ from PyTorch's"
    if not torch.allclose(product, x.bfloat16().float() @ y.float(), rtol=1e-6, atol=1e-6):
        return "dots still differ from PyTorch's"
    return None
