from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.engines.oracle import Oracle
from tests.kit.models import make_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three sets of weights of one shape that never draw an end token."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_model(root / name, "qwen3", spread=2.0, context=1024, seed=seed, endless=True)
        for seed, name in enumerate(("even", "odd", "third"))
    }


@pytest.fixture(scope="session")
def oracles(models: dict[str, Path]) -> dict[str, Oracle]:
    return {name: Oracle(folder) for name, folder in models.items()}
