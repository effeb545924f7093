"""One logit explained as a ranked sum of named parts of the model, and the effect of removing a part."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from tnlm.interp.extraction import Extracted, extract
from tnlm.interp.predictions.terms import Row, Terms, logit_terms, term_points
from tnlm.points import intervene, record
from tnlm.transformer import Transformer

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tnlm.text.tokenizer import Tokenizer


class Ablated(NamedTuple):
    """Change of the logit (or difference) when one part is removed from the residual stream at the last position."""

    predicted: float
    """Minus the row's value."""
    held: float
    """Measured with the part removed before the final norm, whose scale is held fixed; equals ``predicted``."""
    actual: float
    """Measured with the part removed where it is written; everything after it, norms included, is recomputed."""


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Ranked rows whose values sum to the pre-softcap logit, or difference of two; ``remainder`` is the rounding error.

    Exact given the norms (and, for softmax kinds, the patterns) of this run. The rows are the terms of a sum;
    :meth:`ablate` measures how the logit changes when one of them is removed.
    """

    target: int
    foil: int | None
    tokens: Int[Tensor, " seq"]
    logit: float
    """The explained quantity: the target's logit before the softcap, minus the foil's."""
    rows: tuple[Row, ...]
    """By falling absolute value."""
    _net: Extracted
    _terms: tuple[Terms, ...]
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
        """The explained quantity, with tokens as text when a tokenizer is known."""
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
        """The explanation as a dictionary of plain JSON values, with the ``top`` rows."""
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
        """Remove one part at the last position and measure the logit. Three forwards.

        Raises:
            ValueError: The row is not one of this explanation's.
        """
        write = self._write(row)
        net = self._net
        last = f"blocks.{net.n_layer - 1}.hook_resid_post" if net.n_layer else "hook_embed"
        factor = net.embed_factor if row.layer is None else net.write_factors[row.layer]
        at_end = {last: _subtract(factor * write)}
        at_write = at_end if row.layer is None else {_write_point(row): _subtract(write)}
        held = at_end | ({"ln_final.hook_scale": _replace(self._scale)} if net.config.has_final_norm else {})
        before = self._measure({})
        return Ablated(-row.value, self._measure(held) - before, self._measure(at_write) - before)

    def _write(self, row: Row) -> Tensor:
        """The row's write into the residual stream at the last position."""
        for term in self._terms:
            if any(_part(row) == _part(own) for own in term.rows()):
                return term.write(row)
        raise ValueError(f"{row.label} is not a row of this explanation; pick one of .rows")

    def _measure(self, edits: dict[str, Callable[[Tensor], Tensor]]) -> float:
        with torch.no_grad(), intervene(self._net.model, edits):
            return _logit(self._net.model, self.tokens, self.target, self.foil)


def explain(
    model: "Transformer | Extracted | str",
    tokens: Int[Tensor, " seq"] | Int[Tensor, "1 seq"] | str,
    target: int | str,
    foil: int | str | None = None,
    *,
    components: int | None = 16,
    tokenizer: "Tokenizer | None" = None,
) -> Explanation:
    """Explain one next-token logit as a ranked sum: direct path, heads by source token, MLPs by eigen-component.

    ``logit = w . (a_N x0 + sum_l c_l (attn_l + mlp_l)) / scale`` with ``w`` the target's unembedding row (minus the
    foil's), ``c_l`` the products of the later ``lambda0`` and ``scale`` the final norm of the run. A head's write
    splits over source positions; an MLP's is ``sum_k lambda_k (v_k . x)^2 + w . bias`` by :func:`tnlm.interp.eig` of
    ``w``. The last position is explained, before the softcap (which keeps the order of logits).

    Exact given the norms of this run. Softmax kinds: given their patterns too. An MLP that is no quadratic form is
    one row.

    Args:
        model: A model, its :class:`Extracted` view, or anything :func:`tnlm.load` takes.
        tokens: The prompt: text, or ids.
        target, foil: One token each: text, or an id below ``d_vocab_used``.
        components: Eigen-components listed per layer; the others are one row. ``None`` lists all ``d_model``.
        tokenizer: Of the text given and of that in tables and plots; by default the model's.

    Raises:
        ValueError: The prompt is empty or batched, an id is out of range, or ``components`` is negative.

    Cost: one forward and one ``d_model**3`` eigendecomposition per layer.
    Source: eigen-components after Pearce et al. 2025, arXiv:2410.08417.
    """
    net = model if isinstance(model, Extracted) else extract(model)
    tokenizer = net.model.tokenizer if tokenizer is None else tokenizer
    tokens = net.read_prompt("explain", tokens, tokenizer)
    target = net.read_token("target", target, tokenizer)
    foil = None if foil is None else net.read_token("foil", foil, tokenizer)
    if components is not None and not (isinstance(components, int) and components >= 0):
        raise ValueError(f"components must be at least 0, or None for all; got {components!r}")
    run = record(net.model, tokens[None], term_points(net))
    direction = net.cast(net.model.unembed.w_u)[target].double()
    if foil is not None:
        direction = direction - net.cast(net.model.unembed.w_u)[foil].double()
    scale = run.get("ln_final.hook_scale", torch.ones(1, len(tokens), 1, dtype=direction.dtype))
    read = direction / scale[0, -1].double()
    terms = logit_terms(net, {name: value.double() for name, value in run.items()}, read, components)
    with torch.no_grad():
        logit = _logit(net.model, tokens, target, foil)
    rows = [row for term in terms for row in term.rows()]
    ranked = tuple(sorted(rows, key=lambda row: -abs(row.value)))
    return Explanation(target, foil, tokens, logit, ranked, net, tuple(terms), scale, tokenizer)


def _logit(model: Transformer, tokens: Tensor, target: int, foil: int | None) -> float:
    final = model.pre_softcap(tokens[None])[0, -1].double()
    return float(final[target] - (0 if foil is None else final[foil]))


def _subtract(write: Tensor) -> Callable[[Tensor], Tensor]:
    """Take ``write`` off the last position."""

    def edit(x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1], x[:, -1:] - write.to(x.dtype)], dim=1)

    return edit


def _replace(value: Tensor) -> Callable[[Tensor], Tensor]:
    """Put ``value`` in place of what comes."""
    return lambda x: value.to(x.dtype)


def _write_point(row: Row) -> str:
    return f"blocks.{row.layer}.{'hook_attn_out' if row.kind == 'head' else 'hook_mlp_out'}"


def _part(row: Row) -> tuple[Any, ...]:
    """The part of the model that a row stands for: the row without its numbers."""
    return (row.kind, row.layer, row.head, row.source, row.component)
