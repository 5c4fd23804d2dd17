"""The delivery state machine, checked over all interleavings of its processes' steps and failures.

`make test ARGS=tests/integration/transport/test_model.py` walks small worlds completely; `make test-slow` larger ones.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dvp_rl.contract.job import Sink
from dvp_rl.transport import broker as broker_module
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import Delivery
from dvp_trainer.queue.books import Books
from tests.integration.transport import world as world_module
from tests.integration.transport.walk import stuck, walk
from tests.integration.transport.world import Checkpoint, Parts, Seen, ViolationError, World, connect_parts, look, step
from tests.kit.records import make_job

logger = logging.getLogger(__name__)

MAX_ENDING = 2_000
CHOICES = st.lists(st.integers(0, 10**6), min_size=20, max_size=150)


def small_world(
    parts: Parts, *, jobs: int = 1, asked: int = 0, replicas: str = "AB", faults: int = 2, max_deliveries: int = 3
) -> World:
    run_id = parts.everybody.run_id
    return World.new(
        parts,
        [make_job(run_id, position) for position in range(jobs)],
        [make_job(run_id, position, sink=Sink.CLIENT) for position in range(asked)],
        replicas=replicas,
        faults=faults,
        max_deliveries=max_deliveries,
    )


async def _walk_all(world: World, at_least: int) -> None:
    states = await walk(world)
    done = sum(node.done for node in states.values())
    logger.info("%d states, %d of them final", len(states), done)
    assert len(states) >= at_least
    assert done
    if nodes := stuck(states):
        story = "\n".join(nodes[0].story)
        pytest.fail(f"from {len(nodes)} states no fault-free way leads to the end of all jobs, first after:\n{story}")


@pytest.mark.parametrize(
    ("jobs", "asked", "faults", "max_deliveries", "at_least"),
    [
        pytest.param(1, 0, 1, 2, 150, id="train"),
        pytest.param(1, 0, 2, 1, 1000, id="train, two faults", marks=pytest.mark.slow),
        pytest.param(0, 1, 2, 2, 100, id="client, two faults"),
    ],
)
async def test_every_state_of_a_small_world(
    parts: Parts, jobs: int, asked: int, faults: int, max_deliveries: int, at_least: int
) -> None:
    world = small_world(parts, jobs=jobs, asked=asked, faults=faults, max_deliveries=max_deliveries)
    await _walk_all(world, at_least)


@pytest.mark.parametrize(
    ("jobs", "asked", "faults", "at_least"),
    [
        pytest.param(1, 0, 1, 300, id="train"),
        pytest.param(1, 0, 2, 5000, id="train, two faults", marks=pytest.mark.long),
        pytest.param(0, 1, 2, 300, id="client, two faults"),
    ],
)
async def test_every_state_when_the_broker_falls_back(
    parts: Parts, jobs: int, asked: int, faults: int, at_least: int
) -> None:
    """A second broker takes over that lacks the last writes of the first one."""
    world = small_world(parts, jobs=jobs, asked=asked, faults=faults, max_deliveries=2)
    world.may_fail_over = True
    await _walk_all(world, at_least)


@pytest.mark.long
@pytest.mark.parametrize(
    ("jobs", "faults", "max_deliveries", "at_least"), [(1, 3, 1, 5000), (1, 2, 3, 1000), (2, 1, 1, 2000)]
)
async def test_every_state_of_a_larger_world(
    parts: Parts, jobs: int, faults: int, max_deliveries: int, at_least: int
) -> None:
    await _walk_all(small_world(parts, jobs=jobs, faults=faults, max_deliveries=max_deliveries), at_least)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(choices=CHOICES)
def test_a_long_story_ends_well(
    runner: asyncio.Runner, shared_broker: EmbeddedBroker, run_id: str, choices: list[int]
) -> None:
    runner.run(_story(shared_broker, run_id, choices))


@pytest.mark.long
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(choices=CHOICES)
def test_many_long_stories_end_well(
    runner: asyncio.Runner, shared_broker: EmbeddedBroker, run_id: str, choices: list[int]
) -> None:
    runner.run(_story(shared_broker, run_id, choices))


async def _story(shared_broker: EmbeddedBroker, run_id: str, choices: list[int]) -> None:
    """Takes one step per choice in a larger world, failures included. Then no failures happen and all jobs must end."""
    async with connect_parts(shared_broker, run_id) as parts:
        broker = parts.everybody
        world = small_world(parts, jobs=4, asked=2, replicas="ABC", faults=len(choices))
        world.may_fail_over = True
        if keys := (await look(broker, world.job_ids)).keys:
            await broker.redis.delete(*keys)
        await broker.ensure_groups()
        seen, story = await look(broker, world.job_ids), list[str]()
        try:
            for choice in choices:
                moves = world.moves(seen)
                move = moves[choice % len(moves)]
                story.append(move.label)
                seen = await step(world, seen, move)
            world.faults, dice = 0, random.Random(0)
            while not world.is_done(seen):
                assert len(story) < MAX_ENDING, "no end"
                move = dice.choice(world.moves(seen))
                story.append(move.label)
                seen = await step(world, seen, move)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *story[-200:]])) from error


MUTANTS = {
    "commit without the owner check": ("commit", "owner(stream, entry) ~= consumer", "false"),
    "renewal without the owner check": ("renew", "owner(stream, ARGV[i]) == consumer", "true"),
    "failure without the owner check": ("fail", "owner(stream, entry) ~= consumer", "false"),
    "release without the owner check": ("release", "owner(stream, entry) ~= consumer", "false"),
    "commit that cannot be repeated": ("commit", "'committed') == consumer", "'committed') == 'x' .. consumer"),
    "commit without acknowledgement": ("commit", "drop(stream, entry)", ""),
    "submit without the dedupe key": ("submit", "redis.call('HGET', JOB .. id, 'state')", "nil"),
    "submit without the fencing token": ("submit", "fenced_off(ARGV[1])", "nil"),
    "settle without the fencing token": ("settle", "fenced_off(ARGV[1])", "nil"),
    "acknowledge without the fencing token": ("acknowledge", "fenced_off(ARGV[1])", "nil"),
    "restore without the fencing token": ("restore", "fenced_off(ARGV[1])", "nil"),
    "a token that does not grow": (
        "lease_acquire",
        "math.max(now, (redis.call('GET', FENCE) or 0) + 1, ARGV[3] + 1)",
        "1",
    ),
    "a count that is not mended": ("recount", "redis.call('SREM', IN_FLIGHT, id)", "0"),
    "an acknowledgement of what is told anew": ("acknowledge", "'told') or entry) == entry", "'told') or entry) ~= ''"),
    "a death without a tombstone": ("fail", "job_id ~= '' and sink ~= 'client'", "false"),
    "a death that stays in flight": ("fail", "redis.call('SREM', IN_FLIGHT, job_id)", ""),
    "a replay that leaves the tombstone": ("replay", "letter.tombstone ~= ''", "false"),
    "a replay that nobody counts": ("replay", "redis.call('SADD', IN_FLIGHT, id)", ""),
    "a requeued job that stays": ("release", "drop(stream, id)\n  else", "\n  else"),
    "settle that keeps the job in flight": ("settle", "redis.call('SREM', IN_FLIGHT, ARGV[i])", ""),
    "acknowledge that keeps the books": ("acknowledge", "redis.call('EXPIRE', JOB .. id, RESULT_TTL_S)", ""),
    "acknowledge that keeps the group": ("acknowledge", "redis.call('UNLINK', RESULT .. id, PLAYED .. id)", ""),
    "a client's job among the trainer's": ("submit_client", "sink == 'client' and CLIENT_JOBS or JOBS", "JOBS"),
    "a client's job that comes back among them": ("release", "sink == 'client' and CLIENT_JOBS or JOBS", "JOBS"),
    "a deletion that leaves the job queued": ("delete", "drop(stream, entry)", ""),
    "a deletion that leaves the result": ("delete", "redis.call('UNLINK', RESULT .. id)", ""),
    "a deletion that leaves the letter": ("delete", "redis.call('XDEL', DEAD, letter)", ""),
    "a deletion that frees no result": ("delete", "\nhold(id, 0)\n", "\n"),
    "a deletion that frees no room": ("delete", "\nreserve(id, 0)\n", "\n"),
    "a death that frees no room": ("fail", "  reserve(job_id, 0)\n", ""),
    "an overdue job that stays queued": ("submit_client", "drop(CLIENT_JOBS, entry)", ""),
    "an overdue job that frees no room": ("submit_client", "    reserve(id, 0)\n    local hash", "    local hash"),
    "a job done that keeps its deadline": ("commit", "redis.call('ZREM', CLIENT_DEADLINES, job_id)", "return"),
    "a result that takes no memory": ("commit", "hold(id, KEY_BYTES + #data, now_ms() + 1000 * RESULT_TTL_S)", ""),
    "a replay that takes no room": ("replay", "reserve(id, bytes)", ""),
    "a dropped letter that frees nothing": ("discard", "hold(':dead:' .. ARGV[i], 0)", ""),
    "a caller whose jobs only grow": ("delete", "before == 0 and 1 or -1", "before == 0 and 1 or 0"),
    "a row that stays its caller's": ("delete", "redis.call('HDEL', CLIENT_CALLERS, name)", ""),
    "a job done that is nobody's": ("commit", "not redis.call('HGET', CLIENT_HELD, name)", "true"),
    "a letter that is nobody's": ("fail", "own(':dead:' .. buried, redis.call('HGET', CLIENT_CALLERS, job_id))", ""),
    "a replayed job that is nobody's": ("replay", "own(id, caller)", ""),
    "a trainer that recovers nothing": ("takeover", "'(' .. after, '+', wanted", "'+', '+', 1"),
}


FEW = {
    *("commit without the owner check", "commit that cannot be repeated", "submit without the dedupe key"),
    *("a death without a tombstone", "a trainer that recovers nothing", "a deletion that leaves the job queued"),
}


def _mutated(name: str) -> tuple[str, str]:
    """Name and source of the mutated script."""
    script, text, instead = MUTANTS[name]
    source = broker_module._source(script)
    assert source.count(text) == 1, f"{script}.lua has changed: write the mutant anew"
    return script, source.replace(text, instead)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutants_are_of_the_scripts_as_they_are(name: str) -> None:
    _mutated(name)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FEW else [pytest.mark.slow]) for n in MUTANTS])
async def test_the_walk_finds_a_script_that_is_wrong(name: str, parts: Parts) -> None:
    script, source = _mutated(name)
    for part in parts:
        part._scripts[script] = part.redis.register_script(source)
    await _expect_trouble(parts)


async def test_the_walk_finds_an_acknowledgement_before_the_checkpoint(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forgets(world: World, before: Seen, i: int) -> None:
        trainer = world.trainers[i]
        world.checkpoint = Checkpoint(trainer.lease.token, world.checkpoint.trained, world.checkpoint.buried)
        trainer.books.covered, trainer.books.ended = trainer.books.ended, []

    monkeypatch.setattr(world_module, "_save", forgets)
    await _expect_trouble(parts)


def _keeps_what_came_first(books: Books, delivery: Delivery) -> bool:
    if (held := books.arrived.get(delivery.job_id)) is not None:
        books.ended.append(delivery)
        books.arrived[delivery.job_id] = held
        return False
    return ARRIVE(books, delivery)


def _sends_what_has_ended(books: Books, delivery: Delivery) -> bool:
    unsent = dict(books.unsent)
    waited = ARRIVE(books, delivery)
    books.unsent |= unsent
    return waited


def _drops_nothing(books: Books, delivery: Delivery) -> bool:
    waited = ARRIVE(books, delivery)
    if not waited:
        books.ended.clear()
    return waited


ARRIVE = Books.arrive


@pytest.mark.parametrize("arrive", [_keeps_what_came_first, _sends_what_has_ended, _drops_nothing])
async def test_the_walk_finds_books_that_are_wrong(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, arrive: Callable[[Books, Delivery], bool]
) -> None:
    monkeypatch.setattr(Books, "arrive", arrive)
    await _expect_trouble(parts)


async def _expect_trouble(parts: Parts) -> None:
    """Asserts that the walk finds a violation with a trainer's job, a client's job, or a broker that takes over."""
    for faults, asked, may_fail_over in ((1, 0, False), (1, 1, False), (1, 0, True), (2, 0, False), (2, 1, False)):
        world = small_world(parts, jobs=1 - asked, asked=asked, faults=faults, max_deliveries=1)
        world.may_fail_over = may_fail_over
        try:
            states = await walk(world)
        except ViolationError:
            return
        if stuck(states):
            return
    pytest.fail("nobody noticed")
