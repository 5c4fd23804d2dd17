"""Tokens per second of the engine compared with Transformers `generate` with its best cache, as ratios of one run.

Both sides share model, batch, min_p, lengths (no end token is ever drawn) and dtype. They run alternately; the best of
the repeats counts. Only the engine also computes constrained log-probs, kept mass and kept count.

    python -m tests.benchmarks.engine [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.engines.transformers import TransformersEngine
from tests.kit.models import PAD_ID, make_model

RESULTS = Path(__file__).parent / "results" / "engine.json"
GOAL = 1.5
LOG_MIN_P = -6.0


@dataclass(frozen=True)
class Case:
    """`prompts` of `prompt` tokens, `batch / prompts` samples each, `new` tokens per sample."""

    model: str
    hidden: int
    layers: int
    vocab: int
    dtype: str
    batch: int
    new: int
    prompt: int = 16
    prompts: int = 8


SMALL = {"model": "demo-like", "hidden": 128, "layers": 2, "vocab": 1024}
HEAVY = {"model": "heavier", "hidden": 512, "layers": 4, "vocab": 1024}
CASES = [
    *(
        Case(**SMALL, dtype=dtype, batch=batch, new=new)
        for dtype in ("float32", "bfloat16")
        for batch, new in ((64, 64), (64, 256), (256, 64), (256, 256))
    ),
    *(Case(**HEAVY, dtype=dtype, batch=64, new=128) for dtype in ("float32", "bfloat16")),
]
QUICK = [CASES[0], CASES[4]]


def measure_engine(folder: Path, case: Case) -> Callable[[], float]:
    """A function that runs the case once and returns tokens per second."""
    loop = asyncio.new_event_loop()
    engine = TransformersEngine(folder, dtype=case.dtype, max_batch=case.batch)
    loop.run_until_complete(engine.start())
    count = 0

    async def generate() -> int:
        nonlocal count
        count += 1
        sampling = Sampling(log_min_p=LOG_MIN_P, max_tokens=case.new)
        jobs = [
            Job(
                job_id=f"b{count}:{i}",
                run_id="bench",
                prompt_ids=ids,
                n=case.batch // case.prompts,
                sampling=sampling,
                sink=Sink.CLIENT,
            )
            for i, ids in enumerate(_prompts(case))
        ]
        groups = await asyncio.gather(*(engine.generate(job) for job in jobs))
        return sum(len(sample.token_ids) for group in groups for sample in group)

    return _timed(case, lambda: loop.run_until_complete(generate()))


def measure_generate(folder: Path, case: Case, cache: str) -> Callable[[], float]:
    """The same for `generate`. Its inputs repeat each prompt for every sample, because it does not share prefills."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, case.dtype)).eval()
    rows = [ids for ids in _prompts(case) for _ in range(case.batch // case.prompts)]
    inputs = torch.tensor(rows)
    settings = {
        "max_new_tokens": case.new,
        "min_new_tokens": case.new,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": float(torch.tensor(LOG_MIN_P).exp()),
        "pad_token_id": PAD_ID,
        "eos_token_id": None,
        "cache_implementation": cache,
        "disable_compile": cache != "compiled",
    }
    if cache == "dynamic":
        del settings["cache_implementation"]
    elif cache == "compiled":
        settings["cache_implementation"] = "static"

    def generate() -> int:
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs), **settings)
        return int(out[:, case.prompt :].numel())

    return _timed(case, generate)


def _timed(case: Case, run: Callable[[], int]) -> Callable[[], float]:
    def once() -> float:
        start = time.perf_counter()
        tokens = run()
        seconds = time.perf_counter() - start
        assert tokens == case.batch * case.new, f"{tokens} tokens, expected {case.batch * case.new}"
        return tokens / seconds

    return once


def _prompts(case: Case) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(5, case.vocab, (case.prompts, case.prompt), generator=generator).tolist()
    return ids


def run_case(case: Case, repeats: int, caches: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(
            Path(name),
            "qwen3",
            vocab_size=case.vocab,
            hidden=case.hidden,
            layers=case.layers,
            heads=4,
            kv_heads=2,
            context=1024,
            spread=2.0,
            endless=True,
        )
        sides = {cache: measure_generate(folder, case, cache) for cache in caches}
        sides["engine"] = measure_engine(folder, case)
        speeds: dict[str, float] = dict.fromkeys(sides, 0.0)
        for round_ in range(repeats + 1):
            for side, once in sides.items():
                speed = once()
                if round_:  # the first round warms up
                    speeds[side] = max(speeds[side], speed)
    best = max(caches, key=lambda cache: speeds[cache])
    return {
        "case": asdict(case),
        "tokens_per_s": {side: round(speed) for side, speed in speeds.items()},
        "best_cache": best,
        "ratio": round(speeds["engine"] / speeds[best], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cases instead of all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compiled", action="store_true", help="also generate with a compiled static cache (slow)")
    parser.add_argument("--only", type=int, help="run one case by its number")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    caches = ["dynamic", "static"] + (["compiled"] if arguments.compiled else [])
    cases = QUICK if arguments.quick else CASES
    cases = cases if arguments.only is None else [cases[arguments.only]]
    print(
        f"{'model':<10} {'dtype':<9} {'batch':>5} {'new':>4} "
        + " ".join(f"{c:>9}" for c in [*caches, "engine"])
        + "  ratio"
    )
    results = []
    for case in cases:
        result = run_case(case, arguments.repeats, caches)
        results.append(result)
        speeds = " ".join(f"{speed:>9}" for speed in result["tokens_per_s"].values())
        print(
            f"{case.model:<10} {case.dtype:<9} {case.batch:>5} {case.new:>4} {speeds}  {result['ratio']:.2f}",
            flush=True,
        )
    lowest = min(result["ratio"] for result in results)
    print(f"tokens per second; ratio = engine / best of generate; lowest {lowest:.2f}, goal {GOAL}")
    RESULTS.parent.mkdir(exist_ok=True)
    facts = {"goal": GOAL, "lowest_ratio": lowest, "threads": arguments.threads, "torch": torch.__version__}
    RESULTS.write_text(json.dumps(facts | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
