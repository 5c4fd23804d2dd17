"""Swaps that fail inside SGLang, with a server that the engine started."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import psutil
import pytest

from dvp_rl.contract.errors import EngineError, UnavailableError, WeightError
from dvp_rl.engines import served
from dvp_rl.engines.sglang import SglangEngine
from tests.integration.engines.jobs import drawing, make_job
from tests.integration.engines.oracle import Oracle
from tests.integration.engines.servers import back, launch_sglang, server_of
from tests.kit.wait import WITHIN_S

pytestmark = pytest.mark.slow

POISON = make_job("poison", n=8, max_tokens=1000)


async def test_swaps_that_fail_leave_the_weights_served(
    models: dict[str, Path], oracles: dict[str, Oracle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launch_sglang(max_batch=8)
    engine = SglangEngine(models["even"], launch, version="run:0:even")
    await engine.start()
    try:
        await refused_by_sglang(engine, oracles["even"], tmp_path / "gone")
        # The same job is in flight at both deaths below.
        monkeypatch.setattr(served, "MAX_DEATHS", 2)
        await dying_while_it_loads(engine, models["odd"], oracles, tmp_path / "half")
        await a_scheduler_that_dies_alone(engine)
    finally:
        await engine.close()


async def refused_by_sglang(engine: SglangEngine, oracle: Oracle, gone: Path) -> None:
    """A folder vanishes after it was checked. Samples in flight continue under the old weights, with a cache of those
    weights."""
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
    """A truncated file, which the engine's own check would have refused, kills SGLang. A job in flight fails with
    UnavailableError, which does not count against it, as it may be innocent."""
    shutil.copytree(odd, half)
    (half / "model.safetensors").write_bytes((half / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(WeightError, match="cannot be read as safetensors"):
        await engine.load(half, "run:1:half")
    running = asyncio.create_task(engine.generate(POISON))
    await drawing(engine)
    with pytest.raises(WeightError, match="died while loading"):
        await engine._swap(half, "run:1:half")
    with pytest.raises(UnavailableError, match="did not answer"):
        await running
    await back(engine)
    assert engine.version == "run:0:even"
    job = make_job("after", n=2)
    oracles["even"].check_all(job, await engine.generate(job))
    await engine.load(odd, "run:2:odd")
    oracles["odd"].check_all(job, await engine.generate(job))


async def a_scheduler_that_dies_alone(engine: SglangEngine) -> None:
    """The rest of the server ends too, and the engine recovers. A job that was in flight at every death finally fails;
    otherwise it would be retried forever."""
    everybody = [server_of(engine), *server_of(engine).children(recursive=True)]
    running = asyncio.create_task(engine.generate(POISON))
    await drawing(engine)
    next(process for process in everybody if "scheduler" in " ".join(process.cmdline())).kill()
    with pytest.raises(EngineError, match="died 2 times"):
        await running
    await back(engine)
    assert engine.version == "run:2:odd"
    assert not psutil.wait_procs(everybody, timeout=WITHIN_S)[1]
