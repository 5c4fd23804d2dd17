"""Clients of the HTTP API, jobs that cannot run, damaged entries, and people at `dvp-queue`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from dvp_rl.client import AsyncClient, Retry
from dvp_rl.contract.errors import DvpError, NotFoundError, RequestError
from dvp_rl.contract.job import Job, JobState, Sink
from dvp_rl.contract.job import job_id as train_job_id
from dvp_rl.ports import HOST
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.submission import Submission

from .system import GROUPS, System
from .traps import Role

Answer = TypeVar("Answer")

POISONER = "poisoner"
PAUSE_S = 0.15
MOST_OPEN = 6
PATIENCE_S = 5.0
ONCE = Retry(tries=1)
TURNS = 3
LARGE_N, LARGE_TOKENS = 64, 200
READERS = 8
TOO_LONG = [5] * 300
"""Prompt longer than the model's context: a replica refuses it, and the job becomes a dead letter."""
COMMANDS = {
    "close": ["drain", "--no-wait"],
    "open": ["open"],
    "health": ["status"],
    "pending": ["pending"],
    "sessions": ["sessions", "list"],
    "letters": ["dead", "list"],
    "replay": ["dead", "replay", "--all", "--yes"],
    "discard": ["dead", "drop", "--all", "--yes"],
    "purge": ["purge", "--yes", "--force"],
}


