from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from dvp_rl.engines import sglang_server, vllm_server
from dvp_rl.engines.protocol import Engine
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.transformers import TransformersEngine
from dvp_rl.engines.vllm import VllmEngine
from tests.kit.models import FAMILIES, make_model

from .oracle import Oracle
from .servers import MAX_BATCH, SharedServer, launch_sglang, launch_vllm

MakeEngine: TypeAlias = Callable[..., Coroutine[Any, Any, Engine]]
HEADS = {"hidden": 128}
"""For make_model: vLLM computes heads of 32 and more on a CPU."""
ENDLESS = ("even", "odd", "third")
"""Weights of one shape that never draw an end token."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model folder per family and per name of ENDLESS."""
    root = tmp_path_factory.mktemp("models")
    made = {family: make_model(root / family, family, spread=2.0, context=1024, **HEADS) for family in FAMILIES}
    for seed, name in enumerate(ENDLESS):
        made[name] = make_model(root / name, "qwen3", spread=2.0, context=1024, seed=seed, endless=True, **HEADS)
    return made


@pytest.fixture(scope="session")
def oracles(folders: dict[str, Path]) -> dict[str, Oracle]:
    torch.set_num_threads(1)  # two test processes on two cores are slower with two threads each
    return {name: Oracle(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def shared_sglang() -> Iterator[SharedServer]:
    server = SharedServer(launch_sglang(max_batch=MAX_BATCH))
    yield server
    server.close()


@pytest.fixture(scope="session")
def shared_vllm() -> Iterator[SharedServer]:
    server = SharedServer(launch_vllm(max_batch=MAX_BATCH))
    yield server
    server.close()


@pytest.fixture
def engine_kind() -> str:
    """The kind of engine that `make_engine` makes: transformers, cuda (the same on a GPU), sglang or vllm.
    test_conformance.py tries every kind."""
    return "transformers"


@pytest.fixture
async def make_engine(
    engine_kind: str, request: pytest.FixtureRequest, folders: dict[str, Path]
) -> AsyncIterator[MakeEngine]:
    """Starts engines and closes them: `await make_engine(folder, **settings)`.

    Servers are slow to start, so engines use the session's, with its capacity. Only an SGLang engine for a test's own
    folder gets its own server.
    """
    started: list[Engine] = []

    def transformers(folder: Path, **settings: Any) -> Engine:
        return TransformersEngine(folder, **({"threads": 1} | settings))

    def cuda(folder: Path, **settings: Any) -> Engine:
        return transformers(folder, **({"device": "cuda"} | settings))

    def sglang(folder: Path, *, max_batch: int = 0, **settings: Any) -> Engine:
        if folder in folders.values():
            client = request.getfixturevalue("shared_sglang").client(folder)
            remote = sglang_server.Remote(client.url, client.api_key, admin_key=client.admin_key)
            return SglangEngine(folder, remote, **settings)
        return SglangEngine(folder, launch_sglang(), **settings)

    def vllm(folder: Path, *, max_batch: int = 0, **settings: Any) -> Engine:
        client = request.getfixturevalue("shared_vllm").client(folder)
        return VllmEngine(folder, vllm_server.Remote(client.url, client.api_key), **settings)

    async def make(folder: Path, **settings: Any) -> Engine:
        kinds = {"transformers": transformers, "cuda": cuda, "sglang": sglang, "vllm": vllm}
        engine = kinds[engine_kind](folder, **settings)
        started.append(engine)
        await engine.start()
        return engine

    yield make
    for engine in started:
        await engine.close()
