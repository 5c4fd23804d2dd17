"""How far SGLang's constrained log-probs are from a trainer's in float64, in nats, for the dtypes that it serves in.

python -m tests.benchmarks.sglang_mismatch        (wants `make sglang-cpu`)

One model in float32, as a trainer holds it; what the server makes of it (rounded weights, kernels, KV cache) is the
mismatch. Random weights: the logits' spread of about 3 nats is that of a trained model, their context is not.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tests.integration.engines.oracle import Oracle
from tests.integration.sglang_plugin.checks import read
from tests.integration.sglang_plugin.server import Server, Servers
from tests.models import make_model

RESULTS = Path(__file__).parent / "results" / "sglang_mismatch.json"
LOG_MIN_P, PROMPTS, TOKENS = -6.0, 32, 128
VARIANTS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "float32, KV cache bfloat16": ("--kv-cache-dtype", "bfloat16"),
    "bfloat16": ("--dtype", "bfloat16"),
}


class Mismatch(NamedTuple):
    """|log pi_infer_mp - log pi_train_mp| over sampled tokens inside of the trainer's set."""

    tokens: int
    mean: float
    p99: float
    max: float
    kl: float
    """Mean of log pi_infer - log pi_train: estimates KL(infer || train)."""
    outside: float
    """Share of sampled tokens outside of the trainer's set."""
    other_count: float
    """Share of positions where the two sets differ in size."""


def measure(server: Server, oracle: Oracle) -> Mismatch:
    prompts = [list(range(5, 8 + i)) for i in range(PROMPTS)]
    setting = {"min_p": math.exp(LOG_MIN_P), "temperature": 1.0, "max_new_tokens": TOKENS}
    answers = server.generate(prompts, [setting] * PROMPTS)
    parts = []
    for prompt, answer in zip(prompts, answers, strict=True):
        reading = read(answer)
        logprobs, inside, counts = constrain(oracle.logits(np.array(prompt), reading.token_ids), reading.token_ids)
        parts.append((reading.logprobs - logprobs, inside, counts != np.array(reading.kept_count)))
    delta, inside, other = (np.concatenate(column) for column in zip(*parts, strict=True))
    size = np.abs(delta[inside])
    return Mismatch(
        tokens=len(delta),
        mean=float(size.mean()),
        p99=float(np.quantile(size, 0.99)),
        max=float(size.max()),
        kl=float(delta[inside].mean()),
        outside=float(1 - inside.mean()),
        other_count=float(other.mean()),
    )


def constrain(
    logits: NDArray[np.float64], token_ids: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
    """Log-prob, membership and size of the set, [T] each, from logits [T, V] at temperature 1."""
    shifted = logits - logits.max(-1, keepdims=True)
    keep = shifted >= LOG_MIN_P
    chosen = np.arange(len(token_ids)), token_ids
    return shifted[chosen] - np.log((np.exp(shifted) * keep).sum(-1)), keep[chosen], keep.sum(-1)


def main() -> None:
    torch.set_num_threads(1)
    results = {}
    print(f"{'served in':<28} {'mean':>9} {'p99':>9} {'max':>9} {'kl':>10} {'outside':>8} {'other set':>9}")
    with tempfile.TemporaryDirectory() as name:
        folder, servers = Path(name), Servers(Path(name))
        model = make_model(folder / "model", "qwen3", spread=3.0, context=1024)
        oracle = Oracle(model)
        try:
            for variant, flags in VARIANTS.items():
                found = measure(servers.get(model, *flags), oracle)
                results[variant] = found._asdict()
                print(
                    f"{variant:<28} {found.mean:>9.2e} {found.p99:>9.2e} {found.max:>9.2e} {found.kl:>10.2e} "
                    f"{found.outside:>8.2%} {found.other_count:>9.2%}"
                )
        finally:
            servers.stop()
    RESULTS.write_text(json.dumps({"log_min_p": LOG_MIN_P, "nats": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
