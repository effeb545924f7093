"""Gram matrices and inner products of bilinear layers from their factors, block by block over the hidden units."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from tnlm.interp.checks import check_computed

if TYPE_CHECKING:
    from tnlm.interp.layers.bilinear import BilinearTensor

# Elements of one temporary block: 64 MiB in float32.
_BLOCK = 2**24
# Units per block at least, where half of the blocks need not be computed.
_HERMITIAN_ROWS = 256


def _row_blocks(a: "BilinearTensor", b: "BilinearTensor", at_most: int | None = None) -> Iterator[slice]:
    """Slices of the hidden units of ``a`` whose products with all units of ``b`` fit into one block."""
    step = max(1, min(_BLOCK // max(1, b.d_hidden), at_most or a.d_hidden))
    return (slice(start, start + step) for start in range(0, a.d_hidden, step))


def kernel_blocks(
    a: "BilinearTensor", b: "BilinearTensor", metric: Tensor | None = None, *, hermitian: bool
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Inner products of the symmetrised hidden units ``sym(l_h r_h^T)`` of ``a`` with those of ``b``, block by block.

    Yields ``(units of a, units of b, kernel)``. For a layer with itself, under a Hermitian metric, the kernel is
    Hermitian: blocks below its diagonal are left out and those above doubled, so the real (or Hermitian) part of a sum
    over the blocks equals that of the sum over all.
    """
    for rows in _row_blocks(a, b, max(_HERMITIAN_ROWS, a.d_hidden // 16) if hermitian else None):
        columns = slice(rows.start if hermitian else 0, b.d_hidden)
        l_a, r_a, l_b, r_b = a.w_l[rows], a.w_r[rows], b.w_l[columns].mH, b.w_r[columns].mH
        if metric is not None:
            l_a, r_a = l_a @ metric, r_a @ metric
        kernel = ((l_a @ l_b) * (r_a @ r_b) + (l_a @ r_b) * (r_a @ l_b)) / 2
        if hermitian:
            kernel[:, len(l_a) :] *= 2
        yield rows, columns, kernel


def cross_gram(
    a: "BilinearTensor", b: "BilinearTensor", metric: Tensor | None = None, *, hermitian: bool = False
) -> Tensor:
    """Inner products ``G[o, p] = <S_a[o], S_b[p]>`` with a metric ``(d_in of a, d_in of b)`` on both input axes.

    Pass ``hermitian`` for ``a is b`` under a Hermitian metric: half the work.
    """
    g = a.w_d.new_zeros(a.d_out, b.d_out)
    for rows, columns, kernel in kernel_blocks(a, b, metric, hermitian=hermitian):
        g = g + a.w_d[:, rows] @ (kernel @ b.w_d[:, columns].mH)
    g = (g + g.mH) / 2 if hermitian else g
    check_computed("the Gram matrix", g)
    return g


def input_gram(b: "BilinearTensor", metric: Tensor | None = None, second: Tensor | None = None) -> Tensor:
    """Gram matrix ``G[i, k] = S[o,i,j] metric[o,p] second[j,l] S[p,k,l]`` of the inputs.

    Both metrics are symmetric, and identities by default.
    """
    w_l, w_r, outputs = b.w_l, b.w_r, b.w_d if metric is None else metric.mT @ b.w_d
    g = w_l.new_zeros(b.d_in, b.d_in)
    for rows in _row_blocks(b, b):
        m = outputs[:, rows].mT @ b.w_d.conj()
        l_rows, r_rows = (w[rows] if second is None else w[rows] @ second for w in (w_l, w_r))
        right_legs = (m * (r_rows @ w_r.mH)) @ w_l.conj()
        left_legs = (m * (l_rows @ w_l.mH)) @ w_r.conj()
        crossed = (m * (r_rows @ w_l.mH)) @ w_r.conj()
        # the other crossed term is the transpose of this one
        g = g + w_l[rows].mT @ (right_legs + 2 * crossed) + w_r[rows].mT @ left_legs
    g = (g + g.mH) / 8
    check_computed("the Gram matrix", g)
    return g
