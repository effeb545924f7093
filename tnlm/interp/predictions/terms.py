"""The terms whose sum is one logit, and the edits of a run that take each of them out at the last position."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tnlm.interp.extraction import Extracted
from tnlm.interp.layers.spectra import eig

Edits = dict[str, Callable[[Tensor], Tensor | None]]
"""By named point, the function that edits its value in place, or returns another."""


class Row(NamedTuple):
    """One term of a logit. Fields that do not apply are None."""

    kind: Literal["direct", "head", "mlp", "mlp_rest", "mlp_constant"]
    value: float
    """Its contribution to the logit (or to the difference of two), before the softcap."""
    layer: int | None = None
    head: int | None = None
    source: int | None = None
    """Position of the token that the head reads, from 0."""
    component: int | None = None
    """Rank of the eigenvalue by magnitude, from 0; None when the MLP is no quadratic form, and so one row."""
    eigenvalue: float | None = None
    """Of the form by which the layer adds to the logit, so that ``value`` is ``eigenvalue * (v . x)**2``."""

    @property
    def label(self) -> str:
        if self.kind == "direct":
            return "direct path"
        if self.kind == "head":
            return f"L{self.layer}.H{self.head} from {self.source}"
        if self.kind == "mlp":
            return f"L{self.layer}.MLP" + ("" if self.component is None else f" component {self.component}")
        return f"L{self.layer}.MLP {'constant' if self.kind == 'mlp_constant' else 'other components'}"


@dataclass(frozen=True, eq=False)
class HeadTerms:
    """The terms of one layer's heads, one for each head and source position: ``read . O_n P_su v_u``.

    Head n, output matrix ``O_n``, and pattern ``P_su`` of the last position s at the source u, whose value is ``v_u``.
    """

    layer: int
    read: Float[Tensor, " d_model"]
    """Direction that the logit reads from the layer's write, the factor of later layers included."""
    w_o: Float[Tensor, "d_model n_head d_head"]
    weighted: Float[Tensor, "seq_k n_head d_head"]
    """Values times the pattern of the last query."""

    @classmethod
    def of_run(cls, net: Extracted, layer: int, run: dict[str, Tensor], read: Tensor) -> "HeadTerms":
        """The terms in a run whose recorded points are ``run``."""
        attn = net.model.blocks[layer].attn
        w_o = net.cast(attn.w_o).double().unflatten(1, (attn.n_head, attn.d_head))
        pattern = run[f"blocks.{layer}.attn.hook_pattern"][0, :, -1]  # [n_head, seq_k]
        weighted = pattern.mT[..., None] * run[f"blocks.{layer}.attn.hook_v_mixed"][0]
        return cls(layer, float(net.write_factors[layer]) * read, w_o, weighted)

    def rows(self) -> Iterator[Row]:
        values = torch.einsum("m,mnd,snd->ns", self.read, self.w_o, self.weighted).tolist()
        for n, by_source in enumerate(values):
            for source, value in enumerate(by_source):
                yield Row("head", value, layer=self.layer, head=n, source=source)

    def removal(self, row: Row) -> Edits:
        """The head does not read the row's source: that entry of its pattern is 0, the others stay."""

        def edit(pattern: Tensor) -> None:
            pattern[:, row.head, -1, row.source] = 0

        return {f"blocks.{self.layer}.attn.hook_pattern": edit}


