"""`make chaos`: kills processes at every fail point and elsewhere, and accounts for every group and every token.

A real run on a real broker: two replicas, a trainer, HTTP clients, people at `dvp-queue`. Every fail point is hit while
a storm of events follows a seeded schedule. With `--episodes`, there are harnesses and a gateway instead of clients and
people, and every event comes while episodes are being played.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from dvp_rl.contract.errors import ConfigError
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_trainer.up.fleet import interruptible
from tests.kit.forked import none_left
from tests.kit.gateway import HAPROXY
from tests.kit.models import make_model
from tests.kit.ports import free_port

from .audit import Audit, audit, final_parameters
from .storm import FULL, FULL_AMID_EPISODES, SHORT, SHORT_AMID_EPISODES, Disks, Plan, Storm
from .system import POLL_S, Layout, System, together
from .traffic import Traffic
from .traps import Role, Traps
from .troubles import Disk
from .witness import Memory, survivors, tracebacks

LAST_STEPS = 3
STALL_S = 900.0
"""Longest time without a hit, or without a step once all traps are hit, in seconds: ten processes in a row that miss
their trap, and the longest outage."""
START_S, STEP_S = 300.0, 5.0
"""Longest time that an undisturbed run may take to start, and per step, in seconds."""
MOST_FAULTS = 20
"""Number of faults above which the rest would tell nothing more."""
RUN_MIB, BROKER_MIB = 256, 512
"""Sizes of the disks of the run and the broker, in MiB."""
README, EPISODES = (Path(__file__).with_name(name) for name in ("README.md", "EPISODES.md"))
ABOUT = {
    README: """\
# What the last storm did

Written by `make chaos ARGS=--record`: a real run on a real broker, two replicas, a trainer, HTTP clients and people at
`dvp-queue`, all of them processes of this machine. `storm.py` says how often each event happens, `troubles.py` what the
troubles are, `audit.py` what is counted afterwards, from evidence independent of the system's own books. A fault is
anything unexplained: a group lost or trained twice, a token whose log-prob is not that of the weights it names, a
client's job that does not end, a process that ends without a kill or a named cause, a traceback in any log, more memory
than `witness.py` allows, anything left in the broker at the end. Of a run whose prompts are played by harnesses:
[EPISODES.md](EPISODES.md).""",
    EPISODES: """\
# What the last storm amid episodes did

