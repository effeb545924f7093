"""Decompositions of the residual stream that are exact under x0 mixing, and the factors of its parts."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Shaped
from torch import Tensor

from tnlm.transformer import Block


def factors(blocks: Iterable[Block]) -> tuple[float, list[float]]:
    """Factors of the embedding and of each block's outputs in the residual stream, after all ``blocks`` have mixed.

    A block replaces ``x`` by ``a x + b x0``, ``(a, b) = lambdas``, before it adds its outputs. The outputs of a block
    are therefore multiplied by every later ``a``; the embedding's factor starts at 1 and follows ``c <- a c + b``.

    Returns:
        ``(embed, writes)``, with one entry of ``writes`` per block; the last is 1. ``blocks[:L]`` gives the factors in
        ``resid_pre`` of block L, ``blocks[:L + 1]`` those in its ``resid_mixed`` and ``resid_mid``.
    """
    embed = 1.0
    writes: list[float] = []
    for block in blocks:
        a, b = (1.0, 0.0) if block.lambdas is None else block.lambdas.tolist()
        embed = a * embed + b
        writes = [a * write for write in writes] + [1.0]
    return embed, writes


def target(layer: int | None, n_layer: int, *, mlp_input: bool, mixed: bool) -> tuple[int, int]:
    """``(layer, end)``: the index of a layer, and the number of blocks that have mixed the stream it reads.

    ``None``, -1 and ``n_layer`` all mean the stream after the last block.

    Raises:
        ValueError: ``layer`` is out of range, or ``mlp_input`` is asked for after the last block.
    """
    layer = n_layer if layer is None or layer == -1 else layer
    if not 0 <= layer <= n_layer or (mlp_input and layer == n_layer):
        raise ValueError(
            f"layer must be in [0, {n_layer}] (None and -1 mean {n_layer}), below {n_layer} with mlp_input=True; "
            f"got layer={layer}, mlp_input={mlp_input}"
        )
    return layer, layer + (mlp_input or (mixed and layer < n_layer))


def bias_sum(blocks: Any, layer: int, end: int) -> Any:
    """Sum of the MLP output biases below ``layer``, each with its factor after ``end`` blocks have mixed; 0 if none."""
    _, writes = factors(blocks[:end])
    return sum(
        factor * block.mlp.bias
        for factor, block in zip(writes, blocks[:layer], strict=False)
        if block.mlp is not None and block.mlp.bias is not None
    )


class ResidualParts:
    """Decompositions of one run's residual stream into parts, exact under x0 mixing, value residual and softcap.

    A block first replaces the residual by ``a x + b x0``, so the output of an earlier layer reaches a later one
    multiplied by every ``a`` between. Each part below carries that factor (:func:`tnlm.lens.residual.factors`), and the
    parts sum to

    - ``resid_pre`` of ``layer`` (by default the stream after the last block), or ``resid_mid`` with
      ``mlp_input=True``;
    - with ``apply_ln=True``, the output of that layer's norm, whose input is ``resid_mixed``, not ``resid_pre``.

    Exact up to rounding, given the norms of the run. Attributions are to the logits *before* the softcap, which are
    linear in the parts; ``logit_lens`` shows the logits after it. A base class of
    :class:`tnlm.lens.activations.ResidualCache`; every result is a new tensor.
    """

    model: Any
    has_batch_dim: bool
    cache_dict: dict[str, Tensor]
    apply_ln_to_stack: Any
    _slice: Any

    if TYPE_CHECKING:

        def __getitem__(self, key: str | tuple) -> Tensor: ...

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Any = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Any:
        """The residual stream before each layer up to ``layer``, ``(streams, ..., d_model)``.

        With ``apply_ln`` every stream is treated as the input of ``layer``: at the unembedding it is normed by its own
        statistics, elsewhere it is mixed with ``x0`` and divided by the scale of the run. Blocks without MLP have no
        ``resid_mid``.
        """
        layer, _ = self._target(layer, mlp_input, apply_ln)
        streams: dict[str, Tensor] = {}
        for i in range(layer):
            streams[f"{i}_pre"] = self["resid_pre", i]
            if incl_mid and self.model.blocks[i].mlp is not None:
                streams[f"{i}_mid"] = self["resid_mid", i]
        last = layer == self.model.config.n_layer
        streams["final_post" if last else f"{layer}_pre"] = self._stream(layer, layer)
        if mlp_input:
            streams[f"{layer}_mid"] = self["resid_mid", layer]
        elif apply_ln and not last and (lambdas := self.model.blocks[layer].lambdas) is not None:
            a, b = lambdas.tolist()
            streams = {label: a * x + b * self["hook_embed"] for label, x in streams.items()}
        return self._stack(streams, layer, mlp_input, apply_ln, pos_slice, return_labels, recompute_ln=last)

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """The embedding and each layer's ``attn_out`` and ``mlp_out``, ``(parts, ..., d_model)``."""
        if mode not in ("all", "mlp", "attn"):
            raise ValueError(f'mode must be "all", "mlp" or "attn", got {mode!r}')
        layer, end = self._target(layer, mlp_input, apply_ln)
        embed, writes = factors(self.model.blocks[:end])
        parts = {"embed": embed * self["hook_embed"]} if incl_embeds else {}
        for i, block in enumerate(self.model.blocks[: layer + mlp_input]):
            if mode != "mlp" and block.attn is not None:
                parts[f"{i}_attn_out"] = writes[i] * self["attn_out", i]
            if mode != "attn" and block.mlp is not None and i < layer:
                parts[f"{i}_mlp_out"] = writes[i] * self["mlp_out", i]
        return self._stack(parts, layer, mlp_input, apply_ln, pos_slice, return_labels)

    def stack_head_results(
        self,
        layer: int | None = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Any = None,
        apply_ln: bool = False,
    ) -> Any:
        """The output of each head below ``layer``, ``(heads, ..., d_model)``.

        ``incl_remainder`` adds one part: the stream minus all heads.
        """
        layer, end = self._target(layer, False, apply_ln)
        parts = self._heads(layer, end)
        if incl_remainder:
            parts["remainder"] = self._stream(layer, end) - sum(parts.values())
        return self._stack(parts, layer, False, apply_ln, pos_slice, return_labels)

    def stack_neuron_results(
        self,
        layer: int | None,
        pos_slice: Any = None,
        neuron_slice: Any = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        project_output_onto: Tensor | None = None,
        mlp_input: bool = False,
    ) -> Any:
        """The output of each hidden MLP unit below ``layer``, ``(units, ..., d_model)``, without the output biases.

        ``incl_remainder`` adds one part: the stream minus all units. Memory: ``n_layer * d_hidden`` streams;
        ``project_output_onto`` keeps only a projection of each.
        """
        layer, end = self._target(layer, mlp_input, apply_ln)
        parts = self._neurons(layer, end, neuron_slice, project_output_onto)
        if incl_remainder:
            whole = self._stream(layer, end, mlp_input)
            parts["remainder"] = _project(whole, project_output_onto) - sum(parts.values())
        return self._stack(parts, layer, mlp_input, apply_ln, pos_slice, return_labels, project_output_onto)

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Any = None,
        return_labels: bool = False,
        project_output_onto: Tensor | None = None,
    ) -> Any:
        """Every head, every hidden unit (or every MLP), the embedding and the biases, ``(parts, ..., d_model)``.

        The parts sum to the stream. The part ``bias`` holds the MLP output biases if the units are expanded; otherwise
        they are in ``mlp_out``, and it is zero.
        """
        layer, end = self._target(layer, mlp_input, apply_ln)
        embed, writes = factors(self.model.blocks[:end])
        parts = self._heads(layer + mlp_input, end)
        if expand_neurons:
            bias = bias_sum(self.model.blocks, layer, end)
        else:
            bias = 0
            blocks = self.model.blocks[:layer]
            parts |= {f"{i}_mlp_out": writes[i] * self["mlp_out", i] for i, b in enumerate(blocks) if b.mlp is not None}
        parts = {label: _project(part, project_output_onto) for label, part in parts.items()}
        if expand_neurons:
            parts |= self._neurons(layer, end, None, project_output_onto)
        x0 = self["hook_embed"]
        parts["embed"] = _project(embed * x0, project_output_onto)
        parts["bias"] = _project(torch.zeros_like(x0) + bias, project_output_onto)
        return self._stack(parts, layer, mlp_input, apply_ln, pos_slice, return_labels, project_output_onto)

    def _result(self, layer: int) -> Shaped[Tensor, "*batch seq n_head d_model"]:
        """Output of each head of a layer: cached, or computed from the cached ``z``."""
        name = f"blocks.{layer}.attn.hook_result"
        if name in self.cache_dict:
            return self.cache_dict[name]
        z = self["z", layer]
        return torch.einsum("...hd,hdm->...hm", z, self.model.blocks[layer].attn.W_O.to(z.dtype))

    def _heads(self, layer: int, end: int) -> dict[str, Tensor]:
        _, writes = factors(self.model.blocks[:end])
        return {
            f"L{i}H{n}": writes[i] * result
            for i, block in enumerate(self.model.blocks[:layer])
            if block.attn is not None
            for n, result in enumerate(self._result(i).unbind(-2))
        }

    def _neurons(self, layer: int, end: int, neuron_slice: Any, projection: Tensor | None) -> dict[str, Tensor]:
        _, writes = factors(self.model.blocks[:end])
        neurons = self._slice(neuron_slice)
        kept = torch.as_tensor(neurons.indices(self.model.config.d_hidden)).reshape(-1)
        parts: dict[str, Tensor] = {}
        for i, block in enumerate(self.model.blocks[:layer]):
            if block.mlp is not None:
                units = writes[i] * self["post", i][..., kept, None]
                units = units * _project(block.mlp.W_out[kept].to(units.dtype), projection)
                parts |= zip((f"L{i}N{n}" for n in kept.tolist()), units.unbind(-2), strict=True)
        return parts

    def _target(self, layer: int | None, mlp_input: bool, apply_ln: bool) -> tuple[int, int]:
        return target(layer, self.model.config.n_layer, mlp_input=mlp_input, mixed=apply_ln)

    def _stream(self, layer: int, end: int, mlp_input: bool = False) -> Tensor:
        """The cached stream that ``layer`` reads, before or after its own mixing: ``end`` blocks have mixed."""
        if mlp_input:
            return self["resid_mid", layer]
        if layer < self.model.config.n_layer:
            return self["resid_mixed" if end > layer else "resid_pre", layer]
        return self["resid_post", layer - 1] if layer else self["hook_embed"]

    def _stack(
        self,
        parts: dict[str, Tensor],
        layer: int,
        mlp_input: bool,
        apply_ln: bool,
        pos_slice: Any,
        return_labels: bool,
        projection: Tensor | None = None,
        recompute_ln: bool = False,
    ) -> Any:
        """The parts as one tensor, cut to some positions, normed and projected as asked; with labels if asked."""
        positions = self._slice(pos_slice)
        empty = _project(self["hook_embed"], projection)[None][:0] if not parts else None
        stack = torch.stack(list(parts.values())) if empty is None else empty
        stack = positions.apply(stack, dim=-2)
        if apply_ln:
            stack = self.apply_ln_to_stack(
                stack,
                layer,
                mlp_input=mlp_input,
                pos_slice=positions,
                has_batch_dim=self.has_batch_dim,
                recompute_ln=recompute_ln,
            )
        stack = stack[..., 0] if projection is not None and projection.ndim == 1 else stack
        return (stack, list(parts)) if return_labels else stack


def _project(part: Tensor, projection: Tensor | None) -> Tensor:
    """``part @ projection`` over the last axis, with an axis of 1 for a single direction."""
    if projection is None:
        return part
    return part @ (projection[:, None] if projection.ndim == 1 else projection).to(part.dtype)
