"""Check a built wheel and sdist: their content, and that the wheel works in a fresh environment.

    python scripts/check_wheel.py dist [--tag v0.1.0]

The wheel goes into a fresh virtual environment outside of the checkout; there both commands tell their version and the
quickstart of the README runs. ``--tag`` must be the version, with a ``v`` before it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "tnlm.egg-info", "tnlm"}


def strangers(wheel: Path, sdist: Path) -> list[str]:
    """Entries at the top of the two archives that should not be there."""
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    found = [f"{wheel.name}: {top}" for top in sorted(tops) if top != "tnlm" and not top.endswith(".dist-info")]
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    return found + [f"{sdist.name}: {top}" for top in sorted(tops - BESIDE)]


def version_installed(wheel: Path) -> str:
    """Version that the wheel reports in a fresh environment, where the quickstart has run too."""
    (quickstart,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(f"{folder}/venv", with_pip=True)
        scripts = Path(folder, "venv", "Scripts" if os.name == "nt" else "bin")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

        def run(*command: str | Path) -> str:
            done = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            return done.stdout

        run(scripts / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel.resolve())
        run(scripts / "python", "-c", quickstart)
        told = {json.loads(run(scripts / name, "--version", "--json"))["tnlm"] for name in ("tnlm", "tnlm-train")}
        (version,) = told
        return version


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path, help="folder with one wheel and one sdist")
    parser.add_argument("--tag", help="tag of the release")
    args = parser.parse_args()
    (wheel,), (sdist,) = args.dist.glob("*.whl"), args.dist.glob("*.tar.gz")
    if found := strangers(wheel, sdist):
        sys.exit(f"these must not be shipped: {', '.join(found)}")
    version = version_installed(wheel)
    if args.tag and args.tag != f"v{version}":
        sys.exit(f"the tag must be v{version}, the version of {wheel.name}, got {args.tag}")
    print(f"{wheel.name} and {sdist.name}: installed, tried, version {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
