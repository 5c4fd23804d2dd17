"""Mismatch in nats between the log-probs of engine and trainer, for each combination of their precisions.

The model is held in float32, as a trainer holds it. The engine samples with its KV cache and weights of its own dtype;
the trainer reads the samples packed. `autocast` is PyTorch's, as trainers commonly use it. The weights are random: the
logits' spread of about 3 nats is that of a trained model, their dependence on the context is not.

    python -m tests.benchmarks.precision [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from dvp_rl.contract.group import Sample
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.engines.transformers import TransformersEngine
from dvp_trainer.config import ModelSection
from dvp_trainer.data.batch import Episode
from dvp_trainer.learn.micro_batch import micro_batches
from dvp_trainer.learn.model import Policy, load_model
from tests.kit.models import make_model

RESULTS = Path(__file__).parent / "results" / "precision.json"
LOG_MIN_P, PROMPTS, N, TOKENS = -6.0, 16, 8, 128
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, fp32 head": {"dtype": "bfloat16", "fp32_head": True},
}


class Mismatch(NamedTuple):
    """|log pi_infer_mp - log pi_train_mp| over sampled tokens inside the trainer's set."""

    mean: float
    p99: float
    max: float
    kl: float
    """Mean of log pi_infer - log pi_train: estimates KL(infer || train)."""
    outside: float
    """Share of sampled tokens outside the trainer's set."""
    other_count: float
    """Share of positions where the two sets differ in size."""


def policy(model: PreTrainedModel, compute_dtype: str, *, fp32_head: bool = False) -> Policy:
    return Policy(model, compute_dtype, log_min_p=LOG_MIN_P, temperature=1.0, fp32_head=fp32_head)


def autocast(model: PreTrainedModel) -> Policy:
    model.base_model.forward = torch.autocast("cpu", torch.bfloat16)(model.base_model.forward)
    return policy(model, "float32")


TRAINERS: dict[str, Callable[[PreTrainedModel], Policy]] = {
    "float32": lambda model: policy(model, "float32"),
    "autocast, fp32 head": autocast,
    "bfloat16": lambda model: policy(model, "bfloat16"),
    "bfloat16, fp32 head": lambda model: policy(model, "bfloat16", fp32_head=True),
}


async def draw(folder: Path, settings: dict[str, Any], tokens: int) -> list[Episode]:
    engine = TransformersEngine(folder, threads=1, **settings)
    await engine.start()
    sampling = Sampling(log_min_p=LOG_MIN_P, max_tokens=tokens)
    rng, sequences = np.random.default_rng(0), list[Episode]()
    for i in range(PROMPTS):
        prompt = rng.integers(5, 90, 8 + i)
        samples: tuple[Sample, ...] = await engine.generate(
            Job(job_id=f"j{i}", run_id="r", prompt_ids=prompt, n=N, sampling=sampling, sink=Sink.CLIENT)
        )
        sequences += [Episode(len(sequences) + k, prompt, (sample,)) for k, sample in enumerate(samples)]
    await engine.close()
    return sequences


@torch.no_grad()
def measure(policy: Policy, sequences: list[Episode]) -> Mismatch:
    gaps, inside, other = [], [], []
    for micro in micro_batches(sequences, policy.limit(8192), pad_id=0, device=torch.device("cpu")):
        own, mask = policy.read(micro), micro.mask
        gaps.append((micro.infer.logprobs[mask] - own.logprobs)[own.inside])
        inside.append(own.inside)
        other.append(own.kept_count != micro.infer.kept_count[mask])
    delta = torch.cat(gaps).double()
    size = delta.abs()
    return Mismatch(
        mean=float(size.mean()),
        p99=float(size.quantile(0.99)),
        max=float(size.max()),
        kl=float(delta.mean()),
        outside=float(1 - torch.cat(inside).double().mean()),
        other_count=float(torch.cat(other).double().mean()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short samples, and nothing written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    print(
        f"{'engine':<20} {'trainer':<20} {'mean':>9} {'p99':>9} {'max':>9} {'kl':>10} {'outside':>8} {'other set':>9}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(
            Path(name), "qwen3", hidden=256, layers=4, vocab_size=4096, context=1024, spread=3.0, endless=True
        )
        for engine, settings in ENGINES.items():
            sequences = asyncio.run(draw(folder, settings, TOKENS // 8 if quick else TOKENS))
            for trainer, make in TRAINERS.items():
                found = measure(make(load_model(ModelSection(path=folder))), sequences)
                results.setdefault(engine, {})[trainer] = found._asdict()
                print(
                    f"{engine:<20} {trainer:<20} {found.mean:>9.2e} {found.p99:>9.2e} {found.max:>9.2e} "
                    f"{found.kl:>10.2e} {found.outside:>8.2%} {found.other_count:>9.2%}",
                    flush=True,
                )
    if not quick:
        RESULTS.write_text(json.dumps({"log_min_p": LOG_MIN_P, "nats": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
