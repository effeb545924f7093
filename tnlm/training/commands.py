"""The commands of ``tnlm-train`` as dataclasses: their fields are flags, ``execute`` returns the JSON record.

Under torchrun every rank runs the command; rank 0 returns the record, the others None.
"""

import dataclasses
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tnlm.config import ModelConfig
from tnlm.output.command import Command
from tnlm.output.exit_codes import CheckFailed
from tnlm.output.progress import announce
from tnlm.training.config import OPERATIONAL, TrainConfig, read_json
from tnlm.training.flags import flags_of
from tnlm.training.presets import PRESETS, preset
from tnlm.training.run.distributed import World

Off = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True, kw_only=True)
class TrainCommand(Command):
    """Base of the commands of ``tnlm-train``, whose record is the last line of stdout in any case."""

    json: Off = False
    """Leave out tables and estimates for people; one JSON record is the last line of stdout in any case."""


@dataclass(frozen=True, kw_only=True)
class Run(TrainCommand):
    """Train a model, or resume: the same command continues a stopped run.

    Without flags: the nano preset, offline, on a CPU, in about two minutes. Under torchrun every rank runs this.

    $ tnlm-train run
    $ tnlm-train run --mlp swiglu --attention softmax --seed 1
    $ tnlm-train run --preset tiny --model.d-model 128 --steps 200 --dry-run
    $ torchrun --standalone --nproc_per_node=8 -m tnlm.training.cli run --preset medium --data fineweb10B
    """

    preset: Annotated[
        str, tyro.conf.arg(help=f"Source of all defaults; --help shows its values. One of {', '.join(PRESETS)}.")
    ] = "nano"
    config: Path | None = None
    """A JSON file with any fields of TrainConfig (and model); flags override it. None is read when left out."""
    matched: Off = False
    """d_qk = d_head / 2: bilinear attention with the parameters and FLOPs of softmax."""
    dry_run: Off = False
    """Print parameters, FLOPs, memory, epochs, disk and time, and stop. With automatic precision and device, a model
    of more than 10 million parameters is taken to train in half precision (on a GPU), a smaller one in float32."""
    training: dict[str, Any] = field(default_factory=dict)
    """Fields of TrainConfig; what is left out is the config file's, or else the preset's."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig. What is left out is the config file's or the preset's; then d_hidden keeps its ratio to
    d_model, and d_qk and d_vocab_used follow the sizes that they depend on."""

    def resolve(self) -> TrainConfig:
        """The configuration to train: the preset, then the config file, then the flags."""
        values = read_json(self.config) if self.config is not None else {}
        name = self.preset if self.config is None or self.preset != "nano" else values.get("preset", self.preset)
        config = preset(name).updated(values, source=str(self.config)) if values else preset(name)
        config = config.with_model(**self.model) if self.model else config
        config = config.matched() if self.matched else config
        changes = dict(self.training)
        if "batch" in changes and "micro_batch" not in changes:
            changes["micro_batch"] = min(config.micro_batch, changes["batch"])
        if changes.get("recipe") == "replication-exact" and not {"shuffle"} & {*values, *changes}:
            changes["shuffle"] = False  # small presets shuffle; the published order does not
        return config.replace(**changes)

    def execute(self) -> dict[str, Any] | None:
        """Train, or estimate what training would cost."""
        config = self.resolve()
        if self.dry_run:
            from tnlm.training.run.cost import estimate, to_text

            if not World.from_environment().main:
                return None
            with announce("counting the tokens of the data"):
                facts = estimate(config)
            self.say(to_text(config, facts), on_stderr=True)
            return facts
        return _train(config, command="run")


def run_command(shown: TrainConfig) -> Any:
    """The command ``run`` for tyro, with a flag for each field; the help shows the values of ``shown`` as defaults."""
    own = {name: value for name, value in vars(shown).items() if name not in ("preset", "model")}
    aliases = {"mlp": ["--mlp"], "attention": ["--attention"]}
    return dataclasses.make_dataclass(
        "Run",
        [
            ("training", Annotated[flags_of(TrainConfig, own), tyro.conf.OmitArgPrefixes], field(default_factory=dict)),
            ("model", flags_of(ModelConfig, vars(shown.model), aliases=aliases), field(default_factory=dict)),
        ],
        bases=(Run,),
        namespace={"__doc__": Run.__doc__},
        frozen=True,
        kw_only=True,
    )


_CHANGED_BY_A_BRANCH = [
    f.name for f in dataclasses.fields(TrainConfig) if f.name == "warmdown" or f.name in OPERATIONAL - {"preset", "out"}
]
BranchFlags: Any = flags_of(TrainConfig, dict.fromkeys(_CHANGED_BY_A_BRANCH, "the trunk's"))


