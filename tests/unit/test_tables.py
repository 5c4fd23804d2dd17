"""Benchmark results as Markdown tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.tables import PAGES, RESULTS, page, render
from tests.kit.table import check_table


@pytest.mark.parametrize("folder", PAGES, ids=lambda folder: folder.name)
def test_a_page_is_that_of_the_committed_results(folder: Path) -> None:
    found = (folder / "README.md").read_text()
    assert found == page(folder), "write it again: python -m tests.benchmarks.tables"


def test_the_trainers_page_shows_the_step_beside_trl() -> None:
    found = json.loads((RESULTS / "gpu" / "training.json").read_text())["sides"]
    rows = [
        (side.replace("trl", "TRL"), f"{its['tokens_per_s']:,.0f}", f"{its['peak_mib']:,.0f}")
        for side, its in found.items()
    ]
    check_table("training", ("", "tokens/s", "peak memory, MiB"), rows, document="trainer/README.md")


def test_rows_of_a_list_share_what_is_the_same() -> None:
    rows = [{"case": {"n": 8, "T": 16}, "ratio": 1.25}, {"case": {"n": 8, "T": 32}, "ratio": 2.0}]
    assert list(render({"goal": 1.5, "results": rows})) == [
        "goal 1.5",
        "**results** case n 8",
        "| case T | ratio |\n| --- | --- |\n| 16 | 1.25 |\n| 32 | 2 |",
    ]


def test_dicts_of_one_shape_are_rows() -> None:
    sides = {"ours": {"speed": 12_345.6, "idle": [0.5, None]}, "other": {"speed": 9.0, "idle": [0.25, 1]}}
    assert list(render({"sides": sides})) == [
        "**sides**",
        "|  | speed | idle |\n| --- | --- | --- |\n| ours | 12,346 | 0.5,  |\n| other | 9 | 0.25, 1 |",
    ]


def test_a_row_may_lack_what_others_have() -> None:
    (table,) = list(render({"a": {"speed": 2.0, "reward": 0.5}, "b": {"speed": 3.0}}))
    assert table == "|  | speed | reward |\n| --- | --- | --- |\n| a | 2 | 0.5 |\n| b | 3 |  |"


def test_a_wide_table_is_turned() -> None:
    wide = {str(column): column for column in range(10)}
    (table,) = list(render({"": [wide, {key: value + 1 for key, value in wide.items()}]}))
    assert table.startswith("| 0 | 0 | 1 |\n| --- | --- | --- |\n| 1 | 1 | 2 |\n")
