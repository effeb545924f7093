"""Exit codes of the commands, and the one map from errors to them. Imports no torch and no command line parser."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of ``tnlm`` and ``tnlm-train``; docs/cli.md and docs/training.md explain them to users."""

    DONE = 0
    FAILED = 1
    """A check failed; Python also uses it after the traceback of an unexpected error."""
    USAGE = 2
    """A wrong argument, configuration or file."""
    DIVERGED = 3
    """A loss or gradient was not finite."""
    DISK = 4
    """The disk refused a write."""
    INTERRUPTED = 130
    """Ctrl-C: 128 + the number of SIGINT."""
    UNREAD = 141
    """The reader of stdout has left, as in ``| head``: 128 + the number of SIGPIPE."""


class CommandError(Exception):
    """Base of the errors that have an exit code of their own."""

    exit_code: int = ExitCode.FAILED


class CheckFailed(CommandError):
    """A command that checks something found it to be wrong."""


def exit_code_of(error: BaseException, *, os_error: ExitCode = ExitCode.USAGE) -> int | None:
    """The exit code after an error, or None for an unexpected one, which must show its traceback.

    Args:
        os_error: The code of an error of the file system: programs that mostly read files were given a wrong one,
            programs that mostly write were refused by the disk.
    """
    if isinstance(error, CommandError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return ExitCode.UNREAD
    if isinstance(error, ValueError | IsADirectoryError | NotADirectoryError | FileExistsError):
        return ExitCode.USAGE  # a folder where a file must be, or the reverse, is no fault of the disk
    if isinstance(error, OSError):
        return os_error
    return None
