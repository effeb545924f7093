"""``tnlm demo``: train two nano models, compare them, read one from its weights, and write a page about it.

Finished runs are kept: the same command continues an interrupted demo.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnlm.app.held_out import validation_of

if TYPE_CHECKING:
    from torch import Tensor

    from tnlm.text.tokenizer import Tokenizer
    from tnlm.training.compare.arms import Comparison
    from tnlm.training.run.outcomes import Result

VARIANT, BASE = ("bilinear", "bilinear"), ("swiglu", "softmax")
"""MLP and attention of the tensor model, and of the baseline that it is compared with."""
CAVEAT = "One seed of a nano model proves nothing about architectures; docs/comparison.md says what would."
Say = Callable[[str], None]
"""Prints a line for a person."""


def run(out: Path, *, steps: int | None = None, say: Say = print) -> dict[str, Any]:
    """Train both models into ``out/runs`` (finished runs are kept), compare them, analyse one and write the page.

    Returns:
        A JSON record of the comparison, the token studied with its eigenvalues, and the paths.
    """
    import tnlm
    from tnlm import interp
    from tnlm.training.compare import report
    from tnlm.training.compare.arms import compare_arms
    from tnlm.training.compare.runs import load_run

    variant, base = (_train(out, *kinds, steps=steps) for kinds in (VARIANT, BASE))
    comparison = compare_arms([load_run(base.folder)], [load_run(variant.folder)])
    say("\n== the two compared, as tnlm-train compare does")
    say(report.to_text(comparison))
    say(CAVEAT)

    model = tnlm.load(variant.folder)
    validation, tokenizer = validation_of(variant.folder)
    assert tokenizer is not None
    tokens = next(iter(validation.batches(32))).long()
    net = interp.extract(model)
    say(f"\n== weights as tensors: relative difference to the forward {net.check(tokens[:2, :-1]):.1e}")
    token = _frequent_word(tokens, tokenizer)
    eigenvalues = _describe_direction(net, token, tokens, tokenizer, say)

    page = _write_page(out / "demo.html", net, comparison, tokens, tokenizer, token)
    say(f"\nThe page with all figures: {page.resolve()}")
    return {
        "comparison": report.to_record(comparison),
        "direction": tokenizer.decode([token]),
        "eigenvalues": eigenvalues,
        "page": str(page),
        "runs": {"base": str(base.folder), "variant": str(variant.folder)},
    }


def _train(out: Path, mlp: str, attention: str, *, steps: int | None) -> "Result":
    from tnlm.app.specimens import training_config
    from tnlm.training.run.loop import train

    folder = out / "runs" / f"{mlp}-{attention}"
    config = training_config("nano", mlp=mlp, attention=attention).replace(out=str(folder))  # type: ignore[arg-type]
    if steps is not None:
        config = config.replace(steps=steps, val_every=min(config.val_every, max(1, steps // 4)))
    begun = " (what is done is kept)" if folder.exists() else ""
    print(f"== training {mlp} MLP, {attention} attention: {config.steps} steps{begun}", file=sys.stderr)
    return train(config)


def _frequent_word(tokens: "Tensor", tokenizer: "Tokenizer") -> int:
    """The most frequent held-out token that is a word of three letters or more."""
    counts = tokens.flatten().bincount(minlength=tokenizer.d_vocab)
    for token in counts.argsort(descending=True).tolist():
        text = tokenizer.decode([token]).strip()
        if len(text) >= 3 and text.isalpha():
            return token
    return int(counts.argmax())


def _describe_direction(net: Any, token: int, tokens: "Tensor", tokenizer: "Tokenizer", say: Say) -> list[float]:
    """Say the leading eigenvectors of one token's direction in the last MLP, as tokens of the text."""
    from tnlm import interp

    used = net.unembed[: len(net.tokens)]
    pairs = interp.eig(net.mlp[net.n_layer - 1], used[token] - used.mean(0), k=4)
    ids = tokens.unique()
    scores = net.x0[ids] @ pairs.vectors
    say(f"\n== what the last MLP reads to predict {tokenizer.quoted(token)}: the quadratic form's largest eigenvalues,")
    say("   and the tokens whose embeddings reach furthest along the eigenvector, to either side")
    for k, value in enumerate(pairs.values.tolist()):
        order = ids[scores[:, k].argsort(descending=True)].tolist()
        ends = [" ".join(map(tokenizer.quoted, part)) for part in (order[:5], order[:-6:-1])]
        say(f"{value:+9.3f}   {ends[0]}   |   {ends[1]}")
    say("(x and -x are one input to a quadratic form: the two ends of an eigenvector can be swapped)")
    return pairs.values.tolist()


def _write_page(
    path: Path, net: Any, comparison: "Comparison", tokens: "Tensor", tokenizer: "Tokenizer", token: int
) -> Path:
    from tnlm.interp.views.reporting import add_sections
    from tnlm.output.page import Page
    from tnlm.training.compare import plot, report

    page = Page("tnlm demo")
    page.heading("Two nano models on the same text")
    page.figure(plot.comparison(comparison))
    page.code(report.to_text(comparison))
    page.text(CAVEAT)
    add_sections(page, net, tokens=tokens[:, :25], tokenizer=tokenizer, target=token)
    return page.write(path)
