"""The trainer's side of the queue against a real broker; the test itself plays the replica."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import ConfigError, EngineError, GroupMismatchError, UnavailableError
from dvp_rl.contract.group import EngineFacts, FinishReason, Group, LogprobKind, Sample, VersionSpan
from dvp_rl.contract.http import ReplicaState
from dvp_rl.contract.job import Job, Sink, job_position
from dvp_rl.contract.keys import TRAINER
from dvp_rl.contract.sampling import Sampling
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.dead_letters import DeadLetters
from dvp_rl.transport.dead_letters import Outcome as Replay
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.jobs import JobQueue, Lease
from dvp_rl.transport.pending import Stream, pending
from dvp_rl.transport.replicas import ReplicaBeat, ReplicaRegistry
from dvp_rl.weights.registry import WeightRegistry
from dvp_trainer.config import TrainSettings
from dvp_trainer.data.batch import Batch
from dvp_trainer.loop import Run, train
from dvp_trainer.queue import evaluator as evaluate_module
from dvp_trainer.queue import feeder as feeder_module
from dvp_trainer.report.sinks import read_metrics
from dvp_trainer.resume.checkpoint import Checkpoints
from dvp_trainer.resume.ledger import read_ledger
from dvp_trainer.setup import open_run
from tests.integration.transport.world import dump, look, put_back
from tests.kit.replicas import ReplicaProcess
from tests.kit.runs import HELDOUT, MODEL, config
from tests.kit.wait import WITHIN_S, until_async

GROUPS, N = 2, 4


class Player:
    """A replica whose groups the test determines. By default the first sample is right and the others are wrong."""

    def __init__(self, broker: Broker, run: Run) -> None:
        self.jobs = JobQueue(broker, "player", lease_ms=60_000)
        self.run, self.tokenizer = run, run.feeder.scorer.tokenizer
        self.version = run.publisher.announced.version
        self.served: list[str] = []

    async def claim(self, count: int) -> list[Lease]:
        leases: list[Lease] = []
        while len(leases) < count:
            leases += await self.jobs.claim(count - len(leases), 100)
        return leases

    async def play(self, count: int, change: Callable[[Lease], dict[str, Any]] = lambda lease: {}) -> None:
        for _ in range(count):
            (lease,) = await self.claim(1)
            await self.jobs.commit(lease, self.group(lease, **change(lease)))
            self.served.append(lease.job.job_id)

    def group(self, lease: Lease, *, right: int = 1, version: str | None = None, **changes: Any) -> Group:
        job = lease.job
        answer = self.run.feeder.asked.prompts.row_at(job_position(job.job_id)[0]).answer
        assert answer is not None
        texts = [answer] * right + ["7"] * (N - right)
        group = Group(
            job_id=job.job_id,
            run_id=job.run_id,
            prompt_ids=job.prompt_ids,
            sampling=job.sampling,
            samples=tuple(self.sample(text, version or self.version) for text in texts),
            sink=job.sink,
            replica_id="player",
            engine=EngineFacts(name="player", version="1", dtype="float32"),
        )
        return group.model_copy(update=changes)

    def sample(self, text: str, version: str) -> Sample:
        ids = [*self.tokenizer.encode(text), min(self.tokenizer.eos_ids)]
        T = len(ids)
        return Sample(
            token_ids=np.array(ids),
            logprobs=np.full(T, -0.1, np.float32),
            kept_mass=np.full(T, 0.99, np.float32),
            kept_count=np.full(T, 3),
            finish_reason=FinishReason.STOP,
            versions=(VersionSpan(version=version, start=0, end=T),),
            seed=0,
        )


Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path, run_id: str) -> Open:
    @asynccontextmanager
    async def open_it(url: str, **overrides: str) -> AsyncIterator[tuple[Run, Player]]:
        small = {"batch__groups": str(GROUPS), "batch__max_staleness": "0", "sampling__n": str(N)}
        settings = TrainSettings.load(config(tmp_path, run_id, url, **(small | overrides)))
        async with open_run(settings) as run, await Broker.connect(url, run_id) as broker:
            yield run, Player(broker, run)

    return open_it


@pytest.fixture
def own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "own_rewards.py"
    file.write_text(
        """
import asyncio, time
def slow_if_wrong(completion, answer, *, prompt, extra):
    if completion != answer: time.sleep(600)
    return 1.0
def raises_if_wrong(completion, answer, *, prompt, extra):
    if completion != answer: raise ValueError("not a sum")
    return 1.0
