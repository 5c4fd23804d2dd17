from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dvp_lab.__main__ import app
from dvp_lab.mismatch import Estimate
from dvp_lab.page import text, write_page
from dvp_lab.study import Chart, Finding, Series, Study, Table, percent, short
from tests.kit.processes import ROOT

RESULTS = ROOT / "trainer" / "lab" / "results"
STUDY = Study(
    name="example",
    title="A & B",
    abstract="What <b>was</b> asked.",
    settings={"seed": 0, "prompts": 12_345, "map": [1, 2, 3]},
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
    conclusion=("It follows.",),
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
    for words in ("Does not hold.", "12,345", "Nothing else.", "0.333", "It follows.", "3 entries"):
        assert words in page


@pytest.mark.parametrize("file", sorted(RESULTS.rglob("*.json")), ids=lambda file: str(file.relative_to(RESULTS)))
def test_the_stored_results_are_what_a_study_saves(file: Path, tmp_path: Path) -> None:
    assert Study.load(file).save(tmp_path).read_bytes() == file.read_bytes()


def test_a_line_without_a_label_is_not_in_the_legend(tmp_path: Path) -> None:
    chart = Chart("c", "dashed: predicted", "x", "y", (Series("seen", (0.0,), (1.0,)), Series("", (0.0,), (2.0,))))
    page = write_page(replace(STUDY, charts=(chart,)), tmp_path).read_text(encoding="utf-8")
    assert page.count('<span><i class="') == 1


def test_a_table_without_rows_and_a_study_of_an_earlier_version_are_drawn(tmp_path: Path) -> None:
    file = replace(STUDY, tables=(Table("rows", "none", ("name", "value"), ()),)).save(tmp_path)
    numbers = json.loads(file.read_text(encoding="utf-8"))
    del numbers["conclusion"]
    file.write_text(json.dumps(numbers), encoding="utf-8")
    page = write_page(Study.load(file), tmp_path).read_text(encoding="utf-8")
    assert '<div class="conclusion">' not in page


def test_a_study_without_a_chart_has_a_page_and_no_picture(tmp_path: Path) -> None:
    write_page(STUDY, tmp_path)
    page = write_page(replace(STUDY, charts=()), tmp_path).read_text(encoding="utf-8")
    assert "<svg" not in page
    assert list(tmp_path.iterdir()) == [tmp_path / "example.html"]


def test_the_name_of_a_run_is_text_and_neither_html_nor_math(tmp_path: Path) -> None:
    chart = replace(STUDY.charts[0], title='"><b>$\\x$')
    page = write_page(replace(STUDY, charts=(chart,)), tmp_path).read_text(encoding="utf-8")
    assert 'aria-label="&quot;&gt;&lt;b&gt;$\\x$"' in page


def test_a_column_of_numbers_is_aligned_to_the_right(tmp_path: Path) -> None:
    rows = (("a", 1.5, "1 ± 0.1", "yes", None), ("b", None, "2 of 5", "no", "x"))
    page = write_page(replace(STUDY, tables=(Table("t", "c", tuple("vwxyz"), rows),)), tmp_path).read_text("utf-8")
    assert re.findall(r'<th scope="col"( class="number")?>([v-z])<', page) == [
        *(("", "v"), (' class="number"', "w"), (' class="number"', "x"), ("", "y"), ("", "z")),
    ]


def test_cells() -> None:
    assert [text(value) for value in (None, math.nan, True, False, 1234, [1, 2], "as it is")] == [
        *("–", "–", "yes", "no"),
        *("1,234", "2 entries, in the JSON file", "as it is"),
    ]


NUMBERS = {
    0.0: "0",
    7.0: "7",
    1019.6: "1,020",
    999.6: "1,000",
    -29.84: "-29.8",
    0.0696: "0.0696",
    0.001: "0.001",
    0.00099999: "0.001",
    6.58e-5: "6.58e-5",
    2e-5: "2e-5",
    1e6: "1e6",
    math.nan: "–",
    math.inf: "–",
}


@pytest.mark.parametrize(("value", "words"), [*NUMBERS.items(), (-0.0, "0")])
def test_a_number_is_short(value: float, words: str) -> None:
    assert short(value) == words


def test_an_estimate_and_its_error_are_written_alike() -> None:
    found = [Estimate(29.84, 1.04), Estimate(-0.00814, 9e-4), Estimate(1.27e-4, 3e-4), Estimate(1e-5, 0.002)]
    assert list(map(str, found)) == ["29.8 ± 1", "-0.00814 ± 0.0009", "1.27e-4 ± 3e-4", "0.00001 ± 0.002"]
    assert str(Estimate(0.1, 1e-17)) == "0.1 ± 1e-17"
    assert percent(0.35857) == "35.9\N{NO-BREAK SPACE}%"