@dataclass(frozen=True, kw_only=True)
class Branch(TrainCommand):
    """Continue a checkpoint from another run's constant-rate phase under a schedule of its own.

    $ tnlm-train branch runs/nano-bilinear-bilinear-s0 --steps 200
    """

    trunk: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder. Every run keeps its last checkpoint before the warm-down, which serves longer horizons."""
    steps: int
    """Horizon of the new schedule, counted from the beginning of the trunk."""
    at: int | None = None
    """Step of the checkpoint; by default the last before either warm-down begins."""
    out: str | None = None
    """Run folder; {trunk}-steps{steps} when left out."""
    training: tyro.conf.OmitArgPrefixes[BranchFlags] = field(default_factory=dict)
    """Fields of TrainConfig; what is left out is the trunk's."""

    def execute(self) -> dict[str, Any] | None:
        from tnlm.training.run.branch import branch_config

        config = branch_config(
            self.trunk, steps=self.steps, at=self.at, warmdown=self.training.get("warmdown"), out=self.out
        )
        config = config.replace(**self.training)
        return _train(config, command="branch", branched_from=config.branched_from)


@dataclass(frozen=True, kw_only=True)
class Compare(TrainCommand):
    """How many percent more batches does the variant need? Several runs, seeds and horizons may make an arm.

    $ tnlm-train compare --base runs/base-s0 runs/base-s1 --variant runs/variant-s0 runs/variant-s1 --out comparison
    $ tnlm-train compare --curves curves.csv --base short:0-3 long:0-9 --variant short:4-7 long:10-19
    """

    base: list[str]
    """Run folders of the baseline; with --curves, GROUP or GROUP:RUNS."""
    variant: list[str]
    """Run folders of the variant, likewise."""
    curves: Path | None = None
    """A CSV of curves recorded elsewhere, columns group, run, schedule_steps, step, val_loss; runs are
    read when left out."""
    metric: Literal["loss", "bits_per_byte"] = "loss"
    """Validation loss in nats per token, or bits per byte, which compares across tokenizers."""
    at: float | None = None
    """N0 of the matched-schedule reading, in steps; chosen by rule when left out."""
    sigma: float | None = None
    """Known standard deviation of a final loss, for arms of fewer than three seeds; estimated when left out."""
    margin: float | None = None
    """Also test that the variant is not worse by more than this; no such test when left out."""
    warmdown: float | None = None
    """Warm-down fraction of recorded curves, for the stable-phase reading; there is none when left out."""
    extrapolate: Off = False
    """Continue the variant's horizons where they do not bracket the answer; marked in the status."""
    out: Path | None = None
    """Folder for compare.json and compare.html; no files when left out."""
    png: Off = False
    """Also compare.png, which needs kaleido."""

    def execute(self) -> dict[str, Any]:
        from tnlm.training.compare import report
        from tnlm.training.compare.arms import Options, compare_arms
        from tnlm.training.compare.runs import load_curves, load_run

        flags = {f.name for f in dataclasses.fields(self)}
        shared = [f.name for f in dataclasses.fields(Options) if f.name in flags]
        options = Options(**{name: getattr(self, name) for name in shared})
        if self.curves is not None:
            base, variant = (load_curves(self.curves, specs) for specs in (self.base, self.variant))
        else:
            base, variant = ([load_run(f, metric=self.metric) for f in part] for part in (self.base, self.variant))
        with announce("comparing"):
            result = compare_arms(base, variant, options)
        self.say(report.to_text(result), on_stderr=True)
        file = None
        if self.out is not None:
            from tnlm.training.compare import plot

            file = str(report.write(result, self.out))
            plot.write_comparison_page(result, self.out / "compare.html")
            if self.png:
                with announce("drawing compare.png"):
                    plot.write_png(plot.comparison(result), self.out / "compare.png")
        return {"command": "compare", **report.to_record(result), "file": file}


