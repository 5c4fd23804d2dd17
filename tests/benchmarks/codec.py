"""Milliseconds to encode and decode one group of 8 samples x 2,304 tokens, compared with the same record as JSON.

python -m tests.benchmarks.codec
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dvp_rl.contract.group import EngineFacts, FinishReason, Group, Sample, VersionSpan
from dvp_rl.contract.job import Sink
from dvp_rl.contract.sampling import Sampling

RESULTS = Path(__file__).parent / "results" / "codec.json"
SAMPLES, TOKENS, REPEATS = 8, 2304, 50
GOAL_MS = 2.0


def large_group() -> Group:
    rng = np.random.default_rng(0)
    samples = tuple(
        Sample(
            token_ids=rng.integers(0, 150_000, TOKENS),
            logprobs=-rng.random(TOKENS, np.float32),
            kept_mass=1 - 0.1 * rng.random(TOKENS, np.float32),
            kept_count=rng.integers(1, 1000, TOKENS),
            finish_reason=FinishReason.STOP,
            versions=(VersionSpan(version="run:1:abc", start=0, end=TOKENS),),
            seed=i,
        )
        for i in range(SAMPLES)
    )
    return Group(
        job_id="run:000000001:0",
        run_id="run",
        prompt_ids=rng.integers(0, 150_000, 200),
        sampling=Sampling(),
        samples=samples,
        sink=Sink.TRAIN,
        replica_id="replica",
        engine=EngineFacts(name="transformers", version="5", dtype="bfloat16"),
    )


def median_ms(action: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def main() -> None:
    group = large_group()
    packed, text = group.to_bytes(), group.model_dump_json()
    assert Group.from_bytes(packed) == group == Group.model_validate_json(text)
    rows = {
        "msgpack": (median_ms(group.to_bytes), median_ms(lambda: Group.from_bytes(packed)), len(packed)),
        "json": (median_ms(group.model_dump_json), median_ms(lambda: Group.model_validate_json(text)), len(text)),
    }
    print(f"{'codec':<8} {'encode ms':>9} {'decode ms':>9} {'bytes':>9}")
    for name, (encode, decode, size) in rows.items():
        print(f"{name:<8} {encode:>9.3f} {decode:>9.3f} {size:>9}")
    total = {name: encode + decode for name, (encode, decode, _) in rows.items()}
    ratio = total["json"] / total["msgpack"]
    print(f"encode + decode: {total['msgpack']:.2f} ms, goal {GOAL_MS}; JSON takes {ratio:.0f} times as long")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"goal_ms": GOAL_MS, "total_ms": total, "json_over_msgpack": ratio}, indent=2) + "\n")


if __name__ == "__main__":
    main()
