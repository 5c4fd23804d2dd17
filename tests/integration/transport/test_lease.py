"""The trainer's lease: one trainer per run."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from dvp_rl.contract.errors import ConfigError, LeaseLostError, WeightError
from dvp_rl.transport import lease as lease_module
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.lease import TrainerLease
from tests.kit.wait import WITHIN_S, until_async


async def _run_out(broker: Broker) -> None:
    """Expires the lease."""
    await broker.redis.delete(broker.keys.lease)


async def _refusal(newcomer: TrainerLease, holder: TrainerLease) -> str:
    """The message that refuses the newcomer while the holder renews."""
    attempt = asyncio.create_task(newcomer.acquire())
    while not attempt.done():
        await holder.renew()
        await asyncio.sleep(0.01)
    with pytest.raises(ConfigError) as refusal:
        await attempt
    return str(refusal.value)


async def test_a_second_trainer_is_refused_by_name(broker: Broker) -> None:
    holder = TrainerLease(broker, "qwen3.toml")
    await holder.acquire()
    message = await _refusal(TrainerLease(broker, "other.toml", ttl_s=1), holder)
    for word in (broker.run_id, "qwen3.toml", socket.gethostname(), str(os.getpid()), "UTC", "choose another run_id"):
        assert word in message


async def test_a_crashed_trainers_lease_is_waited_out(broker: Broker) -> None:
    crashed = await TrainerLease(broker, "crashed", ttl_s=0.2).acquire()
    assert await TrainerLease(broker, "next", ttl_s=0.2).acquire() > crashed


async def test_tokens_grow_also_over_a_wiped_broker(broker: Broker) -> None:
    tokens = []
    for wiped in (False, False, True, False):
        lease = TrainerLease(broker, "x")
        tokens.append(await lease.acquire())
        await lease.release()
        if wiped:
            await broker.redis.delete(broker.keys.fence)
            # The next token comes from the broker's clock.
            await until_async(lambda: _clock_passed(broker, tokens[-1]))
    assert tokens == sorted(set(tokens))


async def test_the_newest_trainer_goes_on_where_the_broker_has_forgotten_it(broker: Broker) -> None:
    older, newest = TrainerLease(broker, "x"), TrainerLease(broker, "x")
    await older.acquire()
    await _run_out(broker)
    await newest.acquire()
    await broker.redis.set(broker.keys.fence, older.token)  # a standby took over that lacks the last writes
    await older.renew()
    assert await GroupQueue(broker, fence=newest.token).read(1, 1) == []
    await newest.renew()
    with pytest.raises(LeaseLostError, match="another trainer took over"):
        await older.renew()


async def _clock_passed(broker: Broker, token: int) -> bool:
    seconds, micros = await broker.redis.time()
    return bool(seconds * 1000 + micros // 1000 > token)


async def test_a_token_is_above_any_that_the_run_remembers(broker: Broker) -> None:
    """A broker that was wiped and whose clock was set back has forgotten the tokens it issued."""
    seconds, _ = await broker.redis.time()
    remembered = (seconds + 3600) * 1000
    assert await TrainerLease(broker, "x", above=remembered).acquire() == remembered + 1


async def test_a_retried_acquisition_keeps_its_token(broker: Broker) -> None:
    lease = TrainerLease(broker, "x")
    assert await lease.acquire() == await lease.acquire()


async def test_the_lease_runs_out_unless_renewed(broker: Broker) -> None:
    lease = TrainerLease(broker, "x", ttl_s=30)
    await lease.acquire()
    await broker.redis.pexpire(broker.keys.lease, 1000)
    await lease.renew()
    assert 1000 < await broker.redis.pttl(broker.keys.lease) <= 30_000


async def test_a_stalled_trainer_with_nobody_in_its_place_carries_on(broker: Broker) -> None:
    lease = TrainerLease(broker, "x")
    await lease.acquire()
    await _run_out(broker)
    await lease.renew()
    assert "is being trained by x" in await _refusal(TrainerLease(broker, "y", ttl_s=1), lease)


async def test_a_stopped_trainer_that_wakes_up_late_is_refused(broker: Broker) -> None:
    stopped, present = TrainerLease(broker, "old"), TrainerLease(broker, "new")
    await stopped.acquire()
    await _run_out(broker)
    await present.acquire()
    with pytest.raises(LeaseLostError, match=f"another trainer took over run {broker.run_id}"):
        await stopped.renew()
    await stopped.release()
    assert "is being trained by new" in await _refusal(TrainerLease(broker, "third", ttl_s=1), present)


async def test_a_trainer_finds_its_place_again_on_a_wiped_broker(broker: Broker) -> None:
    lease = TrainerLease(broker, "x")
    await lease.acquire()
    await broker.redis.delete(broker.keys.lease, broker.keys.fence)
    await lease.renew()
    assert "is being trained by x" in await _refusal(TrainerLease(broker, "y", ttl_s=1), lease)


async def test_held_renews_and_releases(broker: Broker) -> None:
    async with TrainerLease(broker, "x", ttl_s=3).held() as token:
        await broker.redis.pexpire(broker.keys.lease, 2000)
        await until_async(lambda: _ttl_above(broker, 2000))
        assert await broker.redis.hget(broker.keys.lease, "token") == str(token).encode()
    assert await broker.redis.exists(broker.keys.lease) == 0


async def _ttl_above(broker: Broker, milliseconds: int) -> bool:
    return bool(await broker.redis.pttl(broker.keys.lease) > milliseconds)


async def test_held_stops_the_body_when_the_lease_is_lost(broker: Broker) -> None:
    async def train() -> None:
        async with TrainerLease(broker, "x", ttl_s=0.1).held():
            await _run_out(broker)
            await broker.redis.incr(broker.keys.fence)
            await asyncio.Event().wait()

    with pytest.raises(LeaseLostError):
        await train()
    # The cancellation by the lease has been consumed: this task can wait again.
    await asyncio.wait_for(asyncio.sleep(0), 5)


async def test_held_names_the_lost_lease_whatever_the_body_ends_with(broker: Broker) -> None:
    """An inner task group may cancel the body, too, when one of its tasks notices the loss first."""

    async def train() -> None:
        async with TrainerLease(broker, "x", ttl_s=0.1).held():
            await _run_out(broker)
            await broker.redis.incr(broker.keys.fence)
            body = asyncio.current_task()
            assert body is not None
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                body.cancel()
                raise RuntimeError("noticed by itself") from None

    with pytest.raises(LeaseLostError):
        await train()
    await asyncio.wait_for(asyncio.sleep(0), 5)


async def test_held_names_the_lost_lease_to_a_body_that_failed_before_the_next_renewal(broker: Broker) -> None:
    async def train() -> None:
        async with TrainerLease(broker, "x").held():
            await broker.redis.incr(broker.keys.fence)
            raise WeightError("the new trainer has swept what this one was writing")

    with pytest.raises(LeaseLostError):
        await train()


@pytest.mark.parametrize("wiped", [False, True])
async def test_held_lets_an_error_through_while_nobody_took_over(broker: Broker, wiped: bool) -> None:
    async def train() -> None:
        async with TrainerLease(broker, "x").held():
            if wiped:
                await broker.redis.delete(broker.keys.lease, broker.keys.fence)
            raise WeightError("no room")

    with pytest.raises(WeightError):
        await train()
    assert await broker.redis.exists(broker.keys.lease) == 0


async def test_held_ends_well_when_another_trainer_came_at_the_end(broker: Broker) -> None:
    async with TrainerLease(broker, "x").held():
        await broker.redis.incr(broker.keys.fence)


async def test_held_lets_a_real_cancellation_through(broker: Broker) -> None:
    entered = asyncio.Event()

    async def train() -> None:
        async with TrainerLease(broker, "x").held():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(train())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await broker.redis.exists(broker.keys.lease) == 0


async def test_held_waits_for_no_broker_at_its_end(
    own_broker: EmbeddedBroker, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def train(broker: Broker) -> None:
        async with TrainerLease(broker, "x").held():
            own_broker.kill()
            raise OSError("no room")

    monkeypatch.setattr(lease_module, "FAREWELL_S", 0.2)
    async with asyncio.timeout(WITHIN_S), await Broker.connect(own_broker.url, run_id, patience_s=2 * WITHIN_S) as far:
        with pytest.raises(OSError, match="no room"):
            await train(far)
