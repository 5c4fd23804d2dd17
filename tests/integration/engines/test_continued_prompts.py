"""Prompts that continue what the transformers engine has read before. tests/models.py tries it with all families."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from dvp_rl.contract.group import Sample
from dvp_rl.engines.decoder import CONTINUED_TOKENS
from dvp_rl.engines.kv_cache import RowCache
from dvp_rl.engines.protocol import Engine
from dvp_rl.engines.transformers import TransformersEngine
from tests.kit.models import make_model
from tests.kit.wait import until_async

from .conftest import MakeEngine
from .jobs import held, make_job
from .oracle import Oracle

TEXT = [5 + i % 80 for i in range(100)]
NEW = [9, 8, 7]


async def read_of(engine: TransformersEngine, name: str, prompt: list[int], n: int = 1) -> tuple[int, Sample]:
    """Tokens that the model read of the prompt, and the first sample."""
    before = engine.prompt_tokens.read
    sample, *_ = await engine.generate(make_job(name, prompt, n))
    return engine.prompt_tokens.read - before, sample


async def start(make_engine: MakeEngine, folder: Path, **settings: object) -> TransformersEngine:
    engine: Engine = await make_engine(folder, **({"prefix_cache_mib": 16} | settings))
    assert isinstance(engine, TransformersEngine)
    return engine


async def test_ten_turns_read_each_token_once(
    folders: dict[str, Path], oracles: dict[str, Oracle], make_engine: MakeEngine
) -> None:
    engine, prompt = await start(make_engine, folders["even"]), TEXT
    for turn in range(10):
        job = make_job(f"turn-{turn}", prompt, log_min_p=-3.0)
        read, (sample,) = engine.prompt_tokens.read, await engine.generate(job)
        assert engine.prompt_tokens.read - read == (len(TEXT) if turn == 0 else 1 + len(NEW))
        oracles["even"].check_all(job, (sample,))
        prompt = [*prompt, *sample.token_ids.tolist(), *NEW]
    assert engine.prompt_tokens.cached > engine.prompt_tokens.read


async def test_a_fork_continues_what_it_shares(
    folders: dict[str, Path], oracles: dict[str, Oracle], make_engine: MakeEngine
) -> None:
    engine = await start(make_engine, folders["even"])
    await read_of(engine, "first", TEXT)
    fork = [*TEXT[:70], *NEW, *TEXT[:60]]
    job = make_job("fork", fork, log_min_p=-3.0)
    before = engine.prompt_tokens
    oracles["even"].check_all(job, await engine.generate(job))
    assert engine.prompt_tokens.cached - before.cached == 70


async def test_what_is_new_may_be_long(make_engine: MakeEngine, tmp_path: Path) -> None:
    """It is read in two parts."""
    folder, text = make_model(tmp_path / "model", spread=2.0, context=2048), TEXT * 8
    engine = await start(make_engine, folder)
    await read_of(engine, "first", text)
    job = make_job("long", [*text, *NEW * (CONTINUED_TOKENS // 2)], log_min_p=-3.0)
    Oracle(folder).check_all(job, await engine.generate(job))
    assert engine.prompt_tokens.cached == len(text)


async def test_turns_of_many_conversations_at_once(
    folders: dict[str, Path], oracles: dict[str, Oracle], make_engine: MakeEngine
) -> None:
    """They share batches, and leave rows to each other."""
    engine = await start(make_engine, folders["even"], max_batch=3)

    async def play(name: str, prompt: list[int]) -> None:
        for turn in range(4):
            job = make_job(f"{name}-{turn}", prompt, max_tokens=5 + turn, log_min_p=-3.0)
            (sample,) = await engine.generate(job)
            oracles["even"].check_all(job, (sample,))
            prompt = [*prompt, *sample.token_ids.tolist(), *NEW]

    await asyncio.gather(*(play(f"talk-{i}", [20 + i, *TEXT]) for i in range(7)))
    assert engine.prompt_tokens.read == 7 * (1 + len(TEXT) + 3 * (1 + len(NEW)))


async def test_new_weights_read_everything_again(
    folders: dict[str, Path], oracles: dict[str, Oracle], make_engine: MakeEngine
) -> None:
    engine = await start(make_engine, folders["even"])
    _, sample = await read_of(engine, "first", TEXT)
    await engine.load(folders["odd"], "run:1:odd")
    job = make_job("second", [*TEXT, *sample.token_ids.tolist(), *NEW], log_min_p=-3.0)
    oracles["odd"].check_all(job, await engine.generate(job))
    assert engine.prompt_tokens.cached == 0


async def test_weights_that_arrive_while_a_turn_is_drawn(
    folders: dict[str, Path], oracles: dict[str, Oracle], make_engine: MakeEngine
) -> None:
    """What is kept of that turn is of the new weights."""
    engine = await start(make_engine, folders["even"])
    with held(engine):
        drawing = asyncio.create_task(engine.generate(make_job("first", TEXT)))
        await until_async(lambda: engine.num_running == 1)
        load = asyncio.create_task(engine.load(folders["odd"], "run:1:odd"))
        await until_async(lambda: engine._worker is not None and engine._worker._commands.qsize() == 1)
    (sample,), _ = await asyncio.gather(drawing, load)
    assert [span.version for span in sample.versions] == ["local:0:0", "run:1:odd"]
    job = make_job("second", [*TEXT, *sample.token_ids.tolist(), *NEW], log_min_p=-3.0)
    oracles["odd"].check_all(job, await engine.generate(job))
    assert engine.prompt_tokens.cached == len(TEXT) + len(sample.token_ids) - 1


async def test_what_keeps_nothing(folders: dict[str, Path], make_engine: MakeEngine) -> None:
    """Several samples of a prompt; an engine without that memory; one whose bits depend on the job alone."""
    again = [*TEXT, *NEW]
    engine = await start(make_engine, folders["even"])
    assert (await read_of(engine, "group", TEXT, n=4))[0] == len(TEXT)
    assert (await read_of(engine, "again", again))[0] == len(again)
    for settings in ({"prefix_cache_mib": 0}, {"deterministic": True}):
        engine = await start(make_engine, folders["even"], **settings)
        first = (await read_of(engine, "first", TEXT))[1]
        read, second = await read_of(engine, "first", TEXT)
        assert read == len(TEXT)
        if "deterministic" in settings:
            assert np.array_equal(first.logprobs, second.logprobs)


async def test_an_answer_is_sent_before_it_is_kept(
    folders: dict[str, Path], oracles: dict[str, Oracle], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is not lost if there is no memory for that."""

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError

    engine, job = await start(make_engine, folders["even"]), make_job("first", TEXT)
    with monkeypatch.context() as patched:
        patched.setattr(RowCache, "row", fail)
        oracles["even"].check_all(job, await engine.generate(job))
    oracles["even"].check_all(job, await engine.generate(job))
