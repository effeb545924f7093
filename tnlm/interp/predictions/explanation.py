"""One logit explained as a ranked sum of named parts of the model, and the effect of removing a part."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from tnlm.config import POLYNOMIAL_ATTENTIONS
from tnlm.interp.extraction import Extracted, extract
from tnlm.interp.predictions.terms import Edits, Row, Terms, logit_terms, term_points, write_point
from tnlm.points import intervene, record
from tnlm.transformer import Transformer

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tnlm.text.tokenizer import Tokenizer


class Ablated(NamedTuple):
    """Three measurements of the change of the logit (or difference) when one part is removed at the last position.

    How a part is removed: the direct path at ``hook_embed``, where the embedding is written; a head's source by an
    entry 0 in the head's pattern; eigen-components of an MLP from the input that the MLP reads, ``x - v (v . x)``, for
    models with norms scaled to the length of ``x`` again; an MLP's constant, or an MLP that is one row, where it is
    written.
    """

    predicted: float
    """Minus the row's value. No forward: what the sum loses with the row."""
    held: float
    """Measured: the part removed, and the change of what its layer writes alone passed on to the logit.

    Later layers and all norms keep what they had in the run. Differs from ``predicted`` by rounding, but for the
    eigen-components of models with norms: the other components of an input grow as it is scaled to its length again."""
    actual: float
    """Measured: the part removed, and everything after it recomputed, norms and later layers included."""


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Ranked rows whose values sum to a logit before the softcap, or a difference of two.

    Each row is one term of the sum; ``remainder`` is its rounding error, ``exactness`` says what is held fixed.
    :meth:`ablate` measures how the logit changes when one part is removed.
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
    """Of the final norm in this run, by position."""
    tokenizer: "Tokenizer | None" = None

    @property
    def remainder(self) -> float:
        """``logit`` minus the sum of the rows."""
        return self.logit - sum(row.value for row in self.rows)

    @cached_property
    def absolute_sum(self) -> float:
        """Sum of the absolute values of the rows."""
        return sum(abs(row.value) for row in self.rows)

    @property
    def cancellation(self) -> float | None:
        """``absolute_sum`` over ``abs(logit)``: 1 when all rows have one sign; None for a logit of 0."""
        return self.absolute_sum / abs(self.logit) if self.logit else None

    @property
    def exactness(self) -> str:
        """What the rows hold fixed, in words: the norms and the patterns of this run, or nothing."""
        config = self._net.config
        normed = config.norm != "none" or (config.qk_norm and config.attention != "none")
        held = ["norms"] * normed + ["patterns"] * (config.attention not in POLYNOMIAL_ATTENTIONS)
        return f"exact given the {' and '.join(held)} of this run" if held else "exact"

    def share(self, row: Row) -> float:
        """Effect size of a row: its value over ``absolute_sum``, with the sign of the value."""
        return row.value / self.absolute_sum if self.absolute_sum else 0.0

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
        name = name if self.foil is None else f"{name} minus {self._token(self.foil)}"
        return name if self._net.config.logit_softcap is None else f"{name}, before the softcap"

    @property
    def summary(self) -> str:
        """Exactness and cancellation in one line."""
        times = "" if self.cancellation is None else f", {self.cancellation:.2f} times the logit (cancellation)"
        return f"{self.exactness}; absolute values sum to {self.absolute_sum:.4f}{times}"

    def _token(self, token: int) -> str:
        return str(token) if self.tokenizer is None else self.tokenizer.quoted(token)

    def label(self, row: Row) -> str:
        """The row's name, with the source token as text when a tokenizer is known."""
        if row.kind != "head" or row.source is None:
            return row.label
        return f"{row.label} ({self._token(int(self.tokens[row.source]))})"

    def table(self, top: int = 20) -> str:
        """The ``top`` rows with their shares, the sum of all others, and the remainder, as text."""
        lines = [f"{self.title}: {self.logit:+.4f}", self.summary, f"{'value':>10}  {'share':>7}  part"]
        lines += [f"{row.value:+10.4f}  {self.share(row):+7.1%}  {self.label(row)}" for row in self.rows[:top]]
        if len(self) > top:
            rest = sum(row.value for row in self.rows[top:])
            lines.append(f"{rest:+10.4f}  {'':7}  {len(self) - top} other rows")
        return "\n".join([*lines, f"{self.remainder:+10.1e}  {'':7}  remainder (rounding)"])

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """The explanation as a dictionary of plain JSON values, with the ``top`` rows."""
        rows = [{"label": self.label(row), "share": self.share(row), **row._asdict()} for row in self.rows[:top]]
        head = {"target": self.target, "foil": self.foil, "tokens": self.tokens.tolist(), "logit": self.logit}
        sums = {"absolute_sum": self.absolute_sum, "cancellation": self.cancellation, "remainder": self.remainder}
        return {**head, "exactness": self.exactness, **sums, "rows": rows}

    def to_json(self, top: int | None = None) -> str:
        return json.dumps(self.to_dict(top))

    def plot(self, top: int = 20) -> "go.Figure":
        """The ``top`` rows as signed bars; see :func:`tnlm.interp.views.plot.explanation`."""
        from tnlm.interp.views import plot

        return plot.explanation(self, top=top)

    def ablate(self, row: Row) -> Ablated:
        """Remove one part at the last position and measure the logit. Cost: three forwards.

        Raises:
            ValueError: The row is not one of this explanation's.

        Symmetries: R E P U Q QR V L X H S. U of a difference of two logits alone.
        """
        removal, point = self._removal(row), write_point(row)
        factor = self._net.embed_factor if row.layer is None else self._net.write_factors[row.layer]
        before, written = self._measure({}, point)
        after, left = self._measure(removal, point)
        lost = factor * (written - left)
        last = f"blocks.{self._net.n_layer - 1}.hook_resid_post" if self._net.n_layer else "hook_embed"

        def lose(residual: Tensor) -> None:
            residual[:, -1] -= lost.to(residual.dtype)

        held: Edits = {last: lose}
        if self._net.config.has_final_norm:
            held["ln_final.hook_scale"] = lambda scale: self._scale.to(scale.dtype)
        return Ablated(-row.value, self._measure(held)[0] - before, after - before)

    def _removal(self, row: Row) -> Edits:
        """The edits that remove the row's part."""
        for term in self._terms:
            if any(_part(row) == _part(own) for own in term.rows()):
                return term.removal(row)
        raise ValueError(f"{row.label} is not a row of this explanation; pick one of .rows")

    def _measure(self, edits: Edits, point: str = "hook_embed") -> tuple[float, Tensor]:
        """The logit in a forward with edits, and the value of a point at the last position after them."""
        seen: list[Tensor] = []
        model = self._net.model
        with torch.no_grad(), intervene(model, edits), intervene(model, {point: seen.append}):
            logit = _logit(model, self.tokens, self.target, self.foil)
        return logit, seen[0][0, -1].double()


