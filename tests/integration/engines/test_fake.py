from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dvp_rl.contract.errors import EngineError, RequestError, UnavailableError, WeightError
from dvp_rl.contract.group import FinishReason
from dvp_rl.engines.fake import FakeEngine
from tests.kit.wait import until_async

from .jobs import make_job


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").touch()
    return tmp_path


async def test_samples_are_whole_and_reproducible() -> None:
    engine = FakeEngine(service_time_s=0, num_tokens=16)
    await engine.start()
    samples = await engine.generate(make_job("a", n=5))
    assert engine.prompt_tokens == (5 * len(make_job().prompt_ids), 0)
    assert [len(sample.token_ids) for sample in samples] == [16] * 5
    assert {sample.finish_reason for sample in samples} == {FinishReason.STOP}
    assert len({tuple(sample.token_ids.tolist()) for sample in samples}) == 5
    assert await engine.generate(make_job("a", n=5)) == samples
    (short,) = await engine.generate(make_job("a", max_tokens=3))
    assert len(short.token_ids) == 3
    assert short.finish_reason is FinishReason.LENGTH


async def test_capacity_and_cancellation() -> None:
    engine = FakeEngine(service_time_s=60, capacity=3)
    await engine.start()
    jobs = [asyncio.create_task(engine.generate(make_job(f"j{i}", n=2))) for i in range(4)]
    await until_async(lambda: engine.num_running == 3)
    for job in jobs:
        job.cancel()
    outcomes = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert engine.num_running == 0


async def test_a_swap_splits_the_samples_in_flight(weights: Path) -> None:
    engine = FakeEngine(service_time_s=10, num_tokens=1000, load_time_s=0.1, version="run:0:a")
    await engine.start()
    running = asyncio.create_task(engine.generate(make_job(n=2, max_tokens=1000)))
    await until_async(lambda: engine.num_running == 2)
    await engine.load(weights, "run:1:b")
    for sample in await running:
        assert [span.version for span in sample.versions] == ["run:0:a", "run:1:b"]
    assert engine.version == "run:1:b"


async def test_bad_input_and_close(tmp_path: Path) -> None:
    engine = FakeEngine(service_time_s=60, vocab_size=10)
    with pytest.raises(UnavailableError):
        await engine.generate(make_job())
    await engine.start()
    with pytest.raises(WeightError, match="safetensors"):
        await engine.load(tmp_path / "nothing", "run:1:b")
    with pytest.raises(RequestError, match="0 to 9"):
        await engine.generate(make_job(prompt=[10]))
    running = asyncio.create_task(engine.generate(make_job(prompt=[1])))
    await until_async(lambda: engine.num_running == 1)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await running
