"""A tiny model with a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.models import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=1)
