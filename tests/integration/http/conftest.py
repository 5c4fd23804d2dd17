from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.models import make_model
from tests.kit.replicas import ReplicaProcess


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=1)


@pytest.fixture(scope="session")
def fake_replica(
    small_model: Path, broker_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReplicaProcess]:
    """A replica in its own process, in which everything but the arithmetic is real."""
    args = ["--model", str(small_model), "--engine", "fake", "--fake.service-time-s", "0", "--fake.num-tokens", "2"]
    args += ["--redis-url", broker_url, "--run-id", f"fuzz-{secrets.token_hex(6)}"]
    with ReplicaProcess(tmp_path_factory.mktemp("replica"), *args) as process:
        yield process
