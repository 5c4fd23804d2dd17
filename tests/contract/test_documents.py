"""Everything that the documents point to exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = [
    REPOSITORY / name
    for name in subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.splitlines()
]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
TESTS = re.compile(r"\btests/[\w/]+\.py\b")
NEEDS_NO_TEST = {"Hooks: rewards, rows, advantages, objective, sinks, engine, environment, agent"}
"""Rows of SECURITY.md without countermeasures."""


def anchors(document: Path) -> set[str]:
    """Anchors that GitHub makes of the headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_somewhere(document: Path) -> None:
    for path, anchor in LINK.findall(document.read_text()):
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document}: {path} is not there"
        assert not anchor or anchor in anchors(target), f"{document}: {target} has no heading {anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_tests_that_are_named_exist(document: Path) -> None:
    for name in TESTS.findall(document.read_text()):
        assert "def test_" in (REPOSITORY / name).read_text(), f"{document}: no tests in {name}"


def test_each_promise_of_security_names_its_test() -> None:
    rows = re.findall(r"^\| ([^|]+) \|.*\| ([^|]*) *\|$", (REPOSITORY / "SECURITY.md").read_text(), re.MULTILINE)
    without = {name for name, held_by in rows if not TESTS.search(held_by)}
    assert without == NEEDS_NO_TEST
    assert len(rows) > 10
