"""Command ``tnlm``: info, verify, eval, generate, convert, explain, report, demo.

Commands import torch, training and interp when they run, so that help is fast. Progress and warnings go to stderr; with
``--json`` stdout holds one JSON record and nothing else.

Exit codes: 0 done, 1 a check of ``verify`` failed or none could be made, 2 a wrong argument or file (the message says
which), 130 Ctrl-C, 141 the reader of the output has left (``| head``).
"""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tnlm.app.held_out import run_of, text_or_held_out
from tnlm.output.command import Command, ModelCommand, TextCommand, guarded, load_model, print_record, print_version
from tnlm.output.exit_codes import ExitCode
from tnlm.text.default_tokenizer import encode_prompt, find_tokenizer, one_token, source_of

if TYPE_CHECKING:
    from torch import Tensor

    from tnlm.text.tokenizer import Tokenizer
    from tnlm.transformer import Transformer

REPORT_SEQ = 128
"""Tokens per row of a report, when the model can read as many."""


@dataclass(frozen=True, kw_only=True)
class Info(ModelCommand):
    """Parameters, cost and configuration of a model, without loading its weights.

    $ tnlm info runs/nano-bilinear-bilinear-s0
    $ tnlm info bilinear-bilinear-18l --json
    """

    seq: int | None = None
    """Sequence length of the FLOPs; the model's n_ctx when left out."""

    def execute(self) -> dict[str, Any]:
        from tnlm.checkpoints.checkpoint import read_config
        from tnlm.checkpoints.resolve import find_model, locate

        entry, _, path = locate(self.model, revision=self.revision)
        config = read_config(self.model, revision=self.revision, attention=self.attention, overrides=self.overrides)
        dtypes = None
        if path is not None or entry is None:
            from tnlm.checkpoints import weightfiles

            stored = weightfiles.read(find_model(self.model, revision=self.revision).weights)
            dtypes = _count_dtypes(stored.tensors)
        seq = config.n_ctx if self.seq is None else self.seq
        if seq < 1:
            raise ValueError(f"seq must be at least 1, got {seq}")
        parameters = {
            "total": config.n_params,
            "blocks": config.n_block_params,
            "polynomial_share": config.polynomial_share,
        }
        flops = config.flops_per_token(seq)
        rows = [
            ("parameters", f"{config.n_params:,}"),
            ("of these in blocks", f"{config.n_block_params:,}"),
            ("polynomial layers, share of the blocks", f"{config.polynomial_share:.1%}"),
            (f"training FLOPs per token at {seq} tokens", f"{flops:,}"),
        ]
        if dtypes is not None:
            rows.append(("stored as", ", ".join(f"{name} ({n:,})" for name, n in dtypes.items())))
        else:
            rows.append(("stored as", "not downloaded"))
        self.show(self.model, rows)
        self.show("configuration", list(config.to_dict().items()))
        return {
            "model": self.model,
            "parameters": parameters,
            "flops_per_token": flops,
            "seq": seq,
            "dtypes": dtypes,
            "config": config.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class Verify(Command):
    """Check a model: its file, its numerics, its cross-entropy on known text.

    Exit code 1 when a check fails, or when none could be made: then nothing is known about the model.

    --released checks every released model, or the one named, and records the outcome.

    $ tnlm verify runs/nano-bilinear-bilinear-s0
    $ tnlm verify bilinear-bilinear-18l --text pile.txt --protocol 512x512
    $ tnlm verify --released --out verification.json
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Folder, weight file or run folder; short name of a released model; or Hub id. --released needs none."""
    released: tyro.conf.FlagCreatePairsOff[bool] = False
    """Download what is not in the cache, about 2 GB for each of the larger models."""
    out: Path = Path("verification.json")
    """Where --released records the outcome; models not checked now stay as they were."""
    text: Path | None = None
    """The UTF-8 text of the recorded value, documents separated by <|endoftext|>; no such check when left out."""
    protocol: str | None = None
    """Which recorded value, as ROWSxTOKENS; the first one when left out."""
    revision: str | None = None
    """Commit, branch or tag of a Hub id; the recorded commit of a released model, else main, when left out."""
    attention: Literal["squared", "squared_normalized"] | None = None
    """Which of the two a file holds; needed only where it does not say, and by default what it says."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""

    def execute(self) -> dict[str, Any]:
        from tnlm.checkpoints import verification
        from tnlm.checkpoints.resolve import locate
        from tnlm.output.progress import announce

        options: dict[str, Any] = {"text": self.text, "protocol": self.protocol, "device": self.device}
        if self.released:
            if self.revision is not None or self.attention is not None:
                raise ValueError("--released checks what is recorded: leave out --revision and --attention")
            names = None if self.model is None else [_registered(self.model)]
            with announce("verifying released models"):
                record = verification.verify_released(self.out, names=names, **options)
            rows = [(name, facts["state"], facts["repo"]) for name, facts in record["models"].items()]
            self.show(str(self.out), rows, ("model", "state", "repository"))
            return {"passed": all(state != "failed" for _, state, _ in rows), "file": str(self.out), **record}
        if self.model is None:
            raise ValueError("which model? Name one, or pass --released for all released ones")
        locate(self.model, revision=self.revision)
        with announce(f"verifying {self.model}"):
            checks = verification.verify(self.model, revision=self.revision, attention=self.attention, **options)
        self.show(self.model, [(c.name, c.status, c.detail) for c in checks], ("check", "outcome", "figures or reason"))
        outcomes = {check.status for check in checks}
        passed = "passed" in outcomes and "failed" not in outcomes
        return {"model": self.model, "passed": passed, "checks": [asdict(check) for check in checks]}


@dataclass(frozen=True, kw_only=True)
class Eval(TextCommand):
    """Cross-entropy on text, in windows, per position; or benchmark tasks with lm-eval.

    Every token but the first is predicted once. A run folder without --text is measured on its own validation tokens.

    $ tnlm eval runs/nano-bilinear-bilinear-s0
    $ tnlm eval bilinear-bilinear-18l --text book.txt --seq 512 --rows 64
    $ tnlm eval runs/large --tasks lambada_openai hellaswag --limit 200
    """

    text: Path | None = None
    """A UTF-8 text file; by default the validation tokens of a run."""
    seq: int | None = None
    """Tokens per window; n_ctx (or that of the run) when left out."""
    rows: int | None = None
    """Windows; all when left out."""
    batch_size: int = 4
    """Windows, or examples of a task, per forward."""
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="")] = ()
    """Tasks of lm-eval, instead of text (needs the extra `evals`)."""
    limit: int | None = None
    """Examples per task; all when left out."""

    def execute(self) -> dict[str, Any]:
        others = ("text", "seq", "rows") if self.tasks else ("limit",)
        given = [f"--{name}" for name in others if getattr(self, name) is not None]
        if given:
            raise ValueError(f"{', '.join(given)} {'cannot go with' if self.tasks else 'belongs to'} --tasks")
        model = self.load()
        tokenizer = find_tokenizer(model, self.tokenizer)
        if self.tasks:
            return self._run_tasks(model, tokenizer)
        from tnlm.text.evaluate import byte_lengths, cross_entropy

        tokens, seq, source = text_or_held_out(self.text, model, tokenizer, self.seq)
        lengths = byte_lengths(tokenizer)
        result = cross_entropy(
            model, tokens, seq=seq, rows=self.rows, batch_size=self.batch_size, byte_lengths=lengths, progress=True
        )
        error = "" if result.standard_error is None else f" +- {result.standard_error:.4f}"
        bits = "unknown" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
        rows = [
            ("cross-entropy, nats per token", f"{result.loss:.4f}{error}"),
            ("bits per byte", bits),
            ("predicted tokens", f"{result.tokens:,}"),
            ("windows", f"{result.rows} of {result.seq} tokens"),
        ]
        self.show(f"{self.model} on {source}", rows)
        buckets = [(f"{b.start}-{b.stop - 1}", f"{b.loss:.4f}", f"{b.tokens:,}") for b in result.buckets]
        self.show("by position", buckets, ("positions", "nats per token", "tokens"))
        return {"model": self.model, "text": source, **result.to_dict()}

    def _run_tasks(self, model: "Transformer", tokenizer: "Tokenizer") -> dict[str, Any]:
        from tnlm.integrations import hf

        scores = hf.evaluate_tasks(
            model, tokenizer, tasks=list(self.tasks), limit=self.limit, batch_size=self.batch_size
        )
        rows = [(task, metric, f"{value:.4f}") for task, found in scores.items() for metric, value in found.items()]
        self.show(self.model, rows, ("task", "metric", "value"))
        return {"model": self.model, "tasks": scores}


@dataclass(frozen=True, kw_only=True)
class Generate(TextCommand):
    """Continue a prompt.

    Nothing is prepended; the prompt's special text is plain text. An empty prompt starts a document.

    $ tnlm generate runs/nano-bilinear-bilinear-s0 "The parser" --seed 0
    $ tnlm generate swiglu-softmax-18l "Once upon" --temperature 0 --max-new-tokens 20
    """

    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")] = ""
    """Text to continue."""
    max_new_tokens: int | None = None
    """64, or as many as fit the model's context, when left out."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int | None = None
    """Draw from this many most probable tokens; from all when left out."""
    top_p: float | None = None
    """Draw from the fewest tokens that have this probability together; from all when left out."""
    seed: int | None = None
    """Of the draws; different ones each time when left out."""
    cache: Literal["auto", "kv", "recurrent", "none"] = "auto"
    """Keys and values, a state of constant size, or none; auto takes the smaller."""

    def execute(self) -> dict[str, Any]:
        import torch

        from tnlm.output.progress import announce
        from tnlm.text.sampling import generate

        model = self.load()
        tokenizer = find_tokenizer(model, self.tokenizer)
        ids = encode_prompt(self.prompt, tokenizer)
        with announce("generating"):
            out = generate(
                model,
                torch.tensor([ids], device=self.device),
                self.max_new_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                stop=tokenizer.eot,
                seed=self.seed,
                cache=self.cache,
            )[0].tolist()
        continuation = out[len(ids) :]
        ended = bool(continuation) and continuation[-1] == tokenizer.eot
        text = tokenizer.decode(continuation[:-1] if ended else continuation)
        self.say(self.prompt + text)
        return {"model": self.model, "prompt": self.prompt, "text": text, "ids": continuation, "ended": ended}


@dataclass(frozen=True, kw_only=True)
class Convert(ModelCommand):
    """Write a model in tnlm's own format: model.safetensors, config.json and a model card.

    What the source's layout expresses by scales, signs or gains is folded into the weights.

    $ tnlm convert bilinear-bilinear-18l models/bilinear-18l
    $ tnlm convert state_step009726.pt models/mine --attention squared_normalized
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Where to write; made if absent."""
    dtype: Literal["float32", "bfloat16", "float64", "checkpoint"] = "checkpoint"
    """checkpoint keeps each tensor's own."""

    def execute(self) -> dict[str, Any]:
        from tnlm.checkpoints.checkpoint import save
        from tnlm.output.progress import announce

        model = load_model(self, dtype=self.dtype)
        source, tokenizer = source_of(model), model.tokenizer
        with announce(f"writing {self.folder}"):
            save(model, self.folder, tokenizer=tokenizer)
        size = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        rows = [("parameters", f"{model.config.n_params:,}"), ("bytes", f"{size:,}"), *source.items()]
        rows.append(("tokenizer", "none saved with the source" if tokenizer is None else tokenizer.name))
        self.show(str(self.folder), rows)
        return {"folder": str(self.folder), "parameters": model.config.n_params, "bytes": size, "source": source}


@dataclass(frozen=True, kw_only=True)
class Explain(TextCommand):
    """Write the logit of the next token as a ranked sum of named parts, from the weights.

    Heads by the token they read, MLPs by eigen-component; exact, given the norms of this run if any.

    $ tnlm explain runs/nano-bilinear-bilinear-s0 "def __init__(self" --target ","
    $ tnlm explain bilinear-bilinear-18l "Paris is in" --target " France" --foil " Spain" --html paris.html
    """

    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")]
    """Its next token is explained."""
    target: str | None = None
    """Text of one token; the model's own prediction when left out."""
    foil: str | None = None
    """Explain the target's logit minus this token's; the target's alone when left out."""
    components: int = 16
    """Eigen-components per MLP; the others are one row."""
    top: int = 20
    """Rows to print."""
    html: Path | None = None
    """Write the rows as a self-contained figure; none when left out."""

    def execute(self) -> dict[str, Any]:
        import torch

        from tnlm import interp
        from tnlm.output.progress import announce

        if self.top < 0:
            raise ValueError(f"top must be at least 0, got {self.top}")
        model = self.load()
        tokenizer = find_tokenizer(model, self.tokenizer)
        tokens = torch.tensor(encode_prompt(self.prompt, tokenizer), device=self.device)
        if self.target is None:
            with torch.no_grad():
                logits = model(tokens[None], last=True)[0, 0, : model.config.d_vocab_used]
            target = int(logits.argmax())
        else:
            target = one_token("target", self.target, tokenizer)
        foil = None if self.foil is None else one_token("foil", self.foil, tokenizer)
        with announce("explaining"):
            explanation = interp.explain(model, tokens, target, foil, components=self.components, tokenizer=tokenizer)
        self.say(explanation.table(self.top))
        if self.html is not None:
            from tnlm.output.page import Page

            page = Page(f"tnlm explain: {explanation.title}")
            page.text(f"After {self.prompt!r}.")
            page.figure(explanation.plot(self.top))
            page.code(explanation.table(self.top))
            page.write(self.html)
            self.say(f"figure: {self.html}")
        return {"model": self.model, "prompt": self.prompt, **explanation.to_dict(self.top)}


@dataclass(frozen=True, kw_only=True)
class Report(TextCommand):
    """One self-contained HTML page about a model, from its weights and a little text.

    A run folder without --text is shown on its own validation tokens, and its tables over the vocabulary weigh tokens
    by how often they occur in its training shards; otherwise by how often they occur in the rows of text.

    $ tnlm report runs/nano-bilinear-bilinear-s0 --out report.html
    $ tnlm report bilinear-bilinear-18l --text book.txt --target " the" --rows 4
    """

    out: Path = Path("report.html")
    """The page to write."""
    text: Path | None = None
    """A UTF-8 text file; by default the validation tokens of a run."""
    target: str | None = None
    """Text of one token whose output direction is studied; the model's own prediction when left out."""
    seq: int | None = None
    """Tokens per row; 128, or n_ctx if that is smaller, when left out."""
    rows: int = 8
    """Rows of text."""

    def execute(self) -> dict[str, Any]:
        from tnlm import interp
        from tnlm.training import token_counts

        model = self.load()
        tokenizer = find_tokenizer(model, self.tokenizer)
        seq = min(REPORT_SEQ, model.config.n_ctx) if self.seq is None else self.seq
        stream, _, source = text_or_held_out(self.text, model, tokenizer, seq)
        if self.rows < 1 or seq < 1 or len(stream) <= seq:
            raise ValueError(
                f"a report needs at least one row of seq + 1 tokens, got rows={self.rows}, seq={seq} and "
                f"{len(stream)} tokens of {source}"
            )
        whole = min(self.rows, (len(stream) - 1) // seq)
        target = None if self.target is None else one_token("target", self.target, tokenizer)
        tokens = stream[: whole * seq + 1].unfold(0, seq + 1, seq)
        run = None if self.text is not None else run_of(model)
        weights = None if run is None else token_counts(run)
        options: dict[str, Any] = {"tokenizer": tokenizer, "target": target, "weights": weights}
        path = interp.report(model, self.out, tokens=tokens.to(self.device), **options)
        counted = source if run is None else f"training shards of {run}"
        self.say(f"report: {path}, tokens weighted by their counts in {counted}")
        return {"model": self.model, "text": source, "counted_in": counted, "page": str(path)}


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Train two nano models, compare them, read one from its weights, and write a page about it: minutes on a CPU.

    Finished runs are kept: the same command continues an interrupted demo.

    $ tnlm demo
    $ tnlm demo --out demo --steps 60
    """

    out: Path = Path("demo")
    """Folder of the runs and of the page."""
    steps: int | None = None
    """Updates per model; the nano preset's 250 when left out."""

    def execute(self) -> dict[str, Any]:
        from tnlm.app import demo

        return demo.run(self.out, steps=self.steps, say=self.say)


COMMANDS: dict[str, Any] = {
    "info": Info,
    "verify": Verify,
    "eval": Eval,
    "generate": Generate,
    "convert": Convert,
    "explain": Explain,
    "report": Report,
    "demo": Demo,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded("tnlm", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    if print_version("tnlm", argv):
        return ExitCode.DONE
    command: Command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="tnlm",
        description="Tensor-network language models, opened. --version [--json] tells what is installed.",
        args=argv,
    )
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        record = command.execute()
    print_record(record if command.json else None)
    return ExitCode.DONE if record.get("passed", True) else ExitCode.FAILED


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Print the text of a warning, without the line of code that raised it."""
    print(f"tnlm: warning: {message}", file=sys.stderr)


def _registered(name: str) -> str:
    """The short name of a released model, given any of its names."""
    from tnlm.checkpoints import released

    entry = released.find_released(name)
    if entry is None:
        raise ValueError(f"{name!r} is no released model; those are {', '.join(released.RELEASED)}")
    return entry.name


def _count_dtypes(tensors: "dict[str, Tensor]") -> dict[str, int]:
    """Number of parameters stored in each dtype."""
    counts: dict[str, int] = {}
    for tensor in tensors.values():
        name = str(tensor.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + tensor.numel()
    return counts


if __name__ == "__main__":
    sys.exit(main())
