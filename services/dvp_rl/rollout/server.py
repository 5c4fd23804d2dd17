"""One replica's process, from the bound port to the last answer."""

from __future__ import annotations

import asyncio
import logging
import socket

from dvp_rl import tracing
from dvp_rl.contract.errors import ConfigError
from dvp_rl.http.server import HttpServer, bound, http_server, port_file
from dvp_rl.logs import LogContext

from .app import create_app
from .service import Service
from .settings import RolloutSettings

logger = logging.getLogger(__name__)


async def serve(settings: RolloutSettings, context: LogContext, asked_to_stop: asyncio.Event) -> None:
    """Runs until `asked_to_stop` is set, then stops gracefully. Raises ConfigError."""
    context.run, context.replica = settings.run_id, settings.replica_id
    tokens = settings.tokens()
    _check(settings)
    with (
        bound(settings.host, settings.port) as listener,
        tracing.configured("dvp-rollout", settings.trace_url, **{"service.instance.id": settings.replica_id}),
        port_file(settings.port_file, listener),
    ):
        service = Service(settings, context)
        app = create_app(service, tokens, settings.max_requests)
        http = http_server(app, settings.drain_s, settings.max_requests)
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


def _check(settings: RolloutSettings) -> None:
    """Checks what needs neither the port nor the engine's libraries. Raises ConfigError."""
    if not settings.model.is_dir():
        raise ConfigError(f"model {settings.model}: no such folder; expected a local Hugging Face model folder")
    settings.weights.read_token()
