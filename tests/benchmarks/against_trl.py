"""Samples per second and reward of the whole system against TRL's GRPOTrainer, in one run and interleaved.

    make bench-trl [ARGS=--small]

Same model, prompts, n, lengths, reward, learning rate, betas, clipping, number of samples and machine, and advantages
divided by the group's standard deviation, which is TRL's default. What does not map stays as each ships it. Ours: a
replica in bfloat16 with rho = e^-13, a trainer beside it (in float32, at the heavier point in bfloat16), max_staleness
1, veto and masked importance sampling. TRL: one process with as many threads as there are cores, in float32 and, as
another side, with bfloat16 autocast; no pruning, DAPO's loss. Gradient checkpointing, its default, is off: that would
cost it a forward pass.

A speed is over the steps after the first few; the ratio is against the faster of TRL's. Reward is the mean over the
last quarter of the steps, with a 95 % interval over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from tests.benchmarks.system import TIMEOUT_S, WARM_UP, run_system
from tests.models import ALPHABET, make_model

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".trl/bin/python"
RESULTS = Path(__file__).parent / "results" / "trl.json"
GOAL = 1.5
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Two-sided Student's t by number of seeds."""
BETAS = (0.9, 0.999)
PROMPTS, PROMPT_TOKENS = 512, 16
CONFIG = """
run_id = "against-trl"
[correction]
baseline = "grpo_std"
[reward]
name = "tests.benchmarks.even_words:even_words"
[report]
tensorboard = false
"""


@dataclass(frozen=True)
class Point:
    """A model of 2 layers and vocabulary 1,024, and `batch` samples per step in groups of n."""

    hidden: int
    max_tokens: int
    batch: int
    steps: int
    lr: float = 1e-3
    threads: int = 1
    """Of our trainer."""
    compute_dtype: str = "float32"
    """Of our trainer."""
    n: int = 8


HEAVY = Point(512, 256, 64, 12, lr=1e-4, threads=2, compute_dtype="bfloat16")
"""A step of 1e-3 takes a model of this size so far that masked importance sampling keeps nothing of older samples."""
POINTS = (Point(128, 24, 64, 40), Point(128, 24, 256, 40), HEAVY)
SMALL = (Point(64, 8, 16, WARM_UP + 3),)


class Result(NamedTuple):
    samples_per_second: float
    reward: float


class Bench:
    """One point: the model and the prompts that all sides share, in a folder."""

    def __init__(self, point: Point, folder: Path) -> None:
        self._point, self._folder = point, folder
        self._model = make_model(
            folder / "model", vocab_size=1024, hidden=point.hidden, context=1024, spread=1.0, endless=True
        )
        rng = random.Random(0)
        texts = ("".join(rng.choices(ALPHABET, k=PROMPT_TOKENS)) for _ in range(PROMPTS))
        self._prompts, self._config = folder / "prompts.jsonl", folder / "config.toml"
        self._prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        self._config.write_text(CONFIG)

    def ours(self, seed: int) -> Result:
        point = self._point
        options = {
            "threads": point.threads,
            "model.path": self._model,
            "model.compute_dtype": point.compute_dtype,
            "data.train": self._prompts,
            "sampling.n": point.n,
            "sampling.max_tokens": point.max_tokens,
            "batch.groups": point.batch // point.n,
            "batch.max_staleness": 1,
            "optimizer.lr": point.lr,
            "optimizer.betas": ",".join(map(str, BETAS)),
            "checkpoint.interval": point.steps,
        }
        out = self._folder / f"ours-{seed}"
        outcome = run_system(out, point.steps, seed=seed, replicas=1, config=self._config, options=options)
        return Result(outcome.samples_per_second, self._last([record["reward/mean"] for record in outcome.records]))

    def trl(self, seed: int, *, bf16: bool = False) -> Result:
        point = self._point
        task = {
            **asdict(point),
            "model": str(self._model),
            "prompts": str(self._prompts),
            "out": str(self._folder / "trl"),
            "betas": BETAS,
            "seed": seed,
            "bf16": bf16,
        }
        done = subprocess.run(
            [PYTHON, "-m", "tests.benchmarks.trl_side", json.dumps(task)],
            cwd=REPOSITORY,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"TRL failed:\n{done.stderr[-4000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        steady = found["ends"][WARM_UP - 1 :]
        speed = point.batch * (len(steady) - 1) / (steady[-1] - steady[0])
        return Result(speed, self._last(found["rewards"]))

    def trl_bf16(self, seed: int) -> Result:
        return self.trl(seed, bf16=True)

    def _last(self, rewards: list[float]) -> float:
        return fmean(rewards[-max(1, len(rewards) // 4) :])


def run_point(point: Point, seeds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(point, Path(name))
        sides = {"ours": bench.ours, "trl": bench.trl, "trl bf16": bench.trl_bf16}
        rounds = [{side: run(seed) for side, run in sides.items()} for seed in range(seeds)]
    ratios = [
        round_["ours"].samples_per_second / max(round_[side].samples_per_second for side in sides if side != "ours")
        for round_ in rounds
    ]
    return {
        "point": asdict(point),
        "ratio": median(ratios),
        "ratios": ratios,
        **{side: describe([round_[side] for round_ in rounds]) for side in sides},
    }


def describe(results: list[Result]) -> dict[str, Any]:
    rewards = [result.reward for result in results]
    seeds = len(rewards)
    spread = T_95.get(seeds, 2.0) * stdev(rewards) / seeds**0.5 if seeds > 1 else None
    speed = median(result.samples_per_second for result in results)
    return {"samples_per_second": speed, "reward": fmean(rewards), "reward_interval": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny point and one seed; nothing written")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", type=int, help="one point by its number; nothing written")
    parser.add_argument("--steps", type=int, help="other than each point's own; nothing written")
    given = parser.parse_args()
    if not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is missing: `make bench-trl` makes it")
    points = SMALL if given.small else POINTS if given.only is None else (POINTS[given.only],)
    points = points if given.steps is None else tuple(replace(point, steps=given.steps) for point in points)
    results = []
    for point in points:
        result = run_point(point, 1 if given.small else given.seeds)
        results.append(result)
        print(f"hidden {point.hidden}, {point.max_tokens} new tokens, batch {point.batch}, {point.steps} steps")
        for side in ("ours", "trl", "trl bf16"):
            found = result[side]
            interval = "" if found["reward_interval"] is None else f" ± {found['reward_interval']:.4f}"
            print(f"  {side:<9} {found['samples_per_second']:>7.1f} samples/s   reward {found['reward']:.4f}{interval}")
        print(f"  ratio {result['ratio']:.2f}, goal {GOAL}", flush=True)
    if points == POINTS:
        RESULTS.write_text(json.dumps({"goal": GOAL, "seeds": given.seeds, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
