"""How the cost of one optimizer step grows with the length of its sequences, and with the samples per prompt.

Tokens are those of all sequences, with the prompt counted for every sample. `attention` is the share of PyTorch's
attention kernels; the remainder must cost the same per token at any length, which `rest` shows relative to the first
line. `padded` is the same step with sequences sorted by length and padded to rows, as for models that cannot pack.
Lengths of completions are uniform between half the longest and the longest. Each line is measured in its own process
with one thread, by CPU time; packed and padded steps alternate in it, and the best of the repeats counts.

    python -m tests.benchmarks.cost [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from dvp_trainer.config import TrainSettings
from dvp_trainer.data.batch import Batch
from dvp_trainer.learn.arrangement import Arrangement, Beside
from dvp_trainer.learn.attention import PACKED
from dvp_trainer.learn.model import load_model
from dvp_trainer.learn.step import Learner
from tests.kit.models import make_model
from tests.kit.records import make_sample, make_scored

RESULTS = Path(__file__).parent / "results" / "cost.json"
TOKENS, HIDDEN, VOCAB = 32_768, 128, 2048
"""Tokens of one step, the same in every line so that only attention differs; and sizes of the model."""


@dataclass(frozen=True)
class Case:
    length: int
    """Tokens of the prompt and the longest completion together."""
    prompt: int
    n: int
    tokens: int = TOKENS

    @property
    def groups(self) -> int:
        return max(1, self.tokens // (self.n * self.length))


LENGTHS = [Case(length, prompt=length // 8, n=4) for length in (256, 512, 1024, 2048, 4096, 8192)]
GROUP_SIZES = [Case(1024, prompt=512, n=n) for n in (1, 2, 4, 8, 16, 32)]
QUICK = {
    "length": [Case(length, length // 8, 4, tokens=2048) for length in (128, 512)],
    "group size": [Case(256, 128, n, tokens=2048) for n in (1, 8)],
}


def make_batch(case: Case) -> Batch:
    rng, groups = np.random.default_rng(0), []
    longest = case.length - case.prompt
    for _ in range(case.groups):
        lengths = rng.integers(longest // 2, longest + 1, case.n).tolist()
        samples = [make_sample(rng.integers(5, VOCAB, t).tolist(), np.full(t, -1.0)) for t in lengths]
        groups.append(make_scored(rng.integers(5, VOCAB, case.prompt).tolist(), samples, rng.random(case.n).tolist()))
    return Batch(tuple(groups))


def make_learner(folder: Path) -> Learner:
    make_model(folder, hidden=HIDDEN, vocab_size=VOCAB, context=8192)
    settings = TrainSettings.model_validate(
        {
            "run_id": "cost",
            "out_dir": folder,
            "steps": 1,
            "model": {"path": folder},
            "data": {"train": "unused.jsonl"},
            "reward": {"name": "exact_match"},
            # Every sequence counts, whatever its made-up engine log-probs.
            "correction": {"veto": None, "mode": "unit"},
        }
    )
    return Learner(load_model(settings.model), settings, pad_id=0)


def use(learner: Learner, *, packed: bool) -> None:
    learner.policy.attend(Arrangement(Beside.PACKED, PACKED) if packed else Arrangement(Beside.PADDED, "sdpa"))


def seconds(learner: Learner, batch: Batch) -> float:
    start = time.process_time()
    assert learner.step(batch)["optimizer/updates"] == 1
    return time.process_time() - start


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def attention_share(learner: Learner, batch: Batch) -> float:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        learner.step(batch)
    events = profiled.key_averages()
    attention = sum(event.self_cpu_time_total for event in events if "scaled_dot_product" in event.key)
    return attention / sum(event.self_cpu_time_total for event in events)


def measure(case: Case, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        learner = make_learner(Path(folder))
    batch = make_batch(case)
    use(learner, packed=True)
    before = peak_mib()
    best = {"packed": seconds(learner, batch), "padded": float("inf")}
    memory = peak_mib() - before
    for _ in range(repeats):
        for layout in best:
            use(learner, packed=layout == "packed")
            best[layout] = min(best[layout], seconds(learner, batch))
    use(learner, packed=True)
    share = attention_share(learner, batch)
    tokens = sum(episode.num_tokens for episode in batch.episodes())
    return asdict(case) | {
        "sequence_tokens": tokens,
        "tokens_per_s": tokens / best["packed"],
        "padded_tokens_per_s": tokens / best["padded"],
        "packed / padded": best["padded"] / best["packed"],
        "attention": share,
        "rest_us_per_token": (1 - share) * best["packed"] / tokens * 1e6,
        "peak_mib": memory,
    }


def sweep(name: str, cases: list[Case], repeats: int) -> list[dict[str, Any]]:
    print(f"{name:>10} {'tokens/s':>9} {'padded':>9} {'ratio':>6} {'attention':>9} {'rest':>6} {'MiB':>7}")
    results = list[dict[str, Any]]()
    for case in cases:
        command = [sys.executable, "-m", "tests.benchmarks.cost", "--case", json.dumps(asdict(case))]
        quiet = os.environ | {"KINETO_LOG_LEVEL": "99"}
        command.append(f"--repeats={repeats}")
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=quiet)
        result = json.loads(done.stdout)
        result["rest"] = result["rest_us_per_token"] / (results or [result])[0]["rest_us_per_token"]
        results.append(result)
        print(
            f"{case.length if name == 'length' else case.n:>10} {result['tokens_per_s']:>9.0f} "
            f"{result['padded_tokens_per_s']:>9.0f} {result['packed / padded']:>6.2f} {result['attention']:>9.0%} "
            f"{result['rest']:>6.2f} {result['peak_mib']:>7.0f}",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small steps, and nothing written")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measure(Case(**json.loads(given.case)), given.repeats)))
        return
    sweeps = QUICK if given.quick else {"length": LENGTHS, "group size": GROUP_SIZES}
    results = {name: sweep(name, cases, given.repeats) for name, cases in sweeps.items()}
    if not given.quick:
        facts = {"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB, "threads": 1, "torch": torch.__version__}
        RESULTS.write_text(json.dumps(facts | results, indent=2) + "\n")


if __name__ == "__main__":
    main()
