"""Samples per second of the whole system on the demo, and where the time went: generation beside training
(max_staleness 1) against strictly one after the other (max_staleness 0), in one run.

    python -m tests.benchmarks.loop [--steps 30]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from deploy.demo.__main__ import READY_TIMEOUT_S, Demo, Server, load_settings
from deploy.demo.fleet import Fleet
from deploy.demo.run_folder import claim
from services.rollout.settings import EngineName
from services.transport.embedded import EmbeddedBroker
from trainer.reporting import read_metrics

RESULTS = Path(__file__).parent / "results" / "loop.json"
WARM_UP = 3
"""Steps left out: start-up and the first swap."""
TIMEOUT_S = 600.0
PARTS = ("wait", "train", "publish")


def swap_seconds(servers: list[Server]) -> float:
    """Mean time in which a replica verified and loaded a version."""
    totals = {"sum": 0.0, "count": 0.0}
    for server in servers:
        port = server.port_file.read_text().strip()
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                for name in totals:
                    if sample.name == f"dvp_rollout_swap_seconds_{name}":
                        totals[name] += sample.value
    return totals["sum"] / max(totals["count"], 1)


def run(max_staleness: int, steps: int, out: Path) -> dict[str, Any]:
    """One training run; every figure is a mean over its steps, in seconds unless the name says otherwise."""
    os.environ |= {"DVP_TRAIN__BATCH__MAX_STALENESS": str(max_staleness), "DVP_TRAIN__EVALUATE__INTERVAL": "0"}
    demo = Demo(load_settings(0, steps, out), EngineName.TRANSFORMERS, 2, TIMEOUT_S, Console(quiet=True))
    with claim(out) as folder, EmbeddedBroker(out / "broker") as broker, Fleet(folder.logs) as fleet:
        servers = [demo.start_replica(fleet, folder, broker.url, f"replica-{i}") for i in (1, 2)]
        fleet.wait_until(lambda: all(s.is_ready() for s in servers), "every replica is ready", READY_TIMEOUT_S)
        fleet.wait_for(demo.start_trainer(fleet, broker.url), TIMEOUT_S)
        swap_s = swap_seconds(servers)
        metrics = read_metrics(folder.metrics)[WARM_UP:]
    step_s = fmean(record["time/step_s"] for record in metrics)
    shares = {part: fmean(record.get(f"time/{part}_s", 0.0) for record in metrics) / step_s for part in PARTS}
    return {
        "samples_per_second": demo.settings.batch.groups * demo.settings.sampling.n / step_s,
        "step_s": step_s,
        "share_of_step": shares | {"rest": 1 - sum(shares.values())},
        "generate_group_s": fmean(record["time/generate_s"] for record in metrics),
        "reward_batch_s": fmean(record["time/reward_s"] for record in metrics),
        "swap_s": swap_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        results = {name: run(k, steps, Path(folder) / name) for k, name in enumerate(("synchronous", "overlapped"))}
    for name, result in results.items():
        shares = "  ".join(f"{part} {share:.0%}" for part, share in result["share_of_step"].items())
        print(f"{name}: {result['samples_per_second']:.0f} samples/s, a step takes {result['step_s']:.2f} s: {shares}")
        print(
            f"  beside it: generate {result['generate_group_s']:.3f} s per group, "
            f"reward {result['reward_batch_s']:.3f} s per batch, swap {result['swap_s']:.3f} s per version"
        )
    speeds = {name: result["samples_per_second"] for name, result in results.items()}
    ratio = speeds["overlapped"] / speeds["synchronous"]
    print(f"overlapped / synchronous: {ratio:.2f}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"steps": steps, "ratio": ratio, **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
