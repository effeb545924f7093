"""One attention head as factor matrices: query-key forms, pattern tensor of fourth order, output-value circuits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Inexact
from torch import Tensor

from tnlm.interp.checks import check_bytes, check_choice, check_count, check_number, check_real, check_tensor
from tnlm.interp.layers.lowrank import LowRank
from tnlm.interp.ranking import as_table, rank_pairs, token_ids

Kind = Literal["bilinear", "squared", "squared_normalized", "softmax", "differential"]

_NO_TENSOR = {
    "squared_normalized": (
        "each row is divided by its sum; the numerator is the pattern of the head with attention='squared', "
        "to be divided by the row sums of a run"
    ),
    "softmax": "softmax is not polynomial; qk and ov are its exact parts",
    "differential": "a difference of two softmaxes is not polynomial; qk and ov are its exact parts",
}


class TokenScore(NamedTuple):
    """Pattern value of a query token looking at a key token."""

    query: int
    key: int
    value: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BilinearHead:
    """The factor matrices of a head with pattern ``(q1 . k1 / a)(q2 . k2 / a)``, ``a = d_qk``, rows not normalised.

    Rotary positions matter only through ``distance`` = query position - key position. Exact for a head without QK norm
    and for ideal (not bfloat16-rounded) tables; with ``qk_norm`` every form is exact given the norms of a run, and
    `token_scores` is exact outright. With query or key biases pass maps of ``(1, x)``.

    Args:
        q1, k1: First branch. q2, k2: Second, for bilinear and differential; ``squared`` ties it to the first.
        v, o: Value and output maps.
        v0: Value map of layer 0, mixed in with weight ``value_mix``; None at layer 0 and without mixing.
        rotary: Angle per unit of distance of every pair ``(f, f + a / 2)``, in radians; zeros for none.
        attention: Kind; without a polynomial pattern there are `qk` and `ov` only, and the rest raises with the reason.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; NaN or infinity.
    """

    q1: Inexact[Tensor, "d_qk d_in"]
    k1: Inexact[Tensor, "d_qk d_in"]
    q2: Inexact[Tensor, "d_qk d_in"] | None = None
    k2: Inexact[Tensor, "d_qk d_in"] | None = None
    v: Inexact[Tensor, "d_head d_in"]
    v0: Inexact[Tensor, "d_head d_in"] | None = None
    o: Inexact[Tensor, "d_out d_head"]
    value_mix: float = 0.0
    rotary: Float[Tensor, " half"]
    qk_norm: bool = False
    norm_eps: float = 1.1920929e-07
    attention: Kind = "bilinear"

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, ("bilinear", "squared", *_NO_TENSOR))
        check_tensor("q1", self.q1, (None, None))
        shape = tuple(self.q1.shape)
        if shape[0] % 2:
            raise ValueError(f"d_qk must be even (rotary turns pairs), got q1 of shape {shape}")
        check_tensor("k1", self.k1, shape, self.q1)
        pair = self.attention in ("bilinear", "differential")
        for name in ("q2", "k2"):
            w = getattr(self, name)
            if (w is not None) != pair:
                raise ValueError(
                    f"{name} must be {'given' if pair else 'None'} for attention={self.attention!r}, "
                    f"got {'None' if w is None else tuple(w.shape)}"
                )
            if w is not None:
                check_tensor(name, w, shape, self.q1)
        check_number("value_mix", self.value_mix)
        check_number("norm_eps", self.norm_eps, 0)
        check_tensor("v", self.v, (None, shape[1]), self.q1)
        if self.v0 is not None:
            check_tensor("v0", self.v0, tuple(self.v.shape), self.q1)
        elif self.value_mix != 0:
            raise ValueError(f"value_mix={self.value_mix} needs v0, the value map of layer 0, got None")
        check_tensor("o", self.o, (None, self.v.shape[0]), self.q1)
        check_tensor("rotary", self.rotary, (shape[0] // 2,))

    def __repr__(self) -> str:
        sizes = f"d_in={self.d_in}, d_qk={self.d_qk}, d_head={self.v.shape[0]}"
        return f"BilinearHead({self.attention}, {sizes}, {self.q1.dtype})"

    @property
    def d_in(self) -> int:
        return self.q1.shape[1]

    @property
    def d_qk(self) -> int:
        return self.q1.shape[0]

    @property
    def polynomial(self) -> bool:
        """Whether the pattern is a polynomial of its inputs, so that the tensor exists."""
        return self.attention not in _NO_TENSOR

    def qk(self, branch: int = 1, distance: int = 0) -> LowRank:
        """The matrix ``W`` in ``score = x_query^T W x_key``: rank ``d_qk``, scale ``1 / d_qk`` included.

        Symmetries: R E P U QR V L X H S.
        """
        q, k = self._branch(branch)
        return LowRank(q.mT, self._turn(k, -distance) / self.d_qk)

    def ov(self, source: Literal["layer", "first"] = "layer") -> LowRank:
        """Output-value map, from the normed input of this layer or of layer 0 (value residual) to the residual.

        Symmetries: R E P U Q QR V L H S.
        """
        check_choice("source", source, ("layer", "first"))
        if source == "layer":
            return LowRank(self.o * (1 - self.value_mix), self.v)
        if self.v0 is None:
            raise ValueError('this head mixes in no values of layer 0; its one circuit is ov("layer")')
        return LowRank(self.o * self.value_mix, self.v0)

    def pattern_tensor(self, distance: int = 0, max_bytes: int = 2**30) -> Inexact[Tensor, "d_in d_in d_in d_in"]:
        """The dense tensor ``A[i, j, k, l]`` in ``pattern = A x_q x_q x_k x_k``, symmetric in ``i, j`` and in ``k, l``.

        Symmetries: R E P U QR V L X H S.

        Raises:
            ValueError: The pattern is not polynomial, or ``d_in**4`` numbers are more than ``max_bytes``.
        """
        self._require_pattern("pattern_tensor")
        instead = "use qk(1), qk(2), norm, inner or read_gram"
        check_bytes("the pattern tensor", (self.d_in,) * 4, self.q1.dtype, max_bytes, instead)
        w1, w2 = (self.qk(branch, distance).tensor(max_bytes) for branch in (1, 2))
        a = torch.einsum("ik,jl->ijkl", w1, w2)
        a = a + a.transpose(0, 1)
        return (a + a.transpose(2, 3)) / 4

    def norm(self, distance: int = 0) -> Tensor:
        """Frobenius norm of the symmetric pattern tensor, float64; ``O(d_qk**2 d_in)``.

        With QK norm it moves with the scale of queries and keys, which the head does not see.

        Symmetries: R E P U QR V L X H S.
        """
        return self.inner(self, distance).real.clamp_min(0).sqrt()

    def inner(self, other: "BilinearHead", distance: int = 0) -> Tensor:
        """Inner product of two symmetric pattern tensors in one residual basis, so of heads of one model; float64.

        By traces of ``(d_qk, d_qk)`` matrices. With QK norm it moves with the scale of queries and keys.

        Symmetries: R E P U QR V L X H S.
        """
        self._require_pattern("inner")
        other._require_pattern("inner")
        if self.d_in != other.d_in:
            raise ValueError(f"heads must have the same d_in to be compared, got {self.d_in} and {other.d_in}")
        check_tensor("q1 of the other head", other.q1, (None, None), self.q1)
        wide = torch.promote_types(self.q1.dtype, torch.float64)
        (a1, b1), (a2, b2) = self._factors(distance, wide)
        (c1, e1), (c2, e2) = ((c.conj(), e.conj()) for c, e in other._factors(distance, wide))

        queries = [[a.mT @ c for c in (c1, c2)] for a in (a1, a2)]
        keys = [[b @ e.mT for e in (e1, e2)] for b in (b1, b2)]
        return pattern_product(queries, keys)

    def read_gram(self, side: Literal["q", "k"] = "q", distance: int = 0) -> Inexact[Tensor, "d_in d_in"]:
        """Gram matrix of the query (or key) side of the pattern: ``sum_jkl A[i,j,k,l] conj(A[m,j,k,l])``, Hermitian.

        Its trace is ``norm**2``. The factor in the middle is ``(2 d_qk, 2 d_qk)``; ``O(d_in**2 d_qk)`` in all.

        Symmetries: R E P U QR V L X H S.
        """
        self._require_pattern("read_gram")
        check_choice("side", side, ("q", "k"))
        (a1, b1), (a2, b2) = self._factors(distance, self.q1.dtype)
        if side == "k":
            a1, b1, a2, b2 = b1.mT, a1.mT, b2.mT, a2.mT
        g11, g22, g12 = b1 @ b1.mH, b2 @ b2.mH, b1 @ b2.mH
        h11, h22, h12 = a1.mH @ a1, a2.mH @ a2, a1.mH @ a2
        norm1, norm2, dot = ((h * g.conj()).sum() for h, g in ((h11, g11), (h22, g22), (h12, g12)))
        first = norm2 * g11 + g12 @ h22 @ g12.mH
        second = norm1 * g22 + g12.mH @ h11 @ g12
        mixed = dot * g12 + g11 @ h12 @ g22
        k = a1 @ (first @ a1.mH + mixed @ a2.mH) + a2 @ (mixed.mH @ a1.mH + second @ a2.mH)
        return (k + k.mH) / 16

    def token_scores(
        self,
        x: Float[Tensor, "d_vocab d_in"],
        distance: int = 0,
        top: int = 10,
        *,
        tokens: Sequence[int] | Tensor | None = None,
        by: Literal["query", "all"] = "query",
        which: Literal["max", "min", "abs"] = "abs",
    ) -> Any:
        """Top keys of every query token by pattern value, when the head reads ``x[token]`` (its layer's normed input).

        At layer 0 ``x`` is the normed embedding and the values are exactly those of the model, QK norm included. In
        later layers they are what the head would do if it read the embedding alone. Blockwise; ``4 V**2 d_qk`` flop.

        Symmetries: R E P U Q QR V L X H S.

        Args:
            tokens: Ids that may appear, all rows of ``x`` by default; leave padding rows out here.

        Returns:
            DataFrame (list of `TokenScore` without pandas) with columns query, key, value.
        """
        self._require_pattern("token_scores")
        check_tensor("x", x, (None, self.d_in), self.q1)
        check_count("top", top, 1)
        check_choice("by", by, ("query", "all"))
        ids = token_ids(tokens, len(x), x.device)
        q1, q2 = (self.token_table(x, branch, "q") for branch in (1, 2))
        k1, k2 = (self.token_table(x, branch, "k", -distance) for branch in (1, 2))

        def columns(queries: Tensor) -> Tensor:
            return (k1[ids] @ q1[queries].mT) * (k2[ids] @ q2[queries].mT) / self.d_qk**2

        ranked = rank_pairs(columns, ids, top, by="all" if by == "all" else "source", which=which, keep_self=True)
        return as_table(TokenScore, *ranked)

    def token_table(
        self, x: Inexact[Tensor, "n d_in"], branch: int = 1, side: Literal["q", "k"] = "q", position: int = 0
    ) -> Inexact[Tensor, "n d_qk"]:
        """Queries or keys of inputs at one position, after QK norm (if the head has it) and rotation.

        Symmetries: R E P U V L X H S.
        """
        check_tensor("x", x, (None, self.d_in), self.q1)
        check_choice("side", side, ("q", "k"))
        y = self._branch(branch)["qk".index(side)] @ x.mT
        if self.qk_norm:
            y = y / (y.square().mean(0) + self.norm_eps).sqrt()
        return self._turn(y, position).mT

    def fix_gauge(self) -> "BilinearHead":
        """The same head with canonical factors: heads that differ by a gauge alone get equal factors.

        The gauge that is fixed: a rotation of every rotary pair of a branch; without QK norm also its scale and the
        scale between the branches; one sign shared by both branches; their order; any invertible change of the head's
        value space. The order and sign need a generic head (no ties).
        """
        branches = [self._aligned(*self._branch(n)) for n in ((1, 2) if self.q2 is not None else (1,))]
        if len(branches) == 2 and not self.qk_norm:
            ratio = (branches[1][0].norm() / branches[0][0].norm()) ** 0.5
            branches = [tuple(w * s for w in pair) for pair, s in zip(branches, (ratio, 1 / ratio))]
        branches.sort(key=lambda pair: float((pair[0] @ pair[0].mT).norm()), reverse=True)
        check_real("the head", self.q1)
        generic = torch.arange(1, self.d_in + 1, dtype=self.q1.dtype, device=self.q1.device).cos()
        if float(((branches[0][0] @ generic) * (branches[0][1] @ generic)).sum()) < 0:
            branches = [(q, -k) for q, k in branches]
        branches = [self._upright(q, k, generic) for q, k in branches]
        values = self.v if self.v0 is None else torch.cat([self.v, self.v0], dim=1)
        u, s, vh = LowRank(self.o, values).svd()
        v, *v0 = (s[:, None] * vh).split(self.d_in, dim=1)
        q2, k2 = branches[1] if len(branches) == 2 else (None, None)
        q1, k1 = branches[0]
        return replace(self, q1=q1, k1=k1, q2=q2, k2=k2, v=v, v0=v0[0] if v0 else None, o=u)

    def _aligned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate every pair so that its query rows are orthogonal, the longer first; balance queries and keys."""
        a, b = q.chunk(2)
        angle = torch.atan2(2 * (a * b).sum(1), a.square().sum(1) - b.square().sum(1)) / 2
        q, k = (_rotate(w, angle.cos(), angle.sin()) for w in (q, k))
        if not self.qk_norm:
            ratio = [w.reshape(2, -1, self.d_in).square().sum((0, 2)).sqrt() for w in (q, k)]
            scale = (ratio[1] / ratio[0]).sqrt().repeat(2)[:, None]
            q, k = q * scale, k / scale
        return q, k

    def _upright(self, q: Tensor, k: Tensor, generic: Tensor) -> tuple[Tensor, Tensor]:
        """Half turns that give the first row of every query pair a positive overlap with a fixed vector."""
        sign = torch.where((q @ generic).chunk(2)[0] < 0, -1.0, 1.0).repeat(2)[:, None].to(q)
        return q * sign, k * sign

    def _branch(self, branch: int) -> tuple[Tensor, Tensor]:
        check_choice("branch", branch, (1, 2))
        if branch == 1 or self.attention in ("squared", "squared_normalized"):
            return self.q1, self.k1
        if self.q2 is None or self.k2 is None:
            raise ValueError(f"attention={self.attention!r} has one branch, got branch=2")
        return self.q2, self.k2

    def _turn(self, y: Tensor, position: int) -> Tensor:
        """Rotate the rows of ``(d_qk, n)`` to ``position``: ``[a | b] -> [a cos + b sin | b cos - a sin]``."""
        check_number("a position or distance", position)
        angle = self.rotary.double() * position
        return _rotate(y, angle.cos().to(y.dtype), angle.sin().to(y.dtype))

    def _factors(self, distance: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        forms = (self.qk(branch, distance) for branch in (1, 2))
        return [(form.left.to(dtype), form.right.to(dtype)) for form in forms]

    def _require_pattern(self, what: str) -> None:
        if not self.polynomial:
            raise ValueError(
                f"{what} needs a polynomial pattern, got attention={self.attention!r}: {_NO_TENSOR[self.attention]}"
            )


def pattern_product(queries: Sequence[Sequence[Tensor]], keys: Sequence[Sequence[Tensor]]) -> Tensor:
    """Inner product of two symmetric pattern tensors, from products of their factors.

    ``queries[m][n]`` is the product of the queries of branch ``m`` of one head with those of branch ``n`` of the other,
    ``(*batch, d_qk, d_qk)``; ``keys`` the same.
    """

    def pair(first: tuple[int, int], second: tuple[int, int]) -> Tensor:
        one, two = ((queries[m][n] * keys[m][n]).sum((-2, -1)) for m, n in (first, second))
        return one * two

    def chain(outer: Sequence[Sequence[Tensor]], inner: Sequence[Sequence[Tensor]]) -> Tensor:
        product = outer[0][0] @ inner[1][0].mT @ outer[1][1]
        return (product * inner[0][1]).sum((-2, -1))

    straight, crossed = pair((0, 0), (1, 1)), pair((0, 1), (1, 0))
    return (straight + crossed + chain(keys, queries) + chain(queries, keys)) / 4


def _rotate(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = y.chunk(2)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos + b * sin, b * cos - a * sin])
