"""The process around the service: socket, HTTP server, signals."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from services.contract.errors import ConfigError
from services.logs import LogContext

from .app import create_app
from .service import Service
from .settings import RolloutSettings

logger = logging.getLogger(__name__)

BACKLOG = 512
ANSWER_S = 2
"""Time to send the last answers after requests were ended."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: queue and HTTP drain side by side, then the engine closes."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: RolloutSettings, context: LogContext, asked_to_stop: asyncio.Event) -> None:
    """Runs until `asked_to_stop` is set, then stops gracefully. Raises ConfigError."""
    context.run, context.replica = settings.run_id, settings.replica_id
    tokens = settings.tokens()
    _check(settings)
    with bound(settings.host, settings.port) as listener, port_file(settings.port_file, listener):
        service = Service(settings, context)
        http = _http_server(create_app(service, tokens), settings)
        logger.info("listening on http://%s:%d", settings.host, listener.getsockname()[1])
        await _run(service, http, listener, asked_to_stop)


async def _run(service: Service, http: HttpServer, listener: socket.socket, asked_to_stop: asyncio.Event) -> None:
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    starting = asyncio.create_task(service.start())
    stopping = asyncio.create_task(asked_to_stop.wait())
    try:
        await asyncio.wait((serving, starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        http.should_exit = True
        await asyncio.gather(service.drain(), serving)
        await service.close()
    logger.info("stopped")


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, before anything heavy happens. Raises ConfigError if the port is taken or not allowed."""
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
    """Writes the port, whole or not at all, and removes the file at the end."""
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


def _check(settings: RolloutSettings) -> None:
    """What can be refused before the port is taken and the engine's libraries are imported."""
    if not settings.model.is_dir():
        raise ConfigError(f"model {settings.model}: no such folder; expected a local Hugging Face model folder")


def _http_server(app: FastAPI, settings: RolloutSettings) -> HttpServer:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.drain_s) + ANSWER_S,
    )
    return HttpServer(config)
