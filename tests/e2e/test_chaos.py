"""`make chaos` in short: every fail point, some kills of everything, and the accounting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import REDIS, SHORT, conduct


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("server", "deterministic"),
    [
        ("valkey", True),
        pytest.param(
            *("redis", False),
            marks=[pytest.mark.long, pytest.mark.skipif(not REDIS.exists(), reason="apt-get install redis-server")],
        ),
    ],
)
def test_nothing_is_lost_whoever_dies(tmp_path: Path, server: str, deterministic: bool) -> None:
    binary = REDIS if server == "redis" else None
    outcome = conduct(tmp_path, SHORT, 1, binary, deterministic=deterministic, fsync="always")
    assert outcome.faults == []
    # What the run has to show that it went through anything at all.
    accounting = outcome.accounting
    assert accounting["least hits of a fail point"] == SHORT.hits
    assert accounting["event replica"] == SHORT.replica_kills
    assert accounting["event trainer"] == SHORT.trainer_kills
    assert accounting["event broker"] == SHORT.broker_kills
    # The oracle can tell a version from the one before it.
    assert accounting["sensitivity"] > 0.5
    assert accounting["parameters equal an undisturbed run's"] is (True if deterministic else None)
