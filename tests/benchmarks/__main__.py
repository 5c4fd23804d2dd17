"""Every benchmark, one after the other; each is also a module of its own with options (`--help`)."""

from __future__ import annotations

import subprocess
import sys

for name in (
    "codec",
    "queue",
    "throughput",
    "shares",
    "engine",
    "lm_head",
    "precision",
    "cost",
    "loop",
    "ranks",
    "sending",
    "sglang",
    "monitor",
    "tables",
):
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=True)
