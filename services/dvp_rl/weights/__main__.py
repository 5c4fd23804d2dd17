"""`dvp-weights --folder DIR`. As a separate process it never slows the trainer, and outlives the trainer's restarts."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from dvp_rl import logs
from dvp_rl.settings import user_errors

from .settings import WeightServerSettings

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("dvp-weights"):
        settings = WeightServerSettings.load(sys.argv[1:] if argv is None else argv)
        asyncio.run(_serve(settings))


async def _serve(settings: WeightServerSettings) -> None:
    from dvp_rl.http.server import bound, http_server, port_file, stop_signals

    from .app import create_app
    from .mirror import Mirror

    logs.configure(settings.log_format, settings.log_level)
    asked_to_stop, tokens = stop_signals(), settings.tokens()
    with bound(settings.host, settings.port) as listener, port_file(settings.port_file, listener):
        mirror = None if settings.upstream.url is None else Mirror(settings.folder, settings.upstream)
        http = http_server(create_app(settings.folder, tokens, settings.max_requests, mirror), 0, settings.max_requests)
        logger.info("serving %s on http://%s:%d", settings.folder, settings.host, listener.getsockname()[1])
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        stopping = asyncio.create_task(asked_to_stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        http.should_exit = True
        stopping.cancel()
        await serving
    logger.info("stopped")


if __name__ == "__main__":
    main()