async def trl(prompts, completions, completion_ids, answer, **kwargs):
    await asyncio.sleep(0)
    assert len(completions) == len(completion_ids) == len(prompts)
    return [float(text == right) for text, right in zip(completions, answer)]
"""
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return file


async def both(run: Run, *plays: Any) -> Batch:
    batch, *_ = await asyncio.gather(asyncio.wait_for(run.feeder.next_batch(), 30), *plays)
    assert isinstance(batch, Batch)
    return batch


def ids_of(batch: Batch) -> list[tuple[int, int]]:
    return [job_position(scored.group.job_id) for scored in batch.groups]


def outcomes(run: Run) -> list[tuple[tuple[int, int], str]]:
    return [(job_position(e["job_id"]), e["outcome"]) for e in read_ledger(run.feeder.consumed.path)]


async def test_a_wiped_broker_with_its_clock_set_back_gives_no_older_token(
    broker_url: str, run_id: str, opened: Open
) -> None:
    async with opened(broker_url) as (run, player):
        remembered = run.feeder.fence + 3_600_000
        Checkpoints(run.checkpoints.root, keep=1).claim(remembered)  # by a clock that was right
        await player.jobs.broker.redis.delete(player.jobs.broker.keys.fence)
    async with opened(broker_url) as (run, _):
        assert run.feeder.fence == remembered + 1


async def test_no_more_is_asked_for_than_the_run_can_train(broker_url: str, opened: Open) -> None:
    """Groups beyond that would stay in the broker."""
    async with opened(broker_url, steps="2", batch__max_staleness="5") as (run, player):
        assert run.feeder.in_flight_limit == 6 * GROUPS
        for _ in range(2):
            await run.feeder.close_batch(await both(run, player.play(GROUPS)))
        await run.save()
        redis, keys = player.jobs.broker.redis, player.jobs.broker.keys
        assert await redis.scard(keys.in_flight) == await redis.xlen(keys.jobs) == await redis.xlen(keys.groups) == 0
        assert run.feeder.books.cursor == 2 * GROUPS, "never asked for"


async def test_what_ends_untrained_is_replaced_to_the_end(broker_url: str, opened: Open) -> None:
    async with opened(broker_url, steps="1", batch__max_staleness="5", batch__refill="true") as (run, player):
        batch = await both(run, player.play(2 * GROUPS, lambda lease: {"right": N} if first(lease) else {}))
        assert ids_of(batch) == [(GROUPS, 0), (GROUPS + 1, 0)]


def first(lease: Lease) -> bool:
    """Whether the job is among the first GROUPS."""
    return job_position(lease.job.job_id)[0] < GROUPS


async def test_a_batch_is_scored_settled_and_acknowledged(broker_url: str, opened: Open) -> None:
    async with opened(broker_url) as (run, player):
        batch = await both(run, player.play(GROUPS))
        assert ids_of(batch) == [(0, 0), (1, 0)]
        assert [scored.rewards for scored in batch.groups] == [(1.0, 0.0, 0.0, 0.0)] * GROUPS
        redis, keys = player.jobs.broker.redis, player.jobs.broker.keys
        assert await redis.scard(keys.in_flight) == GROUPS
        await run.feeder.close_batch(batch)
        assert await redis.scard(keys.uncheckpointed) == GROUPS
        assert await redis.xlen(keys.groups) == GROUPS
        await run.save()
        assert await redis.scard(keys.uncheckpointed) == 0
        assert await redis.xlen(keys.groups) == 0
        assert ids_of(await both(run, player.play(GROUPS))) == [(2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling": Sampling(log_min_p=-2.5, max_tokens=6)}, "sampling.log_min_p is -2.5, expected -3.0"),
        ({"sampling": Sampling(log_min_p=-3.0, temperature=0.7)}, "sampling.temperature is 0.7, expected 1.0"),
        (
            {"engine": EngineFacts(name="x", version="1", dtype="f", logprob_kind=LogprobKind.FULL)},
            "engine.logprob_kind is full, expected constrained",
        ),
        ({"prompt_ids": np.array([5, 6], np.int32)}, "prompt_ids is 2 tokens of "),
    ],
)
async def test_a_group_of_another_policy_is_refused_and_its_prompt_comes_back(
    broker_url: str, opened: Open, caplog: pytest.LogCaptureFixture, change: dict[str, Any], named: str
) -> None:
    async with opened(broker_url) as (run, player):
        batch = await both(
            run, player.play(GROUPS + 1, lambda lease: change if lease.job.job_id.endswith(":000000001:0") else {})
        )
        assert ids_of(batch) == [(0, 0), (1, 1)]
        assert outcomes(run) == [((1, 0), "refused")]
        assert named in caplog.text


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sampling__n": str(N + 1)}, f"samples is {N}, expected {N + 1}"),
        ({"seed": "1", "out_dir": "another"}, "prompt_ids is "),
    ],
)
async def test_leftovers_of_earlier_settings_are_told_once_and_replaced(
    broker_url: str,
    tmp_path: Path,
    opened: Open,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, str],
    named: str,
) -> None:
    async with opened(broker_url) as (run, player):
        await run.save()
        await player.play(GROUPS)
    if "out_dir" in changed:
        changed = changed | {"out_dir": str(tmp_path / "another")}

    def fitting(lease: Lease) -> dict[str, Any]:
        group = player.group(lease)
        return {"samples": (group.samples * 2)[: lease.job.n]}

    async with opened(broker_url, **changed) as (run, player):
        batch = await both(run, player.play(GROUPS, fitting))
        assert ids_of(batch) == [(0, 1), (1, 1)]
    (told,) = [record for record in caplog.records if record.name == feeder_module.__name__ and record.levelno >= 30]
    assert told.message.startswith("leftovers of earlier settings")
    assert named in told.message


async def test_replicas_with_wrong_weights_are_named_once(
    broker_url: str, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened(broker_url) as (run, player):
        replicas = ReplicaRegistry(player.jobs.broker)
        for wrong in ("", "8 of 8 greedy walks leave the trainer's", ""):
            await replicas.beat(ReplicaBeat("liar", ReplicaState.SERVING, player.version, 0, wrong=wrong))
            for _ in range(2):
                await run.tell()
    told = [record.message for record in caplog.records if "liar" in record.message]
    assert told == [
        "replica liar takes no work: 8 of 8 greedy walks leave the trainer's",
        "replica liar takes work again",
    ]


async def test_a_replica_that_is_always_wrong_stops_the_run(broker_url: str, opened: Open) -> None:
    wrong = {"sampling": Sampling(log_min_p=-2.5)}
    with pytest.raises(BaseExceptionGroup) as caught:
        async with opened(broker_url, batch__max_attempts="2") as (run, player):
            await both(run, player.play(2 * GROUPS, lambda lease: wrong))
    assert caught.value.subgroup(GroupMismatchError) is not None


async def test_stale_groups_come_back_as_the_next_attempt(broker_url: str, opened: Open) -> None:
    async with opened(broker_url) as (run, player):
        old = player.version
        await run.publisher.publish(1)
        player.version = run.publisher.announced.version
        batch = await both(
            run, player.play(GROUPS + 1, lambda lease: {"version": old} if lease.job.job_id.endswith("0:0") else {})
        )
        assert ids_of(batch) == [(0, 1), (1, 0)]
        assert [scored.staleness for scored in batch.groups] == [0, 0]
        assert outcomes(run) == [((0, 0), "stale")]


async def test_the_oldest_token_decides_how_stale_a_group_is(broker_url: str, opened: Open) -> None:
    async with opened(broker_url, batch__max_staleness="5") as (run, player):
        old = player.version
        for step in (1, 2):
            await run.publisher.publish(step)
        player.version = run.publisher.announced.version

        def partly_old(lease: Lease) -> dict[str, Any]:
            *samples, last = player.group(lease).samples
            versions = (VersionSpan(version=player.version, start=0, end=1), VersionSpan(version=old, start=1, end=2))
            return {"samples": (*samples, last.model_copy(update={"versions": versions}))}

        batch = await both(run, player.play(1, partly_old), player.play(GROUPS - 1))
        assert [scored.staleness for scored in batch.groups] == [2, 0]


async def test_jobs_ask_for_weights_that_their_batch_may_still_train(broker_url: str, opened: Open) -> None:
    async with opened(broker_url, batch__max_staleness="1") as (run, player):
        wanted: list[int] = []

        def note(lease: Lease) -> dict[str, Any]:
            wanted.append(lease.job.min_seq)
            return {}

        first = run.publisher.announced.seq
        batch = await both(run, player.play(GROUPS, note))
        await run.publisher.publish(1)
        await run.feeder.close_batch(batch)
        # Jobs of the next batch were submitted before the publish; later ones will be one step old when trained.
        await player.play(2 * GROUPS, note)
        assert wanted == [first] * 2 * GROUPS + [run.publisher.announced.seq] * GROUPS


async def test_several_updates_per_batch_make_nothing_stale(broker_url: str, opened: Open) -> None:
    """Consecutive versions are one batch apart, regardless of the optimizer steps between them."""
    steps, updates = 4, 2 * GROUPS
    many = {"batch__groups": str(updates), "batch__updates": str(updates), "batch__max_staleness": "1"}
    # Settings under which nothing is vetoed: an update without samples would make no step.
    many |= {"sampling__log_min_p": "-80", "correction__veto": "1e-300"}
    async with opened(broker_url, steps=str(steps), **many) as (run, player):

        def drawn_now(lease: Lease) -> dict[str, Any]:
            return {"version": run.publisher.announced.version}

        await player.play(2 * updates, drawn_now)
        playing = asyncio.create_task(player.play(10**6, drawn_now))
        await asyncio.wait_for(train(run), WITHIN_S)
        await cancel([playing])
        assert run.learner.optimizer_steps == steps * updates
        assert run.weight_steps == steps
        assert [outcome for _, outcome in outcomes(run)] == ["trained"] * steps * updates
    trained = [record for record in read_metrics(run.settings.out_dir / "metrics.jsonl") if "staleness/max" in record]
    assert [record["staleness/max"] for record in trained][:2] == [0, 1]


async def test_stale_groups_are_trained_where_the_policy_says_so(broker_url: str, opened: Open) -> None:
    async with opened(broker_url, batch__on_stale="train") as (run, player):
        await run.publisher.publish(1)
        batch = await both(run, player.play(GROUPS))
        assert [scored.staleness for scored in batch.groups] == [1, 1]


async def test_a_dead_job_is_replaced_by_the_next_prompt(broker_url: str, opened: Open) -> None:
    async with opened(broker_url) as (run, player):

        async def one_dies() -> None:
            first, second = await player.claim(GROUPS)
            await player.jobs.fail(first, "boom", fatal=True)
            await player.jobs.commit(second, player.group(second))
            await player.play(1)

        assert ids_of(await both(run, one_dies())) == [(1, 0), (2, 0)]
        assert outcomes(run) == [((0, 0), "dead")]


async def test_nothing_but_dead_letters_stops_the_run_until_they_are_replayed(
    broker_url: str, run_id: str, opened: Open
) -> None:
    async def all_die(player: Player) -> None:
        for _ in range(2 * GROUPS):
            (lease,) = await player.claim(1)
            await player.jobs.fail(lease, "the engine is on fire", fatal=True)

    with pytest.raises(BaseExceptionGroup) as caught:
        async with opened(broker_url) as (run, player):
            await both(run, all_die(player))
    stopped = caught.value.subgroup(EngineError)
    assert stopped is not None
    assert "4 jobs died in a row" in repr(stopped)
    assert "on fire" in repr(stopped)
    # The cause is fixed and the letters are replayed: the same positions are trained after all.
    async with await Broker.connect(broker_url, run_id) as broker:
        letters = DeadLetters(broker)
        outcomes = [outcome async for page in letters.pages() for outcome in await letters.replay(page)]
    assert outcomes == [Replay.REPLAYED] * 2 * GROUPS
    async with opened(broker_url) as (run, player):
        playing = asyncio.create_task(player.play(10**6))
        assert ids_of(await both(run)) == [(0, 0), (1, 0)]
        assert run.feeder.metrics()["groups/dead"] == 0
        await cancel([playing])


async def test_refill_replaces_groups_without_signal_up_to_its_limit(broker_url: str, opened: Open) -> None:
    async with opened(broker_url, batch__refill="true", batch__refill_limit="2") as (run, player):
        first_is_wrong = player.play(GROUPS + 1, lambda lease: {"right": int(job_position(lease.job.job_id) != (0, 0))})
        batch = await both(run, first_is_wrong)
        assert ids_of(batch) == [(1, 0), (2, 0)]
        assert run.feeder.metrics()["groups/filtered"] == 1
        await run.feeder.close_batch(batch)
        solved = await both(run, player.play(2 * GROUPS, lambda lease: {"right": N}))
        assert ids_of(solved) == [(5, 0), (6, 0)]
        assert run.learner.step(solved)["optimizer/updates"] == 0


async def test_groups_of_a_lost_timeline_are_kept_for_their_turn(broker_url: str, opened: Open) -> None:
    async with opened(broker_url) as (run, player):
        for _ in range(2):
            await run.feeder.close_batch(await both(run, player.play(GROUPS)))
        # Without a checkpoint the next incarnation starts at position 0, with four finished groups waiting.
    async with opened(broker_url) as (run, player):
        for expected in ([(0, 0), (1, 0)], [(2, 0), (3, 0)]):
            batch = await both(run)
            assert ids_of(batch) == expected
            await run.feeder.close_batch(batch)
        assert player.served == []
        assert run.feeder.metrics()["groups/duplicates"] == 0


async def test_later_attempts_of_a_lost_timeline_are_kept_for_their_turn(broker_url: str, opened: Open) -> None:
    async with opened(broker_url) as (run, player):
        old = player.version
        await run.publisher.publish(1)
        # Position 0 is stale twice; then the trainer crashes without a checkpoint.
        drawn: list[str] = []

        def stale_at_first(lease: Lease) -> dict[str, Any]:
            drawn.append(lease.job.job_id.partition(":")[2])
            return {"version": old if lease.job.job_id.endswith(("00:0", "00:1")) else run.publisher.announced.version}

        await both(run, player.play(GROUPS + 2, stale_at_first))
    assert sorted(drawn) == ["000000000:0", "000000000:1", "000000000:2", "000000001:0"]
    async with opened(broker_url) as (run, player):
        # The drawn groups are used again, attempt by attempt, so that the trainer never waits for a finished job.
        await run.publisher.publish(1)
        await run.feeder.close_batch(await both(run))
        assert player.served == []
        assert {position for (position, _), outcome in outcomes(run) if outcome == "trained"} == {0, 1}


async def test_what_a_lost_timeline_drew_in_vain_is_acknowledged(broker_url: str, opened: Open) -> None:
    async with opened(broker_url) as (run, player):
        old = player.version
        await run.publisher.publish(1)
        fresh = run.publisher.announced.version
        await both(
            run,
            player.play(GROUPS + 1, lambda lease: {"version": old if lease.job.job_id.endswith("00:0") else fresh}),
        )
    async with opened(broker_url) as (run, player):
        # This trainer is at the step at which the first attempt was drawn, and trains on it; the second is of no use.
        batch = await both(run, player.play(1))
        assert ids_of(batch) == [(0, 0), (1, 1)]
        await run.feeder.close_batch(batch)
        await run.save()
        assert await player.jobs.broker.redis.xlen(player.jobs.broker.keys.groups) == 0


async def test_what_a_checkpoint_covers_is_not_trained_again(broker_url: str, opened: Open) -> None:
    async with opened(broker_url) as (run, player):
        batch = await both(run, player.play(GROUPS))
        run.count(batch, {"optimizer/updates": 1})
        await run.feeder.close_batch(batch)
        run.feeder.groups.acknowledge = _refuse  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            await run.save()
    async with opened(broker_url) as (run, player):
        assert run.step == 1
        assert ids_of(await both(run, player.play(GROUPS))) == [(2, 0), (3, 0)]
        assert run.feeder.metrics()["groups/duplicates"] == GROUPS


async def test_a_death_during_a_checkpoint_waits_for_the_next_one(broker_url: str, opened: Open) -> None:
    async with opened(broker_url) as (run, player):
        save, loop = run.checkpoints.save, asyncio.get_running_loop()

        async def die() -> None:
            (lease,) = await player.claim(1)
            await player.jobs.fail(lease, "boom", fatal=True)
            await until_async(lambda: asyncio.to_thread(outcomes, run))

        def slow_save(*args: Any) -> Path:
            asyncio.run_coroutine_threadsafe(die(), loop).result(30)
            return save(*args)

        run.step, run.checkpoints.save = 1, slow_save  # type: ignore[method-assign]
        await run.save()
        assert await player.jobs.broker.redis.xlen(player.jobs.broker.keys.groups) == 1
    async with opened(broker_url) as (run, player):
        # The checkpoint does not cover the death, so the tombstone must still be in the broker.
        assert ids_of(await both(run, player.play(GROUPS))) == [(1, 0), (2, 0)]
        assert outcomes(run) == [((0, 0), "dead")]


async def _refuse(*_: object) -> None:
    raise ConnectionError("crashed between checkpoint and acknowledgement")


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "forgetful", aof=False) as broker:
        yield broker


async def test_a_wiped_broker_costs_only_time(
    forgetful: EmbeddedBroker, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeder_module, "RECHECK_S", 1.0)
    async with opened(forgetful.url) as (run, player):
        await run.feeder.close_batch(await both(run, player.play(GROUPS)))
        before = run.publisher.announced.seq
        lost = await player.claim(GROUPS)
        assert len(lost) == GROUPS
        await asyncio.to_thread(forgetful.stop)
        await asyncio.to_thread(forgetful.start)
        assert await player.jobs.broker.redis.xlen(player.jobs.broker.keys.jobs) == 0
        batch = await both(run, player.play(GROUPS))
        assert ids_of(batch) == [(2, 0), (3, 0)]
        latest = await WeightRegistry(player.jobs.broker).latest()
        assert latest is not None
        assert latest.seq > before


async def test_a_broker_that_lost_its_last_writes_counts_no_ended_job_for_long(broker_url: str, opened: Open) -> None:
    async with opened(broker_url) as (run, player):
        batch = await both(run, player.play(GROUPS))
        await run.feeder.close_batch(batch)
        await run.save()
        redis, keys = player.jobs.broker.redis, player.jobs.broker.keys
        await redis.sadd(keys.in_flight, *(scored.group.job_id for scored in batch.groups))
        await run.feeder.close_batch(await both(run, player.play(GROUPS)))
        await asyncio.wait_for(player.claim(GROUPS), WITHIN_S)
        assert await redis.scard(keys.in_flight) == GROUPS


async def told_and_lost(run: Run, player: Player, leases: list[Lease]) -> None:
    """Delivers the first group to the trainer, then makes the broker lose its last writes, and with them the group."""
    broker, ids = player.jobs.broker, [lease.job.job_id for lease in leases]
    before = await dump(broker, await look(broker, ids))
    await player.jobs.commit(leases[0], player.group(leases[0]))
    await until_async(lambda: ids[0] in run.feeder.books.arrived)
    await put_back(broker, before, ids)


async def test_a_group_that_is_told_anew_stays_until_a_checkpoint_covers_it(broker_url: str, opened: Open) -> None:
    async with opened(broker_url) as (run, player):
        broker = player.jobs.broker
        redis, keys = broker.redis, broker.keys
        leases = await player.claim(GROUPS)
        await told_and_lost(run, player, leases)
        await player.jobs.commit(leases[0], player.group(leases[0]))
        await until_async(lambda: run.feeder.books.counts["duplicates"])
        await run.save()
        assert await redis.xlen(keys.groups) == 1, "no checkpoint covers it"
        assert await redis.scard(keys.in_flight) == GROUPS
        await player.jobs.commit(leases[1], player.group(leases[1]))
        await run.feeder.close_batch(await both(run))
        await run.save()
        assert await redis.xlen(keys.groups) == 0


async def test_a_group_that_is_given_twice_stays_until_a_checkpoint_covers_it(broker_url: str, opened: Open) -> None:
    """The broker has lost the record that the group was read."""
    async with opened(broker_url) as (run, player):
        broker = player.jobs.broker
        redis, keys = broker.redis, broker.keys
        await player.play(1)
        await until_async(lambda: run.feeder.books.arrived)
        await redis.xgroup_destroy(keys.groups, TRAINER)
        await broker.ensure_groups()
        await until_async(lambda: read_by_the_trainer(broker))
        await run.save()
        assert await redis.xlen(keys.groups) == 1
        batch = await both(run, player.play(1))
        await run.feeder.close_batch(batch)
        await run.save()
        assert await redis.xlen(keys.groups) == 0


async def read_by_the_trainer(broker: Broker) -> bool:
    (group,) = await broker.redis.xinfo_groups(broker.keys.groups)
    return bool(group["pending"])


async def test_an_early_group_that_is_told_anew_stays_for_its_turn(broker_url: str, opened: Open) -> None:
    async with opened(broker_url) as (run, player):
        broker = player.jobs.broker
        (lease,) = await player.claim(1)
        early = run.feeder._job(GROUPS, 0)
        for _ in range(2):
            entry = Lease(lease.entry_id, early, 0)
            group = player.group(entry)
            await broker.redis.set(broker.keys.result(early.job_id), group.to_bytes())
            told = await broker.redis.xadd(broker.keys.groups, {"kind": "group", "id": early.job_id, "size": 1})
            await broker.redis.hset(broker.keys.job(early.job_id), mapping={"state": "done", "told": told})
            await until_async(
                lambda told=told: run.feeder.books.early.get(early.job_id, lease).entry_id == told.decode()
            )
        await run.save()
        assert await broker.redis.exists(broker.keys.result(early.job_id))


async def test_silence_finds_what_was_read_and_never_heard(
    broker_url: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has lost as many delivered groups as replies were lost in transit, so the counts agree."""
    monkeypatch.setattr(feeder_module, "RECHECK_S", 0.5)
    async with opened(broker_url) as (run, player):
        leases = await player.claim(GROUPS)
        await told_and_lost(run, player, leases)
        read, asked, lost = run.feeder.groups.broker.read_group, asyncio.Event(), list[object]()

        async def unheard(*args: Any) -> Any:
            asked.set()
            entries = await read(*args)
            if lost or not entries:
                return entries
            lost.append(entries)
            return []

        monkeypatch.setattr(run.feeder.groups.broker, "read_group", unheard)
        await asked.wait()
        await player.jobs.commit(leases[1], player.group(leases[1]))
        assert ids_of(await both(run)) == [(0, 0), (1, 0)]
        assert lost


