"""One home for each fact of the project: version, address, dependencies, the tools' versions; and what is shipped."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import tnlm
from tnlm.app import cli
from tnlm.training import cli as training_cli

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def canonical(requirement: str) -> str:
    """The name of a requirement, as the index of packages spells it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


distributions = cache(packages_distributions)  # reads the metadata of every package that is installed


def imported(path: Path) -> set[str]:
    """The distributions whose modules a file imports, the standard library and this repository left out."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module)
    roots = {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) - {"tnlm", "tests", "benchmarks"}
    return {canonical(distribution) for root in roots for distribution in distributions().get(root, [root])[:1]}


@pytest.mark.parametrize("file", ["docs/conf.py", "notebooks/build.py"])
def test_the_extra_docs_declares_what_building_imports(file):
    declared = {canonical(r) for r in [*PROJECT["dependencies"], *EXTRAS["docs"]]}
    assert imported(ROOT / file) <= declared


def test_all_that_the_package_imports_is_declared():
    declared = {canonical(r) for r in [*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]}
    for path in sorted((ROOT / "tnlm").rglob("*.py")):
        assert imported(path) <= declared, path


def test_the_extra_docs_declares_nothing_that_is_not_used():
    """Sphinx names its theme and extensions in its settings; nbclient starts ipykernel."""
    named = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8").replace("_", "-")
    used = imported(ROOT / "docs" / "conf.py") | imported(ROOT / "notebooks" / "build.py") | {"ipykernel"}
    assert {name for name in map(canonical, EXTRAS["docs"]) if name not in used and f'"{name}"' not in named} == set()


def test_version_has_one_home():
    assert PROJECT["dynamic"] == ["version"]
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_address_has_one_home():
    """Empty until the repository is published."""
    address = PROJECT["urls"].get("Repository", "")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8")).get("repository-code", "") == address


@pytest.mark.parametrize("main, program", [(cli.main, "tnlm"), (training_cli.main, "tnlm-train")])
def test_version_of_the_commands(main, program, capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{program} {tnlm.__version__}\n"
    assert main(["--version", "--json"]) == main(["--json", "--version"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == second
    assert (first["tnlm"], first["python"]) == (tnlm.__version__, ".".join(map(str, sys.version_info[:3])))
    torch = subprocess.run([sys.executable, "-m", "pip", "show", "torch"], capture_output=True, text=True).stdout
    assert f"Version: {first['packages']['torch']}\n" in torch
    assert main(["--version", "--jsonn"]) == 2


def test_linter_and_checker_have_one_version():
    dev = {canonical(r): r.partition("==")[2] for r in EXTRAS["dev"]}
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), flags=re.M))
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    revisions = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in hooks["repos"] if repo["repo"] != "local"}
    assert revisions["ruff-pre-commit"] == f"v{dev['ruff']}"
    assert (pinned["ruff"], pinned["mypy"]) == (dev["ruff"], dev["mypy"])


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.github-issue-forms": sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")),
}


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda path: path.name)
def test_every_line_of_a_workflow_can_be_run_here(file):
    """Each is a target of the Makefile: what CI does, anyone can do."""
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values()
    lines = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert lines
    for line in lines:
        assert re.fullmatch(r"make [\w-]+ PYTHON=python( TAG=\"\$GITHUB_REF_NAME\")?", line), line
        environment = {**os.environ, "GITHUB_REF_NAME": "v0.0.0"}
        plan = subprocess.run(
            f"{line} --dry-run", shell=True, cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert plan.returncode == 0, plan.stderr
        assert "TAG" not in line or "--tag v0.0.0" in plan.stdout


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_of_github_fit_their_schema(schema, tmp_path):
    pytest.importorskip("check_jsonschema", reason='not installed: pip install -e ".[dev]"')
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    done = subprocess.run([*command, *SCHEMAS[schema]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    (tmp_path / "bad.yml").write_text("name: x\nbody: 1\njobs: 2\n")
    assert subprocess.run([*command, tmp_path / "bad.yml"], capture_output=True).returncode == 1


def test_a_bug_report_asks_for_the_versions():
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    assert "`tnlm --version --json`" in form
