"""Explain one logit as a sum of named parts."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from tnlm.interp.extraction import Extracted, extract
from tnlm.interp.layers.spectra import Eig, eig
from tnlm.points import intervene, record
from tnlm.transformer import Transformer

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tnlm.text.tokenizer import Tokenizer


class Row(NamedTuple):
    """One part of a logit. Fields that do not apply are None."""

    kind: Literal["direct", "head", "mlp", "mlp_rest", "mlp_bias"]
    value: float
    """What it adds to the logit (or to the difference), before the softcap."""
    layer: int | None = None
    head: int | None = None
    source: int | None = None
    """Position whose token the head reads."""
    component: int | None = None
    """Rank of the eigenvalue, by |eigenvalue|; None when the MLP is one row, being no polynomial."""
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


class Ablated(NamedTuple):
    """Change of the logit (or difference) when one part is taken out of the residual stream at the last position."""

    predicted: float
    """Minus the row's value: what the weights and the norms of the run say of the direct path."""
    held: float
    """Measured with the part removed where it reaches the unembedding and the final norm held: equals ``predicted``."""
    actual: float
    """Measured with the part removed where it is written, everything after it recomputed, norms included."""


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Ranked rows whose values sum to the pre-softcap logit, or logit difference; ``remainder`` is what rounding left.

    Exact given the norms (and, for softmax kinds, the patterns) of this run: the rows are the terms of a sum, not
    counterfactuals. ``ablate`` measures those.
    """

    target: int
    foil: int | None
    tokens: Int[Tensor, " seq"]
    logit: float
    """The explained quantity: the target's logit before the softcap, minus the foil's."""
    rows: tuple[Row, ...]
    """By falling absolute value."""
    _net: Extracted
    _writes: dict[tuple[Any, ...], Callable[[], Tensor]] = field(repr=False)
    _scale: Tensor
    tokenizer: "Tokenizer | None" = None

    @property
    def remainder(self) -> float:
        """``logit`` minus the sum of the rows."""
        return self.logit - sum(row.value for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Explanation({self.title}: {self.logit:+.4f}, {len(self)} rows, remainder {self.remainder:.1e})"

    def __str__(self) -> str:
        return self.table()

    @property
    def title(self) -> str:
        """What is explained, with tokens as text when a tokenizer is known."""
        name = "logit of " + self._token(self.target)
        return name if self.foil is None else f"{name} minus {self._token(self.foil)}"

    def _token(self, token: int) -> str:
        return str(token) if self.tokenizer is None else self.tokenizer.quoted(token)

    def label(self, row: Row) -> str:
        """The row's name, with the source token as text when a tokenizer is known."""
        if row.kind != "head" or row.source is None:
            return row.label
        return f"{row.label} ({self._token(int(self.tokens[row.source]))})"

    def table(self, top: int = 20) -> str:
        """The ``top`` rows, the sum of all others, and the remainder, as text."""
        lines = [f"{self.title}, before the softcap: {self.logit:+.4f}   (exact given the norms of this run)"]
        lines += [f"{row.value:+10.4f}  {self.label(row)}" for row in self.rows[:top]]
        if len(self) > top:
            rest = sum(row.value for row in self.rows[top:])
            lines.append(f"{rest:+10.4f}  {len(self) - top} other rows")
        return "\n".join([*lines, f"{self.remainder:+10.1e}  remainder (rounding)"])

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """Plain JSON values."""
        rows = [{"label": self.label(row), **row._asdict()} for row in self.rows[:top]]
        head = {"target": self.target, "foil": self.foil, "tokens": self.tokens.tolist(), "logit": self.logit}
        return {**head, "remainder": self.remainder, "rows": rows}

    def to_json(self, top: int | None = None) -> str:
        return json.dumps(self.to_dict(top))

    def plot(self, top: int = 20) -> "go.Figure":
        """The ``top`` rows as signed bars; see :func:`tnlm.interp.views.plot.explanation`."""
        from tnlm.interp.views import plot

        return plot.explanation(self, top=top)

    def ablate(self, row: Row) -> Ablated:
        """Take one part out at the last position and measure. Two forwards.

        Raises:
            ValueError: The row is not one of this explanation's.
        """
        key = _key(row)
        if key not in self._writes:
            raise ValueError(f"{row.label} is not a row of this explanation; pick one of .rows")
        net = self._net
        write = self._writes[key]()
        last = f"blocks.{net.n_layer - 1}.hook_resid_post" if net.n_layer else "hook_embed"
        factor = net.embed_factor if row.layer is None else net.write_factors[row.layer]
        at_end = {last: _subtract(factor * write)}
        at_write = at_end if row.layer is None else {_write_point(row): _subtract(write)}
        held = dict(at_end)
        if net.config.has_final_norm:
            held["ln_final.hook_scale"] = lambda scale: self._scale.to(scale.dtype)
        before = self._measure({})
        return Ablated(-row.value, self._measure(held) - before, self._measure(at_write) - before)

    def _measure(self, edits: dict[str, Callable[[Tensor], Tensor]]) -> float:
        with torch.no_grad(), intervene(self._net.model, edits):
            return _logit(self._net.model, self.tokens, self.target, self.foil)


