"""`make chaos`: kills everything, everywhere, and accounts for every group and every token.

A real run on a real broker: two replicas, a trainer, HTTP clients, people at `dvp-queue`. Every fail point is hit, and
on top of that a seeded schedule kills and stops replicas, trainers and the broker, and wipes it.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from deploy.demo.fleet import interruptible
from services.contract.errors import ConfigError
from services.transport.broker import Broker
from services.transport.embedded import EmbeddedBroker
from tests.kit.forked import none_left
from tests.kit.models import make_model

from .audit import Audit, audit, final_parameters
from .system import LEASE_S, POLL_S, Layout, System, together
from .traffic import Traffic
from .traps import Role, Traps

LAST_STEPS = 3
STALL_S = 900.0
"""Ten processes that ran out of patience, one after the other, and the longest outage."""
REDIS = Path("/usr/bin/redis-server")


@dataclass(frozen=True)
class Plan:
    hits: int = 3
    """Of every fail point."""
    replica_kills: int = 100
    trainer_kills: int = 60
    broker_kills: int = 40
    stops: int = 40
    wipes: int = 3
    outages_s: tuple[float, ...] = (15.0, 30.0, 60.0, 300.0)
    """Seconds for which the broker is dead, or frozen."""
    pace_s: float = 1.0
    """Mean pause between two events."""

    def events(self, rng: random.Random) -> list[str]:
        events = ["replica"] * self.replica_kills + ["trainer"] * self.trainer_kills + ["broker"] * self.broker_kills
        events += ["wipe"] * self.wipes
        events += [f"{how} {seconds:g}" for how in ("dead", "frozen") for seconds in self.outages_s]
        events += [rng.choice(("stop replica", "stop trainer", "stop broker")) for _ in range(self.stops)]
        rng.shuffle(events)
        return events


FULL = Plan()
SHORT = Plan(hits=1, replica_kills=12, trainer_kills=8, broker_kills=6, stops=8, wipes=1, outages_s=(12.0,), pace_s=0.8)


class Outcome(NamedTuple):
    accounting: dict[str, object]
    faults: list[str]


async def run_chaos(layout: Layout, broker: EmbeddedBroker, plan: Plan) -> tuple[System, Traffic]:
    rng = random.Random(layout.seed)
    system = System(layout, broker, Traps(plan.hits, rng), rng)
    traffic = Traffic(system)
    async with together(system.keep(), traffic.run(), tell(system)):
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.operate())
            group.create_task(harm(system, traffic, plan, group))
        while system.traps.left:  # noqa: ASYNC110 - ends are polled for
            await asyncio.sleep(POLL_S)
        await calm(system, traffic)
    await system.close()
    return system, traffic


async def tell(system: System) -> None:
    """How far it is, on standard error. Raises TimeoutError after STALL_S without a hit."""
    left, since = system.traps.left, time.monotonic()
    while True:
        await asyncio.sleep(10)
        missing = ", ".join(point for point, n in system.traps.missing.items() if n) if system.traps.left < 10 else ""
        events = sum(n for name, n in system.counts.items() if name.startswith("event"))
        step = system.layout.newest_step()
        sys.stderr.write(f"step {step}, {events} events, {system.traps.left} fail points to hit {missing}\n")
        if system.traps.left != left:
            left, since = system.traps.left, time.monotonic()
        elif left and time.monotonic() - since > STALL_S:
            raise TimeoutError(f"no fail point was hit for {STALL_S:g} s; to hit: {+system.traps.missing}")


async def harm(system: System, traffic: Traffic, plan: Plan, group: asyncio.TaskGroup) -> None:
    for event in plan.events(system.rng):
        await asyncio.sleep(system.rng.expovariate(1 / plan.pace_s))
        system.counts[f"event {event}"] += 1
        match event.split():
            case ["wipe"]:
                traffic.forget()
                await system.kill_broker(0.1, wipe=True)
                traffic.forget()
            case ["broker"]:
                await system.kill_broker(system.rng.uniform(0, 1.0))
            case ["dead", seconds]:
                await system.kill_broker(float(seconds))
            case ["frozen", seconds]:
                await system.stop_broker(float(seconds))
            case ["stop", "broker"]:
                await system.stop_broker(system.rng.uniform(0.3, 2.0))
            case ["stop", role]:
                long = system.rng.random() < 0.5
                seconds = system.rng.uniform(LEASE_S, 3 * LEASE_S) if long else system.rng.uniform(0.2, LEASE_S)
                victim = await system.victim(Role(role))
                group.create_task(system.stop(victim, seconds, replace=long and role == "trainer"))
            case [role]:
                system.kill(await system.victim(Role(role)))


async def calm(system: System, traffic: Traffic) -> None:
    """No harm any more: clients get their answers, and the trainer ends a few steps further on."""
    traffic.submitting = False
    for child in system.victims(Role.TRAINER):
        system.kill(child)
    system.steps = system.layout.newest_step() + LAST_STEPS
    async with asyncio.timeout(600):
        await system.finished.wait()
        while traffic.open:  # noqa: ASYNC110 - as above
            await asyncio.sleep(POLL_S)


async def leftovers(layout: Layout, broker: EmbeddedBroker) -> list[str]:
    """What should not be in the broker any more."""
    async with await Broker.connect(broker.url, layout.run_id) as connected:
        redis, keys = connected.redis, connected.keys
        pending = {"jobs": keys.jobs, "clients' jobs": keys.client_jobs, "evals": keys.evals}
        found = {name: await redis.xlen(key) for name, key in pending.items()}
        found["uncheckpointed"] = await redis.scard(keys.uncheckpointed)
        found["replicas"] = await redis.zcard(keys.replicas)
        found["lease"] = await redis.exists(keys.lease)
        callers = await redis.hgetall(keys.client_callers)
        found["jobs in work of callers"] = sum(int(value) for name, value in callers.items() if b":jobs:" in name)
        unowned = -sum(int(value) for name, value in callers.items() if b":bytes:" in name)
        for key in (keys.client_reserved, keys.client_held):
            rows = {name: int(size) for name, size in (await redis.hgetall(key)).items()}
            found[f"bytes that nobody holds of {key}"] = rows.pop(b":total", 0) - sum(rows.values())
            unowned += sum(rows.values())
        found["bytes of clients' rows that no caller has"] = unowned
    return [f"left in the broker: {name} {count}" for name, count in found.items() if count and name != "jobs"]


def conduct(folder: Path, plan: Plan, seed: int, binary: Path | None, deterministic: bool, fsync: str) -> Outcome:
    started = time.monotonic()
    layout = make_layout(folder, seed, deterministic)
    with (
        EmbeddedBroker(folder / "broker", aof=True, fsync=fsync, binary=binary) as broker,  # type: ignore[arg-type]
        none_left(),
    ):
        (folder / "broker.url").write_text(broker.url)
        system, traffic = asyncio.run(run_chaos(layout, broker, plan))
        faults = [*system.faults, *asyncio.run(leftovers(layout, broker))]
        result = audit(layout)
        faults += result.faults
        same = compare(layout, broker) if deterministic else None
        if same is False:
            faults.append("the final parameters differ from an undisturbed run's")
    accounting = account(system, traffic, result) | {
        "parameters equal an undisturbed run's": same,
        "seed": seed,
        "wall_s": round(time.monotonic() - started),
    }
    return Outcome(accounting, faults)


def make_layout(folder: Path, seed: int, deterministic: bool) -> Layout:
    data = folder / "data.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 60) for b in range(10, 60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_model(folder / "model", "qwen3", hidden=32, layers=1, seed=seed)
    layout = Layout(folder, f"chaos-{seed}", model, data, deterministic, seed)
    layout.logs.mkdir()
    return layout


def compare(layout: Layout, broker: EmbeddedBroker) -> bool:
    """An undisturbed run of as many steps, and whether it ends with the same parameters, bit for bit."""
    quiet = layout._replace(folder=layout.folder / "undisturbed", run_id=f"{layout.run_id}-undisturbed")
    quiet.logs.mkdir(parents=True)

    async def run() -> None:
        rng = random.Random(0)
        system = System(quiet, broker, Traps(0, rng), rng, num_replicas=1, steps=layout.newest_step())
        async with together(system.keep()), asyncio.timeout(600):
            await system.finished.wait()
        await system.close()

    asyncio.run(run())
    ours, theirs = final_parameters(layout), final_parameters(quiet)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def account(system: System, traffic: Traffic, result: Audit) -> dict[str, object]:
    hits = system.traps.hits
    return {
        "fail points": len(hits),
        "least hits of a fail point": min(hits.values()),
        "fail points hit": sum(hits.values()),
        **dict(sorted(system.counts.items())),
        **{f"client jobs {name}": count for name, count in sorted(traffic.counts.items())},
        **{name: len(value) if isinstance(value, list) else value for name, value in asdict(result).items()},
    }


def main(
    seed: Annotated[int, typer.Option(help="Of the schedule and of the run.")] = 0,
    short: Annotated[bool, typer.Option(help="A few kills of each kind.")] = False,
    server: Annotated[str, typer.Option(help="redis, valkey, or the path of a server.")] = "redis",
    deterministic: Annotated[bool, typer.Option(help="Synchronous, and compared with an undisturbed run.")] = True,
    fsync: Annotated[str, typer.Option(help="appendfsync of the broker: always or everysec.")] = "always",
    keep: Annotated[Path | None, typer.Option(help="Folder to leave everything in.")] = None,
) -> None:
    binary = {"redis": REDIS, "valkey": None}.get(server, Path(server))
    if binary is not None and not binary.exists():
        raise ConfigError(f"{binary} does not exist: apt-get install redis-server, or --server valkey")
    folder = keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    with interruptible():
        outcome = conduct(folder, SHORT if short else FULL, seed, binary, deterministic, fsync)
    for name, value in outcome.accounting.items():
        sys.stdout.write(f"{name:>45}  {value}\n")
    for fault in outcome.faults:
        sys.stdout.write(f"FAULT {fault}\n")
    if keep is None and not outcome.faults:
        shutil.rmtree(folder)
    sys.stdout.write("FAILED, see " + str(folder) + "\n" if outcome.faults else "nothing was lost\n")
    raise SystemExit(bool(outcome.faults))


if __name__ == "__main__":
    typer.run(main)
