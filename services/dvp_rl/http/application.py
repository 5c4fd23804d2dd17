"""What every HTTP application here has: the guard, problem documents, and a page at /docs that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.routing import Match

from . import pages, problems
from .api_tokens import ApiTokens, Scope
from .guard import Guard, busy
from .openapi import REST, complete

API_VERSION = "1"


def application(
    title: str,
    description: str,
    router: APIRouter,
    tokens: ApiTokens,
    *,
    scopes: Mapping[str, Scope] | None = None,
    hints: Mapping[str, str] | None = None,
    models: Iterable[type[BaseModel]] = (),
    max_requests: int,
    limited_by: str = "max_requests",
    **access: Any,
) -> FastAPI:
    """`scopes`: the scope that a path and all below it need, where it is not the usual one. `hints`: what to tell
    callers of paths that other servers have. `models`: what the OpenAPI document shows besides bodies and answers. The
    others are arguments of the Guard."""
    scopes = scopes or {}
    app = FastAPI(
        title=title,
        version=API_VERSION,
        description=description,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        responses=REST,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.include_router(router)
    app.include_router(pages.router)
    written, full = app.openapi, busy(max_requests, max_requests, limited_by)
    app.openapi = lambda: app.openapi_schema or complete(written(), scopes, full, models)  # type: ignore[method-assign]
    problems.install(app, hints or {})
    app.add_middleware(
        Guard,
        tokens=tokens,
        max_requests=max_requests,
        scopes=scopes,
        limited_by=limited_by,
        realm=title,
        routed=lambda scope: any(route.matches(scope)[0] is Match.FULL for route in app.routes),
        **access,
    )
    return app