async def test_versions_after_a_wipe_are_newer_than_any_folder(forgetful: EmbeddedBroker, opened: Open) -> None:
    async with opened(forgetful.url) as (run, _):
        await run.publisher.publish(1)
        await run.publisher.publish(2)
        before = run.publisher.announced.seq
    # Neither a checkpoint nor the broker knows these versions, but a replica may still serve them.
    await asyncio.to_thread(forgetful.stop)
    await asyncio.to_thread(forgetful.start)
    async with opened(forgetful.url) as (run, _):
        assert run.publisher.announced.seq > before


def always_seven(player: Player) -> asyncio.Task[None]:
    """Starts a replica that answers every job with "7" until cancelled."""

    def seven(lease: Lease) -> dict[str, Any]:
        return {"samples": (player.sample("7", player.run.publisher.announced.version),) * lease.job.n}

    return asyncio.create_task(player.play(10**6, seven))


async def test_an_evaluation_is_repeated_under_the_same_weights(broker_url: str, opened: Open) -> None:
    async with opened(broker_url, data__heldout=str(HELDOUT), evaluate__limit="2") as (run, player):
        playing = always_seven(player)
        for _ in range(2):
            assert (await asyncio.wait_for(run.evaluate(), 30))["heldout/score"] == 0
        await cancel([playing])


