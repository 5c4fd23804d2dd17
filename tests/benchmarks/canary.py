"""Canaries: false alarms in many swaps, faults found, and the share of an engine's time that they take.

The demo's model drifts from version to version as training moves it. Trainer and engine compute in the same number
format. Faults: one matrix is that of the version before, one is that of the first version, one has the opposite sign.
`share`: time to examine, as a part of the time to draw one batch of ROWS samples on the transformers engine.

    python -m tests.benchmarks.canary [--swaps 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from dvp_rl.contract.canary import Canary
from dvp_rl.contract.errors import WeightError
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.engines.transformers import TransformersEngine
from dvp_rl.rollout.canary import Guard
from dvp_rl.rollout.metrics import Metrics
from dvp_rl.weights.folder import copy_companions
from dvp_trainer.config import TrainSettings
from dvp_trainer.learn.canary import CanaryMaker
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.step import Learner
from tests.kit.models import make_model
from tests.kit.runs import MODEL, config

RESULTS = Path(__file__).parent / "results" / "canary.json"
DTYPES = ("float32", "bfloat16")
VERSIONS = 50
DRIFT = 1e-3
"""Relative change of each weight from one version to the next."""
MATRIX = "model.layers.0.mlp.down_proj.weight"
ROWS, LENGTHS = 64, (128, 1024)
FAULTS: dict[str, Callable[[list[torch.Tensor], int], torch.Tensor]] = {
    "one version old": lambda of_versions, version: of_versions[version - 1],
    "first version": lambda of_versions, _: of_versions[0],
    "opposite sign": lambda of_versions, version: -of_versions[version],
}


class Version(NamedTuple):
    folder: Path
    canary: Canary


class Examined(NamedTuple):
    passed: bool
    mean: float
    seconds: float


def make_learner(root: Path, model: Path, dtype: str) -> Learner:
    paths = {"model__path": str(model), "model__compute_dtype": dtype, "weights__dtype": dtype}
    settings = TrainSettings.load(config(root, "canary", "redis://127.0.0.1:1", **paths))
    return Learner(load_model(settings.model), settings, 0)


def write_versions(root: Path, dtype: str) -> tuple[list[Version], list[float]]:
    """A drifting model's versions, and the seconds that each canary took."""
    learner = make_learner(root, MODEL, dtype)
    maker = CanaryMaker(learner.policy, learner.settings, 0, learner.world)
    versions, spent = [], []
    for number in range(VERSIONS):
        folder = root / f"version-{number}"
        folder.mkdir()
        copy_companions(MODEL, folder)
        learner.write_weights(folder)
        start = time.perf_counter()
        canary = maker.make()
        spent.append(time.perf_counter() - start)
        assert canary is not None
        versions.append(Version(folder, canary))
        with torch.no_grad():
            for parameter in learner.model.parameters():
                parameter.mul_(1 + DRIFT * torch.randn_like(parameter))
    return versions, spent


class Replica:
    """An engine and its guard."""

    def __init__(self, model: Path, dtype: str) -> None:
        self.engine = TransformersEngine(model, dtype=dtype, max_batch=ROWS, version="canary:0:a")
        self.guard = Guard(self.engine, Metrics(), every_s=600)
        self._seq = 0

    async def swap(self, folder: Path, canary: Canary) -> Examined:
        self._seq += 1
        version = f"canary:{self._seq}:a"
        with self.guard.expecting(version, canary):
            await self.engine.load(folder, version)
        start = time.perf_counter()
        try:
            await self.guard.examine()
        except WeightError:
            passed = False
        else:
            passed = True
        spent = time.perf_counter() - start
        assert self.guard.last is not None
        return Examined(passed, self.guard.last.mean, spent)


async def alarms(root: Path, dtype: str, swaps: int) -> dict[str, Any]:
    versions, making = write_versions(root, dtype)
    of_versions = [load_file(version.folder / "model.safetensors")[MATRIX] for version in versions]
    replica = Replica(MODEL, dtype)
    await replica.engine.start()
    right = [await replica.swap(*versions[number % VERSIONS]) for number in range(swaps)]
    found: dict[str, list[Examined]] = {fault: [] for fault in FAULTS}
    wrong = root / "wrong"
    wrong.mkdir()
    copy_companions(MODEL, wrong)
    for number in range(1, VERSIONS):
        folder, canary = versions[number]
        for fault, matrix in FAULTS.items():
            tensors = load_file(folder / "model.safetensors") | {MATRIX: matrix(of_versions, number)}
            save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
            found[fault].append(await replica.swap(wrong, canary))
    await replica.engine.close()
    return {
        "swaps": swaps,
        "false_alarms": sum(not examined.passed for examined in right),
        "largest_mean_nats": max(examined.mean for examined in right),
        "limit_nats": replica.guard.limit,
        "make_ms": 1e3 * median(making),
        "examine_ms": 1e3 * median(examined.seconds for examined in right),
        **{
            f"found: {fault}": f"{sum(not examined.passed for examined in all_of_it)} of {len(all_of_it)}"
            for fault, all_of_it in found.items()
        },
    }


async def cost(root: Path) -> list[dict[str, Any]]:
    """What an examination takes beside one batch, in float32."""
    model = make_model(root / "model", hidden=128, context=LENGTHS[-1] + 64, endless=True)
    learner = make_learner(root, model, "float32")
    canary = CanaryMaker(learner.policy, learner.settings, 0, learner.world).make()
    assert canary is not None
    replica = Replica(model, "float32")
    await replica.engine.start()
    rows = []
    for length in LENGTHS:
        examined = [await replica.swap(model, canary) for _ in range(9)]
        sampling = Sampling(max_tokens=length)
        job = Job(job_id="batch", run_id="canary", prompt_ids=[20, 21], n=ROWS, sampling=sampling, sink=Sink.TRAIN)
        start = time.perf_counter()
        samples = await replica.engine.generate(job)
        generating = time.perf_counter() - start
        examining = median(each.seconds for each in examined)
        rows.append(
            {
                "tokens per sample": sum(len(sample.token_ids) for sample in samples) / ROWS,
                "generate_s": generating,
                "examine_s": examining,
                "share": examining / generating,
            }
        )
    await replica.engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=1000)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as name:
            results[dtype] = asyncio.run(alarms(Path(name), dtype, given.swaps))
    with tempfile.TemporaryDirectory() as name:
        results["cost"] = asyncio.run(cost(Path(name)))
    print(json.dumps(results, indent=2))
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
