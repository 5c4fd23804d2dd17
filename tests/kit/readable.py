"""Whether a page with charts can be read, on a desk and on a phone."""

from __future__ import annotations

from pathlib import Path

from tests.kit.browser import CONTRAST, LOW_CONTRAST, Browser

SIZES = ((1400, False), (390, True))
"""Widths of a desk and of a phone in pixels, and whether the mode is dark."""

# Digests may break.
BROKEN_WORDS = """[...document.querySelectorAll("main *:not(svg *)")].flatMap(element => [...element.childNodes])
  .filter(node => node.nodeType === Node.TEXT_NODE)
  .flatMap(node => [...node.data.matchAll(/[\\p{L}\\d]+/gu)].map(word => {
    const range = document.createRange()
    range.setStart(node, word.index)
    range.setEnd(node, word.index + word[0].length)
    return [word[0], new Set([...range.getClientRects()].map(box => Math.round(box.top))).size]
  }))
  .filter(([word, lines]) => lines > 1 && !/^[0-9a-f]{16,}$/.test(word))
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
FAINT = f"""(() => {{{CONTRAST}
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


def assert_readable(tab: Browser, page: Path) -> None:
    """Opens the page at each size, and leaves it open at the last one."""
    for width, dark in SIZES:
        tab.open(page.as_uri(), width=width, dark=dark)
        tab.until(
            f"location.href === {page.as_uri()!r} && innerWidth === {width} && document.readyState === 'complete'"
        )
        assert tab.evaluate(BROKEN_WORDS) == [], width
        assert tab.evaluate(OVERLAPS) == [], width
        assert tab.evaluate(LOW_CONTRAST) == []
        assert tab.evaluate(FAINT) == []
        assert tab.evaluate(UNREACHABLE) == 0, "tables scroll sideways"
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page itself does not"
    assert tab.problems == []