def explain(
    model: "Transformer | Extracted | str",
    tokens: Int[Tensor, " seq"] | Int[Tensor, "1 seq"] | str,
    target: int | str,
    foil: int | str | None = None,
    *,
    components: int | None = 16,
    tokenizer: "Tokenizer | None" = None,
) -> Explanation:
    """A next-token logit as a ranked sum: direct path, heads by source token, MLPs by eigen-component.

    ``logit = w . (a_N x0 + sum_l c_l (attn_l + mlp_l)) / scale`` with ``w`` the target's unembedding row (minus the
    foil's), ``c_l`` the products of the later ``lambda0`` and ``scale`` the final norm of the run. A head's write
    splits over source positions; an MLP's is ``sum_k lambda_k (v_k . x)^2 + constant`` by :func:`tnlm.interp.eig` of
    ``w``: on normed inputs of the traceless form, with the trace and the bias in the constant. The last position is
    explained, before the softcap (which keeps the order of logits).

    Exact, in models with norms given the norms of this run, with softmax kinds given their patterns too. An MLP that is
    no quadratic form is one row.

    Args:
        model: A model, its :class:`Extracted` view, or anything :func:`tnlm.load` takes.
        tokens: The prompt: text, or ids.
        target, foil: One token each: text, or an id below ``d_vocab_used``.
        components: Eigen-components listed per layer; the others are one row. ``None`` lists all ``d_model``.
            Components of equal eigenvalue are one space, within which single rows depend on the basis that was found:
            on normed inputs an MLP with ``2 d_hidden < d_model`` has such a space, at minus its trace over ``d_model``.
        tokenizer: Of the text given and of that in tables and plots; by default the model's.

    Raises:
        ValueError: The prompt is empty or batched, an id is out of range, or ``components`` is negative.

    Symmetries: R E P Q QR V L X H S.

    Cost: two forwards, and one ``d_model**3`` eigendecomposition per layer.
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


def _part(row: Row) -> tuple[Any, ...]:
    """The part of the model that a row stands for: the row without its numbers."""
    return (row.kind, row.layer, row.head, row.source, row.component)
