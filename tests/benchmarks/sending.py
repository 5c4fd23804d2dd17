"""Seconds from a replica's request for weights until a process waits for it: forked, against an interpreter of its own.

python -m tests.benchmarks.sending
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from uuid import uuid4

import psutil

from trainer.sender import _sending, preload
from trainer.sending import Plan

RESULTS = Path(__file__).parent / "results" / "sending.json"
REPEATS = 10
INTERPRETER = (
    "import json, socket, sys; from trainer.sending import Plan, serve; "
    "serve(Plan(**json.loads(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))"
)


def make_plan() -> Plan:
    return Plan(
        folder=".",
        host="127.0.0.1",
        interface="lo",
        size=2,
        group=uuid4().hex,
        backend="gloo",
        device="cpu",
        piece_bytes=1 << 20,
        timeout_s=60.0,
    )


async def fork() -> None:
    async with _sending(make_plan()) as link:
        assert await link.readline(), "a port"


def start() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [sys.executable, "-c", INTERPRETER, json.dumps(asdict(make_plan())), str(theirs.fileno())]
        with subprocess.Popen(argv, pass_fds=[theirs.fileno()]) as process:
            assert ours.makefile().readline(), "a port"
            process.kill()


def main() -> None:
    preload()
    asyncio.run(fork())
    forking = next(child for child in psutil.Process().children() if "forkserver" in " ".join(child.cmdline()))
    forked, fresh = [], []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        asyncio.run(fork())
        between = time.perf_counter()
        start()
        forked.append(between - begun)
        fresh.append(time.perf_counter() - between)
    ratio = median(old / new for old, new in zip(fresh, forked, strict=True))
    resident = forking.memory_info().rss / 2**20
    print(
        f"forked: {median(forked):.3f} s; an interpreter of its own: {median(fresh):.3f} s, {ratio:.0f} times as long"
    )
    print(f"the process that forks holds {resident:.0f} MiB")
    results = {"forked_s": median(forked), "interpreter_s": median(fresh), "interpreter_over_forked": ratio}
    RESULTS.write_text(json.dumps(results | {"forking_mib": resident}, indent=2) + "\n")


if __name__ == "__main__":
    main()
