"""From data positions to batches: submits prompts, receives groups, has them scored, cuts batches.

Every data position ends exactly once, through one or more attempts. The job id of an attempt is a function of (run,
position, attempt) and its sampling seed of (seed, position), so that a resumed trainer asks for the same jobs again and
finds the ones that are already done.

    cursor --submit--> outstanding --group--> scored --cut--> batch --settle--> finished --checkpoint--> acknowledged
                            ^                                  |
                            +---- retries <--- stale, refused -+

Groups that a crashed incarnation asked for beyond its last checkpoint arrive before their position, or its next
attempt, is issued again: they wait in `early` instead of being generated twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from dvp_rl import tracing
from dvp_rl.contract.arrays import Int32Array
from dvp_rl.contract.errors import EngineError, GroupMismatchError, UnavailableError
from dvp_rl.contract.group import DeadLetter, Group, LogprobKind
from dvp_rl.contract.job import Job, Sink, job_id, job_position
from dvp_rl.contract.sampling import MAX_SEED
from dvp_rl.transport.groups import Delivery, GroupQueue
from dvp_rl.transport.pending import who_holds
from dvp_rl.transport.submission import Submission, Submitted
from dvp_trainer.config import ModelSection, TrainSettings
from dvp_trainer.data.batch import Batch, ScoredGroup
from dvp_trainer.data.scoring import PromptTokens, Scorer
from dvp_trainer.publish.publisher import Publisher
from dvp_trainer.resume.checkpoint import Progress
from dvp_trainer.resume.ledger import CONSUMED, SUBMITTED, Ledger

from .books import DUPLICATES, Books, Outcome

logger = logging.getLogger(__name__)

READ_COUNT = 64
READ_BLOCK_MS = 500
RECHECK_S = 15.0
"""Silence after which everything that is waited for is submitted again, in case the broker lost it."""
DEATHS_PER_ROOM = 2
"""The run stops after this many times the in-flight limit of dead letters in a row."""


class Feeder:
    """The trainer's side of the queue. `run` has to run beside whoever calls `next_batch`, in the same event loop."""

    def __init__(
        self,
        settings: TrainSettings,
        prompts: PromptTokens,
        scorer: Scorer,
        submission: Submission,
        groups: GroupQueue,
        publisher: Publisher,
        fence: int,
    ) -> None:
        self.settings, self.prompts, self.scorer = settings, prompts, scorer
        self.submission, self.groups, self.publisher, self.fence = submission, groups, publisher, fence
        self.submitted = Ledger(settings.out_dir / SUBMITTED)
        self.consumed = Ledger(settings.out_dir / CONSUMED)
        self.books = Books()
        self._batches_left = settings.steps
        self._waiting_since = 0.0
        self._deaths_in_a_row = 0
        self._traces: dict[str, tracing.Trace] = {}
        self._scored: asyncio.Queue[ScoredGroup] = asyncio.Queue()
        self._room = asyncio.Event()
        self._refusal = asyncio.Event()
        self._tasks = asyncio.TaskGroup()

    @property
    def in_flight_limit(self) -> int:
        """The batch in training, and max_staleness more."""
        return self.settings.batch.groups * (1 + self.settings.batch.max_staleness)

    @property
    def _wanted(self) -> int:
        """How many groups to have outstanding: towards the end, no more than the rest of the run can train."""
        return min(self.in_flight_limit, self.settings.batch.groups * self._batches_left)

    async def restore(self, progress: Progress) -> None:
        """Takes up a checkpoint's books. Weights must have been published: jobs name the oldest seq they allow."""
        self.submitted.cut(progress.submitted_length)
        self.consumed.cut(progress.consumed_length)
        self._batches_left = self.settings.steps - progress.step
        self.books = Books(progress.cursor, progress.retries)
        for id in progress.outstanding:
            self.books.expect(self._job(*job_position(id)))
        await self.groups.restore(self.books.outstanding)

    def cover(self) -> dict[str, Any]:
        """What `restore` needs, as fields of Progress. `acknowledge` will cover what has ended by now, and no more."""
        self.books.cover()
        for ledger in (self.submitted, self.consumed):
            ledger.sync()
        return {
            "cursor": self.books.cursor,
            "retries": tuple(sorted(self.books.retries)),
            "outstanding": tuple(self.books.outstanding),
            "submitted_length": self.submitted.length,
            "consumed_length": self.consumed.length,
            "data_fingerprint": self.prompts.fingerprint,
        }

    def close(self) -> None:
        self.submitted.close()
        self.consumed.close()

    async def run(self) -> None:
        """Keeps the queue fed and takes in what comes back, until cancelled."""
        async with self._tasks:
            self._tasks.create_task(self._submit_forever())
            self._tasks.create_task(self._receive_forever())

    # --- what the training loop calls -----------------------------------------------------------------------------

    async def next_batch(self) -> Batch:
        """Waits for enough groups that are fresh, and (with refill) have signal. Sorted by data position.

        Raises UnavailableError after stall_timeout_s without any group.
        """
        wanted = self.settings.batch
        taken: list[ScoredGroup] = []
        to_refill = wanted.groups * (wanted.refill_limit - 1) if wanted.refill else 0
        self._waiting_since = time.monotonic()
        while len(taken) < wanted.groups:
            scored = await self._next_scored()
            if scored.staleness > wanted.max_staleness and wanted.on_stale == "drop":
                await self._finish([scored.group.job_id], Outcome.STALE)
            elif to_refill and not scored.has_signal:
                to_refill -= 1
                await self._finish([scored.group.job_id], Outcome.FILTERED)
            else:
                taken.append(scored)
        self._waiting_since = 0.0
        return Batch(tuple(sorted(taken, key=lambda scored: job_position(scored.group.job_id))))

    async def settle(self, batch: Batch) -> None:
        """The batch is trained and its weights are published: makes room for as many new prompts."""
        self._batches_left -= 1
        await self._finish([scored.group.job_id for scored in batch.groups], Outcome.TRAINED)

    def metrics(self) -> dict[str, float]:
        """How attempts ended since the last call."""
        counts, self.books.counts = self.books.counts, Counter()
        names = [*(outcome for outcome in Outcome if outcome is not Outcome.TRAINED), DUPLICATES]
        return {f"groups/{name}": float(counts[name]) for name in names}

    def waiting_s(self) -> float:
        """Seconds that `next_batch` has been waiting; 0 while nobody waits."""
        return time.monotonic() - self._waiting_since if self._waiting_since else 0.0

    async def acknowledge(self) -> None:
        """After a checkpoint: the broker may forget everything that its books cover. What ended while it was being
        written waits for the next one."""
        covered, self.books.covered = self.books.covered, []
        await self.groups.acknowledge(covered)

    async def full_of_the_past(self) -> None:
        """Returns when the broker refuses new prompts while it holds groups that only a checkpoint lets it forget."""
        self._refusal.clear()
        await self._refusal.wait()

    # --- out ------------------------------------------------------------------------------------------------------

    async def _submit_forever(self) -> None:
        while True:
            self._room.clear()
            self._issue()
            if self.books.unsent and await self._send():
                continue
            # A refusal for the broker's memory ends without anybody telling us.
            timeout_s = 0.5 if self.books.unsent else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._room.wait()

    def _issue(self) -> None:
        """Turns free room into jobs. They are outstanding before they are sent: a crash in between resubmits."""
        issued = self.books.issue(self._wanted, self._job)
        self.submitted.append({"job_id": job.job_id} for job in issued)
        for job in issued:
            if (delivery := self.books.early.pop(job.job_id, None)) is not None:
                self._tasks.create_task(self._receive(delivery))

    async def _send(self) -> bool:
        """Submits what is unsent; True if all of it was taken."""
        jobs = list(self.books.unsent.values())
        with tracing.span("submit", [job.metadata for job in jobs]):
            outcomes = await self.submission.submit(jobs, fence=self.fence, limit=self.in_flight_limit)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if outcome is not Submitted.REFUSED:
                self.books.unsent.pop(job.job_id, None)
        if Submitted.REFUSED in outcomes:
            if num := await self.groups.recount(self.books.outstanding):
                logger.warning("the broker lost its last writes: it counted %d jobs as in flight that have ended", num)
            elif self.books.ended:
                self._refusal.set()
        return not self.books.unsent

    def _job(self, position: int, attempt: int) -> Job:
        settings = self.settings
        id = job_id(settings.run_id, position, attempt)
        trace = self._traces[id] = tracing.Trace(id)
        seed = hashlib.sha256(f"{settings.seed}:{position}".encode()).digest()
        return Job(
            job_id=id,
            run_id=settings.run_id,
            prompt_ids=self.prompts.token_ids(position),
            n=settings.sampling.n,
            # Not of the attempt: a regenerated sample then differs only by its weights.
            sampling=settings.sampling.to_sampling(int.from_bytes(seed[:8]) & MAX_SEED),
            sink=Sink.TRAIN,
            metadata=trace.carrier,
            min_seq=self._min_seq(),
            submitted_at=time.time(),
        )

    def _min_seq(self) -> int:
        """Oldest weights for the next job that its batch may still train, once those before it are trained."""
        batch = self.settings.batch
        if batch.on_stale == "train":
            return self.publisher.announced.min_seq
        batches_before = len(self.books.outstanding) // batch.groups
        return self.publisher.oldest_within(max(0, batch.max_staleness - batches_before))

    # --- in -------------------------------------------------------------------------------------------------------

    async def _receive_forever(self) -> None:
        while True:
            for delivery in await self.groups.read(READ_COUNT, READ_BLOCK_MS):
                self._tasks.create_task(self._receive(delivery))

    async def _receive(self, delivery: Delivery) -> None:
        if self.books.arrive(delivery):
            await self._take(delivery)

    async def _take(self, delivery: Delivery) -> None:
        item, job = delivery.item, self.books.outstanding[delivery.job_id]
        if isinstance(item, DeadLetter):
            await self._bury(item)
            return
        self._deaths_in_a_row = 0
        try:
            check_group(item, job, self.settings.model)
        except GroupMismatchError as error:
            logger.error("group refused: %s", error)
            if job_position(item.job_id)[1] + 1 >= self.settings.batch.max_attempts:
                raise
            await self._finish([item.job_id], Outcome.REFUSED)
            return
        position, _ = job_position(item.job_id)
        with tracing.span("reward", [item.metadata]):
            scored = await self.scorer.score(item, self.prompts.row(position))
        self._scored.put_nowait(scored)

    async def _bury(self, letter: DeadLetter) -> None:
        """The next prompt takes its place, unless nothing but dead letters comes back."""
        logger.error("job %s is dead after %d deliveries: %s", letter.job_id, letter.deliveries, letter.error)
        await self._finish([letter.job_id], Outcome.DEAD)
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row >= DEATHS_PER_ROOM * self.in_flight_limit:
            raise EngineError(
                f"{self._deaths_in_a_row} jobs died in a row without a single group; the last was {letter.job_id} "
                f"on replica {letter.replica_id}: {letter.error}. Mend the cause, put them back with"
                f" `dvp-queue --run-id {self.settings.run_id} dead replay --all`, then start the same command again"
            )

    async def _next_scored(self) -> ScoredGroup:
        timeout_s = self.settings.broker.stall_timeout_s
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(RECHECK_S, left_s)):
                    scored = await self._scored.get()
                return replace(scored, staleness=self.publisher.staleness(scored.group))
            await self._recheck()
        whom = await self._who_holds()
        raise UnavailableError(
            f"no group arrived for {timeout_s:g} s ({len(self.books.outstanding)} jobs in flight: {whom}). "
            "GET /v1/queue on any replica says why; start the same command again to resume"
        )

    async def _recheck(self) -> None:
        """Silence: a broker that was wiped, or lost its last writes, has forgotten jobs, weights, or what was read. All
        are cheap to offer, or to look for, again."""
        missing = self.books.missing()
        num_missing, num = len(missing), len(self.books.outstanding)
        logger.info("still waiting for %d of %d jobs in flight: %s", num_missing, num, await self._who_holds())
        if await self.publisher.announce_again():
            logger.warning("the broker had lost the weights; they are %s now", self.publisher.announced.version)
        self.groups.look_again()
        self.books.unsent |= missing
        self._room.set()

    async def _who_holds(self) -> str:
        return await who_holds(self.groups.broker, self.books.outstanding)

    # --- the end of an attempt --------------------------------------------------------------------------------------

    async def _finish(self, ids: list[str], outcome: Outcome) -> None:
        """Closes the books on these attempts, at the broker first: room that only we see would be refused there.

        What the broker holds of them goes with the next checkpoint. Stale and refused ones come back.
        """
        if outcome is Outcome.TRAINED:
            await self.groups.settle(trained=ids)
        elif outcome is not Outcome.DEAD:
            await self.groups.settle(dropped=ids)
        self.books.finish(ids, outcome)
        for id in ids:
            self._traces.pop(id).end(outcome)
        self.consumed.append({"job_id": id, "outcome": outcome} for id in ids)
        self._room.set()


