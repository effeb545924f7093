"""The command line ``tnlm-train``: run, branch, compare, export, data.

Progress goes to stderr, the last line of stdout is one JSON record, rank 0's under torchrun. Exit codes:

- 0: done
- 1: an unexpected error (a traceback), or damaged shards in ``data check``
- 2: a wrong flag, configuration, file or launch, or another process in the run folder; the message says what to change
- 3: training diverged: a loss or gradient was not finite
- 4: the disk refused a write (full, read-only); older checkpoints are untouched
- 129: SIGHUP, as SIGINT (a lost terminal; ``nohup`` keeps the run going)
- 130: SIGINT; in training a complete checkpoint was saved, and the same command resumes
- 141: the reader of the output has left (``| head``)
- 143: SIGTERM, as SIGINT; under torchrun the launcher's exit code is 1 in every case but 0
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from tnlm.output.command import guarded, print_record, print_version
from tnlm.output.exit_codes import ExitCode
from tnlm.training import commands
from tnlm.training.config import TrainConfig
from tnlm.training.presets import PRESETS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded("tnlm-train", lambda: _run(argv), os_error=ExitCode.DISK)


def _run(argv: Sequence[str] | None) -> int:
    if print_version("tnlm-train", argv):
        return ExitCode.DONE
    command: Any = tyro.cli(
        _commands(_named_preset(argv)),
        prog="tnlm-train",
        description="Train and compare tensor-network language models. --version [--json] tells what is installed.",
        args=argv,
    )
    print_record(command.execute())
    return ExitCode.DONE


def _commands(shown: TrainConfig) -> Any:
    """All commands as one type for tyro; ``shown`` has the default values in the help of ``run``."""
    return (
        Annotated[commands.run_command(shown), tyro.conf.subcommand("run")]
        | Annotated[commands.Branch, tyro.conf.subcommand("branch")]
        | Annotated[commands.Compare, tyro.conf.subcommand("compare")]
        | Annotated[commands.Export, tyro.conf.subcommand("export")]
        | commands.Data
    )


def _named_preset(argv: Sequence[str] | None) -> TrainConfig:
    """The preset that the arguments name, whose values the help shows; nano where they name none that exists."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    name = parser.parse_known_args(argv)[0].preset
    return PRESETS.get(name, PRESETS["nano"])()


if __name__ == "__main__":
    sys.exit(main())
