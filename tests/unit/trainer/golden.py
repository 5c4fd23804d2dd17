"""A short fixed run of the learner. Its losses are kept in golden.json, so that no change moves them unnoticed.

python -m tests.unit.trainer.golden            prints the losses and their distance from the expected ones
python -m tests.unit.trainer.golden --write    stores the losses as the expected ones
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch

from dvp_trainer.config import TrainSettings
from dvp_trainer.data.batch import Batch
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.step import Learner
from tests.kit.records import make_sample, make_scored

EXPECTED = Path(__file__).with_name("golden.json")
MODEL = Path(__file__).parents[3] / "deploy/demo/model"
TOLERANCE = 2**-13
"""Largest `distance` that counts as rounding: 1024 times float32's epsilon, since each of six steps amplifies the last.
Set ATEN_CPU_CAPABILITY=avx2 or MKL_ENABLE_INSTRUCTIONS=AVX2 to see the effect of other CPU instructions."""
STEPS, GROUPS, N = 6, 4, 4
SHOWN = ("loss/surrogate", "grad/norm", "mismatch/kl", "weight/mean", "veto/total", "mis/fraction")

Losses: TypeAlias = list[dict[str, float]]
"""The metrics SHOWN of every step."""


def make_batch(rng: np.random.Generator) -> Batch:
    """Random completions of random lengths, with log-probs between -6 and -3."""
    groups = []
    for position in range(GROUPS):
        prompt = rng.integers(5, 60, rng.integers(3, 9)).tolist()
        samples = []
        for _ in range(N):
            length = int(rng.integers(2, 7))
            samples.append(make_sample(rng.integers(5, 60, length).tolist(), -rng.uniform(3, 6, length)))
        groups.append(make_scored(prompt, samples, rng.random(N).round(2).tolist(), position=position))
    return Batch(tuple(groups))


def train(out_dir: Path, changed: Mapping[str, object] | None = None) -> Losses:
    """The losses of the run. A wide safe set and a mild cap exercise every part of the method. `changed`: overridden
    settings, as {"section.key": value}."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
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
    for name, value in (changed or {}).items():
        section, key = name.split(".")
        options[section][key] = value
    settings = TrainSettings.model_validate(options)
    learner, rng = Learner(load_model(settings.model), settings, pad_id=0), np.random.default_rng(0)
    results = []
    for _ in range(STEPS):
        metrics = learner.step(make_batch(rng))
        results.append({name: metrics[name] for name in SHOWN})
    return results


def distance(actual: Losses, expected: Losses) -> float:
    """Largest difference between metrics, relative where the expected value is above 1."""
    pairs = zip(actual, expected, strict=True)
    return max(abs(a[name] - b[name]) / max(1.0, abs(b[name])) for a, b in pairs for name in SHOWN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        losses = train(Path(folder))
    sys.stdout.write(json.dumps(losses, indent=1) + "\n")
    if arguments.write:
        EXPECTED.write_text(json.dumps(losses, indent=1) + "\n")
    else:
        expected: Losses = json.loads(EXPECTED.read_text())
        sys.stdout.write(f"largest distance: {distance(losses, expected):.1e}, tolerance {TOLERANCE:.1e}\n")


if __name__ == "__main__":
    main()
