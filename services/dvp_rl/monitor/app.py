"""The page, its stream of events, and its few actions."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from dvp_rl.contract.errors import UnavailableError
from dvp_rl.contract.http import Health, Problem, QueueHealth
from dvp_rl.http import problems
from dvp_rl.http.api_tokens import ApiTokens, Caller, Scope
from dvp_rl.http.guard import Guard
from dvp_rl.http.settings import MAX_REQUESTS
from dvp_rl.transport.audit import changes
from dvp_rl.transport.dead_letters import DeadLetters

from .bodies import ENTRY_ID, Change, Changes, Fate, Fates, LetterPage, Selection, Viewer
from .exporter import exposition
from .poller import NUM_LETTERS, Poller

MAX_BODY_BYTES = 64 * 1024
PAGE = files(__package__) / "page"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(responses={"default": {"model": Problem, "description": "Problem details, RFC 9457"}})


def create_app(poller: Poller, tokens: ApiTokens) -> FastAPI:
    # No /docs: its page loads scripts from elsewhere.
    app = FastAPI(title="dvp-monitor", version="1", description="The queue, live.", docs_url=None, redoc_url=None)
    app.state.poller = poller
    app.state.tokens = tokens
    app.include_router(router)
    problems.install(app, {"/v1/dead/replay": Selection, "/v1/dead/drop": Selection})
    app.add_middleware(
        Guard,
        tokens=tokens,
        nobody=Scope.READ,
        max_body=MAX_BODY_BYTES,
        max_requests=poller.feed.max_viewers + MAX_REQUESTS,
        challenge='Basic realm="dvp-monitor"',
    )
    return app


def _poller(request: Request) -> Poller:
    poller: Poller = request.app.state.poller
    return poller


Watched = Annotated[Poller, Depends(_poller)]


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


Calling = Annotated[Caller, Depends(_caller)]


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return _file("page.html", "text/html")


@router.get("/page.css", include_in_schema=False)
async def style() -> Response:
    return _file("page.css", "text/css")


@router.get("/page.js", include_in_schema=False)
async def script() -> Response:
    return _file("page.js", "text/javascript")


@router.get("/v1/caller", response_model=Viewer)
async def viewer(caller: Calling) -> Response:
    """The caller that the token belongs to."""
    return _json(Viewer(name=caller.name, scope=caller.scope))


@router.get("/v1/events", response_class=StreamingResponse)
async def events(request: Request, poller: Watched, caller: Calling) -> Response:
    """Server-sent events: `picture` at every poll of the broker, `curves` when the trainer has logged a step. The
    stream ends when the caller's token is no longer accepted."""
    poller.feed.admit(caller.limited)
    tokens: ApiTokens = request.app.state.tokens
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    stream = poller.feed.follow(lambda: tokens.still_has(caller), caller.limited)
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


@router.get("/v1/queue", response_model=QueueHealth)
async def queue(poller: Watched) -> Response:
    """Queue health in the form that replicas answer, from the last poll."""
    if poller.snapshot is None or poller.picture.health is None:
        raise UnavailableError(poller.picture.error)
    return _json(poller.picture.health)


@router.get("/v1/dead", response_model=LetterPage)
async def letters(
    poller: Watched,
    before: Annotated[str | None, Query(pattern=ENTRY_ID)] = None,
    count: Annotated[int, Query(ge=1, le=100)] = NUM_LETTERS,
) -> Response:
    """Dead letters, newest first."""
    return _json(LetterPage.of(await DeadLetters(poller.broker).page(count, before=before), count))


@router.post("/v1/dead/replay", response_model=Fates)
async def replay(body: Selection, poller: Watched, caller: Calling) -> Response:
    """Puts the jobs back into the queue."""
    letters = DeadLetters(poller.broker, by=_named(caller))
    wanted = [await letters.get(entry_id) for entry_id in body.entry_ids]
    outcomes = await letters.replay(wanted)
    poller.look_now()
    return _json(Fates(fates=tuple(map(Fate.of, body.entry_ids, outcomes))))


@router.post("/v1/dead/drop", response_model=Fates)
async def drop(body: Selection, poller: Watched, caller: Calling) -> Response:
    """Deletes the letters, with their jobs."""
    outcomes = await DeadLetters(poller.broker, by=_named(caller)).drop(body.entry_ids)
    poller.look_now()
    return _json(Fates(fates=tuple(map(Fate.of, body.entry_ids, outcomes))))


@router.get("/v1/audit", response_model=Changes)
async def audit(poller: Watched, count: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
    """Who changed the run by hand, and which trainer published which weights. Newest first."""
    found = await changes(poller.broker, count)
    return _json(Changes(changes=tuple(Change.model_validate(change._asdict()) for change in found)))


@router.get("/healthz", response_model=Health)
async def healthz() -> Response:
    """200 as long as this process runs."""
    return _json(Health(status="ok"))


@router.get("/readyz", response_model=Health)
async def readyz(poller: Watched) -> Response:
    """200 if the broker answers, otherwise 503 with the reason."""
    if poller.snapshot is None:
        return _json(Health(status="unavailable", detail=poller.picture.error), status=503)
    return _json(Health(status="ok"))


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(poller: Watched) -> Response:
    return Response(exposition(lambda: poller.snapshot), media_type=CONTENT_TYPE_LATEST)


def _named(caller: Caller) -> str:
    return f"{caller.scope}/{caller.name} (dvp-monitor)"


def _file(name: str, media_type: str) -> Response:
    return Response((PAGE / name).read_bytes(), media_type=media_type, headers=HEADERS)


def _json(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status, media_type="application/json")
