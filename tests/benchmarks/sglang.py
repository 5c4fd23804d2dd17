"""The SGLang engine, as ratios of one run.

    pruned    constrained sampling by the plugin compared with stock min-p sampling, 64 samples at once
    replica   a rollout replica, over HTTP and over the queue, compared with direct calls of the same server
    swap      how long a weight swap interrupts generation, compared with reading the same bytes into memory

Both sides run alternately and the best of the repeats counts. No sample ends by itself. On a CPU the model is tiny, so
that every fixed cost weighs far more than it does on a GPU. Needs `make sglang-cpu`.

    python -m tests.benchmarks.sglang [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dvp_rl.client import AsyncClient
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.engines.server import LocalServer
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.sglang_client import SglangClient
from dvp_rl.engines.sglang_server import Launch, default_python
from dvp_rl.engines.sglang_wire import request_body
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import Submission
from tests.kit.models import EOS_ID, make_model
from tests.kit.replicas import ReplicaProcess

RESULTS = Path(__file__).parent / "results" / "sglang.json"
GOALS = {"pruned": 0.98, "replica_http": 0.97, "replica_queue": 0.97, "swap": 1.2}
JOBS, N, NEW, CONTEXT = 8, 8, 128, 1024
MIN_P = {"min_p": 2.2603294069810542e-06}
SMALL = {"hidden": 128, "layers": 2, "vocab_size": 8192}
LARGE = {"hidden": 768, "layers": 8, "vocab_size": 32768}

Load = Callable[[], Awaitable[int]]
"""Generates once and returns the number of tokens."""


def jobs(run_id: str, name: str, number: int = JOBS) -> list[Job]:
    sampling = Sampling(max_tokens=NEW)
    return [
        Job(job_id=f"{name}:{i}", run_id=run_id, prompt_ids=range_of(i), n=N, sampling=sampling, sink=Sink.TRAIN)
        for i in range(number)
    ]


def range_of(i: int) -> list[int]:
    return list(range(5 + i, 21 + i))


class Stock(Launch):
    """Without the plugin."""

    def environment(self, scratch: Path) -> dict[str, str]:
        return super().environment(scratch) | {"SGLANG_PLUGINS": "none"}


def on_cpu(kind: type[Launch] = Launch) -> Launch:
    return kind(python=default_python(), threads=1)


@asynccontextmanager
async def serving(folder: Path, launch: Launch) -> AsyncIterator[SglangClient]:
    server = LocalServer(launch, CONTEXT)
    await server.start(folder, "bench:0:aa")
    try:
        yield server.client
    finally:
        await server.stop()
        await server.client.close()


def direct(client: SglangClient, number: int = JOBS) -> Load:
    """Sends the engine's requests of so many jobs directly from this loop."""

    async def load() -> int:
        asked = jobs("b", "d", number)
        bodies = [request_body(job, [os.urandom(8).hex() for _ in range(N)], NEW, {EOS_ID}) for job in asked]
        answers = await asyncio.gather(*(client.generate(body) for body in bodies))
        return sum(len(sample["output_ids"]) for answer in answers for sample in answer)

    return load


def over_http(client: AsyncClient) -> Load:
    async def load() -> int:
        sampling = MIN_P | {"max_tokens": NEW}
        asked = (client.rollout(prompt_ids=range_of(i), n=N, sampling=sampling, return_text=False) for i in range(JOBS))
        return sum(len(sample.token_ids) for answer in await asyncio.gather(*asked) for sample in answer.samples)

    return load


def over_queue(broker: Broker, fence: int) -> Load:
    rounds = iter(range(1000))
    trainer = GroupQueue(broker, fence=fence)

    async def load() -> int:
        await Submission(broker).submit(jobs(broker.run_id, f"r{next(rounds)}"), fence=fence, limit=1000)
        tokens = groups = 0
        while groups < JOBS:
            for delivery in await trainer.read(JOBS, 1000):
                tokens, groups = tokens + delivery.item.num_model_tokens, groups + 1
        return tokens

    return load


async def compare(repeats: int, number: int = JOBS, rest_s: float = 0, **loads: Load) -> dict[str, list[float]]:
    """Tokens per second of each load in each repeat. It rests `rest_s` seconds before each."""
    for load in loads.values():
        await load()
    speeds: dict[str, list[float]] = {name: [] for name in loads}
    for _ in range(repeats):
        for name, load in loads.items():
            await asyncio.sleep(rest_s)
            start = time.perf_counter()
            tokens = await load()
            assert tokens == number * N * NEW, f"{name}: {tokens} tokens"
            speeds[name].append(tokens / (time.perf_counter() - start))
    return speeds


def best(speeds: dict[str, list[float]]) -> dict[str, float]:
    return {name: max(each) for name, each in speeds.items()}


