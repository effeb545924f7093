"""Dtypes of the layers and kernels: in which one sums are formed, how results are rounded, and autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
FP16_MAX = torch.finfo(torch.float16).max
CASTABLE = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that autocast casts; float64 and complex stay as they are."""
SUPPORTED = (*CASTABLE, torch.float64, torch.complex64, torch.complex128)
"""The dtypes of attention: torch has no products of the others, such as float8 or complex32, on a CPU."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which scores and sums are formed: float32 for float16 and bfloat16, else ``dtype`` itself."""
    return torch.float32 if dtype in HALF else dtype


def linear(
    x: Shaped[Tensor, "... d_in"], w: Shaped[Tensor, "d_out d_in"], bias: Shaped[Tensor, " d_out"] | None = None
) -> Shaped[Tensor, "... d_out"]:
    """``x w^T + bias`` in ``x``'s dtype: float32 weights are cast to bf16 activations, as in the published training."""
    return F.linear(x, w.to(x.dtype), None if bias is None else bias.to(x.dtype))


def narrow(out: Tensor, dtype: torch.dtype) -> Tensor:
    """``out`` rounded to ``dtype``; on a CPU, a ValueError if a finite value would become infinite in float16.

    The check reads values, so it is left out where there are none: in compilation, fake tensors and transforms.
    """
    if dtype == torch.float16 and out.device.type == "cpu" and not torch.compiler.is_compiling():
        concrete = type(out) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(out)
        if concrete and out.numel():
            _refuse_overflow(out.detach().abs().nan_to_num(posinf=0.0).amax().item())
    return out.to(dtype)


def _refuse_overflow(largest: float) -> None:
    if largest > FP16_MAX:
        raise ValueError(
            f"the attention output must fit float16 (|x| <= {FP16_MAX:.0f}), got {largest:.6g}: nothing bounds "
            "the scores without softmax; use bfloat16 or float32, a smaller scale, or normed q and k"
        )


def autocast_active(device: str) -> bool:
    """Whether autocast is on for this type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager:
    """A context in which autocast is off, so that matmuls keep the dtype of their operands."""
    return torch.autocast(device, enabled=False) if autocast_active(device) else nullcontext()
