"""Base of the commands of ``tnlm`` and ``tnlm-train``: flags, model loading, tables, exit. Imports no torch."""

import json as jsonlib
import os
import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import tyro

import tnlm
from tnlm.output.exit_codes import ExitCode, exit_code_of

if TYPE_CHECKING:
    from tnlm.transformer import Transformer


def guarded(program: str, run: Callable[[], int], *, os_error: ExitCode = ExitCode.USAGE) -> int:
    """Run a program and return its exit code; an expected error becomes one line on stderr.

    Args:
        os_error: As for :func:`tnlm.output.exit_codes.exit_code_of`.
    """
    try:
        try:
            return run()
        except SystemExit as stop:  # tyro has printed the help, or named a wrong flag
            print_record()
            return stop.code if isinstance(stop.code, int) else ExitCode.USAGE
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code_of(error, os_error=os_error)
        if code is None:
            raise
        if code == ExitCode.UNREAD:
            # Python flushes both streams once more at exit, and would report the closed pipe there
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in filter(None, (sys.stdout, sys.stderr)):
                os.dup2(nowhere, stream.fileno())
        else:
            message = "interrupted" if isinstance(error, KeyboardInterrupt) else error
            print(f"{program}: {message}", file=sys.stderr)
        return code


REPORTED = (
    "torch triton numpy scipy transformer-lens transformers tokenizers tiktoken safetensors huggingface-hub einops "
    "opt-einsum jaxtyping plotly tyro"
).split()
"""Packages whose versions ``--version --json`` lists."""


def versions() -> dict[str, Any]:
    """Versions of this package, Python, the system and :data:`REPORTED`, for bug reports; None for a missing package.

    No package is imported to find its version.
    """
    packages: dict[str, str | None] = {}
    for name in REPORTED:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "tnlm": tnlm.__version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "packages": packages,
    }


def print_version(program: str, argv: Sequence[str] | None) -> bool:
    """If the arguments are ``--version``, print it (a JSON record with ``--json``) and return True; else False."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--version" not in arguments or not {*arguments} <= {"--version", "--json"}:
        return False
    if "--json" not in arguments:
        print(f"{program} {tnlm.__version__}")
    print_record(versions() if "--json" in arguments else None)
    return True


def print_record(record: dict[str, Any] | None = None) -> None:
    """Print a record as one line of JSON, and flush stdout, so that an error of writing it is raised here."""
    if record is not None:
        print(jsonlib.dumps(record))
    if sys.stdout is not None:
        sys.stdout.flush()


def without_none(made: type) -> type:
    """Class decorator, below ``@dataclass``, that leaves ``None`` out of the help of optional flags."""
    for name, kind in made.__annotations__.items():
        bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        others = [option for option in get_args(bare) if option is not NoneType]
        if len(others) < len(get_args(bare)):
            choices = [str(value) for option in others for value in get_args(option)]
            metavar = f"{{{','.join(choices)}}}" if choices else "|".join(option.__name__.upper() for option in others)
            hint = tyro.conf.arg(metavar=metavar, help_behavior_hint="")
            made.__annotations__[name] = Annotated[bare, hint, *getattr(kind, "__metadata__", ())]
    return made


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """Base of all commands: a dataclass whose fields are flags, run by :meth:`execute`."""

    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON record instead of tables."""

    def __init_subclass__(cls) -> None:
        without_none(cls)

    @abstractmethod
    def execute(self) -> dict[str, Any] | None:
        """Run the command; returns its JSON record."""

    def show(self, title: str, rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> None:
        """Print a table, unless ``--json`` is given."""
        if self.json:
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", show_header=bool(header))
        for name in header or ("",) * len(rows[0]):
            table.add_column(name, overflow="fold")  # a hash too long for its column is not cut
        for row in rows:
            table.add_row(*(_cell(value) for value in row))
        console = Console(markup=False, emoji=False, highlight=False)
        with console.capture() as text:  # printed below, because rich ends the process when stdout is closed
            console.print(table)
        print(text.get(), end="")

    def say(self, text: str, *, on_stderr: bool = False) -> None:
        """Print a line of text, unless ``--json`` is given."""
        if not self.json:
            print(text, file=sys.stderr if on_stderr else sys.stdout)


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Command):
    """A command about one model."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder, weight file or run folder; short name of a released model; or Hub id."""
    revision: str | None = None
    """Commit, branch or tag of a Hub id; the recorded commit of a released model, else main, when left out."""
    attention: Literal["squared", "squared_normalized"] | None = None
    """Which of the two a file holds; needed only where it does not say, and by default what it says."""
    override: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE", help_behavior_hint="")
    ] = ()
    """What the file's config does not say, such as n_head=1; repeat it for more. Values are JSON, else text."""

    @property
    def overrides(self) -> dict[str, Any]:
        """:attr:`override` as the mapping that :func:`tnlm.load` takes."""
        said = {}
        for text in self.override:
            key, equals, value = text.partition("=")
            if not key or not equals:
                raise ValueError(f"--override takes KEY=VALUE, such as n_head=1, got {text!r}")
            said[key] = _json_or_text(value)
        return said


@dataclass(frozen=True, kw_only=True)
class TextCommand(ModelCommand):
    """A command that runs a model on text."""

    tokenizer: str | None = None
    """gpt2, bytes, or a path; by default the one saved with the model, else by the size of its vocabulary."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    dtype: Literal["float32", "bfloat16", "float64", "checkpoint"] = "float32"
    """Of weights and activations; checkpoint keeps the stored mixture of bf16 and float32."""

    def load(self) -> "Transformer":
        """Load the model, in the dtype and on the device of the flags."""
        return load_model(self, dtype=self.dtype, device=self.device)


def load_model(command: ModelCommand, *, dtype: str, device: str = "cpu") -> "Transformer":
    """Load the model of a command; prints a line on stderr if it takes long."""
    from tnlm.checkpoints.checkpoint import load
    from tnlm.output.progress import announce

    if device.startswith("meta"):
        raise ValueError(f"--device must be one that holds values, such as cpu or cuda, got {device}")
    with announce(f"loading {command.model}"):
        return load(
            command.model,
            revision=command.revision,
            device=device,
            dtype=dtype,
            attention=command.attention,
            overrides=command.overrides,
        )


def _json_or_text(value: str) -> Any:
    try:
        return jsonlib.loads(value)
    except ValueError:
        return value


def _cell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
