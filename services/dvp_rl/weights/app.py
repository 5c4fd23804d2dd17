"""Serves the files of finished weight folders, whole or in ranges. Each folder's manifest holds their checksums."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi import Path as InPath
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from starlette.responses import FileResponse

from dvp_rl.contract.errors import NotFoundError
from dvp_rl.contract.http import Health, Problem
from dvp_rl.contract.weights import FILE_NAME, RUN_ID
from dvp_rl.http import problems
from dvp_rl.http.api_tokens import ApiTokens, Scope
from dvp_rl.http.counted import CountedRequests
from dvp_rl.http.guard import Guard
from dvp_rl.weights.folder import FOLDER_NAME, MANIFEST_NAME

from .mirror import Mirror

MAX_BODY_BYTES = 0
"""No route takes a body."""
SCOPES = {"/v1/weights": Scope.WEIGHTS}

router = APIRouter(responses={"default": {"model": Problem, "description": "Problem details, RFC 9457"}})


class WeightFileResponse(FileResponse):
    chunk_size = 1024 * 1024  # each chunk is one trip to a thread


def create_app(root: Path, tokens: ApiTokens, mirror: Mirror | None = None) -> FastAPI:
    """`mirror`: fills `root` with copies; None if a trainer fills it."""
    app = FastAPI(title="dvp-weights", version="1", description="Weight folders.", docs_url=None, redoc_url=None)
    app.state.root, app.state.mirror = root, mirror
    app.include_router(router)
    problems.install(app, {})
    app.add_middleware(Guard, tokens=tokens, scopes=SCOPES, max_body=MAX_BODY_BYTES)
    registry = app.state.registry = CollectorRegistry()
    requests = Counter("dvp_weights_requests", "HTTP requests answered", ["route", "status"], registry=registry)
    sent = Counter("dvp_weights_sent_bytes", "Bytes sent in response bodies", registry=registry)
    app.add_middleware(CountedRequests, requests=requests, sent=sent)
    return app


@router.get("/v1/weights/{run_id}/{folder}/{name}", response_class=FileResponse)
async def file(
    run_id: Annotated[str, InPath(pattern=RUN_ID)],
    folder: Annotated[str, InPath(pattern=FOLDER_NAME)],
    name: Annotated[str, InPath(pattern=FILE_NAME)],
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


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/healthz", response_model=Health)
@router.get("/readyz", response_model=Health)
async def healthz() -> Health:
    return Health(status="ok")
