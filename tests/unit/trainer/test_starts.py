"""What a run keeps of every start, and what two runs are compared by."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.config import TrainSettings
from dvp_trainer.report import starts
from dvp_trainer.report.compare import comparison, read_runs, to_text, write_comparison
from dvp_trainer.report.outcome import outcome
from dvp_trainer.report.starts import (
    FILE,
    SETTINGS,
    Start,
    changes,
    describe_start,
    last_start,
    read_starts,
    that_trained,
    write_start,
)

PASSWORD, TOKEN = "hunter2", "a-token-that-is-long-enough-for-this-service"
SECRETS = [f"--broker.redis-url=redis://trainer:{PASSWORD}@host:1/0", f"--weights.token={TOKEN}"]


def make(out_dir: Path, *argv: str, step: int = 0, model: str = "0123456789abcdef") -> tuple[Start, TrainSettings]:
    """Settings of a run, and its start, which is written."""
    required = ["--run-id=mine", f"--out-dir={out_dir}", "--steps=6", "--model.path=m", "--data.train=d.jsonl"]
    settings = TrainSettings.load([*required, "--reward.name=math", *argv])
    start = describe_start(settings, step=step, model=model, machine={"ranks": "1"})
    out_dir.mkdir(exist_ok=True)
    write_start(start, settings, out_dir)
    return start, settings


def write_metrics(out_dir: Path, *records: dict[str, Any]) -> None:
    (out_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_settings_of_a_run_start_it_again(tmp_path: Path) -> None:
    _, settings = make(tmp_path, "--sampling.stop=a\n", "--optimizer.lr=3e-7", "--evaluate.log-min-p=-1e4", *SECRETS)
    assert TrainSettings.load(SECRETS, tmp_path / SETTINGS) == settings
    with pytest.raises(ConfigError, match=r"broker\.redis_url: its secret was masked .* DVP_TRAIN__BROKER__REDIS_URL"):
        TrainSettings.load(SECRETS[1:], tmp_path / SETTINGS)
    with pytest.raises(ConfigError, match=r"weights\.token: its secret was masked .* DVP_TRAIN__WEIGHTS__TOKEN"):
        TrainSettings.load(SECRETS[:1], tmp_path / SETTINGS)


def test_no_secret_is_kept(tmp_path: Path) -> None:
    start, _ = make(tmp_path, *SECRETS, f"--metrics.token={TOKEN}")
    kept = [file.read_text() for file in tmp_path.iterdir()] + [json.dumps(start.config())]
    assert len(kept) == 3
    assert not any(secret in text for secret in (PASSWORD, TOKEN) for text in kept)


@pytest.mark.parametrize(
    "argv",
    [
        ["--correction.veto=None"],
        ["--optimizer.max-grad-norm=inf", "--evaluate.correct-from=-inf"],
        ["--sampling.stop=a\u0085b\u2028c"],
        ["--sampling.stop=a:b@c", "--data.heldout=/data/qwen:v1@abc"],
    ],
)
def test_unusual_settings_are_kept_as_they_are(tmp_path: Path, argv: list[str]) -> None:
    start, settings = make(tmp_path, *argv)
    assert TrainSettings.load([], tmp_path / SETTINGS) == settings
    assert last_start(tmp_path) == start
    make(tmp_path, *argv, step=4)
    assert len(read_starts(tmp_path)) == 2


def test_every_setting_that_may_be_unset_is_kept_so(tmp_path: Path) -> None:
    _, settings = make(tmp_path)
    unset: list[str] = []
    for name, section in settings:
        for key in getattr(type(section), "model_fields", {}):
            flag = f"--{name}.{key}=None".replace("_", "-")
            try:
                changed = make(tmp_path, flag)[1]
            except ConfigError:
                continue  # it cannot be None
            assert TrainSettings.load([], tmp_path / SETTINGS) == changed, flag
            unset.append(f"{name}.{key}")
    assert {"correction.veto", "report.wandb_project", "weights.url", "data.limit"} <= set(unset)


def test_a_run_keeps_its_newest_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "MAX_STARTS", 3)
    for step in range(5):
        make(tmp_path, step=step)
    assert [each.step for each in read_starts(tmp_path)] == [2, 3, 4]


def test_every_start_is_added(tmp_path: Path) -> None:
    for step, lr in ((0, 1e-6), (4, 2e-6)):
        make(tmp_path, f"--optimizer.lr={lr}", step=step)
    assert [(each.step, each.settings["optimizer"]["lr"]) for each in read_starts(tmp_path)] == [(0, 1e-6), (4, 2e-6)]
    assert tomllib.loads((tmp_path / SETTINGS).read_text())["optimizer"]["lr"] == 2e-6
    make(tmp_path)
    assert [each.step for each in read_starts(tmp_path)] == [0, 4, 0]


def test_a_damaged_line_is_named_and_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the out_dir of a run: it has no starts\.jsonl"):
        last_start(tmp_path)
    make(tmp_path)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"at": 1}\n')
    with pytest.raises(ConfigError, match=r"starts\.jsonl: line 2.*\n?.*repair or move the file"):
        last_start(tmp_path)


def git(folder: Path, *command: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    return subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed here")
def test_the_commit_of_the_working_directory_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "mine"
    (repository / "inner").mkdir(parents=True)
    monkeypatch.chdir(repository / "inner")
    assert str(repository) not in make(tmp_path / "out")[0].code
    git(repository, "init", "--quiet")
    (repository / "reward.py").write_text("1")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "reward")
    git(repository, "tag", "a-tag")
    commit = git(repository, "rev-parse", "HEAD").strip()
    assert make(tmp_path / "out")[0].code[str(repository)] == commit
    (repository / "reward.py").write_text("2")
    assert make(tmp_path / "out")[0].code[str(repository)] == f"{commit}-dirty"


def test_without_git_a_run_starts_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    start, _ = make(tmp_path / "out")
    assert start.code == {}
    assert start.software["torch"]
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(starts, "GIT_TIMEOUT_S", 0.1)
    assert make(tmp_path / "out")[0].code == {}


RECORDS = (
    {"step": 0, "heldout/score": 0.5},
    {"step": 1, "reward/mean": 0.1, "mismatch/kl": 0.2, "mismatch/ratio_min": 0.5, "mismatch/ratio_max": 1.5},
    {"step": 2, "reward/mean": 0.3, "throughput/samples_per_second": 8, "time/step_s": 1.0}
    | {"heldout/score": 0.75, "heldout/stderr": 0.1, "heldout/pass_at_16": 0.9, "heldout/pass_at_1_from_0.5": 0.7},
    {"step": 3, "reward/mean": 0.5, "heldout/score": 0.75, "throughput/samples_per_second": 2, "time/step_s": 3.0},
)


def test_the_outcome_of_a_run() -> None:
    reached = outcome(RECORDS)
    assert (reached.steps, reached.reward_first, reached.reward_last) == (3, pytest.approx(0.3), pytest.approx(0.3))
    assert (reached.heldout_first, reached.heldout_last) == (0.5, 0.75)
    assert (reached.heldout_best, reached.heldout_best_step) == (0.75, 2)
    assert (reached.heldout_best_stderr, reached.heldout_best_correct) == (0.1, 0.7)
    assert (reached.kl, reached.largest_log_ratio) == (0.2, pytest.approx(math.log(2)))
    assert reached.samples_per_second == pytest.approx((8 + 6) / 4)
    assert (reached.veto, reached.pruned_share) == (None, None)


def test_the_outcome_of_nothing_and_of_a_ratio_of_zero() -> None:
    nothing = outcome([])
    assert nothing.steps == 0
    assert nothing.reward_first is nothing.heldout_best is nothing.heldout_best_step is nothing.kl is None
    assert outcome([{"step": 1, "mismatch/ratio_min": 0.0}]).largest_log_ratio == math.inf


def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    make(one, "--optimizer.lr=1e-6")
    make(other, "--optimizer.lr=2e-6", "--run-id=theirs", "--sampling.stop=x", model="fedcba9876543210")
    write_metrics(one, *RECORDS)
    write_metrics(other, {"step": 1, "reward/mean": 0.75})
    runs = read_runs([one, other])
    differences, figures = comparison(runs)
    assert differences.head == ("", "mine", "theirs")
    assert {str(row[0]): row[1:] for row in differences.rows} == {
        "sampling.stop": ("[]", '["x"]'),
        "optimizer.lr": ("1e-06", "2e-06"),
        "model's digest": ("0123456789abcdef", "fedcba9876543210"),
    }
    assert ("reward last", "0.3", "0.75") in [tuple(row) for row in figures.rows]
    assert list(to_text(differences))[:2] == ["Differences", f"  {'':14}  {'mine':16}  theirs"]
    write_comparison(runs, (differences, figures), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") >= 3
    assert 'aria-label="Reward, training"' in page
    assert "<td>2e-06</td>" in page


def test_starts_that_trained_nothing_are_left_out(tmp_path: Path) -> None:
    for step in (0, 4, 9, 6, 8, 8):
        make(tmp_path, step=step)
    starts = read_starts(tmp_path)
    assert [start.step for start in that_trained(starts, 12)] == [0, 4, 6, 8]
    assert that_trained(starts, 12)[-1] is starts[-1]
    assert [start.step for start in that_trained(starts, 8)] == [0, 4, 6]
    assert [start.step for start in that_trained(starts, 0)] == [0]
    assert that_trained(starts[-1:], 8) == starts[-1:], "earlier starts are no longer in the file"


def test_a_setting_that_changed_on_the_way_shows_both_values(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    before, _ = make(one, "--optimizer.lr=1e-6")
    now, _ = make(one, "--optimizer.lr=2e-6", "--sampling.stop=x", step=4)
    make(one, "--optimizer.lr=3e-6", step=6)
    make(other, "--optimizer.lr=1e-6")
    write_metrics(one, *({"step": step, "reward/mean": 0.5} for step in range(1, 7)))
    write_metrics(other, {"step": 1, "reward/mean": 0.5})
    differences, _ = comparison(read_runs([one, other]))
    assert dict(row[::2] for row in differences.rows) == {"sampling.stop": "[]", "optimizer.lr": "1e-06"}
    assert dict(row[:2] for row in differences.rows) == {
        "sampling.stop": '[], from step 4 ["x"]',
        "optimizer.lr": "1e-06, from step 4 2e-06",
    }
    assert changes(before, now) == {
        "sampling.stop": 'sampling.stop = ["x"] (was [])',
        "optimizer.lr": "optimizer.lr = 2e-06 (was 1e-06)",
    }


def test_runs_of_one_id_are_named_by_their_folders(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        make(folder)
    differences, _ = comparison(read_runs(folders))
    assert differences.head == ("", *map(str, folders))
    assert list(differences.rows) == [("none", "", "")]
