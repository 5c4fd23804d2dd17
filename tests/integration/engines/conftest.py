from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from dvp_rl.engines.protocol import Engine
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.sglang_server import Launch
from dvp_rl.engines.transformers import TransformersEngine
from tests.kit.models import FAMILIES, make_model

from .oracle import Oracle
from .sglang_process import SharedServer, sglang_python

MakeEngine: TypeAlias = Callable[..., Coroutine[Any, Any, Engine]]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model folder per family, and `even` and `odd`: weights of one shape that never draw an end token."""
    root = tmp_path_factory.mktemp("models")
    made = {family: make_model(root / family, family, spread=2.0, context=1024) for family in FAMILIES}
    for seed, name in enumerate(("even", "odd")):
        made[name] = make_model(root / name, "qwen3", spread=2.0, context=1024, seed=seed, endless=True)
    return made


@pytest.fixture(scope="session")
def oracles(folders: dict[str, Path]) -> dict[str, Oracle]:
    torch.set_num_threads(1)  # two test processes on two cores are slower with two threads each
    return {name: Oracle(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def shared_server() -> Iterator[SharedServer]:
    server = SharedServer()
    yield server
    server.close()


@pytest.fixture
def engine_kind() -> str:
    """The kind of engine that `make_engine` makes: transformers, cuda (the same on a GPU) or sglang.
    test_conformance.py tries every kind."""
    return "transformers"


@pytest.fixture
async def make_engine(
    engine_kind: str, request: pytest.FixtureRequest, folders: dict[str, Path]
) -> AsyncIterator[MakeEngine]:
    """Starts engines and closes them: `await make_engine(folder, **settings)`.

    SGLang is slow to start, so engines for `folders` use the session's server, with its capacity. Only an engine for a
    test's own folder gets its own server.
    """
    started: list[Engine] = []

    def transformers(folder: Path, **settings: Any) -> Engine:
        return TransformersEngine(folder, **({"threads": 1} | settings))

    def cuda(folder: Path, **settings: Any) -> Engine:
        return transformers(folder, **({"device": "cuda"} | settings))

    def sglang(folder: Path, *, max_batch: int = 0, **settings: Any) -> Engine:
        if folder in folders.values():
            return SglangEngine(folder, request.getfixturevalue("shared_server").remote(folder), **settings)
        return SglangEngine(folder, Launch(python=sglang_python(), threads=1), **settings)

    async def make(folder: Path, **settings: Any) -> Engine:
        engine = {"transformers": transformers, "cuda": cuda, "sglang": sglang}[engine_kind](folder, **settings)
        started.append(engine)
        await engine.start()
        return engine

    yield make
    for engine in started:
        await engine.close()
