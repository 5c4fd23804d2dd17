"""A harness plays the prompts of a run, and the run trains on what it played."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from dvp_trainer.report.sinks import read_metrics
from dvp_trainer.resume.ledger import read_ledger
from tests.kit.harness import Harness
from tests.kit.replicas import ReplicaProcess
from tests.kit.runs import HELDOUT, MODEL, config, run_trainer

PLAYED = {
    "episodes__harness": "true",
    "reward__name": "given",
    "sampling__max_tokens": "4",
    "batch__groups": "2",
    "checkpoint__interval": "1",
}


def replica(folder: Path, run_id: str, url: str) -> ReplicaProcess:
    args = ["--model", str(MODEL), "--redis-url", url, "--run-id", run_id, "--threads", "1"]
    return ReplicaProcess(folder, *args)


@contextmanager
def playing(url: str, **options: Any) -> Iterator[Harness]:
    """A harness in a thread."""
    harness, done = Harness(url, **options), Event()

    def play() -> None:
        while not done.is_set():
            harness.play_one()

    thread = Thread(target=play)
    thread.start()
    try:
        yield harness
    finally:
        done.set()
        thread.join()


def trained(out: Path) -> list[str]:
    return [entry["job_id"] for entry in read_ledger(out / "consumed.jsonl") if entry["outcome"] == "trained"]


def test_a_run_trains_on_episodes_and_is_evaluated_on_them(tmp_path: Path, broker_url: str, run_id: str) -> None:
    evaluated = {"data__heldout": str(HELDOUT), "evaluate__interval": "3", "evaluate__limit": "4"}
    flags = config(tmp_path, run_id, broker_url, steps="3", **PLAYED, **evaluated, batch__max_staleness="0")
    with replica(tmp_path / "replica", run_id, broker_url) as served, playing(served.url) as harness:
        done = run_trainer(flags)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["step"]]
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["mismatch/k3_kl"] < 1e-6, "both sides agree on the log-probs of both turns"
        assert record["length/environment_mean"] > 0
        assert record["episodes/turns_mean"] == 2
        assert record["episodes/forks_mean"] == record["episodes/drifted_mean"] == 0
        assert record["episodes/guessed_mean"] == 1
    assert len(trained(tmp_path / "run")) == 6
    assert len(harness.given) >= 6 * 4 + 2 * 4
    assert "heldout/score" in records[-1]


def test_a_harness_that_gives_no_reward_leaves_it_to_the_trainer(tmp_path: Path, broker_url: str, run_id: str) -> None:
    flags = config(tmp_path, run_id, broker_url, steps="1", **(PLAYED | {"reward__name": "arithmetic"}))
    with replica(tmp_path / "replica", run_id, broker_url) as served, playing(served.url, turns=1, rewards=False):
        done = run_trainer(flags)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert record["reward/failed"] == 0
    assert 0 <= record["reward/mean"] <= 1


def test_episodes_that_were_cut_off_count_as_too_long(tmp_path: Path, broker_url: str, run_id: str) -> None:
    flags = config(tmp_path, run_id, broker_url, steps="1", **PLAYED, reward__overlong="drop")
    with replica(tmp_path / "replica", run_id, broker_url) as served, playing(served.url, truncated=True):
        done = run_trainer(flags)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert record["length/truncated_share"] == 1
    assert record["grad/norm"] == 0, "they give no gradient"


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"episodes__harness": "false"}, "reward.name is 'given', but nobody gives rewards: episodes.harness is false"),
        (
            {"broker__stall_timeout_s": "60"},
            "episodes.idle_s is 120, but must be less than broker.stall_timeout_s = 60",
        ),
        ({"data__chat_template": "mine.jinja"}, "data.chat_template: the replicas render the turns of episodes"),
    ],
)
def test_what_cannot_be_played_is_refused_at_start(
    tmp_path: Path, broker_url: str, run_id: str, changes: dict[str, str], refusal: str
) -> None:
    done = run_trainer(config(tmp_path, run_id, broker_url, **(PLAYED | changes)))
    assert done.returncode == 2
    assert refusal in done.stderr
