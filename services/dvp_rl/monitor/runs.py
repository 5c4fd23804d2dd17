"""The runs of the broker: the monitor's own is always polled, another one while somebody looks at it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

from dvp_rl.contract.errors import DvpError, UnavailableError
from dvp_rl.contract.http import ReplicaState
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.health import queue_health
from dvp_rl.transport.runs import check_run, is_known, latest_runs

from .bodies import RunState, RunStates
from .feed import Viewers
from .poller import Poller
from .settings import MonitorSettings

LOOK_EVERY_S = 10.0
"""Seconds between two looks at which runs there are."""
MAX_LISTED = 100
"""Most runs that the page lists."""
UNWATCHED_S = 60.0
"""A run that nobody has watched for so long is no longer polled."""


class Runs:
    def __init__(self, settings: MonitorSettings) -> None:
        self.viewers = Viewers(settings.max_viewers)
        self.own = Poller(settings, settings.run_id, self.viewers)
        """The run of the settings."""
        self._settings = settings
        self._polling = asyncio.TaskGroup()
        self._others: dict[str, Poller] = {}
        self._listed = ""
        """The newest list of runs, in JSON."""

    @property
    def pollers(self) -> dict[str, Poller]:
        """The runs that are polled now, by name."""
        return {self.own.run_id: self.own} | self._others

    async def of(self, run_id: str | None) -> Poller:
        """The poller of this run, which has looked at it at least once; by default the monitor's own. Raises
        NotFoundError for a run that the broker does not know, and UnavailableError."""
        if run_id is None or run_id == self.own.run_id:
            return self.own
        if run_id not in self._others:
            poller = Poller(self._settings, run_id, self.viewers, self.own.broker.beside(run_id))
            await check_run(poller.broker)
            await poller.look()
            if self.own.feed.closed:
                raise UnavailableError("the monitor is stopping")
            if run_id not in self._others:  # nobody else was faster
                self._add(poller)
        poller = self._others[run_id]
        poller.used_at = time.monotonic()
        return poller

    def _add(self, poller: Poller) -> None:
        unwatched = [other for other in self._others.values() if not other.feed.num_viewers]
        if unwatched and len(self._others) > self.viewers.max_viewers:
            self._leave(min(unwatched, key=lambda other: other.used_at))
        self._others[poller.run_id] = poller
        self._polling.create_task(poller.run())
        if self._listed:
            poller.feed.publish("runs", self._listed)

    def _leave(self, poller: Poller) -> None:
        if self._others.get(poller.run_id) is poller:
            del self._others[poller.run_id]
        poller.feed.close()

    async def run(self) -> None:
        """Polls until cancelled."""
        try:
            async with self._polling as tasks:
                tasks.create_task(self.own.run())
                tasks.create_task(self._list())
                tasks.create_task(self._tidy())
        finally:
            await self.own.close()

    def close(self) -> None:
        """Ends every viewer's stream."""
        for poller in self.pollers.values():
            poller.feed.close()

    async def _list(self) -> None:
        """Publishes the list of runs, again and again while somebody watches."""
        while True:
            if self.viewers.num == 0:
                await asyncio.sleep(self._settings.interval_s)
                continue
            with suppress(DvpError):  # the pollers say why
                names = await latest_runs(self.own.broker)
                listed = dict.fromkeys([*names[:MAX_LISTED], self.own.run_id])
                states = await run_states(self.own.broker, listed)
                total = len({*names, self.own.run_id})
                self._listed = RunStates(runs=states, total=total).model_dump_json()
                for poller in self.pollers.values():
                    poller.feed.publish("runs", self._listed)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _tidy(self) -> None:
        """Ends the polling of runs that nobody watches any more, or that have gone from the broker."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for poller in [*self._others.values()]:
                with suppress(DvpError):  # the poller says why
                    known, now = await is_known(poller.broker), time.monotonic()
                    if poller.feed.num_viewers:
                        poller.used_at = now
                    if not known or now - poller.used_at > UNWATCHED_S:
                        self._leave(poller)


async def run_states(broker: Broker, run_ids: Iterable[str]) -> tuple[RunState, ...]:
    """The state of each run, in this order."""
    return tuple([await _state(broker.beside(run_id)) for run_id in run_ids])


async def _state(broker: Broker) -> RunState:
    try:
        health = await queue_health(broker)
    except DvpError as error:
        return RunState(run_id=broker.run_id, error=str(error))
    return RunState(
        run_id=broker.run_id,
        verdict=health.verdict,
        step=health.trainer and health.trainer.step,
        seen_s=health.trainer and health.trainer.last_seen_s,
        num_replicas=sum(replica.state is not ReplicaState.LOST for replica in health.replicas),
        dead=health.dead,
    )
