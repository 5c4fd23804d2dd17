"""Time of each turn of a session, with the engine's prefix cache and without it.

Two real `dvp-rollout` processes of each engine, whose model has random weights, and a real broker. Each turn reads 256
new tokens after all earlier ones, and draws 8. The sessions of a round read other tokens than those of earlier rounds.

    python -m tests.benchmarks.turns [--engines transformers]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

from dvp_rl.transport.embedded import EmbeddedBroker
from tests.integration.engines.servers import sglang_python
from tests.kit.models import make_model
from tests.kit.replicas import ReplicaProcess

RESULTS = Path(__file__).parent / "results" / "turns.json"
WITHOUT_CACHE = {"transformers": ["--prefix-cache-mib", "0"], "sglang": ["--sglang.extra-args=--disable-radix-cache"]}
HIDDEN, LAYERS, VOCAB = 512, 8, 4096
TURNS, READ, DRAWN = 8, 256, 8
ROUNDS = 5


def start(stack: ExitStack, folder: Path, engine: str, cached: bool, model: Path, broker: str) -> ReplicaProcess:
    options = ["--model", str(model), "--engine", engine, "--redis-url", broker, "--run-id", folder.name]
    options += [] if cached else WITHOUT_CACHE[engine]
    if engine == "sglang":
        options += ["--sglang.python", str(sglang_python()), "--sglang.log-file", str(folder.with_suffix(".log"))]
    return stack.enter_context(ReplicaProcess(folder, *options))


def play(url: str, texts: list[list[int]]) -> list[float]:
    """Milliseconds of each turn."""
    spent, token_ids = [], list[int]()
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        body = {"sampling": {"max_tokens": DRAWN, "stop_token_ids": []}}
        session = f"/v1/sessions/{http.post('/v1/sessions', json=body).json()['session_id']}"
        for text in texts:
            token_ids += text
            start = time.perf_counter()
            answer = http.post(f"{session}/inference/v1/generate", json={"token_ids": token_ids})
            spent.append(1e3 * (time.perf_counter() - start))
            token_ids += answer.raise_for_status().json()["choices"][0]["token_ids"]
        http.delete(session)
    return spent


def cached_share(replica: ReplicaProcess) -> float:
    """Of the tokens of all prompts."""
    tokens = replica.prompt_tokens()
    return tokens["cached"] / sum(tokens.values())


def compare(folder: Path, engine: str, broker: str) -> tuple[float, list[dict[str, Any]]]:
    """The share of prompt tokens that were cached, and a line for each turn."""
    model = make_model(
        folder / "model",
        vocab_size=VOCAB,
        hidden=HIDDEN,
        layers=LAYERS,
        heads=8,
        kv_heads=2,
        context=4096,
        endless=True,
    )
    texts = np.random.default_rng(0).integers(100, VOCAB, (ROUNDS + 1, TURNS, READ)).tolist()
    spent: dict[bool, list[list[float]]] = {True: [], False: []}
    with ExitStack() as stack:
        replicas = {
            cached: start(stack, folder / f"{engine}-{cached}", engine, cached, model, broker) for cached in spent
        }
        for number, text in enumerate(texts):
            for cached in (True, False) if number % 2 else (False, True):
                spent[cached].append(play(replicas[cached].url, text))
        assert cached_share(replicas[False]) == 0
        share = cached_share(replicas[True])
    with_cache, without = (np.array(spent[cached][1:]) for cached in (True, False))
    turns = [
        {
            "engine": engine,
            "turn": turn + 1,
            "prompt_tokens": READ + turn * (READ + DRAWN),
            "ms": median(with_cache[:, turn]),
            "without_cache_ms": median(without[:, turn]),
            "ratio": median(with_cache[:, turn] / without[:, turn]),
        }
        for turn in range(TURNS)
    ]
    return share, turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=WITHOUT_CACHE, default=[*WITHOUT_CACHE])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, EmbeddedBroker(Path(name) / "broker", aof=True) as broker:
        found = {engine: compare(Path(name) / engine, engine, broker.url) for engine in given.engines}
    result = {
        "cached_share": {engine: share for engine, (share, _) in found.items()},
        "turns": [line for _, lines in found.values() for line in lines],
    }
    print(json.dumps(result, indent=2))
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
