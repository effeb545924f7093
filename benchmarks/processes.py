"""Measurements in processes of their own, and the memory of a process. Needs the standard library alone."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_again(script: str, *arguments: str) -> str:
    """What a Python script prints in a new process, of one thread unless OMP_NUM_THREADS says otherwise.

    Its peak memory is its own too, and what it reports on stderr is seen.
    """
    return subprocess.run(
        [sys.executable, script, *arguments],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def memory(field: str) -> int:
    """Bytes of memory of this process under a name in ``/proc/self/status``: ``VmRSS``, ``VmHWM``, ``RssAnon``.

    Raises:
        RuntimeError: The system has no such figure.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else []:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{field} is missing from {status}; this benchmark needs Linux")
