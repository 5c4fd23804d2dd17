"""A replica's connection to the broker and everything that needs it, for as long as the process lives."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import DvpError, UnavailableError, WeightError
from dvp_rl.contract.http import ReplicaState, WeightStatus
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.jobs import JobQueue
from dvp_rl.transport.replicas import BEAT_S, ReplicaBeat, ReplicaRegistry
from dvp_rl.transport.roles import Role
from dvp_rl.weights.registry import WeightRegistry

from .loops import keep_doing, pauses
from .replica import Replica
from .settings import RolloutSettings
from .swap import WeightSwap
from .worker import Worker

logger = logging.getLogger(__name__)

LEAVE_S = 1.0
"""Timeout of each of the last calls to the broker, in seconds. Without a broker a stop takes at most drain_s + 5 s."""


class Uplink:
    def __init__(self, replica: Replica, swap: WeightSwap, settings: RolloutSettings, url: str) -> None:
        self._replica = replica
        self._swap = swap
        self._settings = settings
        self._url = url
        self._broker: Broker | None = None
        self._workers: list[Worker] = []
        self._loops: list[asyncio.Task[None]] = []
        self._state = ReplicaState.STARTING
        self.error: str | None = "not connected to the broker yet"
        """Why the broker cannot be used now; None while it can."""

    @property
    def broker(self) -> Broker:
        """Raises UnavailableError before the first connection."""
        if self._broker is None:
            raise UnavailableError(f"the job queue cannot be used: {self.error}")
        return self._broker

    async def run(self) -> None:
        """Connects, however long that takes, then starts everything. The engine must be ready."""
        broker = await self._connect()
        registry = WeightRegistry(broker)
        workers = [self._worker(broker, clients=clients) for clients in (False, True)]
        self._broker, self._state = broker, ReplicaState.SERVING
        # Before the first job is claimed, the replica must know which weights may still take jobs, and whether a
        # trainer holds the run. The loops below keep both up to date.
        with suppress(WeightError, UnavailableError):
            await self._swap.refresh(registry)
        with suppress(DvpError):
            await self._announce()
        self._loops = [
            asyncio.create_task(keep_doing("heartbeat", self._beat)),
            asyncio.create_task(keep_doing("following weights", lambda: self._swap.follow(registry))),
            asyncio.create_task(keep_doing("examining weights", self._swap.examine)),
        ]
        self._workers = workers
        for worker in workers:
            worker.start()

    def _worker(self, broker: Broker, *, clients: bool) -> Worker:
        settings, slots = self._settings, self._replica.slots
        queue = JobQueue(
            broker,
            self._replica.id,
            clients=clients,
            lease_ms=int(settings.lease_s * 1000),
            max_deliveries=settings.max_deliveries,
        )
        return Worker(
            self._replica,
            self._swap,
            queue,
            slots.clients if clients else slots.training,
            lease_s=settings.lease_s,
            job_timeout_s=settings.job_timeout_s,
        )

    async def refresh_weights(self) -> WeightStatus:
        return await self._swap.refresh(WeightRegistry(self.broker))

    async def stop(self) -> None:
        self._state = ReplicaState.DRAINING
        if self._broker is None:
            return
        with suppress(DvpError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._announce()
        await asyncio.gather(*(worker.stop(self._settings.drain_s) for worker in self._workers))
        await cancel(self._loops)
        with suppress(DvpError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await ReplicaRegistry(self._broker).leave(self._replica.id)
        with suppress(DvpError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._broker.close()

    async def _connect(self) -> Broker:
        told = ""
        for pause in pauses():
            try:
                return await Broker.connect(self._url, self._settings.run_id, role=Role.ROLLOUT)
            except DvpError as error:
                self.error = str(error)
            if self.error != told:
                logger.error("%s; serving HTTP only until it answers", self.error)
                told = self.error
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _beat(self) -> None:
        try:
            if self.error is not None:
                # The broker may have come back empty.
                await self.broker.ensure_groups()
            await self._announce()
            self.error = None
        except DvpError as error:
            self.error = str(error)
            raise
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await self._swap.change()

    async def _announce(self) -> None:
        status = self._swap.status
        beat = ReplicaBeat(
            id=self._replica.id,
            state=self._shown_state(status),
            version=status.version,
            in_flight=self._replica.slots.in_flight,
            capacity=self._replica.slots.capacity,
            loading=status.loading or "",
            error=self._replica.outage or status.error or "",
            swaps_s=self._swap.spent_s,
            wrong=status.wrong or "",
        )
        self._replica.slots.trained = await ReplicaRegistry(self.broker).beat(beat)

    def _shown_state(self, status: WeightStatus) -> ReplicaState:
        if self._state is not ReplicaState.SERVING:
            return self._state
        if self._replica.outage:
            return ReplicaState.STARTING
        return ReplicaState.LOADING if status.loading else ReplicaState.SERVING
