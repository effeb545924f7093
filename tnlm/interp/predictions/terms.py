"""The terms whose sum is one logit, and what each of them adds to the residual stream at the last position."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tnlm.interp.extraction import Extracted
from tnlm.interp.layers.spectra import eig


class Row(NamedTuple):
    """One term of a logit. Fields that do not apply are None."""

    kind: Literal["direct", "head", "mlp", "mlp_rest", "mlp_bias"]
    value: float
    """Its contribution to the logit (or to the difference of two), before the softcap."""
    layer: int | None = None
    head: int | None = None
    source: int | None = None
    """Position of the token that the head reads."""
    component: int | None = None
    """Rank of the eigenvalue by magnitude; None when the MLP is no polynomial, and so one row."""
    eigenvalue: float | None = None

    @property
    def label(self) -> str:
        if self.kind == "direct":
            return "direct path"
        if self.kind == "head":
            return f"L{self.layer}.H{self.head} from {self.source}"
        if self.kind == "mlp":
            return f"L{self.layer}.MLP" + ("" if self.component is None else f" component {self.component}")
        return f"L{self.layer}.MLP {'bias' if self.kind == 'mlp_bias' else 'other components'}"


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

    def write(self, row: Row) -> Float[Tensor, " d_model"]:
        """Write of a row into the residual stream at the last position."""
        return self.w_o[:, row.head] @ self.weighted[row.source, row.head]


@dataclass(frozen=True, eq=False)
class ComponentTerms:
    """The terms of one quadratic MLP: one for each listed eigen-component of ``read``, the others, and the bias."""

    layer: int
    factor: float
    """Factor by which later layers multiply the layer's write."""
    read: Float[Tensor, " d_model"]
    values: Float[Tensor, " d_model"]
    """Eigenvalues, by falling magnitude."""
    parts: Float[Tensor, " d_model"]
    """``values[k] (vectors[:, k] . x)**2``."""
    listed: int | None
    """Components with a row of their own; None for all, without a row of the others."""
    out: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"] | None
    """The bias, and behind a norm the part of the form that is a multiple of ``|x|**2``."""

    @classmethod
    def of_run(
        cls, net: Extracted, layer: int, run: dict[str, Tensor], read: Tensor, listed: int | None
    ) -> "ComponentTerms":
        """The terms in a run whose recorded points are ``run``. One ``d_model**3`` eigendecomposition."""
        mlp, x = net.mlp[layer], run[f"blocks.{layer}.ln2.hook_normalized"][0, -1]
        spectrum = eig(mlp, read.to(mlp.dtype))
        values, vectors = spectrum.values.double(), spectrum.vectors.double()
        parts = values * (x @ vectors).square()
        out = run[f"blocks.{layer}.hook_mlp_out"][0, -1]
        bias = None if mlp.bias is None else mlp.bias.double()
        if mlp.domain == "sphere":  # what inputs of one length cannot tell from the bias
            trace = mlp.shift().double() * x.square().sum()
            bias = trace if bias is None else bias + trace
        return cls(layer, float(net.write_factors[layer]), read, values, parts, listed, out, bias)

    @property
    def n_listed(self) -> int:
        return len(self.values) if self.listed is None else min(self.listed, len(self.values))

    @property
    def rest(self) -> Tensor:
        """Sum of the components that are not listed: what is left of the layer's output, rounding included."""
        bias = torch.zeros_like(self.out) if self.bias is None else self.bias
        return self.read @ (self.out - bias) - self.parts[: self.n_listed].sum()

    def rows(self) -> Iterator[Row]:
        for k in range(self.n_listed):
            value, eigenvalue = float(self.factor * self.parts[k]), float(self.factor * self.values[k])
            yield Row("mlp", value, layer=self.layer, component=k, eigenvalue=eigenvalue)
        if self.listed is not None:
            yield Row("mlp_rest", float(self.factor * self.rest), layer=self.layer)
        if self.bias is not None:
            yield Row("mlp_bias", float(self.factor * (self.read @ self.bias)), layer=self.layer)

    def write(self, row: Row) -> Float[Tensor, " d_model"]:
        """Write of a row into the residual stream; of an eigen-component only its part along ``read`` is known."""
        if row.kind == "mlp_bias":
            assert self.bias is not None
            return self.bias
        towards = self.read / (self.read @ self.read).clamp_min(torch.finfo(self.read.dtype).tiny)
        return (self.rest if row.component is None else self.parts[row.component]) * towards


@dataclass(frozen=True, eq=False)
class WholeTerm:
    """One term that is not split: the direct path of the embedding, or an MLP that is no quadratic form."""

    row: Row
    out: Float[Tensor, " d_model"]

    def rows(self) -> Iterator[Row]:
        yield self.row

    def write(self, row: Row) -> Float[Tensor, " d_model"]:
        """Write of the row into the residual stream at the last position."""
        return self.out


Terms = HeadTerms | ComponentTerms | WholeTerm


def logit_terms(net: Extracted, run: dict[str, Tensor], read: Tensor, components: int | None) -> list[Terms]:
    """All terms of ``read . final residual`` in a run, whose `term_points` are recorded in ``run``.

    Args:
        components: Eigen-components with a row of their own per MLP; None for all.
    """
    x0 = run["hook_embed"][0, -1]
    terms: list[Terms] = [WholeTerm(Row("direct", float(net.embed_factor.double() * (read @ x0))), x0)]
    for layer in range(net.n_layer):
        if net.config.attention != "none":
            terms.append(HeadTerms.of_run(net, layer, run, read))
        if net.config.mlp_is_form:
            terms.append(ComponentTerms.of_run(net, layer, run, read, components))
        elif net.config.mlp != "none":
            out = run[f"blocks.{layer}.hook_mlp_out"][0, -1]
            value = float(float(net.write_factors[layer]) * (read @ out))
            terms.append(WholeTerm(Row("mlp", value, layer=layer), out))
    return terms


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
