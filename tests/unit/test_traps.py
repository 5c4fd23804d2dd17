"""The fail points at which `make chaos` sets traps."""

from __future__ import annotations

from tests.chaos.traps import AT_START, AT_STOP, OPERATOR, REPLICA, all_points, is_passed_once


def test_every_name_belongs_to_a_fail_point() -> None:
    names = {point.rpartition(".")[0] for point in all_points()}
    assert not {*REPLICA, *OPERATOR, *AT_START, *AT_STOP} - names


def test_a_start_a_stop_and_an_operator_pass_their_points_once() -> None:
    once = {point for point in all_points() if is_passed_once(point)}
    assert {"restore.before", "takeover.after", "lease_release.before", "replay.after"} <= once
    assert not {"commit.before", "renew.after", "checkpoint.after", "beat_trainer.before"} & once
