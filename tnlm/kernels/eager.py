"""The definition of bilinear and squared attention: dense scores in plain differentiable torch.

Every other implementation is tested against this one. It supports every floating and complex dtype, any ``torch.func``
transform and double backward, and holds ``seq_q * seq_k`` numbers per head and score. A model whose implementation is
"eager", or with a hook on scores or pattern, uses the same formula in ``Attention._pattern`` (``tnlm/attention.py``).
"""

import torch
from jaxtyping import Bool, Inexact
from torch import Tensor

from tnlm.kernels.precision import accumulation_dtype, narrow


def causal_mask(seq_q: int, seq_k: int, device: torch.device) -> Bool[Tensor, "seq_q seq_k"]:
    """True where query i sees key j, ``j <= i + seq_k - seq_q``: bottom-right, the last query sees all."""
    return torch.ones(seq_q, seq_k, dtype=torch.bool, device=device).tril(seq_k - seq_q)


def bilinear(
    q1: Inexact[Tensor, "batch seq_q n_head d_qk"],
    k1: Inexact[Tensor, "batch seq_k n_head d_qk"],
    q2: Inexact[Tensor, "batch seq_q n_head d_qk"],
    k2: Inexact[Tensor, "batch seq_k n_head d_qk"],
    v: Inexact[Tensor, "batch seq_k n_head d_v"],
    *,
    causal: bool,
    scale: float,
) -> Inexact[Tensor, "batch seq_q n_head d_v"]:
    """Bilinear attention ``out_i = sum_j scale (q1_i . k1_j) (q2_i . k2_j) v_j``; complex inputs are not conjugated."""
    return _attend(_scores(q1, k1) * _scores(q2, k2), v, causal=causal, scale=scale)


def squared(
    q: Inexact[Tensor, "batch seq_q n_head d_qk"],
    k: Inexact[Tensor, "batch seq_k n_head d_qk"],
    v: Inexact[Tensor, "batch seq_k n_head d_v"],
    *,
    causal: bool,
    scale: float,
) -> Inexact[Tensor, "batch seq_q n_head d_v"]:
    """Squared attention ``out_i = sum_j scale (q_i . k_j)**2 v_j``; complex scores are squared, not their modulus."""
    score = _scores(q, k)
    return _attend(score * score, v, causal=causal, scale=scale)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """All dot products, (batch, n_head, seq_q, seq_k), in the accumulation dtype."""
    return _heads_first(q) @ _heads_first(k).mT


def _attend(product: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Scale, mask and sum over keys; the output is rounded once, to the dtype of ``v``."""
    pattern = product * scale
    if causal:
        mask = causal_mask(pattern.shape[-2], pattern.shape[-1], pattern.device)
        pattern = pattern.masked_fill(~mask, 0)
    out = (pattern @ _heads_first(v)).transpose(1, 2).contiguous()
    return narrow(out, v.dtype)


def _heads_first(x: Tensor) -> Tensor:
    """(batch, seq, n_head, d) to a packed (batch, n_head, seq, d), so that the bits do not depend on strides of x."""
    return x.to(accumulation_dtype(x.dtype)).transpose(1, 2).contiguous()
