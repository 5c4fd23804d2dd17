"""The whole training study, in its small version."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from dvp_lab.collapse import SMALL, collapse
from dvp_lab.page import write_page
from dvp_lab.study import Study


@pytest.mark.slow
def test_the_study_in_small(tmp_path: Path) -> None:
    said = []
    study = collapse(tmp_path / "work", replace(SMALL, jobs=2), lambda done, total, what: said.append(what))
    page = write_page(Study.load(study.save(tmp_path)), tmp_path)
    numbers = json.loads((tmp_path / "collapse.json").read_text())
    arms, mapped, screened = numbers["tables"]
    assert len(screened["rows"]) == SMALL.candidates
    assert arms["rows"][0][0] == "naive"
    assert len(arms["rows"]) == 7
    assert len(mapped["rows"]) == len(SMALL.cells)
    assert all(0 <= row[3] <= 1 and math.isfinite(row[8] or 0.0) for row in arms["rows"])
    assert page.read_text().count("<svg") == len(study.charts)
    assert said[0] == "warm-starting the model"
    before = len(said)
    assert collapse(tmp_path / "work", replace(SMALL, jobs=2), lambda *args: said.append("")) == study
    assert len(said) > before
