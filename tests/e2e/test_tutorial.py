"""Follows trainer/TUTORIAL.md from its first to its last block (pages.py says how)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import browser
from tests.kit.readable import assert_readable

from .pages import Reader, read_blocks
from .stack import REPOSITORY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def evening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The reader's folder at the end of the page."""
    folder = tmp_path_factory.mktemp("reader")
    blocks = read_blocks((REPOSITORY / "trainer" / "TUTORIAL.md").read_text())
    reader = Reader(blocks, folder, {})
    try:
        for block in blocks:
            reader.run(block)
        yield folder
    finally:
        reader.close()


def test_the_model_learns(evening: Path) -> None:
    steps = [json.loads(line) for line in (evening / "runs/evening/metrics.jsonl").read_text().splitlines()]
    scores = [step["heldout/score"] for step in steps if "heldout/score" in step]
    assert max(scores[1:]) > scores[0], scores


@pytest.mark.skipif(browser.chromium() is None, reason="no Chromium here")
def test_the_reports_are_readable(evening: Path, tmp_path: Path) -> None:
    with browser.running(tmp_path) as tab:
        for page in ("runs/evening/report.html", "runs/evening-2/report.html", "runs/compare.html"):
            assert_readable(tab, evening / page)
