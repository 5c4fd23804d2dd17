"""Sessions in the broker, where any replica finds them."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dvp_rl.contract.errors import NotFoundError, OverloadedError, RequestError
from dvp_rl.contract.group import Group
from dvp_rl.contract.job import JOB_ID, Job
from dvp_rl.contract.openai import CONTEXT_FULL
from dvp_rl.contract.session import MAX_SESSION_BYTES, Ending, Fork, Session, SessionState, Turn
from dvp_rl.contract.shares import EVERYBODY

from .broker import MEMORY_SHARE, RETRY_AFTER_MEMORY_S, Broker
from .jobs import MAX_ERROR_CHARS
from .submission import check_admitted

UNKNOWN = "session {!r}: never opened, deleted, or not used for longer than its idle_s; a finished one is kept an hour"
ENDED = "session {!r} is finished: it takes no more turns"


class Recorded(NamedTuple):
    """A session as the broker has it."""

    session: Session
    state: SessionState
    turns: list[Turn]
    """None are left of an episode that is finished."""
    nonce: str
    """Differs from that of a session that was deleted and opened again."""
    unstored: bytes
    """The session, if the broker does not have it: that of an episode is stored with its first turn, so that later
    ones need not read the job with its task. Else empty."""
    job_id: str | None = None
    """The job's, if this is one of its episodes."""


class Summary(NamedTuple):
    """A session without its turns."""

    session: Session
    state: SessionState
    reward: float | None
    metrics: dict[str, float]
    turns: int
    branches: int
    drifted: int
    tokens: int


class OpenSession(NamedTuple):
    """A session that somebody plays, as an operator sees it."""

    session_id: str
    caller: str
    job_id: str
    """The job's, if this is one of its episodes; "" for a client's."""
    sink: str
    """The job's; "" for a client's."""
    episode: int
    """Which of the job's episodes it is; 0 for a client's."""
    turns: int
    branches: int
    drifted: int
    tokens: int
    num_bytes: int
    silent_s: float
    """Seconds since its last turn or heartbeat, or since it was opened or taken."""
    left_s: float
    """Seconds until it is forgotten, or given to another harness, unless it has a turn or a heartbeat."""


async def open_sessions(broker: Broker, count: int, *, clients: bool = True) -> list[OpenSession]:
    """The `count` that will be forgotten first; without `clients` only episodes."""
    found = [
        OpenSession._make(
            [*(text.decode(errors="replace") for text in row[:4]), *row[4:-2], *(ms / 1000 for ms in row[-2:])]
        )
        for row in await broker.script("sessions", count if clients else 0, count)
    ]
    return sorted(found, key=lambda session: session.left_s)[:count]


@dataclass(frozen=True)
class Episode:
    """An episode that a harness has taken."""

    session_id: str
    job: Job
    index: int
    """Which of the job's n episodes it is, from 0."""


class _Found(NamedTuple):
    session: Session
    stored: bool
    """Else it is that of an episode without turns, and was made from its job."""
    state: SessionState
    job_id: str | None
    fields: list[Any]
    records: list[bytes]
    """The session's turns."""


