from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from dvp_rl.contract.metrics import MAX_METRICS
from dvp_trainer.report.page import PANELS, PANELS_OF_EPISODES, moving_average, write_report

VOID = {"meta", "br", "img", "link", "input", "hr"}
SUMMARY: dict[str, Any] = {
    "steps": 40,
    "reward_first": 0.361,
    "heldout_last": None,
    "complete": True,
    "replicas": [{"id": "<script>alert(1)</script>", "last_version": "demo:40:abc"}],
}


class Page(HTMLParser):
    """Checks that tags nest; collects h3 headings and URLs that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href") and value and value[0] != "#"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h3":
            self.headings.append(data)


def record(step: int) -> dict[str, Any]:
    keys = [curve.key for panel in PANELS for curve in panel.curves if curve.key != "heldout/score"]
    values: dict[str, Any] = {key: (step + i) / 100 for i, key in enumerate(keys)}
    return {"step": step, "time": 0.0, **values} | ({"heldout/score": 0.5} if step % 10 == 0 else {})


def render(tmp_path: Path, records: list[dict[str, Any]], summary: dict[str, Any] = SUMMARY) -> str:
    metrics, out = tmp_path / "metrics.jsonl", tmp_path / "out" / "report.html"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    write_report(metrics, summary, out, title="A & B")
    return out.read_text(encoding="utf-8")


def test_every_panel_is_drawn(tmp_path: Path) -> None:
    page = Page(text := render(tmp_path, [record(step) for step in range(41)]))
    assert page.headings == [panel.title for panel in PANELS]
    assert page.open == []
    assert text.count("<svg") == len(PANELS)
    for unit, number in Counter(panel.unit for panel in PANELS).items():
        assert text.count(f">{unit}</text>") == number
    assert "Not recorded" not in text


def test_what_was_counted_in_episodes_is_drawn(tmp_path: Path) -> None:
    played = {"episodes/turns_mean": 2.0, "episodes/tool_errors_mean": 0.5, "episodes/luck_mean": 7.0}
    page = Page(text := render(tmp_path, [record(step) | played for step in range(3)]))
    titles = [panel.title for panel in PANELS_OF_EPISODES]
    assert page.headings == [panel.title for panel in PANELS] + [titles[0], "luck"]
    assert f"Not recorded in this run: {titles[1]}." in text

    played |= {"episodes/drifted_mean": 0.25, "length/environment_mean": 6.0}
    page = Page(text := render(tmp_path, [record(step) | played for step in range(3)]))
    assert page.headings == [panel.title for panel in PANELS] + [*titles, "luck"]
    assert "Not recorded" not in text
    assert {"environment 6 → 6", "drifted 0.25 → 0.25"} <= {
        *re.findall(r"(?:environment|drifted) [\d.]+ → [\d.]+", text)
    }


def test_names_that_a_harness_makes_up_do_not_fill_the_page(tmp_path: Path) -> None:
    steps = [{"step": step, "episodes/luck_mean": 1.0, f"episodes/task_{step}_mean": 1.0} for step in range(40)]
    page = Page(render(tmp_path, steps))
    assert len(page.headings) == MAX_METRICS
    assert page.headings[0] == "luck", "most steps have it"


def test_the_page_is_one_file_for_both_modes(tmp_path: Path) -> None:
    text = render(tmp_path, [record(step) for step in range(41)])
    assert Page(text).fetched == []
    assert not re.search(r"url\((?!#)|@import", text)
    assert "prefers-color-scheme: dark" in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    colours = {colour for svg in drawings for colour in re.findall(r"(?:stroke|fill): ([^;\"]+)", svg)}
    assert colours <= {"none", *(f"var(--s{i})" for i in range(1, 7)), "var(--muted)", "var(--line)"}
    ids = [name for svg in drawings for name in re.findall(r'<clipPath id="([^"]+)"', svg)]
    assert len(set(ids)) == len(PANELS)


def test_drawings_are_well_formed_and_named(tmp_path: Path) -> None:
    for svg in re.findall(r"<svg.*?</svg>", render(tmp_path, [record(step) for step in range(13)]), re.DOTALL):
        assert ElementTree.fromstring(svg).get("aria-label") in {panel.title for panel in PANELS}


def test_final_figures_are_written_and_escaped(tmp_path: Path) -> None:
    text = render(tmp_path, [record(1)])
    assert "<h1>A &amp; B</h1>" in text
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;, last version demo:40:abc" in text
    for label, value in [("reward first", "0.361"), ("heldout last", "–"), ("complete", "yes")]:
        assert f'<tr><th scope="row">{label}</th><td>{value}</td></tr>' in text


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"step": 1, "time": 0.0}],
        [{"step": 1, "reward/mean": 0.25}],
        [{"step": 1, "mismatch/kl": None}, {"step": 2, "mismatch/kl": 1e-4}],
        [{"step": 1, "time/wait_s": 1.0}, {"step": 2, "time/train_s": 2.0}],
        [{"step": step, "reward/mean": 0.5} for step in range(3)],
    ],
)
def test_short_runs_and_missing_keys(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    page = Page(text := render(tmp_path, records, summary={}))
    seen = {key for record in records for key, value in record.items() if value is not None}
    drawn = [panel.title for panel in PANELS if seen & {curve.key for curve in panel.curves}]
    assert page.headings == drawn
    assert page.open == []
    assert "Not recorded in this run" in text


def test_without_a_metrics_file_there_is_still_a_page(tmp_path: Path) -> None:
    write_report(tmp_path / "absent.jsonl", SUMMARY, tmp_path / "report.html")
    assert "No step was recorded" in (tmp_path / "report.html").read_text()


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    records = [record(step) for step in range(20)]
    assert render(tmp_path, records) == render(tmp_path, records)


@pytest.mark.parametrize("length", [1, 2, 7, 200])
def test_moving_average(length: int) -> None:
    values = np.random.default_rng(0).normal(size=length)
    half = max(length // 20, 2)
    expected = [values[max(i - half, 0) : i + half + 1].mean() for i in range(length)]
    np.testing.assert_allclose(moving_average(values), expected, atol=1e-12)