async def test_an_evaluation_has_a_policy_of_its_own(broker_url: str, opened: Open) -> None:
    own = {"evaluate__log_min_p": "-1e4", "evaluate__max_tokens": "9", "evaluate__temperature": "0.5"}
    own |= {"evaluate__correct_from": "-1", "evaluate__n": str(N), "sampling__stop": '["."]'}
    asked: list[Job] = []

    def note(lease: Lease) -> dict[str, Any]:
        asked.append(lease.job)
        return {"right": 0}

    async with opened(broker_url, data__heldout=str(HELDOUT), evaluate__limit="2", **own) as (run, player):
        playing = asyncio.create_task(player.play(10**6, note))
        score = await asyncio.wait_for(run.evaluate(), 30)
        await cancel([playing])
        sampling = {job.sink: job.sampling for job in asked}
    held_out, trained = sampling[Sink.EVAL], sampling[Sink.TRAIN]
    assert (held_out.log_min_p, held_out.max_tokens, held_out.temperature, held_out.stop) == (-1e4, 9, 0.5, (".",))
    assert (trained.log_min_p, trained.max_tokens, trained.temperature, trained.stop) == (-3.0, 6, 1.0, (".",))
    assert score["heldout/avg_at_4"] == 0
    assert score["heldout/pass_at_4_from_-1"] == 1


