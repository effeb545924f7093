"""Which tests run which lines: measured once for each test file with coverage.py, and kept while that file stays.

A line is known by its text and the function around it, not by its number, so the map outlives edits elsewhere in the
package. A fixture that is built once runs its lines in the first test alone; :meth:`TestMap.choose` therefore offers
the rest of the file after the tests that run a line.
"""

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mutations import SCOPES, Mutation
from trial import ROOT, run_tests, said

FOLDER = ROOT / "build" / "mutants" / "map"
TEST_FILE_SECONDS = 1800


def line_keys(source: str) -> list[str]:
    """For each line, from 1 on: the names of the function and classes around it, and its text."""
    lines = ["", *source.splitlines()]
    scopes = [""] * len(lines)

    def enter(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, SCOPES):
                inner = f"{name}.{child.name}"
                for i in range(child.lineno, (child.end_lineno or child.lineno) + 1):
                    scopes[i] = inner
            enter(child, inner)

    enter(ast.parse(source), "")
    return [f"{scope}: {line.strip()}" for scope, line in zip(scopes, lines)]


class _Recorder:
    """A pytest plugin: lines of ``tree/tnlm`` and seconds of each test that passes, written to ``to`` as JSON."""

    def __init__(self, tree: Path, to: Path) -> None:
        self.tree, self.to = tree, to
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_configure(self) -> None:
        import coverage

        self.coverage = coverage.Coverage(
            data_file=None, config_file=False, source=[str(self.tree / "tnlm")], messages=False
        )
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        tests = [name for name in self.seconds if name not in self.failed]
        number = {name: i for i, name in enumerate(tests)}
        lines: dict[str, dict[str, list[int]]] = {}
        for file in data.measured_files():
            keys = line_keys(Path(file).read_text())
            found = lines.setdefault(str(Path(file).relative_to(self.tree)), {})
            for line, contexts in data.contexts_by_lineno(file).items():
                ran = sorted(number[c] for c in contexts if c in number)
                if ran:
                    found[keys[line]] = sorted({*found.get(keys[line], ()), *ran})
        seconds = [round(self.seconds[name], 3) for name in tests]
        self.to.write_text(json.dumps({"tests": tests, "seconds": seconds, "lines": lines}))


def test_files(patterns: Sequence[str]) -> list[str]:
    """Test files that fit a pattern; the interpreter of Triton needs a process of its own and is left out."""
    found = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py"))
    return [f for f in found if any(fnmatch(f, p) for p in patterns) and "/interpreter/" not in f]


def entry(test_file: str) -> Path:
    """Where the map of one test file is kept; the name changes with its text."""
    content = (ROOT / test_file).read_bytes()
    return FOLDER / f"{test_file.replace('/', '.')}-{hashlib.sha256(content).hexdigest()[:16]}.json"


def measure(tree: Path, test_file: str) -> None:
    """Run one test file under coverage and keep which test ran which lines."""
    to = entry(test_file)
    to.parent.mkdir(parents=True, exist_ok=True)
    if not to.exists():
        code = run_tests(tree, [test_file], timeout=TEST_FILE_SECONDS, plugins=[_Recorder(tree, to)], stop=False)
        if not to.exists():
            raise RuntimeError(f"{test_file} ended with code {code} before its map was written:\n{said(tree)[-2000:]}")


class TestMap:
    """Tests by the lines they run."""

    __test__ = False  # not a class of tests, whatever its name

    def __init__(self, files: Sequence[str]) -> None:
        self.files = {f: json.loads(entry(f).read_text()) for f in files if entry(f).exists()}

    def choose(self, mutation: Mutation, source: str) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
        """Tests that run the mutated statement, then the other tests of their files; each with its seconds.

        Both begin with the tests of the room that mirrors the mutated one, quick ones first. For code that runs when
        the module is imported, the first list is all tests that run anything of the module.
        """
        keys = set(line_keys(source)[mutation.lines[0] : mutation.lines[1] + 1])
        near, far = [], []
        for seen in self.files.values():
            lines = seen["lines"].get(mutation.path, {})
            ran = {i for key, tests in lines.items() if not mutation.in_function or key in keys for i in tests}
            tests = list(zip(seen["tests"], seen["seconds"]))
            near += [tests[i] for i in sorted(ran)]
            far += [test for i, test in enumerate(tests) if ran and i not in ran]
        room, name = mutation.path.split("/", 1)[1].rpartition("/")[0], Path(mutation.path).stem

        def rank(test: tuple[str, float]) -> tuple[bool, bool, float]:
            file = test[0].partition("::")[0]
            return name not in Path(file).stem, str(Path(file).parent) != f"tests/{room}".rstrip("/"), test[1]

        return sorted(near, key=rank), sorted(far, key=rank)


def within(tests: Sequence[tuple[str, float]], seconds: float) -> Iterator[tuple[str, float]]:
    """The first tests that take at most ``seconds`` together, at least one."""
    for i, test in enumerate(tests):
        seconds -= test[1]
        if seconds < 0 and i:
            return
        yield test
