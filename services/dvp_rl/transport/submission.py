"""Submission of jobs: the trainer's side (fenced) and the HTTP side (admission)."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from dvp_rl.contract.errors import NotFoundError, OverloadedError, RequestError
from dvp_rl.contract.group import Group
from dvp_rl.contract.job import JOB_ID, MAX_DEADLINE_S, Job, JobState, Sink, own_prefix
from dvp_rl.contract.shares import EVERYBODY, RULE

from .broker import CLIENT_MEMORY_SHARE, CLIENT_SHARE, RESULT_SHARE, RETRY_AFTER_MEMORY_S, Broker

RETRY_AFTER_BACKLOG_S = 2.0
RETRY_AFTER_CLOSED_S = 30.0
UNKNOWN = "job {!r}: never submitted, deleted, or ended more than an hour ago"
BATCH = 64
"""Jobs per script call, so that one call never holds the broker for long."""


class Submitted(StrEnum):
    """Outcome for one submitted job. All values except NEW and REFUSED are the state of a job that already existed."""

    NEW = "new"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"
    REFUSED = "refused"
    """Not admitted: `limit` jobs are in flight, more than 70 % of the broker's memory is used, or the queue is closed.
    Submit again later."""


class JobReport(NamedTuple):
    state: JobState
    error: str | None = None
    num_bytes: int | None = None
    """Size of the result; None unless this is a client's job that is done."""


class Submission:
    """Submits jobs. Submitting an existing id is a no-op that returns its state. A resumed trainer relies on this: it
    can always submit everything outstanding again (after the broker was wiped, all of it is NEW)."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def submit(self, jobs: Sequence[Job], *, fence: int, limit: int) -> list[Submitted]:
        """Submits jobs with sink `train` or `eval`; returns one outcome per job, in order. `limit` bounds the train
        jobs in flight; it does not apply to `eval`. Raises LeaseLostError if another trainer took over."""
        for job in jobs:
            self._check(job, Sink.TRAIN, Sink.EVAL)
        outcomes: list[Submitted] = []
        for start in range(0, len(jobs), BATCH):
            outcomes += await self._submit(jobs[start : start + BATCH], fence, limit)
        return outcomes

    async def _submit(self, jobs: Sequence[Job], fence: int, limit: int) -> list[Submitted]:
        rows = [(job.job_id, job.sink, job.to_bytes(), job.num_episodes, math.ceil(1000 * job.idle_s)) for job in jobs]
        try:
            reply = await self.broker.script("submit", fence, limit, *(part for row in rows for part in row))
        except OverloadedError:
            return [Submitted.REFUSED] * len(jobs)
        return [Submitted(outcome.decode()) for outcome in reply]

    async def submit_client(
        self, job: Job, *, limit: int, deadline_s: float | None = None, caller: str = EVERYBODY
    ) -> Submitted:
        """Admits a job while fewer than `limit` jobs wait unread and clients' jobs cannot exceed their share of the
        broker's memory. A named `caller` may take no more of either than it leaves free. A job that is not done within
        `deadline_s`, by the broker's clock, is dead and leaves no dead letter. Raises OverloadedError(reason,
        retry_after_s), or RequestError if this job alone could exceed the share or the id is another caller's."""
        self._check(job, Sink.CLIENT)
        if deadline_s is not None and not 0 < deadline_s <= MAX_DEADLINE_S:
            raise RequestError.at("deadline_s", deadline_s, f"number in (0, {MAX_DEADLINE_S}]")
        size = job.max_bytes
        until_ms = "" if deadline_s is None else math.ceil(1000 * deadline_s)
        args = (job.job_id, job.to_bytes(), limit, size, until_ms, caller)
        reply, taken, allowed = await self.broker.script("submit_client", *args)
        check_admitted(reply.decode(), taken, allowed, size, caller)
        match reply.decode():
            case "backlog":
                reason = f"{limit} jobs already wait for a replica, the most that max_queued allows"
                raise OverloadedError(reason, RETRY_AFTER_BACKLOG_S)
            case "caller_backlog":
                has = f"{taken} jobs of {caller} wait for a replica"
                reason = f"{has}, and {allowed} places of {limit} (max_queued) are free: {RULE}"
                raise OverloadedError(reason, RETRY_AFTER_BACKLOG_S)
            case "large":
                whose = "one caller, half of what all have together" if caller else "all clients together"
                most = f"{_mib(allowed)} for {whose} ({CLIENT_SHARE:.0%} of the broker's maxmemory)"
                raise RequestError(
                    f"n: {job.n} samples of up to {job.sampling.max_tokens} tokens, and the prompt, may take up to "
                    f"{_mib(size)}, allowed: {most}; lower n or sampling.max_tokens",
                    [{"field": "n", "value": job.n, "allowed": most}],
                )
            case state:
                return Submitted(state)

    async def delete(
        self, job_id: str, only: JobState | None = None, *, by: str = "", caller: str = EVERYBODY
    ) -> JobState:
        """Deletes a client's job with its result or dead letter and returns the state it had; a queued or running job
        is cancelled. `by`: who deletes it, if not the client. Raises NotFoundError as `status` does, also if the job is
        not in state `only`, and RequestError if the job is the trainer's."""
        known = re.fullmatch(JOB_ID, job_id)
        state = (await self.broker.script("delete", job_id, only or "", by, caller)).decode() if known else "unknown"
        if state in ("unknown", "other"):
            raise NotFoundError(UNKNOWN.format(job_id))
        return JobState(state)

    def _check(self, job: Job, *sinks: Sink) -> None:
        if job.sink is Sink.CLIENT and job.job_id.startswith(own := own_prefix(job.run_id)):
            allowed = f"any that does not begin with {own!r}, as the trainer's do"
            raise RequestError.at("job_id", job.job_id, allowed)
        if job.run_id != self.broker.run_id:
            raise RequestError(f"run_id: {job.run_id!r}, this queue belongs to run {self.broker.run_id!r}")
        if job.sink not in sinks:
            raise RequestError(f"sink: {job.sink!r}, allowed here: {', '.join(sinks)}")

    async def status(self, job_id: str, *, caller: str = EVERYBODY) -> JobReport:
        """State of a job. Raises NotFoundError if the id is unknown, another caller's, or its result has expired."""
        keys = self.broker.keys
        # No transaction: Redis refuses it when its memory is full, even if it only reads.
        async with self.broker.call(), self.broker.redis.pipeline(transaction=False) as both:
            both.hmget(keys.job(job_id), names := ("state", "sink", "caller", "error"))
            both.strlen(keys.result(job_id))
            stored, num_bytes = await both.execute()
        fields = {name: value.decode() for name, value in zip(names, stored, strict=True) if value is not None}
        has_result = fields.get("sink") == Sink.CLIENT and fields.get("state") == JobState.DONE
        others = caller != EVERYBODY and (fields.get("sink") != Sink.CLIENT or fields.get("caller", caller) != caller)
        if "state" not in fields or others or (has_result and not num_bytes):
            raise NotFoundError(UNKNOWN.format(job_id))
        return JobReport(JobState(fields["state"]), fields.get("error"), num_bytes if has_result else None)

    async def result(self, job_id: str, *, caller: str = EVERYBODY) -> Group:
        """The result of a client's job that is done. Raises NotFoundError."""
        keys = self.broker.keys
        async with self.broker.call(), self.broker.redis.pipeline(transaction=False) as both:
            both.get(keys.result(job_id))
            # The job may have been deleted since `status`, and its id reused by another caller.
            both.hget(keys.job(job_id), "caller")
            result, whose = await both.execute()
        if result is None or (caller != EVERYBODY and whose not in (None, caller.encode())):
            raise NotFoundError(UNKNOWN.format(job_id))
        return await asyncio.to_thread(Group.from_bytes, result)