def explain(
    model: "Transformer | Extracted | str",
    tokens: Int[Tensor, " seq"] | Int[Tensor, "1 seq"],
    target: int,
    foil: int | None = None,
    *,
    components: int | None = 16,
    tokenizer: "Tokenizer | None" = None,
) -> Explanation:
    """Write one next-token logit as a ranked sum: direct path, heads by source token, MLPs by eigen-component.

    ``logit = w . (a_N x0 + sum_l c_l (attn_l + mlp_l)) / scale`` with ``w`` the target's unembedding row (minus the
    foil's), ``c_l`` the products of the later ``lambda0`` and ``scale`` the final norm of the run. A head's write
    splits over source positions; an MLP's is ``sum_k lambda_k (v_k . x)^2 + w . bias`` by :func:`tnlm.interp.eig` of
    ``w``. The last position is explained, before the softcap (which keeps the order of logits).

    Exact given the norms of this run. Softmax kinds: given their patterns too. An MLP that is no quadratic form is
    one row.

    Args:
        model: A model, its :class:`Extracted` view, or anything :func:`tnlm.load` takes.
        tokens: The prompt's ids.
        target, foil: Ids below ``d_vocab_used``.
        components: Eigen-components listed per layer; the others are one row. ``None`` lists all ``d_model``.
        tokenizer: For texts in tables and plots only.

    Raises:
        ValueError: The prompt is empty or batched, an id is out of range, or ``components`` is negative.

    Cost: one forward and one ``d_model**3`` eigendecomposition per layer.
    Source: eigen-components after Pearce et al. 2025, arXiv:2410.08417.
    """
    net = model if isinstance(model, Extracted) else extract(model)
    if isinstance(tokens, Tensor) and tokens.ndim == 2 and len(tokens) == 1:
        tokens = tokens[0]
    net.check_prompt("explain", tokens, target=target, **({} if foil is None else {"foil": foil}))
    if components is not None and not (isinstance(components, int) and components >= 0):
        raise ValueError(f"components must be at least 0, or None for all; got {components!r}")
    run = record(net.model, tokens[None], _points(net))
    double = {name: value.double() for name, value in run.items()}
    direction = net.cast(net.model.unembed.w_u)[target].double()
    if foil is not None:
        direction = direction - net.cast(net.model.unembed.w_u)[foil].double()
    scale = run.get("ln_final.hook_scale", torch.ones(1, len(tokens), 1, dtype=direction.dtype))
    read = direction / scale[0, -1].double()

    rows: list[Row] = []
    writes: dict[tuple[Any, ...], Callable[[], Tensor]] = {}

    def add(row: Row, write: Callable[[], Tensor]) -> None:
        rows.append(row)
        writes[_key(row)] = write

    x0 = double["hook_embed"][0, -1]
    add(Row("direct", float(net.embed_factor.double() * (read @ x0))), lambda: x0)
    for l in range(net.n_layer):
        factor = float(net.write_factors[l])
        if net.config.attention != "none":
            _head_rows(net, l, double, factor * read, add)
        if net.config.mlp_is_form:
            _mlp_rows(net, l, double, read, factor, components, add)
        elif net.config.mlp != "none":
            out = double[f"blocks.{l}.hook_mlp_out"][0, -1]
            add(Row("mlp", float(factor * (read @ out)), layer=l), lambda out=out: out)  # type: ignore[misc]
    with torch.no_grad():
        logit = _logit(net.model, tokens, target, foil)
    ranked = tuple(sorted(rows, key=lambda row: -abs(row.value)))
    return Explanation(target, foil, tokens, logit, ranked, net, writes, scale, tokenizer)


