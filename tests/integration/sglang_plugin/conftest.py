from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.engines.oracle import Oracle
from tests.kit.models import FAMILIES, make_model

from .server import PYTHON, Servers


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """Interpreter of the environment that `make sglang-cpu` builds. Its wheels exist for one platform, where a missing
    environment is a failure."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("SGLang on a CPU is installed from wheels for Linux on x86-64")
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} does not exist: run `make sglang-cpu`")
    return PYTHON


@pytest.fixture(scope="session")
def servers(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("sglang"))
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(root / family, family, spread=3.0, context=1024) for family in FAMILIES}


@pytest.fixture(scope="session")
def oracles(folders: dict[str, Path]) -> dict[str, Oracle]:
    torch.set_num_threads(1)
    return {name: Oracle(folder) for name, folder in folders.items()}
