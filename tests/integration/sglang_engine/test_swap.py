"""Swaps that go wrong inside SGLang, with a server of the engine's own."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import psutil
import pytest

from services.contract.errors import EngineError, UnavailableError, WeightError
from services.engines import sglang
from services.engines.sglang import SglangEngine
from services.engines.sglang_server import Launch, LocalServer
from tests.integration.engines.jobs import drawing, make_job
from tests.integration.engines.oracle import Oracle
from tests.integration.engines.sglang_process import sglang_python
from tests.kit.wait import WITHIN_S

pytestmark = pytest.mark.slow


async def test_swaps_that_fail_leave_the_weights_served(
    models: dict[str, Path], oracles: dict[str, Oracle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(python=sglang_python(), threads=1, max_batch=8)
    engine = SglangEngine(models["even"], launch, version="run:0:even")
    await engine.start()
    try:
        await refused_by_sglang(engine, oracles["even"], tmp_path / "gone")
        await dying_while_it_loads(engine, models["odd"], oracles, tmp_path / "half")
        await a_job_that_it_always_dies_of(engine, monkeypatch)
    finally:
        await engine.close()


async def refused_by_sglang(engine: SglangEngine, oracle: Oracle, gone: Path) -> None:
    """A folder that vanished after it was checked. Samples in flight go on under the old weights, from a cache that is
    theirs."""
    job = make_job("long", n=8, max_tokens=500)
    running = asyncio.create_task(engine.generate(job))
    await drawing(engine)
    with pytest.raises(WeightError, match=r"SGLang refused .*gone"):
        await engine._swap(gone, "run:1:gone")
    assert engine.version == "run:0:even"
    samples = await running
    assert {span.version for sample in samples for span in sample.versions} == {"run:0:even"}
    oracle.check_all(job, samples)


async def dying_while_it_loads(engine: SglangEngine, odd: Path, oracles: dict[str, Oracle], half: Path) -> None:
    """SGLang dies of half a file, which the engine's own check would have refused."""
    shutil.copytree(odd, half)
    (half / "model.safetensors").write_bytes((half / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(WeightError, match="not a complete safetensors file"):
        await engine.load(half, "run:1:half")
    with pytest.raises(WeightError, match="died while loading"):
        await engine._swap(half, "run:1:half")
    await back(engine)
    assert engine.version == "run:0:even"
    job = make_job("after", n=2)
    oracles["even"].check_all(job, await engine.generate(job))
    await engine.load(odd, "run:2:odd")
    oracles["odd"].check_all(job, await engine.generate(job))


async def a_job_that_it_always_dies_of(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes back uncounted at first, as it may be innocent; then it counts, or it would go round forever."""
    monkeypatch.setattr(sglang, "MAX_DEATHS", 2)
    job = make_job("poison", n=8, max_tokens=1000)
    for expected in (UnavailableError, EngineError):
        running = asyncio.create_task(engine.generate(job))
        await drawing(engine)
        server_of(engine).kill()
        with pytest.raises(expected, match="did not answer" if expected is UnavailableError else "went away 2 times"):
            await running
        await back(engine)
    assert engine.version == "run:2:odd"


def server_of(engine: SglangEngine) -> psutil.Process:
    """Other modules' servers may be children of this process too."""
    assert isinstance(engine._server, LocalServer)
    assert engine._server._process is not None
    return psutil.Process(engine._server._process.pid)


async def back(engine: SglangEngine) -> None:
    """It has noticed the death and is over it."""
    async with asyncio.timeout(WITHIN_S):
        while not engine.outage:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.01)
        await engine.recovered()