def _head_rows(net: Extracted, l: int, run: dict[str, Tensor], read: Tensor, add: Callable[..., None]) -> None:
    """One row per head and source position: ``read . O_n P_su v_u``."""
    attn = net.model.blocks[l].attn
    w_o = net.cast(attn.w_o).double().unflatten(1, (attn.n_head, attn.d_head))  # [d_model, n_head, d_head]
    pattern = run[f"blocks.{l}.attn.hook_pattern"][0, :, -1]  # [n_head, seq_k]
    weighted = pattern.mT[..., None] * run[f"blocks.{l}.attn.hook_v_mixed"][0]  # [seq_k, n_head, d_head]
    values = torch.einsum("m,mnd,snd->ns", read, w_o, weighted).tolist()
    for n, by_source in enumerate(values):
        for s, value in enumerate(by_source):
            add(Row("head", value, layer=l, head=n, source=s), lambda n=n, s=s: w_o[:, n] @ weighted[s, n])


def _mlp_rows(
    net: Extracted,
    l: int,
    run: dict[str, Tensor],
    read: Tensor,
    factor: float,
    components: int | None,
    add: Callable[..., None],
) -> None:
    """One row per listed eigen-component of ``read``, one for the others, one for the bias."""
    layer, x = net.mlp[l], run[f"blocks.{l}.ln2.hook_normalized"][0, -1]
    out = run[f"blocks.{l}.hook_mlp_out"][0, -1]
    bias = torch.zeros_like(out) if layer.bias is None else layer.bias.double()
    spectrum: Eig = eig(layer, read.to(layer.dtype))
    values, vectors = spectrum.values.double(), spectrum.vectors.double()
    parts = values * (x @ vectors).square()
    listed = len(values) if components is None else min(components, len(values))
    towards = read / (read @ read).clamp_min(torch.finfo(read.dtype).tiny)
    for k in range(listed):
        part = parts[k]
        row = Row("mlp", float(factor * part), layer=l, component=k, eigenvalue=float(factor * values[k]))
        add(row, lambda part=part: part * towards)
    rest = read @ (out - bias) - parts[:listed].sum()
    if components is not None:
        add(Row("mlp_rest", float(factor * rest), layer=l), lambda: rest * towards)
    if layer.bias is not None:
        add(Row("mlp_bias", float(factor * (read @ bias)), layer=l), lambda: bias)


def _points(net: Extracted) -> Iterable[str]:
    yield "hook_embed"
    if net.config.has_final_norm:
        yield "ln_final.hook_scale"
    for l in range(net.n_layer):
        if net.config.attention != "none":
            yield from (f"blocks.{l}.attn.hook_pattern", f"blocks.{l}.attn.hook_v_mixed")
        if net.config.mlp != "none":
            yield from (f"blocks.{l}.ln2.hook_normalized", f"blocks.{l}.hook_mlp_out")


def _logit(model: Transformer, tokens: Tensor, target: int, foil: int | None) -> float:
    final = model.pre_softcap(tokens[None])[0, -1].double()
    return float(final[target] - (0 if foil is None else final[foil]))


def _subtract(write: Tensor) -> Callable[[Tensor], Tensor]:
    """Take ``write`` off the last position."""

    def edit(x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1], x[:, -1:] - write.to(x.dtype)], dim=1)

    return edit


def _write_point(row: Row) -> str:
    return f"blocks.{row.layer}.{'hook_attn_out' if row.kind == 'head' else 'hook_mlp_out'}"


def _key(row: Row) -> tuple[Any, ...]:
    return (row.kind, row.layer, row.head, row.source, row.component)
