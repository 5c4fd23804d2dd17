"""Sessions over HTTP: each turn is drawn on the replica that was asked, and recorded in the broker before it is
answered. A replica keeps nothing between two turns."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Never

import numpy as np

from dvp_rl.cancellation import race
from dvp_rl.contract.errors import NotFoundError, RequestError, UnavailableError
from dvp_rl.contract.generate import GenerateRequest
from dvp_rl.contract.group import Group
from dvp_rl.contract.http import EpisodeBody, FinishRequest, SessionBody, SessionRequest
from dvp_rl.contract.job import BYTES_PER_TOKEN, MAX_GROUP_TOKENS, Job, Sink
from dvp_rl.contract.openai import CONTEXT_FULL, Model, Recording
from dvp_rl.contract.sampling import MAX_STOP_TOKENS, MAX_STOPS, log_of
from dvp_rl.contract.session import (
    Ending,
    Session,
    SessionState,
    Turn,
    beat_every,
    digest,
    group_of,
    history,
    num_read,
    path,
)
from dvp_rl.engines.seeds import alone, seeded
from dvp_rl.transport.sessions import ENDED, UNKNOWN, Recorded, SessionStore, Summary

from .answers import Room, in_pieces, null
from .dialogue import Answer, Dialogue, Prompt, TurnRequest
from .loops import outlast
from .replica import Replica

POLL_S = 0.5
"""Time between two looks for an episode, in seconds."""
STOPPING = "this replica is stopping"
PATIENCE_S = 60.0
"""Longest wait of a drawn turn for a broker that is away, in seconds."""


@dataclass(frozen=True)
class Taken:
    """A turn, and what to tell the client."""

    session: Session
    index: int
    turn: Turn
    num_prompt_tokens: int
    answer: Answer

    @property
    def recording(self) -> Recording:
        return Recording(turn=self.index, parent=self.turn.parent, fork=self.turn.fork)


class Sessions:
    def __init__(
        self,
        store: SessionStore,
        replica: Replica,
        room: Room,
        generate: Callable[[Job, str], Coroutine[Any, Any, Group]],
        most_deliveries: int,
        is_stopping: Callable[[], bool],
    ) -> None:
        """`generate`: draws for a caller, within its limits. `most_deliveries`: of an episode, before its job dies.
        `is_stopping`: whether this replica hands out no more episodes."""
        self._store = store
        self._replica = replica
        self._room = room
        self._generate = generate
        self._most_deliveries = most_deliveries
        self._is_stopping = is_stopping

    async def open(self, request: SessionRequest, caller: str) -> SessionBody:
        """Raises RequestError, OverloadedError."""
        session = Session(
            session_id=request.session_id or uuid.uuid4().hex,
            run_id=self._replica.run_id,
            **request.model_dump(include={"chat_template_kwargs", "metadata", "idle_s"}),
            sampling=request.sampling.to_sampling(),
        )
        if session.chat_template_kwargs:
            await self._replica.prompts.talk(lambda dialogue: dialogue.check(session))
        state = await self._store.open(session, caller=caller)
        return SessionBody(session_id=session.session_id, state=state, metadata=session.metadata)

    async def take(self, wait_s: float, caller: str, key: str) -> EpisodeBody | None:
        """The next episode that is to be played; None if there is none within `wait_s`. `key`: the client's name of
        this request, or "": the same key again takes the same episode. Raises RequestError if that is finished,
        OverloadedError, UnavailableError."""
        session_id = digest(f"{caller}\n{key}") if key else uuid.uuid4().hex
        deadline = time.monotonic() + wait_s
        while True:
            if self._is_stopping():
                raise UnavailableError(STOPPING)
            taken = await self._store.take(session_id, most_deliveries=self._most_deliveries, caller=caller)
            left_s = deadline - time.monotonic()
            if taken is not None or left_s <= 0:
                break
            await asyncio.sleep(min(POLL_S, left_s))
        if taken is None:
            return None
        job = taken.job
        assert job.task is not None, "only jobs with a task have episodes"
        return EpisodeBody(
            session_id=session_id,
            run_id=job.run_id,
            job_id=job.job_id,
            index=taken.index,
            n=job.n,
            sink=job.sink,
            task=job.task,
            sampling=job.sampling.model_dump(mode="json", exclude={"seed"}),
            idle_s=job.idle_s,
        )

    async def turn(self, session_id: str, request: TurnRequest, caller: str, key: str) -> Taken:
        """Draws and records a turn. `key`: the client's name of this request, or "": the same request with the same key
        is recorded once. Raises NotFoundError, RequestError, OverloadedError, UnavailableError, EngineError."""
        recorded = await self._store.read(session_id, caller=caller)
        session, turns = recorded.session, recorded.turns
        self._check(session, request)
        # The model's name is the run's: runs with the same seed draw alike, whatever they are called.
        asked = request.model_dump_json(exclude={"request_id", "model"})
        name = digest(f"{key}\n{asked}") if key else uuid.uuid4().hex
        # Sessions with the same keys must not draw alike.
        turn_id = digest(f"{recorded.nonce}\n{name}")
        known = [turn.turn_id for turn in turns]
        if turn_id in known:
            return await self._taken(recorded, known.index(turn_id), request)
        if recorded.state is SessionState.FINISHED:
            raise RequestError(ENDED.format(session_id))
        prompt = await self._replica.prompts.talk(lambda dialogue: dialogue.prompt(session, turns, request))
        job = self._job(recorded, turn_id, name, prompt, request)
        await self._store.beat(session_id, nonce=recorded.nonce, caller=caller)
        group = await race(self._generate(job, caller), self._beats(recorded, caller))

        def told(dialogue: Dialogue) -> tuple[Answer, Turn]:
            (sample,) = group.samples
            answer = dialogue.answer(prompt.token_ids, sample.token_ids, request, session)
            return answer, dialogue.turn(turn_id, prompt, group, answer)

        answer, turn = await self._replica.prompts.talk(told)
        index, new = await outlast(
            f"session {session_id}", lambda: self._store.append(recorded, turn, caller=caller), PATIENCE_S
        )
        if not new:  # by a replica that had seemed to be dead
            again = await self._store.read(session_id, caller=caller)
            if again.nonce != recorded.nonce:
                raise NotFoundError(UNKNOWN.format(session_id))
            return await self._taken(again, index, request)
        self._replica.metrics.turns.labels(prompt.fork or "none").inc()
        return Taken(session, index, turn, len(prompt.token_ids), answer)

    async def _beats(self, recorded: Recorded, caller: str) -> Never:
        """Keeps a session open while a turn is drawn. Raises NotFoundError or RequestError once nobody needs the turn
        any more."""
        session = recorded.session
        while True:
            await asyncio.sleep(beat_every(session.idle_s))
            with suppress(UnavailableError):  # the next one may be in time
                await self._store.beat(session.session_id, nonce=recorded.nonce, caller=caller)

    async def model(self, session_id: str, caller: str, name: str | None = None) -> Model:
        """The session's only model. Raises NotFoundError."""
        await self._store.status(session_id, caller=caller)
        return self._replica.model(name)

    def _check(self, session: Session, request: TurnRequest) -> None:
        self._replica.model(request.model)
        if isinstance(request, GenerateRequest):
            self._replica.prompts.check(request.READ, request.token_ids)
        drawn, own = request.drawn, session.sampling
        if session.sink is not Sink.CLIENT and drawn.seed is not None:
            raise RequestError.at(f"{drawn.AT}seed", drawn.seed, "null: the run gives each episode a seed of its own")
        if drawn.temperature not in (None, own.temperature):
            allowed = f"null or {own.temperature}, the session's: open it with another sampling.temperature"
            raise RequestError.at(f"{drawn.AT}temperature", drawn.temperature, allowed)
        if drawn.min_p is not None and log_of(drawn.min_p) != own.log_min_p:
            allowed = f"null or {math.exp(own.log_min_p)}, the session's: open it with another sampling.min_p"
            raise RequestError.at(f"{drawn.AT}min_p", drawn.min_p, allowed)
        if drawn.n not in (None, 1):
            raise RequestError.at(f"{drawn.AT}n", drawn.n, "1 in a session")

    def _job(
        self,
        recorded: Recorded,
        turn_id: str,
        name: str,
        prompt: Prompt,
        request: TurnRequest,
    ) -> Job:
        """The job that draws the turn. `name`: of the request in its session. Raises RequestError if the context or the
        session is full."""
        session, turns = recorded.session, recorded.turns
        self._replica.prompts.check(request.READ, prompt.token_ids)
        sampling, drawn = session.sampling, request.drawn
        stop = tuple(dict.fromkeys((*sampling.stop, *drawn.stop)))
        if len(stop) > MAX_STOPS:
            raise RequestError.at(f"{drawn.AT}stop", f"{len(stop)} strings with the session's", f"at most {MAX_STOPS}")
        stop_token_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *(drawn.stop_token_ids or ()))))
        if len(stop_token_ids) > MAX_STOP_TOKENS:
            given = f"{len(stop_token_ids)} ids with the session's"
            raise RequestError.at(f"{drawn.AT}stop_token_ids", given, f"at most {MAX_STOP_TOKENS}")
        allowed_tokens = MAX_GROUP_TOKENS // session.n
        left = allowed_tokens - num_read(turns) - len(prompt.token_ids)
        if left < 1:
            raise RequestError(
                f"session {session.session_id!r}: with this turn, its samples and their prompts would have "
                f"{allowed_tokens + 1 - left} tokens or more, at most {allowed_tokens} allowed: finish it",
                code=CONTEXT_FULL,
            )
        room = self._replica.engine.context_length - len(prompt.token_ids)
        limit = min(drawn.limit or sampling.max_tokens, room, left)
        of_run = session.sink is not Sink.CLIENT
        if of_run:
            limit = min(limit, sampling.max_tokens)
        job = Job(
            job_id=turn_id,
            run_id=session.run_id,
            prompt_ids=prompt.token_ids,
            sampling=sampling.model_copy(update={"max_tokens": limit, "stop": stop, "stop_token_ids": stop_token_ids}),
            sink=session.sink,
            min_seq=session.min_seq,
            submitted_at=time.time(),
        )
        if of_run:  # alike in another attempt at the episode, whatever else it drew
            return seeded(job, name)
        if drawn.seed is not None:
            return job.model_copy(update={"sampling": job.sampling.model_copy(update={"seed": drawn.seed})})
        return alone(job, len(turns))

    async def _taken(self, recorded: Recorded, index: int, request: TurnRequest) -> Taken:
        session, turns = recorded.session, recorded.turns
        if index >= len(turns):  # the episode was finished meanwhile
            raise RequestError(ENDED.format(session.session_id))
        turn = turns[index]
        read = np.concatenate([history(path(turns, turn.parent)), turn.context_ids])
        answer = await self._replica.prompts.talk(
            lambda dialogue: dialogue.answer(read, turn.sample.token_ids, request, session)
        )
        return Taken(session, index, turn, len(read), answer)

    async def status(self, session_id: str, caller: str) -> SessionBody:
        """Raises NotFoundError."""
        return _body(await self._store.status(session_id, caller=caller))

    async def beat(self, session_id: str, caller: str) -> SessionBody:
        """Keeps the session open. Raises NotFoundError, RequestError if it is finished."""
        await self._store.beat(session_id, caller=caller)
        return await self.status(session_id, caller)

    @asynccontextmanager
    async def finish(self, session_id: str, request: FinishRequest, caller: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Ends the session. A SessionBody as JSON, with its samples unless they are the trainer's. Raises
        NotFoundError, RequestError if it was finished otherwise, OverloadedError if too many results are being read."""
        ending = request.to_ending()
        recorded = await self._ended(session_id, ending, caller)
        body = _body(await self._store.status(session_id, caller=caller))
        if recorded.job_id is not None:
            yield in_pieces(body, "group", null())
            return
        async with self._room.hold(BYTES_PER_TOKEN * num_read(recorded.turns), caller):
            group = await asyncio.to_thread(group_of, recorded.session, recorded.turns, ending)
            yield in_pieces(body, "group", self._replica.prompts.response(group))

    async def _ended(self, session_id: str, ending: Ending, caller: str) -> Recorded:
        """Ends the session and returns it, with all its turns unless it is an episode of a job."""
        while True:
            recorded = await self._store.read(session_id, caller=caller)
            group = None
            if recorded.job_id is not None and recorded.turns:
                group = await asyncio.to_thread(group_of, recorded.session, recorded.turns, ending, recorded.job_id)
            if await self._store.finish(recorded, ending, group, caller=caller):
                return recorded

    async def delete(self, session_id: str, error: str, caller: str) -> SessionBody:
        """Returns the session as it was. Raises NotFoundError."""
        summary = await self._store.status(session_id, caller=caller)
        await self._store.delete(session_id, error, most_deliveries=self._most_deliveries, caller=caller)
        return _body(summary)


def _body(summary: Summary) -> SessionBody:
    session = summary.session
    return SessionBody(
        session_id=session.session_id,
        metadata=session.metadata if session.sink is Sink.CLIENT else {},
        **{name: value for name, value in summary._asdict().items() if name != "session"},
    )
