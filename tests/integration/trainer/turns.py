"""Ranks that take turns: each records when its turn began and ended, or dies in the middle of it.

torchrun --nproc-per-node 3 -m tests.integration.trainer.turns OUT_DIR [--dies RANK]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from dvp_rl.settings import user_errors
from dvp_trainer.learn.world import World
from tests.kit.wait import WITHIN_S


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--dies", type=int)
    arguments = parser.parse_args()
    with user_errors("turns"), World.joined("cpu", WITHIN_S) as world:
        with world.in_turn():
            began = time.monotonic()
            if world.rank == arguments.dies:
                raise SystemExit("told to")
            time.sleep(0.1)
            (arguments.out_dir / f"turn-{world.rank}").write_text(f"{began} {time.monotonic()}")
        if not world.leads:
            assert list(world.orders()) == []


if __name__ == "__main__":
    main()
