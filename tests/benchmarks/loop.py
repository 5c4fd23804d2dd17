"""Samples per second, reward and use of time of the whole system on the demo: generation concurrent with training
(max_staleness 1) compared with strict alternation (max_staleness 0), interleaved in one run.

    python -m tests.benchmarks.loop [--steps 30] [--repeats 3]

`wait`, `train`, `publish` are shares of the trainer's step. `idle` is the share of the time in which a stage was idle.
Rewards are means over tenths of the run, of equal numbers of samples on both sides.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dvp_trainer.up.fleet import interruptible
from tests.benchmarks.system import Outcome, run_system

RESULTS = Path(__file__).parent / "results" / "loop.json"
PARTS = ("wait", "train", "publish")
STALENESS = {"synchronous": 0, "overlapped": 1}
POINTS = 10


def run(max_staleness: int, steps: int, seed: int, out: Path) -> Outcome:
    options = {"batch.max_staleness": max_staleness, "evaluate.interval": 0}
    return run_system(out, steps, seed=seed, options=options)


def rewards(outcome: Outcome) -> list[float]:
    """Mean rewards over POINTS equal parts of the run."""
    values = [record["reward/mean"] for record in outcome.records]
    size = max(1, len(values) // POINTS)
    return [fmean(values[start : start + size]) for start in range(0, len(values), size)]


def summarize(outcomes: list[Outcome]) -> dict[str, Any]:
    """Medians over the repeats; for rewards, means."""
    shares = {part: median(o.mean(f"time/{part}_s") / o.step_s for o in outcomes) for part in PARTS}
    idle = [outcome.idle() for outcome in outcomes]
    return {
        "samples_per_second": median(o.samples_per_second for o in outcomes),
        "step_s": median(o.step_s for o in outcomes),
        "share_of_step": shares | {"rest": 1 - sum(shares.values())},
        "idle": {side: median(shares[side] for shares in idle) for side in idle[0]},
        "generate_group_s": median(o.mean("time/generate_s") for o in outcomes),
        "reward_batch_s": median(o.mean("time/reward_s") for o in outcomes),
        "reward": [fmean(values) for values in zip(*map(rewards, outcomes), strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3, help="seeds")
    given = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {name: [] for name in STALENESS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.repeats):
            for name, max_staleness in STALENESS.items():
                out = Path(folder) / f"{name}-{seed}"
                outcomes[name].append(run(max_staleness, given.steps, seed, out))
    results = {name: summarize(found) for name, found in outcomes.items()}
    for name, result in results.items():
        shares, idle = (
            "  ".join(f"{part} {share:.0%}" for part, share in result[key].items()) for key in ("share_of_step", "idle")
        )
        print(f"{name}: {result['samples_per_second']:.0f} samples/s, a step takes {result['step_s']:.2f} s: {shares}")
        print(f"  idle: {idle}")
        print(
            f"  beside it: generate {result['generate_group_s']:.3f} s per group, "
            f"reward {result['reward_batch_s']:.3f} s per batch"
        )
        print(f"  reward along the run: {' '.join(f'{value:.3f}' for value in result['reward'])}")
    pairs = zip(outcomes["overlapped"], outcomes["synchronous"], strict=True)
    ratio = median(one.samples_per_second / other.samples_per_second for one, other in pairs)
    print(f"overlapped / synchronous: {ratio:.2f}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({**vars(given), "ratio": ratio, **results}, indent=2) + "\n")


if __name__ == "__main__":
    with interruptible():
        main()
