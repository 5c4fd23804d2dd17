"""Cost of one job while 1,000 and while 1,000,000 jobs wait in the queue: to enqueue, claim, commit and acknowledge.

Both queues are on one broker and measured in turns, so that a busy machine disturbs both alike. CPU time per job is the
broker's alone; the time per job includes this client.

    python -m tests.benchmarks.queue [--many 1000000] [--binary /usr/bin/redis-server]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from dvp_rl.contract.job import Job, Sink, job_id
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.jobs import JobQueue, Lease
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import BATCH, Submission
from tests.kit.records import make_group, make_sample

RESULTS = Path(__file__).parent / "results" / "queue.json"
FEW, MANY = 1_000, 1_000_000
ROUNDS, JOBS = 40, 256
"""Number of rounds, and of jobs enqueued, claimed, committed and acknowledged per round."""
CLAIM = 8
"""Jobs that a replica claims at once."""
GOAL = 1.2
NO_LIMIT = 10**9
SAMPLE = make_sample([1], [-0.5])


@dataclass
class Costs:
    """Microseconds per job, by operation; `wall` has one entry per round."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    broker_cpu: dict[str, float] = field(default_factory=dict)
    """Mean over all rounds: the CPU clock of a process ticks too slowly for one round."""

    @contextmanager
    def of(self, operation: str, broker: psutil.Process) -> Iterator[None]:
        cpu, start = sum(broker.cpu_times()[:2]), time.perf_counter()
        yield
        self.wall.setdefault(operation, []).append(1e6 * (time.perf_counter() - start) / JOBS)
        spent = sum(broker.cpu_times()[:2]) - cpu
        self.broker_cpu[operation] = self.broker_cpu.get(operation, 0.0) + 1e6 * spent / (JOBS * ROUNDS)


class Queue:
    """A run with `waiting` jobs, and the submitter, replica and trainer that work on it."""

    def __init__(self, broker: Broker, fence: int, waiting: int) -> None:
        self.waiting, self.costs = waiting, Costs()
        self._broker, self._fence, self._next = broker, fence, 0
        self._submission, self._groups = Submission(broker), GroupQueue(broker, fence=fence)
        self._replica = JobQueue(broker, "replica")

    async def fill(self) -> None:
        while self._next < self.waiting:
            await self._submit(min(16 * BATCH, self.waiting - self._next))

    async def round(self, process: psutil.Process) -> None:
        with self.costs.of("enqueue", process):
            await self._submit(JOBS)
        leases: list[Lease] = []
        with self.costs.of("claim", process):
            while len(leases) < JOBS:
                leases += await self._replica.claim_expired(CLAIM) or await self._replica.claim(CLAIM, 1)
        groups = [make_group(lease.job, samples=[SAMPLE]) for lease in leases]
        with self.costs.of("commit", process):
            for lease, group in zip(leases, groups, strict=True):
                await self._replica.commit(lease, group)
        with self.costs.of("acknowledge", process):
            taken = 0
            while taken < JOBS:
                deliveries = await self._groups.read(64, 1_000)
                await self._groups.settle(trained=[delivery.job_id for delivery in deliveries])
                await self._groups.acknowledge(deliveries)
                taken += len(deliveries)

    async def _submit(self, count: int) -> None:
        run_id = self._broker.run_id
        jobs = [
            Job(job_id=job_id(run_id, position, 0), run_id=run_id, prompt_ids=[1, 2, 3], sink=Sink.TRAIN)
            for position in range(self._next, self._next + count)
        ]
        self._next += count
        await self._submission.submit(jobs, fence=self._fence, limit=NO_LIMIT)


@asynccontextmanager
async def queue(url: str, waiting: int) -> AsyncIterator[Queue]:
    broker = await Broker.connect(url, f"bench-{waiting}")
    async with broker, TrainerLease(broker, "benchmark").held() as fence:
        yield Queue(broker, fence, waiting)


async def measure(url: str, broker_pid: int, many: int) -> tuple[Costs, Costs, float]:
    """Costs with few and with many waiting, and bytes of broker memory per waiting job."""
    process = psutil.Process(broker_pid)
    async with queue(url, FEW) as few, queue(url, many) as full:
        before = process.memory_info().rss
        await few.fill()
        await full.fill()
        memory = (process.memory_info().rss - before) / many
        for turn in range(-2, ROUNDS):
            if turn == 0:
                few.costs, full.costs = Costs(), Costs()
            for each in (few, full) if turn % 2 else (full, few):
                await each.round(process)
    return few.costs, full.costs, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--many", type=int, default=MANY, help="waiting jobs of the full queue")
    parser.add_argument("--binary", type=Path, help="redis-server or valkey-server to use instead of the embedded one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder), binary=given.binary) as broker:
        assert broker.pid is not None
        few, full, memory = asyncio.run(measure(broker.url, broker.pid, given.many))
    print(
        f"microseconds per job, median of {ROUNDS} rounds of {JOBS} jobs; {memory:.0f} bytes of broker memory per job"
    )
    print(f"{'':<12} {FEW:>10,} {given.many:>10,} {'ratio':>6}   CPU of the broker")
    ratios, rows = {}, {}
    for operation, few_us in few.wall.items():
        many_us = full.wall[operation]
        ratio = ratios[operation] = median(b / a for a, b in zip(few_us, many_us, strict=True))
        cpu = few.broker_cpu[operation], full.broker_cpu[operation]
        rows[operation] = {"us": [median(few_us), median(many_us)], "ratio": ratio, "broker_cpu_us": cpu}
        own = f"{cpu[0]:.1f} -> {cpu[1]:.1f}"
        print(f"{operation:<12} {median(few_us):>10.1f} {median(many_us):>10.1f} {ratio:>6.2f}   {own}")
    print(f"goal: every ratio below {GOAL}; highest {max(ratios.values()):.2f}")
    RESULTS.parent.mkdir(exist_ok=True)
    result = {"goal": GOAL, "waiting": [FEW, given.many], "bytes_per_job": memory, "operations": rows}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
