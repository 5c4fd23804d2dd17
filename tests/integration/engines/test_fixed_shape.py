"""The engine's half of zero mismatch: what a sample's log-probs depend on, and which settings are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dvp_rl.contract.engine import EngineName
from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.shape import Shape
from dvp_rl.engines.transformers import TransformersEngine
from dvp_rl.rollout.engine import build
from dvp_rl.rollout.settings import RolloutSettings
from tests.kit.models import make_model

from .conftest import MakeEngine
from .jobs import drawing, make_job
from .oracle import Oracle

SHAPE = Shape(4, 32)


async def test_samples_follow_the_oracle(
    folders: dict[str, Path], oracles: dict[str, Oracle], make_engine: MakeEngine
) -> None:
    """The batch has more rows than a block, and prompts of several lengths."""
    for family in ("llama", "qwen2", "qwen3"):
        engine = await make_engine(folders[family], fixed_shape=SHAPE, max_batch=7)
        jobs = [make_job(f"job{i}", list(range(5, 7 + 3 * i)), n=5, log_min_p=-3.0) for i in range(3)]
        for job, samples in zip(jobs, await asyncio.gather(*map(engine.generate, jobs)), strict=True):
            oracles[family].check_all(job, samples)


async def test_company_does_not_change_a_bit(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    engine = await make_engine(folders["qwen3"], fixed_shape=SHAPE, max_batch=7)
    jobs = [make_job(f"job{i}", list(range(5, 7 + 3 * i)), n=5, log_min_p=-3.0) for i in range(3)]
    alone = [await engine.generate(job) for job in jobs]
    assert list(await asyncio.gather(*map(engine.generate, jobs))) == alone


async def test_new_weights_count_from_the_next_token_on(
    folders: dict[str, Path], oracles: dict[str, Oracle], make_engine: MakeEngine
) -> None:
    engine = await make_engine(folders["even"], fixed_shape=Shape(2, 256), max_batch=2)
    job = make_job(n=2, max_tokens=250, log_min_p=-3.0)
    running = asyncio.create_task(engine.generate(job))
    await drawing(engine)
    await engine.load(folders["odd"], "run:1:odd")
    for sample in await running:
        assert [span.version for span in sample.versions] == ["local:0:0", "run:1:odd"]
        for span, name in zip(sample.versions, ("even", "odd"), strict=True):
            assert oracles[name].check(job, sample, span.start, span.end)


async def test_the_shape_is_the_context(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    engine = await make_engine(folders["even"], fixed_shape=SHAPE)
    assert engine.context_length == 32
    (sample,) = await engine.generate(make_job(prompt=[5] * 20, max_tokens=100))
    assert len(sample.token_ids) == 12


async def test_what_cannot_hold_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fixed_shape 1x4096: the model's context is 1024 tokens"):
        await TransformersEngine(folders["qwen3"], fixed_shape=Shape(1, 4096)).start()
    folder = make_model(tmp_path / "model")
    for engine in (EngineName.FAKE, EngineName.SGLANG):
        with pytest.raises(ConfigError, match=r"fixed_shape 4x32: only engine = transformers.*--rl-on-policy-target"):
            build(RolloutSettings(model=folder, engine=engine, fixed_shape="4x32"))
