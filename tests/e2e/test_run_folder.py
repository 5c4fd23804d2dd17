"""The demo's run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.demo.run_folder import claim
from dvp_rl.contract.errors import ConfigError
from dvp_trainer.up.launch import locked


def test_earlier_runs_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "demo"
    for text in ("first", "second", "third"):
        with claim(out) as run:
            (run.path / "note").write_text(text)
    assert run.earlier == tmp_path / "runs" / "demo-2"
    notes = {folder.name: (folder / "note").read_text() for folder in (tmp_path / "runs").iterdir() if folder.is_dir()}
    assert notes == {"demo": "third", "demo-1": "first", "demo-2": "second"}


def test_folder_in_use_is_refused(tmp_path: Path) -> None:
    with (
        claim(tmp_path / "demo"),
        pytest.raises(ConfigError, match="another demo is running"),
        claim(tmp_path / "demo"),
    ):
        pass


def test_a_run_that_goes_on_is_left_where_it_is(tmp_path: Path) -> None:
    with claim(tmp_path / "demo"):
        pass
    with (
        locked(tmp_path / "demo"),
        pytest.raises(ConfigError, match="another `dvp-train up`"),
        claim(tmp_path / "demo"),
    ):
        pass
    assert [folder.name for folder in tmp_path.iterdir() if folder.is_dir()] == ["demo"]


def test_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter-1").write_text("years of work")
    with pytest.raises(ConfigError, match="not a run of the demo"), claim(tmp_path / "thesis"):
        pass
    assert (tmp_path / "thesis" / "chapter-1").exists()


def test_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"), claim(tmp_path / "file" / "demo"):
        pass
