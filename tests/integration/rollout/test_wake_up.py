"""A replica that was stopped for longer than its lease commits nothing twice when it wakes up, and keeps working."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from dvp_rl.contract.group import Group
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.transport import failpoints
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import Submission
from tests.kit.replicas import ReplicaProcess
from tests.kit.wait import until


def job(run_id: str, name: str) -> Job:
    sampling = Sampling(max_tokens=4)
    return Job(job_id=name, run_id=run_id, prompt_ids=[5, 6, 7], n=2, sampling=sampling, sink=Sink.TRAIN)


async def replicas_of(groups: GroupQueue, count: int) -> dict[str, str]:
    """The next `count` groups: job ids, and the replicas that answered them."""
    found: dict[str, str] = {}
    while len(found) < count:
        for delivery in await groups.read(9, 1000):
            assert isinstance(delivery.item, Group)
            assert delivery.job_id not in found
            found[delivery.job_id] = delivery.item.replica_id
    return found


async def test_a_stopped_replica_commits_nothing_twice(
    model: Path, broker_url: str, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    lease = TrainerLease(broker, "test")
    fence = await lease.acquire()
    args = ["--model", str(model), "--engine", "fake", "--redis-url", broker_url, "--run-id", run_id, "--lease-s", "1"]
    trap = {failpoints.VARIABLE: "commit.before=stop"}
    with ReplicaProcess(tmp_path / "a", *args, "--replica-id", "stopped", variables=trap) as stopped:
        await Submission(broker).submit([job(run_id, "first")], fence=fence, limit=9)
        until(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
        groups = GroupQueue(broker, fence=fence)
        with ReplicaProcess(tmp_path / "b", *args, "--replica-id", "successor") as successor:
            assert await replicas_of(groups, 1) == {"first": "successor"}
        assert "taking over job first: replica stopped died or hangs" in successor.log
        os.kill(stopped.pid, signal.SIGCONT)
        until(lambda: "job first: the lease of entry" in stopped.log)
        # It is the only replica left, and works like any other.
        await Submission(broker).submit([job(run_id, "second")], fence=fence, limit=9)
        assert await replicas_of(groups, 1) == {"second": "stopped"}
    assert int(await broker.redis.hget(broker.keys.counters, "committed")) == 2
    assert await broker.redis.xlen(broker.keys.jobs) == 0