async def test_an_evaluation_outlives_a_wiped_broker(
    forgetful: EmbeddedBroker, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_module, "RECHECK_S", 1.0)
    async with opened(forgetful.url, data__heldout=str(HELDOUT), evaluate__limit="2") as (run, player):
        before = run.publisher.announced.seq
        evaluating = asyncio.create_task(run.evaluate())
        # The jobs of the batch and the held-out jobs are in progress when the broker forgets them.
        assert len(await player.claim(GROUPS + 2)) == GROUPS + 2
        await asyncio.to_thread(forgetful.stop)
        await asyncio.to_thread(forgetful.start)
        playing = always_seven(player)
        assert (await asyncio.wait_for(evaluating, 30))["heldout/score"] == 0
        await cancel([playing])
        assert run.publisher.announced.seq > before


async def test_a_silent_queue_ends_the_run_with_what_to_do(broker_url: str, opened: Open) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with opened(broker_url, broker__stall_timeout_s="0.5") as (run, _):
            await run.feeder.next_batch()
    stalled = caught.value.subgroup(UnavailableError)
    assert stalled is not None
    assert "no group was ready for 0.5 s: 2 of 2 jobs in flight have no group: no replica holds any" in str(
        stalled.exceptions[0]
    )


async def test_slow_rewards_are_named_and_not_the_replicas(broker_url: str, opened: Open, own_rewards: Path) -> None:
    limits = {"reward__timeout_s": "600", "broker__stall_timeout_s": "0.5"}

    async def stall() -> None:
        async with opened(broker_url, reward__name="own_rewards:slow_if_wrong", **limits) as (run, player):
            await player.play(1)
            await until_async(lambda: run.feeder.scorer.num_waiting == N)
            assert run.feeder.rewards_awaited() == 0, "the batch waits for the other group, too"
            await player.play(GROUPS - 1)
            await until_async(lambda: run.feeder.scorer.num_waiting == GROUPS * N)
            assert run.feeder.rewards_awaited() == GROUPS * N
            await run.feeder.next_batch()

    with pytest.raises(BaseExceptionGroup) as caught:
        await stall()
    said = (
        rf"for 0.5 s: {GROUPS * N} completions await rewards \(reward.workers = 1\); 0 took longer than .* so far. GET"
    )
    assert caught.group_contains(UnavailableError, match=said)


