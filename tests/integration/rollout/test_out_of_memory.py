"""A job that no replica has the memory for becomes a dead letter; jobs that run beside it do not suffer."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest

from dvp_rl.contract.group import DeadLetter, Group
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.health import queue_health
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import Submission
from tests.kit.models import make_model
from tests.kit.replicas import ReplicaProcess

CONTEXT = 2048
ROWS = 512
"""Rows whose whole context takes 4 GiB of keys and values in this model; other jobs take a hundredth of that."""
SPARE_BYTES = 512 * 2**20
NUM_GOOD = 30


def job(run_id: str, name: str, *, prompt: int = 3, n: int = 2) -> Job:
    sampling = Sampling(max_tokens=20)
    return Job(job_id=name, run_id=run_id, prompt_ids=[5] * prompt, n=n, sampling=sampling, sink=Sink.TRAIN)


@pytest.mark.slow
async def test_out_of_memory(broker_url: str, broker: Broker, run_id: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", hidden=256, kv_heads=4, context=CONTEXT, endless=True)
    args = ["--model", str(model), "--threads", "1", "--max-batch", str(ROWS), "--max-deliveries", "3"]
    args += ["--redis-url", broker_url, "--run-id", run_id]
    poison = job(run_id, "poison", prompt=CONTEXT - 96, n=ROWS)
    good = [job(run_id, f"good-{i}") for i in range(NUM_GOOD)]
    fence = await TrainerLease(broker, "test").acquire()
    groups, ended = GroupQueue(broker, fence=fence), {}
    with ReplicaProcess(tmp_path / "replica", *args) as replica, replica.client() as client:
        client.rollout(prompt_ids=[5], n=2)
        process = psutil.Process(replica.pid)
        limit = process.memory_info().vms + SPARE_BYTES
        process.rlimit(resource.RLIMIT_AS, (limit, limit))
        await Submission(broker).submit([*good[:9], poison, *good[9:]], fence=fence, limit=100)
        while len(ended) < 1 + NUM_GOOD:
            for delivery in await groups.read(99, 1000):
                assert delivery.job_id not in ended
                ended[delivery.job_id] = delivery.item
        assert len(client.rollout(prompt_ids=[5], n=2).samples) == 2
        log = replica.log
    letter = ended.pop("poison")
    assert isinstance(letter, DeadLetter)
    assert (letter.deliveries, "memory" in letter.error) == (3, True), letter.error
    assert all(isinstance(item, Group) for item in ended.values())
    assert log.count("job poison: generation failed") == 3
    assert "job good" not in log
    health = await queue_health(broker)
    assert (health.dead, health.jobs.backlog, health.jobs.pending, health.duplicates) == (1, 0, 0, 0)
