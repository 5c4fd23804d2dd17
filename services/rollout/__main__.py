"""`dvp-rollout`: one rollout replica."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from services import logs
from services.settings import user_errors

from .settings import RolloutSettings

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("dvp-rollout"):
        settings = RolloutSettings.load(sys.argv[1:] if argv is None else argv)
        asyncio.run(_serve(settings))


async def _serve(settings: RolloutSettings) -> None:
    # Imported late: --help, --dry-run and a bad setting answer at once.
    from .server import serve

    context = logs.configure(settings.log_format, settings.log_level)
    await serve(settings, context, _stop_signals())


def _stop_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT. The second one has its usual effect."""
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


if __name__ == "__main__":
    main()
