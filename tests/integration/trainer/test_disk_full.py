"""A full disk, wherever the trainer writes, ends the run with a message that names the remedy; a restart loses nothing.

The kernel refuses bytes beyond RLIMIT_FSIZE in any file, just as it refuses them on a full disk.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from dvp_rl.transport import failpoints
from dvp_trainer.report.sinks import read_metrics
from dvp_trainer.resume.checkpoint import Checkpoints
from tests.kit.processes import ROOT, environment
from tests.kit.replicas import ReplicaThread
from tests.kit.runs import MODEL, config, train
from tests.kit.wait import WITHIN_S, until

from .test_resume import DETERMINISTIC, outcomes, parameters

LESS_THAN_THE_MODEL = 100_000


def steps_saved(out: Path) -> list[int]:
    return Checkpoints(out / "checkpoints", keep=2).steps()


def last_words(flags: list[str], point: str, room: Callable[[], int]) -> str:
    """Error of a trainer that, from this fail point on, cannot write any file beyond `room()` bytes."""
    with subprocess.Popen(
        [sys.executable, "-m", "dvp_trainer", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment() | {failpoints.VARIABLE: f"{point}=stop"},
    ) as trainer:
        try:
            process = psutil.Process(trainer.pid)
            until(lambda: process.status() == psutil.STATUS_STOPPED, f"it stops at {point}")
            bytes_left = room()
            process.rlimit(resource.RLIMIT_FSIZE, (bytes_left, bytes_left))
            process.resume()
            said, _ = trainer.communicate(timeout=WITHIN_S)
        finally:
            trainer.send_signal(signal.SIGKILL)
    assert trainer.returncode == 2, said
    assert "Traceback" not in said
    return said.partition("dvp-train: error: ")[2]


@pytest.mark.slow
def test_a_full_disk_costs_only_time(tmp_path: Path, broker_url: str, run_id: str) -> None:
    reference, disturbed = f"{run_id}-a", f"{run_id}-b"
    args = ["--model", str(MODEL), "--redis-url", broker_url, "--deterministic", "--threads", "1", "--run-id"]
    with ReplicaThread(tmp_path / "replica-a", *args, reference):
        train(config(tmp_path, reference, broker_url, "a", **DETERMINISTIC))
    flags, out = config(tmp_path, disturbed, broker_url, "b", **DETERMINISTIC), tmp_path / "b"
    metrics, consumed = out / "metrics.jsonl", out / "consumed.jsonl"
    with ReplicaThread(tmp_path / "replica-b", *args, disturbed):
        for point, room, named, saved in (
            ("settle.after:3", lambda: consumed.stat().st_size, f"out_dir: {consumed}", [2]),
            ("settle.after:2", lambda: LESS_THAN_THE_MODEL, f"out_dir: checkpoint {out}", [2]),
            ("settle.after:3", lambda: LESS_THAN_THE_MODEL, "weights.folder: version", [2, 4]),
            ("settle.after:1", lambda: metrics.stat().st_size + 9, f"out_dir: {metrics}", [2, 4]),
        ):
            said = last_words(flags, point, room)
            assert named in said
            assert f"MiB free in {out}" in said
            assert "Make room, then start the same command again to resume from the newest checkpoint" in said
            assert steps_saved(out) == saved
        assert not metrics.read_text().endswith("\n"), "the last line was cut off"
        train(flags)
    undisturbed, resumed = parameters(tmp_path / "a"), parameters(out)
    assert not [name for name in undisturbed if not torch.equal(undisturbed[name], resumed[name])]
    assert outcomes(tmp_path / "a") == outcomes(out)
    assert [record["step"] for record in read_metrics(metrics)] == [1, 2, 3, 4, 5, 6]
    assert not [path for path in out.rglob(".*") if path.suffix == ".partial" or path.name.startswith(".metrics")]
