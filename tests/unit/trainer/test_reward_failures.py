"""What a run says about failed rewards, and when it ends because of them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.config import RewardSection
from dvp_trainer.data.prompts import Row
from dvp_trainer.data.reward_failures import FILE, RewardFailures
from dvp_trainer.data.reward_pool import RewardResult
from dvp_trainer.options import OnError

ROW = Row(3, "40+6=", "46")
FINE = RewardResult(1.0, None, 0.1)
BAD = RewardResult(None, "row 3: KeyError: 'secret'", 0.1, "Traceback: here")
SLOW = RewardResult(None, "row 3: took longer than reward.timeout_s allows", 10.0)


def failures(tmp_path: Path, on_error: OnError = OnError.ZERO) -> RewardFailures:
    return RewardFailures(RewardSection(name="my:reward", on_error=on_error), tmp_path / "out", "sums", patience=4)


def look(found: RewardFailures, *results: RewardResult) -> None:
    found.look_at(ROW, ["45"] * len(results), results)


def test_failures_between_successes_never_end_a_run(tmp_path: Path) -> None:
    found = failures(tmp_path)
    for _ in range(5):
        look(found, BAD, BAD, FINE, BAD)
    look(found, SLOW, SLOW)
    assert found.num_timed_out == 2


def test_nothing_but_failures_ends_a_run(tmp_path: Path) -> None:
    found = failures(tmp_path)
    look(found, FINE, SLOW, BAD)
    with pytest.raises(
        ConfigError, match=r"'my:reward' failed for all of the last 4 completions: sums, row 3: KeyError"
    ):
        look(found, BAD, BAD, FINE)


def test_the_first_failure_is_told_once_and_kept_for_the_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = failures(tmp_path)
    look(found, BAD, SLOW, FINE)
    (told,) = caplog.messages
    assert told.startswith("a reward failed and counts as 0 (row 3: KeyError)")
    assert "secret" not in told
    file = tmp_path / "out" / FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    parts = ["sums, row 3: KeyError: 'secret'", "Traceback: here", "40+6=", "45", "46"]
    assert file.read_text().split("\n")[1::3] == parts


def test_a_file_that_others_can_read_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / FILE
    file.touch()
    os.chmod(file, 0o644)
    look(failures(tmp_path), BAD)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_on_error_stop_ends_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"failed, and reward.on_error is 'stop': sums, row 3: took .*\(it is 10 s\)"):
        look(failures(tmp_path, OnError.STOP), FINE, SLOW)
