"""A whole run that sends its weights: trainer, broker, and an SGLang replica that joins while it is under way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.engines.servers import sglang_python
from tests.kit.replicas import ReplicaProcess
from tests.kit.runs import MODEL, config, trainer_process
from tests.kit.wait import WITHIN_S, until

pytestmark = pytest.mark.slow

STEPS = 8
FALLBACK = "reading its folder instead"


def test_a_run_that_sends_its_weights(broker_url: str, run_id: str, tmp_path: Path) -> None:
    """Weights reach the replica without its reading a folder. Then its server is killed, and the run finishes as if
    nothing had happened."""
    flags = config(tmp_path, run_id, broker_url, steps=str(STEPS), weights__route="distributed")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def trained(steps: int) -> bool:
        return metrics.exists() and len(metrics.read_text().splitlines()) >= steps

    args = ["--model", str(MODEL), "--engine", "sglang", "--sglang.python", str(sglang_python()), "--threads", "1"]
    args += ["--redis-url", broker_url, "--run-id", run_id, "--lease-s", "5", "--sglang.load-timeout-s", "300"]
    with trainer_process(flags, tmp_path / "trainer.log") as trainer:
        until(lambda: any((tmp_path / "run").glob(f"weights/{run_id}/weights-*")), "published")
        with ReplicaProcess(tmp_path / "replica", *args) as replica:
            until(lambda: trained(STEPS // 2), "half of the steps")
            assert FALLBACK not in replica.log
            assert replica.log.count(f"serving {run_id}:") >= 2  # a replica that lags may skip one
            (server,) = psutil.Process(replica.pid).children()
            os.kill(server.pid, signal.SIGKILL)
            assert trainer.wait(WITHIN_S) == 0, (tmp_path / "trainer.log").read_text()[-3000:]
    assert trained(STEPS)
    assert f"sent {run_id}:1:" in (tmp_path / "trainer.log").read_text()
