"""Serves the files of finished weight folders, whole or in ranges. Each folder's manifest holds their checksums."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi import Path as InPath
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from starlette.responses import FileResponse, PlainTextResponse

from dvp_rl.contract.errors import NotFoundError, UnavailableError
from dvp_rl.contract.http import Health
from dvp_rl.contract.weights import FILE_NAME, RUN_ID
from dvp_rl.http.api_tokens import ApiTokens, Scope
from dvp_rl.http.application import application
from dvp_rl.http.counted import CountedRequests
from dvp_rl.http.openapi import Responses, refusals, wrong
from dvp_rl.weights.folder import FOLDER_NAME, MANIFEST_NAME

from .mirror import Mirror

MAX_BODY_BYTES = 0
"""No route takes a body."""
SCOPES = {"/v1/weights": Scope.WEIGHTS}

DESCRIPTION = (
    "The weights that a trainer has published, one folder per version. dvp-manifest.json in each lists the other files "
    "with their sizes and checksums."
)
NO_FILE = NotFoundError("qwen3-math/weights-000013/model.safetensors: no such file; old versions are deleted")
BAD_NAME = wrong("name", ".hidden", f"string like {FILE_NAME}")
NO_UPSTREAM = UnavailableError("http://trainer:8200 does not answer: Connection refused")
WHOLE: Responses = {
    200: {
        "description": "The file",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    },
    206: {"description": "The ranges that were asked for"},
    416: {"description": "No such range", "content": {"text/plain": {"schema": {"type": "string"}}}},
}

router = APIRouter()


class WeightFileResponse(FileResponse):
    chunk_size = 1024 * 1024  # each chunk is one trip to a thread


def create_app(root: Path, tokens: ApiTokens, max_requests: int, mirror: Mirror | None = None) -> FastAPI:
    """`mirror`: fills `root` with copies; None if a trainer fills it."""
    app = application(
        "dvp-weights",
        DESCRIPTION,
        router,
        tokens,
        scopes=SCOPES,
        max_body=MAX_BODY_BYTES,
        max_requests=max_requests,
    )
    app.state.root, app.state.mirror = root, mirror
    registry = app.state.registry = CollectorRegistry()
    requests = Counter("dvp_weights_requests", "HTTP requests answered", ["route", "status"], registry=registry)
    sent = Counter("dvp_weights_sent_bytes", "Bytes sent in response bodies", registry=registry)
    app.add_middleware(CountedRequests, requests=requests, sent=sent)
    return app


@router.get(
    "/v1/weights/{run_id}/{folder}/{name}",
    response_class=FileResponse,
    responses=WHOLE | refusals(NO_FILE, BAD_NAME, NO_UPSTREAM),
)
async def file(
    run_id: Annotated[str, InPath(pattern=RUN_ID, description="The training run.")],
    folder: Annotated[str, InPath(pattern=FOLDER_NAME, description="Folder of the version.")],
    name: Annotated[str, InPath(pattern=FILE_NAME, description="Name of the file.")],
    request: Request,
) -> Response:
    """One file of one published version; its manifest is `dvp-manifest.json`. Range requests are supported."""
    mirror: Mirror | None = request.app.state.mirror
    if mirror is not None and name == MANIFEST_NAME:
        await mirror.refresh(run_id, folder)
    return await asyncio.to_thread(_send, request.app.state.root, Path(run_id, folder, name))


def _send(root: Path, name: Path) -> Response:
    path = root / name
    # The patterns of the route keep a name inside its folder; a link could lead out of it.
    if path.is_symlink() or not path.is_file():
        raise NotFoundError(f"{name}: no such file; old versions are deleted")
    return WeightFileResponse(path, media_type="application/octet-stream", stat_result=path.stat())


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/healthz")
async def healthz() -> Health:
    """200 while this process answers. A supervisor restarts what does not."""
    return Health(status="ok")


@router.get("/readyz")
async def readyz() -> Health:
    """200 while this process answers: it needs nothing else."""
    return Health(status="ok")
