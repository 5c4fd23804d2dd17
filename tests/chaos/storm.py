"""The events that happen to a run, their number and times: kills, stops, outages, wipes, and non-lethal troubles."""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from dvp_rl.contract.errors import DvpError
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.sessions import open_sessions

from .system import LEASE_S, POLL_S, System
from .traffic import Traffic
from .traps import Role
from .troubles import Disk, denied, half_open, no_files

HALF_OPEN = 200
"""Number of connections of one event."""
MOST_EPISODES = 100
"""More than the harnesses play at a time."""


class Disks(NamedTuple):
    run: Disk
    broker: Disk


@dataclass(frozen=True)
class Plan:
    hits: int
    """Required hits of each fail point."""
    events: Mapping[str, int]
    pace_s: float
    """Mean pause between two events, in seconds."""
    episodes: bool = False
    """Whether the run's prompts are played by harnesses; each event then waits until they do."""

    @property
    def num_events(self) -> int:
        return sum(self.events.values())

    def schedule(self, rng: random.Random) -> list[str]:
        events = [event for event, count in self.events.items() for _ in range(count)]
        rng.shuffle(events)
        return events


def _counted(events: Mapping[str, tuple[int, int]], column: int) -> dict[str, int]:
    return {event: counts[column] for event, counts in events.items()}


EVENTS = {
    "kill replica": (250, 12),
    "kill trainer": (120, 8),
    "kill broker": (80, 6),
    "wipe broker": (5, 1),
    "stop replica": (60, 3),
    "stop trainer": (50, 3),
    "stop broker": (40, 2),
    **{f"broker {how} {seconds} s": (1, 0) for how in ("away", "frozen") for seconds in (15, 30, 60, 300)},
    **{f"broker {how} 12 s": (0, 1) for how in ("away", "frozen")},
    "no files replica": (60, 3),
    "no files trainer": (30, 2),
    "no files broker": (20, 1),
    "denied run": (30, 2),
    "denied weights": (30, 2),
    "denied checkpoints": (30, 2),
    "full disk run": (30, 2),
    "full disk broker": (30, 2),
    "half-open connections": (50, 2),
    "large result": (37, 1),
    "squatted id": (40, 2),
}
"""Number of each event in a full storm and in a short one."""
EVENTS_AMID_EPISODES = {
    "kill replica": (60, 6),
    "kill harness": (60, 6),
    "kill trainer": (30, 3),
    "kill broker": (40, 4),
    "kill gateway": (40, 4),
    "stop replica": (20, 1),
    "stop harness": (20, 1),
}
"""The same, of a run whose prompts are played by harnesses."""
FULL = Plan(hits=3, events=_counted(EVENTS, 0), pace_s=3.0)
SHORT = Plan(hits=1, events=_counted(EVENTS, 1), pace_s=0.8)
FULL_AMID_EPISODES = Plan(hits=0, events=_counted(EVENTS_AMID_EPISODES, 0), pace_s=2.0, episodes=True)
SHORT_AMID_EPISODES = Plan(hits=0, events=_counted(EVENTS_AMID_EPISODES, 1), pace_s=0.8, episodes=True)


class Storm:
    def __init__(self, system: System, traffic: Traffic, disks: Disks, plan: Plan) -> None:
        self._system, self._traffic, self._disks, self._plan = system, traffic, disks, plan
        self._rng = system.rng
        self._once: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for event in self._plan.schedule(self._rng):
                await asyncio.sleep(self._rng.expovariate(1 / self._plan.pace_s))
                if event.startswith("full disk") and not self._disks.run.fillable:
                    self._system.counts["events that only root can bring about"] += 1
                    continue
                if self._plan.episodes:
                    self._system.counts["episodes under way at events"] += await self._until_played()
                self._system.events[event] += 1
                if "broker" in event:  # there is only one broker, so its events run one after another
                    await self._to_broker(event)
                else:
                    group.create_task(self._in_turn(event))

    async def _until_played(self) -> int:
        """Number of the episodes that are being played, once there are any."""
        system = self._system
        while True:
            with suppress(DvpError):
                async with await Broker.connect(system.broker.url, system.layout.run_id) as broker:
                    if found := await open_sessions(broker, MOST_EPISODES, clients=False):
                        return len(found)
            await asyncio.sleep(POLL_S)

    async def _to_broker(self, event: str) -> None:
        system = self._system
        match event.split():
            case ["kill", _]:
                await system.kill_broker(self._rng.uniform(0, 1.0))
            case ["wipe", _]:
                self._traffic.forget()
                await system.kill_broker(0.1, wipe=True)
                self._traffic.forget()
            case ["stop", _]:
                await system.stop_broker(self._rng.uniform(0.3, 2.0))
            case [_, "away", seconds, _]:
                await system.kill_broker(float(seconds))
            case [_, "frozen", seconds, _]:
                await system.stop_broker(float(seconds))
            case ["no", "files", _]:
                assert system.broker.pid is not None
                with no_files(system.broker.pid):
                    await asyncio.sleep(self._briefly())
                # Meanwhile the broker only logs that it cannot accept, as fast as it can.
                os.truncate(system.broker.log, 0)
            case ["full", "disk", _]:
                with self._disks.broker.full():
                    await asyncio.sleep(self._briefly())
                # The broker ended at the first write that was refused.
                await system.kill_broker(0)
            case _:
                raise ValueError(event)

    async def _in_turn(self, event: str) -> None:
        """Runs the event concurrently with others, but not twice at once."""
        async with self._once[event]:
            await self._strike(event)

    async def _strike(self, event: str) -> None:
        system = self._system
        match event.split():
            case ["kill", role]:
                system.kill(await system.victim(Role(role)))
            case ["stop", role]:
                long = self._rng.random() < 0.5
                seconds = self._rng.uniform(LEASE_S, 3 * LEASE_S) if long else self._rng.uniform(0.2, LEASE_S)
                victim = await system.victim(Role(role))
                await system.stop(victim, seconds, replace=long and role == "trainer")
            case ["no", "files", role]:
                await self._suffer(no_files((await system.victim(Role(role), loaded=True)).process.pid))
            case ["denied", name]:
                out = system.layout.out
                folder = {"run": out, "weights": out / "weights", "checkpoints": out / "checkpoints"}[name]
                await self._suffer(denied(folder))
            case ["full", "disk", _]:
                await self._suffer(self._disks.run.full())
            case ["half-open", _]:
                if port := system.port(self._rng.randrange(system.num_replicas)):
                    await self._suffer(half_open(port, HALF_OPEN))
            case ["large", _]:
                await self._traffic.large()
            case ["squatted", _]:
                await self._traffic.squat()
            case _:
                raise ValueError(event)

    async def _suffer(self, trouble: AbstractContextManager[None]) -> None:
        """Causes a trouble briefly. Its victim may be gone before, or out of reach of a user other than root."""
        with suppress(ProcessLookupError, FileNotFoundError, PermissionError), self._system.trouble(), trouble:
            await asyncio.sleep(self._briefly())

    def _briefly(self) -> float:
        """Duration of a trouble in seconds, which may be shorter or longer than most retry intervals."""
        return self._rng.uniform(0.5, 5.0)
