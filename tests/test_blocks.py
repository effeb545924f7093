"""Every Python block of README and docs runs alone: a process and a folder of its own, no seed; most of them often.

Shell lines are parsed by ``tests/app/test_cli.py`` and ``tests/training/test_guides.py``.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SESSIONS = {
    "checkpoints.md": "names models of the Hub",
    "copying.md": "trains first: tests/interp/tokens/test_study_copying.py runs it as one session",
    "first-steps.md": "trains first: tests/test_first_steps.py runs it as one session",
}
REPEAT = """
import sys
for _ in range(int(sys.argv[2])):
    exec(compile(sys.argv[1], "block", "exec"), {"__name__": "__main__"})
"""


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.S | re.M)


ALONE = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in sorted((ROOT / "docs").glob("*.md"))
    if page.name not in SESSIONS
    for number, block in enumerate(blocks(page), start=1)
]


def assert_runs(block: str, times: int, folder: Path) -> None:
    (folder / "tests").symlink_to(ROOT / "tests")  # a reader is in a clone
    command = [sys.executable, "-W", "ignore", "-c", REPEAT, block, str(times)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_quickstart_runs_alone(tmp_path):
    (block,) = blocks(ROOT / "README.md")
    assert_runs(block, 1, tmp_path)


@pytest.mark.slow
def test_the_quickstart_holds_for_every_seed(tmp_path):
    (block,) = blocks(ROOT / "README.md")
    assert_runs(block, 300, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("block", ALONE)
def test_a_block_runs_alone_twenty_times(block, tmp_path):
    assert_runs(block, 20, tmp_path)


def test_sessions_are_pages_with_blocks():
    assert all(blocks(ROOT / "docs" / name) for name in SESSIONS)
    assert len(ALONE) >= 6
