"""Sessions over HTTP: each turn is drawn on the replica that was asked, and recorded in the broker before it is
answered. A replica keeps nothing between two turns."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dvp_rl.contract.errors import NotFoundError, RequestError
from dvp_rl.contract.group import Group, Sample
from dvp_rl.contract.http import SessionBody, SessionRequest
from dvp_rl.contract.job import BYTES_PER_TOKEN, MAX_GROUP_TOKENS, Job, Sink
from dvp_rl.contract.openai import ChatRequest, CompletionRequest, Model
from dvp_rl.contract.sampling import MAX_STOPS
from dvp_rl.contract.session import (
    Fork,
    Session,
    SessionState,
    Turn,
    branches,
    digest,
    group_of,
    history,
    num_read,
    path,
)
from dvp_rl.engines.seeds import alone
from dvp_rl.transport.sessions import ENDED, Recorded, SessionStore

from .answers import Room, in_pieces
from .dialogue import Answer, Prompt
from .loops import outlast
from .replica import Replica

PATIENCE_S = 60.0
"""Longest wait of a drawn turn for a broker that is away, in seconds."""
CONTEXT_FULL = "context_length_exceeded"
"""OpenAI's code of the error, which harnesses know."""


@dataclass(frozen=True)
class Taken:
    """A turn, and what to tell the client."""

    session: Session
    index: int
    turn: Turn
    num_prompt_tokens: int
    answer: Answer
    pieces: list[str]
    """Texts of the drawn tokens; empty unless they were asked for."""


