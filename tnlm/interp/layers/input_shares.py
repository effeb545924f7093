"""How much each part of a layer's input, and each pair of parts, adds to one direction of its output."""

from jaxtyping import Float
from torch import Tensor

from tnlm.interp.checks import check_tensor
from tnlm.interp.layers.bilinear import BilinearTensor, check_layer


def layer_pairs(b: BilinearTensor, u: Float[Tensor, " d_out"], parts: Float[Tensor, "p d_in"]) -> Float[Tensor, "p p"]:
    """Contribution ``f_p^T Q_u f_q`` of every pair of parts of ``x = sum parts`` to ``u . (f(x) - bias)``.

    The matrix is symmetric and sums to that number; the interaction of two different parts is twice their entry. Exact,
    from ``w_l f_p`` and ``w_r f_p`` alone. Of ``S`` as it is stored: inputs of one length do not tell a multiple of
    ``f_p . f_q`` in every entry from the bias.

    Symmetries: R E P U Q QR V N L H.
    """
    _check(b, u, parts)
    left, right = parts @ b.w_l.mT, parts @ b.w_r.mT
    pairs = (left * (u @ b.w_d)) @ right.mT
    return (pairs + pairs.mT) / 2


def layer_shapley(
    b: BilinearTensor,
    u: Float[Tensor, " d_out"],
    parts: Float[Tensor, "p d_in"],
    baseline: Float[Tensor, " d_in"] | None = None,
) -> Float[Tensor, " p"]:
    """Shapley value of every part of ``x = baseline + sum parts`` for ``u . f(x)``; they sum to its change.

    Exact closed form, ``2 f_p . Q b + f_p . Q sum_q f_q``: of a quadratic form the two parts of a pair share their
    interaction equally. For single coordinates pass the parts ``diag(x - baseline)``.

    Symmetries: R E P U Q QR V N L H.
    """
    pairs = layer_pairs(b, u, parts)
    shares = pairs.sum(1)
    if baseline is None:
        return shares
    check_tensor("baseline", baseline, (b.d_in,), b.w_l)
    pull = b.apply(u, baseline[:, None])[:, 0]
    return shares + 2 * parts @ pull


def _check(b: BilinearTensor, u: Tensor, parts: Tensor) -> None:
    check_layer(b, real=True)
    check_tensor("u", u, (b.d_out,), b.w_l)
    check_tensor("parts", parts, (None, b.d_in), b.w_l)