class SessionStore:
    """A run's sessions. A named caller sees only its own."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def open(self, session: Session, *, caller: str = EVERYBODY) -> SessionState:
        """Opens a session. Opening it again with the same settings changes nothing. Raises OverloadedError if clients
        hold too much of the broker's memory, RequestError if the id is taken."""
        data = session.to_bytes()
        args = (session.session_id, data, caller, math.ceil(1000 * session.idle_s), secrets.token_hex(8))
        reply, taken, allowed = await self.broker.script("session_open", *args)
        outcome = reply.decode()
        check_admitted(outcome, taken, allowed, len(data), caller)
        return SessionState.OPEN if outcome == "new" else SessionState(outcome)

    async def append(self, recorded: Recorded, turn: Turn, *, caller: str = EVERYBODY) -> tuple[int, bool]:
        """Records a turn of the session as it was read. Returns its index and True; if one with its id is recorded, the
        index of that and False. Raises NotFoundError, also if the session was opened anew since, RequestError
        if the session is finished or as large as it may be, OverloadedError as `open`."""
        data = turn.to_bytes()
        session_id, parent = recorded.session.session_id, turn.parent
        follows = ("", "") if parent is None else (parent, recorded.turns[parent].turn_id)
        facts = (turn.num_tokens, int(turn.fork is Fork.DRIFT), MAX_SESSION_BYTES // recorded.session.n)
        args = (session_id, caller, recorded.nonce, *follows, turn.turn_id, data, *facts, recorded.unstored)
        reply, number, allowed = await self.broker.script("session_append", *args)
        outcome = reply.decode()
        check_admitted(outcome, number, allowed, len(data), caller)
        match outcome:
            case "unknown":
                raise NotFoundError(UNKNOWN.format(session_id))
            case "finished":
                raise RequestError(ENDED.format(session_id))
            case "full" | "large":
                raise RequestError(
                    f"session {session_id!r} holds {number} bytes of turns and this one has {len(data)}, at most "
                    f"{allowed} allowed: finish it",
                    code=CONTEXT_FULL,
                )
        return number, outcome == "new"

    async def take(self, session_id: str, *, most_deliveries: int, caller: str = EVERYBODY) -> Episode | None:
        """Gives the caller the next episode that is to be played, in a session with this id; None if there is none. The
        same id again returns the same episode, until it is finished. An episode that was given before and then left
        alone, or failed, `most_deliveries` times makes its job a dead letter. Raises RequestError if the id is taken,
        OverloadedError if too much of the broker's memory is used."""
        args = (session_id, caller, secrets.token_hex(8), most_deliveries)
        reply = await self.broker.script("episode_take", *args)
        match reply:
            case []:
                return None
            case [b"full"]:
                reason = (
                    f"the broker's memory (its maxmemory) is {MEMORY_SHARE:.0%} full, the rest is for what is played"
                )
                raise OverloadedError(reason, RETRY_AFTER_MEMORY_S)
            case [b"taken"]:
                allowed = "another one for each episode: this one's is finished, or its session is not yours"
                raise RequestError.at("Idempotency-Key", session_id, allowed)
        _, index, data = reply
        return Episode(session_id, Job.from_bytes(data), index)

    async def status(self, session_id: str, *, caller: str = EVERYBODY) -> Summary:
        """Raises NotFoundError."""
        names = ("reward", "metrics", "turns", "branches", "drifted", "tokens")
        reward, metrics, *counts = (found := await self._look(session_id, names, caller)).fields
        return Summary(
            found.session,
            found.state,
            float(reward) if reward else None,
            json.loads(metrics) if metrics else {},
            *(int(count or 0) for count in counts),
        )

    async def read(self, session_id: str, *, caller: str = EVERYBODY) -> Recorded:
        """Raises NotFoundError."""
        found = await self._look(session_id, ("nonce",), caller, turns=True)
        (nonce,) = found.fields
        turns = await asyncio.to_thread(_decoded, found.records)
        unstored = b"" if found.stored else found.session.to_bytes()
        return Recorded(found.session, found.state, turns, nonce.decode(), unstored, found.job_id)

    async def _look(self, session_id: str, names: Sequence[str], caller: str, *, turns: bool = False) -> _Found:
        """`names`: of more fields."""
        if not re.fullmatch(JOB_ID, session_id):
            raise NotFoundError(UNKNOWN.format(session_id))
        keys = self.broker.keys
        always = ("data", "job", "index", "state", "caller")
        async with self.broker.call(), self.broker.redis.pipeline(transaction=False) as calls:
            calls.hmget(keys.session(session_id), *always, *names)
            if turns:
                calls.lrange(keys.turns(session_id), 0, -1)
            (data, job, index, state, whose, *fields), *records = await calls.execute()
        if state is None or (caller != EVERYBODY and whose != caller.encode()):
            raise NotFoundError(UNKNOWN.format(session_id))
        job_id = None if job is None else job.decode()
        if data:
            session = Session.from_bytes(data)
        else:
            session = Session.of(await self._job(job_id or "", session_id), int(index), session_id)
        return _Found(session, bool(data), SessionState(state.decode()), job_id, fields, records[0] if turns else [])

    async def _job(self, job_id: str, session_id: str) -> Job:
        async with self.broker.call():
            data: Any = await self.broker.redis.hget(self.broker.keys.job(job_id), "data")
        if data is None:
            raise NotFoundError(UNKNOWN.format(session_id))
        return Job.from_bytes(data)

    async def beat(self, session_id: str, *, nonce: str = "", caller: str = EVERYBODY) -> None:
        """A heartbeat: keeps the session open for another `idle_s`, as a turn does. `nonce`: of the one that is meant;
        else one that was opened again will do. Raises NotFoundError, or RequestError if it is finished."""
        match (await self.broker.script("session_beat", session_id, caller, nonce)).decode():
            case "unknown":
                raise NotFoundError(UNKNOWN.format(session_id))
            case "finished":
                raise RequestError(ENDED.format(session_id))

    async def finish(
        self, recorded: Recorded, ending: Ending, group: Group | None = None, *, caller: str = EVERYBODY
    ) -> bool:
        """Ends a session that has turns; False if it has other turns than those that were read. The same again changes
        nothing. `group`: for an episode of a job, that episode alone; the last one to be finished completes the job.

        Raises NotFoundError, or RequestError if the session has no turn or was finished otherwise.
        """
        session_id = recorded.session.session_id
        given = (
            "" if ending.reward is None else repr(ending.reward),
            "cut off" if ending.truncated else "",
            json.dumps(ending.metrics, sort_keys=True) if ending.metrics else "",
        )
        records = (recorded.unstored, b"" if group is None else group.to_bytes())
        args = (session_id, caller, recorded.nonce, len(recorded.turns), *given, *records)
        match (await self.broker.script("session_finish", *args)).decode():
            case "unknown":
                raise NotFoundError(UNKNOWN.format(session_id))
            case "empty":
                raise RequestError(f"session {session_id!r} has no turn to be finished: delete it")
            case "changed":
                return False
        return True

    async def delete(
        self, session_id: str, error: str = "", *, most_deliveries: int = 1, caller: str = EVERYBODY
    ) -> SessionState:
        """Deletes a session with its turns and returns the state that it had. Raises NotFoundError. An episode that is
        not finished is given to the next who asks; with an `error`, that counts as a delivery, as in `take`."""
        return await self._delete(session_id, caller, error[:MAX_ERROR_CHARS], most_deliveries, "", "")

    async def drop(self, session_id: str, *, by: str, silent_s: float | None = None) -> SessionState:
        """Deletes a session for an operator, who is named in the audit. Raises NotFoundError. `silent_s`: only if it is
        open and has had no turn or heartbeat for so long; else raises RequestError."""
        silent = "" if silent_s is None else math.ceil(1000 * silent_s)
        return await self._delete(session_id, EVERYBODY, "", 1, by, silent)

    async def _delete(self, session_id: str, *args: str | int) -> SessionState:
        state = (await self.broker.script("session_delete", session_id, *args)).decode()
        if state == "unknown":
            raise NotFoundError(UNKNOWN.format(session_id))
        if state == "other":
            raise RequestError(
                f"session {session_id!r} was left alone: it has had a turn or a heartbeat since, or is finished"
            )
        return SessionState(state)


def _decoded(records: Sequence[bytes]) -> list[Turn]:
    """Raises RequestError for a record that is no turn, or continues none that was recorded before it."""
    turns = [Turn.from_bytes(record) for record in records]
    for index, turn in enumerate(turns):
        if turn.parent is not None and turn.parent >= index:
            raise RequestError(f"Turn: parent: {turn.parent}, of turn {index}")
    return turns
