"""Model families tested as tiny random models, and how training and the transformers engine handle each.

    python -m tests.models      tests all and prints the table of README.md

Each row is tested in CI (tests/unit/trainer/test_arrangement.py, tests/integration/engines/test_families.py).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from dvp_rl.contract.errors import ConfigError
from dvp_rl.engines.prefix_cache import LEAST_TOKENS
from dvp_rl.engines.transformers import TransformersEngine
from dvp_trainer.config import TrainSettings
from dvp_trainer.data.batch import Episode
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.step import Learner
from tests.integration.engines.jobs import make_job
from tests.integration.engines.oracle import Oracle
from tests.kit.families import COMMON, HEAD_DIM, VOCAB, write_small_model
from tests.kit.records import make_sample

WINDOW = 16
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
ROPE_LIMIT = 64
LONGROPE = {
    "sliding_window": None,
    "original_max_position_embeddings": ROPE_LIMIT,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    },
}
PACKED, PADDED, PADDED_EAGER = "packed", "padded", "padded, eager attention"
NO_FLOAT64 = {"xglm"}
"""Families whose code has float32 constants."""
ALONE, ALONE_EAGER, REFUSED = "alone", "alone, eager attention", "refused"
SERVED, UP_TO, NOT_SERVED = "serves it", "serves it up to its window", "refuses it"


class Case(NamedTuple):
    """A family, its special feature, and how training and the engine handle it."""

    family: str
    trained: str
    served: str
    what: str = ""
    overrides: Mapping[str, Any] = MappingProxyType({})

    @property
    def name(self) -> str:
        return f"{self.family} ({self.what})" if self.what else self.family


CASES = [
    *(
        Case(family, PACKED, SERVED)
        for family in (
            *("llama", "qwen2", "qwen3", "granite", "gpt2", "seed_oss", "opt", "gpt_bigcode", "biogpt", "phi3"),
            *("qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe", "olmoe", "granitemoe", "phimoe", "ernie4_5_moe"),
        )
    ),
    Case("mistral", PACKED, SERVED, "without windows", {"sliding_window": None}),
    Case("mistral", PADDED, UP_TO, "windows", {"sliding_window": WINDOW}),
    Case("mixtral", PACKED, SERVED, "router jitter", {"sliding_window": None, "router_jitter_noise": 0.1}),
    Case("phi3", PACKED, SERVED, "longrope", LONGROPE),
    Case("gemma2", PADDED_EAGER, NOT_SERVED, "soft caps", {"sliding_window": 128}),
    Case("vaultgemma", PADDED_EAGER, NOT_SERVED, "soft caps"),
    *(
        Case(family, PADDED, UP_TO, "windows", WINDOWS)
        for family in ("gemma3_text", "gemma3n_text", "gemma4_text", "cohere2")
    ),
    Case("gemma3", PADDED, UP_TO, "windows, pictures", {"text_config": COMMON | HEAD_DIM | WINDOWS}),
    Case("llama4_text", PADDED, NOT_SERVED, "chunks", {"attention_chunk_size": WINDOW}),
    Case("gpt_oss", PADDED_EAGER, NOT_SERVED, "sinks", WINDOWS),
    Case("gpt_neo", PADDED_EAGER, NOT_SERVED, "windows", {"window_size": WINDOW}),
    Case("falcon", PADDED_EAGER, NOT_SERVED, "alibi", {"alibi": True}),
    *(Case(family, PADDED_EAGER, NOT_SERVED, "alibi") for family in ("bloom", "mpt")),
    *(Case(family, PADDED_EAGER, NOT_SERVED) for family in ("openai-gpt", "xglm")),
    Case("qwen3_next", PADDED, NOT_SERVED, "a state"),
    Case("doge", PADDED, NOT_SERVED),
    Case("mamba", PADDED_EAGER, NOT_SERVED, "a state"),
    Case("rwkv", ALONE_EAGER, NOT_SERVED, "a state"),
    Case("recurrent_gemma", ALONE, NOT_SERVED, "a state", {"attention_window_size": WINDOW}),
    Case("doge", ALONE, NOT_SERVED, "chosen keys", {"keep_window_size": WINDOW}),
    Case("bert", REFUSED, NOT_SERVED, "an encoder"),
]


def make_sequences(longest: int) -> list[Episode]:
    """Three prompts of different lengths, two completions each; some cross a window and some do not."""
    rng, sequences = np.random.default_rng(1), list[Episode]()
    for P in (3, longest // 2, longest):
        prompt = rng.integers(5, VOCAB, P)
        for T in (2, longest):
            sample = make_sample(rng.integers(5, VOCAB, T).tolist(), [-1.0] * T)
            sequences.append(Episode(len(sequences), prompt, (sample,)))
    return sequences


def make_learner(folder: Path, **sections: dict[str, Any]) -> Learner:
    """A learner that prunes nothing, unless `sections` of the settings say otherwise."""
    settings = TrainSettings.model_validate(
        {
            "run_id": "unit",
            "out_dir": folder.parent / "run",
            "steps": 1,
            "model": {"path": folder},
            "data": {"train": "unused.jsonl", "max_prompt_tokens": 24},
            "reward": {"name": "exact_match"},
            "sampling": {"n": 2, "log_min_p": -1e4, "max_tokens": 24},
        }
        | sections
    )
    return Learner(load_model(settings.model), settings, pad_id=0)


def oracle_logprobs(folder: Path, sequences: list[Episode]) -> list[torch.Tensor]:
    """Log-probs [T] of each sequence in float64: the plain formula, one sequence at a time, no cache or padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    if model.config.model_type in NO_FLOAT64:
        model = model.float()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    found = []
    with torch.no_grad():
        for prompt, completion in ((s.prompt_ids, s.samples[0].token_ids) for s in sequences):
            ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            found.append(torch.log_softmax(logits.double(), -1).gather(1, ids[len(prompt) :, None])[:, 0])
    return found


