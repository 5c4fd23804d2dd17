"""One tiny model and the replicas that several tests share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.models import make_model
from tests.kit.replicas import ReplicaProcess, ReplicaThread


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 96 tokens, one per character, and a context of 256."""
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=1)


@pytest.fixture(scope="session")
def shared_run_id() -> str:
    return f"http-{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def replica(
    model: Path, broker_url: str, shared_run_id: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReplicaProcess]:
    """The real engine behind HTTP and a queue. Tests must not stop it."""
    args = ["--model", str(model), "--redis-url", broker_url, "--run-id", shared_run_id, "--threads", "1"]
    with ReplicaProcess(tmp_path_factory.mktemp("replica"), *args, "--replica-id", "shared") as process:
        yield process


@pytest.fixture(scope="session")
def slow_replica(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaThread]:
    """A replica whose samples take far longer than any test, with room for two and none that wait."""
    args = ["--model", str(model), "--engine", "fake", "--fake.service-time-s", "600"]
    args += ["--max-batch", "2", "--max-waiting", "0"]
    with ReplicaThread(tmp_path_factory.mktemp("slow"), *args) as process:
        yield process