Written by `make chaos ARGS="--episodes --record"`: a real run on a real broker whose prompts are played by two
`dvp-harness` of four workers each, in episodes of three turns, through the deployment's gateway in front of two
replicas. Each event waited until episodes were being played. What is counted, and what is a fault:
[README.md](README.md).""",
}
REDIS = Path("/usr/bin/redis-server")

Section = Mapping[str, object]


class Outcome(NamedTuple):
    accounting: dict[str, Section]
    faults: list[str]


async def run_chaos(
    layout: Layout, broker: EmbeddedBroker, disks: Disks, memory: Memory, plan: Plan
) -> tuple[System, Traffic]:
    rng = random.Random(layout.seed)
    system = System(layout, broker, Traps(plan.hits, rng), rng)
    traffic = Traffic(system)
    clients = [] if plan.episodes else [traffic.run()]
    async with together(system.keep(), memory.watch(system), tell(system), *clients):
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.operate())
            group.create_task(Storm(system, traffic, disks, plan).run())
        while system.traps.left:  # noqa: ASYNC110 - ends are polled for
            await asyncio.sleep(POLL_S)
        await calm(system, traffic)
    await system.close()
    return system, traffic


async def tell(system: System) -> None:
    """Reports progress on standard error. Raises TimeoutError after STALL_S without any, RuntimeError after more than
    MOST_FAULTS faults."""
    reached, since = None, time.monotonic()
    while True:
        await asyncio.sleep(10)
        missing = ", ".join(point for point, n in system.traps.missing.items() if n) if system.traps.left < 10 else ""
        passed = f"step {system.layout.newest_step()}, {system.events.total()} events, {len(system.faults)} faults"
        sys.stderr.write(f"{passed}, {system.traps.left} fail points to hit {missing}\n")
        if len(system.faults) > MOST_FAULTS:
            raise RuntimeError(f"{len(system.faults)} faults, the first: {system.faults[0]}")
        before, reached = reached, system.traps.left or f"step {system.layout.newest_step()}"
        if reached != before:
            since = time.monotonic()
        elif time.monotonic() - since > STALL_S:
            raise TimeoutError(f"no hit or step for {STALL_S:g} s; to hit: {+system.traps.missing}")


async def calm(system: System, traffic: Traffic) -> None:
    """Ends the run without further harm: clients get their answers, the trainer ends after LAST_STEPS more steps."""
    traffic.submitting = False
    for child in system.victims(Role.TRAINER):
        system.kill(child)
    system.steps = system.layout.newest_step() + LAST_STEPS
    async with asyncio.timeout(600):
        await system.finished.wait()
        while traffic.open:  # noqa: ASYNC110 - as above
            await asyncio.sleep(POLL_S)


async def leftovers(layout: Layout, broker: EmbeddedBroker) -> list[str]:
    """Entries that should no longer be in the broker."""
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
    layout, memory = make_layout(folder, seed, deterministic)._replace(reward="slowly"), Memory()
    if plan.episodes:
        layout = layout._replace(ports={slot: free_port() for slot in ("gateway", "replica-0", "replica-1")})
    data = folder / "broker" / "data"
    with (
        Disk(layout.out, RUN_MIB) as run_disk,
        Disk(folder / "broker", BROKER_MIB) as broker_disk,
        # The log is not on the broker's disk: without descriptors the broker logs enough to fill it.
        EmbeddedBroker(
            data,
            aof=True,
            fsync=fsync,  # type: ignore[arg-type]
            binary=binary,
            log=layout.logs / "broker.log",
        ) as broker,
        none_left(),
    ):
        (folder / "broker.url").write_text(broker.url)
        disks = Disks(run_disk, broker_disk)
        system, traffic = asyncio.run(run_chaos(layout, broker, disks, memory, plan))
        faults = [*system.faults, *survivors(folder), *asyncio.run(leftovers(layout, broker))]
        faults += [*memory.faults, *tracebacks(folder)]
        result = audit(layout)
        faults += result.faults
        same = compare(layout, broker) if deterministic else None
        if same is False:
            faults.append("the final parameters differ from an undisturbed run's")
    run = {
        "seed": seed,
        "server": (binary or Path("valkey-server")).name,
        "seconds": round(time.monotonic() - started),
        "faults": len(faults),
        "parameters equal an undisturbed run's": same,
    }
    return Outcome({"Run": run, **account(system, traffic, result, memory)}, faults)


def make_layout(folder: Path, seed: int, deterministic: bool) -> Layout:
    data = folder / "data.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 60) for b in range(10, 60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_model(folder / "model", "qwen3", hidden=32, layers=1, seed=seed)
    layout = Layout(folder, f"chaos-{seed}", model, data, deterministic, seed)
    layout.logs.mkdir()
    return layout


def compare(layout: Layout, broker: EmbeddedBroker) -> bool:
    """Whether an undisturbed run of as many steps ends with the same parameters, bit for bit."""
    quiet = layout._replace(
        folder=layout.folder / "undisturbed", run_id=f"{layout.run_id}-undisturbed", reward="spread"
    )
    quiet.logs.mkdir(parents=True)
    steps = layout.newest_step()

    async def run() -> None:
        rng = random.Random(0)
        system = System(quiet, broker, Traps(0, rng), rng, num_replicas=1, steps=steps)
        async with together(system.keep()), asyncio.timeout(START_S + STEP_S * steps):
            await system.finished.wait()
        await system.close()

    asyncio.run(run())
    ours, theirs = final_parameters(layout), final_parameters(quiet)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def account(system: System, traffic: Traffic, result: Audit, memory: Memory) -> dict[str, Section]:
    hits = system.traps.hits
    points = {"fail points": len(hits), "least hits of one": min(hits.values()), "hits": sum(hits.values())}
    sections = {
        "Audit": {name: len(value) if isinstance(value, list) else value for name, value in asdict(result).items()},
        "Events": {"all": system.events.total(), **dict(sorted(system.events.items()))},
        "Kills at fail points": points if hits.total() else {},
        "Processes": dict(sorted(system.counts.items())),
        "Jobs of clients": dict(sorted(traffic.counts.items())),
        "Most memory of one, MiB": {role: round(peak) for role, peak in memory.peaks.items()},
    }
    return {name: section for name, section in sections.items() if section}


def page(accounting: Mapping[str, Section], file: Path = README) -> str:
    """Text of that file beside this one."""
    parts = [ABOUT[file]]
    for name, section in accounting.items():
        rows = [f"| {key.replace('_', ' ')} | {shown(value)} |" for key, value in section.items()]
        parts.append("\n".join([f"## {name}\n", "| | |", "| --- | ---: |", *rows]))
    return "\n\n".join(parts) + "\n"


def shown(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}"
        case int():
            return f"{value:,}"
    return str(value)


def main(
    seed: Annotated[int, typer.Option(help="Seed of the schedule and of the run.")] = 0,
    short: Annotated[bool, typer.Option(help="Only a few events of each kind.")] = False,
    server: Annotated[str, typer.Option(help="redis, valkey, or the path of a server.")] = "redis",
    deterministic: Annotated[bool, typer.Option(help="Synchronous, and compared with an undisturbed run.")] = True,
    fsync: Annotated[str, typer.Option(help="appendfsync of the broker: always or everysec.")] = "always",
    keep: Annotated[Path | None, typer.Option(help="Folder to keep all files in.")] = None,
    episodes: Annotated[bool, typer.Option(help="Of a run whose prompts are played by harnesses.")] = False,
    record: Annotated[bool, typer.Option(help="Rewrite the page beside this module that tells of it.")] = False,
) -> None:
    binary = {"redis": REDIS, "valkey": None}.get(server, Path(server))
    if binary is not None and not binary.exists():
        raise ConfigError(f"{binary} does not exist: apt-get install redis-server, or --server valkey")
    if episodes and HAPROXY is None:
        raise ConfigError("no haproxy on this machine: apt-get install haproxy")
    full, brief, file = (FULL_AMID_EPISODES, SHORT_AMID_EPISODES, EPISODES) if episodes else (FULL, SHORT, README)
    folder = keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    with interruptible():
        outcome = conduct(folder, brief if short else full, seed, binary, deterministic, fsync)
    sys.stdout.write(page(outcome.accounting, file))
    for fault in outcome.faults:
        sys.stdout.write(f"FAULT {fault}\n")
    if record:
        file.write_text(page(outcome.accounting, file))
    if keep is None and not outcome.faults:
        shutil.rmtree(folder)
    sys.stdout.write("FAILED, see " + str(folder) + "\n" if outcome.faults else "nothing was lost\n")
    raise SystemExit(bool(outcome.faults))


if __name__ == "__main__":
    typer.run(main)