def logprob_error(learner: Learner, folder: Path) -> float:
    """Largest difference between log-probs in training and the oracle's, in nats."""
    sequences = make_sequences(WINDOW + 4)
    seen = learner.look(sequences)
    assert seen is not None
    expected = oracle_logprobs(folder, sequences)
    rows = zip(seen.rows.tolist(), seen.train.logprobs, seen.mask, strict=True)
    return max(float((own[mask].double() - expected[row]).abs().max()) for row, own, mask in rows)


async def engine_serves(folder: Path, **settings: Any) -> bool:
    """False if the engine refuses the model. Raises AssertionError if a sample's number differs from the oracle's."""
    try:
        engine = TransformersEngine(folder, threads=1, max_batch=8, prefix_cache_mib=16, **settings)
        await engine.start()
    except ConfigError:
        return False
    try:
        job = make_job(n=3, max_tokens=min(40, engine.context_length - 8))
        oracle = Oracle(folder)
        oracle.check_all(job, await engine.generate(job))
        if engine.context_length >= 2 * LEAST_TOKENS:
            await check_continued(engine, oracle)
    finally:
        await engine.close()
    return True


async def check_continued(engine: TransformersEngine, oracle: Oracle) -> None:
    """Asserts that the numbers of a second turn are right, of which the model read only what was new."""
    first = make_job("first", list(range(5, 5 + LEAST_TOKENS)), max_tokens=8)
    (sample,) = await engine.generate(first)
    before = engine.prompt_tokens
    second = make_job("second", [*first.prompt_ids.tolist(), *sample.token_ids.tolist(), 7, 8, 9], max_tokens=8)
    oracle.check_all(second, await engine.generate(second))
    assert engine.prompt_tokens.read - before.read == 4, "the last token drawn had not been read"


async def served(folder: Path) -> str:
    if await engine_serves(folder):
        return SERVED
    return UP_TO if await engine_serves(folder, max_context=WINDOW) else NOT_SERVED


def table(cases: Iterable[Case]) -> str:
    """A Markdown table with one row per outcome, in order of first occurrence."""
    rows: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for case in cases:
        rows[case.trained, case.served].append(case.name)
    lines = [f"| {trained} | {served} | {', '.join(names)} |" for (trained, served), names in rows.items()]
    head = ["| in training, sequences are | the transformers engine | model types |", "| --- | --- | --- |"]
    return "\n".join([*head, *lines])


def try_all() -> Iterable[tuple[Case, float]]:
    """Each case with its actual outcome, and the error of the log-probs in training."""
    for case in CASES:
        with tempfile.TemporaryDirectory() as name:
            folder = write_small_model(Path(name) / "model", case.family, **case.overrides)
            try:
                learner = make_learner(folder)
            except ConfigError:
                trained, error = REFUSED, 0.0
            else:
                trained, error = str(learner.policy.arrangement), logprob_error(learner, folder)
            yield case._replace(trained=trained, served=asyncio.run(served(folder))), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    found = list(try_all())
    print(table(case for case, _ in found))
    worst, error = max(found, key=lambda item: item[1])
    print(f"\n{len(found)} tried; log-probs in training are the oracle's within {error:.1g} nats ({worst.name})")


if __name__ == "__main__":
    main()
