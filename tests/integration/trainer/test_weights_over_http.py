"""Replicas on hosts that do not mount the trainer's folder still serve the trained weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from dvp_rl.contract.weights import WeightVersion
from dvp_rl.weights.folder import newest_seq, verify_folder
from dvp_trainer.report.sinks import read_metrics
from tests.kit.processes import PYTHON, process
from tests.kit.runs import config, replica, train
from tests.kit.tokens import TOKEN
from tests.kit.wait import until

STEPS = 4


@contextmanager
def served(folder: Path, *options: str, port: str = "0") -> Iterator[str]:
    """Starts a dvp-weights that serves `folder`; yields its URL."""
    log, port_file = folder.with_suffix(".log"), folder.with_suffix(".port")
    server = [*PYTHON, "dvp_rl.weights", f"--folder={folder}", f"--port={port}", f"--port-file={port_file}"]
    with process([*server, f"--token={TOKEN}", *options], log):
        until(port_file.exists, "dvp-weights listens")
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"


def elsewhere(cache: Path) -> list[str]:
    """Options that keep a replica from reading the volume, which every process on one machine can see."""
    return ["--no-weights.shared", f"--weights.cache={cache}", f"--weights.token={TOKEN}"]


@pytest.mark.slow
def test_what_was_trained_is_served_when_the_trainer_and_its_volume_are_gone(
    tmp_path: Path, broker_url: str, run_id: str
) -> None:
    volume, copies, cache = tmp_path / "volume", tmp_path / "copies", tmp_path / "cache"
    overrides = {"steps": str(STEPS), "batch__max_staleness": "0", "weights__folder": str(volume)}
    with served(volume) as url, served(copies, f"--upstream.url={url}", f"--upstream.token={TOKEN}") as at:
        overrides |= {"weights__url": at, "weights__token": TOKEN}
        with replica(tmp_path, run_id, broker_url, *elsewhere(cache)):
            train(config(tmp_path, run_id, broker_url, **overrides))
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    fetched = sorted((cache / run_id).glob("weights-*"))
    # With max_staleness 0 the last batch was drawn from the version before the last, so the replica fetched that.
    assert verify_folder(fetched[-1]).seq >= STEPS
    assert 1 <= len(fetched) <= 3

    last = newest_seq(volume / run_id)
    shutil.rmtree(volume)
    port_file = tmp_path / "late.port"
    options = [*elsewhere(tmp_path / "empty"), f"--port-file={port_file}"]
    again = served(copies, f"--upstream.url={url}", port=at.rpartition(":")[2])
    with again, replica(tmp_path, run_id, broker_url, *options):
        until(port_file.exists, "the replica listens")
        with httpx.Client(base_url=f"http://127.0.0.1:{port_file.read_text().strip()}", trust_env=False) as client:
            until(lambda: client.get("/readyz").status_code == 200, "a new replica is ready")
            until(lambda: WeightVersion.parse(client.get("/v1/weights").json()["version"]).seq == last)
