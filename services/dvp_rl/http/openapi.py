"""The OpenAPI document of a service: FastAPI's, completed by who may call what and how calls are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from dvp_rl.contract.http import FieldError, Health, Problem
from dvp_rl.contract.openai import OpenAIProblem

from .api_tokens import Caller, Scope
from .guard import OPEN_PATHS, needed_scope, no_token, not_loopback, out_of_scope
from .problems import MEDIA_TYPE, NOT_JSON, OPENAI, broken, describe, in_openai_shape, not_declared_json

SCHEMAS = "#/components/schemas/"
PROBLEM = {"$ref": f"{SCHEMAS}Problem"}
TOKEN = {
    "type": "http",
    "scheme": "bearer",
    "description": "One of the service's tokens: `Authorization: Bearer <token>`, or `Basic` with the token as "
    "password and any user name. Each call names the scope that it needs; `operate` may call everything. A service "
    "without tokens listens on loopback only and needs none, but then dvp-monitor changes nothing.",
}
HEADERS = {
    401: {"WWW-Authenticate": "Makes a browser ask for the token."},
    429: {"Retry-After": "Seconds after which to try again."},
}

Responses = dict[int | str, dict[str, Any]]


def refusals(*examples: Exception | Problem) -> Responses:
    """`responses` of a route that may be refused in these ways, each of them with its example."""
    problems = (example if isinstance(example, Problem) else describe(example)[0] for example in examples)
    return {problem.status: _refusal(problem) for problem in problems}


def wrong(field: str, value: Any, allowed: str) -> Problem:
    """The refusal of a request with one bad field, as an example."""
    return broken([FieldError(field=field, value=value, allowed=allowed)])


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
OF_BODIES = refusals(HTTPException(400, NOT_JSON.format("Expecting value")), not_declared_json(None))


def complete(
    document: dict[str, Any], scopes: Mapping[str, Scope], busy: Exception, models: Iterable[type[BaseModel]]
) -> dict[str, Any]:
    """Adds to every operation the scope that it needs, the refusals that all have, and a summary: the first sentence of
    its description. `busy`: the example of a 429. `models`: those that no route declares."""
    components = document.setdefault("components", {})
    components["securitySchemes"] = {"token": TOKEN}
    wanted = [(model, "serialization") for model in (Problem, OpenAIProblem, *models)]
    _, schemas = models_json_schema(wanted, ref_template=f"{SCHEMAS}{{model}}")  # type: ignore[arg-type]
    components["schemas"] = schemas["$defs"] | components.get("schemas", {})
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            scope = None if path in OPEN_PATHS else needed_scope(method.upper(), path, scopes)
            operation["security"] = [{"token": [scope]}] if scope else []
            operation["tags"] = [path.split("/")[2] if path.startswith("/v1/") else "process"]
            first, _, operation["description"] = operation["description"].partition(". ")
            operation["summary"] = first.removesuffix(".")
            known = OF_BODIES if "requestBody" in operation else {}
            known = known | (_of_callers(method.upper(), path, scope, busy) if scope else refusals(not_loopback("a.b")))
            responses = {str(status): answer for status, answer in known.items()} | operation["responses"]
            operation["responses"] = dict(sorted(responses.items()))
            if OPENAI.match(path):
                operation["responses"] = {status: _openai(answer) for status, answer in operation["responses"].items()}
    return document


def _openai(answer: dict[str, Any]) -> dict[str, Any]:
    """A response whose problem, if it has one, has the shape of OpenAI's errors too."""
    content = answer.get("content", {})
    if MEDIA_TYPE not in content:
        return answer
    shown = content[MEDIA_TYPE] | {"schema": {"$ref": f"{SCHEMAS}{OpenAIProblem.__name__}"}}
    if "example" in shown:
        shown["example"] = in_openai_shape(Problem.model_validate(shown["example"])).model_dump(mode="json")
    return answer | {"content": {MEDIA_TYPE: shown}}


def _of_callers(method: str, path: str, scope: Scope, busy: Exception) -> Responses:
    """Refusals of a call that needs `scope`."""
    other = next(other for other in Scope if not other.includes(scope))
    return refusals(no_token(""), out_of_scope(method, path, scope, Caller("alice", other, b"")), busy)
