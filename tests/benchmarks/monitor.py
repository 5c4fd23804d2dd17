"""The monitor with a large run and many viewers: broker commands per second with one and with all viewers, and how long
the page keeps a real browser busy.

    python -m tests.benchmarks.monitor [--replicas 200] [--letters 100000] [--viewers 20] [--looks 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from dvp_rl.contract.group import DeadLetter
from dvp_rl.contract.http import ReplicaState
from dvp_rl.contract.job import Job, Sink, job_id
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.replicas import ReplicaBeat, ReplicaRegistry
from tests.integration.monitor.process import write_metrics
from tests.kit.browser import Browser, chromium, running

RESULTS = Path(__file__).parent / "results" / "monitor.json"
RUN_ID = "bench"
PIPELINED = 2_000
AHEAD_MS = 3_600_000
"""Milliseconds by which heartbeats are dated ahead, so that replicas count as alive without further heartbeats."""
TIMEOUT_S = 60.0
PAGES = 10
"""Number of pages of dead letters that are turned."""
PROBE = """
window.probe = { lags: [], long: [] };
new PerformanceObserver((list) => probe.long.push(...list.getEntries().map((entry) => entry.duration)))
  .observe({ entryTypes: ["longtask"] });
let due = performance.now() + 20;
const tick = () => { probe.lags.push(performance.now() - due); due = performance.now() + 20; setTimeout(tick, 20); };
setTimeout(tick, 20);
"""
TURN = """
new Promise((resolve) => {
  const list = document.getElementById("letters"), start = performance.now();
  const first = list.firstChild.textContent;
  const observer = new MutationObserver(() => {
    if (list.firstChild.textContent === first) return;
    observer.disconnect();
    requestAnimationFrame(() => resolve(performance.now() - start));
  });
  observer.observe(list, { childList: true });
  document.getElementById("older").click();
})
"""


class Load(NamedTuple):
    """Cost of the monitor with a number of viewers."""

    viewers: int
    commands_per_second: float
    commands_per_look: float
    monitor_cpu: float
    """CPU seconds per second."""


async def stage(broker: Broker, num_replicas: int, num_letters: int) -> None:
    registry = ReplicaRegistry(broker)
    for number in range(num_replicas):
        version = f"{RUN_ID}:{7 - number % 2}:ab"
        await registry.beat(ReplicaBeat(f"replica-{number:03d}", ReplicaState.SERVING, version, 16, 32))
    for name in await broker.redis.zrange(broker.keys.replicas, 0, -1):
        await broker.redis.zincrby(broker.keys.replicas, AHEAD_MS, name)
    for start in range(0, num_letters, PIPELINED):
        async with broker.redis.pipeline(transaction=False) as pipeline:
            for position in range(start, min(start + PIPELINED, num_letters)):
                pipeline.xadd(broker.keys.dead, letter(position))
            await pipeline.execute()


def letter(position: int) -> dict[str, Any]:
    """Fields of a dead letter, as `bury` in prelude.lua writes them."""
    name = job_id(RUN_ID, position, 0)
    job = Job(job_id=name, run_id=RUN_ID, prompt_ids=list(range(64)), n=8, sink=Sink.TRAIN)
    error = f"CUDA error: an illegal memory access was encountered ({position})"
    facts: dict[str, Any] = {"job_id": name, "run_id": RUN_ID, "sink": Sink.TRAIN, "error": error}
    dead = DeadLetter(**facts, deliveries=3, replica_id=f"replica-{position % 200}", died_at=time.time())
    fields = {"kind": "dead", "id": name, "sink": "train", "data": dead.to_bytes(), "job": job.to_bytes()}
    return fields | {"tombstone": "", "at": int(1000 * time.time())}


class Monitor:
    """A real dvp-monitor process."""

    def __init__(self, process: psutil.Process, url: str) -> None:
        self.process, self.url = process, url

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def monitored(folder: Path, broker_url: str) -> AsyncIterator[Monitor]:
    metrics, port_file = folder / "metrics.jsonl", folder / "port"
    write_metrics(metrics, 2_000)
    command = [sys.executable, "-m", "dvp_rl.monitor", "--redis-url", broker_url, "--run-id", RUN_ID, "--port", "0"]
    command += ["--port-file", str(port_file), "--metrics-file", str(metrics)]
    process = psutil.Popen(command, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not port_file.exists():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.05)
        yield Monitor(process, f"http://127.0.0.1:{port_file.read_text().strip()}")
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


@asynccontextmanager
async def watching(monitor: Monitor) -> AsyncIterator[asyncio.Queue[None]]:
    """Adds a viewer; the queue gets an entry for each picture that reaches it."""
    pictures: asyncio.Queue[None] = asyncio.Queue()

    async def follow() -> None:
        async with (
            httpx.AsyncClient(timeout=TIMEOUT_S) as client,
            client.stream("GET", f"{monitor.url}/v1/events") as events,
        ):
            async for line in events.aiter_lines():
                if line == "event: picture":
                    pictures.put_nowait(None)

    task = asyncio.create_task(follow())
    try:
        yield pictures
    finally:
        task.cancel()
        await asyncio.wait([task])


async def measure(broker: Broker, monitor: Monitor, viewers: int, looks: int) -> Load:
    """Load with `viewers` viewers, from one look at the broker to the same moment `looks` looks later."""
    async with AsyncExitStack() as stack:
        seen = [await stack.enter_async_context(watching(monitor)) for _ in range(viewers)]
        for pictures in seen:
            await pictures.get()
        await seen[0].get()
        start, commands, cpu_s = time.monotonic(), await num_commands(broker), monitor.cpu_s()
        for _ in range(looks):
            await seen[0].get()
        elapsed, used_s = time.monotonic() - start, monitor.cpu_s() - cpu_s
        # The count includes the counting command.
        done = await num_commands(broker) - commands - 1
    return Load(viewers, done / elapsed, done / looks, used_s / elapsed)


async def num_commands(broker: Broker) -> int:
    """Commands that the broker has executed, those inside scripts included."""
    stats = await broker.redis.info("commandstats")
    return sum(int(entry["calls"]) for entry in stats.values())


def look(browser: Browser, monitor: Monitor, arguments: argparse.Namespace) -> dict[str, float]:
    """Cost of the page for its browser: timer delays and time to turn a page, in milliseconds, and long tasks."""
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=PROBE)
    browser.open(monitor.url)
    browser.until(f"document.querySelectorAll('#replicas tr').length === {arguments.replicas}")
    browser.until("document.querySelectorAll('#letters li').length === 10")
    browser.evaluate("(() => { probe.lags.length = probe.long.length = 0; })()")
    browser.until("window.probe.lags.length > 0")
    time.sleep(arguments.looks)
    found = browser.evaluate("({ lags: probe.lags, long: probe.long })")
    lags = sorted(found["lags"])
    turns = sorted(browser.evaluate(TURN) for _ in range(PAGES))
    assert browser.problems == [], browser.problems
    return {
        "timer_delay_median_ms": lags[len(lags) // 2],
        "timer_delay_p99_ms": lags[int(0.99 * len(lags))],
        "timer_delay_max_ms": lags[-1],
        "tasks_over_50_ms": len(found["long"]),
        "turn_page_median_ms": turns[len(turns) // 2],
        "turn_page_max_ms": turns[-1],
    }


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with EmbeddedBroker(folder / "broker") as embedded:
        async with await Broker.connect(embedded.url, RUN_ID) as broker, AsyncExitStack() as stack:
            await stage(broker, arguments.replicas, arguments.letters)
            monitor = await stack.enter_async_context(monitored(folder, embedded.url))
            loads = [await measure(broker, monitor, count, arguments.looks) for count in (1, arguments.viewers)]
            page: dict[str, float] | None = None
            if chromium() is not None:
                for _ in range(arguments.viewers - 1):
                    await stack.enter_async_context(watching(monitor))
                page = await asyncio.to_thread(browse, folder, monitor, arguments)
    one, all_viewers = loads
    return {
        **vars(arguments),
        "loads": [load._asdict() for load in loads],
        "commands_of_all_viewers_to_one": all_viewers.commands_per_second / one.commands_per_second,
        "page": page,
    }


def browse(folder: Path, monitor: Monitor, arguments: argparse.Namespace) -> dict[str, float]:
    with running(folder) as browser:
        return look(browser, monitor, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--letters", type=int, default=100_000)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--looks", type=int, default=20)
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(run(parser.parse_args(), Path(folder)))
    print(f"{results['replicas']} replicas, {results['letters']} dead letters")
    for load in results["loads"]:
        print(
            f"  {load['viewers']:>3} viewers: {load['commands_per_second']:.0f} broker commands/s, "
            f"monitor uses {load['monitor_cpu']:.0%} of a core"
        )
    print(f"  broker commands, all viewers / one: {results['commands_of_all_viewers_to_one']:.2f}")
    for name, value in (results["page"] or {}).items():
        print(f"  page with all viewers: {name} {value:.1f}")
    if results["page"] is None:
        print("  the page was not measured: no Chromium on this machine (apt-get install chromium)")
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
