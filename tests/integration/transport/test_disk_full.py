"""The broker's disk is full: it keeps what it accepted, refuses what it cannot keep, and resumes when there is room.

The kernel refuses bytes beyond RLIMIT_FSIZE in any file, as it does on a full disk.
"""

from __future__ import annotations

import resource
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
import pytest

from dvp_rl.contract.errors import UnavailableError
from dvp_rl.contract.http import Verdict
from dvp_rl.contract.job import JobState, Sink
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker, valkey_binary
from dvp_rl.transport.health import queue_health
from dvp_rl.transport.jobs import JobQueue
from dvp_rl.transport.submission import Submission
from tests.integration.transport.rig import BLOCK_MS
from tests.kit.records import make_job
from tests.kit.wait import until_async

MOST_JOBS = 1000


@pytest.fixture(params=["everysec", "always"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    """A broker that ignores SIGXFSZ, because a full disk does not send it: a write beyond the limit only fails."""
    binary = tmp_path / "server"
    binary.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec {shlex.quote(str(valkey_binary()))} \"$@\"\n")
    binary.chmod(0o700)
    fsync: Literal["everysec", "always"] = request.param
    with EmbeddedBroker(tmp_path / "data", aof=True, fsync=fsync, binary=binary) as server:
        yield server


def room(server: EmbeddedBroker, limit: int) -> None:
    psutil.Process(server.pid).rlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


async def submit_until_refused(submission: Submission, run_id: str) -> tuple[list[str], UnavailableError]:
    accepted: list[str] = []
    for number in range(MOST_JOBS):
        job = make_job(run_id, number, sink=Sink.CLIENT)
        try:
            await submission.submit_client(job, limit=MOST_JOBS)
        except UnavailableError as error:
            return accepted, error
        accepted.append(job.job_id)
    raise AssertionError("nothing was refused")


@pytest.mark.usefixtures("impatient")
async def test_a_full_disk_of_the_broker_loses_nothing(server: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(server.url, run_id) as broker:
        submission = Submission(broker)
        room(server, 20_000)
        accepted, error = await submit_until_refused(submission, run_id)
        assert accepted
        if "No space left on device" in str(error):  # everysec: it stays up and waits for room
            assert (await queue_health(broker)).verdict is Verdict.BROKER_DISK
            async with await Broker.connect(server.url, run_id, create=False) as watching:
                assert (await queue_health(watching)).verdict is Verdict.BROKER_DISK
            room(server, resource.RLIM_INFINITY)
            await until_async(lambda: goes_on(broker))
        # With `always` it exits rather than confirm a write that it cannot keep.
        server.kill()
        server.start()
        for job_id in accepted:
            assert (await submission.status(job_id)).state is JobState.QUEUED
        assert (await queue_health(broker)).verdict is not Verdict.BROKER_DISK
        replica = JobQueue(broker, "a", clients=True)
        leases = await replica.claim(MOST_JOBS, BLOCK_MS)
        assert {lease.job.job_id for lease in leases} == {*accepted}


async def goes_on(broker: Broker) -> bool:
    return (await queue_health(broker)).verdict is not Verdict.BROKER_DISK
