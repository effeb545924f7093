"""One bilinear layer as a symmetric third-order tensor, kept as its three factor matrices.

Its eigendecomposition is ``eig`` in ``spectra.py``; its other decompositions are in ``decompositions.py``.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Inexact
from torch import Tensor

from tnlm.interp.checks import check_bytes, check_choice, check_computed, check_real, check_symmetric, check_tensor
from tnlm.interp.layers.grams import cross_gram, input_gram, kernel_blocks

Domain = Literal["space", "sphere"]

# Elements of one temporary block of forms: 64 MiB in float32.
_BLOCK = 2**24


@dataclass(frozen=True, eq=False, repr=False)
class BilinearTensor:
    """The layer ``f(x) = w_d (w_l x * w_r x) + bias`` and the tensor ``S`` of its quadratic part.

    ``S`` is symmetric in the two inputs. It is formed densely by :meth:`tensor` only.

    ``S[o, i, j] = 1/2 sum_h w_d[o, h] (w_l[h, i] w_r[h, j] + w_l[h, j] w_r[h, i])``. Norms, inner products and Grams
    are of ``S``, so they do not depend on the gauge of the factors (order of hidden units, scale within a unit, left
    and right exchanged). Everything here is exact up to rounding. float32, float64 and complex, any device; complex
    inner products conjugate the second argument. Tensors are kept, not copied: layers made from this one (``fold``,
    ``project`` and others) may hold views of its factors.

    On inputs of one length, ``|x|**2 == d_in`` after an RMS norm, a multiple of the identity in ``S`` and a constant in
    the bias are the same function, so ``S`` is fixed only up to such multiples. ``domain`` says where the inputs live.
    Analyses of the function (`eig`, `effective_rank`, `truncate`, `hosvd` and others) take the multiple out on the
    sphere. ``tensor``, ``interaction``, ``apply``, ``traces``, ``gram``, ``norm`` and ``inner`` are of ``S`` as it is
    stored: take them of :meth:`canonical` for a number that the function fixes.

    Args:
        w_l, w_r: Input maps, without bias.
        w_d: Output map.
        bias: Constant added to the output; part of the function and of its moments, not of ``S``.
        domain: ``sphere`` for inputs of ``|x|**2 == d_in``, as `extract` sets it for models with RMS norms; ``space``
            for any input. Kept by what leaves the inputs where they are, and by ``fold`` with an orthogonal matrix.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; NaN or infinity.

    Source: Pearce et al. 2025, arXiv:2410.08417; formulas derived in docs/mathematics.md.
    """

    w_l: Inexact[Tensor, "d_hidden d_in"]
    w_r: Inexact[Tensor, "d_hidden d_in"]
    w_d: Inexact[Tensor, "d_out d_hidden"]
    bias: Inexact[Tensor, "d_out"] | None = None
    domain: Domain = field(default="space", kw_only=True)

    def __post_init__(self) -> None:
        check_choice("domain", self.domain, ("space", "sphere"))
        check_tensor("w_l", self.w_l, (None, None))
        check_tensor("w_r", self.w_r, tuple(self.w_l.shape), self.w_l)
        check_tensor("w_d", self.w_d, (None, self.w_l.shape[0]), self.w_l)
        if self.bias is not None:
            check_tensor("bias", self.bias, (self.w_d.shape[0],), self.w_l)

    def __repr__(self) -> str:
        return (
            f"BilinearTensor(d_out={self.d_out}, d_in={self.d_in}, d_hidden={self.d_hidden}, "
            f"bias={self.bias is not None}, domain={self.domain!r}, {self.dtype}, {self.w_l.device})"
        )

    @property
    def d_in(self) -> int:
        return self.w_l.shape[1]

    @property
    def d_hidden(self) -> int:
        return self.w_l.shape[0]

    @property
    def d_out(self) -> int:
        return self.w_d.shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of ``S``, ``(d_out, d_in, d_in)``."""
        return (self.d_out, self.d_in, self.d_in)

    @property
    def dtype(self) -> torch.dtype:
        return self.w_l.dtype

    def to(self, *args, **kwargs) -> "BilinearTensor":
        """The same layer in another dtype or on another device; arguments as of ``Tensor.to``."""
        bias = None if self.bias is None else self.bias.to(*args, **kwargs)
        w_l, w_r, w_d = (w.to(*args, **kwargs) for w in (self.w_l, self.w_r, self.w_d))
        return replace(self, w_l=w_l, w_r=w_r, w_d=w_d, bias=bias)

    def __call__(self, x: Inexact[Tensor, "*batch d_in"]) -> Inexact[Tensor, "*batch d_out"]:
        """The output ``f(x)``; real weights take complex ``x`` too, as the layer is a polynomial."""
        check_tensor("x", x, (..., self.d_in))
        dtype = torch.promote_types(x.dtype, self.dtype)
        x, w_l, w_r, w_d = (t.to(dtype) for t in (x, self.w_l, self.w_r, self.w_d))
        y = ((x @ w_l.mT) * (x @ w_r.mT)) @ w_d.mT
        return y if self.bias is None else y + self.bias

    def __add__(self, other: "BilinearTensor") -> "BilinearTensor":
        """The sum of two layers of one domain, with the hidden units of both: ``(a + b)(x) == a(x) + b(x)``."""
        if not isinstance(other, BilinearTensor):
            return NotImplemented
        if self.shape != other.shape:
            raise ValueError(f"layers must have the same shape to be added, got {self.shape} and {other.shape}")
        if self.domain != other.domain:
            raise ValueError(
                f"layers must have one domain to be added, got {self.domain!r} and {other.domain!r}; "
                "dataclasses.replace(layer, domain=...) sets it"
            )
        check_tensor("w_l of the other layer", other.w_l, (None, None), self.w_l)
        biases = [b for b in (self.bias, other.bias) if b is not None]
        return replace(
            self,
            w_l=torch.cat([self.w_l, other.w_l]),
            w_r=torch.cat([self.w_r, other.w_r]),
            w_d=torch.cat([self.w_d, other.w_d], dim=1),
            bias=sum(biases[1:], biases[0]) if biases else None,
        )

    def __mul__(self, scalar: int | float | complex) -> "BilinearTensor":
        if isinstance(scalar, Tensor) and scalar.ndim:
            raise ValueError(
                f"a layer is multiplied by one number, got shape {tuple(scalar.shape)}; project(m) is m f(x)"
            )
        return replace(self, w_d=self.w_d * scalar, bias=None if self.bias is None else self.bias * scalar)

    __rmul__ = __mul__

    def __neg__(self) -> "BilinearTensor":
        return self * -1

    def __sub__(self, other: "BilinearTensor") -> "BilinearTensor":
        """The difference of two layers; its moments and bounds measure how far they are apart."""
        return self + -other

    def tensor(self, max_bytes: int = 2**30) -> Inexact[Tensor, "d_out width width"]:
        """The dense tensor of the layer, as ``mlp.tensor()`` has it; ``2 d_out d_hidden d_in**2`` flop.

        Without a bias ``S (d_out, d_in, d_in)``. With one that of ``(1, x)``, the constant in front, each input axis
        ``1 + d_in`` long: ``f(x)[o] == sum_ij T[o, i, j] x~[i] x~[j]`` with ``x~ = (1, x)``.

        Raises:
            ValueError: The tensor would need more than ``max_bytes``; refused before allocating.
        """
        width = self.d_in + (self.bias is not None)
        shape = (self.d_out, width, width)
        check_bytes("the dense tensor", shape, self.dtype, max_bytes, "use interaction, apply, gram or eig")
        s = self.interaction(torch.eye(self.d_out, dtype=self.dtype, device=self.w_l.device), max_bytes)
        if self.bias is None:
            return s
        t = F.pad(s, (1, 0, 1, 0))
        t[:, 0, 0] = self.bias
        return t

    def symmetrize(self) -> "BilinearTensor":
        """The same function with equal input maps and ``2 d_hidden`` units: ``lr = 1/4 ((l+r)**2 - (l-r)**2)``."""
        w = torch.cat([self.w_l + self.w_r, self.w_l - self.w_r])
        return replace(self, w_l=w, w_r=w, w_d=torch.cat([self.w_d, -self.w_d], dim=1) / 4)

    def canonical(self) -> "BilinearTensor":
        """The layer itself, or on the sphere the same function with a traceless ``S`` and the trace in the bias.

        ``S'[o] = S[o] - tr S[o] / d_in I`` and ``bias'[o] = bias[o] + tr S[o]``: equal to the layer where
        ``|x|**2 == d_in``, and the same for all layers that are equal there. Adds ``d_in`` hidden units.
        """
        if self.domain == "space":
            return self
        eye = torch.eye(self.d_in, dtype=self.dtype, device=self.w_l.device)
        shift = self.shift()
        return replace(
            self,
            w_l=torch.cat([self.w_l, eye]),
            w_r=torch.cat([self.w_r, eye]),
            w_d=torch.cat([self.w_d, -shift[:, None].expand(-1, self.d_in)], dim=1),
            bias=shift * self.d_in if self.bias is None else self.bias + shift * self.d_in,
        )

    def fold(self, m: Inexact[Tensor, "d_in d_new"]) -> "BilinearTensor":
        """The layer as a function of ``z`` with ``x = m z``; on the sphere again only if ``m`` is orthogonal."""
        check_tensor("m", m, (self.d_in, None), self.w_l)
        domain: Domain = "sphere" if self.domain == "sphere" and _is_orthogonal(m) else "space"
        return replace(self, w_l=self.w_l @ m, w_r=self.w_r @ m, domain=domain)

    def project(self, m: Inexact[Tensor, "d_new d_out"]) -> "BilinearTensor":
        """The layer ``m f(x)``."""
        check_tensor("m", m, (None, self.d_out), self.w_l)
        return replace(self, w_d=m @ self.w_d, bias=None if self.bias is None else m @ self.bias)

    def augment(self, residual: bool = True) -> "BilinearTensor":
        """The layer as a homogeneous quadratic map from ``(1, x)`` to ``(1, x + f(x))``, bias included.

        Without ``residual`` the output is ``(1, f(x))``. One hidden unit is added for the constant and the bias, and
        ``d_in`` for the identity of a residual.
        """
        if residual and self.d_in != self.d_out:
            raise ValueError(
                f"a residual needs d_in == d_out, got d_in={self.d_in}, d_out={self.d_out}; pass residual=False"
            )
        d, h, n = self.d_in, self.d_hidden, self.d_hidden + 1 + (self.d_in if residual else 0)
        w_l, w_r, w_d = (self.w_l.new_zeros(shape) for shape in ((n, d + 1), (n, d + 1), (self.d_out + 1, n)))
        w_l[:h, 1:], w_r[:h, 1:], w_d[1:, :h] = self.w_l, self.w_r, self.w_d
        w_l[h:, 0] = w_r[h, 0] = w_d[0, h] = 1
        if self.bias is not None:
            w_d[1:, h] = self.bias
        if residual:
            w_r[h + 1 :, 1:] = w_d[1:, h + 1 :] = torch.eye(d, dtype=self.dtype, device=self.w_l.device)
        return type(self)(w_l, w_r, w_d)

    def interaction(
        self, u: Inexact[Tensor, "*batch d_out"], max_bytes: int = 2**30
    ) -> Inexact[Tensor, "*batch d_in d_in"]:
        """Interaction matrix ``Q_u`` of each direction ``u``, symmetric: ``u . S(x, x) == x^T Q_u x``.

        Costs ``2 d_hidden d_in**2`` flop each.

        Symmetries: R E P U Q QR V N L H.
        """
        check_tensor("u", u, (..., self.d_out), self.w_l)
        shape = (*u.shape[:-1], self.d_in, self.d_in)
        check_bytes("the interaction matrices", shape, self.dtype, max_bytes, "use fewer directions, apply or eig")
        w = u.reshape(-1, self.d_out) @ self.w_d
        size = max(1, _BLOCK // max(1, self.d_hidden * self.d_in))
        blocks = [(self.w_l.mT * part[:, None]) @ self.w_r for part in w.split(size)]
        q = torch.cat(blocks).reshape(shape) if blocks else w.new_zeros(shape)
        q = (q + q.mT) / 2
        check_computed("the form", q)
        return q

    def apply(
        self, u: Inexact[Tensor, "*batch d_out"], x: Inexact[Tensor, "*batch d_in k"]
    ) -> Inexact[Tensor, "*batch d_in k"]:
        """The product ``Q_u x`` for ``k`` columns without forming ``Q_u``: ``8 d_hidden d_in`` flop per column.

        Symmetries: R E P U Q QR V N L H.
        """
        check_tensor("u", u, (..., self.d_out), self.w_l)
        check_tensor("x", x, (*u.shape[:-1], self.d_in, None), self.w_l)
        k = x.shape[-1]
        w = (u @ self.w_d)[..., None, :].expand(*u.shape[:-1], k, self.d_hidden)
        applied = self.apply_rows(w.reshape(-1, self.d_hidden), x.mT.reshape(-1, self.d_in)).reshape(x.mT.shape).mT
        check_computed("the form applied to x", applied)
        return applied

    def apply_rows(self, w: Inexact[Tensor, "n d_hidden"], x: Inexact[Tensor, "n d_in"]) -> Inexact[Tensor, "n d_in"]:
        """Matrix whose row n is ``Q_u[n] x[n]``, from the hidden weights ``w[n] = u[n] w_d``.

        Arguments are not checked: every Krylov step calls this, four matrix products each time.
        """
        return (((x @ self.w_l.mT) * w) @ self.w_r + ((x @ self.w_r.mT) * w) @ self.w_l) / 2

    def traces(self) -> Inexact[Tensor, " d_out"]:
        """Trace ``sum_i S[o, i, i]`` for every output: the mean of ``f - bias`` over isotropic inputs.

        Symmetries: R E P U Q QR V N L H.
        """
        traces = self.w_d @ (self.w_l * self.w_r).sum(1)
        check_computed("the trace", traces)
        return traces

    def shift(self) -> Inexact[Tensor, " d_out"]:
        """Multiple of the identity in every output that the function does not fix: ``tr S[o] / d_in`` on the sphere.

        Zeros for ``domain="space"``. So ``f(x) = S'(x, x) + shift |x|**2 + bias`` for every ``x``, with the ``S'`` of
        :meth:`canonical`, of which the analyses are.

        Symmetries: R E P U Q QR V N L H.
        """
        return torch.zeros_like(self.w_d[:, 0]) if self.domain == "space" else self.traces() / self.d_in

    def gram(
        self, mode: Literal["out", "in"] = "out", metric: Inexact[Tensor, "n n"] | None = None
    ) -> Inexact[Tensor, "m m"]:
        """Gram matrix of the outputs or of the inputs of ``S``, the other axes contracted.

        ``out``: ``sum_ijkl S[o,i,j] M[i,k] M[j,l] S[p,k,l]``; about three ``d_hidden**2 d_in`` products.
        ``in``: ``sum_opj S[o,i,j] M[o,p] S[p,k,j]``; about seven.

        Args:
            metric: Symmetric metric of the contracted axis, identity by default: for ``out`` an input covariance,
                for ``in`` an output metric such as ``w_u^T w_u`` ("what the logits read").

        Returns:
            ``(d_out, d_out)`` or ``(d_in, d_in)``, symmetric (Hermitian). Its eigenvalues are squared singular
            values: use float64 for the tail.

        Symmetries: R E P U Q QR V N L H.
        """
        check_choice("mode", mode, ("out", "in"))
        if metric is not None:
            size = self.d_in if mode == "out" else self.d_out
            check_tensor("metric", metric, (size, size), self.w_l)
            check_symmetric("metric", metric)
        if mode == "in":
            return input_gram(self, metric)
        return cross_gram(self, self, metric, hermitian=True)

    def norm(self) -> Tensor:
        """Frobenius norm of ``S`` as it is stored, float64.

        Symmetries: R E P U Q QR V N L H.
        """
        return self.inner(self).real.clamp_min(0).sqrt()

    def inner(self, other: "BilinearTensor", kind: Literal["sym", "gaussian", "sphere"] = "sym") -> Tensor:
        """Inner product with another layer of the same shape; the last sum is in float64 (complex128).

        ``sym``: of the tensors, ``<S_a, S_b>``. ``gaussian``: of the functions, bias included, ``E f_a(x) . f_b(x)``
        over ``N(0, 1)``. ``sphere``: the same uniformly over ``|x|**2 = d_in``; it alone does not move under S. Five
        ``d_hidden**2 d_in`` products, about three with itself.

        Symmetries: R E P U Q QR V N L H.
        """
        check_choice("kind", kind, ("sym", "gaussian", "sphere"))
        check_layer(other)
        if self.shape != other.shape:
            raise ValueError(f"layers must have the same shape to be compared, got {self.shape} and {other.shape}")
        check_tensor("w_l of the other layer", other.w_l, (None, None), self.w_l)
        wide = torch.promote_types(self.dtype, torch.float64)
        total = self.w_l.new_zeros((), dtype=wide)
        for rows, columns, kernel in kernel_blocks(self, other, hermitian=other is self):
            outputs = self.w_d[:, rows].mT @ other.w_d[:, columns].conj()
            products = outputs * kernel
            check_computed("the inner product", products)
            total = total + products.sum(dtype=wide)
        if other is self:
            total = total.real.to(wide)
        if kind == "sym":
            return total
        means, other_means = (b.traces().to(wide) for b in (self, other))
        quadratic = 2 * total + _dot(means, other_means)
        if kind == "sphere":
            quadratic = quadratic * (self.d_in / (self.d_in + 2))
        zero = torch.zeros_like(means)
        bias, other_bias = (zero if b.bias is None else b.bias.to(wide) for b in (self, other))
        return quadratic + _dot(bias, other_means) + _dot(means, other_bias) + _dot(bias, other_bias)


def check_layer(b: object, *, real: bool = False) -> None:
    """Raise ValueError unless ``b`` is a `BilinearTensor`; with ``real``, unless its weights are real."""
    if not isinstance(b, BilinearTensor):
        raise ValueError(
            f"the layer must be a BilinearTensor, got {type(b).__name__}; tnlm.interp.extract(model).mlp[layer] is one"
        )
    if real:
        check_real("the layer", b.w_l)


def unit_scale(layer: BilinearTensor) -> tuple[BilinearTensor, float]:
    """The quadratic part of a layer with factors of size 1, and the number that it was divided by, a power of 2.

    Products of factors of any size then stay within the range of the dtype.
    """
    factors, size = [], 1.0
    for w in (layer.w_l, layer.w_r, layer.w_d):
        largest = float(w.abs().max()) if w.numel() else 0.0
        scale = 2.0 ** math.floor(math.log2(largest)) if largest else 1.0
        factors.append(w / scale)
        size *= scale
    w_l, w_r, w_d = factors
    return replace(layer, w_l=w_l, w_r=w_r, w_d=w_d, bias=None), size


def _is_orthogonal(m: Tensor) -> bool:
    """Whether ``m`` is square with orthonormal columns, up to rounding."""
    if m.shape[0] != m.shape[1] or m.is_meta:
        return False
    gap = m.mH @ m - torch.eye(len(m), dtype=m.dtype, device=m.device)
    return bool(gap.abs().max() <= 1e3 * torch.finfo(m.dtype).eps)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b.conj()).sum()
