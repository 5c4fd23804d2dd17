"""Small training runs on the demo model: the trainer's options, its process, and a replica for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import CompletedProcess

from tests.kit import forked
from tests.kit.forked import ROLLOUT, TRAINER, Service, service
from tests.kit.processes import ROOT

MODEL = ROOT / "deploy/demo/model"
TRAIN = ROOT / "deploy/demo/train.jsonl"
HELDOUT = ROOT / "deploy/demo/heldout.jsonl"
STALL_S = 900
"""Trainer's stall timeout in seconds; longer than any process of a test needs to start."""


def config(folder: Path, run_id: str, url: str, out: str = "run", **overrides: str | None) -> list[str]:
    """Command-line options of a small run; `section__key=value` overrides, with None by the trainer's own default."""
    options: dict[str, str | None] = {
        "run_id": run_id,
        "out_dir": str(folder / out),
        "steps": "6",
        "model.path": str(MODEL),
        "broker.redis_url": url,
        "broker.stall_timeout_s": str(STALL_S),
        "data.train": str(TRAIN),
        "reward.name": "arithmetic",
        "sampling.n": "4",
        "sampling.log_min_p": "-3.0",
        "sampling.max_tokens": "6",
        "batch.groups": "4",
        "optimizer.lr": "1e-3",
        "checkpoint.interval": "2",
        "report.tensorboard": "false",
        "report.html": "false",
        "threads": "1",
    } | {name.replace("__", "."): value for name, value in overrides.items()}
    flags = []
    for name, value in options.items():
        if value is None:
            continue
        switch = {"true": [f"--{name}"], "false": [f"--no-{name}"]}.get(value)
        flags += [part.replace("_", "-") for part in switch] if switch else [f"--{name.replace('_', '-')}={value}"]
    return flags


def trainer_process(flags: list[str], log: Path, **variables: str) -> AbstractContextManager[Service]:
    return service(TRAINER, flags, log, **variables)


def replica(
    folder: Path, run_id: str, url: str, *options: str, deterministic: bool = False, **variables: str
) -> AbstractContextManager[Service]:
    flags = [f"--model={MODEL}", f"--redis-url={url}", f"--run-id={run_id}", "--port=0", "--threads=1"]
    flags += ["--max-batch=64", "--lease-s=5", *options] + ["--deterministic"] * deterministic
    return service(ROLLOUT, flags, folder / f"replica-{run_id}.log", **variables)


def run_trainer(
    flags: list[str], before: Callable[[], object] | None = None, **variables: str
) -> CompletedProcess[str]:
    """Runs a trainer to its end. `before`, which must be picklable, is called first in the new process."""
    return forked.run(TRAINER, *flags, before=before, **variables)


def train(flags: list[str]) -> str:
    """Runs a trainer that must succeed; returns its output."""
    done = run_trainer(flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
