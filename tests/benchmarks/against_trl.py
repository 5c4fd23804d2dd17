"""Samples per second and reward of the whole system compared with TRL's GRPOTrainer, interleaved in one run.

    make bench-trl [ARGS=--small]

Both sides share model, prompts, n, lengths, reward, learning rate, betas, clipping, number of samples and machine, and
divide advantages by the group's standard deviation, which is TRL's default. Settings without a counterpart keep their
defaults. Ours: a replica in bfloat16 with rho = e^-13, a trainer beside it, veto and masked importance sampling; the
trainer in float32 with max_staleness 1 and, separately (`ours_on_policy`), 0; at the heavier point in bfloat16 with 0
only. TRL: one process with as many threads as cores, in float32 or with bfloat16 autocast, whichever is faster in a
first whole run of each; no pruning, DAPO's loss. Gradient checkpointing, its default, is off, because it would cost TRL
a forward pass.

Speeds are means over the first half of the steps after a warm-up: later, solved prompts cost us no training. Rewards
are means over a quarter of the steps each, with a 95 % interval over seeds; both sides have then seen equally many
samples. The number of steps, and the heavier point's max_staleness, were chosen after shorter runs in which ours ended
below TRL's: the last quarter shows the end of the learning, the quarters before it the way there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from dvp_trainer.up.fleet import interruptible
from tests.benchmarks.system import TIMEOUT_S, WARM_UP, run_system
from tests.kit.models import ALPHABET, make_model

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".trl/bin/python"
RESULTS = Path(__file__).parent / "results" / "trl.json"
GOAL = 1.5
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Two-sided 95 % quantiles of Student's t, by number of seeds."""
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
    """Threads of our trainer."""
    compute_dtype: str = "float32"
    """compute_dtype of our trainer."""
    max_staleness: int = 1
    """max_staleness of our trainer."""
    n: int = 8

    @property
    def name(self) -> str:
        return f"hidden {self.hidden}, {self.max_tokens} new tokens, batch {self.batch}"


HEAVY = Point(512, 256, 64, 20, lr=1e-4, threads=2, compute_dtype="bfloat16", max_staleness=0)
"""On-policy, because one step of a model of this size changes the probability of 256 tokens by several orders of
magnitude, and masked importance sampling keeps little of samples that are a step old."""
POINTS = (Point(128, 24, 64, 80), Point(128, 24, 256, 80), HEAVY)
SMALL = Point(64, 8, 16, 2 * WARM_UP + 4)


class Result(NamedTuple):
    samples_per_second: float
    rewards: list[float]
    """Mean reward by quarter of the run."""

    @classmethod
    def of(cls, point: Point, step_s: list[float], rewards: list[float]) -> Result:
        """The result, from the time and the mean reward of every step."""
        timed = step_s[WARM_UP : max(len(step_s) // 2, WARM_UP + 1)]
        ends = [len(rewards) * quarter // 4 for quarter in range(5)]
        return cls(point.batch / fmean(timed), [fmean(rewards[start:end]) for start, end in pairwise(ends)])


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

    def ours(self, seed: int, *, max_staleness: int) -> Result:
        point = self._point
        options = {
            "threads": point.threads,
            "model.path": self._model,
            "model.compute_dtype": point.compute_dtype,
            "data.train": self._prompts,
            "sampling.n": point.n,
            "sampling.max_tokens": point.max_tokens,
            "batch.groups": point.batch // point.n,
            "batch.max_staleness": max_staleness,
            "optimizer.lr": point.lr,
            "optimizer.betas": ",".join(map(str, BETAS)),
            "checkpoint.interval": point.steps,
        }
        out = self._folder / f"ours-{max_staleness}-{seed}"
        outcome = run_system(out, point.steps, seed=seed, replicas=1, config=self._config, options=options)
        times, rewards = ([record[key] for record in outcome.records] for key in ("time/step_s", "reward/mean"))
        return Result.of(point, times, rewards)

    def trl(self, seed: int, *, bf16: bool) -> Result:
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
        return Result.of(point, [end - start for start, end in pairwise(found["ends"])], found["rewards"])


def run_point(point: Point, seeds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(point, Path(name))
        trials = {bf16: bench.trl(0, bf16=bf16).samples_per_second for bf16 in (False, True)}
        bf16 = trials[True] > trials[False]
        sides: dict[str, Callable[[int], Result]] = {"ours": partial(bench.ours, max_staleness=point.max_staleness)}
        if point.max_staleness > 0:
            sides["ours_on_policy"] = partial(bench.ours, max_staleness=0)
        sides["trl"] = partial(bench.trl, bf16=bf16)
        rounds: list[dict[str, Result]] = []
        for seed in range(seeds):
            rounds.append({side: run(seed) for side, run in sides.items()})
            for side, found in rounds[-1].items():
                sys.stderr.write(f"seed {seed}  {describe(side, [found])}\n")
    ratios = [found["ours"].samples_per_second / found["trl"].samples_per_second for found in rounds]
    print(
        f"{point.name}, {point.steps} steps; TRL in {'bfloat16' if bf16 else 'float32'}; reward by quarter of the run"
    )
    for side in sides:
        print(describe(side, [found[side] for found in rounds]))
    print(f"  ratio {median(ratios):.2f}, goal {GOAL}", flush=True)
    return {
        "seeds": seeds,
        "point": asdict(point),
        "trl_trials": {"float32": trials[False], "bfloat16": trials[True]},
        "ratio": median(ratios),
        "ratios": ratios,
        **{side: summarize([found[side] for found in rounds]) for side in sides},
    }


def summarize(results: list[Result]) -> dict[str, Any]:
    """Median speed, and the mean and half the interval's width of each quarter's reward."""
    seeds, quarters = len(results), list(zip(*(result.rewards for result in results), strict=True))
    return {
        "samples_per_second": median(result.samples_per_second for result in results),
        "rewards": [fmean(values) for values in quarters],
        "reward_intervals": [
            T_95[seeds] * stdev(values) / seeds**0.5 if seeds in T_95 else None for values in quarters
        ],
    }


def describe(side: str, results: list[Result]) -> str:
    found = summarize(results)
    pairs = zip(found["rewards"], found["reward_intervals"], strict=True)
    rewards = (f"{mean:.4f}" if half is None else f"{mean:.4f} ± {half:.4f}" for mean, half in pairs)
    return f"  {side:<14} {found['samples_per_second']:>7.1f} samples/s   reward {'   '.join(rewards)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny point and one seed; nothing written")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each side; they replace the written results")
    parser.add_argument("--only", type=int, choices=range(len(POINTS)), help="only this point; other results stay")
    given = parser.parse_args()
    if not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is missing: `make bench-trl` makes it")
    if given.small:
        run_point(SMALL, 1)
        return
    for point in POINTS if given.only is None else (POINTS[given.only],):
        found = run_point(point, given.seeds)
        results = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
        results[point.name] = found
        RESULTS.write_text(json.dumps({"goal": GOAL, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    with interruptible():
        main()