def check_admitted(outcome: str, taken: int, allowed: int, size: int, caller: str) -> None:
    """Raises OverloadedError if a script's outcome is one of those of client_refusal that will pass, or `closed`.
    `size`: the bytes that were asked for."""
    match outcome:
        case "closed":
            reason = "the queue is being drained: no new jobs until dvp-queue open"
            raise OverloadedError(reason, RETRY_AFTER_CLOSED_S)
        case "crowded":
            reason = f"the broker's memory (its maxmemory) is {RESULT_SHARE:.0%} full, the rest is for finished groups"
        case "memory":
            reason = (
                f"the broker's memory (its maxmemory) would be {CLIENT_MEMORY_SHARE:.0%} full, the rest is for training"
            )
        case "results":
            reason = (
                f"clients' jobs and sessions use or have reserved {_mib(taken)} of {_mib(allowed)} ({CLIENT_SHARE:.0%} "
                f"of the broker's maxmemory), and this may take up to {_mib(size)}: delete results that were read "
                "(DELETE /v1/jobs/..., /v1/sessions/...)"
            )
        case "caller_results":
            reason = (
                f"jobs and sessions of {caller} use or have reserved {_mib(taken)}, {_mib(allowed)} of the clients' "
                f"share ({CLIENT_SHARE:.0%} of the broker's maxmemory) are free, and this may take up to {_mib(size)}: "
                f"{RULE}; delete results that were read (DELETE /v1/jobs/..., /v1/sessions/...), or request less"
            )
        case _:
            return
    raise OverloadedError(reason, RETRY_AFTER_MEMORY_S)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
