"""One replica from start to stop, and the operations behind its HTTP routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dvp_rl.cancellation import race
from dvp_rl.contract.errors import EngineError, UnavailableError, WeightError
from dvp_rl.contract.generate import GenerateRequest
from dvp_rl.contract.group import Group
from dvp_rl.contract.http import (
    Health,
    JobRequest,
    JobStatus,
    QueueHealth,
    RolloutRequest,
    WeightStatus,
)
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.shares import EVERYBODY
from dvp_rl.logs import LogContext
from dvp_rl.transport.health import queue_health
from dvp_rl.transport.sessions import SessionStore
from dvp_rl.transport.submission import Submission

from .admission import Slots
from .answers import Room, in_pieces, null
from .canary import Guard
from .engine import build
from .metrics import Metrics
from .replica import Replica
from .sessions import STOPPING, Sessions
from .settings import RolloutSettings
from .swap import WeightSwap
from .uplink import Uplink
from .weight_folders import WeightFolders

logger = logging.getLogger(__name__)

MAX_RESULTS_BYTES = 64 << 20
"""Most bytes of results, as stored in the broker, that are read and sent at the same time."""
STILL_LOADING = "the model {} is still being loaded"
NO_REDIS = "this replica serves HTTP only: it was started without a redis_url, so there is no job queue"


class Service:
    """Call `start` once, then the other methods from the same event loop, then `drain` and `close`."""

    def __init__(self, settings: RolloutSettings, context: LogContext) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._context = context
        self._replica: Replica | None = None
        self._swap: WeightSwap | None = None
        self._uplink: Uplink | None = None
        self._room = Room(MAX_RESULTS_BYTES)
        self._stopping = False
        self._cut_off = asyncio.Event()

    async def start(self) -> None:
        """Loads the model, then connects to the broker. Raises ConfigError."""
        engine, prompts = await asyncio.to_thread(build, self.settings)
        try:
            await engine.start()
        except BaseException:
            await engine.close()
            raise
        slots = Slots(
            engine.capacity,
            max_waiting=self.settings.max_waiting,
            client_share=self.settings.client_share,
            divides=not engine.job_by_job,
        )
        guard = Guard(engine, self.metrics, self.settings.canary_every_s)
        self._swap = WeightSwap(engine, WeightFolders.of(self.settings), self.metrics, self._context, guard)
        self._replica = Replica(self.settings.replica_id, self.settings.run_id, engine, prompts, slots, self.metrics)
        facts = engine.facts
        logger.info("model %s is loaded: %s %s, %s", self.settings.model, facts.name, facts.version, facts.dtype)
        if self.settings.redis_url is None:
            logger.info("no redis_url: serving HTTP only, without the job queue")
            return
        self._uplink = Uplink(self._replica, self._swap, self.settings, self.settings.redis_url)
        await self._uplink.run()

    async def drain(self) -> None:
        """Lets work finish for `drain_s`, then gives jobs back and ends requests."""
        self._stopping = True
        asyncio.get_running_loop().call_later(self.settings.drain_s, self._cut_off.set)
        if self._uplink is not None:
            await self._uplink.stop()

    async def close(self) -> None:
        """Frees the model."""
        if self._replica is not None:
            await self._replica.engine.close()

    async def rollout(self, request: RolloutRequest, caller: str = EVERYBODY) -> AsyncIterator[bytes]:
        """A RolloutResponse as JSON, generated on this replica without the queue. Cancelling stops the samples."""
        replica = self.replica
        job = await replica.prompts.job(request, replica.run_id)
        return replica.prompts.response(await self._draw(job, caller))

    async def generate(self, request: GenerateRequest, caller: str = EVERYBODY) -> Group:
        """Samples of token ids, generated on this replica without queue or session. Cancelling stops them."""
        replica = self.replica
        replica.model(request.model)
        plain, at = request.to_rollout(replica.engine.context_length), request.drawn.AT
        job = await replica.prompts.job(plain, replica.run_id, field=request.READ, at=at)
        return await self._draw(job, caller)

    @property
    def sessions(self) -> Sessions:
        """Raises UnavailableError if there is no broker."""
        return Sessions(
            SessionStore(self.uplink.broker),
            self.replica,
            self._room,
            self._draw,
            self.settings.max_deliveries,
            lambda: self._stopping,
        )

    async def _draw(self, job: Job, caller: str) -> Group:
        """Generates on this replica, within the caller's limits unless it is for the trainer."""
        slots = self.replica.slots
        with slots.clients.admit(job.n, caller) if job.sink is Sink.CLIENT else slots.training.hold(job.n):
            group = await race(self._generate(job), self._cut_off.wait())
        if group is None:
            raise UnavailableError(STOPPING)
        return group

    async def _generate(self, job: Job) -> Group:
        limit_s = self.settings.job_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                swap = self._swap
                assert swap is not None, "it exists as long as the replica"
                num_wrong = swap.num_wrong
                if job.sink is not Sink.CLIENT:
                    await swap.reach(job.min_seq)
                return await swap.vouch(await self.replica.generate(job, limit_s), num_wrong)
        except WeightError as error:
            raise UnavailableError(f"this replica lacks the weights: {error}") from error
        except TimeoutError:
            raise EngineError(f"{job.n} samples took longer than {limit_s:.0f} s") from None

    async def submit(self, request: JobRequest, caller: str = EVERYBODY) -> str:
        """The id of the queued job."""
        uplink = self.uplink
        job = await self.replica.prompts.job(request, self.settings.run_id)
        submission = Submission(uplink.broker)
        limit = self.settings.max_queued
        await submission.submit_client(job, limit=limit, deadline_s=request.deadline_s, caller=caller)
        return job.job_id

    @asynccontextmanager
    async def job(self, job_id: str, caller: str = EVERYBODY) -> AsyncIterator[AsyncIterator[bytes]]:
        """A JobStatus as JSON. Raises OverloadedError if too many results are being read."""
        submission = Submission(self.uplink.broker)
        report = await submission.status(job_id, caller=caller)
        status = JobStatus(status=report.state, error=report.error)
        if report.num_bytes is None:
            yield in_pieces(status, "group", null())
            return
        async with self._room.hold(report.num_bytes, caller):
            group = await submission.result(job_id, caller=caller)
            yield in_pieces(status, "group", self.replica.prompts.response(group))

    async def delete_job(self, job_id: str, caller: str = EVERYBODY) -> JobStatus:
        return JobStatus(status=await Submission(self.uplink.broker).delete(job_id, caller=caller))

    async def queue(self) -> QueueHealth:
        return await queue_health(self.uplink.broker)

    def weights(self) -> WeightStatus:
        if self._swap is None:
            raise UnavailableError(self._not_ready())
        return self._swap.status

    async def refresh_weights(self) -> WeightStatus:
        return await self.uplink.refresh_weights()

    def readiness(self) -> Health:
        reason = self._not_ready()
        return Health(status="unavailable", detail=reason) if reason else Health(status="ok")

    @property
    def replica(self) -> Replica:
        """Raises UnavailableError while the model is loading."""
        if self._replica is None:
            raise UnavailableError(STILL_LOADING.format(self.settings.model))
        return self._replica

    @property
    def uplink(self) -> Uplink:
        """Raises UnavailableError if there is no broker."""
        if self._uplink is None:
            _ = self.replica
            raise UnavailableError(NO_REDIS)
        return self._uplink

    def _not_ready(self) -> str:
        if self._stopping:
            return "stopping"
        if self._replica is None or self._swap is None:
            return STILL_LOADING.format(self.settings.model)
        if self._uplink is not None and self._uplink.error:
            return f"the job queue cannot be used: {self._uplink.error}"
        if self._replica.outage:
            return f"the engine is not running: {self._replica.outage}"
        if self._swap.failure:
            return f"takes no work: {self._swap.failure}"
        if self._swap.quarantined:
            return f"takes no jobs until it serves newer weights: {self._swap.status.error or 'loading them'}"
        return ""
