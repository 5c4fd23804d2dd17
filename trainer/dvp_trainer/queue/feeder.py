"""Turns data positions into batches: submits prompts, receives groups, has them scored, cuts batches.

Every data position ends exactly once, through one or more attempts. The job id of an attempt is a function of (run,
position, attempt), and its sampling seed is one of (seed, position). A resumed trainer therefore submits the same jobs
again and finds those that are already done.

    cursor --submit--> outstanding --group--> scored --cut--> batch --close--> finished --checkpoint--> acknowledged
                            ^                                  |
                            +---- retries <--- stale, refused -+

Groups that a crashed incarnation had submitted after its last checkpoint arrive before their position, or its next
attempt, is issued again. They wait in `early` instead of being generated twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
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
from dvp_rl.transport.health import who_plays
from dvp_rl.transport.pending import who_holds
from dvp_rl.transport.submission import Submission, Submitted
from dvp_trainer.config import ModelSection, TrainSettings
from dvp_trainer.data.batch import Batch, ScoredGroup
from dvp_trainer.data.rendering import Asked
from dvp_trainer.data.scoring import Scorer
from dvp_trainer.publish.publisher import Publisher
from dvp_trainer.resume.checkpoint import Progress
from dvp_trainer.resume.ledger import CONSUMED, SUBMITTED, Ledger

from .books import DUPLICATES, Books, Outcome

logger = logging.getLogger(__name__)

READ_COUNT = 64
READ_BLOCK_MS = 500
RECHECK_S = 15.0
"""Silence after which all missing jobs are submitted again, in case the broker lost them, in seconds."""
DEATHS_PER_ROOM = 2
"""Consecutive dead letters that stop the run, as a multiple of the in-flight limit."""


class Feeder:
    """The trainer's side of the queue. `run` must run concurrently with callers of `next_batch`, in one event loop."""

    def __init__(
        self,
        settings: TrainSettings,
        asked: Asked,
        scorer: Scorer,
        submission: Submission,
        groups: GroupQueue,
        publisher: Publisher,
        fence: int,
    ) -> None:
        self.settings, self.asked, self.scorer = settings, asked, scorer
        self.submission, self.groups, self.publisher, self.fence = submission, groups, publisher, fence
        self.submitted = Ledger(settings.out_dir / SUBMITTED)
        self.consumed = Ledger(settings.out_dir / CONSUMED)
        self.books = Books()
        self._batches_left = settings.steps
        self._waiting_since, self._num_taken = 0.0, 0
        self._deaths_in_a_row = 0
        self._own: set[str] = set()
        """Outstanding jobs that this process has submitted; others were found in the broker, from an earlier run."""
        self._told_of_leftovers = False
        self._traces: dict[str, tracing.Trace] = {}
        self._scored: asyncio.Queue[ScoredGroup] = asyncio.Queue()
        self._room = asyncio.Event()
        self._refusal = asyncio.Event()
        self._tasks = asyncio.TaskGroup()

    @property
    def in_flight_limit(self) -> int:
        """Maximum number of jobs in flight: the groups of the batch in training and of max_staleness more batches."""
        return self.settings.batch.groups * (1 + self.settings.batch.max_staleness)

    @property
    def _wanted(self) -> int:
        """Number of groups to keep outstanding: towards the end, no more than the rest of the run can train on."""
        return min(self.in_flight_limit, self.settings.batch.groups * self._batches_left)

    async def restore(self, progress: Progress) -> None:
        """Restores the books of a checkpoint. Weights must be published first: jobs name the oldest seq they allow."""
        self.submitted.cut(progress.submitted_length)
        self.consumed.cut(progress.consumed_length)
        self._batches_left = self.settings.steps - progress.step
        self.books = Books(progress.cursor, progress.retries)
        for id in progress.outstanding:
            self.books.expect(self._job(*job_position(id)))
        await self.groups.restore(self.books.outstanding)

    def cover(self) -> dict[str, Any]:
        """State that `restore` needs, as fields of Progress. `acknowledge` will cover only what has ended by now."""
        self.books.cover()
        for ledger in (self.submitted, self.consumed):
            ledger.sync()
        return {
            "cursor": self.books.cursor,
            "retries": tuple(sorted(self.books.retries)),
            "outstanding": tuple(self.books.outstanding),
            "submitted_length": self.submitted.length,
            "consumed_length": self.consumed.length,
            "data_fingerprint": self.asked.prompts.fingerprint,
        }

    def close(self) -> None:
        self.submitted.close()
        self.consumed.close()

    async def run(self) -> None:
        """Submits prompts and receives groups until cancelled."""
        async with self._tasks:
            self._tasks.create_task(self._submit_forever())
            self._tasks.create_task(self._receive_forever())

    # --- what the training loop calls -----------------------------------------------------------------------------

    async def next_batch(self) -> Batch:
        """The next batch, sorted by data position, once enough groups are fresh and (with refill) have signal.

        Raises UnavailableError after stall_timeout_s without any group.
        """
        wanted = self.settings.batch
        taken: list[ScoredGroup] = []
        to_refill = wanted.groups * (wanted.refill_limit - 1) if wanted.refill else 0
        self._waiting_since, self._num_taken = time.monotonic(), 0
        while len(taken) < wanted.groups:
            scored = await self._next_scored()
            if scored.staleness > wanted.max_staleness and wanted.on_stale == "drop":
                await self._finish([scored.group.job_id], Outcome.STALE)
            elif to_refill and not scored.has_signal:
                to_refill -= 1
                await self._finish([scored.group.job_id], Outcome.FILTERED)
            else:
                taken.append(scored)
                self._num_taken = len(taken)
        self._waiting_since = 0.0
        return Batch(tuple(sorted(taken, key=lambda scored: job_position(scored.group.job_id))))

    async def close_batch(self, batch: Batch) -> None:
        """Makes room for as many new prompts once the batch is trained and its weights are published."""
        self._batches_left -= 1
        await self._finish([scored.group.job_id for scored in batch.groups], Outcome.TRAINED)

    def metrics(self) -> dict[str, float]:
        """Number of attempts that ended since the last call, by outcome, and of duplicates."""
        counts, self.books.counts = self.books.counts, Counter()
        names = [*(outcome for outcome in Outcome if outcome is not Outcome.TRAINED), DUPLICATES]
        return {f"groups/{name}": float(counts[name]) for name in names}

    def waiting_s(self) -> float:
        """Seconds that `next_batch` has been waiting; 0 if it is not."""
        return time.monotonic() - self._waiting_since if self._waiting_since else 0.0

    def progress(self) -> str:
        """What `next_batch` has and waits for. Safe in any thread."""
        awaited = self.rewards_awaited()
        rewards = f" and rewards of {awaited} completions" if awaited else ""
        return f"waiting for groups{rewards}: {self._num_taken} of {self.settings.batch.groups} are ready"

    def rewards_awaited(self) -> int:
        """Number of completions whose rewards `next_batch` waits for; 0 while it waits for groups."""
        has = self._num_taken + self._scored.qsize() + self.scorer.num_groups
        return self.scorer.num_waiting if has >= self.settings.batch.groups else 0

    async def acknowledge(self) -> None:
        """Lets the broker delete everything that the checkpoint just written covers. What ended during the write waits
        for the next checkpoint."""
        covered, self.books.covered = self.books.covered, []
        await self.groups.acknowledge(covered)

    async def full_of_the_past(self) -> None:
        """Returns once the broker refuses new prompts while it holds ended groups that await a checkpoint."""
        self._refusal.clear()
        await self._refusal.wait()

    # --- out ------------------------------------------------------------------------------------------------------

    async def _submit_forever(self) -> None:
        while True:
            self._room.clear()
            self._issue()
            if self.books.unsent and await self._send():
                continue
            # The broker does not notify us when it has memory again, so a refused submission is polled.
            timeout_s = 0.5 if self.books.unsent else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._room.wait()

    def _issue(self) -> None:
        """Issues jobs for the free room. They are outstanding before they are sent, so a crash in between resubmits."""
        issued = self.books.issue(self._wanted, self._job)
        self.submitted.append({"job_id": job.job_id} for job in issued)
        for job in issued:
            if (delivery := self.books.early.pop(job.job_id, None)) is not None:
                self._tasks.create_task(self._receive(delivery))

    async def _send(self) -> bool:
        """Submits the unsent jobs; True if all of them were accepted."""
        jobs = list(self.books.unsent.values())
        with tracing.span("submit", [job.metadata for job in jobs]):
            outcomes = await self.submission.submit(jobs, fence=self.fence, limit=self.in_flight_limit)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if outcome is not Submitted.REFUSED:
                self.books.unsent.pop(job.job_id, None)
            if outcome is Submitted.NEW:
                self._own.add(job.job_id)
        if Submitted.REFUSED in outcomes:
            if num := await self.groups.recount(self.books.outstanding):
                logger.warning("the broker lost its last writes: it counted %d ended jobs as in flight", num)
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
            **self.asked.of(self.asked.prompts.row_at(position)),
            n=settings.sampling.n,
            # Independent of the attempt, so that a regenerated sample differs only by its weights.
            sampling=settings.sampling.to_sampling(int.from_bytes(seed[:8]) & MAX_SEED),
            sink=Sink.TRAIN,
            metadata=trace.carrier,
            min_seq=self._min_seq(),
            submitted_at=time.time(),
        )

    def _min_seq(self) -> int:
        """Seq of the oldest weights whose samples are still fresh enough once all batches before the next job's are
        trained."""
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
        position, attempt = job_position(item.job_id)
        if wrong := mismatches(item, job, self.settings.model):
            facts = f"group {item.job_id} from replica {item.replica_id} ({item.engine.name} {item.engine.version}): "
            facts += "; ".join(wrong.values())
            if item.job_id not in self._own and wrong.keys() <= FROM_JOB:
                self._tell_of_leftovers(facts)
            elif attempt + 1 >= self.settings.batch.max_attempts:
                raise GroupMismatchError(facts)
            else:
                logger.error("group refused: %s", facts)
            await self._finish([item.job_id], Outcome.REFUSED)
            return
        with tracing.span("reward", [item.metadata]):
            scored = await self.scorer.score(item, self.asked.prompts.row_at(position))
        self._scored.put_nowait(scored)

    def _tell_of_leftovers(self, facts: str) -> None:
        if not self._told_of_leftovers:
            self._told_of_leftovers = True
            logger.warning("leftovers of earlier settings are in the queue and are replaced as they come; %s", facts)

    async def _bury(self, letter: DeadLetter) -> None:
        """Ends a dead job; the next prompt takes its place. Raises EngineError if only dead letters come back."""
        logger.error("job %s is dead after %d deliveries: %s", letter.job_id, letter.deliveries, letter.error)
        await self._finish([letter.job_id], Outcome.DEAD)
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row >= DEATHS_PER_ROOM * self.in_flight_limit:
            where = f" on replica {letter.replica_id}" if letter.replica_id else ""  # a harness names none
            raise EngineError(
                f"{self._deaths_in_a_row} jobs died in a row without a single group; the last was {letter.job_id}"
                f"{where}: {letter.error}. Fix the cause, replay them with"
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
        raise UnavailableError(
            f"no group was ready for {timeout_s:g} s: {await self._waits_for()}. "
            "GET /v1/queue on any replica says why; start the same command again to resume"
        )

    async def _recheck(self) -> None:
        """Recovers after silence: a broker that was wiped or lost its last writes has forgotten jobs, weights, or which
        entries were read. Announcing, submitting and looking for entries again is cheap."""
        missing = self.books.missing()
        logger.info("still waiting: %s", await self._waits_for())
        if await self.publisher.announce_again():
            logger.warning("the broker had lost the weights; announced again as %s", self.publisher.announced.version)
        self.groups.look_again()
        self.books.unsent |= missing
        self._room.set()

    async def _waits_for(self) -> str:
        missing, found = self.books.missing(), [self.scorer.waiting()]
        if missing or not found[0]:
            broker = self.groups.broker
            whom = await (who_plays(broker) if self.settings.episodes.harness else who_holds(broker, missing))
            found.append(f"{len(missing)} of {len(self.books.outstanding)} jobs in flight have no group: {whom}")
        return "; ".join(filter(None, found))

    # --- the end of an attempt --------------------------------------------------------------------------------------

    async def _finish(self, ids: list[str], outcome: Outcome) -> None:
        """Ends these attempts, first at the broker: it would refuse jobs for room that only this process has made.

        The broker keeps their data until the next checkpoint. Stale and refused attempts are retried.
        """
        if outcome is Outcome.TRAINED:
            await self.groups.settle(trained=ids)
        elif outcome is not Outcome.DEAD:
            await self.groups.settle(dropped=ids)
        self.books.finish(ids, outcome)
        for id in ids:
            self._traces.pop(id).end(outcome)
            self._own.discard(id)
        self.consumed.append({"job_id": id, "outcome": outcome} for id in ids)
        self._room.set()


FROM_JOB = {"prompt_ids", "samples", "rewards", "task", "sampling.log_min_p", "sampling.temperature"}
"""Differences that show that the group was made for another job, or by a replica that ignores jobs."""


def mismatches(group: Group, job: Job, model: ModelSection) -> dict[str, str]:
    """How the group differs from what the job requested and from what the trainer can train on, by field."""
    expected: dict[str, tuple[object, object]] = {
        "run_id": (group.run_id, job.run_id),
        "samples": (len(group.episodes), job.n),
        "rewards": (len(group.rewards), job.num_episodes),
        "task": (group.task_digest, job.task_digest),
        "sampling.log_min_p": (np.float32(group.sampling.log_min_p), np.float32(job.sampling.log_min_p)),
        "sampling.temperature": (np.float32(group.sampling.temperature), np.float32(job.sampling.temperature)),
    }
    if job.task is None:
        expected["prompt_ids"] = _fingerprint(group.prompt_ids), _fingerprint(job.prompt_ids)
    wrong = _differences(expected)
    for engine in (group.engine, *group.engines):
        same_dtype = engine.dtype == model.compute_dtype != "float32"
        wrong |= _differences(
            {
                "engine.logprob_kind": (engine.logprob_kind, LogprobKind.CONSTRAINED),
                "engine.fp32_head": (engine.fp32_head, model.fp32_head if same_dtype else engine.fp32_head),
            }
        )
    return wrong


def _differences(expected: Mapping[str, tuple[object, object]]) -> dict[str, str]:
    return {
        name: f"{name} is {got!s:.80}, expected {want!s:.80}" for name, (got, want) in expected.items() if got != want
    }


def _fingerprint(prompt_ids: Int32Array) -> str:
    """Length and digest of a prompt, because prompts must not be logged."""
    return f"{len(prompt_ids)} tokens of {hashlib.sha256(prompt_ids.tobytes()).hexdigest()[:8]}"
