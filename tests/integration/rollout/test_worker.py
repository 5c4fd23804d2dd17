"""The queue side of a replica against a real broker: leases, dead letters, quarantine, the weight swap."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dvp_rl.cancellation import cancel
from dvp_rl.contract.canary import CANARY_NAME, Canary
from dvp_rl.contract.errors import EngineError, UnavailableError, WeightError
from dvp_rl.contract.group import Group, Sample
from dvp_rl.contract.http import WeightStatus
from dvp_rl.contract.job import Job, JobState, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.contract.transfer import Offer, Piece, TensorSpec, TransferAnswer, TransferRequest
from dvp_rl.contract.weights import WeightRoute
from dvp_rl.engines.fake import FakeEngine
from dvp_rl.engines.protocol import Engine
from dvp_rl.engines.tokenizer import load_tokenizer
from dvp_rl.engines.transformers import TransformersEngine
from dvp_rl.http.server import bound, http_server
from dvp_rl.http.settings import MAX_REQUESTS
from dvp_rl.logs import LogContext
from dvp_rl.rollout import worker as worker_module
from dvp_rl.rollout.admission import Slots
from dvp_rl.rollout.canary import Guard
from dvp_rl.rollout.loops import keep_doing
from dvp_rl.rollout.metrics import Metrics
from dvp_rl.rollout.prompts import Prompts
from dvp_rl.rollout.replica import Replica
from dvp_rl.rollout.swap import WeightSwap
from dvp_rl.rollout.weight_folders import WeightFolders
from dvp_rl.rollout.worker import Worker
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.jobs import Committed, JobQueue, Lease
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import Submission
from dvp_rl.weights.app import create_app
from dvp_rl.weights.download import WeightCache
from dvp_rl.weights.folder import folder_name, write_manifest
from dvp_rl.weights.registry import WeightRegistry
from dvp_rl.weights.transfers import Transfers
from tests.integration.engines.jobs import held
from tests.integration.engines.oracle import Oracle
from tests.integration.rollout.publishing import announce, flip_a_bit
from tests.kit.models import make_model
from tests.kit.ports import free_port
from tests.kit.wait import WITHIN_S, until_async
from tests.unit.trainer.test_canary import canary_of, learner_of


@dataclass(frozen=True)
class Running:
    worker: Worker
    swap: WeightSwap
    slots: Slots
    queue: JobQueue


@asynccontextmanager
async def working(
    broker: Broker,
    engine: Engine,
    model: Path,
    *,
    replica_id: str = "a",
    lease_s: float = 30.0,
    max_deliveries: int = 2,
    job_timeout_s: float = 60.0,
    following: bool = True,
    cache: WeightCache | None = None,
) -> AsyncIterator[Running]:
    await engine.start()
    slots = Slots(engine.capacity, max_waiting=0, client_share=0.5)
    metrics = Metrics()
    replica = Replica(replica_id, broker.run_id, engine, Prompts(load_tokenizer(model), engine), slots, metrics)
    folders, guard = WeightFolders(cache or WeightCache(model / "unused")), Guard(engine, metrics, every_s=600.0)
    swap = WeightSwap(engine, folders, metrics, LogContext(), guard)
    queue = JobQueue(broker, replica_id, lease_ms=int(lease_s * 1000), max_deliveries=max_deliveries)
    registry = WeightRegistry(broker)
    worker = Worker(replica, swap, queue, slots.training, lease_s=lease_s, job_timeout_s=job_timeout_s)
    worker.start()

    loops = [lambda: swap.follow(registry), swap.examine] if following else []
    followers = [asyncio.create_task(keep_doing("following", loop)) for loop in loops]
    try:
        yield Running(worker, swap, slots, queue)
    finally:
        await cancel(followers)
        await worker.stop(0.0)
        await engine.close()


def job(
    run_id: str, name: str, *, n: int = 1, max_tokens: int = 8, min_seq: int = 0, deadline: float | None = None
) -> Job:
    return Job(
        job_id=name,
        run_id=run_id,
        prompt_ids=[5, 6, 7],
        n=n,
        sampling=Sampling(max_tokens=max_tokens),
        sink=Sink.TRAIN,
        min_seq=min_seq,
        deadline=deadline,
    )


@pytest.fixture
async def fence(broker: Broker) -> AsyncIterator[int]:
    lease = TrainerLease(broker, "test")
    yield await lease.acquire()
    await lease.release()


async def submit(broker: Broker, fence: int, *jobs: Job) -> None:
    await Submission(broker).submit(jobs, fence=fence, limit=1000)


async def state(broker: Broker, name: str) -> JobState:
    return (await Submission(broker).status(name)).state


def fake(broker: Broker, **options: float | int) -> FakeEngine:
    return FakeEngine(**{"service_time_s": 0.01, "vocab_size": 96, **options}, version=f"{broker.run_id}:0:aa")  # type: ignore[arg-type]


async def test_groups_reach_the_trainer_whole(broker: Broker, fence: int, model: Path) -> None:
    names = [f"job-{i}" for i in range(12)]
    async with working(broker, fake(broker, capacity=4), model) as running:
        await submit(broker, fence, *(job(broker.run_id, name, n=3) for name in names))
        trainer, groups = GroupQueue(broker, fence=fence), {}
        async with asyncio.timeout(WITHIN_S):
            while len(groups) < len(names):
                for delivery in await trainer.read(20, 500):
                    assert isinstance(delivery.item, Group)
                    groups[delivery.job_id] = delivery.item
        await until_async(lambda: running.slots.in_flight == 0)
    assert sorted(groups) == sorted(names)
    assert {len(group.samples) for group in groups.values()} == {3}
    assert {group.replica_id for group in groups.values()} == {"a"}


async def test_no_more_is_claimed_than_fits(broker: Broker, fence: int, model: Path) -> None:
    async with working(broker, fake(broker, capacity=4, service_time_s=600), model) as running:
        await submit(broker, fence, *(job(broker.run_id, f"job-{i}", n=2) for i in range(2)))
        await until_async(lambda: running.slots.in_flight == 4)
        await submit(broker, fence, *(job(broker.run_id, f"late-{i}", n=2) for i in range(4)))
        await asyncio.sleep(0.2)
        assert running.slots.in_flight == 4
        assert {await state(broker, f"late-{i}") for i in range(4)} == {JobState.QUEUED}


async def test_a_job_that_cannot_run_here_dies_at_once(broker: Broker, fence: int, model: Path) -> None:
    async with working(broker, fake(broker, context_length=3), model):
        await submit(broker, fence, job(broker.run_id, "long"))
        await until_async(lambda: dead(broker, "long"))
    report = await Submission(broker).status("long")
    assert report.error is not None
    assert "context" in report.error


async def dead(broker: Broker, name: str) -> bool:
    return await state(broker, name) is JobState.DEAD


async def test_weights_that_give_nan_kill_the_job_after_its_deliveries(
    broker: Broker, fence: int, model: Path, tmp_path: Path
) -> None:
    sick = tmp_path / "sick"
    shutil.copytree(model, sick)
    tensors = load_file(sick / "model.safetensors")
    tensors["model.embed_tokens.weight"][40] = np.nan  # a token that the engine's check at start does not use
    save_file(tensors, sick / "model.safetensors", metadata={"format": "pt"})
    engine = TransformersEngine(sick, max_batch=4, threads=1, version=f"{broker.run_id}:0:aa")
    async with working(broker, engine, sick, max_deliveries=2):
        poisoned = job(broker.run_id, "nan").model_copy(update={"prompt_ids": np.array([40, 5], np.int32)})
        await submit(broker, fence, poisoned)
        await until_async(lambda: dead(broker, "nan"))
    report = await Submission(broker).status("nan")
    assert report.error is not None
    assert "finite" in report.error or "NaN" in report.error


async def test_a_generation_that_takes_too_long_counts_as_an_error(broker: Broker, fence: int, model: Path) -> None:
    slow = fake(broker, service_time_s=600)
    async with working(broker, slow, model, max_deliveries=1, job_timeout_s=0.2) as running:
        await submit(broker, fence, job(broker.run_id, "slow"))
        await until_async(lambda: dead(broker, "slow"))
        await until_async(lambda: running.slots.in_flight == 0)
        await until_async(lambda: slow.num_running == 0)
    assert "took longer" in str((await Submission(broker).status("slow")).error)


async def test_an_unexpected_error_comes_back_to_the_only_replica_and_is_counted(
    broker: Broker, fence: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, errors = fake(broker), [ValueError("a bug"), ValueError("another"), None, ValueError("a"), ValueError("b")]
    generate = engine.generate

    async def sometimes(job: Job) -> tuple[Sample, ...]:
        if error := errors.pop(0):
            raise error
        return await generate(job)

    monkeypatch.setattr(engine, "generate", sometimes)
    async with working(broker, engine, model, max_deliveries=3):
        await submit(broker, fence, job(broker.run_id, "lucky"))
        await until_async(lambda: finished(broker, "lucky"))
    monkeypatch.setattr(engine, "generate", sometimes)
    async with working(broker, engine, model, max_deliveries=2):
        await submit(broker, fence, job(broker.run_id, "poison"))
        await until_async(lambda: dead(broker, "poison"))
    assert (await Submission(broker).status("poison")).error == "ValueError('b')"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), EngineError("CUDA error")])
async def test_a_replica_that_always_fails_leaves_the_jobs_to_others(
    broker: Broker, fence: int, model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The broken one is always idle, and without pauses would take each job until the job is dead."""
    broken = fake(broker, capacity=2)

    async def fails(job: Job) -> tuple[Sample, ...]:
        raise error

    monkeypatch.setattr(broken, "generate", fails)
    names = [f"job-{i}" for i in range(30)]
    healthy = fake(broker, capacity=2, service_time_s=0.1)
    async with (
        working(broker, broken, model, replica_id="b", max_deliveries=5),
        working(broker, healthy, model, max_deliveries=5),
    ):
        await submit(broker, fence, *(job(broker.run_id, name) for name in names))
        await until_async(lambda: all_ended(broker, names))
    assert {await state(broker, name) for name in names} == {JobState.DONE}


