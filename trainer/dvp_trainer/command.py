"""The program `dvp-train`, as it is installed."""

from dvp_rl.extras import require


def train() -> None:
    require("trainer", "dvp-train")
    from .__main__ import main

    main()
