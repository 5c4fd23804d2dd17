"""Canaries on real servers that an engine has started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from dvp_rl.contract.errors import WeightError
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.vllm import VllmEngine
from dvp_rl.rollout.canary import Guard
from dvp_rl.rollout.metrics import Metrics
from tests.unit.trainer.test_canary import canary_of, learner_of

from .jobs import drawing, make_job
from .servers import back, launch_sglang, launch_vllm, server_of

pytestmark = pytest.mark.slow

MAX_BATCH = 16
KINDS: dict[str, Callable[[Path], SglangEngine | VllmEngine]] = {
    "sglang": lambda folder: SglangEngine(folder, launch_sglang(max_batch=MAX_BATCH), version="canary:0:a"),
    "vllm": lambda folder: VllmEngine(folder, launch_vllm(max_batch=MAX_BATCH), version="canary:0:a"),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_the_weights_that_a_server_serves_are_examined(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """After swaps and after a restart."""
    canaries = {name: canary_of(learner_of(folders[name], tmp_path)) for name in ("even", "odd")}
    engine = KINDS[kind](folders["even"])
    await engine.start()
    guard = Guard(engine, Metrics(), every_s=600.0)

    async def load(weights: str, seq: int, canary: str) -> None:
        with guard.expecting(f"canary:{seq}:a", canaries[canary]):
            await engine.load(folders[weights], f"canary:{seq}:a")

    try:
        for seq, name in enumerate(("even", "odd", "even"), start=1):
            await load(name, seq, name)
            await guard.examine()
            assert guard.limit is not None
            assert guard.limit < 1e-4
        runs = asyncio.create_task(engine.generate(make_job("runs", n=MAX_BATCH, max_tokens=900)))
        await drawing(engine)
        waits = asyncio.create_task(engine.generate(make_job("waits", n=MAX_BATCH, max_tokens=900)))
        await asyncio.sleep(0.5)  # it is in the server's queue by then, or comes even later
        await guard.examine()
        assert not waits.done(), "the canary comes first"
        await asyncio.gather(runs, waits)
        server_of(engine).kill()
        await back(engine)
        assert guard.unproven
        await guard.examine()
        assert not guard.unproven
        await load("odd", 4, "even")
        with pytest.raises(WeightError, match="greedy walks leave the trainer's"):
            await guard.examine()
    finally:
        await engine.close()
