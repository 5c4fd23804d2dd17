"""The page, its stream of events, and its few actions."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from dvp_rl.contract.errors import NotFoundError, UnavailableError
from dvp_rl.contract.http import Health, QueueHealth
from dvp_rl.contract.weights import RUN_ID
from dvp_rl.http.api_tokens import ApiTokens, Caller, Scope
from dvp_rl.http.application import application
from dvp_rl.http.openapi import NOT_READY, Responses, refusals, wrong
from dvp_rl.http.pages import page_file
from dvp_rl.transport.audit import changes
from dvp_rl.transport.dead_letters import DeadLetters, Outcome

from .bodies import (
    ENTRY_ID,
    MAX_ENTRIES,
    Change,
    Changes,
    Completions,
    CompletionSteps,
    Curves,
    Fate,
    Fates,
    LetterPage,
    Picture,
    RunStates,
    Selection,
    Viewer,
)
from .exporter import exposition
from .poller import NUM_LETTERS, Poller
from .runs import Runs

MAX_BODY_BYTES = 64 * 1024
MAX_CHANGES = 1000
"""Most changes that one answer lists."""
MAX_STEP = 2**53
"""JavaScript rounds larger numbers."""
PAGE = files(__package__) / "page"
PAGE_PARTS = ("page.css", "page.js", "completions.js", "curves.js", "elements.js")
DESCRIPTION = (
    "The queue of a training run: its state and what to do about it, its dead letters, and who changed what. The page "
    "at / shows it live. With `run`, an answer is about that run of the broker; without it, about the monitor's own."
)
AWAY = UnavailableError("Redis at 127.0.0.1:6379 does not answer: Connection refused")
NO_RUN = NotFoundError("run_id 'qwen3-maht': this broker knows no such run; runs there: qwen3-math")
BAD_RUN = wrong("run", "a b", f"string like {RUN_ID}")
NO_RECORD = NotFoundError("no completions of step 125 have been recorded; the newest are of step 120")
BAD_STEP = wrong("step", "-1", f"integer in [0, {MAX_STEP}]")
BAD_CURSOR = wrong("before", "x", f"string like {ENTRY_ID}")
BAD_COUNT = wrong("count", "0", f"integer in [1, {MAX_CHANGES}]")
BAD_IDS = wrong("entry_ids", "[]", f"list of 1 to {MAX_ENTRIES} items")
STREAM: Responses = {
    200: {
        "description": "Events `picture`, `curves`, `completions` and `runs`, whose data is a Picture, Curves, "
        "CompletionSteps or RunStates in JSON, without end",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": 'event: picture\ndata: {"at": 1795601199.5, "run_id": "qwen3-math", "error": ""}\n\n',
            }
        },
    }
}

router = APIRouter()


def create_app(runs: Runs, tokens: ApiTokens, max_requests: int) -> FastAPI:
    app = application(
        "dvp-monitor",
        DESCRIPTION,
        router,
        tokens,
        nobody=Scope.READ,
        max_body=MAX_BODY_BYTES,
        max_requests=max_requests,
        limited_by="max_requests + max_viewers",
        models=(Picture, Curves, CompletionSteps, RunStates),
    )
    app.state.runs = runs
    app.state.tokens = tokens
    return app


def _runs(request: Request) -> Runs:
    runs: Runs = request.app.state.runs
    return runs


All = Annotated[Runs, Depends(_runs)]


async def _poller(
    runs: All,
    run: Annotated[
        str | None, Query(pattern=RUN_ID, description="A run of the broker; without it, the monitor's own.")
    ] = None,
) -> Poller:
    return await runs.of(run)


Watched = Annotated[Poller, Depends(_poller)]


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


Calling = Annotated[Caller, Depends(_caller)]


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return page_file(PAGE, "page.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_part(name: str) -> Response:
    if name not in PAGE_PARTS:
        raise NotFoundError(f"/page/{name}: no such file; the page at / needs {', '.join(PAGE_PARTS)}")
    return page_file(PAGE, name)


@router.get("/v1/caller", response_model=Viewer)
async def viewer(caller: Calling) -> Response:
    """The caller, as this service knows it."""
    return _json(Viewer(name=caller.name, scope=caller.scope))


@router.get("/v1/events", response_class=StreamingResponse, responses=refusals(NO_RUN, BAD_RUN) | STREAM)
async def events(request: Request, runs: All, poller: Watched, caller: Calling) -> Response:
    """Server-sent events: a picture at every poll of the broker, curves when the trainer has logged a step. The stream
    ends when the caller's token is no longer accepted. "Try it out" waits for that end and shows nothing; `curl -N`
    shows the events."""
    runs.viewers.admit(caller.limited)
    tokens: ApiTokens = request.app.state.tokens
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    stream = poller.feed.follow(lambda: tokens.still_has(caller), caller.limited)
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


@router.get("/v1/queue", response_model=QueueHealth, responses=refusals(NO_RUN, BAD_RUN, AWAY))
async def queue(poller: Watched) -> Response:
    """The state of the run's queue at the last poll, and what to do about it. Replicas answer the same."""
    if poller.snapshot is None or poller.picture.health is None:
        raise UnavailableError(poller.picture.error)
    return _json(poller.picture.health)


