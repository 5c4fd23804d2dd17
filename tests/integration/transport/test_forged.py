"""Forged data that an attacker with a replica's user could write: no part crashes on it, loops or trusts it."""

from __future__ import annotations

import asyncio

import pytest

from dvp_rl.contract.errors import UnavailableError, WeightError
from dvp_rl.contract.group import DeadLetter
from dvp_rl.contract.transfer import TransferAnswer, TransferRequest
from dvp_rl.transport.dead_letters import DeadLetters, Outcome, Prospect
from dvp_rl.transport.health import take_snapshot
from dvp_rl.transport.replicas import ReplicaRegistry
from dvp_rl.weights.transfers import Transfers
from tests.integration.transport.rig import BLOCK_MS, Rig
from tests.integration.transport.world import Parts
from tests.kit.wait import WITHIN_S

ENTRIES: list[dict[bytes, bytes]] = [
    {b"x": b"y"},
    {b"kind": b"group"},
    {b"kind": b"group", b"id": b"x", b"size": b"abc"},
    {b"kind": b"group", b"id": b"x", b"size": b"-1"},
    {b"kind": b"group", b"id": b"x", b"size": b"9" * 5000},
    {b"kind": b"group", b"size": b"1"},
    {b"kind": b"group", b"id": b"\xff\xfe", b"size": b"1"},
    {b"kind": b"group", b"id": b"a b", b"data": b"\xc1"},
    {b"kind": b"group", b"id": b"x", b"sink": b"nobody", b"data": b"junk"},
    {b"kind": b"dead", b"id": b"x", b"sink": b"\xff", b"data": b"junk"},
    {b"kind": b"dead", b"id": b"\xff", b"sink": b"eval"},
]


@pytest.mark.parametrize(
    "fields", ENTRIES, ids=lambda fields: b" ".join(b"=".join(pair) for pair in fields.items())[:40]
)
async def test_what_is_no_group_is_buried_once(fields: dict[bytes, bytes], rig: Rig) -> None:
    await rig.broker.redis.xadd(rig.broker.keys.groups, dict(fields))
    for _ in range(3):
        deliveries = await rig.groups.read(10, BLOCK_MS)
        await rig.groups.acknowledge(deliveries)
        assert all(isinstance(delivery.item, DeadLetter) for delivery in deliveries)
    (letter,) = await DeadLetters(rig.broker).page()
    assert letter.letter.error.startswith("not a group")
    assert await rig.length(rig.broker.keys.groups) == 0
    # The next group arrives.
    await rig.submit(1)
    await rig.finish(rig.replica("a"), 1)
    (delivery,) = await rig.groups.read(1, BLOCK_MS)
    assert delivery.job_id


async def test_a_letter_that_nobody_can_read_is_shown_and_dropped(rig: Rig) -> None:
    await rig.broker.redis.xadd(rig.broker.keys.dead, {"x": "y"})
    letters = DeadLetters(rig.broker)
    (letter,) = await letters.page()
    assert letter.letter.error.startswith("not a letter")
    assert letter.prospect is Prospect.NO_JOB
    assert await letters.replay([letter]) == [Outcome.NO_JOB]
    assert await letters.drop([letter.entry_id]) == [Outcome.DROPPED]


@pytest.mark.parametrize(("field", "value"), [("version", "1"), ("swaps_s", "x"), ("since", "x"), ("version", b"\xff")])
async def test_a_heartbeat_that_no_replica_sends(field: str, value: str | bytes, rig: Rig) -> None:
    keys, registry = rig.broker.keys, ReplicaRegistry(rig.broker)
    beat = {"state": "serving", "version": f"{rig.run_id}:7:ab", "in_flight": 0, "swaps_s": 1.5, "since": 1}
    for name, own in (("good", {}), ("bad", {field: value})):
        await rig.broker.redis.zadd(keys.replicas, {name: 1})
        await rig.broker.redis.hset(keys.replica(name), mapping=beat | own)
    assert await registry.seqs_in_use() == {7}
    assert (await registry.told())["good"].swaps_s == 1.5


@pytest.mark.parametrize("value", [b"zzz", b"1.5", b"\xff"])
async def test_books_that_are_damaged_are_called_so(value: bytes, rig: Rig) -> None:
    await rig.broker.redis.hset(rig.broker.keys.counters, "dead", value)
    with pytest.raises(UnavailableError, match=rf"run {rig.run_id}: its data in the broker is damaged: .*"):
        await take_snapshot(rig.broker)


async def test_nobody_but_the_trainer_answers_who_asks_for_weights(parts: Parts) -> None:
    """Weights come with their own checksums: a reader of the request could answer it and send forged weights."""
    request = TransferRequest(id="0" * 32, version=f"{parts.everybody.run_id}:1:ab", receivers=1, device="cpu")
    asking = asyncio.create_task(Transfers(parts.replica).ask(request, WITHIN_S))
    with pytest.raises(UnavailableError, match="refuses user 'rollout'"):
        await Transfers(parts.replica).next()
    await parts.everybody.redis.acl_log_reset()
    assert await Transfers(parts.trainer).next() == request
    await Transfers(parts.trainer).answer(request, TransferAnswer(error="no"))
    with pytest.raises(WeightError, match="no"):
        await asking
