"""Seconds from a replica's request for weights until a process is ready to send: forked, and as a new interpreter.

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

import psutil

from dvp_trainer.publish.send_process import Plan
from dvp_trainer.publish.sender import forked, preload

RESULTS = Path(__file__).parent / "results" / "sending.json"
REPEATS = 10
INTERPRETER = (
    "import json, socket, sys; from dvp_trainer.publish.send_process import Plan, serve; "
    "serve(Plan(**json.loads(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))"
)


async def fork(plan: Plan) -> None:
    async with forked(plan) as link:
        assert await link.readline(), "a port"


def start(plan: Plan) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [sys.executable, "-c", INTERPRETER, json.dumps(asdict(plan)), str(theirs.fileno())]
        with subprocess.Popen(argv, pass_fds=[theirs.fileno()]) as process:
            assert ours.makefile().readline(), "a port"
            process.kill()


def main() -> None:
    # Imported here, because each forked process imports the main module again; that of dvp-train is light.
    from tests.integration.trainer.sending import make_plan

    plan = make_plan(Path())
    preload()
    asyncio.run(fork(plan))
    forking = next(child for child in psutil.Process().children() if "forkserver" in " ".join(child.cmdline()))
    quick, slow = [], []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        asyncio.run(fork(plan))
        between = time.perf_counter()
        start(plan)
        quick.append(between - begun)
        slow.append(time.perf_counter() - between)
    ratio = median(old / new for old, new in zip(slow, quick, strict=True))
    resident = forking.memory_info().rss / 2**20
    print(f"forked: {median(quick):.3f} s; an interpreter of its own: {median(slow):.3f} s, {ratio:.0f} times as long")
    print(f"the process that forks holds {resident:.0f} MiB")
    results = {"forked_s": median(quick), "interpreter_s": median(slow), "interpreter_over_forked": ratio}
    RESULTS.write_text(json.dumps(results | {"forking_mib": resident}, indent=2) + "\n")


if __name__ == "__main__":
    main()
