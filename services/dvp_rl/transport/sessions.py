"""Sessions in the broker, where any replica finds them."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from dvp_rl.contract.errors import NotFoundError, RequestError
from dvp_rl.contract.job import JOB_ID
from dvp_rl.contract.session import MAX_SESSION_BYTES, Session, SessionState, Turn
from dvp_rl.contract.shares import EVERYBODY

from .broker import Broker
from .submission import check_admitted

UNKNOWN = "session {!r}: never opened, deleted, or not used for longer than its idle_s; a finished one is kept an hour"
ENDED = "session {!r} is finished: it takes no more turns"


class Recorded(NamedTuple):
    """A session as the broker has it."""

    session: Session
    state: SessionState
    reward: float | None
    turns: list[Turn]
    nonce: str
    """Differs from that of a session that was deleted and opened again."""


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
        args = (session_id, caller, recorded.nonce, *follows, turn.turn_id, data, MAX_SESSION_BYTES)
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
                    f"{allowed} allowed: finish it"
                )
        return number, outcome == "new"

    async def read(self, session_id: str, *, caller: str = EVERYBODY) -> Recorded:
        """Raises NotFoundError."""
        if not re.fullmatch(JOB_ID, session_id):
            raise NotFoundError(UNKNOWN.format(session_id))
        keys = self.broker.keys
        async with self.broker.call(), self.broker.redis.pipeline(transaction=False) as both:
            both.hmget(keys.session(session_id), "data", "state", "caller", "reward", "nonce")
            both.lrange(keys.turns(session_id), 0, -1)
            (data, state, whose, reward, nonce), turns = await both.execute()
        if data is None or (caller != EVERYBODY and whose != caller.encode()):
            raise NotFoundError(UNKNOWN.format(session_id))
        return Recorded(
            Session.from_bytes(data),
            SessionState(state.decode()),
            float(reward) if reward else None,
            await asyncio.to_thread(_decoded, turns),
            nonce.decode(),
        )

    async def finish(self, session_id: str, reward: float | None, *, caller: str = EVERYBODY) -> None:
        """Ends a session that has turns. The same again changes nothing. Raises NotFoundError, or RequestError if it
        has no turn or was finished with another reward."""
        given = "" if reward is None else repr(reward)
        match (await self.broker.script("session_finish", session_id, caller, given)).decode():
            case "unknown":
                raise NotFoundError(UNKNOWN.format(session_id))
            case "empty":
                raise RequestError(f"session {session_id!r} has no turn to be finished: delete it")

    async def delete(self, session_id: str, *, caller: str = EVERYBODY) -> SessionState:
        """Deletes a session with its turns and returns the state that it had. Raises NotFoundError."""
        state = (await self.broker.script("session_delete", session_id, caller)).decode()
        if state == "unknown":
            raise NotFoundError(UNKNOWN.format(session_id))
        return SessionState(state)


def _decoded(records: Sequence[bytes]) -> list[Turn]:
    """Raises RequestError for a record that is no turn, or continues none that was recorded before it."""
    turns = [Turn.from_bytes(record) for record in records]
    for index, turn in enumerate(turns):
        if turn.parent is not None and turn.parent >= index:
            raise RequestError(f"Turn: parent: {turn.parent}, of turn {index}")
    return turns
