"""Groups per second with 1, 2 and 4 replicas, and the CPU time that one group costs each process.

Real `dvp-rollout` processes with the fake engine (200 ms per group, 4 groups at once), a real broker with AOF, and a
consumer that reads, settles and acknowledges groups of 8 x 2,304 tokens as the trainer does. Linear is the rate of one
replica times their number; the ceiling is 20 groups per second and replica.

    python -m tests.benchmarks.throughput [--seconds 15] [--binary /usr/bin/redis-server]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dvp_rl.contract.job import Job, Sink, job_id
from dvp_rl.contract.sampling import Sampling
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import Submission
from tests.kit.replicas import ReplicaProcess

RESULTS = Path(__file__).parent / "results" / "throughput.json"
MODEL = Path(__file__).parents[2] / "deploy/demo/model"
REPLICAS = (1, 2, 4)
SERVICE_S, JOBS_AT_ONCE, SAMPLES, TOKENS, PROMPT = 0.2, 4, 8, 2304, 200
BATCH = 8
"""Groups that the consumer settles, acknowledges and replaces together."""
IN_FLIGHT = 4 * JOBS_AT_ONCE
"""Jobs per replica that are queued, running or waiting for the consumer."""
GOAL = 0.9


class Consumer:
    """A trainer without a model."""

    def __init__(self, broker: Broker, fence: int) -> None:
        self._submission, self._groups = Submission(broker), GroupQueue(broker, fence=fence)
        self._run_id, self._fence, self._next = broker.run_id, fence, 0
        self._prompt = np.arange(PROMPT) % 20

    async def submit(self, count: int) -> None:
        jobs = [
            Job(
                job_id=job_id(self._run_id, position, 0),
                run_id=self._run_id,
                prompt_ids=self._prompt,
                n=SAMPLES,
                sampling=Sampling(max_tokens=TOKENS),
                sink=Sink.TRAIN,
            )
            for position in range(self._next, self._next + count)
        ]
        self._next += count
        await self._submission.submit(jobs, fence=self._fence, limit=10**6)

    async def take(self, count: int) -> None:
        """Receives at least `count` groups, discards them and submits as many new jobs."""
        taken = 0
        while taken < count:
            deliveries = await self._groups.read(BATCH, 2_000)
            await self._groups.settle(trained=[delivery.job_id for delivery in deliveries])
            await self._groups.acknowledge(deliveries)
            await self.submit(len(deliveries))
            taken += len(deliveries)


@dataclass(frozen=True)
class Clock:
    """Wall clock, and CPU seconds by role; `elsewhere` is the CPU time of other programs."""

    wall: float
    cpu: dict[str, float]

    @classmethod
    def read(cls, replicas: list[int], broker: int) -> Clock:
        def cpu(pid: int) -> float:
            times = psutil.Process(pid).cpu_times()
            return float(times.user + times.system)

        roles = {"replica": sum(map(cpu, replicas)), "broker": cpu(broker), "consumer": cpu(psutil.Process().pid)}
        machine = psutil.cpu_times()
        busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
        return cls(time.perf_counter(), roles | {"elsewhere": busy - sum(roles.values())})


async def measure(url: str, run_id: str, replicas: list[int], broker_pid: int, seconds: float) -> dict[str, Any]:
    async with await Broker.connect(url, run_id) as broker, TrainerLease(broker, "benchmark").held() as fence:
        consumer, groups = Consumer(broker, fence), 0
        await consumer.submit(IN_FLIGHT * len(replicas))
        await consumer.take(4 * JOBS_AT_ONCE * len(replicas))
        start = Clock.read(replicas, broker_pid)
        while time.perf_counter() < start.wall + seconds:
            await consumer.take(BATCH)
            groups += BATCH
        end = Clock.read(replicas, broker_pid)
    wall = end.wall - start.wall
    cpu = {role: end.cpu[role] - start.cpu[role] for role in start.cpu}
    elsewhere = cpu.pop("elsewhere")
    return {
        "groups_per_s": groups / wall,
        "cpu_ms_per_group": {role: 1e3 * seconds / groups for role, seconds in cpu.items()},
        "cores": {"used": sum(cpu.values()) / wall, "elsewhere": elsewhere / wall, "there": psutil.cpu_count()},
    }


def run(count: int, seconds: float, binary: Path | None, folder: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker(folder / "broker", aof=True, binary=binary))
        options = ["--model", str(MODEL), "--engine", "fake", "--redis-url", broker.url, "--run-id", "bench"]
        options += ["--max-batch", str(SAMPLES * JOBS_AT_ONCE), "--fake.service-time-s", str(SERVICE_S)]
        options += ["--fake.num-tokens", str(TOKENS)]
        replicas = [stack.enter_context(ReplicaProcess(folder / str(i), *options)) for i in range(count)]
        assert broker.pid is not None
        return asyncio.run(measure(broker.url, "bench", [replica.pid for replica in replicas], broker.pid, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="measured for each number of replicas")
    parser.add_argument("--binary", type=Path, help="redis-server or valkey-server to use instead of the embedded one")
    given = parser.parse_args()
    results = []
    heads = ("replicas", "groups/s", "of linear", "of ceiling", "CPU ms per group: replica", "broker", "consumer")
    print(*heads, "cores elsewhere", sep="  ")
    for count in REPLICAS:
        with tempfile.TemporaryDirectory() as folder:
            result = run(count, given.seconds, given.binary, Path(folder))
        one = results[0]["groups_per_s"] if results else result["groups_per_s"]
        result = {
            "replicas": count,
            **result,
            "of_linear": result["groups_per_s"] / (count * one),
            "of_ceiling": result["groups_per_s"] * SERVICE_S / (count * JOBS_AT_ONCE),
        }
        results.append(result)
        cpu = result["cpu_ms_per_group"]
        print(
            f"{count:>8}  {result['groups_per_s']:>8.1f}  {result['of_linear']:>9.0%}  {result['of_ceiling']:>10.0%}  "
            f"{cpu['replica']:>25.1f}  {cpu['broker']:>6.1f}  {cpu['consumer']:>8.1f}  "
            f"{result['cores']['elsewhere']:>15.1f}",
            flush=True,
        )
    print(f"goal: {GOAL:.0%} of linear or more")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"goal_of_linear": GOAL, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
