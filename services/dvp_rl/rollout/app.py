"""The HTTP API. Bodies are in dvp_rl.contract.http; dvp_rl.http does what all services have in common."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Query, Request, Response
from fastapi import Path as InPath
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from dvp_rl.contract.http import (
    EpisodeBody,
    EpisodeRequest,
    FinishRequest,
    Health,
    JobAccepted,
    JobRequest,
    JobStatus,
    QueueHealth,
    RolloutRequest,
    RolloutResponse,
    SessionBody,
    SessionRequest,
    WeightStatus,
)
from dvp_rl.http.api_tokens import ApiTokens, Scope
from dvp_rl.http.application import application
from dvp_rl.http.counted import CountedRequests
from dvp_rl.http.openapi import NOT_READY, refusals
from dvp_rl.transport.jobs import MAX_ERROR_CHARS

from . import generate, openai
from .answers import Streamed
from .examples import (
    BAD_N,
    EXAMPLES,
    HINTS,
    JOB_EXAMPLES,
    LOADING,
    LONG_ERROR,
    LONG_WAIT,
    NO_IDLE,
    NO_JOB,
    NO_QUEUE,
    NO_SESSION,
    NO_TURN,
    NOT_GENERATED,
    NOT_LOADED,
    NOT_YOURS,
    SESSION_ENDED,
    SESSION_EXAMPLES,
)
from .routes import By, Key, Served, SessionId, as_json, served_while_connected
from .service import Service

DESCRIPTION = (
    "Samples of a language model under its constrained policy: tokens less likely than min_p times the most likely one "
    "are never drawn, and every token comes with its log-probability under exactly that policy. Rollouts are answered "
    "by this replica; jobs go through the queue, to any replica of the run."
)
SCOPES = {
    "/v1/rollouts": Scope.ROLLOUT,
    "/v1/jobs": Scope.ROLLOUT,
    "/v1/sessions": Scope.ROLLOUT,
    "/v1/episodes": Scope.HARNESS,
    "/inference": Scope.ROLLOUT,
}
router = APIRouter()


def create_app(service: Service, tokens: ApiTokens, max_requests: int) -> FastAPI:
    app = application(
        "dvp-rollout",
        DESCRIPTION,
        router,
        tokens,
        scopes=SCOPES,
        hints=HINTS,
        max_requests=max_requests,
    )
    app.state.service = service
    app.add_middleware(CountedRequests, requests=service.metrics.requests)
    return app


NO_EPISODE: dict[int | str, dict[str, Any]] = {204: {"description": "No episode waits to be played."}}
Why = Annotated[
    str,
    Query(
        max_length=MAX_ERROR_CHARS,
        description="Why an episode of a training run cannot be played. After max_deliveries errors its job is dead.",
    ),
]
JobId = Annotated[str, InPath(description="The job_id that POST /v1/jobs was given, or returned.")]


@router.post("/v1/rollouts", response_model=RolloutResponse, responses=refusals(BAD_N, NOT_GENERATED, LOADING))
async def rollout(
    body: Annotated[RolloutRequest, Body(openapi_examples=EXAMPLES)], request: Request, service: Served, caller: By
) -> Response:
    """Samples now, on this replica. Generation stops when the client disconnects."""
    pieces = await served_while_connected(service.rollout(body, caller), request)
    return pieces if isinstance(pieces, Response) else Streamed(nullcontext(pieces))


@router.post("/v1/jobs", status_code=202, response_model=JobAccepted, responses=refusals(BAD_N, NO_QUEUE))
async def submit(
    body: Annotated[JobRequest, Body(openapi_examples=JOB_EXAMPLES)], service: Served, caller: By
) -> Response:
    """Queues a job for any replica of the run. GET /v1/jobs/{job_id} tells when it is done."""
    return as_json(JobAccepted(job_id=await service.submit(body, caller)), status=202)


@router.get("/v1/jobs/{job_id}", response_model=JobStatus, responses=refusals(NO_JOB, NO_QUEUE))
async def job(job_id: JobId, service: Served, caller: By) -> Response:
    """The state of a job submitted over HTTP. Results are kept one hour, or until they are deleted."""
    return Streamed(service.job(job_id, caller))


@router.delete("/v1/jobs/{job_id}", response_model=JobStatus, responses=refusals(NO_JOB, NOT_YOURS, NO_QUEUE))
async def delete_job(job_id: JobId, service: Served, caller: By) -> Response:
    """Deletes the job and its result, or cancels it. Returns the state that it had."""
    return as_json(await service.delete_job(job_id, caller))


@router.post("/v1/sessions", status_code=201, response_model=SessionBody, responses=refusals(NO_IDLE, NO_QUEUE))
async def open_session(
    body: Annotated[SessionRequest, Body(openapi_examples=SESSION_EXAMPLES)], service: Served, caller: By
) -> Response:
    """Opens a session: an OpenAI endpoint at /v1/sessions/{session_id}/v1 that records each token of an episode."""
    return as_json(await service.sessions.open(body, caller), status=201)


@router.get("/v1/sessions/{session_id}", response_model=SessionBody, responses=refusals(NO_SESSION, NO_QUEUE))
async def session(session_id: SessionId, service: Served, caller: By) -> Response:
    """How far a session is."""
    return as_json(await service.sessions.status(session_id, caller))


@router.post(
    "/v1/sessions/{session_id}/heartbeat",
    response_model=SessionBody,
    responses=refusals(NO_SESSION, SESSION_ENDED, NO_QUEUE),
)
async def beat_session(session_id: SessionId, service: Served, caller: By) -> Response:
    """Keeps the session open for another idle_s, as a turn does: for a client that is busy with something else, such as
    a tool. While a turn is drawn, the replica itself does so."""
    return as_json(await service.sessions.beat(session_id, caller))


@router.post(
    "/v1/sessions/{session_id}/finish", response_model=SessionBody, responses=refusals(NO_SESSION, NO_TURN, NO_QUEUE)
)
async def finish_session(session_id: SessionId, body: FinishRequest, service: Served, caller: By) -> Response:
    """Ends the episode and returns its samples. The same call again returns them again, for an hour. Samples of a
    training run go to the trainer instead."""
    return Streamed(service.sessions.finish(session_id, body, caller))


@router.delete(
    "/v1/sessions/{session_id}", response_model=SessionBody, responses=refusals(NO_SESSION, LONG_ERROR, NO_QUEUE)
)
async def delete_session(session_id: SessionId, service: Served, caller: By, error: Why = "") -> Response:
    """Deletes the session and all its turns. Returns the state that it had. An episode of a training run that is not
    finished is given to the next caller who asks for one."""
    return as_json(await service.sessions.delete(session_id, error, caller))


@router.post("/v1/episodes", response_model=EpisodeBody, responses=NO_EPISODE | refusals(LONG_WAIT, NO_QUEUE))
async def take_episode(body: EpisodeRequest, request: Request, service: Served, caller: By, key: Key = "") -> Response:
    """Takes an episode of the training run: a session for the caller to play, finish and reward."""

    async def take() -> Response:
        taken = await service.sessions.take(body.wait_s, caller, key)
        return Response(status_code=204) if taken is None else as_json(taken)

    return await served_while_connected(take(), request)


@router.get("/v1/queue", response_model=QueueHealth, responses=refusals(NO_QUEUE))
async def queue(service: Served) -> Response:
    """The state of the run's queue, and what to do about it. dvp-monitor answers the same."""
    return as_json(await service.queue())


@router.get("/v1/weights", response_model=WeightStatus, responses=refusals(LOADING))
async def weights(service: Served) -> Response:
    """The weights that this replica serves."""
    return as_json(service.weights())


@router.post("/v1/weights", response_model=WeightStatus, responses=refusals(NOT_LOADED, NO_QUEUE))
async def refresh_weights(service: Served) -> Response:
    """Loads the newest announced weights now. If that fails, the old ones stay in service."""
    return as_json(await service.refresh_weights())


@router.get("/healthz", response_model=Health)
async def healthz() -> Response:
    """200 while this process answers. A supervisor restarts what does not."""
    return as_json(Health(status="ok"))


@router.get("/readyz", response_model=Health, responses=NOT_READY)
async def readyz(service: Served) -> Response:
    """200 if this replica can do everything it was started for, else 503 and what is missing."""
    health = service.readiness()
    return as_json(health, status=200 if health.status == "ok" else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Served) -> Response:
    """Metrics for Prometheus."""
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


router.include_router(openai.router)
router.include_router(generate.router)
