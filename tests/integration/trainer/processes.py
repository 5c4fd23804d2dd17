"""Real processes around a test: replicas and trainers on the demo model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "deploy/demo/model"
TRAIN = ROOT / "deploy/demo/train.jsonl"
HELDOUT = ROOT / "deploy/demo/heldout.jsonl"
TIMEOUT_S = 90.0


def until(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    deadline = monotonic() + timeout_s
    while not condition():
        assert monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        sleep(0.02)


def config(folder: Path, run_id: str, url: str, out: str = "run", **overrides: str) -> list[str]:
    """Command-line options of a small run; `section__key=value` overrides."""
    options = {
        "run_id": run_id,
        "out_dir": str(folder / out),
        "steps": "6",
        "model.path": str(MODEL),
        "broker.url": url,
        "broker.stall_timeout_s": "60",
        "data.train": str(TRAIN),
        "reward.name": "arithmetic",
        "sampling.n": "4",
        "sampling.log_min_p": "-3.0",
        "sampling.max_tokens": "6",
        "batch.groups": "4",
        "optimizer.lr": "1e-3",
        "checkpoint.interval": "2",
        "report.tensorboard": "false",
        "threads": "1",
    } | {name.replace("__", "."): value for name, value in overrides.items()}
    flags = []
    for name, value in options.items():
        switch = {"true": [f"--{name}"], "false": [f"--no-{name}"]}.get(value)
        flags += [part.replace("_", "-") for part in switch] if switch else [f"--{name.replace('_', '-')}={value}"]
    return flags


@contextmanager
def process(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Ends with the block: SIGTERM, and SIGKILL if that is not heeded."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment() | variables,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("DVP_")} | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def replica(
    folder: Path, run_id: str, url: str, *options: str, deterministic: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    command = ["services.rollout", f"--model={MODEL}", f"--redis-url={url}", f"--run-id={run_id}", "--port=0"]
    command += ["--threads=1", "--max-batch=64", "--lease-s=5", *options] + ["--deterministic"] * deterministic
    with process(command, folder / f"replica-{run_id}.log") as child:
        yield child


def run_trainer(flags: list[str], before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end; `before` runs in the new process first."""
    return subprocess.run(
        [sys.executable, "-m", "trainer", *flags],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        env=environment(),
        preexec_fn=before,
        check=False,
    )


def train(flags: list[str]) -> str:
    """A run that has to succeed; returns what it printed."""
    done = run_trainer(flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
