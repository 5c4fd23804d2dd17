"""OpenAI's own client on a replica with a real SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.engines.oracle import Oracle
from tests.integration.engines.servers import sglang_python
from tests.integration.rollout.test_openai_client import check_client
from tests.kit.caller import make_caller
from tests.kit.replicas import ReplicaProcess

pytestmark = pytest.mark.slow


def test_what_the_client_reads_is_what_is_recorded(broker_url: str, run_id: str, tmp_path: Path) -> None:
    model = make_caller(tmp_path / "model")
    args = ["--model", str(model), "--engine", "sglang", "--sglang.python", str(sglang_python())]
    args += ["--redis-url", broker_url, "--run-id", run_id, "--threads", "1"]
    args += ["--sglang.log-file", str(tmp_path / "sglang.log")]
    with ReplicaProcess(tmp_path / "replica", *args) as replica:
        check_client(replica, Oracle(model))