async def pruned(folder: Path, repeats: int) -> dict[str, float]:
    async with serving(folder, on_cpu()) as ours, serving(folder, on_cpu(Stock)) as stock:
        speeds = best(await compare(repeats, plugin=direct(ours), stock=direct(stock)))
    return speeds | {"ratio": speeds["plugin"] / speeds["stock"]}


async def replica(folder: Path, repeats: int) -> dict[str, float]:
    """Compares a replica with direct calls of the server that it uses."""
    scratch = Path(tempfile.mkdtemp())
    with EmbeddedBroker(scratch / "broker") as embedded:
        async with serving(folder, on_cpu()) as server, await Broker.connect(embedded.url, "bench") as broker:
            args = ["--model", str(folder), "--engine", "sglang", "--sglang.url", server.url, "--run-id", "bench"]
            args += ["--redis-url", embedded.url, "--max-batch", "64"]
            keys = {"DVP_ROLLOUT__SGLANG__API_KEY": server.api_key, "DVP_ROLLOUT__SGLANG__ADMIN_KEY": server.admin_key}
            with ReplicaProcess(scratch / "replica", *args, variables=keys) as process:
                async with AsyncClient(process.url) as client:
                    fence = await TrainerLease(broker, "bench").acquire()
                    loads = {"http": over_http(client), "queue": over_queue(broker, fence)}
                    speeds = best(await compare(repeats, direct=direct(server), **loads))
    return speeds | {f"ratio_{name}": speeds[name] / speeds["direct"] for name in loads}


async def swap(folders: list[Path], repeats: int, launch: Launch | None = None) -> dict[str, float]:
    """Shortest pause of a swap that interrupts 64 samples, and shortest read of its bytes, in seconds. Both use a warm
    cache."""
    engine = SglangEngine(folders[0], launch or on_cpu(), version="bench:0:aa")
    await engine.start()
    try:
        pauses, reads = [], []
        for i in range(2 * repeats):
            sampling = Sampling(max_tokens=900)
            busy = Job(job_id=f"b{i}", run_id="b", prompt_ids=[5], n=64, sampling=sampling, sink=Sink.TRAIN)
            running = asyncio.create_task(engine.generate(busy))
            while await engine._client.num_running() < 64:  # the server has no event for it
                assert not running.done(), "all samples ended before all of them ran"
                await asyncio.sleep(0.01)
            folder = folders[(i + 1) % 2]
            reads.append(await asyncio.to_thread(read, folder))
            start = time.perf_counter()
            await engine._replace(folder, f"bench:{i + 1}:aa")
            pauses.append(time.perf_counter() - start)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        await engine.close()
    return {"pause_s": min(pauses), "read_s": min(reads), "bytes": float(size(folders[0]))}


async def swaps(
    small: list[Path], large: list[Path], repeats: int, launch: Launch | None = None
) -> dict[str, float | dict[str, float]]:
    """The pause of a small model's swap is the fixed cost. `ratio` is what a large one takes beyond that, over the time
    to read its bytes."""
    fixed, whole = await swap(small, repeats, launch), await swap(large, repeats, launch)
    return {
        "small": fixed,
        "large": whole,
        "fixed_s": fixed["pause_s"],
        "ratio": (whole["pause_s"] - fixed["pause_s"]) / whole["read_s"],
    }


def read(folder: Path) -> float:
    start = time.perf_counter()
    for file in folder.glob("*.safetensors"):
        np.fromfile(file, np.uint8)
    return time.perf_counter() - start


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


async def run(repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        small, large = (
            [
                make_model(Path(name) / f"{kind}{seed}", seed=seed, context=CONTEXT, endless=True, **shape)
                for seed in (0, 1)
            ]
            for kind, shape in (("small", SMALL), ("large", LARGE))
        )
        results: dict[str, Any] = {
            "pruned": await pruned(small[0], repeats),
            "replica": await replica(small[0], repeats),
        }
        results["swap"] = await swaps(small, large, repeats)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    repeats = 1 if parser.parse_args().quick else 10
    results = asyncio.run(run(repeats))
    ratios = {
        "pruned": results["pruned"]["ratio"],
        "replica_http": results["replica"]["ratio_http"],
        "replica_queue": results["replica"]["ratio_queue"],
        "swap": results["swap"]["ratio"],
    }
    for name, ratio in ratios.items():
        goal = f"at most {GOALS[name]}" if name == "swap" else f"at least {GOALS[name]}"
        print(f"{name:14} {ratio:6.3f}   goal: {goal}")
    print(f"a swap has a fixed cost of {1000 * results['swap']['fixed_s']:.0f} ms")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"goals": GOALS, "ratios": ratios, **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
