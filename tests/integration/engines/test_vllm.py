"""What is vLLM's own: what it cannot do, who may call it, and how it fails."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from dvp_rl.contract.errors import ConfigError, EngineError, RequestError, UnavailableError, WeightError
from dvp_rl.engines import served
from dvp_rl.engines.vllm import VllmEngine
from dvp_rl.engines.vllm_server import Launch, Remote
from dvp_rl.rollout.engine import build
from dvp_rl.rollout.settings import RolloutSettings
from tests.kit.models import make_model
from tests.kit.wait import WITHIN_S

from .jobs import drawing, make_job
from .oracle import Oracle
from .servers import SharedServer, back, launch_vllm, server_of

POISON = make_job("poison", n=8, max_tokens=1000)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "float64"}, "float64.*float32, bfloat16, float16"),
        ({"device": "cuda:1"}, "cuda:1.*CUDA_VISIBLE_DEVICES"),
        ({"gpu_memory_utilization": 0.5}, r"only on a GPU.*vllm\.cpu_kv_cache_gib"),
        ({"device": "cuda", "cpu_kv_cache_gib": 2}, r"only on a CPU.*vllm\.gpu_memory_utilization"),
    ],
)
def test_settings_that_vllm_does_not_have(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Launch(python=Path("python"), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["deterministic", "fp32_head"])
def test_replicas_refuse_what_vllm_does_not_have(setting: str, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=f"{setting}: vLLM does not have it; engine = transformers"):
        build(RolloutSettings(model=folders["even"], engine="vllm", **{setting: True}))


async def test_an_environment_without_vllm(folders: dict[str, Path]) -> None:
    engine = VllmEngine(folders["even"], Launch(python=Path(sys.executable)))
    with pytest.raises(ConfigError, match=r"(?s)exit code 1.*lacks vllm and dvp_vllm: .*vllm\.python"):
        await engine.start()
    await engine.close()


@pytest.mark.slow
async def test_settings_under_which_numbers_would_be_wrong(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3", heads=4, hidden=64)
    engine = VllmEngine(folder, launch_vllm(extra_args=("--logprobs-mode", "raw_logprobs")))
    with pytest.raises(ConfigError, match=r"together with --logprobs-mode raw_logprobs, heads of 16 on a CPU: "):
        await engine.start()
    await engine.close()


@pytest.mark.slow
async def test_bfloat16(folders: dict[str, Path], oracles: dict[str, Oracle]) -> None:
    """On processors with AMX, its attention computes with it."""
    engine = VllmEngine(folders["even"], launch_vllm(dtype="bfloat16"))
    await engine.start()
    try:
        assert engine.facts.dtype == "bfloat16"
        job = make_job(n=8, max_tokens=64, log_min_p=-3.0)
        for sample in await engine.generate(job):
            expected = oracles["even"].expect(job, sample.token_ids).logprobs
            inside = np.isfinite(expected)
            assert inside.mean() > 0.9
            assert np.abs(sample.logprobs - expected)[inside].mean() < 0.1
    finally:
        await engine.close()


@pytest.mark.slow
async def test_a_build_for_another_device(folders: dict[str, Path], shared_vllm: SharedServer) -> None:
    client = shared_vllm.client(folders["even"])
    engine = VllmEngine(folders["even"], Remote(client.url, client.api_key))
    engine._device = "cuda"
    with pytest.raises(ConfigError, match=r"device cuda: this vLLM is built for cpu; .*vllm\.python"):
        await engine.start()
    await engine.close()


@pytest.mark.slow
async def test_every_route_but_health_needs_the_key(folders: dict[str, Path], shared_vllm: SharedServer) -> None:
    served_by = shared_vllm.client(folders["even"])
    key = {"Authorization": f"Bearer {served_by.api_key}"}
    async with httpx.AsyncClient(base_url=served_by.url, timeout=WITHIN_S) as client:
        paths = (await client.get("/openapi.json", headers=key)).json()["paths"]
        assert {"/pause", "/collective_rpc", "/inference/v1/generate", "/health"} <= paths.keys()
        for path, methods in paths.items():
            for method in methods:
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    answer = await client.request(method, re.sub(r"{.*?}", "x", path), headers=headers)
                    assert answer.status_code == (200 if path == "/health" else 401), f"{method} {path}"


@pytest.mark.slow
async def test_requests_that_vllm_cannot_express(folders: dict[str, Path], shared_vllm: SharedServer) -> None:
    client = shared_vllm.client(folders["even"])
    engine = VllmEngine(folders["even"], Remote(client.url, client.api_key))
    await engine.start()
    for sampling, named in ({"log_min_p": -100.0}, "log_min_p -100"), ({"temperature": 0.001}, "temperature 0.001"):
        with pytest.raises(RequestError, match=named):
            await engine.generate(make_job(**sampling))
    await engine.close()


@pytest.mark.slow
async def test_swaps_that_fail_leave_the_weights_served(
    folders: dict[str, Path], oracles: dict[str, Oracle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = VllmEngine(folders["even"], launch_vllm(max_batch=8), version="run:0:even")
    await engine.start()
    try:
        half = shutil.copytree(folders["odd"], tmp_path / "half")
        (half / "model.safetensors").write_bytes((half / "model.safetensors").read_bytes()[:-1000])
        for refused in (tmp_path / "gone", half):
            await refused_by_vllm(engine, refused, oracles["even"])
        monkeypatch.setattr(served, "MAX_DEATHS", 2)
        await an_engine_that_dies(engine)
    finally:
        await engine.close()


async def refused_by_vllm(engine: VllmEngine, folder: Path, oracle: Oracle) -> None:
    """Its own check would have refused the folder. Samples in flight continue under the old weights."""
    job = make_job("long", n=8, max_tokens=500)
    running = asyncio.create_task(engine.generate(job))
    await drawing(engine)
    with pytest.raises(WeightError, match=f"vLLM refused .*{folder.name}"):
        await engine._swap(folder, "run:1:refused")
    assert engine.version == "run:0:even"
    samples = await running
    assert {span.version for sample in samples for span in sample.versions} == {"run:0:even"}
    oracle.check_all(job, samples)


async def an_engine_that_dies(engine: VllmEngine) -> None:
    """vLLM computes in other processes than the one that answers. A job in flight fails with UnavailableError, which
    does not count against it, as it may be innocent; one that was in flight at every death finally fails."""
    for error, named in (UnavailableError, "EngineCore|did not answer"), (EngineError, "died 2 times"):
        everybody = [server_of(engine), *server_of(engine).children(recursive=True)]
        running = asyncio.create_task(engine.generate(POISON))
        await drawing(engine)
        next(process for process in everybody if "EngineCore" in process.name()).kill()
        with pytest.raises(error, match=named):
            await running
        await back(engine)
        assert engine.version == "run:0:even"
        assert not psutil.wait_procs(everybody, timeout=WITHIN_S)[1]
    assert len(await engine.generate(make_job("next", n=3))) == 3
