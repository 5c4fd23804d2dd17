"""A short fixed run of the learner whose losses are kept in golden.json, so that no later change moves them unseen.

python -m tests.unit.trainer.golden            prints them under the reproducible arithmetic of ENVIRONMENT
python -m tests.unit.trainer.golden --write    makes them the expected ones
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from tests.unit.trainer.groups import make_group, make_sample
from trainer.batch import Batch
from trainer.config import TrainSettings
from trainer.model import load_model
from trainer.step import Learner

EXPECTED = Path(__file__).with_name("golden.json")
MODEL = Path(__file__).parents[3] / "deploy/demo/model"
ENVIRONMENT = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}
"""With oneDNN off: the same instructions on every x86-64 machine."""
STEPS, GROUPS, N = 6, 4, 4
SHOWN = ("loss/surrogate", "grad/norm", "mismatch/kl", "weight/mean", "veto/total", "mis/fraction")


def make_batch(rng: np.random.Generator) -> Batch:
    """Random completions of random lengths; log-probs around those of a uniform choice among a few tokens."""
    groups = []
    for position in range(GROUPS):
        prompt = rng.integers(5, 60, rng.integers(3, 9)).tolist()
        samples = []
        for _ in range(N):
            length = int(rng.integers(2, 7))
            samples.append(make_sample(rng.integers(5, 60, length).tolist(), -rng.uniform(3, 6, length)))
        groups.append(make_group(prompt, samples, rng.random(N).round(2).tolist(), position=position))
    return Batch(tuple(groups))


def train(out_dir: Path) -> list[dict[str, float]]:
    """SHOWN of every step. A wide safe set and a mild cap, so that every part of the method takes part."""
    torch.manual_seed(0)
    settings = TrainSettings.model_validate(
        {
            "run_id": "golden",
            "out_dir": out_dir,
            "steps": STEPS,
            "model": {"path": MODEL, "micro_batch_tokens": 64},
            "data": {"train": "unused.jsonl"},
            "reward": {"name": "exact_match"},
            "sampling": {"n": N, "log_min_p": -13.0},
            "correction": {"cap": 4.0, "veto": 1e-4},
            "optimizer": {"lr": 5e-5, "warmup_steps": 2},
        }
    )
    learner, rng = Learner(load_model(settings.model), settings, pad_id=0), np.random.default_rng(0)
    results = []
    for _ in range(STEPS):
        metrics = learner.step(make_batch(rng))
        results.append({name: metrics[name] for name in SHOWN})
    return results


def train_reproducibly() -> list[dict[str, float]]:
    """The same in a process of its own, under ENVIRONMENT."""
    command = [sys.executable, "-m", "tests.unit.trainer.golden", "--here"]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=True)
    results: list[dict[str, float]] = json.loads(done.stdout)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        torch.set_num_threads(1)
        sys.stdout.write(json.dumps(train(Path("unused"))))
        return
    results = train_reproducibly()
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    if arguments.write:
        EXPECTED.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
