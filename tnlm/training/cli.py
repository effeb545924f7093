"""Command ``tnlm-train``: run, branch, compare, export, data.

Progress goes to stderr, the last line of stdout is one JSON record, rank 0's under torchrun. Exit codes:

- 0: done
- 1: an unexpected error (a traceback), or damaged shards in ``data check``
- 2: a wrong flag, configuration, file or launch, or another process in the run folder; the message says what to change
- 3: training diverged: a loss or gradient was not finite
- 4: the disk refused a write (full, read-only); older checkpoints are untouched
- 129: SIGHUP, as SIGINT (a lost terminal; ``nohup`` keeps the run going)
- 130: SIGINT; in training a complete checkpoint was saved, and the same command resumes
- 141: whoever read the output has left (``| head``)
- 143: SIGTERM, as SIGINT; under torchrun the launcher's exit code is 1 in every case but 0
"""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro

from tnlm.output.command import guarded, print_record, print_version
from tnlm.training import commands
from tnlm.training.run.outcomes import Diverged, Interrupted

OK, FAILED, USAGE, DIVERGED, DISK = 0, 1, 2, 3, 4

Command = (
    Annotated[commands.Run, tyro.conf.subcommand("run")]
    | Annotated[commands.Branch, tyro.conf.subcommand("branch")]
    | Annotated[commands.Compare, tyro.conf.subcommand("compare")]
    | Annotated[commands.Export, tyro.conf.subcommand("export")]
    | commands.Data
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded("tnlm-train", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    if print_version("tnlm-train", argv):
        return OK
    try:
        command: Any = tyro.cli(
            Command,
            prog="tnlm-train",
            description="Train and compare tensor-network language models. --version [--json] tells what is installed.",
            args=argv,
        )
    except SystemExit as stop:
        print_record()
        return stop.code if isinstance(stop.code, int) else USAGE
    return _execute(command.execute, usage=FAILED if isinstance(command, commands.DataCheck) else USAGE)


def _execute(execute: Callable[[], dict[str, Any] | None], *, usage: int) -> int:
    try:
        print_record(execute())
    except BrokenPipeError:
        raise
    except ValueError as error:
        return _fail(str(error), usage)
    except Diverged as error:
        return _fail(str(error), DIVERGED)
    except Interrupted as error:
        return _fail(str(error), 128 + error.number)
    except OSError as error:
        return _fail(str(error), DISK)
    return OK


def _fail(message: str, code: int) -> int:
    print(f"tnlm-train: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
