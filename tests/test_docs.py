"""What README and the guides say is true: code runs, tests exist, links lead somewhere, tables come from files."""

import re
from pathlib import Path

import pytest

from tnlm.checkpoints.verification import verification_table

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "(?:tnlm|tests|docs|benchmarks|scripts|notebooks)"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_quickstart_of_the_readme_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(blocks) == 1
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 20
    exec(compile(blocks[0], "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "exact;" in out
    assert "remainder" in out


def test_claims_name_tests_that_exist():
    text = (ROOT / "docs" / "exactness.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 15
    for path, test in named:
        source = (ROOT / path).read_text()
        assert not test or f"def {test}(" in source, f"{path}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_in_backticks_exist(page):
    for path in re.findall(
        r"`((?:tnlm|tests|docs|benchmarks|scripts|notebooks)/[\w./-]+\.(?:py|md|csv|json|ipynb))`", page.read_text()
    ):
        assert (ROOT / path).exists(), path


def test_released_table_is_what_verification_wrote():
    readme = (ROOT / "README.md").read_text()
    table = readme.split("verification_table -->\n")[1].split("<!-- /released -->")[0]
    assert table == verification_table(ROOT / "verification.json")


def test_commands_of_the_makefile_are_named():
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme
