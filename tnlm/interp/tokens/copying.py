"""Copying by attention, from the weights: tables over pairs of tokens, and scores with an exact null."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tnlm.checks import check_kind, check_values, seeded
from tnlm.interp.checks import check_count, check_number, check_real, check_tensor, check_view
from tnlm.interp.extraction import Extracted
from tnlm.interp.layers.heads import BilinearHead
from tnlm.interp.tokens.bare_tokens import copied_values, normed


class Match(NamedTuple):
    """Score of how far the diagonal of a table stands out: entries of a token with itself."""

    value: float
    """Mean of the diagonal."""
    null: float
    """Mean of the whole table, which is the mean of the diagonal averaged over all permutations of the columns."""
    z: float
    """``value - null`` in standard deviations over permutations; at most ``n - 1``, reached by the identity."""
    effect: float
    """``value - null`` in standard deviations of one entry, ``z / sqrt(n - 1)``: unlike ``z`` it does not grow with the
    number of tokens that behave alike. Entries are of the table centred by rows and columns."""


def match(table: Float[Tensor, "n n"]) -> Match:
    """Score of the diagonal of a table of token pairs against all permutations of its columns, exact.

    ``sum_i table[i, p(i)]`` over uniform permutations ``p`` has variance ``sum d**2 / (n - 1)``, ``d`` the table
    centred by rows and columns. A table without structure (``d = 0``) has z = 0. With ``z``, the evidence, comes the
    effect size.

    Raises:
        ValueError: The table is not square, has fewer than 2 tokens, or is not finite.

    Source: Hoeffding 1951, A combinatorial central limit theorem.
    """
    check_values("table", table)
    check_tensor("table", table, (None, None))
    check_tensor("table", table, (None, len(table)))
    check_real("table", table)
    check_count("the number of tokens", len(table), 2)
    n, wide = len(table), table.double()
    centred = wide - wide.mean(0) - wide.mean(1, keepdim=True) + wide.mean()
    deviation = float((centred.square().sum() / (n - 1)).sqrt())
    value, null = float(wide.diagonal().mean()), float(wide.mean())
    noise = torch.finfo(table.dtype).eps * float(wide.abs().max()) * n
    z = n * (value - null) / deviation if deviation > noise else 0.0
    return Match(value, null, z, z / (n - 1) ** 0.5)


def pattern_table(
    head: BilinearHead, queries: Float[Tensor, "n_q d_in"], keys: Float[Tensor, "n_k d_in"], distance: int = 0
) -> Float[Tensor, "n_q n_k"]:
    """Pattern of every query input looking at every key input ``distance`` positions back: ``n_q n_k`` numbers.

    For a few keys of each token in large vocabularies use :meth:`BilinearHead.token_scores`, which is blockwise.

    Symmetries: R E P U Q QR V L X H S.

    Raises:
        ValueError: The pattern is not polynomial, or shapes do not fit.
    """
    check_kind("head", head, BilinearHead, "extract(model).attention[layer].head(n) gives one")
    check_number("distance", distance)
    head._require_pattern("pattern_table")
    scores = (
        head.token_table(queries, branch, "q") @ head.token_table(keys, branch, "k", -distance).mT for branch in (1, 2)
    )
    first, second = scores
    return first * second / head.d_qk**2


@torch.no_grad()
def copy_table(
    net: Extracted, layer: int, head: int, inputs: Float[Tensor, "d_vocab d_model"]
) -> Float[Tensor, "d_vocab d_vocab"]:
    """Logit of token ``i`` (row) when a head reads ``inputs[j]`` (column) with pattern 1, on the direct path out.

    A head copies when the diagonal stands out (:func:`match`, which no centring changes) with the sign of its pattern.
    Of all ids, padding included, as they are numbered; ``d_vocab**2`` numbers.

    Args:
        inputs: Rows of the residual stream at the layer, ``j`` where the token is ``j``; the layer's norm is applied
            where there is one. ``net.x0`` for bare tokens. With a value residual block 0 reads the bare token.

    Returns:
        As :func:`path_table`: with the factor of later layers, without that of the final norm.

    Symmetries: R E Q QR V L H S.

    Raises:
        ValueError: Shapes do not fit.
    """
    check_view(net, "config", "attention", "unembed", "write_factors")
    check_count("layer", layer, 0, len(net.attention) - 1)
    check_count("head", head, 0, net.config.n_head - 1)
    check_tensor("inputs", inputs, (len(net.unembed), net.unembed.shape[1]), net.unembed)
    written = copied_values(net, layer, head, normed(net, inputs), net.x0)
    return (net.write_factors[layer] * net.unembed @ written.left) @ written.right


def follower_entries(tokens: Int[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq seq"]:
    """Mask of the entries ``[query, key]`` whose key follows a token equal to the query's, as induction needs."""
    check_values("tokens", tokens)
    if tokens.ndim != 2 or tokens.dtype.is_floating_point:
        raise ValueError(f"tokens must be ids (batch, seq), got shape {tuple(tokens.shape)} of {tokens.dtype}")
    follows = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool, device=tokens.device)
    follows[:, :, 1:] = tokens[:, :, None] == tokens[:, None, :-1]
    return follows.tril()


