"""A replica on another machine sees nothing of the trainer's folder, and serves what was trained all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.transport.weight_folder import verify_folder
from tests.kit.processes import PYTHON, process
from tests.kit.runs import config, replica, train
from tests.kit.tokens import TOKEN
from tests.kit.wait import until
from trainer.reporting import read_metrics

STEPS = 4


@pytest.mark.slow
def test_a_replica_without_the_volume_fetches_what_is_trained(tmp_path: Path, broker_url: str, run_id: str) -> None:
    volume, cache, port_file = tmp_path / "volume", tmp_path / "cache", tmp_path / "port"
    server = [*PYTHON, "services.weights", f"--folder={volume}", "--port=0", f"--port-file={port_file}"]
    # On one machine the volume is visible to all: the replica is told not to look.
    elsewhere = ["--no-weights.shared", f"--weights.cache={cache}", f"--weights.token={TOKEN}"]
    with process([*server, f"--token={TOKEN}"], tmp_path / "weights.log"):
        until(port_file.exists, "dvp-weights listens")
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        overrides = {"steps": str(STEPS), "batch__max_staleness": "0", "weights__folder": str(volume)}
        with replica(tmp_path, run_id, broker_url, *elsewhere):
            train(config(tmp_path, run_id, broker_url, **overrides, weights__url=url))
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    fetched = sorted((cache / run_id).glob("weights-*"))
    # max_staleness 0: the last batch was drawn from the version before the last, fetched.
    assert verify_folder(fetched[-1]).seq >= STEPS
    assert 1 <= len(fetched) <= 3
