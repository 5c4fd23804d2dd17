"""Jobs that are suspected of killing an SGLang server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dvp_rl.engines import served
from dvp_rl.engines.seeds import alone
from dvp_rl.engines.served import MAX_DEATHS
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.sglang_server import Remote
from tests.kit.models import make_model
from tests.kit.records import make_job


@pytest.fixture
def engine(tmp_path: Path) -> SglangEngine:
    return SglangEngine(make_model(tmp_path / "model"), Remote("http://127.0.0.1:9"))


async def test_a_death_counts_once_for_a_job_however_many_parts_were_in_flight(engine: SglangEngine) -> None:
    job = make_job("run", n=8)
    parts = [alone(job, index) for index in range(job.n)]
    clock = asyncio.get_running_loop().time
    for _ in range(MAX_DEATHS - 1):
        began = clock()
        await asyncio.sleep(0.01)
        assert [engine._suspected(part, began) for part in parts] == [None] * job.n
    assert f"SGLang died {MAX_DEATHS} times" in str(engine._suspected(parts[0], clock()))


async def test_the_oldest_suspects_are_forgotten(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MAX_SUSPECTS", 2)
    jobs = [make_job("run", position) for position in range(3)]
    for began in range(1, MAX_DEATHS):
        assert [engine._suspected(job, began) for job in jobs] == [None] * 3
        assert list(engine._deaths) == [job.job_id for job in jobs[1:]]
