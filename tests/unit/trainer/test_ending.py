"""The lines that a run prints at its end: figures, and commands that can be copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dvp_trainer.config import TrainSettings
from dvp_trainer.ending import conclude, shown, standing
from dvp_trainer.report.starts import Start, describe_start, write_start


def begin(out_dir: Path, *, step: int = 0, steps: int = 6, ranks: str = "1", **machine: str) -> Start:
    argv = ["--run-id=mine", f"--out-dir={out_dir}", f"--steps={steps}", "--model.path=m", "--data.train=d.jsonl"]
    settings = TrainSettings.load([*argv, "--reward.name=math"])
    start = describe_start(settings, step=step, model="0123", machine={"ranks": ranks, **machine})
    out_dir.mkdir(parents=True, exist_ok=True)
    write_start(start, settings, out_dir)
    return start


def save(out_dir: Path, *steps: int) -> None:
    for step in steps:
        folder = out_dir / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "progress.json").write_text(json.dumps({"step": step, "seq": step + 1}))


def log(out_dir: Path, *records: dict[str, Any]) -> None:
    (out_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def facts(out_dir: Path) -> dict[str, str]:
    _, *lines = standing(out_dir, ended=True)
    return {name.strip(): text for name, _, text in (line.strip().partition("  ") for line in lines)}


def test_figures_are_those_of_the_metrics(tmp_path: Path) -> None:
    begin(tmp_path)
    log(tmp_path, {"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.75, "heldout/score": 0.5})
    assert next(standing(tmp_path)) == "mine: at step 2 of 6"
    assert next(standing(tmp_path, ended=True)) == "mine: stopped at step 2 of 6"
    assert facts(tmp_path)["reward"].strip() == "first 0.500, last 0.500, over 2 steps each"
    assert facts(tmp_path)["held-out"].strip() == "best 0.500 at step 2, first 0.500, last 0.500"
    scored = {"step": 1, "heldout/score": 0.5, "heldout/stderr": 0.0312}
    log(tmp_path, scored | {"heldout/pass_at_1": 0.5 + 1e-12})
    assert facts(tmp_path)["held-out"].strip() == "best 0.500 ± 0.031 at step 1, first 0.500, last 0.500"
    log(tmp_path, scored | {"heldout/pass_at_1": 0.25})
    assert facts(tmp_path)["held-out"].strip().startswith("best 0.500 ± 0.031 (0.250 correct) at step 1,")


def test_a_run_that_was_shortened_goes_on_after_its_last_checkpoint(tmp_path: Path) -> None:
    begin(tmp_path, step=8, steps=6)
    save(tmp_path, 4, 8)
    assert next(standing(tmp_path)) == "mine: finished, 8 of 6 steps"
    assert facts(tmp_path)["train on"].endswith("--steps 16")


def test_commands_are_for_the_working_directory_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    start = begin(Path("report"))
    save(Path("report"), 2)
    assert shown(Path("report"), start) == "./report"
    assert shown(Path("runs/mine"), start) == "runs/mine"
    assert shown(Path("-x/a b"), start) == "'./-x/a b'"
    assert shown(Path("/elsewhere"), start) == "/elsewhere"
    assert "dvp-train ./report; it continues after step 2" in facts(Path("report"))["resume"]
    monkeypatch.chdir(tmp_path / "other")
    resume = facts(tmp_path / "one" / "report")["resume"]
    assert resume.strip().startswith(f"cd {tmp_path}/one && ")
    assert f"dvp-train {tmp_path}/one/report; it" in resume


def test_several_ranks_start_as_several_ranks(tmp_path: Path) -> None:
    begin(tmp_path, ranks="4")
    assert f"torchrun --nproc-per-node 4 -m dvp_trainer {tmp_path}; it" in facts(tmp_path)["resume"]


def test_a_trainer_that_was_replaced_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replaced = begin(tmp_path)
    newest = begin(tmp_path, pid="2")
    conclude(replaced, tmp_path, html=True)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "report.html").exists()
    conclude(newest, tmp_path, html=True)
    assert "mine: stopped at step 0 of 6" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


def test_a_failure_is_logged_and_hides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    start = begin(tmp_path)
    (tmp_path / "report.html").mkdir()

    def run() -> None:
        try:
            raise KeyError("the cause")
        finally:
            conclude(start, tmp_path, html=True)

    with pytest.raises(KeyError, match="the cause"):
        run()
    assert "report.html could not be written" in caplog.text
    assert "stopped at step 0" in capsys.readouterr().out


def test_a_folder_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", "starts.jsonl")

    start = begin(tmp_path)
    monkeypatch.setattr(Path, "read_text", refuse)
    conclude(start, tmp_path, html=True)
    assert all(record.exc_info is None for record in caplog.records)
    assert "Permission denied: 'starts.jsonl'; dvp-train report" in caplog.text


def test_reading_changes_nothing(tmp_path: Path) -> None:
    begin(tmp_path)
    save(tmp_path, 2)
    (tmp_path / "checkpoints").chmod(0o755)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert list(standing(tmp_path))
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert (tmp_path / "checkpoints").stat().st_mode & 0o777 == 0o755