@router.get("/v1/dead", response_model=LetterPage, responses=refusals(NO_RUN, BAD_CURSOR, AWAY))
async def letters(
    poller: Watched,
    before: Annotated[
        str | None, Query(pattern=ENTRY_ID, description="`next` of the page before; without it, the newest page.")
    ] = None,
    count: Annotated[int, Query(ge=1, le=100, description="Most letters on the page.")] = NUM_LETTERS,
) -> Response:
    """Dead letters, newest first."""
    return _json(LetterPage.of(await DeadLetters(poller.broker).page(count, before=before), count))


@router.post("/v1/dead/replay", response_model=Fates, responses=refusals(NO_RUN, BAD_IDS, AWAY))
async def replay(body: Selection, poller: Watched, caller: Calling) -> Response:
    """Puts the jobs back into the queue. Those whose letter is gone are left out."""
    letters = DeadLetters(poller.broker, by=_named(caller))
    found = {}
    for entry_id in body.entry_ids:
        with suppress(NotFoundError):
            found[entry_id] = await letters.get(entry_id)
    outcomes = dict(zip(found, await letters.replay(list(found.values())), strict=True))
    poller.look_now()
    return _json(Fates(fates=tuple(Fate.of(each, outcomes.get(each, Outcome.GONE)) for each in body.entry_ids)))


@router.post("/v1/dead/drop", response_model=Fates, responses=refusals(NO_RUN, BAD_IDS, AWAY))
async def drop(body: Selection, poller: Watched, caller: Calling) -> Response:
    """Deletes the letters, with their jobs."""
    outcomes = await DeadLetters(poller.broker, by=_named(caller)).drop(body.entry_ids)
    poller.look_now()
    return _json(Fates(fates=tuple(map(Fate.of, body.entry_ids, outcomes))))


@router.get("/v1/completions", response_model=Completions, responses=refusals(NO_RECORD, BAD_STEP))
async def completions(
    poller: Watched,
    step: Annotated[int | None, Query(ge=0, le=MAX_STEP, description="Without it, the newest step.")] = None,
) -> Response:
    """Completions of one step, with reward, advantage, what training did with them, and where min-p pruned. They hold
    prompts, so they are only there if the monitor was started with completions_file."""
    if poller.completions is None:
        raise NotFoundError("this monitor shows no completions; its setting completions_file names none")
    answer = await asyncio.to_thread(poller.completions.read, step)
    return Response(answer, media_type="application/json", headers={"Cache-Control": "no-store"})


@router.get("/v1/audit", response_model=Changes, responses=refusals(NO_RUN, BAD_COUNT, AWAY))
async def audit(
    poller: Watched, count: Annotated[int, Query(ge=1, le=MAX_CHANGES, description="Most changes to return.")] = 100
) -> Response:
    """Who changed the run by hand, and which trainer published which weights. Newest first."""
    found = await changes(poller.broker, count)
    return _json(Changes(changes=tuple(Change.model_validate(change._asdict()) for change in found)))


@router.get("/healthz", response_model=Health)
async def healthz() -> Response:
    """200 while this process answers. A supervisor restarts what does not."""
    return _json(Health(status="ok"))


@router.get("/readyz", response_model=Health, responses=NOT_READY)
async def readyz(runs: All) -> Response:
    """200 if the broker answers, otherwise 503 with the reason."""
    if runs.own.snapshot is None:
        return _json(Health(status="unavailable", detail=runs.own.picture.error), status=503)
    return _json(Health(status="ok"))


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(runs: All) -> Response:
    """Metrics of the monitor's own run for Prometheus."""
    return Response(exposition(lambda: runs.own.snapshot), media_type=CONTENT_TYPE_LATEST)


def _named(caller: Caller) -> str:
    return f"{caller.scope}/{caller.name} (dvp-monitor)"


def _json(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status, media_type="application/json")
