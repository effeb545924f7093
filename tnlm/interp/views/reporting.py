"""One self-contained HTML report of a model, from its weights and a little text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, Real
from torch import Tensor

from tnlm.checks import TOKENIZER, as_path, check_kind, check_values
from tnlm.interp.checks import check_count
from tnlm.interp.extraction import Extracted, extract
from tnlm.interp.layers.decompositions import hosvd
from tnlm.interp.layers.eigensolver import Eig
from tnlm.interp.layers.lowrank import LowRank
from tnlm.interp.layers.spectra import eig
from tnlm.interp.predictions.ablation import delta_ce, with_mlp
from tnlm.interp.predictions.explanation import explain
from tnlm.interp.ranking import Pair
from tnlm.interp.tokens.bare_tokens import bare_inputs, copied_values
from tnlm.interp.tokens.tables import distinct_tokens, path_table
from tnlm.interp.views import plot
from tnlm.interp.vocabulary import token_weights
from tnlm.output.page import Page
from tnlm.output.progress import track
from tnlm.points import record
from tnlm.text.tokenizer import Tokenizer
from tnlm.transformer import Transformer

_FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.1)
_SHOWN_SEQ = 32
_RANKED = 4096
"""Tokens at most in tables over pairs of tokens: each head costs the square of it."""


def report(
    model: "Transformer | Extracted | str | Any",
    path: str | Path,
    *,
    tokens: Int[Tensor, "rows seq_plus_1"],
    tokenizer: Tokenizer | None = None,
    target: int | str | None = None,
    weights: Real[Tensor, " d_vocab_used"] | None = None,
    top: int = 8,
    progress: bool = True,
) -> Path:
    """Write a report of the model as one HTML file that needs no network, and return its path.

    Parameters by part, the error of the extracted tensors against the forward, mixing scalars, spectra of one token's
    direction in every layer and its leading eigenvectors as tokens, heads, what truncating a layer costs on ``tokens``,
    and one explained logit with ablations.

    Tables over the vocabulary hold the tokens of ``weights`` above 0, at most the 4,096 of largest weight. The
    unembedding is centred: without its mean over these tokens, weighted. Before a softcap that is a convention. Layers
    and heads are numbered as in the model.

    Args:
        path: The file, conventionally ``report.html``; its folder is made.
        tokens: Held-out rows: the first is the prompt that is explained, all measure the truncations.
        weights: How often each token occurs, ``(d_vocab_used,)``, such as :func:`tnlm.training.token_counts` of the
            run that made the model; by default counted in ``tokens``.
        tokenizer: To print tokens as text.
        target: Id whose direction is studied; by default what the model predicts after the prompt.
        top: Eigenvectors, rows and pairs listed.

    Raises:
        ValueError: Tokens or target out of range, or shapes that do not fit.
    """
    path = as_path("path", path)
    net = model if isinstance(model, Extracted) else extract(model)
    page = Page(f"tnlm report: {net.config.n_layer} layers, {net.config.mlp} MLP, {net.config.attention} attention")
    add_sections(
        page, net, tokens=tokens, tokenizer=tokenizer, target=target, weights=weights, top=top, progress=progress
    )
    return page.write(path)


def add_sections(
    page: Page,
    net: Extracted,
    *,
    tokens: Int[Tensor, "rows seq_plus_1"],
    tokenizer: Tokenizer | None = None,
    target: int | str | None = None,
    weights: Real[Tensor, " d_vocab_used"] | None = None,
    top: int = 8,
    progress: bool = True,
) -> None:
    """Add the sections of :func:`report` to a page."""
    check_values("tokens", tokens)
    if tokenizer is not None:
        check_kind("tokenizer", tokenizer, Tokenizer, TOKENIZER)
    if tokens.ndim != 2 or tokens.shape[1] < 2 or not len(tokens):
        raise ValueError(f"tokens must be (rows, seq + 1), got shape {tuple(tokens.shape)}")
    for part in (tokens[:, :-1], tokens[:, 1:]):
        net.model.check_tokens(part, limit=net.config.d_vocab_used)
    check_count("top", top, 1)
    prompt = tokens[0, :-1]
    if target is None:
        with torch.no_grad():
            target = int(net.model(prompt[None])[0, -1, : net.config.d_vocab_used].argmax())
    target = net.read_token("target", target, tokenizer)
    if weights is None:
        weights = tokens.flatten().bincount(minlength=len(net.tokens))
    weights = _most_frequent(token_weights(weights, net.unembed[: len(net.tokens)]))
    names = [str(i) if tokenizer is None else tokenizer.decode([i]) for i in net.tokens]
    steps = [_model, _exactness, _scalars, _spectra, _heads, _truncation, _explanation]
    study = _Study(net, tokens, prompt, target, names, weights, tokenizer, top)
    for step in track(steps, "writing the report", enabled=progress):
        step(page, study)


def _most_frequent(weights: Tensor) -> Tensor:
    """The largest weights, scaled to sum to 1, and 0 for all others."""
    largest = weights.topk(min(_RANKED, len(weights)))
    return torch.zeros_like(weights).index_put((largest.indices,), largest.values / largest.values.sum())


@dataclass(frozen=True, eq=False)
class _Study:
    """Inputs that all sections of a report share."""

    net: Extracted
    tokens: Tensor
    prompt: Tensor
    target: int
    names: list[str]
    """Text of every token of the vocabulary that text can contain."""
    weights: Tensor
    """How often each of these tokens occurs, sums to 1."""
    tokenizer: Tokenizer | None
    top: int

    @property
    def tensor_mlp(self) -> bool:
        return self.net.config.mlp_is_form

    def direction(self) -> Tensor:
        """The target's centred unembedding row."""
        return self.net.unembed_centred(self.weights)[self.target]


