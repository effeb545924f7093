"""Change the package in small ways, one at a time, and report the changes that no test notices.

    python scripts/mutants [--sample 60] [--seed 0] [--paths 'tnlm/interp/*'] [--read] [--tests 'tests/interp/*']

Each mutant is tried in a private copy of the tree by the tests that run the changed lines, until the first fails. A
survivor is a question, not an error: either a test is missing, or the change cannot be seen (name the reason where you
list it). The exit code is therefore 0 whenever the run got to its end.

Why not a library: mutmut 3 does not change code outside of functions nor inside dataclasses, and changes strings;
cosmic-ray runs one command for all mutants, so the whole suite for each. Neither exchanges arguments or names.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import count
from multiprocessing import get_context
from pathlib import Path

from mutations import Mutation, mutations
from testmap import TestMap, entry, measure, test_files, within
from trial import ROOT, copy_tree, outcome, preload, run_tests

READ = (
    "tnlm/interp/views/*", "tnlm/training/compare/report.py", "tnlm/training/compare/plot.py", "tnlm/output/*",
    "tnlm/interp/tokens/tables.py", "tnlm/interp/discovery/edge_table.py", "tnlm/checkpoints/card.py",
    "tnlm/training/run/cost.py", "tnlm/training/run/metrics.py",
)  # fmt: skip
"""What a person reads: figures, reports, pages, tables, records."""
NOT_HERE = ("tnlm/kernels/triton_*",)
"""Runs on a GPU or under the interpreter of Triton, which has planted faults of its own (tests/kernels/interpreter)."""
STARTING_SECONDS = 90
SLOWER = 8
"""A run is stopped after this many times the seconds that its tests took before: the machine may be busy."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One mutant: ``killed``, ``timeout`` (counts as killed), ``survived``, ``not run`` by any test, or ``error``.

    An error says that pytest could not run the tests: it tells nothing about the mutant, and counts neither way.
    """

    place: str
    kind: str
    before: str
    after: str
    outcome: str
    tests: int
    seconds: float


_tree: Path
"""The copy of the tree that this worker process owns."""


def _own_a_copy(folder: Path) -> None:
    global _tree
    for i in count():
        _tree = folder / f"{i}" / "tree"
        try:
            _tree.mkdir(parents=True)
        except FileExistsError:
            continue
        copy_tree(_tree)
        return


def _measure(test_file: str) -> str:
    measure(_tree, test_file)
    return test_file


def _try(
    mutation: Mutation, near: list[tuple[str, float]], far: list[tuple[str, float]], budget: float, control: bool
) -> Outcome:
    """Try the tests that run the line, then the others of their files, within ``budget`` seconds of tests."""
    file = _tree / mutation.path
    source = file.read_text()
    before, after = mutation.shown(source)
    started, tried, found = time.monotonic(), 0, "survived" if near else "not run"
    file.write_text(source if control else mutation.apply(source))
    try:
        for tests in (list(within(near, budget)), list(within(far, budget))):
            if not tests or found not in ("survived", "not run"):
                continue
            names, timeout = [name for name, _ in tests], STARTING_SECONDS + SLOWER * sum(s for _, s in tests)
            code = run_tests(_tree, names, timeout=timeout)
            if code == 4:  # a parameter has another name now: try the files
                code = run_tests(_tree, sorted({n.partition("::")[0] for n in names}), timeout=timeout)
            tried += len(tests)
            found = outcome(code)
    finally:
        file.write_text(source)
    return Outcome(
        place=f"{mutation.path}:{mutation.line}",
        kind=mutation.kind,
        before=before,
        after=after,
        outcome=found,
        tests=tried,
        seconds=round(time.monotonic() - started, 1),
    )


def population(patterns: Sequence[str]) -> list[Mutation]:
    """All mutations of the files of the package that fit one of ``patterns``."""
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tnlm").rglob("*.py"))
    chosen = [f for f in files if any(fnmatch(f, p) for p in patterns) and not any(fnmatch(f, p) for p in NOT_HERE)]
    return [m for f in chosen for m in mutations((ROOT / f).read_text(), f)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sample", type=int, default=60, help="how many mutants (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample (default %(default)s)")
    parser.add_argument("--paths", nargs="+", default=["tnlm/*"], help="patterns of files to change")
    parser.add_argument("--without", nargs="+", default=[], help="patterns of files to leave as they are")
    parser.add_argument(
        "--read", action="store_true", help="only what a person reads: figures, reports, tables, records"
    )
    parser.add_argument("--tests", nargs="+", default=["tests/*"], help="patterns of the test files to try")
    parser.add_argument("--budget", type=float, default=40, help="seconds of tests for a mutant (default %(default)s)")
    parser.add_argument("--control", action="store_true", help="change nothing: every trial must survive")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants" / "report.json")
    options = parser.parse_args(argv)

    everything = population(READ if options.read else options.paths)
    everything = [m for m in everything if not any(fnmatch(m.path, p) for p in options.without)]
    sample = random.Random(options.seed).sample(everything, min(options.sample, len(everything)))
    print(f"{len(sample)} of {len(everything)} mutants, seed {options.seed}", file=sys.stderr)
    preload()
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    outcomes: list[Outcome] = []
    try:
        pool = ProcessPoolExecutor(options.jobs, get_context("fork"), initializer=_own_a_copy, initargs=(folder,))
        with pool:
            files = test_files(options.tests)
            unknown = [f for f in files if not entry(f).exists()]
            for i, name in enumerate(pool.map(_measure, unknown), 1):
                print(f"which lines a test runs: {i} of {len(unknown)}, {name}", file=sys.stderr, flush=True)
            tests = TestMap(files)
            sources = {m.path: (ROOT / m.path).read_text() for m in sample}
            jobs = [
                pool.submit(_try, m, *tests.choose(m, sources[m.path]), options.budget, options.control)
                for m in sorted(sample, key=lambda m: (m.path, m.start))
            ]
            for job in jobs:
                outcomes.append(job.result())
                print(_line(outcomes[-1]), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"seed": options.seed, "population": len(everything), "mutants": [asdict(o) for o in outcomes]}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(summary(outcomes))
    return 0


def summary(outcomes: Sequence[Outcome]) -> str:
    """A table of kinds against outcomes, then the mutants that did not die, each with its line before and after."""
    columns = ("killed", "timeout", "survived", "not run", "error")
    counts = Counter((o.kind, o.outcome) for o in outcomes)
    rows = [f"{'kind':<20}" + "".join(f"{c:>10}" for c in columns)]
    for kind in sorted({o.kind for o in outcomes}):
        rows.append(f"{kind:<20}" + "".join(f"{counts[kind, c]:>10}" for c in columns))
    tried = [o for o in outcomes if o.outcome != "error"]
    dead = [o for o in tried if o.outcome in ("killed", "timeout")]
    rows.append(f"{len(dead)} of {len(tried)} mutants die ({100 * len(dead) / max(1, len(tried)):.1f} %)")
    if len(tried) < len(outcomes):
        rows.append(f"{len(outcomes) - len(tried)} could not be tried: pytest ended before it ran the tests")
    listed = [o for o in outcomes if o.outcome not in ("killed", "timeout")]
    rows += [f"\n{o.place} [{o.kind}] {o.outcome}, {o.tests} tests\n- {o.before}\n+ {o.after}" for o in listed]
    return "\n".join(rows)


def _line(o: Outcome) -> str:
    return f"{o.outcome:<9} {o.seconds:6.1f} s {o.place} [{o.kind}] {o.after[:90]}"


if __name__ == "__main__":
    raise SystemExit(main())
