"""The stored studies' pages in a real browser, on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dvp_lab.page import write_page
from dvp_lab.study import Study
from tests.kit import browser
from tests.kit.processes import ROOT

RESULTS = ROOT / "trainer" / "lab" / "results"
SIZES = ((1400, False), (390, True))
"""Widths of a desk and of a phone in pixels, and whether the mode is dark."""
pytestmark = pytest.mark.skipif(browser.chromium() is None, reason="no Chromium here")

BROKEN_WORDS = """[...document.querySelectorAll("main *:not(svg *)")].flatMap(element => [...element.childNodes])
  .filter(node => node.nodeType === Node.TEXT_NODE)
  .flatMap(node => [...node.data.matchAll(/[\\p{L}\\d]+/gu)].map(word => {
    const range = document.createRange()
    range.setStart(node, word.index)
    range.setEnd(node, word.index + word[0].length)
    return [word[0], new Set([...range.getClientRects()].map(box => Math.round(box.top))).size]
  }))
  .filter(([word, lines]) => lines > 1)
  .map(([word]) => word)"""

# A tick's label is in its own group. Rotated labels are compared by where they end, an em apart or more.
OVERLAPS = """[...document.querySelectorAll("svg")].flatMap(svg => ["xtick", "ytick"].flatMap(axis => {
  const labels = [...svg.querySelectorAll(`g[id^="${axis}"] text`)].map(text => {
    const box = text.getBoundingClientRect(), turn = /rotate\\((-?[\\d.]+)/.exec(text.getAttribute("transform") || "")
    const turned = turn !== null && Math.abs(parseFloat(turn[1])) > 1
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width
    const em = parseFloat(getComputedStyle(text).fontSize) * scale
    return {words: text.textContent, left: turned ? box.right - em : box.left, right: box.right,
            top: turned ? -1 : box.top, bottom: turned ? 1 : box.bottom}
  })
  return labels.flatMap((a, i) => labels.slice(i + 1)
    .filter(b => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
    .map(b => `${svg.getAttribute("aria-label")}: ${a.words} and ${b.words}`))
}))"""

INKS = """[...new Set([...document.querySelectorAll("svg text")].map(text => getComputedStyle(text).fill))]"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.running(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.mark.parametrize("file", sorted(RESULTS.rglob("*.json")), ids=lambda file: str(file.relative_to(RESULTS)))
def test_a_page_is_readable(tab: browser.Browser, file: Path, tmp_path: Path) -> None:
    study = Study.load(file)
    page = write_page(study, tmp_path).as_uri()
    for width, dark in SIZES:
        tab.open(page, width=width, dark=dark)
        tab.until(f"document.title === {study.title!r} && document.readyState === 'complete'")
        assert tab.evaluate(BROKEN_WORDS) == [], width
        assert tab.evaluate(OVERLAPS) == [], width
        assert len(tab.evaluate(INKS)) == 1, "all labels have the mode's own colour"
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, "only tables scroll sideways"
        first = tab.evaluate("document.querySelector('.conclusion').innerText")
        assert [sentence in first for sentence in study.conclusion] == [True] * len(study.conclusion)
    assert tab.problems == []