def _model(page: Page, study: _Study) -> None:
    config = study.net.config
    page.heading("Model")
    counts: dict[str, int] = {"embedding and unembedding": 0, "attention": 0, "MLP": 0, "scalars and biases": 0}
    for name, p in study.net.model.named_parameters():
        kind = "attention" if ".attn." in name else "MLP" if ".mlp." in name else "embedding and unembedding"
        counts["scalars and biases" if p.ndim < 2 else kind] += p.numel()
    page.table(["part", "parameters"], [*counts.items(), ("all", sum(counts.values()))])
    settings = config.to_dict().items()
    page.table(["setting", "value"], [(k, f"{v:g}" if isinstance(v, float) else str(v)) for k, v in settings])


def _exactness(page: Page, study: _Study) -> None:
    page.heading("Do the extracted tensors equal the model?")
    polynomial = study.net.config.layers_polynomial
    if not polynomial:
        page.text(
            "Some layers are no polynomials, so the model as a whole has no tensor network; its polynomial parts do."
        )
        return
    error = study.net.check(study.prompt[None])
    page.text(
        f"Extracted tensors contracted with the norms of this run against the logits: largest difference {error:.1e} "
        "of the largest logit."
    )
    exact = "exact for every input" if study.net.config.polynomial else "exact given the norms of a run"
    page.text(f"What follows from the weights alone is {exact}; the softcap comes after everything.", note=True)


def _scalars(page: Page, study: _Study) -> None:
    if study.net.config.x0_mixing or study.net.config.value_residual:
        page.heading("How layers mix")
        page.figure(plot.lambdas(study.net))


def _form(net: Extracted) -> str:
    """Which form's eigenvalues are shown, in words."""
    traceless = "traceless, as the inputs are of one length" if net.config.norm == "rms" else "as the weights hold it"
    return f"exact: of the layer's form along the centred unembedding row, {traceless}"


def _spectra(page: Page, study: _Study) -> None:
    page.heading("Spectra of one direction")
    net, name = study.net, study.names[study.target]
    if not study.tensor_mlp:
        page.text(f"A {net.config.mlp} MLP has no tensor, so no spectrum.")
        return
    u = study.direction()
    spectra: list[Eig] = [eig(net.mlp[layer], net.write_factors[layer] * u) for layer in range(net.n_layer)]
    size = min(64, net.config.d_model)
    curves = {f"layer {n}": (range(size), s.values.abs()[:size].tolist()) for n, s in enumerate(spectra)}
    title = f"Eigenvalues for the token {name!r}, by magnitude"
    page.figure(plot.lines(curves, title=title, x="rank", y="|eigenvalue|", subtitle=_form(net)))
    strongest = max(range(net.n_layer), key=lambda layer: float(spectra[layer].values.abs().max()))
    pairs = spectra[strongest]
    page.text(
        f"Layer {strongest} holds the largest eigenvalue. Its leading eigenvectors, by the tokens of the text "
        "whose bare embeddings score highest and lowest on them:"
    )
    k = min(study.top, 6)
    ids = study.tokens.unique()
    labels = [study.names[i] for i in ids.tolist()]
    page.figure(plot.eigenvectors(pairs.vectors[:, :k], pairs.values[:k], net.x0[ids], labels))


