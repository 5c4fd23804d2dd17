"""`make chaos` in short, with and without episodes: every fail point, some events of each kind, and the accounting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import EPISODES, REDIS, conduct, page
from tests.chaos.storm import SHORT, SHORT_AMID_EPISODES
from tests.kit.gateway import needs_haproxy


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
    # Evidence that the run really went through the storm.
    run, audit, processes = (outcome.accounting[name] for name in ("Run", "Audit", "Processes"))
    missed = processes.get("events that only root can bring about", 0)
    assert outcome.accounting["Events"]["all"] == SHORT.num_events - missed
    assert outcome.accounting["Kills at fail points"]["least hits of one"] == SHORT.hits
    assert "| lost | 0 |" in page(outcome.accounting)
    # The oracle can tell a version from the one before it.
    assert audit["sensitivity"] > 0.5
    assert run["parameters equal an undisturbed run's"] is (True if deterministic else None)


@needs_haproxy
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_episode_is_lost_whoever_dies(tmp_path: Path) -> None:
    outcome = conduct(tmp_path, SHORT_AMID_EPISODES, 1, None, deterministic=True, fsync="always")
    assert outcome.faults == []
    run, audit, processes = (outcome.accounting[name] for name in ("Run", "Audit", "Processes"))
    assert outcome.accounting["Events"]["all"] == SHORT_AMID_EPISODES.num_events
    assert processes["episodes under way at events"] >= SHORT_AMID_EPISODES.num_events
    for role in ("broker", "gateway", "harness", "replica", "trainer"):
        assert outcome.accounting["Events"][f"kill {role}"] >= 3
    assert "| twice | 0 |" in page(outcome.accounting, EPISODES)
    # The trained episodes had several turns, and the oracle can tell the versions that drew them.
    assert audit["environment_tokens"] > 0
    assert audit["sensitivity"] > 0.5
    assert run["parameters equal an undisturbed run's"] is True
