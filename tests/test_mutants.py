"""The mutation tester of ``scripts/mutants``: what it changes and leaves alone, and that it tells dead from alive."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scripts" / "mutants"


@pytest.fixture(scope="module")
def load():
    """Imports a module of the mutation tester, whose folder is no package, by its name."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield lambda name: importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def mutations(load):
    return load("mutations").mutations


CHANGES = [
    ("a + b", "operator", {"(a - b)"}),
    ("a ** b", "operator", {"(a * b)"}),
    ("a % b", "operator", {"(a // b)"}),
    ("a @ b", "swapped arguments", {"b @ a", "(b @ a)"}),
    ("a < b", "comparison", {"(a <= b)", "(a > b)"}),
    ("a is not b", "comparison", {"(a is b)"}),
    ("a and b", "boolean", {"(a or b)"}),
    ("not a", "boolean", {"a"}),
    ("True", "boolean", {"False"}),
    ("-a", "sign", {"a"}),
    ("a[2]", "constant", {"a[3]", "a[1]"}),
    ("a[:, 1:]", "swapped arguments", {"a[1:, :]"}),
    ("0.5", "constant", {"1.0"}),
    ("f(a, b)", "swapped arguments", {"f(b, a)"}),
    ("f(x=a, y=b)", "swapped arguments", {"f(x=b, y=a)"}),
    ("[a, b, c]", "swapped arguments", {"[b, a, c]", "[a, c, b]"}),
    ("{'x': a, 'y': b}", "swapped arguments", {"{'x': b, 'y': a}"}),
    ("a.min()", "swapped names", {"a.max()"}),
    ('f"{a + b:.1f} of {b}"', "operator", {"f'{a - b:.1f} of {b}'"}),
]


@pytest.mark.parametrize("before, kind, after", CHANGES, ids=[c[0] for c in CHANGES])
def test_each_kind_of_change(mutations, before, kind, after):
    source = f"x = {before}\n"
    found = {m.apply(source).removeprefix("x = ").strip() for m in mutations(source) if m.kind == kind}
    assert found
    assert found <= after
    assert len(found) == len(after) or kind == "swapped arguments"


def test_a_name_becomes_another_argument_of_its_function(mutations):
    source = "def f(rows, columns, width):\n    return rows\n"
    assert [m.shown(source)[1] for m in mutations(source)] == ["return columns"]


LEFT_ALONE = [
    '"""Two words: 1 + 2."""',
    'x = "a" + "b"',
    "def f(n: 'int[1]') -> 'float[2]': ...",
    "x: tuple[1, 2]",
    'raise ValueError(f"got {n + 1}, at most {n - 1}")',
    "warn(f'{n + 1} of 3', stacklevel=2)",
    "assert n + 1 < 3",
    "__all__ = [a, b]",
    "@cache(3)\ndef f(): ...",
    "if TYPE_CHECKING:\n    x = 1",
    "p.mkdir(exist_ok=True)",
    "from a import b",
]


@pytest.mark.parametrize("source", LEFT_ALONE)
def test_text_and_what_cannot_matter_are_left_alone(mutations, source):
    assert mutations(source) == []


def test_a_neutral_operand_keeps_its_operator(mutations):
    assert {m.kind for m in mutations("x = y + 0")} == {m.kind for m in mutations("x = y * 1")} == {"constant"}


def test_every_mutant_of_the_package_compiles_and_differs(mutations):
    for file in sorted((ROOT / "tnlm" / "output").glob("*.py")):
        source = file.read_text()
        for mutation in mutations(source, str(file)):
            mutated = mutation.apply(source)
            assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)), mutation
            assert mutation.lines[0] <= mutation.line <= mutation.lines[1], mutation


RUNS = {
    "passes": ("def test(): pass", "survived"),
    "fails": ("def test(): assert 0", "killed"),
    "cannot be imported": ("import tnlm.no_such_module", "killed"),
    "crashes": ("import os\ndef test(): os.abort()", "killed"),
    "hangs": ("import time\ndef test(): time.sleep(600)", "timeout"),
    "holds no test": ("", "error"),
    "stops pytest": ("import pytest\ndef test(): pytest.exit('enough', returncode=3)", "error"),
    "is missing": (None, "error"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_that_tells_nothing_about_the_change_kills_nothing(tmp_path, kind):
    text, expected = RUNS[kind]
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    if text is not None:
        (tree / "test_it.py").write_text(text)
    program = (
        "import sys; from pathlib import Path; from trial import outcome, run_tests\n"
        f"print(outcome(run_tests(Path({str(tree)!r}), ['test_it.py'], timeout={20 if kind == 'hangs' else 300})))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=FOLDER, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [expected]


def test_runs_that_could_not_be_made_are_counted_apart(load):
    spec = importlib.util.spec_from_file_location("mutants_program", FOLDER / "__main__.py")
    program = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = program  # a dataclass looks its module up there
    try:
        spec.loader.exec_module(program)
    finally:
        del sys.modules[spec.name]
    facts = {"place": "a.py:1", "kind": "sign", "before": "-a", "after": "a", "tests": 1, "seconds": 0.1}
    outcomes = ["killed"] * 4 + ["timeout"] * 2 + ["survived"] + ["not run"] + ["error"] * 3
    text = program.summary([program.Outcome(**facts, outcome=outcome) for outcome in outcomes]).splitlines()
    assert text[0].split() == ["kind", "killed", "timeout", "survived", "not", "run", "error"]
    assert text[1].split() == ["sign", "4", "2", "1", "1", "3"]
    assert text[2:4] == ["6 of 8 mutants die (75.0 %)", "3 could not be tried: pytest ended before it ran the tests"]
    assert [line.split("]")[1].split(",")[0].strip() for line in text if line.startswith("a.py")] == outcomes[6:]


PACKAGE = """
def area(width, height):
    return width * height


def unused(n):
    return n + 1


def clipped(n):
    return n if n > 3 else 3
"""
TESTS = """
from tnlm.tiny import area, clipped


def test_area():
    assert area(3, 5) == 15


def test_clipped():
    assert (clipped(7), clipped(2)) == (7, 3)
"""


@pytest.mark.slow
def test_dead_alive_and_never_run_are_told_apart(tmp_path):
    """A repository of one module: ``*`` dies, ``>`` as ``>=`` cannot be seen, no test runs ``n + 1``."""
    repository = tmp_path / "repository"
    for name, text in {
        "tnlm/__init__.py": "",
        "tnlm/tiny.py": PACKAGE,
        "tests/__init__.py": "",
        "tests/test_tiny.py": TESTS,
        ".gitignore": "build/\n",
        "pyproject.toml": "[tool.pytest.ini_options]\n",
        **{f"scripts/mutants/{f.name}": f.read_text() for f in FOLDER.glob("*.py")},
    }.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    pytest.importorskip("coverage", reason='not installed: pip install -e ".[dev]"')
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    subprocess.run(
        [sys.executable, "scripts/mutants", "--sample", "99"], cwd=repository, check=True, capture_output=True
    )
    found = json.loads((repository / "build" / "mutants" / "report.json").read_text())["mutants"]
    outcomes = {(m["place"].partition(":")[2], m["after"]): m["outcome"] for m in found}
    assert outcomes["3", "return (width / height)"] == "killed"
    assert outcomes["3", "return height * height"] == "killed"
    assert outcomes["7", "return (n - 1)"] == "not run"
    assert outcomes["11", "return n if (n >= 3) else 3"] == "survived"
    assert outcomes["11", "return n if (n < 3) else 3"] == "killed"
    assert (repository / "tnlm" / "tiny.py").read_text() == PACKAGE
