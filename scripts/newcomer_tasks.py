"""Run the code blocks of ``docs/first-steps.md`` one after another in a fresh folder, as a newcomer would.

python scripts/newcomer_tasks.py [--steps 10] [--only 3 4] [--keep FOLDER]
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "first-steps.md"


def tasks() -> list[tuple[str, list[tuple[str, str]]]]:
    """Title and code blocks ``(language, text)`` of every task of the page."""
    parts = re.split(r"^## (\d+\. .+)$", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    blocks = [re.findall(r"```(bash|python)\n(.*?)```", text, flags=re.S) for text in parts[1::2]]
    return list(zip(parts[::2], blocks, strict=True))


def shortened(text: str, steps: int) -> str:
    """The block with every ``--steps`` set to ``steps``."""
    return re.sub(r"--steps \d+", f"--steps {steps}", text)


def perform(language: str, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The finished process of one block, run unchanged with the commands of this environment."""
    command = ["bash", "-euc", text] if language == "bash" else [sys.executable, "-c", text]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="updates of each training run (default: what the page says)")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of tasks; those that they build on must be kept")
    parser.add_argument("--keep", type=Path, help="folder to work in, kept afterwards")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "tests").exists():
            (folder / "tests").symlink_to(ROOT / "tests")
        for title, blocks in tasks():
            if args.only and int(title.split(".")[0]) not in args.only:
                continue
            began = time.monotonic()
            for language, text in blocks:
                done = perform(language, text if args.steps is None else shortened(text, args.steps), folder)
                if done.returncode:
                    print(f"FAILED {title}\n{text}\n{done.stdout}\n{done.stderr}")
                    return 1
            print(f"ok     {title} ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
