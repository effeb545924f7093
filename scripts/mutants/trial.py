"""Run pytest on a private copy of the tree, in a forked process that has the heavy libraries already."""

import contextlib
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "scipy", "plotly.graph_objects", "transformers", "pyarrow", "pytest", "tiktoken")
MEMORY = 12 * 2**30
"""Bytes that a test run may allocate: a mutated size must not take the machine down."""
TIMEOUT = 1000
"""Stands for the exit code of a run that was stopped; no process ends with it."""


def preload() -> None:
    """Import what every test process needs, so that its fork starts with it; never tnlm itself."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant of the same size and second would run from a stale file
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def copy_tree(to: Path) -> Path:
    """Tracked and new files of the repository in the folder ``to``, with the folder of shared data beside it."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, names.stdout.decode().split("\0")):
        source, target = ROOT / name, to / name
        if source.exists() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    shared, link = ROOT.parent / "shared", to.parent / "shared"
    if shared.is_dir() and not link.exists():
        link.symlink_to(shared)
    return to


def run_tests(
    tree: Path, tests: Sequence[str], *, timeout: float, plugins: Sequence[Any] = (), stop: bool = True
) -> int:
    """The exit code of pytest on ``tests`` in ``tree``, minus the signal that ended it, or ``TIMEOUT``.

    What the tests started is killed at the end.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            code = _in_child(tree, tests, plugins, stop)
        except BaseException:
            traceback.print_exc()
            code = 3  # pytest's own code of an internal error
        os._exit(code)
    deadline = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done or time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            if done:
                return os.waitstatus_to_exitcode(status)
            os.waitpid(child, 0)
            return TIMEOUT
        time.sleep(0.02)


def outcome(code: int) -> str:
    """What a run of :func:`run_tests` says about the change that was tried.

    Only tests that fail (1), a module that cannot be imported (2) and a process that is ended by a signal tell of the
    change. The other exit codes of pytest say that no test ran as it was asked to.
    """
    if code == TIMEOUT:
        return "timeout"
    if code == 0:
        return "survived"
    return "killed" if code in (1, 2) or code < 0 else "error"


def said(tree: Path) -> str:
    """What the last run in ``tree`` printed."""
    return _log(tree).read_text(errors="replace")


def _log(tree: Path) -> Path:
    return tree.with_suffix(".log")


def _in_child(tree: Path, tests: Sequence[str], plugins: Sequence[Any], stop: bool) -> int:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(_log(tree), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(tree)
    scratch = tree.parent / f"{tree.name}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    os.environ |= {"PYTHONPATH": str(tree), "TMPDIR": str(scratch)}
    sys.path[:] = [str(tree), *(p for p in sys.path if Path(p).resolve() != Path(__file__).parent)]
    import pytest

    # the options of pyproject.toml hold too; the order is that of the arguments, so that likely killers come first
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=line", "--basetemp", str(scratch / "pytest")]
    # a preloaded library may be a plugin of pytest, which warns that it was too late to rewrite its assertions
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options += ["--randomly-dont-reorganize", "--rootdir", str(tree), *(["-x"] if stop else [])]
    return int(pytest.main([*options, *tests], plugins=[*plugins]))
