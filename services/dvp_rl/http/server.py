"""Socket, HTTP server and stop signals of a service."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from dvp_rl.contract.errors import ConfigError

from .connections import Connection, Idle

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that the kernel queues until they are accepted. Its own limit (net.core.somaxconn) is that by default. It
drops those beyond, and may reset one of them after its client has sent a request."""
ACCEPTED = 128
"""Connections that asyncio accepts in one go."""
MIN_CONNECTIONS = 64
OTHER_FILES = 3 * ACCEPTED + 512
"""Open files besides the connections that are kept: those accepted in one go, as many that are just closed, as many to
spare, and whatever else a service opens (libraries, weights, the broker, an engine)."""
WANTED_FILES = 8192
ANSWER_S = 2
"""Time to send the last answers after requests were ended, in seconds."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the service decides what stops when."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has set it to ACCEPTED

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_report)
        await super().shutdown(sockets)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio's default handler, minus the report of a bug of its own: a second after it could not accept a connection
    because too many files were open, it listens again on a socket that may be closed by then (selector_events.py,
    `_accept_connection`).
    """
    if isinstance(context.get("exception"), ValueError) and "_start_serving" in repr(context.get("handle")):
        return
    loop.default_exception_handler(context)


def http_server(app: FastAPI, drain_s: float, max_requests: int) -> HttpServer:
    """`drain_s`: how long requests may continue after `should_exit`, in seconds. `max_requests`: requests answered at
    the same time; twice as many connections are kept, if the process may open that many files. Raises ConfigError if it
    may open too few."""
    max_connections = _connections(2 * max_requests)
    config = uvicorn.Config(
        app,
        http=partial(Connection, Idle(max_connections)),  # type: ignore[arg-type]
        backlog=ACCEPTED,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=math.ceil(drain_s) + ANSWER_S,
    )
    return HttpServer(config)


def _connections(wanted: int) -> int:
    """How many connections can be kept, at most `wanted`. Increases the soft limit on open files, which is 1,024 on
    many systems. Raises ConfigError if too few files may be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = max(wanted + OTHER_FILES, WANTED_FILES)
    files = files if hard == resource.RLIM_INFINITY else min(files, hard)
    if soft == resource.RLIM_INFINITY or soft >= files:
        files = soft
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    allowed = wanted if files == resource.RLIM_INFINITY else min(wanted, files - OTHER_FILES)
    if allowed < min(wanted, MIN_CONNECTIONS):
        needed = MIN_CONNECTIONS + OTHER_FILES
        raise ConfigError(f"this process may open {files} files, and needs {needed}: raise the limit (ulimit -n)")
    if allowed < wanted:
        logger.warning("at most %d connections, not %d: this process may open %d files", allowed, wanted, files)
    return allowed


def stop_signals() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets. A second signal has its usual effect."""
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        logger.info("asked to stop")
        asked_to_stop.set()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(name)

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop)
    return asked_to_stop


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, opened before any expensive work. Raises ConfigError if host or port cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host {host!r}: {error.strerror}") from None
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Two sockets may share a bound port until one of them listens.
            listener.listen(BACKLOG)
        except OSError as error:
            remedy = "choose another --port, or 0 for a free one"
            raise ConfigError(f"port {port} on {host} cannot be used: {error.strerror}; {remedy}") from None
        yield listener


@contextmanager
def port_file(file: Path | None, listener: socket.socket) -> Iterator[None]:
    """Writes the port to `file` atomically, and removes the file at the end. Raises ConfigError."""
    if file is None:
        yield
        return
    try:
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(f"{listener.getsockname()[1]}\n")
        partial.replace(file)
    except OSError as error:
        raise ConfigError(f"port_file {file}: {error.strerror}") from None
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()