def equal_part(entries: Bool[Tensor, "batch seq seq"], seed: int = 0) -> Bool[Tensor, "batch seq seq"]:
    """Random control for an ablation: in every row as many other causal entries as ``entries`` has.

    Raises:
        ValueError: Entries in the future, or a row that has fewer others than entries.
    """
    check_values("entries", entries)
    if entries.dtype != torch.bool or entries.ndim != 3 or entries.shape[1] != entries.shape[2]:
        raise ValueError(f"entries must be bool (batch, seq, seq), got {entries.dtype} of shape {tuple(entries.shape)}")
    if bool((entries & ~entries.tril()).any()):
        raise ValueError("entries must be causal (key at or before query), got some in the future; use .tril()")
    others = torch.ones_like(entries).tril() & ~entries
    wanted, have = entries.sum(-1, keepdim=True), others.sum(-1, keepdim=True)
    if bool((wanted > have).any()):
        row = int((wanted > have).flatten(1).any(0).nonzero()[0])
        most = int(wanted[:, row].max())
        raise ValueError(f"every row needs as many other entries as it has, got {most} of the {row + 1} in row {row}")
    noise = torch.rand(entries.shape, generator=seeded(seed)).to(entries.device)
    order = noise.masked_fill(~others, 2.0).argsort(-1).argsort(-1)
    return order < wanted


@torch.no_grad()
def cycle_votes(net: Extracted, period: int, position: int, *, clock: bool = True) -> Float[Tensor, " period"]:
    """Logits of two attention layers on ``a b c a b c ...``, predicted from the weights as averages over tokens.

    ``votes[r]`` is the logit that layer 1 adds at ``position`` to the token ``r`` steps back, above other tokens: its
    mean pattern, summed over the keys that hold that token, times what it copies (:func:`copy_table`). ``r = 0`` is the
    token itself, ``r = period - 1`` the one that comes next. The reading is: layer 0 looks at equal tokens alone, so it
    turns ``E[t]`` at position ``i`` into ``E[t] + c W[t]``, ``W = OV E``, where ``c = sum_k a(k period)`` adds its
    pattern ``a`` at the distances where the token came before: ``c`` tells the period, a clock. Both layers are
    averaged over tokens (equal and different ones apart). Approximate: no data is used, and tokens differ. In models
    with norms each layer reads its normed input, and the factor of the final norm is not included.

    Args:
        net: Two layers of one head with polynomial pattern; no MLP, mixing or biases.
        period: Distinct tokens in the cycle, at least 2.
        position: Of the query, from 0; at least ``period``, so that every token of the cycle came before.
        clock: False leaves layer 0 out (``c = 0``): what layer 1 does by distance alone.

    Symmetries: R E P U Q QR V H S.

    Raises:
        ValueError: Another architecture, or numbers out of range. Costs ``position`` tables of ``d_vocab**2``.
    """
    check_view(net, "config", "attention", "unembed", "x0")
    config = net.config
    plain = config.n_layer == 2 and config.n_head == 1 and config.mlp == "none" and not config.x0_mixing
    if not plain or config.qk_bias or config.value_residual:
        raise ValueError(
            "cycle_votes reads two layers of one head and nothing else (mlp='none', no x0_mixing, value_residual or "
            f"qk_bias), got n_layer={config.n_layer}, n_head={config.n_head}, mlp={config.mlp!r}"
        )
    check_count("period", period, 2)
    check_count("position", position, period, config.n_ctx - 1)
    first, second = (net.attention[layer].head(0) for layer in (0, 1))
    x = net.x0[: len(net.tokens)]
    bare = normed(net, x)
    written = (first.ov() @ bare.mT).mT
    # how far layer 0 has moved a token that came back every period: one number for each earlier position
    equal = torch.stack([pattern_table(first, bare, bare, k).diagonal().mean() for k in range(0, position + 1, period)])
    counts = torch.arange(position + 1, device=x.device) // period
    moved = equal.cumsum(0)[counts] * float(clock)
    off = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    votes = x.new_zeros(period)
    for key in range(position + 1):
        distance = position - key
        query, read = (normed(net, x + moved[at] * written) for at in (position, key))
        table = pattern_table(second, query, read, distance)
        votes[distance % period] += table[off].mean() if distance % period else table.diagonal().mean()
    copied = match(copy_table(net, 1, 0, net.x0)[: len(x), : len(x)])
    # the null includes the diagonal: the mean over other tokens alone is n / (n - 1) times as far from it
    return votes * (copied.value - copied.null) * len(x) / (len(x) - 1)
