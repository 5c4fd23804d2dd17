"""The monitor's process, from the bound port to the last answer."""

from __future__ import annotations

import asyncio
import logging

from dvp_rl.http.server import bound, http_server, port_file

from .app import create_app
from .runs import Runs
from .settings import MonitorSettings

logger = logging.getLogger(__name__)


async def serve(settings: MonitorSettings, asked_to_stop: asyncio.Event) -> None:
    """Runs until `asked_to_stop` is set. Raises ConfigError."""
    tokens = settings.tokens()
    with bound(settings.host, settings.port) as listener, port_file(settings.port_file, listener):
        runs = Runs(settings)
        max_requests = settings.max_requests + settings.max_viewers
        http = http_server(create_app(runs, tokens, max_requests), drain_s=0, max_requests=max_requests)
        logger.info("listening on http://%s:%d", settings.host, listener.getsockname()[1])
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        polling = asyncio.create_task(runs.run())
        stopping = asyncio.create_task(asked_to_stop.wait())
        try:
            await asyncio.wait((serving, polling, stopping), return_when=asyncio.FIRST_COMPLETED)
            if polling.done():
                await polling
        finally:
            runs.close()
            http.should_exit = True
            stopping.cancel()
            await serving
            polling.cancel()
            await asyncio.wait((polling, stopping))
    logger.info("stopped")