def _heads(page: Page, study: _Study) -> None:
    net = study.net
    if net.config.attention == "none":
        return
    page.heading("Heads")
    ids = distinct_tokens(net, study.weights)
    targets, x0 = net.unembed_centred(study.weights)[ids], net.x0[ids]
    rows: list[tuple[object, ...]] = []
    for layer in range(net.n_layer):
        for n in range(net.config.n_head):
            written = copied_values(net, layer, n, bare_inputs(net, layer, x0), x0)
            left = net.write_factors[layer] * targets @ written.left
            typical = float(LowRank(left, written.right).norm()) / len(ids)
            found = path_table(net, layer, n, 1, by="all", which="abs", weights=study.weights)
            pairs = [Pair(*row) for row in (found.itertuples(index=False) if hasattr(found, "itertuples") else found)]
            # none where the text has one token alone
            strongest = [x for p in pairs for x in (repr(study.names[p.source]), repr(study.names[p.target]), p.value)]
            rows.append((f"L{layer}.H{n}", typical, *(strongest or ["", "", ""])))
    page.text(
        "What a head adds to centred logits when it reads a bare token with weight 1, before the factor of the final "
        f"norm, over the {len(ids):,} tokens that occur and differ: root mean square of all pairs, and the strongest "
        "pair of two different tokens."
    )
    page.table(["head", "root mean square", "strongest: read", "moved", "by"], rows)
    if len(study.prompt) <= _SHOWN_SEQ:
        last, suffixes = net.n_layer - 1, ("", "2")[: net.config.n_qk]
        points = [f"blocks.{last}.attn.hook_attn_scores{s}" for s in suffixes]
        points.append(f"blocks.{last}.attn.hook_pattern")
        run = record(net.model, study.prompt[None], points)
        labels = [study.names[int(t)] for t in study.prompt]
        title = f"Layer {last} on the prompt"
        page.figure(plot.attention(run[points[-1]][0], [run[p][0] for p in points[:-1]], labels=labels, title=title))


def _truncation(page: Page, study: _Study) -> None:
    page.heading("What truncating the last MLP costs")
    if not study.tensor_mlp:
        page.text("Only polynomial MLPs are truncated here.")
        return
    net, d = study.net, study.net.config.d_model
    layer = net.n_layer - 1
    tucker = hosvd(net.mlp[layer], d, d)
    ranks = sorted({max(1, round(f * d)) for f in _FRACTIONS}, reverse=True)
    costs = []
    for rank in ranks:
        edited = with_mlp(net.model, {layer: tucker.reconstruct(rank, rank)})
        costs.append(delta_ce(net, edited, study.tokens))
    curve, errors = [c.mean for c in costs], [c.error or 0.0 for c in costs]
    title = f"HOSVD of layer {layer} to equal input and output rank"
    page.figure(plot.truncation(ranks, {"layer": curve}, errors={"layer": errors}, title=title))
    page.table(
        ["rank", "change of cross-entropy (nats)", "standard error", "KL (nats)"],
        [(rank, c.mean, "" if c.error is None else c.error, c.kl) for rank, c in zip(ranks, costs, strict=True)],
    )


def _explanation(page: Page, study: _Study) -> None:
    page.heading("One prediction explained")
    e = explain(study.net, study.prompt, study.target, tokenizer=study.tokenizer)
    text = "".join(study.names[int(t)] for t in study.prompt)
    page.code(text[-400:])
    page.figure(e.plot())
    header = ["part", "adds", "share", "removed: predicted", "norms and later layers held", "all recomputed"]
    page.table(header, [(e.label(row), row.value, e.share(row), *e.ablate(row)) for row in e.rows[: study.top]])
    page.text(f"{e.summary}.", note=True)
    page.text(f"{len(e)} parts sum to {e.logit:.4f}; rounding leaves {e.remainder:.1e}.", note=True)
