"""Runs every benchmark, one after another; each is also a module with its own options (`--help`)."""

from __future__ import annotations

import subprocess
import sys

for name in (
    "codec",
    "queue",
    "sessions",
    "turns",
    "throughput",
    "shares",
    "engine",
    "lm_head",
    "precision",
    "accuracy",
    "cost",
    "loop",
    "ranks",
    "sending",
    "canary",
    "sglang",
    "vllm",
    "monitor",
    "tables",
):
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=True)
