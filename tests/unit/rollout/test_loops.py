"""Repetition of failing steps, and the logging of their failures."""

from __future__ import annotations

import asyncio
import errno
from itertools import islice

import pytest

from dvp_rl.contract.errors import UnavailableError
from dvp_rl.rollout.loops import MAX_DELAY_S, MIN_DELAY_S, keep_doing, pauses


def test_pauses_grow_and_differ() -> None:
    """Replicas that lose the broker at the same moment must not retry at the same moment."""
    one, other = (list(islice(pauses(), 30)) for _ in range(2))
    assert one != other
    assert all(0 < pause <= MAX_DELAY_S for pause in one)
    assert MIN_DELAY_S / 2 <= one[0] <= MIN_DELAY_S
    assert min(one[10:]) >= MAX_DELAY_S / 2
    assert len({round(pause, 6) for pause in one[10:]}) > 1


@pytest.mark.parametrize(
    ("error", "traced"),
    [
        (UnavailableError("away"), False),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (FileNotFoundError(errno.ENOENT, "No such file"), True),
        (RuntimeError("a mistake"), True),
    ],
)
async def test_only_a_mistake_is_said_with_its_traceback(
    error: Exception, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    works_again = asyncio.Event()
    steps = iter([error, error])

    async def step() -> None:
        if (failure := next(steps, None)) is not None:
            raise failure
        works_again.set()
        await asyncio.Event().wait()

    doing = asyncio.create_task(keep_doing("following", step))
    await works_again.wait()
    doing.cancel()
    (record,) = [record for record in caplog.records if "following" in record.getMessage()]
    assert str(error) in record.getMessage()
    assert bool(record.exc_info) is traced
