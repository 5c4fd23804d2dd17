"""What a run says about failed rewards, and when it ends because of them."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.engines.tokenizer import load_tokenizer
from dvp_trainer.config import RewardSection, TrainSettings
from dvp_trainer.data.prompts import Row
from dvp_trainer.data.rendering import open_heldout, open_training
from dvp_trainer.data.reward_failures import FILE, RewardFailures
from dvp_trainer.data.reward_pool import RewardPool, RewardResult
from dvp_trainer.data.scoring import Scorer
from dvp_trainer.options import OnError
from dvp_trainer.setup import scoring
from tests.kit.runs import MODEL

ROW = Row(3, "40+6=", "46")
FINE = RewardResult(1.0, None, 0.1)
BAD = RewardResult(None, "row 3: KeyError: 'secret'", 0.1, "Traceback: here")
SLOW = RewardResult(None, "row 3: took longer than reward.timeout_s allows", 10.0)


def failures(tmp_path: Path, on_error: OnError = OnError.ZERO) -> RewardFailures:
    return RewardFailures(RewardSection(name="my:reward", on_error=on_error), tmp_path / "out", "sums", patience=4)


def look(found: RewardFailures, *results: RewardResult, row: Row = ROW) -> None:
    found.look_at(row, ["45"] * len(results), results)


def test_failures_between_successes_never_end_a_run(tmp_path: Path) -> None:
    found = failures(tmp_path)
    for _ in range(5):
        look(found, BAD, BAD, FINE, BAD)
    look(found, SLOW, SLOW)
    assert found.num_timed_out == 2


def test_one_bad_row_never_ends_a_run(tmp_path: Path) -> None:
    """It would end at this row every time it is started again."""
    found = failures(tmp_path)
    look(found, *[BAD] * 12)
    with pytest.raises(ConfigError, match="failed for all of the last 13 completions"):
        look(found, BAD, row=Row(4, "1+1="))


def test_nothing_but_failures_ends_a_run(tmp_path: Path) -> None:
    found = failures(tmp_path)
    look(found, FINE, SLOW, BAD)
    look(found, BAD, row=Row(4, "1+1="))
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


# --- the trial before a run -------------------------------------------------------------------------------------------


@pytest.fixture
def misbehaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])


@asynccontextmanager
async def scorer(name: str, tmp_path: Path) -> AsyncIterator[Scorer]:
    async with RewardPool(name) as pool:
        section = RewardSection(name=name)
        yield Scorer(pool, load_tokenizer(MODEL), section, RewardFailures(section, tmp_path, "sums", patience=4))


async def test_the_trial_gives_whole_groups_to_trls_form(misbehaving: None, tmp_path: Path) -> None:
    async with scorer("misbehaving:standardised", tmp_path) as tried:
        await tried.try_on([ROW], n=4)
        with pytest.raises(ConfigError, match="row 3: StatisticsError: "):
            await tried.try_on([ROW], n=1)


@pytest.mark.parametrize("name", ["exact_match", "misbehaving:group"])
async def test_the_trial_takes_any_answer(misbehaving: None, tmp_path: Path, name: str) -> None:
    async with scorer(name, tmp_path) as tried:
        await tried.try_on([Row(0, "say it", "\ud800"), Row(1, "say it", ""), Row(2, "say it", "é")], n=2)


async def test_a_reward_that_works_for_one_row_is_tried_out_in_the_run(
    misbehaving: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scorer("misbehaving:reward", tmp_path) as tried:
        with caplog.at_level("INFO"):
            await tried.try_on([Row(0, "", "raise"), Row(1, "", "fine")], n=2)
    assert "sums: rewards of the answers of 2 rows, tried as completions: failed, 0.25" in caplog.text
    assert "empty" not in caplog.text


@pytest.mark.parametrize(
    ("name", "is_wrong"), [("blind", True), ("blind_trl", True), ("penalty", False), ("reward", False)]
)
async def test_a_reward_that_gives_answers_nothing_is_pointed_out(
    misbehaving: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, is_wrong: bool
) -> None:
    async with scorer(f"misbehaving:{name}", tmp_path) as tried:
        await tried.try_on([Row(0, "1+1=", "2"), Row(1, "2+2=", "4")], n=2)
    assert ("sums: no answer gets more than an empty completion" in caplog.text) == is_wrong


@pytest.mark.parametrize("trains", [True, False])
async def test_an_evaluation_tries_only_the_rows_that_it_scores(
    misbehaving: None, tmp_path: Path, trains: bool
) -> None:
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name, "answer": "1"}) + "\n")
    settings = TrainSettings(
        run_id="unit",
        out_dir=tmp_path,
        steps=1,
        model={"path": MODEL},
        data={"train": str(tmp_path / "train.jsonl"), "heldout": str(tmp_path / "heldout.jsonl")},
        reward={"name": "misbehaving:heldout_only"},
    )
    tokenizer = load_tokenizer(MODEL)
    opened = scoring(
        settings, tokenizer, open_training(settings, tokenizer), open_heldout(settings, tokenizer), trains=trains
    )
    if trains:
        with pytest.raises(ConfigError, match=r"train\.jsonl, row 0: KeyError: 'train'"):
            await opened.__aenter__()
    else:
        async with opened as (_, heldout):
            assert heldout is not None