async def all_ended(broker: Broker, names: list[str]) -> bool:
    return {await state(broker, name) for name in names} <= {JobState.DONE, JobState.DEAD}


async def test_a_group_that_cannot_be_committed_is_not_held_for_ever(
    broker: Broker, fence: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job returns to the same replica, as there is no other."""
    monkeypatch.setattr(worker_module, "PATIENCE_S", 0.0)
    async with working(broker, fake(broker), model, lease_s=0.5) as running:
        commit, outages = running.queue.commit, [UnavailableError("away"), UnavailableError("away")]

        async def sometimes(lease: Lease, group: Group) -> Committed:
            if outages:
                raise outages.pop()
            return await commit(lease, group)

        monkeypatch.setattr(running.queue, "commit", sometimes)
        await submit(broker, fence, job(broker.run_id, "late"))
        await until_async(lambda: finished(broker, "late"))


async def test_a_folder_that_cannot_be_looked_at_is_told_and_tried_again(
    broker: Broker, fence: int, model: Path, tmp_path: Path
) -> None:
    """The folder's name is too long, because permissions would not stop root."""
    async with working(broker, fake(broker), model) as running:
        announcement = await announce(broker, fence, tmp_path / "v1", model)
        await until_async(lambda: running.swap.status.version == announcement.version)
        hidden = tmp_path / ("v" * 300)
        await WeightRegistry(broker).announce(
            announcement.model_copy(update={"version": f"{broker.run_id}:2:bb", "folder": str(hidden)}), fence=fence
        )
        await until_async(lambda: running.swap.status.error is not None)
        assert running.swap.status.version == announcement.version
        assert f"{hidden}: File name too long" in str(running.swap.status.error)
        later = await announce(broker, fence, tmp_path / "v3", model)
        await until_async(lambda: running.swap.status == WeightStatus(version=later.version))


async def test_jobs_of_a_dead_replica_are_taken_over(broker: Broker, fence: int, model: Path) -> None:
    ghost = JobQueue(broker, "ghost", lease_ms=300)
    await submit(broker, fence, job(broker.run_id, "orphan"))
    assert len(await ghost.claim(1, 1000)) == 1
    async with working(broker, fake(broker), model, lease_s=0.5):
        await until_async(lambda: finished(broker, "orphan"))


async def finished(broker: Broker, name: str) -> bool:
    return await state(broker, name) is JobState.DONE


async def test_leases_are_renewed_for_as_long_as_it_takes(broker: Broker, fence: int, model: Path) -> None:
    rival = JobQueue(broker, "rival", lease_ms=1500)
    async with working(broker, fake(broker, service_time_s=3.0), model, lease_s=1.5) as running:
        await submit(broker, fence, job(broker.run_id, "long"))
        await until_async(lambda: running.slots.in_flight == 1)
        stolen = []
        while running.slots.in_flight:
            stolen += await rival.claim_expired(1)
            await asyncio.sleep(0.05)
        assert stolen == []
        await until_async(lambda: finished(broker, "long"))


async def test_a_lost_lease_stops_the_samples(broker: Broker, fence: int, model: Path) -> None:
    engine = fake(broker, service_time_s=600)
    async with working(broker, engine, model, lease_s=0.6) as running:
        await submit(broker, fence, job(broker.run_id, "stolen"))
        await until_async(lambda: engine.num_running == 1)
        # With a lease of 0, every other lease has expired for this thief.
        thief = JobQueue(broker, "thief", lease_ms=0)
        assert len(await thief.claim_expired(1)) == 1
        await until_async(lambda: engine.num_running == 0)
        await until_async(lambda: running.slots.in_flight == 0)
        assert await state(broker, "stolen") is JobState.RUNNING


async def test_a_new_version_is_served_and_stamped(broker: Broker, fence: int, model: Path, tmp_path: Path) -> None:
    async with working(broker, fake(broker), model) as running:
        announcement = await announce(broker, fence, tmp_path / "v1", model)
        await until_async(lambda: running.swap.status.version == announcement.version)
        await submit(broker, fence, job(broker.run_id, "after"))
        trainer = GroupQueue(broker, fence=fence)
        (delivery,) = await until_async(lambda: trainer.read(1, 500))
        assert isinstance(delivery.item, Group)
        assert delivery.item.samples[0].versions[0].version == announcement.version


async def test_a_job_that_wants_newer_weights_keeps_its_lease_and_waits(
    broker: Broker, fence: int, model: Path, tmp_path: Path
) -> None:
    async with working(broker, fake(broker), model) as running:
        await submit(broker, fence, job(broker.run_id, "eager", min_seq=1))
        await until_async(lambda: running.slots.in_flight == 1)
        assert await state(broker, "eager") is JobState.RUNNING
        announcement = await announce(broker, fence, tmp_path / "v1", model)
        groups = GroupQueue(broker, fence=fence)
        (delivery,) = await until_async(lambda: groups.read(1, 500))
        assert isinstance(delivery.item, Group)
        assert delivery.item.samples[0].versions[0].version == announcement.version


class Falls(FakeEngine):
    """An engine that dies at the first swap and recovers when told to."""

    outage = ""
    loads, num_starts = 0, 1
    waited_for = False

    def __init__(self, version: str) -> None:
        super().__init__(version=version)
        self.back = asyncio.Event()

    async def recovered(self) -> None:
        if self.outage:
            self.waited_for = True
            await self.back.wait()
            self.outage = ""

    async def load(self, folder: Path, version: str) -> None:
        self.loads += 1
        if self.loads == 1:
            self.outage = "killed"
        if self.outage:
            raise UnavailableError(self.outage)
        await super().load(folder, version)


async def test_an_outage_is_waited_for_however_many_jobs_want_new_weights(
    broker: Broker, fence: int, model: Path, tmp_path: Path
) -> None:
    engine = Falls(f"{broker.run_id}:0:aa")
    names = [f"eager-{number}" for number in range(8)]
    async with working(broker, engine, model) as running:
        for name in names:
            await submit(broker, fence, job(broker.run_id, name, min_seq=1))
        await until_async(lambda: running.slots.in_flight == len(names))
        announcement = await announce(broker, fence, tmp_path / "v1", model)
        await until_async(lambda: engine.waited_for)
        engine.back.set()
        for name in names:
            await until_async(lambda name=name: finished(broker, name))  # type: ignore[misc]
    assert (running.swap.seq, engine.loads) == (announcement.seq, 2)


@pytest.mark.parametrize("damage", ["flip", "missing", "manifest", "gone", "other"])
async def test_bad_weights_are_refused_named_and_replaced(
    damage: str, broker: Broker, fence: int, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "v1"
    hidden = tmp_path / "hidden"
    async with working(broker, fake(broker), model, following=False) as running:
        before = running.swap.status.version
        bad = await announce(broker, fence, folder, model)
        spoil(folder, damage, hidden)
        with pytest.raises(WeightError):
            await running.swap.refresh(WeightRegistry(broker))
        status = running.swap.status
        assert (status.version, status.loading) == (before, None)
        assert status.error is not None
        assert bad.version in status.error
        await submit(broker, fence, job(broker.run_id, "still"))
        await until_async(lambda: finished(broker, "still"))

        good = await announce(broker, fence, tmp_path / "v2", model)
        await running.swap.follow(WeightRegistry(broker))
        assert running.swap.status.version == good.version
        assert running.swap.status.error is None


async def test_a_bit_in_any_file_is_enough(broker: Broker, fence: int, model: Path, tmp_path: Path) -> None:
    """One flipped bit in any file makes the folder invalid, tokenizer and configuration included."""
    async with working(broker, fake(broker), model, following=False) as running:
        before = running.swap.status.version
        await announce(broker, fence, tmp_path / "v1", model)
        files = [file for file in (tmp_path / "v1").iterdir() if file.name != "dvp-manifest.json"]
        assert len(files) > 3
        for file in files:
            flip_a_bit(file)
            with pytest.raises(WeightError, match=f"{file.name}: SHA-256 differs"):
                await running.swap.refresh(WeightRegistry(broker))
            assert running.swap.status.version == before
            flip_a_bit(file)
        assert (await running.swap.refresh(WeightRegistry(broker))).version != before


def spoil(folder: Path, damage: str, hidden: Path) -> None:
    weights = folder / "model.safetensors"
    if damage == "flip":
        flip_a_bit(weights)
    elif damage == "missing":
        weights.unlink()
    elif damage == "manifest":
        (folder / "dvp-manifest.json").unlink()
    elif damage == "gone":
        folder.rename(hidden)
    else:
        write_manifest_again(folder)


def write_manifest_again(folder: Path) -> None:
    """Makes the folder a complete one of another version than announced."""
    (folder / "dvp-manifest.json").unlink()
    write_manifest(folder, "another", 9, step=9)


async def test_a_folder_that_was_repaired_is_loaded_without_another_announcement(
    broker: Broker, fence: int, model: Path, tmp_path: Path
) -> None:
    folder, hidden = tmp_path / "v1", tmp_path / "hidden"
    async with working(broker, fake(broker), model, following=False) as running:
        announcement = await announce(broker, fence, folder, model)
        folder.rename(hidden)
        await running.swap.follow(WeightRegistry(broker))
        assert running.swap.status.error is not None
        hidden.rename(folder)
        await running.swap.follow(WeightRegistry(broker))
        assert running.swap.status.version == announcement.version


@pytest.mark.usefixtures("impatient")
async def test_weights_are_fetched_where_the_volume_is_not_seen(
    broker: Broker, fence: int, model: Path, tmp_path: Path
) -> None:
    """The old weights stay in service until a server has the new ones, and the status says what is missing."""
    port, cache = free_port(), WeightCache(tmp_path / "cache")
    hidden = tmp_path / broker.run_id / folder_name(1)
    async with working(broker, fake(broker), model, following=False, cache=cache) as running:
        before = running.swap.status.version
        url = f"http://127.0.0.1:{port}/v1/weights/{broker.run_id}/{hidden.name}"
        announcement = await announce(broker, fence, tmp_path / "shared", model, url=url)
        hidden.parent.mkdir()
        (tmp_path / "shared").rename(hidden)
        await running.swap.follow(WeightRegistry(broker))
        status = running.swap.status
        assert status.version == before
        assert status.error is not None
        assert announcement.version in status.error
        assert str(port) in status.error
        await submit(broker, fence, job(broker.run_id, "still"))
        await until_async(lambda: finished(broker, "still"))

        with bound("127.0.0.1", port) as listener:
            http = http_server(create_app(tmp_path, (), MAX_REQUESTS), 0, MAX_REQUESTS)
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            await running.swap.follow(WeightRegistry(broker))
            http.should_exit = True
            await serving
        assert running.swap.status == WeightStatus(version=announcement.version)


async def test_a_replica_that_is_too_old_takes_no_jobs(broker: Broker, fence: int, model: Path, tmp_path: Path) -> None:
    folder, hidden = tmp_path / "v1", tmp_path / "hidden"
    async with working(broker, fake(broker), model, following=False) as running:
        announcement = await announce(broker, fence, folder, model, min_seq=1)
        folder.rename(hidden)
        await running.swap.follow(WeightRegistry(broker))
        assert running.swap.quarantined
        await submit(broker, fence, job(broker.run_id, "young"))
        await asyncio.sleep(0.3)
        assert not await finished(broker, "young")
        hidden.rename(folder)
        await running.swap.follow(WeightRegistry(broker))
        await until_async(lambda: finished(broker, "young"))
        assert running.swap.seq == announcement.seq


async def test_a_real_engine_serves_the_announced_weights(
    broker: Broker, fence: int, model: Path, tmp_path: Path
) -> None:
    engine = TransformersEngine(model, max_batch=4, threads=1, version=f"{broker.run_id}:0:aa")
    async with working(broker, engine, model) as running:
        announcement = await announce(broker, fence, tmp_path / "v1", model)
        await until_async(lambda: running.swap.status.version == announcement.version)
        await submit(broker, fence, job(broker.run_id, "real", n=2))
        groups = GroupQueue(broker, fence=fence)
        (delivery,) = await until_async(lambda: groups.read(1, 500))
        assert isinstance(delivery.item, Group)
        assert {span.version for s in delivery.item.samples for span in s.versions} == {announcement.version}


class Receiver(FakeEngine):
    """An engine that takes the weights it is offered, or refuses them."""

    refusal = ""
    offered: Offer | None = None

    def transfer_request(self, version: str) -> TransferRequest:
        return TransferRequest(id=uuid4().hex, version=version, receivers=1, device="cpu")

    async def receive(self, offer: Offer) -> None:
        self.offered = offer
        if self.refusal:
            raise WeightError(self.refusal)
        self._version = offer.version


def offer_of(version: str) -> Offer:
    piece = Piece(tensors=(TensorSpec(name="w", dtype="F32", shape=(1,)),), sha256="0" * 64)
    return Offer(version=version, host="h", port=1, size=2, group="0" * 32, backend="gloo", pieces=(piece,))


@asynccontextmanager
async def offering(broker: Broker, answer: Callable[[TransferRequest], TransferAnswer]) -> AsyncIterator[None]:
    """The trainer's side of one transfer."""

    async def serve() -> None:
        while (request := await Transfers(broker).next()) is None:
            pass
        await Transfers(broker).answer(request, answer(request))

    serving = asyncio.create_task(serve())
    yield
    await cancel([serving])


DISTRIBUTED = WeightRoute.DISTRIBUTED


async def test_weights_are_taken_from_the_trainer_without_a_look_at_the_folder(
    broker: Broker, fence: int, model: Path, tmp_path: Path
) -> None:
    engine = Receiver(service_time_s=0.01, vocab_size=96, version=f"{broker.run_id}:0:aa")
    async with working(broker, engine, model, following=False) as running:
        sent = await announce(broker, fence, tmp_path / "v1", model, route=DISTRIBUTED)
        (tmp_path / "v1").rename(tmp_path / "elsewhere")
        async with offering(broker, lambda request: TransferAnswer(offer=offer_of(request.version))):
            status = await running.swap.refresh(WeightRegistry(broker))
    assert (status.version, status.error, engine.offered) == (sent.version, None, offer_of(sent.version))


@pytest.mark.parametrize(
    ("refusal", "answer"),
    [
        ("cannot now", TransferAnswer(offer=offer_of("run:1:aa"))),
        ("", TransferAnswer(offer=offer_of("run:9:of-another"))),
        ("", TransferAnswer(error="no disk")),
    ],
)
async def test_the_folder_is_read_when_a_transfer_fails(
    refusal: str, answer: TransferAnswer, broker: Broker, fence: int, model: Path, tmp_path: Path
) -> None:
    engine = Receiver(service_time_s=0.01, vocab_size=96, version=f"{broker.run_id}:0:aa")
    engine.refusal = refusal
    async with working(broker, engine, model, following=False) as running:
        sent = await announce(broker, fence, tmp_path / "v1", model, route=DISTRIBUTED)
        async with offering(broker, lambda _: answer):
            status = await running.swap.refresh(WeightRegistry(broker))
    assert (status.version, status.error) == (sent.version, None)


class Liar(TransformersEngine):
    """An engine that may serve other weights than it is told to. It says when it has started again."""

    lies, outage, num_starts = True, "", 1

    async def recovered(self) -> None: ...

    async def load(self, folder: Path, version: str) -> None:
        await super().load(folder.parent / "other" if self.lies else folder, version)

    async def receive(self, offer: Offer) -> None:
        await self.load(Path(offer.host), offer.version)

    def transfer_request(self, version: str) -> TransferRequest:
        return TransferRequest(id=uuid4().hex, version=version, receivers=1, device="cpu")


@pytest.fixture
def examined(tmp_path: Path) -> Path:
    """A model whose folder has a canary; beside it `other` weights."""
    model = make_model(tmp_path / "model", endless=True)
    make_model(tmp_path / "other", seed=1, endless=True)
    (model / CANARY_NAME).write_text(canary_of(learner_of(model, tmp_path)).model_dump_json())
    return model


@dataclass
class Results:
    """All groups that have been committed."""

    queue: GroupQueue
    groups: dict[str, Group] = field(default_factory=dict)

    async def read(self) -> None:
        for delivery in await self.queue.read(20, 500):
            assert isinstance(delivery.item, Group)
            self.groups[delivery.job_id] = delivery.item

    async def check(self, model: Path, work: list[Job]) -> None:
        """All jobs end, and every token was drawn from the weights of `model`."""
        async with asyncio.timeout(WITHIN_S):
            while len(self.groups) < len(work):
                await self.read()
        oracle = Oracle(model)
        for asked in work:
            oracle.check_all(asked, self.groups[asked.job_id].samples)


async def test_nothing_that_wrong_weights_drew_is_committed(
    broker: Broker, fence: int, tmp_path: Path, examined: Path
) -> None:
    """Samples are in flight at the swap. All jobs end well once the engine serves what it says, under the same
    version."""
    engine = Liar(examined, max_batch=8, threads=1, version=f"{broker.run_id}:0:aa")
    async with working(broker, engine, examined, lease_s=60.0) as running:
        work = [job(broker.run_id, f"job-{i}", n=2, max_tokens=100) for i in range(40)]
        with held(engine, rows=8):
            await submit(broker, fence, *work)
            await until_async(lambda: running.slots.in_flight == 8)
            announced = await announce(broker, fence, tmp_path / "weights-1", examined, min_seq=1)
            await until_async(lambda: running.swap.status.loading == announced.version)
        await until_async(lambda: running.swap.status.wrong is not None)
        assert running.swap.status.version == announced.version
        assert running.swap.quarantined
        await until_async(lambda: running.slots.in_flight == 0)
        results = Results(GroupQueue(broker, fence=fence))
        await results.read()
        spans = [span for group in results.groups.values() for s in group.samples for span in s.versions]
        assert {span.version for span in spans} <= {f"{broker.run_id}:0:aa"}
        engine.lies = False
        await results.check(examined, work)
        assert running.swap.status.wrong is None


async def test_an_engine_that_started_again_is_examined_before_anything_leaves(
    broker: Broker, fence: int, tmp_path: Path, examined: Path
) -> None:
    """It recovered with other weights. The right ones are loaded under the same version."""
    engine = Liar(examined, max_batch=8, threads=1, version=f"{broker.run_id}:0:aa")
    engine.lies = False
    async with working(broker, engine, examined, lease_s=60.0) as running:
        announced = await announce(broker, fence, tmp_path / "weights-1", examined, min_seq=1)
        served = WeightStatus(version=announced.version)
        await until_async(lambda: running.swap.status == served)
        work = [job(broker.run_id, f"job-{i}", n=2) for i in range(10)]
        await TransformersEngine.load(engine, tmp_path / "other", announced.version)
        engine.num_starts += 1
        await submit(broker, fence, *work)
        await Results(GroupQueue(broker, fence=fence)).check(examined, work)
        assert running.swap.num_wrong == 1
        assert running.swap.status.wrong is None


class Silent(Liar):
    """An engine that is away whenever a canary is to be drawn, if told so."""

    lies, silent = False, True

    async def generate_first(self, job: Job) -> tuple[Sample, ...]:
        if self.silent:
            raise UnavailableError("away")
        return await super().generate_first(job)


async def test_a_canary_that_was_not_drawn_is_tried_again(
    broker: Broker, fence: int, tmp_path: Path, examined: Path
) -> None:
    """Nothing leaves meanwhile."""
    engine = Silent(examined, max_batch=8, threads=1, version=f"{broker.run_id}:0:aa")
    async with working(broker, engine, examined, lease_s=60.0) as running:
        work = [job(broker.run_id, f"job-{i}", n=2, min_seq=1) for i in range(4)]
        await submit(broker, fence, *work)
        await announce(broker, fence, tmp_path / "weights-1", examined, min_seq=1)
        await until_async(lambda: running.swap.seq == 1 and running.swap.failure)
        assert running.swap.failure == "the canary was not drawn: away"
        assert running.swap.failure in str(running.swap.status.error)
        assert running.swap.status.wrong is None
        results = Results(GroupQueue(broker, fence=fence))
        await results.read()
        assert not results.groups
        engine.silent = False
        await results.check(examined, work)
        assert not running.swap.failure


async def test_weights_that_the_trainer_sent_are_examined(
    broker: Broker, fence: int, tmp_path: Path, examined: Path
) -> None:
    canary = Canary.model_validate_json((examined / CANARY_NAME).read_bytes())

    def offer(request: TransferRequest) -> TransferAnswer:
        sent = offer_of(request.version).model_copy(update={"host": str(examined), "canary": canary})
        return TransferAnswer(offer=sent)

    engine = Liar(examined, max_batch=8, threads=1, version=f"{broker.run_id}:0:aa")
    async with working(broker, engine, examined, following=False) as running:
        await announce(broker, fence, tmp_path / "v1", examined, route=DISTRIBUTED)
        (tmp_path / "v1").rename(tmp_path / "elsewhere")
        async with offering(broker, offer):
            with pytest.raises(WeightError):
                await running.swap.refresh(WeightRegistry(broker))
        assert running.swap.status.wrong
        engine.lies = False
        async with offering(broker, offer):
            assert (await running.swap.refresh(WeightRegistry(broker))).wrong is None


async def test_what_is_served_after_a_failed_load_is_examined(
    broker: Broker, fence: int, tmp_path: Path, examined: Path
) -> None:
    """The load has failed when part of the weights was replaced."""

    class Torn(Liar):
        async def load(self, folder: Path, version: str) -> None:
            if version.startswith(f"{broker.run_id}:2:"):
                await TransformersEngine.load(self, tmp_path / "other", self.version)
                raise WeightError("torn")
            await super().load(folder, version)

    engine = Torn(examined, max_batch=8, threads=1, version=f"{broker.run_id}:0:aa")
    engine.lies = False
    async with working(broker, engine, examined, lease_s=60.0) as running:
        await announce(broker, fence, tmp_path / "weights-1", examined, min_seq=1)
        await until_async(lambda: running.swap.seq == 1 and running.swap.status.loading is None)
        await announce(broker, fence, tmp_path / "weights-2", examined, min_seq=1)
        await until_async(lambda: running.swap.status.wrong is not None)
        await announce(broker, fence, tmp_path / "weights-3", examined, min_seq=1)
        await until_async(lambda: running.swap.status.wrong is None)
        assert running.swap.seq == 3


async def test_a_job_for_weights_that_cannot_be_loaded_goes_to_another_replica(
    broker: Broker, fence: int, model: Path, tmp_path: Path
) -> None:
    async with working(broker, fake(broker), model) as running:
        bad = await announce(broker, fence, tmp_path / "v1", model)
        hidden = tmp_path / "hidden"
        (tmp_path / "v1").rename(hidden)
        await submit(broker, fence, job(broker.run_id, "eager", min_seq=bad.seq), job(broker.run_id, "any"))
        await until_async(lambda: finished(broker, "any"))
        other = JobQueue(broker, "other", lease_ms=60_000)
        (lease,) = await until_async(lambda: other.claim(1, 500))
        assert (lease.job.job_id, lease.deliveries) == ("eager", 0)
        await other.release(lease)
        hidden.rename(tmp_path / "v1")
        await until_async(lambda: finished(broker, "eager"))
        assert running.swap.seq == bad.seq


async def test_an_engine_that_takes_nothing_reads_the_folder_or_says_so(
    broker: Broker, fence: int, model: Path, tmp_path: Path
) -> None:
    async with working(broker, fake(broker), model, following=False) as running:
        first = await announce(broker, fence, tmp_path / "v1", model, route=DISTRIBUTED)
        assert (await running.swap.refresh(WeightRegistry(broker))).version == first.version
        await announce(broker, fence, tmp_path / "v2", model, route=DISTRIBUTED)
        (tmp_path / "v2").rename(tmp_path / "elsewhere")
        with pytest.raises(WeightError, match=r"transfer failed: engine fake can only read.*folder failed: .*v2"):
            await running.swap.refresh(WeightRegistry(broker))
        assert running.swap.status.version == first.version


async def test_waiting_for_weights_is_bounded(broker: Broker, fence: int, model: Path) -> None:
    async with working(broker, fake(broker), model, max_deliveries=1, job_timeout_s=0.3):
        await submit(broker, fence, job(broker.run_id, "never", min_seq=99))
        await until_async(lambda: dead(broker, "never"))
    assert "weights" in str((await Submission(broker).status("never")).error)