@dataclass(frozen=True, kw_only=True)
class Export(TrainCommand):
    """Write a checkpoint as model.safetensors, config.json and a card: what tnlm.load reads.

    $ tnlm-train export runs/nano-bilinear-bilinear-s0 --out exported
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    out: Path
    """Folder to write."""
    step: int | None = None
    """The newest complete checkpoint when left out."""

    def execute(self) -> dict[str, Any]:
        from tnlm.training.run.export import export_run

        with announce(f"exporting {self.run}"):
            return {"command": "export", **export_run(self.run, self.out, step=self.step)}


@dataclass(frozen=True, kw_only=True)
class DataGet(TrainCommand):
    """Download published token shards; resumable, verified, atomic.

    $ tnlm-train data get fineweb10B --shards 52
    """

    name: tyro.conf.Positional[Literal["fineweb10B"]] = "fineweb10B"
    """The published GPT-2 tokens of FineWeb."""
    shards: int = 52
    """Training shards of 100M tokens; 52 for 9,726 steps."""
    out: Path | None = None
    """By default where --data fineweb10B looks."""

    def execute(self) -> dict[str, Any]:
        from tnlm.training.data.corpus import cache_folder
        from tnlm.training.data.download import get_fineweb

        folder = self.out or cache_folder() / self.name
        return {"command": "data get", **get_fineweb(folder, self.shards, progress=_count_files)}


@dataclass(frozen=True, kw_only=True)
class DataTokenize(TrainCommand):
    """Tokenize text (.jsonl, .parquet, .txt, or - for standard input) into shards.

    $ tnlm-train data tokenize pages.jsonl --out data/pages
    $ tnlm-train data tokenize book.txt --out data/book --tokenizer bpe1024
    """

    sources: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE...", help_behavior_hint="")]
    """Files, or - for standard input."""
    out: Path
    """Folder of the shards."""
    tokenizer: str = "gpt2"
    """gpt2, bytes, bpeN to train a vocabulary of N on the sources, or a path."""
    field: str = "text"
    """Key of a jsonl object, or column of a parquet file."""
    separator: str | None = None
    """Splits a .txt file into documents; it is one document when left out."""
    shard_tokens: int = 100_000_000
    """Tokens of a training shard."""
    val_tokens: int = 1_000_000
    """Tokens of the validation shard, taken from the first documents."""
    processes: int = os.cpu_count() or 1
    """Processes that tokenize."""

    def execute(self) -> dict[str, Any]:
        from tnlm.text import tokenizer as tokenizers
        from tnlm.training.data.tokenize import read_documents, tokenize_files

        if not self.sources:
            raise ValueError("data tokenize needs at least one source, got none: name files, or - for standard input")
        size = self.tokenizer.removeprefix("bpe")
        if self.tokenizer.startswith("bpe") and size.isdecimal():
            if "-" in self.sources:
                raise ValueError("a vocabulary is trained in a first pass over the sources, so they cannot be -")
            documents = (
                text for s in self.sources for text in read_documents(s, field=self.field, separator=self.separator)
            )
            with announce(f"training a vocabulary of {size}"):
                tokenizer = tokenizers.train_bpe(documents, int(size))
        else:
            tokenizer = tokenizers.get(self.tokenizer)
        facts = tokenize_files(
            self.sources,
            self.out,
            tokenizer,
            field=self.field,
            separator=self.separator,
            shard_tokens=self.shard_tokens,
            val_tokens=self.val_tokens,
            processes=self.processes,
            progress=lambda documents, tokens: print(f"{documents:,} documents, {tokens:,} tokens", file=sys.stderr),
        )
        return {"command": "data tokenize", "out": str(self.out), **facts}


@dataclass(frozen=True, kw_only=True)
class DataCheck(TrainCommand):
    """Read every shard of a folder or glob and report what is wrong; exit code 1 if anything is, 2 without any shard.

    $ tnlm-train data check data/pages
    """

    where: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder or glob of .bin shards."""
    d_vocab: int | None = None
    """Limit of the ids; by default that of dataset.json."""
    allow_truncated: Off = False
    """A shard that is shorter than its header says is no error."""

    def execute(self) -> dict[str, Any]:
        from tnlm.training.data.shards import check_data, find_shards

        find_shards(self.where)  # a place without shards is a wrong argument, not data that is wrong
        try:
            facts = check_data(
                self.where,
                d_vocab=self.d_vocab,
                allow_truncated=self.allow_truncated,
                progress=lambda r: print(f"{r.path}: {r.tokens:,} tokens, largest id {r.max_id}", file=sys.stderr),
            )
        except ValueError as error:
            raise CheckFailed(str(error)) from error
        return {"command": "data check", **facts}


@dataclass(frozen=True, kw_only=True)
class DataToy(TrainCommand):
    """Write the smallest language whose mechanism is known: sequences that tile a random cycle of distinct tokens.

    $ tnlm-train data toy cycles --out data/cycles --seq 40 --d-vocab 32 --period 3 9
    """

    task: tyro.conf.Positional[Literal["cycles"]]
    """The language."""
    out: Path
    """Folder of the shards."""
    seq: int = 32
    """Tokens of a sequence."""
    d_vocab: int = 64
    """Number of ids."""
    period: tuple[int, int] = (4, 12)
    """Shortest and longest cycle."""
    train_sequences: int = 100_000
    """Sequences to train on."""
    val_sequences: int = 1_000
    """Sequences of the validation shard."""
    seed: int = 0
    """Seed of the cycles."""

    def execute(self) -> dict[str, Any]:
        from tnlm.training.data.toy import write_cycles

        with announce(f"writing {self.out}"):
            facts = write_cycles(
                self.out,
                seq=self.seq,
                d_vocab=self.d_vocab,
                period=self.period,
                train_sequences=self.train_sequences,
                val_sequences=self.val_sequences,
                seed=self.seed,
            )
        return {"command": "data toy", "out": str(self.out), **facts}


def _train(config: TrainConfig, **what: Any) -> dict[str, Any] | None:
    """Train on every rank; returns the record on rank 0, after all files are written, and None elsewhere."""
    from tnlm.training.run.loop import train

    result = train(config)
    return {**what, **result.to_dict()} if World.from_environment().main else None


def _count_files(name: str, done: int, total: int) -> None:
    print(f"{done}/{total} {name}", file=sys.stderr)


Data = Annotated[
    Annotated[DataGet, tyro.conf.subcommand("get")]
    | Annotated[DataTokenize, tyro.conf.subcommand("tokenize")]
    | Annotated[DataCheck, tyro.conf.subcommand("check")]
    | Annotated[DataToy, tyro.conf.subcommand("toy")],
    tyro.conf.subcommand("data", description="Fetch, make and check token shards."),
]
