"""A replica of the fake engine with a token and a queue, for both clients."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.models import make_model
from tests.kit.replicas import ReplicaThread
from tests.kit.tokens import TOKEN


@pytest.fixture(scope="module")
def server(broker_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaThread]:
    model: Path = make_model(tmp_path_factory.mktemp("model"))
    args = ["--model", str(model), "--engine", "fake", "--token", TOKEN, "--redis-url", broker_url]
    args += ["--run-id", f"client-{secrets.token_hex(4)}", "--max-context", "64"]
    with ReplicaThread(tmp_path_factory.mktemp("server"), *args, token=TOKEN) as replica:
        yield replica
