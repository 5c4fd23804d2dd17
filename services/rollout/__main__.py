"""`dvp-rollout`: one rollout replica."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from services.settings import user_errors

from .settings import RolloutSettings


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("dvp-rollout"):
        settings = RolloutSettings.load(sys.argv[1:] if argv is None else argv)
        # Imported late: --help, --dry-run and a bad setting answer at once.
        from .server import serve

        asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