async def test_a_reward_that_fails_for_a_whole_batch_ends_the_run(
    broker_url: str, tmp_path: Path, opened: Open, own_rewards: Path
) -> None:
    """The trial at start finds nothing: the function fails only for wrong answers."""

    async def fail() -> None:
        async with opened(broker_url, reward__name="own_rewards:raises_if_wrong") as (run, player):
            mixed = await both(run, player.play(GROUPS))
            assert [scored.num_failed for scored in mixed.groups] == [N - 1] * GROUPS
            await run.feeder.close_batch(mixed)
            await both(run, player.play(GROUPS, lambda lease: {"samples": player.group(lease, right=0).samples}))

    with pytest.raises(BaseExceptionGroup) as caught:
        await fail()
    assert caught.group_contains(ConfigError, match=f"failed for all of the last {GROUPS * N} completions: ")
    assert 'raise ValueError("not a sum")' in (tmp_path / "run" / "reward_error.txt").read_text()


async def test_a_reward_in_trls_form_scores_groups(broker_url: str, opened: Open, own_rewards: Path) -> None:
    async with opened(broker_url, reward__name="own_rewards:trl") as (run, player):
        batch = await both(run, player.play(GROUPS))
        assert [scored.rewards for scored in batch.groups] == [(1.0, 0.0, 0.0, 0.0)] * GROUPS


