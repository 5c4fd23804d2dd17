"""A killed trainer resumes exactly from its checkpoint."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

from dvp_rl.weights.folder import folder_name
from dvp_trainer.report.sinks import read_metrics
from dvp_trainer.resume.checkpoint import Checkpoints
from dvp_trainer.resume.ledger import read_ledger
from tests.kit.runs import config, replica, train, trainer_process
from tests.kit.wait import until

DETERMINISTIC = {"deterministic": "true", "batch__max_staleness": "0"}


def parameters(out: Path, step: Literal["last"] | int = "last") -> dict[str, torch.Tensor]:
    """The weights announced with the newest checkpoint, or with that of a step."""
    found = Checkpoints(out / "checkpoints", keep=2).load(step)
    assert found is not None
    (folder,) = (out / "weights").glob(f"*/{folder_name(found[0].seq)}")
    return load_file(folder / "model.safetensors")


def outcomes(out: Path) -> list[str]:
    return [entry["job_id"].partition(":")[2] for entry in read_ledger(out / "consumed.jsonl")]


def num_steps(out: Path) -> int:
    return max((record["step"] for record in read_metrics(out / "metrics.jsonl")), default=0)


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_with_the_same_parameters_bit_for_bit(
    tmp_path: Path, broker_url: str, run_id: str
) -> None:
    reference, disturbed = f"{run_id}-a", f"{run_id}-b"
    with replica(tmp_path, reference, broker_url, deterministic=True):
        train(config(tmp_path, reference, broker_url, "a", **DETERMINISTIC))

    flags = config(tmp_path, disturbed, broker_url, "b", **DETERMINISTIC)
    kill_at = random.SystemRandom().randint(1, 5)
    with replica(tmp_path, disturbed, broker_url, deterministic=True):
        with trainer_process(flags, tmp_path / "killed.log") as trainer:
            until(lambda: num_steps(tmp_path / "b") >= kill_at, f"step {kill_at}")
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
        train(flags)

    undisturbed, resumed = parameters(tmp_path / "a"), parameters(tmp_path / "b")
    different = [name for name in undisturbed if not torch.equal(undisturbed[name], resumed[name])]
    assert not different, f"killed at step {kill_at}: {different}"
    assert any(not torch.equal(undisturbed[name], value) for name, value in parameters(tmp_path / "a", 4).items())
    assert outcomes(tmp_path / "a") == outcomes(tmp_path / "b")
    assert [record["step"] for record in read_metrics(tmp_path / "b" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