class Sessions:
    def __init__(
        self,
        store: SessionStore,
        replica: Replica,
        room: Room,
        generate: Callable[[Job, str], Awaitable[Group]],
        started_at: int,
    ) -> None:
        """`generate`: draws for a caller, within its limits."""
        self._started_at = started_at
        self._store = store
        self._replica = replica
        self._room = room
        self._generate = generate

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

    async def turn(self, session_id: str, request: ChatRequest | CompletionRequest, caller: str, key: str) -> Taken:
        """Draws and records a turn. `key`: the client's name of this request, or "": the same request with the same key
        is recorded once. Raises NotFoundError, RequestError, OverloadedError, UnavailableError, EngineError."""
        recorded = await self._store.read(session_id, caller=caller)
        session, turns = recorded.session, recorded.turns
        self._check(session, request)
        # Its seed too, unless the session has one: sessions with the same keys must not draw alike.
        turn_id = digest(f"{recorded.nonce}\n{key}\n{request.model_dump_json()}") if key else uuid.uuid4().hex
        known = [turn.turn_id for turn in turns]
        if turn_id in known:
            return await self._taken(recorded, known.index(turn_id), request)
        if recorded.state is SessionState.FINISHED:
            raise RequestError(ENDED.format(session_id))
        prompt = await self._replica.prompts.talk(lambda dialogue: dialogue.prompt(session, turns, request))
        job = self._job(turn_id, session, turns, prompt, request)
        group = await self._generate(job, caller)
        (sample,) = group.samples
        answer, pieces = await self._told(prompt.token_ids, sample, request, session)
        text = prompt.text + await self._replica.prompts.talk(
            lambda dialogue: dialogue.drawn_text(prompt.token_ids, sample.token_ids)
        )
        turn = Turn(
            turn_id=turn_id,
            parent=prompt.parent,
            context_ids=prompt.context_ids,
            sample=sample,
            engine=group.engine,
            replica_id=group.replica_id,
            num_chars=len(text),
            text_digest=digest(text),
            answer_digest=answer.digest,
            fork=prompt.fork,
            at=group.finished_at,
        )
        index, new = await outlast(
            f"session {session_id}", lambda: self._store.append(recorded, turn, caller=caller), PATIENCE_S
        )
        if not new:  # by a replica that had seemed to be dead
            return await self._taken(await self._store.read(session_id, caller=caller), index, request)
        self._replica.metrics.turns.labels(prompt.fork or "none").inc()
        return Taken(session, index, turn, len(prompt.token_ids), answer, pieces)

    async def model(self, session_id: str, caller: str, name: str | None = None) -> Model:
        """The session's only model. Raises NotFoundError."""
        await self._store.read(session_id, caller=caller)
        run_id, length = self._replica.run_id, self._replica.engine.context_length
        self._check_model(run_id if name is None else name)
        return Model(id=run_id, created=self._started_at, max_model_len=length)

    def _check_model(self, name: str) -> None:
        if name != self._replica.run_id:
            raise NotFoundError(f"model {name!r}: a session has only {self._replica.run_id!r}, the run's id")

    def _check(self, session: Session, request: ChatRequest | CompletionRequest) -> None:
        self._check_model(request.model)
        own = session.sampling.temperature
        if request.temperature not in (None, own):
            allowed = f"null or {own:g}, the session's: open it with another sampling.temperature"
            raise RequestError.at("temperature", f"{request.temperature:g}", allowed)

    def _job(
        self,
        turn_id: str,
        session: Session,
        turns: Sequence[Turn],
        prompt: Prompt,
        request: ChatRequest | CompletionRequest,
    ) -> Job:
        """The job that draws the turn. Raises RequestError if the context or the session is full."""
        context = self._replica.engine.context_length
        room = context - len(prompt.token_ids)
        if room < 1:
            field = "messages" if isinstance(request, ChatRequest) else "prompt"
            allowed = f"at most {context - 1}: a context of {context} less one for the answer"
            error = RequestError.at(field, f"{len(prompt.token_ids)} tokens", allowed)
            error.code = CONTEXT_FULL
            raise error
        sampling = session.sampling
        stop = tuple(dict.fromkeys((*sampling.stop, *request.stops)))
        if len(stop) > MAX_STOPS:
            raise RequestError.at("stop", f"{len(stop)} strings with the session's", f"at most {MAX_STOPS}")
        limit = min(request.limit or sampling.max_tokens, room)
        most = num_read(turns) + len(prompt.token_ids) + limit
        if most > MAX_GROUP_TOKENS:
            raise RequestError(
                f"session {session.session_id!r}: with this turn, its samples and their prompts may have {most} "
                f"tokens, at most {MAX_GROUP_TOKENS} allowed: finish it"
            )
        job = Job(
            job_id=turn_id,
            run_id=session.run_id,
            prompt_ids=prompt.token_ids,
            sampling=sampling.model_copy(update={"max_tokens": limit, "stop": stop}),
            sink=Sink.CLIENT,
            submitted_at=time.time(),
        )
        if request.seed is not None:
            return job.model_copy(update={"sampling": job.sampling.model_copy(update={"seed": request.seed})})
        return alone(job, len(turns))

    async def _taken(self, recorded: Recorded, index: int, request: ChatRequest | CompletionRequest) -> Taken:
        session, turns = recorded.session, recorded.turns
        turn = turns[index]
        read = np.concatenate([history(path(turns, turn.parent)), turn.context_ids])
        return Taken(session, index, turn, len(read), *await self._told(read, turn.sample, request, session))

    async def _told(
        self, read: NDArray[np.int32], sample: Sample, request: ChatRequest | CompletionRequest, session: Session
    ) -> tuple[Answer, list[str]]:
        """What the client is told of a sample that followed the tokens `read`, and the texts of its tokens if it asked
        for log-probs."""
        with_logprobs = request.logprobs not in (None, False)
        return await self._replica.prompts.talk(
            lambda dialogue: (
                dialogue.answer(read, sample.token_ids, request, session),
                dialogue.pieces(sample.token_ids) if with_logprobs else [],
            )
        )

    async def status(self, session_id: str, caller: str) -> SessionBody:
        """Raises NotFoundError."""
        return _body(await self._store.read(session_id, caller=caller))

    @asynccontextmanager
    async def finish(self, session_id: str, reward: float | None, caller: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Ends the session. A SessionBody with its samples, as JSON. Raises NotFoundError, RequestError if it was
        finished with another reward, OverloadedError if too many results are being read."""
        await self._store.finish(session_id, reward, caller=caller)
        recorded = await self._store.read(session_id, caller=caller)
        async with self._room.hold(BYTES_PER_TOKEN * num_read(recorded.turns), caller):
            group = await asyncio.to_thread(group_of, recorded.session, recorded.turns)
            yield in_pieces(_body(recorded), "group", self._replica.prompts.response(group))

    async def delete(self, session_id: str, caller: str) -> SessionBody:
        """Returns the session as it was. Raises NotFoundError."""
        recorded = await self._store.read(session_id, caller=caller)
        await self._store.delete(session_id, caller=caller)
        return _body(recorded)


def _body(recorded: Recorded) -> SessionBody:
    turns = recorded.turns
    return SessionBody(
        session_id=recorded.session.session_id,
        state=recorded.state,
        turns=len(turns),
        branches=len(branches(turns)),
        drifted=sum(turn.fork is Fork.DRIFT for turn in turns),
        tokens=sum(turn.num_tokens for turn in turns),
        reward=recorded.reward,
        metadata=recorded.session.metadata,
    )
