from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dvp_lab.__main__ import app
from dvp_lab.page import text, write_page
from dvp_lab.study import Chart, Finding, Series, Study, Table
from tests.kit.processes import ROOT

RESULTS = ROOT / "trainer" / "lab" / "results"
STUDY = Study(
    name="example",
    title="A & B",
    abstract="What <b>was</b> asked.",
    settings={"seed": 0, "prompts": 12_345},
    findings=(
        Finding("it holds", True, "1 of 1"),
        Finding("it fails", False, "0 of 1"),
        Finding("known", None, "3.1 nats"),
    ),
    charts=(
        Chart(
            "points & interval",
            "both",
            "x",
            "y",
            (
                Series("points", (1.0, 10.0), (-2.0, 3.0), (-2.5, 2.0), (-1.0, 4.0), style="o"),
                Series("line", (1.0, 10.0), (0.0, math.nan), (0.0, 0.0), (1.0, 1.0), style="-", colour=4),
            ),
            x_log=True,
            linear_within=1e-3,
        ),
        Chart("names", "ticks", "", "y", (Series("a", (0.0, 1.0), (1.0, 2.0)),), ticks=("one", "two"), y_log=True),
    ),
    tables=(Table("rows", "of every kind", ("name", "value"), (("third", 1 / 3), ("none", None), ("nan", math.nan))),),
    notes=("Nothing else.",),
)


def test_json_png_and_page_say_the_same(tmp_path: Path) -> None:
    """The page redrawn from the JSON has the same bytes."""
    file = STUDY.save(tmp_path / "new")
    saved = file.read_text(encoding="utf-8")
    page = write_page(Study.load(file), tmp_path / "new").read_text(encoding="utf-8")
    assert Study.load(file).save(tmp_path / "again").read_text(encoding="utf-8") == saved
    result = CliRunner().invoke(app, ["page", str(file), "--out", str(tmp_path / "again")], catch_exceptions=False)
    assert f"written: {tmp_path / 'again' / 'example.html'}" in result.output
    assert (tmp_path / "again" / "example.html").read_text(encoding="utf-8") == page
    numbers = json.loads(saved)
    assert numbers["tables"][0]["rows"] == [["third", 0.33333], ["none", None], ["nan", None]]
    assert (tmp_path / "new" / "example.png").read_bytes().startswith(b"\x89PNG")
    assert "A &amp; B" in page
    assert "<b>was</b>" not in page
    assert page.count("<svg") == len(STUDY.charts)
    assert "var(--s5)" in page, "the colour that the second series asks for"
    for words in ("does not hold", "12,345", "Nothing else.", "0.333"):
        assert words in page


@pytest.mark.parametrize("file", sorted(RESULTS.rglob("*.json")), ids=lambda file: str(file.relative_to(RESULTS)))
def test_the_stored_results_are_what_a_study_saves(file: Path, tmp_path: Path) -> None:
    assert Study.load(file).save(tmp_path).read_bytes() == file.read_bytes()


def test_cells() -> None:
    assert [text(value) for value in (None, math.nan, True, False, 1234, 0.00012345, "as it is")] == [
        *("–", "–", "yes", "no"),
        *("1,234", "0.000123", "as it is"),
    ]