def check_group(group: Group, job: Job, model: ModelSection) -> None:
    """Raises GroupMismatchError unless the group is what this job asked for and what the trainer trains on."""
    same_dtype = group.engine.dtype == model.compute_dtype != "float32"
    expected = {
        "run_id": (group.run_id, job.run_id),
        "prompt_ids": (_fingerprint(group.prompt_ids), _fingerprint(job.prompt_ids)),
        "number of samples": (len(group.samples), job.n),
        "engine.logprob_kind": (group.engine.logprob_kind, LogprobKind.CONSTRAINED),
        "engine.fp32_head": (group.engine.fp32_head, model.fp32_head if same_dtype else group.engine.fp32_head),
        "sampling.log_min_p": (np.float32(group.sampling.log_min_p), np.float32(job.sampling.log_min_p)),
        "sampling.temperature": (np.float32(group.sampling.temperature), np.float32(job.sampling.temperature)),
    }
    wrong = [f"{name} is {got!s:.80}, expected {want!s:.80}" for name, (got, want) in expected.items() if got != want]
    if wrong:
        raise GroupMismatchError(
            f"group {group.job_id} from replica {group.replica_id} ({group.engine.name} {group.engine.version}): "
            + "; ".join(wrong)
        )


def _fingerprint(prompt_ids: Int32Array) -> str:
    """Prompts are not logged."""
    return f"{len(prompt_ids)} tokens of {hashlib.sha256(prompt_ids.tobytes()).hexdigest()[:8]}"
