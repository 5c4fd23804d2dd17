"""Training and clients share an engine's slots."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import OverloadedError
from dvp_rl.rollout.admission import Slots


def make_slots(capacity: int = 8, *, share: float = 0.25, trained: bool = True, divides: bool = True) -> Slots:
    slots = Slots(capacity, max_waiting=4, client_share=share, divides=divides)
    slots.trained = trained
    return slots


async def turns() -> None:
    """Lets every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("capacity", "share", "clients", "training"),
    [(8, 0.25, 2, 6), (8, 0.0, 1, 7), (8, 1.0, 8, 1), (1, 0.25, 1, 1), (32, 0.25, 8, 24), (7, 0.5, 3, 4)],
)
async def test_each_side_has_its_share_whatever_the_other_takes(
    capacity: int, share: float, clients: int, training: int
) -> None:
    slots = make_slots(capacity, share=share)
    assert await slots.clients.turn(1000) == clients
    assert slots.training.free == training
    slots.clients.ended(clients)
    with slots.training.hold(10 * capacity):
        assert slots.training.free < 1
        assert await slots.clients.turn(1000) == clients


async def test_training_takes_what_clients_leave() -> None:
    slots = make_slots()
    assert slots.training.free == 8
    assert await slots.clients.turn(1) == 1
    assert slots.training.free == 7
    with slots.training.hold(7):
        waiting = asyncio.create_task(slots.training.wait_free())
        await turns()
        assert not waiting.done()
        slots.clients.ended(1)
        assert await waiting == 1


async def test_without_a_trainer_clients_have_everything() -> None:
    slots = make_slots(trained=False)
    assert await slots.clients.turn(20) == 8
    waiting = asyncio.create_task(slots.clients.turn(12))
    slots.trained = True
    slots.clients.ended(6)
    await turns()
    assert not waiting.done(), "six of eight have ended, and clients' share is two"
    slots.clients.ended(1)
    assert await waiting == 1
    slots.trained = False
    assert await slots.clients.turn(12) == 6


async def test_those_in_line_are_woken_when_the_trainer_ends() -> None:
    slots = make_slots()
    await slots.clients.turn(2)
    waiting = asyncio.create_task(slots.clients.turn(9))
    await turns()
    slots.trained = False
    assert await waiting == 6


async def test_clients_take_turns() -> None:
    """A large job queues again for its remaining samples, behind jobs that came meanwhile."""
    slots, order = make_slots(), list[str]()

    async def generate(name: str, n: int) -> None:
        while n:
            granted = await slots.clients.turn(n)
            order.extend(name * granted)
            n -= granted

    large, small = (asyncio.create_task(generate(name, n)) for name, n in (("L", 6), ("s", 1)))
    for _ in range(5):
        await turns()
        slots.clients.ended(1)
    await asyncio.gather(large, small)
    assert "".join(order) == "LLLsLLL"


@pytest.mark.parametrize("trained", [True, False])
async def test_where_jobs_are_not_divided_clients_have_one_at_a_time(trained: bool) -> None:
    slots = make_slots(divides=False, trained=trained)
    assert await slots.clients.turn(1) == 1
    large, small = (asyncio.create_task(slots.clients.turn(n)) for n in (9, 1))
    await turns()
    assert not large.done()
    assert not small.done()
    slots.clients.ended(1)
    assert await large == 9
    await turns()
    assert not small.done()
    assert slots.training.free == 6
    slots.clients.ended(9)
    assert await small == 1


async def test_training_leaves_a_slot_to_whoever_is_in_line_for_it() -> None:
    """Otherwise the slot would be taken twice whenever a part ends."""
    slots = make_slots()
    await slots.clients.turn(2)
    with slots.training.hold(6):
        training = asyncio.create_task(slots.training.wait_free())
        client = asyncio.create_task(slots.clients.turn(9))
        await turns()
        for _ in range(3):
            slots.clients.ended(1)
            assert await client == 1
            client = asyncio.create_task(slots.clients.turn(9))
            await turns()
            assert not training.done()
        await cancel([client])
        slots.clients.ended(1)
        assert await training == 1


@pytest.mark.parametrize("divides", [True, False])
async def test_one_who_leaves_the_line_holds_up_nobody(divides: bool) -> None:
    slots = make_slots(divides=divides)
    await slots.clients.turn(2)
    first, second = (asyncio.create_task(slots.clients.turn(n)) for n in (2, 1))
    await turns()
    await cancel([first])
    slots.clients.ended(2)
    assert await second == 1
    assert slots.clients.running == 1


async def test_jobs_are_claimed_for_clients_whatever_requests_wait() -> None:
    slots = make_slots()
    with slots.clients.admit(50):
        assert slots.clients.free == 2
        with slots.clients.hold(2):
            assert slots.clients.free == 0
            assert slots.in_flight == 52
    assert (slots.clients.free, slots.in_flight) == (2, 0)


async def test_a_job_that_waits_for_its_weights_keeps_no_client_waiting() -> None:
    slots = make_slots()
    with slots.training.hold(8):
        assert await slots.clients.turn(2) == 2


async def test_requests_that_would_wait_too_long_are_refused() -> None:
    slots = make_slots()
    with ExitStack() as held:
        with slots.clients.hold(1000):
            held.enter_context(slots.clients.admit(5))
        with pytest.raises(
            OverloadedError,
            match=r"5 samples of requests are in flight .* and 2 more exceed its limit of 6"
            r", 2 that generate \(client_share of 8\) and 4 that wait \(max_waiting\)",
        ):
            held.enter_context(slots.clients.admit(2))
        held.enter_context(slots.clients.admit(1))
    with slots.clients.admit(1000), pytest.raises(OverloadedError), slots.clients.admit(1):
        pass
    slots.trained = False
    with slots.clients.admit(1), slots.clients.admit(11):
        assert slots.clients.requested == 12


async def test_a_caller_leaves_as_much_room_as_it_takes() -> None:
    clients = make_slots().clients  # of 6 samples
    with ExitStack() as held:
        # A caller's first request counts for at most half of what is free: its samples wait in line.
        with clients.admit(100, "alice"), clients.admit(100, "bob"):
            assert clients.requested == 3 + 1
            with pytest.raises(OverloadedError, match=r"^3 samples of requests of alice"):
                held.enter_context(clients.admit(1, "alice"))
            with clients.admit(100, "carol"), clients.admit(1, "dave"):
                assert clients.requested == 6
        for _ in range(3):
            held.enter_context(clients.admit(1, "alice"))
        with pytest.raises(
            OverloadedError, match=r"^3 samples of requests of alice .* and 1 more would leave room for 2 of 6, 2 that"
        ):
            held.enter_context(clients.admit(1, "alice"))
        held.enter_context(clients.admit(1, "bob"))
        with pytest.raises(OverloadedError, match=r"^1 samples of requests of bob"):
            held.enter_context(clients.admit(1, "bob"))
        # A caller without a name may take everything that is free.
        held.enter_context(clients.admit(2))
        with pytest.raises(OverloadedError, match="exceed its limit"):
            held.enter_context(clients.admit(1))
    assert clients.requested == 0
    with clients.admit(2, "alice"), clients.admit(1, "alice"):
        pass
