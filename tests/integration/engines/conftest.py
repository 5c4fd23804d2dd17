from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from services.engines.protocol import Engine
from services.engines.transformers import TransformersEngine
from tests.models import FAMILIES, make_model

from .oracle import Oracle

MakeEngine: TypeAlias = Callable[..., Coroutine[Any, Any, Engine]]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model folder per family; `even` and `odd`: weights of one shape that never end a sample by themselves."""
    root = tmp_path_factory.mktemp("models")
    made = {family: make_model(root / family, family, spread=2.0, context=1024) for family in FAMILIES}
    for seed, name in enumerate(("even", "odd")):
        made[name] = make_model(root / name, "qwen3", spread=2.0, context=1024, seed=seed, endless=True)
    return made


@pytest.fixture(scope="session")
def oracles(folders: dict[str, Path]) -> dict[str, Oracle]:
    torch.set_num_threads(1)  # two test processes on two cores are slower with two threads each
    return {name: Oracle(folder) for name, folder in folders.items()}


@pytest.fixture(params=["transformers"])
async def make_engine(request: pytest.FixtureRequest) -> AsyncIterator[MakeEngine]:
    """Starts engines of the kind under test and closes them: `await make_engine(folder, **settings)`."""
    kinds: dict[str, Callable[..., Engine]] = {"transformers": TransformersEngine}
    started: list[Engine] = []

    async def make(folder: Path, **settings: Any) -> Engine:
        engine = kinds[request.param](folder, **({"threads": 1} | settings))
        await engine.start()
        started.append(engine)
        return engine

    yield make
    for engine in started:
        await engine.close()
