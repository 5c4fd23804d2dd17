"""Turns every error into an RFC 9457 problem document."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from dvp_rl.contract.errors import (
    ConfigError,
    DvpError,
    EngineError,
    LeaseLostError,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
    WeightError,
    WeightGoneError,
    reason,
)
from dvp_rl.contract.http import FieldError, Problem
from dvp_rl.contract.openai import ErrorBody, OpenAIProblem

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
NOT_JSON = "the body is not JSON: {}"
MAX_ERRORS = 16
MAX_VALUE_CHARS = 200

OPENAI = re.compile(r"(/v1/sessions/[^/]*/(v1|inference)|/inference|/v1/models)(/|$)")
"""Paths whose callers expect OpenAI's errors."""

PHRASES = {
    400: "Malformed request",
    401: "A token is needed",
    403: "Not allowed",
    404: "No such path",
    405: "Method not allowed",
    408: "Body not received",
    413: "Body too large",
    415: "Not declared as JSON",
}
Schema = dict[str, Any]
"""A JSON schema."""
OUTCOMES: tuple[tuple[type[DvpError], int, str], ...] = (
    (RequestError, 422, "The request breaks the contract"),
    (ConfigError, 422, "The request does not fit this service"),
    (NotFoundError, 404, "No such thing here"),
    (OverloadedError, 429, "Too much in flight"),
    (UnavailableError, 503, "Not available now"),
    (WeightGoneError, 404, "No such thing here"),
    (WeightError, 409, "The weights were not loaded"),
    (LeaseLostError, 409, "The lease is lost"),
    (EngineError, 500, "Generation failed"),
)


def install(app: FastAPI, hints: Mapping[str, str]) -> None:
    """Answers every error of the app with a problem document, including 404, 405 and bugs.

    `hints`: what to tell callers of paths, and of all below them, that the app does not have.
    """

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            items = error.errors()
            unreadable = _unreadable(request, items)
            if unreadable is None:
                return _answer(_invalid(items, _inputs(app.openapi(), request)), {}, request.url.path)
            error = unreadable
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            error = _unrouted(request, error, app.openapi()["paths"], hints)
        return respond(error, request.url.path)

    for kind in (DvpError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, handle)


def respond(error: Exception, path: str) -> Response:
    return _answer(*describe(error), path, getattr(error, "code", None))


def _answer(problem: Problem, headers: Mapping[str, str], path: str, code: str | None = None) -> Response:
    """`path` of the request: where its callers expect OpenAI's errors, the problem has their shape too."""
    problem = in_openai_shape(problem, code) if OPENAI.match(path) else problem
    return Response(problem.model_dump_json(), problem.status, headers, MEDIA_TYPE)


def in_openai_shape(problem: Problem, code: str | None = None) -> OpenAIProblem:
    param = problem.errors[0].field if problem.errors else None
    error = ErrorBody(message=problem.detail, type=problem.title, param=param, code=code)
    return OpenAIProblem(**dict(problem), error=error)


def describe(error: Exception) -> tuple[Problem, dict[str, str]]:
    """The problem document of an error, and its headers."""
    if isinstance(error, HTTPException):
        return Problem(title=_phrase(error), status=error.status_code, detail=str(error.detail)), dict(
            error.headers or {}
        )
    for kind, status, title in OUTCOMES:
        if isinstance(error, kind):
            errors = tuple(FieldError.model_validate(item) for item in getattr(error, "errors", ()))
            headers = {"Retry-After": str(math.ceil(error.retry_after_s))} if isinstance(error, OverloadedError) else {}
            return Problem(title=title, status=status, detail=str(error), errors=errors), headers
    logger.error("unexpected error while answering a request", exc_info=error)
    return Problem(title="Internal error", status=500, detail="see this service's log"), {}


def _unrouted(
    request: Request, error: HTTPException, paths: Mapping[str, Mapping[str, Any]], hints: Mapping[str, str]
) -> HTTPException:
    """The error, with what the caller could call instead. Starlette names the methods of one route only."""
    path, headers = request.url.path, dict(error.headers or {})
    if error.status_code == 404:
        remedy = _remedy(path, paths, hints)
    else:
        methods = {method.upper() for known in paths if compile_path(known)[0].match(path) for method in paths[known]}
        headers["Allow"] = ", ".join(sorted(methods)) or headers["Allow"]
        remedy = f"allowed: {headers['Allow']}"
    detail = f"{request.method} {path[:MAX_VALUE_CHARS]}: {error.detail}; {remedy}"
    return HTTPException(error.status_code, detail, headers)


def _remedy(path: str, paths: Iterable[str], hints: Mapping[str, str]) -> str:
    hint = next((hint for known, hint in hints.items() if path == known or path.startswith(f"{known}/")), "")
    near = get_close_matches(path[:MAX_VALUE_CHARS], [*paths, "/docs"], n=2, cutoff=0.7)
    hint = hint or (f"did you mean {' or '.join(near)}?" if near else "")
    return f"{hint} GET /docs shows all paths".lstrip()


