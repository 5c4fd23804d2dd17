"""The HTTP API. Bodies are in dvp_rl.contract.http; dvp_rl.http does what all services have in common."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

from fastapi import APIRouter, Body, Depends, FastAPI, Request, Response
from fastapi import Path as InPath
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from dvp_rl.contract.http import (
    Health,
    JobAccepted,
    JobRequest,
    JobStatus,
    QueueHealth,
    RolloutRequest,
    RolloutResponse,
    WeightStatus,
)
from dvp_rl.http.api_tokens import ApiTokens, Caller, Scope
from dvp_rl.http.application import application
from dvp_rl.http.counted import CountedRequests
from dvp_rl.http.openapi import NOT_READY, refusals

from .answers import Streamed
from .examples import (
    BAD_N,
    EXAMPLES,
    HINTS,
    JOB_EXAMPLES,
    LOADING,
    NO_JOB,
    NO_QUEUE,
    NOT_GENERATED,
    NOT_LOADED,
    NOT_YOURS,
)
from .loops import race
from .service import Service

DESCRIPTION = (
    "Samples of a language model under its constrained policy: tokens less likely than min_p times the most likely one "
    "are never drawn, and every token comes with its log-probability under exactly that policy. Rollouts are answered "
    "by this replica; jobs go through the queue, to any replica of the run."
)
SCOPES = {"/v1/rollouts": Scope.ROLLOUT, "/v1/jobs": Scope.ROLLOUT}
CLIENT_GONE = 499
"""Status of requests whose client disconnected. Only the metrics show it."""

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


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _caller(request: Request) -> str:
    caller: Caller = request.state.caller
    return caller.limited


Served = Annotated[Service, Depends(_service)]
By = Annotated[str, Depends(_caller)]
JobId = Annotated[str, InPath(description="The job_id that POST /v1/jobs was given, or returned.")]


@router.post("/v1/rollouts", response_model=RolloutResponse, responses=refusals(BAD_N, NOT_GENERATED, LOADING))
async def rollout(
    body: Annotated[RolloutRequest, Body(openapi_examples=EXAMPLES)], request: Request, service: Served, caller: By
) -> Response:
    """Samples now, on this replica. Generation stops when the client disconnects."""
    pieces = await race(service.rollout(body, caller), _disconnected(request))
    return Response(status_code=CLIENT_GONE) if pieces is None else Streamed(nullcontext(pieces))


@router.post("/v1/jobs", status_code=202, response_model=JobAccepted, responses=refusals(BAD_N, NO_QUEUE))
async def submit(
    body: Annotated[JobRequest, Body(openapi_examples=JOB_EXAMPLES)], service: Served, caller: By
) -> Response:
    """Queues a job for any replica of the run. GET /v1/jobs/{job_id} tells when it is done."""
    return _json(JobAccepted(job_id=await service.submit(body, caller)), status=202)


@router.get("/v1/jobs/{job_id}", response_model=JobStatus, responses=refusals(NO_JOB, NO_QUEUE))
async def job(job_id: JobId, service: Served, caller: By) -> Response:
    """The state of a job submitted over HTTP. Results are kept one hour, or until they are deleted."""
    return Streamed(service.job(job_id, caller))


@router.delete("/v1/jobs/{job_id}", response_model=JobStatus, responses=refusals(NO_JOB, NOT_YOURS, NO_QUEUE))
async def delete_job(job_id: JobId, service: Served, caller: By) -> Response:
    """Deletes the job and its result, or cancels it. Returns the state that it had."""
    return _json(await service.delete_job(job_id, caller))


@router.get("/v1/queue", response_model=QueueHealth, responses=refusals(NO_QUEUE))
async def queue(service: Served) -> Response:
    """The state of the run's queue, and what to do about it. dvp-monitor answers the same."""
    return _json(await service.queue())


@router.get("/v1/weights", response_model=WeightStatus, responses=refusals(LOADING))
async def weights(service: Served) -> Response:
    """The weights that this replica serves."""
    return _json(service.weights())


@router.post("/v1/weights", response_model=WeightStatus, responses=refusals(NOT_LOADED, NO_QUEUE))
async def refresh_weights(service: Served) -> Response:
    """Loads the newest announced weights now. If that fails, the old ones stay in service."""
    return _json(await service.refresh_weights())


@router.get("/healthz", response_model=Health)
async def healthz() -> Response:
    """200 while this process answers. A supervisor restarts what does not."""
    return _json(Health(status="ok"))


@router.get("/readyz", response_model=Health, responses=NOT_READY)
async def readyz(service: Served) -> Response:
    """200 if this replica can do everything it was started for, else 503 and what is missing."""
    health = service.readiness()
    return _json(health, status=200 if health.status == "ok" else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Served) -> Response:
    """Metrics for Prometheus."""
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _json(body: BaseModel, status: int = 200) -> Response:
    # Straight from pydantic: FastAPI would validate and copy every array once more.
    return Response(body.model_dump_json(), status, media_type="application/json")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
