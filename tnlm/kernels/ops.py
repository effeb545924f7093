"""Chunked and Triton attention as PyTorch operators, with fake kernels, autograd and FLOP counts.

Each function has two opaque operators, forward and backward, so that ``torch.compile(fullgraph=True)`` can trace
through them. Outputs are new and contiguous; chunked gradients are heads first in memory. PyTorch does not run such
operators under ``torch.func`` transforms. Second derivatives are computed by `tnlm.kernels.eager`.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.utils.flop_counter import register_flop_formula

from tnlm.kernels import chunked, eager
from tnlm.kernels.transforms import partial_gradients


def _module(implementation: str) -> ModuleType:
    """The module of an implementation; triton is imported only if it is used, since it may not be installed."""
    if implementation != "triton":
        return chunked
    from tnlm.kernels import triton_launch

    return triton_launch


@torch.library.custom_op("tnlm::bilinear_attn_fwd", mutates_args=())
def bilinear_fwd(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, causal: bool, scale: float, implementation: str
) -> Tensor:
    return _module(implementation).bilinear_forward(q1, k1, q2, k2, v, causal, scale)


@torch.library.custom_op("tnlm::bilinear_attn_bwd", mutates_args=())
def bilinear_bwd(
    grad: Tensor,
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _module(implementation).bilinear_backward(grad, q1, k1, q2, k2, v, causal, scale)


@torch.library.custom_op("tnlm::squared_attn_fwd", mutates_args=())
def squared_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, implementation: str) -> Tensor:
    return _module(implementation).squared_forward(q, k, v, causal, scale)


@torch.library.custom_op("tnlm::squared_attn_bwd", mutates_args=())
def squared_bwd(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, implementation: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _module(implementation).squared_backward(grad, q, k, v, causal, scale)


def causal_pairs(seq_q: int, seq_k: int, causal: bool) -> int:
    """Number of (query, key) pairs that attend, per head; bottom-right aligned when causal."""
    if not causal:
        return seq_q * seq_k
    rows = min(seq_q, seq_k)
    return rows * seq_k - rows * (rows - 1) // 2


def _register(forward: CustomOpDef, backward: CustomOpDef, definition: Callable[..., Tensor], n_factors: int) -> None:
    """Register fake kernels, autograd and FLOP formulas of a pair of operators on ``2 * n_factors`` tensors and v."""
    n_operands = 2 * n_factors + 1

    @forward.register_fake
    def _(*args):
        q, v = args[0], args[n_operands - 1]
        return v.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3])

    @backward.register_fake
    def _(*args):
        operands, heads_first = args[1 : 1 + n_operands], args[-1] == "chunked"
        return tuple(
            x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) if heads_first else x.new_empty(x.shape)
            for x in operands
        )

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:n_operands])
        ctx.options = inputs[n_operands:]

    def differentiate(ctx, grad):
        operands, (causal, scale, implementation) = ctx.saved_tensors, ctx.options
        if torch.is_grad_enabled():
            return *definition_gradient(grad, operands, causal, scale), None, None, None
        return *backward(grad, *operands, causal, scale, implementation), None, None, None

    def definition_gradient(grad, operands, causal, scale):
        """The gradient computed by `eager`, so that it can be differentiated again."""
        return partial_gradients(lambda *xs: definition(*xs, causal=causal, scale=scale), operands, grad)

    forward.register_autograd(differentiate, setup_context=setup_context)

    def flops(q_shape, v_shape, causal, qk_matmuls, v_matmuls):
        batch, seq_q, n_head, d_qk = q_shape
        pairs = batch * n_head * causal_pairs(seq_q, v_shape[1], causal)
        return 2 * pairs * (qk_matmuls * d_qk + v_matmuls * v_shape[3])

    # Counted are the matmuls of a one-pass backward, the fewest that an implementation needs. Forward and backward:
    # 3 + 8 for bilinear, 2 + 5 for squared.
    @register_flop_formula(forward._opoverload._overloadpacket)
    def _(*args, out_shape=None, **kwargs):
        return flops(args[0], args[n_operands - 1], args[n_operands], n_factors, 1)

    @register_flop_formula(backward._opoverload._overloadpacket)
    def _(*args, out_shape=None, **kwargs):
        return flops(args[1], args[n_operands], args[n_operands + 1], 3 * n_factors, 2)


_register(bilinear_fwd, bilinear_bwd, eager.bilinear, n_factors=2)
_register(squared_fwd, squared_bwd, eager.squared, n_factors=1)
