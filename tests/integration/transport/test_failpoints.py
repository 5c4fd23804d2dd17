"""Fail points are off by default, and the queue survives a process that is killed at one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.keys import REPLICAS, TRAINER
from dvp_rl.transport import failpoints
from dvp_rl.transport.roles import SCRIPTS
from tests.chaos.traps import all_points
from tests.integration.transport.rig import BLOCK_MS, SHORT_LEASE_MS, Rig
from tests.kit.records import make_group
from tests.kit.wait import WITHIN_S

VICTIM = """
import asyncio, sys
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.jobs import JobQueue
from tests.integration.transport.rig import make_group

async def main(url, run_id):
    async with await Broker.connect(url, run_id) as broker:
        replica = JobQueue(broker, "victim")
        (lease,) = await replica.claim(1, 1000)
        await replica.commit(lease, make_group(lease.job, "victim"))

asyncio.run(main(*sys.argv[1:]))
"""


def _die_at(point: str, url: str, run_id: str) -> int:
    environment = os.environ | {failpoints.VARIABLE: f"{point}=kill"}
    return subprocess.run(
        [sys.executable, "-c", VICTIM, url, run_id], env=environment, timeout=WITHIN_S, check=False
    ).returncode


@pytest.mark.parametrize(
    ("point", "deliveries"),
    [("read.replicas.after", 1), ("start.before", 1), ("start.after", 1), ("commit.before", 1), ("commit.after", None)],
)
async def test_a_replica_killed_anywhere_loses_nothing(
    rig: Rig, broker_url: str, point: str, deliveries: int | None
) -> None:
    (job,) = await rig.submit()
    assert _die_at(point, broker_url, rig.run_id) == -signal.SIGKILL
    if deliveries is not None:
        survivor = rig.replica("survivor", lease_ms=SHORT_LEASE_MS)
        (lease,) = await rig.expired(survivor)
        assert lease.deliveries == deliveries
        await survivor.commit(lease, make_group(job))
    (delivery,) = await rig.groups.read(9, BLOCK_MS)
    assert delivery.job_id == job.job_id
    assert await rig.length(rig.broker.keys.jobs) == 0
    assert await rig.counter("committed") == 1


def test_actions_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "one=raise, two:3=raise")
    failpoints._traps.cache_clear()
    try:
        with pytest.raises(failpoints.FailPointError, match="one"):
            failpoints.failpoint("one")
        failpoints.failpoint("one")
        for _ in range(2):
            failpoints.failpoint("two")
        with pytest.raises(failpoints.FailPointError):
            failpoints.failpoint("two")
        failpoints.failpoint("three")
    finally:
        monkeypatch.undo()
        failpoints._traps.cache_clear()
        failpoints._passes.clear()


@pytest.mark.parametrize("text", ["x", "x=explode", "x:0=kill", "=kill", "x:y=kill"])
def test_a_bad_setting_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(text))):
        failpoints.parse(text)


def test_several_points() -> None:
    assert failpoints.parse("a.before=kill,b:2=stop") == {"a.before": (1, "kill"), "b": (2, "stop")}
    assert failpoints.parse("") == {}


def test_every_fail_point_in_the_code_is_one_that_processes_are_killed_at() -> None:
    root = Path(failpoints.__file__).parents[3]
    code = "".join(path.read_text() for folder in ("services", "trainer") for path in (root / folder).rglob("*.py"))
    written = re.findall(r"""failpoint\(f?["']([^"']+)["']\)""", code)
    assert len(written) == len(re.findall(r"(?<!def )\bfailpoint\(", code)), "a name that this test cannot read"
    names = {name for name in written if "{" not in name} | {f"read.{group}.after" for group in (REPLICAS, TRAINER)}
    assert names == {*failpoints.BESIDES_SCRIPTS, *failpoints.IN_SENDING}
    assert {name for name in written if "{" in name} == {"{name}.before", "{name}.after", "read.{group}.after"}
    assert names - {*failpoints.IN_SENDING} <= {*all_points()}


def test_every_script_name_is_a_legal_fail_point() -> None:
    for name in SCRIPTS:
        assert failpoints.parse(f"{name}.before=kill")