def _unreadable(request: Request, items: Sequence[Mapping[str, Any]]) -> HTTPException | None:
    """What is wrong with a body whose fields could not be read at all; None if they could."""
    item = items[0]
    if item["type"] == "json_invalid":
        return HTTPException(400, NOT_JSON.format(item["ctx"]["error"]))
    sent = request.headers.get("content-type")
    # FastAPI hands a body of another type to the model as bytes.
    return not_declared_json(sent) if tuple(item["loc"]) == ("body",) and isinstance(item["input"], bytes) else None


def not_declared_json(content_type: str | None) -> HTTPException:
    """The refusal of a body that is not declared to be JSON."""
    found = f"Content-Type is {content_type[:MAX_VALUE_CHARS]!r}" if content_type else "there is no Content-Type"
    return HTTPException(415, f"{found}: send Content-Type: application/json")


def _phrase(error: HTTPException) -> str:
    return PHRASES.get(error.status_code, "Request refused")


class Inputs(NamedTuple):
    """Schemas of what a route takes."""

    body: Schema
    parameters: Schema


def _inputs(document: Mapping[str, Any], request: Request) -> Inputs:
    """`document`: the OpenAPI document. It rounds large bounds, so the body's schema comes from its model."""
    route: APIRoute = request.scope["route"]
    operation = document["paths"][route.path][request.method.lower()]
    parameters = {parameter["name"]: parameter["schema"] for parameter in operation.get("parameters", ())}
    model: Any = route.body_field and route.body_field.field_info.annotation
    return Inputs(_schema(model) if model else {}, {"properties": parameters})


@cache
def _schema(body: type[BaseModel]) -> Schema:
    return body.model_json_schema()


def _invalid(items: Sequence[Mapping[str, Any]], inputs: Inputs) -> Problem:
    return broken([_field_error(item, inputs) for item in items[:MAX_ERRORS]], len(items))


def broken(errors: Sequence[FieldError], num_errors: int = 1) -> Problem:
    """The refusal of a request with `num_errors` bad fields, of which `errors` are shown."""
    lines = [f"{error.field}: got {_short(error.value)}, allowed: {error.allowed}" for error in errors]
    more = [f"and {num_errors - len(errors)} more"] if num_errors > len(errors) else []
    return Problem(title=OUTCOMES[0][2], status=422, detail="; ".join(lines + more), errors=tuple(errors))


def _field_error(item: Mapping[str, Any], inputs: Inputs) -> FieldError:
    place, *path = item["loc"]
    schema = inputs.body if place == "body" else inputs.parameters
    allowed = _allowed(schema, path, item["type"]) or reason(item)
    value = None if item["type"] == "missing" else _plain(item.get("input"))
    field = _cut(".".join(map(str, path))) or "body"  # a key of the client's may be in it
    return FieldError(field=field, value=value, allowed=_encodable(allowed))


def _plain(value: Any) -> Any:
    """Numbers, booleans and None unchanged, the rest as a short text: a problem never carries a whole prompt."""
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _cut(value if isinstance(value, str) else repr(value))


def _cut(text: str) -> str:
    text = _encodable(text)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."


def _encodable(text: str) -> str:
    """Escapes lone surrogates, which JSON can express (`"\\ud800"`) and UTF-8 cannot."""
    return text.encode("utf-8", "backslashreplace").decode()


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _allowed(schema: Schema, path: Sequence[str | int], kind: str) -> str:
    """What the schema allows at `path`, in words; "" if it says nothing, or if another rule was broken."""
    if kind == "value_error":
        return ""
    if kind == "extra_forbidden":
        return f"only the fields {_fields(_node(schema, path[:-1]))}"
    return _words(_node(schema, path)) if path else f"a JSON object with the fields {_fields(schema)}"


def _fields(node: Schema) -> str:
    return ", ".join(node.get("properties", {}))


def _node(schema: Schema, path: Sequence[str | int]) -> Schema:
    node = schema
    for part in path:
        node = node.get("items", {}) if isinstance(part, int) else node.get("properties", {}).get(part, {})
        node = next((option for option in node.get("anyOf", ()) if option.get("type") != "null"), node)
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    return node


def _words(node: Mapping[str, Any]) -> str:
    low, high = node.get("minimum", node.get("exclusiveMinimum")), node.get("maximum", node.get("exclusiveMaximum"))
    kind = node.get("type", "")
    if "const" in node or "enum" in node:
        return f"only {' or '.join(map(_short, node.get('enum', [node.get('const')])))}"
    if 0 in (node.get("maxItems"), node.get("maxProperties")):
        return "only empty"
    if low is not None and low == high:
        return f"only {low}"
    if low is not None or high is not None:
        left = "(" if "exclusiveMinimum" in node or low is None else "["
        right = ")" if "exclusiveMaximum" in node or high is None else "]"
        return f"{kind} in {left}{'-inf' if low is None else low}, {'inf' if high is None else high}{right}"
    if kind == "string" and "pattern" in node:
        return f"string like {node['pattern']}"
    if kind == "string" and "maxLength" in node:
        return f"string of {node.get('minLength', 0)} to {node['maxLength']} characters"
    if "maxProperties" in node:
        return f"object of at most {node['maxProperties']} fields"
    if kind == "array":
        return f"list of {node.get('minItems', 0)} to {node.get('maxItems', 'any number of')} items"
    return "only null" if kind == "null" else str(kind)
