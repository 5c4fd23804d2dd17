"""The HTTP API. Bodies are in dvp_rl.contract.http; every error is answered by dvp_rl.http.problems."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from dvp_rl.contract.http import (
    Health,
    JobAccepted,
    JobRequest,
    JobStatus,
    Problem,
    QueueHealth,
    RolloutRequest,
    RolloutResponse,
    WeightStatus,
)
from dvp_rl.http import problems
from dvp_rl.http.api_tokens import ApiTokens, Caller, Scope
from dvp_rl.http.counted import CountedRequests
from dvp_rl.http.guard import Guard

from .answers import Streamed
from .loops import race
from .service import Service

API_VERSION = "1"
SCOPES = {"/v1/rollouts": Scope.ROLLOUT, "/v1/jobs": Scope.ROLLOUT}
CLIENT_GONE = 499
"""Status of requests whose client disconnected. Only the metrics show it."""

router = APIRouter(responses={"default": {"model": Problem, "description": "Problem details, RFC 9457"}})


def create_app(service: Service, tokens: ApiTokens, max_requests: int) -> FastAPI:
    app = FastAPI(title="dvp-rollout", version=API_VERSION, description="Rollouts under the constrained policy.")
    app.state.service = service
    app.include_router(router)
    problems.install(app, {"/v1/rollouts": RolloutRequest, "/v1/jobs": JobRequest})
    app.add_middleware(Guard, tokens=tokens, scopes=SCOPES, max_requests=max_requests)
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


@router.post("/v1/rollouts", response_model=RolloutResponse)
async def rollout(body: RolloutRequest, request: Request, service: Served, caller: By) -> Response:
    """Samples now, on this replica. Stops when the client disconnects."""
    pieces = await race(service.rollout(body, caller), _disconnected(request))
    return Response(status_code=CLIENT_GONE) if pieces is None else Streamed(nullcontext(pieces))


@router.post("/v1/jobs", status_code=202, response_model=JobAccepted)
async def submit(body: JobRequest, service: Served, caller: By) -> Response:
    """Queues the job for any replica of the run."""
    return _json(JobAccepted(job_id=await service.submit(body, caller)), status=202)


@router.get("/v1/jobs/{job_id}", response_model=JobStatus)
async def job(job_id: str, service: Served, caller: By) -> Response:
    """The state of a job submitted over HTTP. Results are kept one hour, or until they are deleted."""
    return Streamed(service.job(job_id, caller))


@router.delete("/v1/jobs/{job_id}", response_model=JobStatus)
async def delete_job(job_id: str, service: Served, caller: By) -> Response:
    """Deletes the job and its result, or cancels it. Returns the state that it had."""
    return _json(await service.delete_job(job_id, caller))


@router.get("/v1/queue", response_model=QueueHealth)
async def queue(service: Served) -> Response:
    return _json(await service.queue())


@router.get("/v1/weights", response_model=WeightStatus)
async def weights(service: Served) -> Response:
    return _json(service.weights())


@router.post("/v1/weights", response_model=WeightStatus)
async def refresh_weights(service: Served) -> Response:
    """Loads the newest announced version now."""
    return _json(await service.refresh_weights())


@router.get("/healthz", response_model=Health)
async def healthz() -> Response:
    """200 while this process answers."""
    return _json(Health(status="ok"))


@router.get("/readyz", response_model=Health)
async def readyz(service: Served) -> Response:
    """200 if this replica can do everything it was started for, else 503 and what is missing."""
    health = service.readiness()
    return _json(health, status=200 if health.status == "ok" else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Served) -> Response:
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _json(body: BaseModel, status: int = 200) -> Response:
    # Straight from pydantic: FastAPI would validate and copy every array once more.
    return Response(body.model_dump_json(), status, media_type="application/json")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
