"""Exit codes: one map for all commands, as docs/cli.md and docs/training.md have it."""

import errno
import json

import pytest

from tnlm.output.command import guarded
from tnlm.output.exit_codes import CheckFailed, ExitCode
from tnlm.training.run.outcomes import Diverged, Interrupted, SaveError

NO_JSON = json.JSONDecodeError("no JSON", "{", 0)


@pytest.mark.parametrize(
    "error, reading, writing",
    [
        (ValueError("x"), 2, 2),
        (NO_JSON, 2, 2),
        (CheckFailed("x"), 1, 1),
        (Diverged("x"), 3, 3),
        (Interrupted("x", 15), 143, 143),
        (FileNotFoundError(errno.ENOENT, "x"), 2, 4),
        (IsADirectoryError(errno.EISDIR, "x"), 2, 2),
        (NotADirectoryError(errno.ENOTDIR, "x"), 2, 2),
        (FileExistsError(errno.EEXIST, "x"), 2, 2),
        (SaveError("x"), 2, 4),
        (SystemExit(5), 5, 5),
        (SystemExit("x"), 2, 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_each_error_has_its_exit_code_and_message(error, reading, writing, capsys):
    def fail():
        raise error

    assert guarded("reader", fail) == reading
    assert guarded("writer", fail, os_error=ExitCode.DISK) == writing
    expected = "" if isinstance(error, SystemExit) else f"reader: {error}\nwriter: {error}\n"
    assert capsys.readouterr() == ("", expected)


def test_what_is_not_expected_keeps_its_traceback():
    def fail():
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError, match="a mistake of ours"):
        guarded("program", fail)


def test_a_program_that_ends_returns_its_own_code():
    assert [guarded("program", lambda code=code: code) for code in (0, 1)] == [0, 1]
