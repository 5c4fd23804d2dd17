"""Cost of 1,000 waiting client jobs for training, and their throughput: steps and clients' samples per second without
clients, with clients limited to their default share of the replica, and with clients allowed all of it.

A real `dvp-rollout` with the fake engine (200 ms per sample, 32 at once), a real broker, and a trainer without a model:
a step is 8 groups of 8 samples, and the next one is submitted when all have arrived. Without clients, a step takes two
rounds of the engine.

    python -m tests.benchmarks.shares [--seconds 20] [--samples 16]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from dvp_rl.contract.job import Job, Sink, job_id
from dvp_rl.rollout.settings import RolloutSettings
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import Submission
from tests.kit.replicas import ReplicaProcess

RESULTS = Path(__file__).parent / "results" / "shares.json"
MODEL = Path(__file__).parents[2] / "deploy/demo/model"
RUN_ID = "bench"
SERVICE_S, MAX_BATCH = 0.2, 32
GROUPS, SAMPLES = 8, 8
CLIENT_JOBS = 1_000
WARM_UP = 2
"""Warm-up steps, with the clients' jobs already waiting."""
SHARE: float = RolloutSettings.model_fields["client_share"].default


class Rates(NamedTuple):
    steps_per_s: float
    client_samples_per_s: float


class Trainer:
    """Submits the groups of one step at a time and waits for all of them."""

    def __init__(self, broker: Broker, fence: int) -> None:
        self._submission, self._groups = Submission(broker), GroupQueue(broker, fence=fence)
        self._run_id, self._fence, self._next = broker.run_id, fence, 0

    async def step(self) -> None:
        positions = range(self._next, self._next + GROUPS)
        jobs = [_job(job_id(self._run_id, position, 0), SAMPLES, Sink.TRAIN) for position in positions]
        self._next += GROUPS
        await self._submission.submit(jobs, fence=self._fence, limit=GROUPS)
        received = 0
        while received < GROUPS:
            deliveries = await self._groups.read(GROUPS, 1_000)
            await self._groups.settle(trained=[delivery.job_id for delivery in deliveries])
            await self._groups.acknowledge(deliveries)
            received += len(deliveries)


def _job(name: str, n: int, sink: Sink) -> Job:
    return Job(job_id=name, run_id=RUN_ID, prompt_ids=[1, 2, 3], n=n, sink=sink)


async def measure(url: str, client_jobs: int, samples: int, seconds: float) -> Rates:
    async with await Broker.connect(url, RUN_ID) as broker, TrainerLease(broker, "benchmark").held() as fence:
        for number in range(client_jobs):
            job = _job(f"client-{number}", samples, Sink.CLIENT)
            await Submission(broker).submit_client(job, limit=client_jobs)
        trainer, steps = Trainer(broker, fence), 0
        for _ in range(WARM_UP):
            await trainer.step()
        done, start = await _num_done(broker), time.monotonic()
        while (passed := time.monotonic() - start) < seconds:
            await trainer.step()
            steps += 1
        return Rates(steps / passed, samples * (await _num_done(broker) - done) / passed)


async def _num_done(broker: Broker) -> int:
    """Number of clients' jobs that have ended."""
    return int(await broker.redis.zcard(broker.keys.client_expiry))


def run(share: float, client_jobs: int, samples: int, seconds: float, folder: Path) -> Rates:
    with EmbeddedBroker(folder / "broker") as broker:
        options = ["--model", str(MODEL), "--engine", "fake", "--redis-url", broker.url, "--run-id", RUN_ID]
        options += ["--max-batch", str(MAX_BATCH), "--client-share", str(share)]
        options += ["--fake.service-time-s", str(SERVICE_S)]
        with ReplicaProcess(folder / "replica", *options):
            return asyncio.run(measure(broker.url, client_jobs, samples, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="measured for each share")
    parser.add_argument("--samples", type=int, default=16, help="samples of one client's job")
    given = parser.parse_args()
    cases = {"no clients": (SHARE, 0), "a share": (SHARE, CLIENT_JOBS), "all": (1.0, CLIENT_JOBS)}
    results: dict[str, dict[str, float]] = {}
    print(f"{'clients have':<14} {'steps/s':>8} {'of quiet':>9}   {'their samples/s':>15}")
    for name, (share, client_jobs) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            rates = run(share, client_jobs, given.samples, given.seconds, Path(folder))
        quiet = results["no clients"]["steps_per_s"] if results else rates.steps_per_s
        of_quiet = rates.steps_per_s / quiet
        results[name] = {"client_share": share, **rates._asdict(), "of_quiet": of_quiet}
        print(
            f"{name:<14} {rates.steps_per_s:>8.2f} {of_quiet:>9.0%}   {rates.client_samples_per_s:>15.1f}", flush=True
        )
    ratio = results["a share"]["steps_per_s"] / results["all"]["steps_per_s"]
    print(f"steps with a share / with all: {ratio:.2f}")
    RESULTS.parent.mkdir(exist_ok=True)
    result = {**vars(given), "a share / all": ratio, "clients_have": results}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
