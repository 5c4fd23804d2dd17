"""The weight registry."""

from __future__ import annotations

import asyncio
import time

import pytest

from dvp_rl.contract.errors import LeaseLostError, WeightError
from dvp_rl.contract.weights import Announcement
from dvp_rl.weights.registry import WeightRegistry
from tests.integration.transport.rig import Rig


def _announcement(run_id: str, seq: int, *, digest: str = "ab", min_seq: int = 0) -> Announcement:
    version = f"{run_id}:{seq}:{digest}"
    return Announcement(version=version, step=seq, folder="/weights", min_seq=min_seq, announced_at=time.time())


@pytest.fixture
def registry(rig: Rig) -> WeightRegistry:
    return WeightRegistry(rig.broker)


async def test_seqs_only_grow(rig: Rig, registry: WeightRegistry) -> None:
    seqs = await asyncio.gather(*(registry.next_seq(fence=rig.fence) for _ in range(20)))
    assert sorted(seqs) == list(range(1, 21))
    assert await registry.next_seq(fence=rig.fence, at_least=100) == 101
    assert await registry.next_seq(fence=rig.fence, at_least=7) == 102


async def test_a_seq_that_was_announced_is_not_allocated_again(rig: Rig, registry: WeightRegistry) -> None:
    await registry.announce(_announcement(rig.run_id, 8), fence=rig.fence)
    assert await registry.next_seq(fence=rig.fence) == 9


async def test_the_last_announcement_is_what_to_serve(rig: Rig, registry: WeightRegistry) -> None:
    assert await registry.latest() is None
    announcements = [_announcement(rig.run_id, seq) for seq in (1, 2, 5)]
    for announcement in announcements:
        await registry.announce(announcement, fence=rig.fence)
    assert await registry.latest() == announcements[-1]
    assert await registry.history() == {announcement.seq: announcement for announcement in announcements}


@pytest.mark.parametrize("seq", [3, 2])
async def test_an_older_version_is_refused(rig: Rig, registry: WeightRegistry, seq: int) -> None:
    await registry.announce(_announcement(rig.run_id, 3), fence=rig.fence)
    with pytest.raises(WeightError, match=f"{rig.run_id}:{seq}:cd is not newer than {rig.run_id}:3:ab"):
        await registry.announce(_announcement(rig.run_id, seq, digest="cd"), fence=rig.fence)


async def test_a_retried_announcement_is_one(rig: Rig, registry: WeightRegistry) -> None:
    for _ in range(2):
        await registry.announce(_announcement(rig.run_id, 1), fence=rig.fence)
    assert await rig.length(rig.broker.keys.versions) == 1


async def test_an_old_fence_publishes_nothing(rig: Rig, registry: WeightRegistry) -> None:
    for attempt in (
        registry.announce(_announcement(rig.run_id, 1), fence=rig.fence - 1),
        registry.next_seq(fence=rig.fence - 1),
        registry.pin([1], fence=rig.fence - 1),
    ):
        with pytest.raises(LeaseLostError):
            await attempt
    assert await registry.latest() is None
    assert await registry.pinned() == frozenset()


async def test_wait_newer_wakes_up(rig: Rig, registry: WeightRegistry) -> None:
    waiting = asyncio.create_task(registry.wait_newer(1, 20_000))
    # An announcement that is not newer does not end the wait.
    await registry.announce(_announcement(rig.run_id, 1), fence=rig.fence)
    newer = _announcement(rig.run_id, 2)
    await registry.announce(newer, fence=rig.fence)
    assert await asyncio.wait_for(waiting, 20) == newer


async def test_wait_newer_answers_at_once_or_not_at_all(rig: Rig, registry: WeightRegistry) -> None:
    assert await registry.wait_newer(0, 1) is None
    await registry.announce(_announcement(rig.run_id, 4), fence=rig.fence)
    assert await registry.wait_newer(4, 1) is None
    found = await registry.wait_newer(3, 0)
    assert found is not None
    assert found.seq == 4


async def test_pins_are_replaced(rig: Rig, registry: WeightRegistry) -> None:
    await registry.pin([1, 2], fence=rig.fence)
    await registry.pin([2, 3], fence=rig.fence)
    assert await registry.pinned() == {2, 3}
    await registry.pin([], fence=rig.fence)
    assert await registry.pinned() == frozenset()
