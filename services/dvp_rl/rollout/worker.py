"""The queue side of a replica: claim, generate, commit."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress

from dvp_rl import tracing
from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import DvpError, EngineError, LeaseLostError, RequestError, UnavailableError, WeightError
from dvp_rl.contract.group import Group
from dvp_rl.transport.jobs import JobQueue, Lease

from .admission import Side
from .loops import MAX_DELAY_S, keep_doing, outlast
from .replica import Replica
from .swap import WeightSwap

logger = logging.getLogger(__name__)

BLOCK_MS = 2_000
"""Longest wait for a job, in milliseconds, and so between two searches for expired leases of dead replicas."""
PATIENCE_S = 600.0
"""Longest wait of a finished or failed job for a broker that is away, in seconds."""
GIVE_BACK_S = 2.0


class Worker:
    """Takes as many jobs from one queue as its side has room for, while the weights served are new enough."""

    def __init__(
        self,
        replica: Replica,
        swap: WeightSwap,
        queue: JobQueue,
        side: Side,
        *,
        lease_s: float,
        job_timeout_s: float,
    ) -> None:
        self._replica = replica
        self._swap = swap
        self._queue = queue
        self._side = side
        self._lease_s = lease_s
        self._job_timeout_s = job_timeout_s
        self._running: dict[asyncio.Task[None], Lease] = {}
        self._settling: set[str] = set()
        """Entries with a commit in flight, which `_renew` leaves alone: the commit itself detects a lost lease, and one
        that it has ended looks lost."""
        self._samples_per_job = side.slots.capacity
        """Samples of the last job. The initial value makes the first claim a single job."""
        self._loops: list[asyncio.Task[None]] = []
        self._rests_until = 0.0
        """Time until which it claims nothing, so that jobs that it failed or gave back go to other replicas."""
        self._errors_in_a_row = 0

    def start(self) -> None:
        self._loops = [
            asyncio.create_task(keep_doing("claiming jobs", self._claim)),
            asyncio.create_task(keep_doing("renewing leases", self._renew)),
        ]

    async def stop(self, drain_s: float) -> None:
        """Claims nothing more, lets jobs finish for `drain_s` and gives the rest back."""
        claiming, renewing = self._loops
        await cancel([claiming])
        if self._running:
            logger.info("stopping: %d jobs may finish within %g s", len(self._running), drain_s)
            await asyncio.wait(self._running, timeout=drain_s)
        unfinished = dict(self._running)
        await cancel([*unfinished, renewing])
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await asyncio.gather(*map(self._give_back, unfinished.values()))
                await self._queue.close()
        except (DvpError, TimeoutError) as error:
            reason = str(error) or f"the broker took longer than {GIVE_BACK_S:g} s"
            logger.warning("jobs not given back (%s): their leases expire within %g s", reason, self._lease_s)

    async def _give_back(self, lease: Lease) -> None:
        # A job that was cancelled in the middle of its commit may be settled already.
        with suppress(LeaseLostError):
            await self._queue.release(lease)

    async def _claim(self) -> None:
        await asyncio.sleep(self._rests_until - time.monotonic())
        await self._replica.recovered()
        await self._swap.wait_allowed()
        free = await self._side.wait_free()
        count = max(1, free // self._samples_per_job)
        leases = await self._queue.claim_expired(count) or await self._queue.claim(count, BLOCK_MS)
        for lease in leases:
            self._samples_per_job = lease.job.n
            task = asyncio.create_task(self._guarded(lease))
            self._running[task] = lease
            task.add_done_callback(self._running.pop)
        # Lets the new tasks take their slots before the slots are checked again.
        await asyncio.sleep(0)

    async def _renew(self) -> None:
        lost = await self._queue.renew(list(self._running.values()))
        gone = {lease.entry_id for lease in lost}
        for task, lease in list(self._running.items()):
            if lease.entry_id in gone - self._settling:
                name = lease.job.job_id
                logger.warning("job %s: lease lost, or job deleted or overdue; its samples are dropped", name)
                task.cancel()
        await asyncio.sleep(self._lease_s / 4)

    async def _guarded(self, lease: Lease) -> None:
        begin = time.monotonic()
        try:
            outcome = await self._run(lease, begin)
        except (LeaseLostError, UnavailableError) as error:
            outcome = "lost"
            logger.warning("job %s: %s", lease.job.job_id, error)
        except Exception as error:  # a task boundary: counted like an engine's error, or the job would return for ever
            outcome = "error"
            logger.exception("job %s: unexpected error", lease.job.job_id)
            self._rest(begin)
            with suppress(DvpError):
                await self._fail(lease, repr(error), fatal=False)
        finally:
            self._queue.forget(lease)
        self._replica.metrics.jobs.labels(outcome).inc()

    def _rest(self, begin: float) -> None:
        """Pauses claiming after a failure. If this replica is at fault and not the job, it must not take all the jobs
        before others can. Pauses double up to the time of a lease, until something is committed. They count from the
        start of the job, since a job that fails slowly takes no jobs from others."""
        pause_s = min(MAX_DELAY_S * 2 ** min(self._errors_in_a_row, 16), self._lease_s)
        self._rests_until = max(self._rests_until, begin + pause_s)
        self._errors_in_a_row += 1

    async def _run(self, lease: Lease, begin: float) -> str:
        """How the job ended on this replica. Only `commit` or `fail` settles it."""
        trace = [lease.job.metadata]
        with tracing.span("wait in queue", trace, since=lease.job.submitted_at):
            pass
        try:
            with tracing.span("generate", trace):
                group = await self._generate(lease)
        except RequestError as error:
            return await self._fail(lease, str(error), fatal=True)
        except EngineError as error:
            self._rest(begin)
            return await self._fail(lease, str(error), fatal=_left_s(lease) <= 0)
        except UnavailableError as error:
            logger.error("job %s given back, the engine is not running: %s", lease.job.job_id, error)
            await asyncio.sleep(MAX_DELAY_S)
            await self._queue.release(lease)
            return "released"
        except WeightError as error:
            logger.error("job %s given back, required weights unavailable: %s", lease.job.job_id, error)
            self._rests_until = time.monotonic() + MAX_DELAY_S
            await self._queue.release(lease)
            return "released"
        self._settling.add(lease.entry_id)
        try:
            with tracing.span("commit", trace):
                settled = await outlast(f"job {group.job_id}", lambda: self._queue.commit(lease, group), PATIENCE_S)
        finally:
            self._settling.discard(lease.entry_id)
        self._errors_in_a_row = 0
        return settled.value

    async def _generate(self, lease: Lease) -> Group:
        """The group. The job holds its slots while it waits for weights, so that nothing else is claimed into them."""
        job, patience = lease.job, min(self._job_timeout_s, _left_s(lease))
        with self._side.hold(job.n):
            start, num_wrong = time.monotonic(), self._swap.num_wrong
            try:
                async with asyncio.timeout(patience):
                    await self._swap.reach(job.min_seq)
            except TimeoutError:
                reason = self._swap.status.error or "none was announced"
                raise EngineError(f"no weights new enough within {patience:.0f} s: {reason}") from None
            group = await self._replica.generate(job, patience - (time.monotonic() - start))
            try:
                async with asyncio.timeout(patience - (time.monotonic() - start)):
                    return await self._swap.vouch(group, num_wrong)
            except TimeoutError:
                raise WeightError(f"not examined within {patience:.0f} s: {self._swap.failure}") from None

    async def _fail(self, lease: Lease, error: str, *, fatal: bool) -> str:
        logger.error("job %s: %s", lease.job.job_id, error)
        what = f"job {lease.job.job_id}"
        dead = await outlast(what, lambda: self._queue.fail(lease, error, fatal=fatal), PATIENCE_S)
        return "dead" if dead else "failed"


def _left_s(lease: Lease) -> float:
    """Seconds until the job is overdue."""
    return math.inf if lease.overdue_at is None else lease.overdue_at - time.monotonic()
