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

# Rotated tick labels are compared with each other, by where they end: they must be an em apart.
OVERLAPS = """[...document.querySelectorAll("svg [id^='matplotlib.axis']")].flatMap(axis => {
  const svg = axis.closest("svg")
  const labels = [...axis.querySelectorAll("text")].map(text => {
    const box = text.getBoundingClientRect(), turn = /rotate\\((-?[\\d.]+)/.exec(text.getAttribute("transform") || "")
    const turned = turn !== null && parseFloat(turn[1]) % 90 !== 0
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width
    const em = parseFloat(getComputedStyle(text).fontSize) * scale
    return {words: text.textContent.replace(/\\s+/g, ""), left: turned ? box.right - em : box.left,
            right: box.right, top: turned ? -1 : box.top, bottom: turned ? 1 : box.bottom}
  })
  return labels.flatMap((a, i) => labels.slice(i + 1)
    .filter(b => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
    .map(b => `${svg.getAttribute("aria-label")}: ${a.words} and ${b.words}`))
})"""

UNREACHABLE = """[...document.querySelectorAll(".table")]
  .filter(box => box.scrollWidth > box.clientWidth && getComputedStyle(box).overflowX !== "auto").length"""

# Labels and lines of the charts, other than the grid, that are too faint to see.
FAINT = f"""(() => {{{browser.CONTRAST}
  const figure = getComputedStyle(document.querySelector("figure"))
  const inks = [...document.querySelectorAll("svg text, svg path, svg use, .legend i")].flatMap(mark => {{
    const own = getComputedStyle(mark)
    if (mark.matches("text")) return [own.fill]
    return ["stroke", "fill", "border-color"].filter(name => mark.style.getPropertyValue(name))
      .map(name => own.getPropertyValue(name === "border-color" ? "border-top-color" : name))
  }})
  return [...new Set(inks)].filter(ink => ink !== "none" && ink !== figure.borderTopColor)
    .filter(ink => contrast(parse(ink), parse(figure.backgroundColor)) < 3)
}})()"""


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
        assert tab.evaluate(browser.LOW_CONTRAST) == []
        assert tab.evaluate(FAINT) == []
        assert tab.evaluate(UNREACHABLE) == 0, "tables scroll sideways"
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page itself does not"
        first = tab.evaluate("document.querySelector('.conclusion').innerText")
        assert [sentence in first for sentence in study.conclusion] == [True] * len(study.conclusion)
    assert tab.problems == []