@dataclass
class Traffic:
    """Client jobs, each of which must end exactly once, unless the broker that held it was wiped."""

    system: System
    open: dict[str, bool] = field(default_factory=dict)
    """Jobs accepted and not yet ended; True for those that cannot run."""
    counts: Counter[str] = field(default_factory=Counter)
    submitting: bool = True
    _number: int = 0

    async def run(self) -> None:
        while True:
            with suppress(DvpError):
                async with await Broker.connect(self.system.broker.url, self.system.layout.run_id) as broker:
                    while True:
                        await self.round(broker)
                        await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(PAUSE_S)

    async def round(self, broker: Broker) -> None:
        self._number += 1
        if self.submitting and len(self.open) < MOST_OPEN:
            if self._number % 9 == 0:
                await self.poison(broker)
            else:
                await self.ask(f"client-{self._number}", long=self._number % 3 == 0)
        if self.submitting and self._number % 20 == 0:
            async with broker.call():
                await broker.redis.xadd(broker.keys.groups, {"kind": "group", "id": "", "data": "damaged"})
                # Ended jobs that a broker may still count as in flight after it lost its last writes.
                await broker.redis.sadd(broker.keys.in_flight, *(f"ended-{number}" for number in range(8)))
        for job_id in list(self.open):
            await self.look(broker, job_id)
        if self.submitting and self._number % 4 == 0:
            await self.play(f"episode-{self._number}")
        if self.submitting and self._number % 5 == 0:
            await self.delete(f"client-{self._number - 2 * self.system.rng.randrange(10)}")

    async def ask(self, job_id: str, *, long: bool) -> None:
        await (self.submit(job_id, n=8, max_tokens=80) if long else self.submit(job_id, n=2, max_tokens=4))

    async def submit(self, job_id: str, n: int, max_tokens: int) -> None:
        """Submits a job until some replica has answered 202, with the same id every time."""
        sampling = {"max_tokens": max_tokens}
        await self.tell(lambda client: client.submit(prompt="1+1=", n=n, sampling=sampling, job_id=job_id))
        self.accept(job_id, poisoned=False)

    async def delete(self, job_id: str) -> None:
        """Deletes a job. An open one is thereby cancelled, and its end is not awaited."""
        if self.open.pop(job_id, None) is not None:
            self.counts["cancelled"] += 1
        await self.tell(lambda client: client.delete(job_id))

    async def play(self, session_id: str) -> None:
        """Plays an episode of TURNS turns, each call on a random replica and sent again until it is answered. Every
        turn must be recorded once, unless the broker was wiped meanwhile."""
        wipes, model, text = self.counts["wipes"], self.system.layout.run_id, "1+1="
        base = f"/v1/sessions/{session_id}"
        try:
            # The run has none: those of a storm amid episodes belong to its harnesses.
            if await self.call("POST", "/v1/episodes", {"wait_s": 0}):
                self.system.faults.append("an episode of a run without episodes")
            await self.call("POST", "/v1/sessions", {"session_id": session_id, "sampling": {"max_tokens": 4}})
            for turn in range(TURNS):
                await self.call("POST", f"{base}/heartbeat")
                body = {"model": model, "prompt": text}
                answer = await self.call("POST", f"{base}/v1/completions", body, {"Idempotency-Key": f"turn-{turn}"})
                text += f"{answer['choices'][0]['text']}\n2+2="
            found = await self.call("POST", f"{base}/finish", {"reward": 1.0})
            await self.call("DELETE", base)
        except RequestError as error:
            if wipes == self.counts["wipes"]:
                self.system.faults.append(f"session {session_id}: {error}")
            return
        if (found["turns"], found["reward"]) != (TURNS, 1.0) and wipes == self.counts["wipes"]:
            self.system.faults.append(f"session {session_id}: {found['turns']} turns of {TURNS}")
        self.counts["episodes"] += 1

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Asks random replicas until one has done it. Raises RequestError if it is refused for good, but a session that
        is gone may be deleted again."""
        while True:
            if port := self.system.port(self.system.rng.randrange(self.system.num_replicas)):
                with suppress(httpx.HTTPError):
                    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=PATIENCE_S) as client:
                        answer = await client.request(method, path, json=body, headers=headers)
                    found: dict[str, Any] = answer.json() if answer.content else {}
                    if answer.is_success or (method, answer.status_code) == ("DELETE", 404):
                        return found
                    if answer.status_code in (404, 422):
                        raise RequestError(found["detail"])
            await asyncio.sleep(PAUSE_S)

    async def large(self) -> None:
        """Lets several clients read one large result at once; each must get all of it, unless the broker is wiped."""
        job_id, wipes = f"large-{self.counts['large results']}", self.counts["wipes"]
        self.counts["large results"] += 1
        await self.submit(job_id, n=LARGE_N, max_tokens=LARGE_TOKENS)
        while job_id in self.open:  # noqa: ASYNC110 - its state is polled for
            await asyncio.sleep(PAUSE_S)
        try:
            reads = [self.tell(lambda client: client.job(job_id)) for _ in range(READERS)]
            statuses = await asyncio.gather(*reads)
        except NotFoundError:
            if wipes == self.counts["wipes"]:
                self.system.faults.append(f"client job {job_id}: its result is lost")
            return
        sizes = {len(status.group.samples) if status.group else 0 for status in statuses}
        if sizes != {LARGE_N} and wipes == self.counts["wipes"]:
            self.system.faults.append(f"client job {job_id}: results of {sizes} samples")

    async def squat(self) -> None:
        """A client tries to submit and to delete a job under an id that the trainer uses or is about to use."""
        layout = self.system.layout
        position = layout.newest_step() * GROUPS + self.system.rng.randrange(4 * GROUPS)
        taken = train_job_id(layout.run_id, position, 0)
        for attempt in (lambda client: client.submit(prompt="1+1=", job_id=taken), lambda client: client.delete(taken)):
            with suppress(RequestError):
                if (answer := await self.tell(attempt)) is not None:
                    self.system.faults.append(f"a client could use the trainer's job id {taken}: {answer}")

    async def tell(self, what: Callable[[AsyncClient], Awaitable[Answer]]) -> Answer:
        """Asks random replicas until one has answered. Raises NotFoundError or RequestError if that is the answer."""
        while True:
            if port := self.system.port(self.system.rng.randrange(self.system.num_replicas)):
                try:
                    async with AsyncClient(f"http://{HOST}:{port}", timeout=PATIENCE_S, retry=ONCE) as client:
                        return await what(client)
                except (NotFoundError, RequestError):
                    raise
                except DvpError:
                    pass
            await asyncio.sleep(PAUSE_S)

    async def poison(self, broker: Broker) -> None:
        job = Job(job_id=f"poison-{self._number}", run_id=broker.run_id, prompt_ids=TOO_LONG, sink=Sink.CLIENT)
        await Submission(broker).submit_client(job, limit=10**6, caller=POISONER)
        self.accept(job.job_id, poisoned=True)

    def accept(self, job_id: str, *, poisoned: bool) -> None:
        self.open[job_id] = poisoned
        self.counts["accepted"] += 1

    async def look(self, broker: Broker, job_id: str) -> None:
        wipes = self.counts["wipes"]
        try:
            report = await Submission(broker).status(job_id)
        except NotFoundError:
            if wipes == self.counts["wipes"] and job_id in self.open:
                self.end(job_id, "lost")
            return
        if report.state in (JobState.DONE, JobState.DEAD) and job_id in self.open:
            expected = JobState.DEAD if self.open[job_id] else JobState.DONE
            self.end(job_id, report.state if report.state is expected else f"{report.state} unexpectedly")

    def end(self, job_id: str, how: str) -> None:
        del self.open[job_id]
        self.counts[how] += 1
        if how not in (JobState.DONE, JobState.DEAD):
            self.system.faults.append(f"client job {job_id}: {how}")

    def forget(self) -> None:
        """Drops all open jobs, because a wiped broker no longer has them and tells their clients so."""
        self.counts["wipes"] += 1
        self.counts["gone with a wiped broker"] += len(self.open)
        self.open.clear()

    # --- operators ------------------------------------------------------------------------------------------------

    async def operate(self) -> None:
        """Runs operators' commands one after another, as long as a fail point of theirs is missing."""
        while (trap := self.system.traps.take(Role.OPERATOR)) is not None:
            name = trap.rpartition(".")[0]
            await self.command(name, trap)
            while name == "close" and await self.command("open", None):
                pass  # it was killed as tired, or found no broker: nobody else opens the queue again
            await asyncio.sleep(PAUSE_S)

    async def command(self, name: str, trap: str | None) -> int | None:
        """Its exit code."""
        run_id = self.system.layout.run_id
        if name == "purge":
            run_id += "-scratch"
            with suppress(DvpError):
                async with await Broker.connect(self.system.broker.url, run_id) as broker:
                    job = Job(job_id="x", run_id=run_id, prompt_ids=[1], sink=Sink.CLIENT)
                    await Submission(broker).submit_client(job, limit=10**6)
        child = self.system.start(Role.OPERATOR, f"operator-{name}", trap, [f"--run-id={run_id}", *COMMANDS[name]])
        await self.system.gone(child)
        return child.process.poll()