@dataclass(frozen=True, eq=False)
class ComponentTerms:
    """The terms of one quadratic MLP: one for each listed eigen-component of ``read``, the others, and the constant.

    On normed inputs the form is the traceless one; the constant holds the trace times ``|x|**2`` beside the bias.
    """

    layer: int
    factor: float
    """Factor by which later layers multiply the layer's write."""
    read: Float[Tensor, " d_model"]
    values: Float[Tensor, " d_model"]
    """Eigenvalues, by falling magnitude."""
    vectors: Float[Tensor, "d_model d_model"]
    """Eigenvectors, one per column."""
    parts: Float[Tensor, " d_model"]
    """``values[k] (vectors[:, k] . x)**2``."""
    listed: int | None
    """Components with a row of their own; None for all, without a row of the others."""
    out: Float[Tensor, " d_model"]
    constant: Float[Tensor, " d_model"] | None
    """Bias, and trace times ``|x|**2``; None for a layer that has neither."""
    sphere: bool
    """Inputs are of one length."""

    @classmethod
    def of_run(
        cls, net: Extracted, layer: int, run: dict[str, Tensor], read: Tensor, listed: int | None
    ) -> "ComponentTerms":
        """The terms in a run whose recorded points are ``run``. One ``d_model**3`` eigendecomposition."""
        mlp, x = net.mlp[layer], run[f"blocks.{layer}.ln2.hook_normalized"][0, -1]
        spectrum = eig(mlp, read.to(mlp.dtype))
        values, vectors = spectrum.values.double(), spectrum.vectors.double()
        sphere, constant = mlp.domain == "sphere", None
        if sphere or mlp.bias is not None:
            constant = mlp.shift().double() * x.square().sum() + (0 if mlp.bias is None else mlp.bias.double())
        return cls(
            layer,
            float(net.write_factors[layer]),
            read,
            values,
            vectors,
            values * (x @ vectors).square(),
            listed,
            run[f"blocks.{layer}.hook_mlp_out"][0, -1],
            constant,
            sphere,
        )

    @property
    def n_listed(self) -> int:
        return len(self.values) if self.listed is None else min(self.listed, len(self.values))

    @property
    def rest(self) -> Tensor:
        """Sum of the components that are not listed: what is left of the layer's output, rounding included."""
        form = self.out if self.constant is None else self.out - self.constant
        return self.read @ form - self.parts[: self.n_listed].sum()

    def rows(self) -> Iterator[Row]:
        for k in range(self.n_listed):
            value, eigenvalue = float(self.factor * self.parts[k]), float(self.factor * self.values[k])
            yield Row("mlp", value, layer=self.layer, component=k, eigenvalue=eigenvalue)
        if self.listed is not None:
            yield Row("mlp_rest", float(self.factor * self.rest), layer=self.layer)
        if self.constant is not None:
            yield Row("mlp_constant", float(self.factor * (self.read @ self.constant)), layer=self.layer)

    def removal(self, row: Row) -> Edits:
        """The layer does not read the row's eigenvectors: ``x - v (v . x)``, on the sphere again; or no constant."""
        if row.kind == "mlp_constant":
            return {f"blocks.{self.layer}.hook_mlp_out": self._drop_constant}
        ranks = slice(self.n_listed, None) if row.component is None else [row.component]
        v = self.vectors[:, ranks]

        def edit(x: Tensor) -> None:
            before = x[:, -1].double()
            after = before - before @ v @ v.mT
            if self.sphere:
                length, left = (t.norm(dim=-1, keepdim=True) for t in (before, after))
                # of an input along v nothing is left but the rounding of the eigenvectors, which are at least float32
                lost = left <= len(v) * torch.finfo(torch.float32).eps * length
                after = torch.where(lost, 0.0, after * length / torch.where(lost, 1.0, left))
            x[:, -1] = after.to(x.dtype)

        return {f"blocks.{self.layer}.ln2.hook_normalized": edit}

    def _drop_constant(self, out: Tensor) -> None:
        assert self.constant is not None
        out[:, -1] -= self.constant.to(out.dtype)


@dataclass(frozen=True, eq=False)
class WholeTerm:
    """One term that is not split: the direct path of the embedding, or an MLP that is no quadratic form."""

    row: Row

    def rows(self) -> Iterator[Row]:
        yield self.row

    def removal(self, row: Row) -> Edits:
        """Nothing is written."""

        def edit(x: Tensor) -> None:
            x[:, -1] = 0

        return {write_point(row): edit}


Terms = HeadTerms | ComponentTerms | WholeTerm


def logit_terms(net: Extracted, run: dict[str, Tensor], read: Tensor, components: int | None) -> list[Terms]:
    """All terms of ``read . final residual`` in a run, whose `term_points` are recorded in ``run``.

    Args:
        components: Eigen-components with a row of their own per MLP; None for all.
    """
    x0 = run["hook_embed"][0, -1]
    terms: list[Terms] = [WholeTerm(Row("direct", float(net.embed_factor.double() * (read @ x0))))]
    for layer in range(net.n_layer):
        if net.config.attention != "none":
            terms.append(HeadTerms.of_run(net, layer, run, read))
        if net.config.mlp_is_form:
            terms.append(ComponentTerms.of_run(net, layer, run, read, components))
        elif net.config.mlp != "none":
            out = run[f"blocks.{layer}.hook_mlp_out"][0, -1]
            value = float(float(net.write_factors[layer]) * (read @ out))
            terms.append(WholeTerm(Row("mlp", value, layer=layer)))
    return terms


def write_point(row: Row) -> str:
    """Name of the point at which a row's part of the model writes into the residual stream."""
    if row.layer is None:
        return "hook_embed"
    return f"blocks.{row.layer}.{'hook_attn_out' if row.kind == 'head' else 'hook_mlp_out'}"


def term_points(net: Extracted) -> Iterator[str]:
    """Names of the points that `logit_terms` needs of a run, and of the final norm's scale."""
    yield "hook_embed"
    if net.config.has_final_norm:
        yield "ln_final.hook_scale"
    for layer in range(net.n_layer):
        if net.config.attention != "none":
            yield from (f"blocks.{layer}.attn.hook_pattern", f"blocks.{layer}.attn.hook_v_mixed")
        if net.config.mlp != "none":
            yield from (f"blocks.{layer}.ln2.hook_normalized", f"blocks.{layer}.hook_mlp_out")
