"""A trainer that is killed resumes exactly where its checkpoint stands."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import torch

from trainer.checkpoint import Checkpoints
from trainer.ledger import read_ledger
from trainer.reporting import read_metrics

from .processes import config, process, replica, train, until

DETERMINISTIC = {"deterministic": "true", "batch__max_staleness": "0"}


def final_parameters(out: Path) -> dict[str, torch.Tensor]:
    found = Checkpoints(out / "checkpoints", keep=2).load()
    assert found is not None
    parameters: dict[str, torch.Tensor] = found[1]["model"]
    return parameters


def outcomes(out: Path) -> list[str]:
    return [entry["job_id"].partition(":")[2] for entry in read_ledger(out / "consumed.jsonl")]


def num_steps(out: Path) -> int:
    return max((record["step"] for record in read_metrics(out / "metrics.jsonl")), default=0)


@pytest.mark.timeout(300)
def test_a_killed_and_resumed_run_ends_with_the_same_parameters_bit_for_bit(
    tmp_path: Path, broker_url: str, run_id: str
) -> None:
    reference, disturbed = f"{run_id}-a", f"{run_id}-b"
    with replica(tmp_path, reference, broker_url, deterministic=True):
        train(config(tmp_path, reference, broker_url, "a", **DETERMINISTIC))

    flags = config(tmp_path, disturbed, broker_url, "b", **DETERMINISTIC)
    kill_at = random.SystemRandom().randint(1, 5)
    with replica(tmp_path, disturbed, broker_url, deterministic=True):
        with process(["trainer", *flags], tmp_path / "killed.log") as trainer:
            until(lambda: num_steps(tmp_path / "b") >= kill_at, f"step {kill_at}")
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
        train(flags)

    undisturbed, resumed = final_parameters(tmp_path / "a"), final_parameters(tmp_path / "b")
    different = [name for name in undisturbed if not torch.equal(undisturbed[name], resumed[name])]
    assert not different, f"killed at step {kill_at}: {different}"
    start = Checkpoints(tmp_path / "a" / "checkpoints", keep=2).load(4)
    assert start is not None
    assert any(not torch.equal(undisturbed[name], value) for name, value in start[1]["model"].items())
    assert outcomes(tmp_path / "a") == outcomes(tmp_path / "b")
    assert [record["step"] for record in read_metrics(tmp_path / "b" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
