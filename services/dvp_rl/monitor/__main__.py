"""`dvp-monitor`: the live queue page and its Prometheus metrics."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from dvp_rl import logs
from dvp_rl.settings import user_errors

from .settings import MonitorSettings


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("dvp-monitor"):
        settings = MonitorSettings.load(sys.argv[1:] if argv is None else argv)
        asyncio.run(_serve(settings))


async def _serve(settings: MonitorSettings) -> None:
    from dvp_rl.http.server import stop_signals

    from .server import serve

    logs.configure(settings.log_format, settings.log_level).run = settings.run_id
    await serve(settings, stop_signals())


if __name__ == "__main__":
    main()
