"""Idle shares of each side, from the groups that a step trained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from dvp_trainer.data.batch import Batch, ScoredGroup
from dvp_trainer.report.stopwatch import Coverage, Stopwatch
from tests.kit.records import make_sample, make_scored


def test_intervals_side_by_side_count_once() -> None:
    covered = Coverage()
    assert covered.add(1.0, 3.0) == 2.0
    assert covered.add(2.0, 3.5) == 0.5
    assert covered.add(0.0, 3.5) == 0.0
    assert covered.add(10.0, 11.0) == 1.0


def scored(replica: str, position: int, *, start: float, end: float, reward_s: float) -> ScoredGroup:
    made = make_scored([5, 6], [make_sample([7], [-1.0])] * 2, [0.0, 1.0], position=position)
    group = made.group.model_copy(update={"replica_id": replica, "generate_s": end - start})
    return replace(made, group=group, arrived=end, reward_s=reward_s)


def test_each_side_is_idle_for_what_it_did_not_work() -> None:
    watch = Stopwatch()
    with watch.measure("train", "training"):
        pass
    with watch.measure("publish", "publishing"):
        pass
    now = time.monotonic()
    batch = Batch(
        (
            scored("a", 0, start=now - 1e-9, end=now, reward_s=0.0),
            scored("b", 1, start=now - 1000, end=now, reward_s=1000.0),
        )
    )
    metrics = watch.lap(batch, 2)
    assert metrics["idle/generate"] == 0.0  # b's thousand seconds are more than the step took
    assert metrics["idle/reward"] == 0.0
    assert metrics["idle/train"] == pytest.approx(1 - metrics["time/train_s"] / metrics["time/step_s"])
    assert metrics["idle/publish"] == pytest.approx(1 - metrics["time/publish_s"] / metrics["time/step_s"])
    with watch.measure("train", "training"):
        pass
    assert watch.lap(batch, 2)["idle/generate"] == 1.0  # the same seconds do not count again


def test_swaps_are_those_between_tellings_of_replicas_that_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, start = Stopwatch(), time.monotonic()

    def idle_after(seconds: float, swaps_s: dict[str, float]) -> float | None:
        later = start + seconds
        with monkeypatch.context() as patched:
            patched.setattr(time, "monotonic", lambda: later)
            watch.tell_swaps(swaps_s)
        with watch.measure("train", "training"):
            pass
        return watch.lap(Batch((scored("a", 0, start=0.0, end=0.0, reward_s=0.0),)), 2).get("idle/swap")

    assert idle_after(10, {"a": 3.0, "b": 0.0}) is None
    assert idle_after(20, {"a": 8.0, "b": 1.0}) == pytest.approx(1 - (5 + 1) / 2 / 10, abs=1e-3)
    assert idle_after(30, {"a": 8.0, "b": 1.0}) == 1.0
    assert idle_after(40, {"a": 1.0, "b": 3.0, "c": 100.0}) == pytest.approx(1 - 2 / 10, abs=1e-3)


def test_a_part_is_measured_by_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = list[float]()

    @contextmanager
    def recorded(what: str, *, usual_s: float) -> Iterator[None]:
        usual.append(usual_s)
        yield

    monkeypatch.setattr("dvp_trainer.report.stopwatch.patient", recorded)
    watch = Stopwatch()
    with watch.measure("train", "training"):
        time.sleep(0.01)
    with watch.measure("publish", "publishing"):
        pass
    with watch.measure("train", "training"):
        pass
    assert usual[:2] == [0.0, 0.0]
    assert usual[2] >= 0.01
