"""The program `dvp-train`, as it is installed."""

from dvp_rl.extras import needing


def train() -> None:
    with needing("trainer", "dvp-train"):
        from .__main__ import main

        main()
