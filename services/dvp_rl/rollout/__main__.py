"""`dvp-rollout`: one rollout replica."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from dvp_rl import logs
from dvp_rl.settings import user_errors

from .settings import RolloutSettings


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("dvp-rollout"):
        settings = RolloutSettings.load(sys.argv[1:] if argv is None else argv)
        asyncio.run(_serve(settings))


async def _serve(settings: RolloutSettings) -> None:
    # Imported late, so that --help, --dry-run and bad settings answer at once.
    from dvp_rl.http.server import stop_signals

    from .server import serve

    context = logs.configure(settings.log_format, settings.log_level)
    await serve(settings, context, stop_signals())


if __name__ == "__main__":
    main()
