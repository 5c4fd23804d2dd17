"""What every HTTP application here has: the guard, problem documents, and a page at /docs that needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI

from dvp_rl.contract.http import Body

from . import pages, problems
from .api_tokens import ApiTokens, Scope
from .guard import Guard
from .openapi import REST, complete

API_VERSION = "1"


def application(
    title: str,
    description: str,
    router: APIRouter,
    tokens: ApiTokens,
    *,
    bodies: Mapping[str, type[Body]] | None = None,
    scopes: Mapping[str, Scope] | None = None,
    hints: Mapping[str, str] | None = None,
    **limits: Any,
) -> FastAPI:
    """`bodies`: the model of the body posted to each path. `scopes`: the scope that a path and all below it need, where
    it is not the usual one. `hints`: what to tell callers of paths that other servers have; every caller with a token
    is told. `limits`: more arguments of the Guard."""
    hints = hints or {}
    scopes = dict.fromkeys(hints, Scope.READ) | dict(scopes or {})
    app = FastAPI(
        title=title,
        version=API_VERSION,
        description=description,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        responses=REST,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.include_router(router)
    app.include_router(pages.router)
    written = app.openapi
    app.openapi = lambda: app.openapi_schema or complete(written(), scopes)  # type: ignore[method-assign]
    problems.install(app, bodies or {}, hints)
    app.add_middleware(Guard, tokens=tokens, scopes=scopes, realm=title, **limits)
    return app
