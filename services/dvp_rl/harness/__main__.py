"""`dvp-harness`: plays the episodes of a run in a user's environment."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from dvp_rl import logs
from dvp_rl.cancellation import cancel
from dvp_rl.settings import user_errors

from .settings import HarnessSettings

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("dvp-harness"):
        settings = HarnessSettings.load(sys.argv[1:] if argv is None else argv)
        asyncio.run(_run(settings) if settings.trial is None else _try(settings, settings.trial))


async def _run(settings: HarnessSettings) -> None:
    from dvp_rl.http.server import stop_signals

    from .harness import Harness

    logs.configure(settings.log_format, settings.log_level)
    harness = Harness(settings, settings.read_token())
    logger.info("%s, %d episodes at a time, of %s", settings.environment, settings.workers, ", ".join(settings.urls))
    playing, stopping = asyncio.create_task(harness.run()), asyncio.create_task(stop_signals().wait())
    try:
        await asyncio.wait((playing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            playing.result()
    finally:
        await cancel((playing, stopping))
        logger.info("stopped; %s", harness.summary())


async def _try(settings: HarnessSettings, file: Path) -> None:
    from .trial import play_row, read_row

    said = await play_row(settings, read_row(file))
    sys.stdout.buffer.write(json.dumps(said._asdict(), indent=2, ensure_ascii=False).encode() + b"\n")


if __name__ == "__main__":
    main()
