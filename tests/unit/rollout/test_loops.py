"""Replicas that lose the broker at one moment do not come back at one moment."""

from __future__ import annotations

from itertools import islice

from services.rollout.loops import MAX_DELAY_S, MIN_DELAY_S, pauses


def test_pauses_grow_and_differ() -> None:
    one, other = (list(islice(pauses(), 30)) for _ in range(2))
    assert one != other
    assert all(0 < pause <= MAX_DELAY_S for pause in one)
    assert MIN_DELAY_S / 2 <= one[0] <= MIN_DELAY_S
    assert min(one[10:]) >= MAX_DELAY_S / 2
    assert len({round(pause, 6) for pause in one[10:]}) > 1
