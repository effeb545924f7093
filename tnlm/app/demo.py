"""``make demo``: train two nano models, compare them, read one from its weights, and write a page about it.

Finished runs are kept: the same command continues an interrupted demo.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnlm.output.command import guarded, print_record
from tnlm.output.exit_codes import ExitCode

if TYPE_CHECKING:
    from torch import Tensor

    from tnlm.text.tokenizer import Tokenizer
    from tnlm.training.run.outcomes import Result

ARMS = {"bilinear + bilinear": ("bilinear", "bilinear"), "swiglu + softmax": ("swiglu", "softmax")}
CAVEAT = "One seed of a nano model proves nothing about architectures; docs/comparison.md says what would."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code, as ``tnlm`` does."""
    return guarded("demo", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tnlm.app.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for runs and page (default: demo)")
    parser.add_argument("--steps", type=int, default=None, help="updates per model (default: the nano preset's 250)")
    args = parser.parse_args(argv)
    print_record(run(args.out, steps=args.steps))
    return ExitCode.DONE


def run(out: Path, *, steps: int | None = None) -> dict[str, Any]:
    """Train both models into ``out/runs`` (finished runs are kept), compare them, analyse one and write the page.

    Returns:
        A JSON record of the losses, the token studied with its eigenvalues, and the paths.
    """
    import tnlm
    from tnlm import interp

    results = {name: _train(out, *kinds, steps=steps) for name, kinds in ARMS.items()}
    curves = {name: _validation_curve(result.folder) for name, result in results.items()}
    ratio = _step_ratio(curves)
    tensor, baseline = (results[name] for name in ARMS)

    print("\n== validation loss, nats per token")
    for name, result in results.items():
        print(f"{name:20} {result.val_loss:.4f}   ({result.bits_per_byte:.3f} bits per byte)")
    print(f"batches of the first per batch of the second, to reach the higher of the two losses: {ratio:.2f}")
    print(CAVEAT)

    model = tnlm.load(tensor.folder)
    tokens, tokenizer = _held_out(tensor.folder)
    net = interp.extract(model)
    print(f"\n== weights as tensors: relative difference to the forward {net.check(tokens[:2, :-1]):.1e}")
    token = _frequent_word(tokens, tokenizer)
    eigenvalues = _describe_direction(net, token, tokens, tokenizer)

    page = _write_page(out / "demo.html", net, curves, ratio, tokens, tokenizer, token)
    print(f"\nThe page with all figures: {page.resolve()}")
    return {
        "val_loss": {name: result.val_loss for name, result in results.items()},
        "step_ratio": ratio,
        "direction": tokenizer.decode([token]),
        "eigenvalues": eigenvalues,
        "page": str(page),
        "runs": [str(tensor.folder), str(baseline.folder)],
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


def _validation_curve(folder: Path) -> tuple[list[int], list[float]]:
    from tnlm.training.run.metrics import read_metrics

    events = [e for e in read_metrics(folder / "metrics.jsonl") if e["kind"] == "val"]
    return [e["step"] for e in events], [e["loss"] for e in events]


def _step_ratio(curves: dict[str, tuple[list[int], list[float]]]) -> float:
    """Steps to the higher of the two final losses, of the tensor model divided by those of the baseline."""
    level = max(losses[-1] for _, losses in curves.values())
    tensor, baseline = (_first_step(*curves[name], level) for name in ARMS)
    return tensor / baseline


def _first_step(steps: list[int], losses: list[float], level: float) -> float:
    """Step at which a curve first reaches a loss, interpolated linearly between validations."""
    for i in range(1, len(steps)):
        if losses[i] <= level:
            share = (losses[i - 1] - level) / (losses[i - 1] - losses[i])
            return steps[i - 1] + share * (steps[i] - steps[i - 1])
    raise AssertionError("the level is a final loss, so it is reached")


def _held_out(folder: Path) -> "tuple[Tensor, Tokenizer]":
    """Validation windows of a run, (rows, seq + 1), and its tokenizer."""
    from tnlm.training.config import load_config
    from tnlm.training.data.inputs import open_inputs
    from tnlm.training.run.distributed import World

    inputs = open_inputs(load_config(folder / "config.json"), World.from_environment())
    inputs.loader.close()
    assert inputs.tokenizer is not None
    return next(iter(inputs.validation.batches(32))).long(), inputs.tokenizer


def _frequent_word(tokens: "Tensor", tokenizer: "Tokenizer") -> int:
    """The most frequent held-out token that is a word of three letters or more."""
    counts = tokens.flatten().bincount(minlength=tokenizer.d_vocab)
    for token in counts.argsort(descending=True).tolist():
        text = tokenizer.decode([token]).strip()
        if len(text) >= 3 and text.isalpha():
            return token
    return int(counts.argmax())


def _describe_direction(net: Any, token: int, tokens: "Tensor", tokenizer: "Tokenizer") -> list[float]:
    """Print the leading eigenvectors of one token's direction in the last MLP, as tokens of the text."""
    from tnlm import interp

    used = net.unembed[: len(net.tokens)]
    pairs = interp.eig(net.mlp[net.n_layer - 1], used[token] - used.mean(0), k=4)
    ids = tokens.unique()
    scores = net.x0[ids] @ pairs.vectors
    print(
        f"\n== what the last MLP reads to predict {tokenizer.quoted(token)}: the quadratic form's largest eigenvalues,"
    )
    print("   and the tokens whose embeddings reach furthest along the eigenvector, to either side")
    for k, value in enumerate(pairs.values.tolist()):
        order = ids[scores[:, k].argsort(descending=True)].tolist()
        ends = [" ".join(map(tokenizer.quoted, part)) for part in (order[:5], order[:-6:-1])]
        print(f"{value:+9.3f}   {ends[0]}   |   {ends[1]}")
    print("(x and -x are one input to a quadratic form: the two ends of an eigenvector can be swapped)")
    return pairs.values.tolist()


def _write_page(
    path: Path,
    net: Any,
    curves: dict[str, tuple[list[int], list[float]]],
    ratio: float,
    tokens: "Tensor",
    tokenizer: "Tokenizer",
    token: int,
) -> Path:
    from tnlm.interp.views.plot import lines
    from tnlm.interp.views.reporting import add_sections
    from tnlm.output.page import Page

    page = Page("tnlm demo")
    page.heading("Two nano models on the same text")
    page.figure(lines(curves, title="Validation loss", x="step", y="nats per token", subtitle="one seed each"))
    page.text(
        f"The tensor model needed {ratio:.2f} times the baseline's batches for the higher of the final losses. {CAVEAT}"
    )
    add_sections(page, net, tokens=tokens[:, :25], tokenizer=tokenizer, target=token)
    return page.write(path)


if __name__ == "__main__":
    sys.exit(main())
