"""What the routes of a replica have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request, Response
from fastapi import Path as InPath
from pydantic import BaseModel

from dvp_rl.cancellation import race
from dvp_rl.http.api_tokens import Caller
from dvp_rl.http.openapi import refusals

from .dialogue import TurnRequest
from .examples import NO_QUEUE, NO_SESSION, NOT_GENERATED, NOT_ONLY_MIN_P
from .service import Service
from .sessions import Taken

T = TypeVar("T")

CLIENT_GONE = 499
"""Status of requests whose client disconnected. Only the metrics show it."""


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _caller(request: Request) -> str:
    caller: Caller = request.state.caller
    return caller.limited


Served = Annotated[Service, Depends(_service)]
By = Annotated[str, Depends(_caller)]
Key = Annotated[
    str,
    Header(
        alias="idempotency-key",
        max_length=256,
        description="The same request with the same key is carried out once, and answered alike.",
    ),
]
SessionId = Annotated[str, InPath(description="The session_id that POST /v1/sessions was given, or returned.")]
ModelId = Annotated[str, InPath(description="The run's id.")]
TURN = refusals(NO_SESSION, NOT_ONLY_MIN_P, NOT_GENERATED, NO_QUEUE)


async def served_while_connected(work: Coroutine[Any, Any, T], request: Request) -> T | Response:
    """The result of `work`, which is cancelled when the client disconnects; then an answer that nobody reads."""
    done = await race(work, _disconnected(request))
    return Response(status_code=CLIENT_GONE) if done is None else done


_Taking = Callable[[TurnRequest], Awaitable[Taken | Response]]


def _take(session_id: SessionId, request: Request, service: Served, caller: By, key: Key = "") -> _Taking:
    return lambda body: served_while_connected(service.sessions.turn(session_id, body, caller, key), request)


Take = Annotated[_Taking, Depends(_take)]
"""Takes the turn that a body asks for, unless the client disconnects."""


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def as_json(body: BaseModel, status: int = 200) -> Response:
    # Straight from pydantic: FastAPI would validate and copy every array once more.
    return Response(body.model_dump_json(), status, media_type="application/json")
