"""The distributed weight route into a real SGLang: it serves exactly what the trainer sends, or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dvp_rl.contract.errors import WeightError
from dvp_rl.contract.transfer import Offer
from dvp_rl.engines import sglang_client
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.sglang_wire import EMPTY_PIECE
from dvp_rl.transport.broker import Broker
from dvp_rl.weights.transfers import Transfers
from tests.integration.engines.jobs import drawing, make_job
from tests.integration.engines.oracle import Oracle
from tests.integration.engines.servers import back, launch_sglang, server_of
from tests.integration.trainer.sending import none_sending, one_stopped, sender, stop_at

pytestmark = pytest.mark.slow

PIECES = 1 << 15
"""Bytes per piece; the model has several pieces."""
LIMIT_S = 15.0


async def test_weights_that_are_sent(
    models: dict[str, Path], oracles: dict[str, Oracle], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server is used for all cases. Weights go from even (a folder) to odd (sent) and back."""
    launch = launch_sglang(max_batch=8)
    engine = SglangEngine(models["even"], launch, version="run:0:even", load_timeout_s=LIMIT_S)
    await engine.start()
    try:
        await swapped_in_mid_generation(engine, broker, models["odd"], oracles)
        await engine.load(models["even"], "run:3:even")
        await other_bytes_than_announced(engine, broker, models["odd"], oracles)
        await a_plugin_that_checks_nothing(engine, broker, models["odd"], oracles["even"], monkeypatch)
        await a_trainer_that_dies(engine, broker, models["odd"], oracles["even"], monkeypatch)
        await a_trainer_that_hangs(engine, broker, models["odd"], oracles["even"], monkeypatch)
        await a_server_that_dies(engine, broker, models["odd"], oracles, monkeypatch)
    finally:
        await engine.close()


async def asked(engine: SglangEngine, broker: Broker, version: str) -> Offer:
    return await Transfers(broker).ask(engine.transfer_request(version), 60)


async def checksums(engine: SglangEngine) -> dict[str, str]:
    """SGLang's own checksums of every parameter that it computes with."""
    answer = await engine._client._call("POST", "/weights_checker", {"action": "checksum"}, admin=True)
    (rank,) = answer["ranks"]
    found: dict[str, str] = rank["checksums"]
    return found


async def swapped_in_mid_generation(
    engine: SglangEngine, broker: Broker, odd: Path, oracles: dict[str, Oracle]
) -> None:
    """Every token matches the version that it carries, and SGLang holds the same bits as after loading the folder."""
    job = make_job("long", n=8, max_tokens=900)
    async with sender(broker, "run:1:odd", odd, piece_bytes=PIECES):
        offer = await asked(engine, broker, "run:1:odd")
        assert len(offer.pieces) > 3
        running = asyncio.create_task(engine.generate(job))
        await drawing(engine)
        await engine.receive(offer)
        await none_sending()
    assert engine.version == "run:1:odd"
    seen = set()
    for sample in await running:
        for span in sample.versions:
            seen.add(span.version)
            checked = oracles[span.version.rpartition(":")[2]].check(job, sample, span.start, span.end)
            assert checked >= 0.9 * (span.end - span.start) - 2
    assert seen == {"run:0:even", "run:1:odd"}
    sent = await checksums(engine)
    await engine.load(odd, "run:2:odd")
    assert await checksums(engine) == sent


async def other_bytes_than_announced(
    engine: SglangEngine, broker: Broker, odd: Path, oracles: dict[str, Oracle]
) -> None:
    """The last piece differs, after SGLang has loaded the others. Samples in flight continue under the last folder."""
    before = await checksums(engine)
    job = make_job("forged", n=8, max_tokens=900)
    async with sender(broker, "run:4:odd", odd, piece_bytes=PIECES):
        offer = await asked(engine, broker, "run:4:odd")
        running = asyncio.create_task(engine.generate(job))
        await drawing(engine)
        forged = offer.pieces[-1].model_copy(update={"sha256": "0" * 64})
        with pytest.raises(WeightError, match="SHA-256"):
            await engine.receive(offer.model_copy(update={"pieces": (*offer.pieces[:-1], forged)}))
    assert engine.version == "run:3:even"
    samples = await running
    assert {span.version for sample in samples for span in sample.versions} == {"run:3:even"}
    oracles["even"].check_all(job, samples)
    assert await checksums(engine) == before


async def a_plugin_that_checks_nothing(
    engine: SglangEngine, broker: Broker, odd: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older plugin, which does not know the format with a checksum, is refused."""
    async with sender(broker, "run:5:odd", odd, piece_bytes=PIECES, send_timeout_s=LIMIT_S / 2):
        with monkeypatch.context() as patch:
            patch.setattr(sglang_client, "EMPTY_PIECE", EMPTY_PIECE | {"load_format": None})
            with pytest.raises(WeightError, match="its dvp-sglang does not verify weights"):
                await engine.receive(await asked(engine, broker, "run:5:odd"))
        await none_sending()
    await serves_even(engine, oracle)


async def a_trainer_that_dies(
    engine: SglangEngine, broker: Broker, odd: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer dies in the middle of a broadcast. The server notices at once and survives."""
    stop_at(monkeypatch, "send_piece.before:3=kill")
    server = server_of(engine)
    async with sender(broker, "run:5:odd", odd, piece_bytes=PIECES):
        with pytest.raises(WeightError, match="did not receive run:5:odd"):
            await engine.receive(await asked(engine, broker, "run:5:odd"))
    assert server_of(engine) == server
    await serves_even(engine, oracle)


async def a_trainer_that_hangs(
    engine: SglangEngine, broker: Broker, odd: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is bounded. SGLang cannot cancel a transfer, so it is restarted."""
    stop_at(monkeypatch, "send_piece.before:3=stop")
    server = server_of(engine)
    async with sender(broker, "run:6:odd", odd, piece_bytes=PIECES):
        with pytest.raises(WeightError, match="is being restarted"):
            await engine.receive(await asked(engine, broker, "run:6:odd"))
    await back(engine)
    assert server_of(engine) != server
    await serves_even(engine, oracle)


async def a_server_that_dies(
    engine: SglangEngine, broker: Broker, odd: Path, oracles: dict[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies in the middle of a broadcast. The trainer drops it in time; a new one can be sent weights."""
    stop_at(monkeypatch, "send_piece.before:3=stop")
    async with sender(broker, "run:7:odd", odd, piece_bytes=PIECES, send_timeout_s=LIMIT_S / 2):
        receiving = asyncio.create_task(engine.receive(await asked(engine, broker, "run:7:odd")))
        await one_stopped()
        server_of(engine).kill()
        with pytest.raises(WeightError, match="is being restarted"):
            await receiving
        await none_sending()
        await back(engine)
        monkeypatch.undo()
        await serves_even(engine, oracles["even"])
        await engine.receive(await asked(engine, broker, "run:7:odd"))
    assert engine.version == "run:7:odd"
    job = make_job("joined", n=2)
    oracles["odd"].check_all(job, await engine.generate(job))


async def serves_even(engine: SglangEngine, oracle: Oracle) -> None:
    assert engine.version == "run:3:even"
    job = make_job("after", n=2)
    samples = await engine.generate(job)
    assert {span.version for sample in samples for span in sample.versions} == {"run:3:even"}
    oracle.check_all(job, samples)
