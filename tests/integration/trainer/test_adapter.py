"""A run whose versions hold only adapters, and a replica that serves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dvp_rl.engines.adapter import holds_adapter
from dvp_trainer.report.sinks import read_metrics
from tests.kit.runs import config, replica, train


@pytest.mark.slow
def test_a_replica_serves_published_adapters(tmp_path: Path, broker_url: str, run_id: str) -> None:
    overrides = {"steps": "4", "batch__max_staleness": "0", "lora__rank": "4", "lora__publish": "adapter"}
    with replica(tmp_path, run_id, broker_url):
        train(config(tmp_path, run_id, broker_url, **overrides))
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(record["optimizer/updates"] == 1 for record in records)
    # Both sides have the same weights, so only rounding remains.
    assert max(abs(record["mismatch/kl"]) for record in records) < 1e-4
    log = (tmp_path / f"replica-{run_id}.log").read_text()
    assert "canary: log-probs differ" in log
    assert "take no work" not in log
    versions = list((tmp_path / "run" / "weights" / run_id).glob("weights-*"))
    assert versions
    assert all(holds_adapter(folder) and not (folder / "model.safetensors").exists() for folder in versions)
