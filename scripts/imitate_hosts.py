"""Run the numerically sensitive tests with the rounding of other hosts, one host after another: ``make test-hosts``.

Environment variables make the libraries leave out instructions that this CPU has, and sum in other orders. Each
comparison of ``tests/limits.py`` writes its error over its limit; the largest are printed, and any above 0.3 fails,
since a host that is not imitated here may round a few times worse. :data:`LEFT_OUT` names the tests that show nothing
new on another host.

python scripts/imitate_hosts.py [--quick] [--at-most 0.3] [PYTEST ARGUMENT ...]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")
"""What ``torch.backends.cpu.get_cpu_capability`` says, from narrow to wide, on x86-64."""
TWO_THREADS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}  # the workers share the cores: no spinning
LEFT_OUT = ["tests/app", "tests/interp/views", "tests/interp/test_symmetries.py", "tests/test_network.py"]
LEFT_OUT += ["tests/interp/test_study_nano.py", "tests/interp/tokens/test_study_copying.py"]
LEFT_OUT += ["tests/lens/test_hooked.py"]
"""Pages and commands print what other tests compare; symmetries are told from moves by a gap of three decades; the
equations of single networks are exact to a few roundings; what is said of trained models has wide margins; and hooks
compare one forward with the same forward."""
QUICK_TESTS = ["tests/interp/layers", "tests/interp/test_definitions.py", "tests/interp/test_extraction.py"]
QUICK_TESTS += ["tests/test_attention.py", "tests/checkpoints/test_checkpoint_layouts.py"]
QUICK_TESTS += [f"tests/training/{name}.py" for name in ("run/test_loop", "run/test_trajectories")]


@dataclass(frozen=True)
class Host:
    """One imitated host: its name, what the CPU must have, and the variables that imitate it."""

    name: str
    environment: dict[str, str]
    needs: str = "DEFAULT"
    x86: bool = True
    quick: bool = False

    def missing(self) -> str | None:
        """The reason why this machine cannot imitate the host; None if it can."""
        if not self.x86:
            return None
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return f"not on {platform.machine()}"
        if "MKL_CBWR" in self.environment and not torch.backends.mkl.is_available():
            return "torch is built without MKL"
        here = torch.backends.cpu.get_cpu_capability()
        if here not in CAPABILITIES or CAPABILITIES.index(here) < CAPABILITIES.index(self.needs):
            return f"the CPU has {here}, not {self.needs}"
        return None


HOSTS = [
    Host("this host", {}, x86=False),
    Host("two threads", TWO_THREADS, x86=False),
    Host("oldest instructions", {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}, quick=True),
    Host("MKL without AVX-512", {"MKL_CBWR": "AVX2"}, "AVX2"),
    Host("MKL with AVX-512 in one order", {"MKL_CBWR": "AVX512"}, "AVX512"),
    Host("ATen without AVX-512", {"ATEN_CPU_CAPABILITY": "avx2"}, "AVX2"),
    Host("oneDNN without AVX-512", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX2"),
    Host(
        "a CPU with AVX2, two threads",
        {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", **TWO_THREADS},
        "AVX2",
        quick=True,
    ),
]


def run(host: Host, arguments: list[str]) -> tuple[int, Counter[str]]:
    """The exit code of the marked tests on one host, and the largest error over limit of each test."""
    with tempfile.TemporaryDirectory() as folder:
        margins = Path(folder) / "margins.jsonl"
        margins.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "8", "--dist", "loadfile"]
        command += ["-m", "numeric and not slow and not gpu and not network"]
        command += [f"--ignore={path}" for path in LEFT_OUT] + arguments
        # the compiler's cache does not know the variables of a host: each gets its own
        own = {"TNLM_MARGINS": str(margins), "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor")}
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **host.environment, **own}
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        ratios: Counter[str] = Counter()
        for line in margins.read_text().splitlines():
            entry = json.loads(line)
            ratios[entry["test"]] = max(ratios[entry["test"]], entry["ratio"])
    return code, ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two hosts and the most sensitive files, for CI")
    parser.add_argument("--at-most", type=float, default=0.3, help="largest error over limit that passes")
    parser.add_argument("arguments", nargs="*", help="files or options of pytest")
    args = parser.parse_args()
    failed, worst = [], []
    for host in HOSTS:
        if args.quick and not host.quick:
            continue
        reason = host.missing()
        if reason:
            print(f"== {host.name}: skipped, {reason}", flush=True)
            continue
        print(f"== {host.name}: {host.environment}", flush=True)
        began = time.monotonic()
        code, ratios = run(host, args.arguments or (QUICK_TESTS if args.quick else ["tests"]))
        print(
            f"== {host.name}: exit {code}, {len(ratios)} tests compared, {time.monotonic() - began:.0f} s", flush=True
        )
        failed += [host.name] if code else []
        worst += [(ratio, test, host.name) for test, ratio in ratios.items()]
    print("== the tightest twenty, error over limit")
    for ratio, test, name in sorted(worst, reverse=True)[:20]:
        print(f"{ratio:8.3f}  {test}  ({name})")
    tight = [test for ratio, test, _ in worst if ratio > args.at_most]
    if tight:
        print(f"{len(set(tight))} tests come closer to their limit than {args.at_most}")
    if failed:
        print(f"tests failed on: {', '.join(failed)}")
    if not worst:
        print("no host was imitated: nothing was compared")
    return int(bool(tight or failed or not worst))


if __name__ == "__main__":
    sys.exit(main())
