"""The runs of a broker: the monitor's own is always polled, the others while somebody watches them."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import DvpError, OverloadedError
from dvp_rl.contract.http import ReplicaState
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.health import queue_health
from dvp_rl.transport.roles import Role
from dvp_rl.transport.runs import check_run, latest_runs

from .bodies import RunState, RunStates
from .feed import Feed
from .poller import Poller
from .settings import MonitorSettings

logger = logging.getLogger(__name__)

LIST_EVERY_S = 10.0
"""Seconds between two looks at the list of runs, while somebody watches."""
MAX_LISTED = 100
MAX_OTHERS = 15
"""Runs besides the monitor's own that are polled at the same time."""
UNWATCHED_S = 60.0
"""A run that nobody has watched for so long is no longer polled."""


class Runs:
    def __init__(self, settings: MonitorSettings) -> None:
        self.feed = Feed(settings.max_viewers)
        self._settings = settings
        self._connecting, self._starting = asyncio.Lock(), asyncio.Lock()
        self._broker: Broker | None = None
        self.own = Poller(settings, settings.run_id, self.feed, self._connect)
        """The run of the settings."""
        self._polling = asyncio.TaskGroup()
        self._others: dict[str, tuple[Poller, asyncio.Task[None]]] = {}
        self._used: dict[str, float] = {}
        """When each of the others was last asked for or watched."""

    @property
    def polled(self) -> set[str]:
        """Runs that are polled now."""
        return {self.own.run_id, *self._others}

    async def of(self, run_id: str | None) -> Poller:
        """The poller of this run, which has looked at it at least once; by default the monitor's own.

        Raises NotFoundError for a run that the broker does not know, and OverloadedError."""
        if run_id is None or run_id == self.own.run_id:
            return self.own
        async with self._starting:
            if run_id not in self._others:
                await self._start(run_id)
            self._used[run_id] = time.monotonic()
            return self._others[run_id][0]

    async def _start(self, run_id: str) -> None:
        await check_run((await self._connect()).beside(run_id))
        if len(self._others) >= MAX_OTHERS:
            unwatched = [run for run in self._others if not self.feed.is_watched(run)]
            if not unwatched:
                raise OverloadedError(f"{MAX_OTHERS + 1} runs are watched already", UNWATCHED_S)
            await self._leave(min(unwatched, key=self._used.__getitem__))
        poller = Poller(self._settings, run_id, self.feed, self._connect)
        await poller.look()
        self._others[run_id] = poller, self._polling.create_task(poller.run())

    async def _leave(self, run_id: str) -> None:
        _, polling = self._others.pop(run_id)
        await cancel([polling])
        self.feed.forget(run_id)

    async def run(self) -> None:
        """Polls until cancelled."""
        try:
            async with self._polling as tasks:
                tasks.create_task(self.own.run())
                tasks.create_task(self._list())
                tasks.create_task(self._tidy())
        finally:
            if self._broker is not None:
                await self._broker.close()

    async def _list(self) -> None:
        """Publishes the list of runs, again and again while somebody watches."""
        while True:
            if self.feed.num_viewers == 0:
                await asyncio.sleep(self._settings.interval_s)
                continue
            with suppress(DvpError):  # the pollers say why
                states = await run_states(await self._connect())
                self.feed.publish("", "runs", RunStates(runs=states).model_dump_json())
            await asyncio.sleep(LIST_EVERY_S)

    async def _tidy(self) -> None:
        """Ends the polling of runs that nobody watches any more."""
        while True:
            await asyncio.sleep(LIST_EVERY_S)
            async with self._starting:
                now = time.monotonic()
                self._used.update((run, now) for run in self._others if self.feed.is_watched(run))
                for run in [run for run in self._others if now - self._used[run] > UNWATCHED_S]:
                    await self._leave(run)

    async def _connect(self) -> Broker:
        """One client of the broker for all runs."""
        async with self._connecting:
            if self._broker is None:
                url, run_id = self._settings.redis_url, self._settings.run_id
                self._broker = await Broker.connect(url, run_id, role=Role.MONITOR, create=False)
            return self._broker


async def run_states(broker: Broker) -> tuple[RunState, ...]:
    """At most MAX_LISTED runs of the broker, ordered as by latest_runs."""
    return tuple([await _state(broker.beside(run_id)) for run_id in await latest_runs(broker, MAX_LISTED)])


async def _state(broker: Broker) -> RunState:
    try:
        health = await queue_health(broker)
    except DvpError as error:  # e.g. of a user who may only see another run
        return RunState(run_id=broker.run_id, error=str(error))
    return RunState(
        run_id=broker.run_id,
        verdict=health.verdict,
        step=health.trainer and health.trainer.step,
        seen_s=health.trainer and health.trainer.last_seen_s,
        num_replicas=sum(replica.state is not ReplicaState.LOST for replica in health.replicas),
        dead=health.dead,
    )