async def test_the_log_names_the_replica_that_hangs(
    broker_url: str,
    run_id: str,
    opened: Open,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeder_module, "RECHECK_S", 0.5)
    # A live replica would renew its leases twice a second.
    args = ["--model", str(MODEL), "--engine", "fake", "--fake.service-time-s", "600", "--lease-s", "2"]
    args += ["--redis-url", broker_url, "--run-id", run_id, "--replica-id", "hung"]

    async def named() -> bool:
        return (
            re.search(rf"waiting: {GROUPS} of .*: replica hung holds {GROUPS}, silent for [2-9]", caplog.text)
            is not None
        )

    async def held() -> bool:
        return len(await pending(player.jobs.broker, Stream.JOBS, 9)) == GROUPS

    async with opened(broker_url) as (run, player):
        waiting = asyncio.create_task(run.feeder.next_batch())
        with caplog.at_level(logging.INFO, feeder_module.__name__), ReplicaProcess(tmp_path / "hung", *args) as replica:
            await until_async(held)
            os.kill(replica.pid, signal.SIGSTOP)
            await until_async(named)
            replica.stop(signal.SIGKILL)
        await cancel([waiting])


async def test_a_broker_full_of_trained_groups_gets_a_checkpoint_and_goes_on(
    own_broker: EmbeddedBroker, opened: Open
) -> None:
    """Without a checkpoint it would refuse new prompts for ever: prompts wait for room, and room for the next batch."""
    async with opened(own_broker.url, checkpoint__interval="100") as (run, player):
        redis, keys = player.jobs.broker.redis, player.jobs.broker.keys
        long = (player.sample("7" * 50_000, player.version),) * N
        batch = await both(run, player.play(GROUPS, lambda lease: {"samples": long}))
        held = [await redis.memory_usage(keys.result(scored.group.job_id), samples=0) for scored in batch.groups]
        await redis.config_set("maxmemory", int(sum(held) / 0.8))
        await run.feeder.close_batch(batch)
        following, _ = await asyncio.gather(asyncio.wait_for(run.next_batch(), 30), player.play(GROUPS))
        assert ids_of(following) == [(2, 0), (3, 0)]
        assert run.checkpoints.seqs()
        assert await redis.scard(keys.uncheckpointed) == 0
