"""Checks that a request must pass before a route sees it: token or loopback host, scope, origin, and size."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Asgi

from dvp_rl.contract.errors import OverloadedError
from dvp_rl.contract.http import MAX_BODY_BYTES
from dvp_rl.contract.shares import EVERYBODY, RULE, fits
from dvp_rl.loopback import is_loopback

from .api_tokens import ApiTokens, Caller, Scope
from .connections import MAX_HEAD_BYTES
from .problems import MAX_VALUE_CHARS, respond

logger = logging.getLogger(__name__)
operators = logging.getLogger("dvp_rl.operators")
"""Logs calls that need scope `operate`. Outsiders cannot trigger its lines, so services/dvp_rl/logs.py limits none."""

BUSY_S = 1.0
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
READING = frozenset({"GET", "HEAD", "OPTIONS"})
BODY_TIMEOUT_S = 60.0
"""Longest wait for a whole request body, in seconds."""


class Guard:
    """ASGI middleware for access control. A call needs the scope of its path; on any other path, reading needs `read`
    and everything else `operate`. Routes find the Caller in `request.state.caller`.

    Without tokens the server listens on loopback only, and a Host that is not loopback means that a web page reached it
    through DNS rebinding. A token comes as `Bearer <token>`, or as the password of `Basic`, which is what a browser
    asks its user for. A browser also sends that password with requests made by pages of other sites. Such requests name
    their site (Origin), and are refused unless they only read: the page cannot see the answer."""

    def __init__(
        self,
        app: ASGIApp,
        tokens: ApiTokens,
        max_requests: int,
        scopes: Mapping[str, Scope] | None = None,
        nobody: Scope = Scope.OPERATE,
        max_body: int = MAX_BODY_BYTES,
        limited_by: str = "max_requests",
        realm: str = "dvp-rl",
        routed: Callable[[Asgi], bool] = lambda scope: True,
    ) -> None:
        """`scopes`: see `needed_scope`. `nobody`: scope of callers where there are no tokens. `max_requests`: requests
        answered at the same time, each with a body of up to `max_body` bytes; `limited_by` names the settings behind
        that number. `realm`: what a browser names when it asks its user for the token. `routed`: whether the app has a
        route for a request; any caller with a token may hear that it has none."""
        self._app = app
        self._max_requests = max_requests
        self._limited_by = limited_by
        self._in_progress = 0
        self._of_callers: Counter[str] = Counter()
        self._tokens = tokens
        self._scopes = scopes or {}
        self._nobody = Caller("", nobody)
        self._max_body = max_body
        # Basic makes a browser ask its user; whoever sends a Bearer token knows what to send.
        self._challenge = f'Basic realm="{realm}"'
        self._routed = routed

    async def __call__(self, scope: Asgi, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        path = scope["path"]
        caller, needed = self._caller(path, headers), needed_scope(scope["method"], path, self._scopes)
        name = caller.limited if caller else EVERYBODY
        scope.setdefault("state", {})["caller"] = caller
        refusal = (
            self._refusal(caller, hosts)
            or self._out_of_scope(caller, needed, scope)
            or _foreign(scope["method"], headers, hosts)
            or _too_long(scope)
            or _ambiguous(headers)
            or self._too_large(headers)
            or self._too_many(path, name)
        )
        app = self._app if refusal is None else respond(refusal, path)
        if caller not in (None, self._nobody) and refusal is None and needed is caller.scope is Scope.OPERATE:
            operators.info("%s: %s %s", caller.name, scope["method"], path[:MAX_VALUE_CHARS])
        self._in_progress += 1
        self._of_callers[name] += 1
        try:
            await app(scope, *self._bounded(receive, send))
        except asyncio.CancelledError:  # only uvicorn cancels requests, and only when it stops
            logger.info("%s %s was cut off: the service is stopping", scope["method"], path[:MAX_VALUE_CHARS])
        finally:
            self._in_progress -= 1
            self._of_callers[name] -= 1

    def _caller(self, path: str, headers: dict[bytes, bytes]) -> Caller | None:
        if not self._tokens or path in OPEN_PATHS:
            return self._nobody
        return self._tokens.find(_credential(headers.get(b"authorization", b"")))

    def _refusal(self, caller: Caller | None, hosts: Sequence[str]) -> HTTPException | None:
        if not self._tokens:
            names = [host if host.endswith("]") else host.rsplit(":", 1)[0] for host in hosts]
            return None if names and all(map(is_loopback, names)) else not_loopback(", ".join(hosts))
        return no_token(self._challenge) if caller is None else None

    def _out_of_scope(self, caller: Caller | None, needed: Scope, scope: Asgi) -> HTTPException | None:
        if caller is None or scope["path"] in OPEN_PATHS or caller.scope.includes(needed) or not self._routed(scope):
            return None
        return out_of_scope(scope["method"], scope["path"], needed, caller)

    def _too_large(self, headers: dict[bytes, bytes]) -> HTTPException | None:
        length = headers.get(b"content-length", b"0")
        return self._limit(length.decode("latin-1")) if int(length) > self._max_body else None

    def _too_many(self, path: str, name: str) -> OverloadedError | None:
        """`name`: what the caller is counted under. Probes are always answered: a supervisor must not restart a service
        that is only busy."""
        own, free = self._of_callers[name], self._max_requests - self._in_progress
        if path in OPEN_PATHS or fits(name, own, 1, free):
            return None
        whose = f"; {own} are of {name}: {RULE}" if free > 0 else ""
        return busy(self._in_progress, self._max_requests, self._limited_by, whose)

    def _limit(self, size: str) -> HTTPException:
        return HTTPException(413, f"the body has {size} bytes, at most {self._max_body} allowed")

    def _bounded(self, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """Counts the bytes of the body as they stream in, as a request need not state its length, and ends a request
        whose body never arrives. After the body, only a disconnect can follow, at any time."""
        seen, deadline, complete, answered = 0, asyncio.get_running_loop().time() + BODY_TIMEOUT_S, False, False

        async def noticed(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        async def counted() -> Message:
            nonlocal seen, complete
            try:
                async with asyncio.timeout_at(None if complete else deadline):
                    message = await receive()
            except TimeoutError:
                if answered:
                    return {"type": "http.disconnect"}
                raise HTTPException(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
            complete = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise self._limit(f"more than {self._max_body}")
            return message

        return counted, noticed


def not_loopback(host: str) -> HTTPException:
    detail = (
        f"Host {host[:MAX_VALUE_CHARS]!r} is not loopback: without a token only 127.0.0.1, ::1 and localhost are served"
    )
    return HTTPException(403, detail)


def no_token(challenge: str) -> HTTPException:
    detail = "this service needs a token: send Authorization: Bearer <token>"
    return HTTPException(401, detail, {"WWW-Authenticate": challenge})


def out_of_scope(method: str, path: str, needed: Scope, caller: Caller) -> HTTPException:
    held = f"that of {caller.name} has scope {caller.scope}" if caller.name else "this service has no tokens"
    return HTTPException(403, f"{method} {path[:MAX_VALUE_CHARS]} needs a token of scope {needed}; {held}")


def busy(in_progress: int, max_requests: int, limited_by: str, whose: str = "") -> OverloadedError:
    limit = f"{max_requests} ({limited_by})"
    return OverloadedError(f"{in_progress} requests are being answered, at most {limit}{whose}", BUSY_S)


def needed_scope(method: str, path: str, scopes: Mapping[str, Scope]) -> Scope:
    """The scope that a call needs: that of the first of `scopes` whose path is this one or above it, else `read` for
    reading and `operate` for the rest."""
    of_path = (scope for prefix, scope in scopes.items() if path == prefix or path.startswith(f"{prefix}/"))
    return next(of_path, Scope.READ if method in READING else Scope.OPERATE)


def _foreign(method: str, headers: dict[bytes, bytes], hosts: Sequence[str]) -> HTTPException | None:
    origin = headers.get(b"origin", b"").decode("latin-1")
    if not origin or method in READING or [origin.partition("://")[2]] == hosts:
        return None
    host = ", ".join(hosts)[:MAX_VALUE_CHARS]
    detail = f"a page of {origin[:MAX_VALUE_CHARS]} may not change anything at {host}; a proxy must preserve Host"
    return HTTPException(403, detail)


def _too_long(scope: Asgi) -> HTTPException | None:
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(a) + len(b) for a, b in scope["headers"])
    if size <= MAX_HEAD_BYTES:
        return None
    detail = f"the line and the headers of the request have {size} bytes, at most {MAX_HEAD_BYTES} allowed"
    return HTTPException(431, detail, {"Connection": "close"})


def _ambiguous(headers: dict[bytes, bytes]) -> HTTPException | None:
    """Content-Length with Transfer-Encoding: a proxy and this service could disagree on where the next request
    begins."""
    if not {b"content-length", b"transfer-encoding"} <= headers.keys():
        return None
    return HTTPException(400, "Content-Length and Transfer-Encoding: send one of them", {"Connection": "close"})


def _credential(authorization: bytes) -> bytes:
    """The token in an Authorization header; b"" if it holds none."""
    scheme, _, rest = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
