"""The OpenAPI document of a service: FastAPI's, completed by who may call what and how calls are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

from dvp_rl.contract.errors import OverloadedError, RequestError
from dvp_rl.contract.http import Health, Problem

from .api_tokens import Scope
from .guard import NEEDS_TOKEN, OPEN_PATHS, needed_scope
from .problems import MEDIA_TYPE, NOT_JSON, describe, not_declared_json

SCHEMAS = "#/components/schemas/"
PROBLEM = {"$ref": f"{SCHEMAS}Problem"}
TOKEN = {
    "type": "http",
    "scheme": "bearer",
    "description": "One of the service's tokens: `Authorization: Bearer <token>`, or `Basic` with the token as "
    "password and any user name. Each call names the scope that it needs; `operate` may call everything. A service "
    "without tokens listens on loopback only, and lets everybody there call.",
}
HEADERS = {
    401: {"WWW-Authenticate": "Makes a browser ask for the token."},
    429: {"Retry-After": "Seconds after which to try again."},
}
FOREIGN = HTTPException(403, "Host 'evil.example' is not loopback: without a token only loopback hosts are served")
SCOPE = HTTPException(403, "POST /v1/jobs needs a token of scope rollout; that of alice has scope read")
BUSY = OverloadedError("512 requests are being answered, at most 512 (max_requests)", retry_after_s=1.0)
WRONG = RequestError.at("n", 0, "integer in [1, 1024]")

Responses = dict[int | str, dict[str, Any]]


def refusals(*examples: Exception) -> Responses:
    """`responses` of a route that may be refused in these ways, each of them with its example."""
    return {problem.status: _refusal(problem) for problem, _ in map(describe, examples)}


def _refusal(problem: Problem) -> dict[str, Any]:
    shown = {"schema": PROBLEM, "example": problem.model_dump(mode="json")}
    headers = {
        name: {"description": text, "schema": {"type": "string"}}
        for name, text in HEADERS.get(problem.status, {}).items()
    }
    return {"description": problem.title, "headers": headers, "content": {MEDIA_TYPE: shown}}


REST: Responses = {
    "default": {"description": "Any other refusal", "content": {MEDIA_TYPE: {"schema": PROBLEM}}},
}
NOT_READY: Responses = {503: {"description": "Not available now: what is missing", "model": Health}}
"""`responses` of /readyz."""
TO_ALL = refusals(FOREIGN)
TO_CALLERS = refusals(HTTPException(401, NEEDS_TOKEN), SCOPE, BUSY)
TO_BODIES = refusals(HTTPException(400, NOT_JSON.format("Expecting value")), not_declared_json(None), WRONG)


def complete(document: dict[str, Any], scopes: Mapping[str, Scope]) -> dict[str, Any]:
    """Adds to every operation the scope that it needs, the refusals that are alike everywhere, and a summary: the first
    sentence of its description."""
    components = document.setdefault("components", {})
    components["securitySchemes"] = {"token": TOKEN}
    schema = Problem.model_json_schema(ref_template=f"{SCHEMAS}{{model}}")
    components.setdefault("schemas", {}).update(schema.pop("$defs"), Problem=schema)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            closed = path not in OPEN_PATHS
            operation["security"] = [{"token": [needed_scope(method.upper(), path, scopes)]}] if closed else []
            operation["tags"] = [path.split("/")[2] if path.startswith("/v1/") else "process"]
            operation["summary"], _, rest = operation["description"].partition(". ")
            operation["summary"], operation["description"] = operation["summary"].removesuffix("."), rest
            known = TO_ALL | (TO_CALLERS if closed else {}) | (TO_BODIES if "requestBody" in operation else {})
            responses = {str(status): answer for status, answer in known.items()} | operation["responses"]
            operation["responses"] = dict(sorted(responses.items()))
    return document
