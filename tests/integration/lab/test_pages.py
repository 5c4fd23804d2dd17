"""The stored studies' pages in a real browser, on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dvp_lab.page import write_page
from dvp_lab.study import Study
from tests.kit import browser
from tests.kit.processes import ROOT
from tests.kit.readable import assert_readable

RESULTS = ROOT / "trainer" / "lab" / "results"
pytestmark = pytest.mark.skipif(browser.chromium() is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.running(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.mark.parametrize("file", sorted(RESULTS.rglob("*.json")), ids=lambda file: str(file.relative_to(RESULTS)))
def test_a_page_is_readable(tab: browser.Browser, file: Path, tmp_path: Path) -> None:
    study = Study.load(file)
    page = write_page(study, tmp_path)
    assert_readable(tab, page)
    assert tab.evaluate("document.title") == study.title
    first = tab.evaluate("document.querySelector('.conclusion').innerText")
    assert [sentence in first for sentence in study.conclusion] == [True] * len(study.conclusion)
