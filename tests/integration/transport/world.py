"""A run as a state machine: replicas, trainers, a client and an operator act on a real broker, one step at a time.

Every step goes through the real scripts. `World.moves` lists what can happen next, failures included; `World.check`
asserts what must hold after every step. Time passes by moves, too: a lease expires when a move says so.

The trainer here uses the real bookkeeping (dvp_trainer.queue.books), without prompts, rewards and weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgpack

from dvp_rl.contract.errors import DvpError, LeaseLostError
from dvp_rl.contract.group import DeadLetter
from dvp_rl.contract.job import Job
from dvp_rl.contract.keys import TRAINER
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.dead_letters import DeadLetters, Outcome, Prospect
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import Delivery, GroupQueue
from dvp_rl.transport.jobs import Committed, JobQueue, Lease
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.roles import Role
from dvp_rl.transport.submission import Submission, Submitted
from dvp_trainer.queue.books import Books
from dvp_trainer.queue.books import Outcome as Ended
from tests.integration.transport.rig import NO_LIMIT
from tests.kit.records import make_group

NO_TIME_MS = 0
"""Lease time under which every lease has always expired, in milliseconds."""
LONG_S = 3600.0
MAX_TRAINERS = 2
MAX_LEASES = 2
CLIENT = "client "
"""Prefix of clients' entry ids, which may equal ids of the other stream, and of the replicas that take them."""

ALICE = "alice"
"""Caller that owns the clients' jobs."""

BOOKS = (
    *("jobs", "client_jobs", "groups", "evals", "dead", "in_flight", "uncheckpointed", "fence", "lease", "counters"),
    *("client_reserved", "client_held", "client_callers", "client_expiry", "client_deadlines"),
)
"""Every key of this world's runs that does not belong to one job."""

LOOK = """
local function rows(stream)
  local found = {}
  for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do
    local fields = {}
    for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
    found[#found + 1] = {entry[1], fields.kind, fields.id, fields.tombstone or ''}
  end
  return found
end
local function pending(stream, group)
  local found, owners = redis.pcall('XPENDING', stream, group, '-', '+', 1000), {}
  for _, item in ipairs(found.err and {} or found) do owners[#owners + 1] = {item[1], item[2]} end
  return owners
end
local function sorted(key)
  local members = redis.call('SMEMBERS', key)
  table.sort(members)
  return members
end
local function readable(stream)
  local found = redis.pcall('XINFO', 'GROUPS', stream)
  return not found.err and #found == 1
end
local jobs, client_jobs, groups, dead, in_flight, uncheckpointed, fence, lease = unpack(KEYS)
local reserved, held, expiry, deadlines, callers = unpack(KEYS, 9)
local now, memory = redis.call('TIME'), {}
local books = {}
for i = 2, #ARGV do
  local hash = string.gsub(jobs, 'jobs$', 'job:' .. ARGV[i])
  local state = redis.call('HMGET', hash, 'state', 'deliveries', 'committed')
  local result = redis.call('EXISTS', (string.gsub(jobs, 'jobs$', 'result:' .. ARGV[i])))
  books[i - 1] = {ARGV[i], state[1] or '', state[2] or '0', state[3] or '', result, redis.call('TTL', hash) > 0}
end
for _, hash in ipairs({reserved, held}) do
  for _, name in ipairs(redis.call('HKEYS', hash)) do
    local ends = tonumber(redis.call('ZSCORE', expiry, name) or 0)
    local over = ends > 0 and ends <= now[1] * 1000
    memory[#memory + 1] = {name, hash == held, tonumber(redis.call('HGET', hash, name)), ends > 0, over}
  end
end
local keys = redis.call('KEYS', ARGV[1])
table.sort(keys)
return cmsgpack.pack({
  rows(jobs), pending(jobs, 'replicas'), rows(client_jobs), pending(client_jobs, 'replicas'), rows(groups),
  pending(groups, 'trainer'), rows(dead), sorted(in_flight), sorted(uncheckpointed), redis.call('GET', fence) or '',
  redis.call('HGET', lease, 'token') or '', books, keys,
  {readable(jobs), readable(client_jobs), readable(groups)}, memory, redis.call('ZRANGE', deadlines, 0, -1),
  redis.call('HGETALL', callers),
})
"""


class Row(NamedTuple):
    entry: str
    kind: str
    job_id: str
    tombstone: str


class JobBooks(NamedTuple):
    """The broker's data about one job."""

    job_id: str
    state: str
    deliveries: str
    committed: str
    has_result: int
    ends: bool
    """The job's hash has a TTL."""


class Taken(NamedTuple):
    """Accounted memory of a client's job or dead letter."""

    name: str
    is_held: bool
    """True: the memory is in use. False: it is reserved for an unfinished job."""
    num_bytes: int
    ends: bool
    over: bool
    """It has expired, and no script has removed it yet."""


class Seen(NamedTuple):
    """All of the broker's data about the run on which scripts base decisions."""

    jobs: tuple[Row, ...]
    """The trainer's jobs, then the clients'."""
    owners: dict[str, str]
    """Consumer by entry id, for entries of `jobs` that were read."""
    groups: tuple[Row, ...]
    readers: dict[str, str]
    dead: tuple[Row, ...]
    in_flight: frozenset[str]
    uncheckpointed: frozenset[str]
    fence: str
    lease: str
    books: dict[str, JobBooks]
    keys: tuple[str, ...]
    """All keys except the audit, which affects no decision and so is no part of a state."""
    readable: tuple[bool, ...]
    """Whether each stream has its consumer group."""
    memory: tuple[Taken, ...]
    deadlines: frozenset[str]
    """Clients' jobs that have a deadline."""
    callers: frozenset[tuple[str, str]]
    """Owner of each row of `memory`, and sums per caller; sums of 0 are left out because they may be missing."""


Dump = dict[bytes, tuple[bytes, int]]
"""Every key of a run except the audit, with its value and its TTL in ms (0: none)."""


class Standby(NamedTuple):
    """The contents of a second broker that has stopped following the first one."""

    dump: Dump
    seen: Seen


async def look(broker: Broker, job_ids: list[str]) -> Seen:
    keys = broker.keys
    names = [keys.jobs, keys.client_jobs, keys.groups, keys.dead, keys.in_flight, keys.uncheckpointed, keys.fence]
    names += [keys.lease, keys.client_reserved, keys.client_held, keys.client_expiry, keys.client_deadlines]
    names += [keys.client_callers]
    packed: Any = await broker.redis.eval(LOOK, len(names), *names, f"dvp:{{{broker.run_id}}}:*", *job_ids)
    jobs, owners, client_jobs, client_owners, *rest = msgpack.unpackb(packed)
    groups, readers, dead, in_flight, uncheckpointed, fence, lease, books, all_keys, *rest = rest
    readable, memory, deadlines, callers = rest
    return Seen(
        (*(Row(*row) for row in jobs), *(Row(CLIENT + entry, *row) for entry, *row in client_jobs)),
        dict(owners) | {CLIENT + entry: consumer for entry, consumer in client_owners},
        tuple(Row(*row) for row in groups),
        dict(readers),
        tuple(Row(*row) for row in dead),
        frozenset(in_flight),
        frozenset(uncheckpointed),
        fence,
        lease,
        {row[0]: JobBooks(*row) for row in books},
        tuple(key for key in all_keys if key != keys.audit),
        tuple(readable),
        tuple(Taken(*row) for row in memory),
        frozenset(deadlines),
        frozenset((name, value) for name, value in zip(callers[::2], callers[1::2], strict=True) if value != "0"),
    )


async def dump(broker: Broker, seen: Seen) -> Dump:
    async with broker.redis.pipeline(transaction=False) as pipeline:
        for key in seen.keys:
            pipeline.dump(key)
            pipeline.pttl(key)
        reply = await pipeline.execute()
    return {key.encode(): (reply[2 * i], max(reply[2 * i + 1], 0)) for i, key in enumerate(seen.keys)}


async def put_back(broker: Broker, dump: Dump, job_ids: list[str]) -> None:
    """Restores the run to exactly the contents of `dump`."""
    keys = broker.keys
    known = [getattr(keys, name) for name in BOOKS]
    known += [name(job_id) for job_id in job_ids for name in (keys.job, keys.result)]
    async with broker.redis.pipeline(transaction=True) as pipeline:
        pipeline.delete(*known)
        for key, (value, ttl_ms) in dump.items():
            pipeline.restore(key, ttl_ms, value, replace=True)
        await pipeline.execute()


@dataclass(frozen=True)
class Checkpoint:
    """State that survives the trainer."""

    token: int = 0
    """Fencing token of the trainer that wrote it."""
    trained: tuple[str, ...] = ()
    buried: frozenset[str] = frozenset()

    @property
    def finished(self) -> frozenset[str]:
        return self.buried.union(self.trained)


@dataclass
class Replica:
    """One replica process on one of the queues; `queue` is replaced when it dies and restarts."""

    name: str
    queue: JobQueue
    leases: list[Lease] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        return CLIENT if self.name.startswith(CLIENT) else ""

    def sees(self, entry: str) -> bool:
        return entry.startswith(CLIENT) == bool(self.prefix)

    def owns(self, lease: Lease, seen: Seen) -> bool:
        return seen.owners.get(self.prefix + lease.entry_id) == self.queue.consumer


@dataclass
class Trainer:
    """One trainer process. It exits when it learns that another one took over."""

    lease: TrainerLease
    groups: GroupQueue
    trained: tuple[str, ...]
    buried: frozenset[str]
    restored: bool = False
    books: Books = field(default_factory=Books)

    @property
    def deliveries(self) -> list[Delivery]:
        """Deliveries received and not acknowledged, which the broker must not deliver again."""
        return [*self.books.arrived.values(), *self.books.ended, *self.books.covered]


Act = Callable[["World", Seen], Awaitable[bool | None]]
"""A step from the state seen before. Returns False if the caller was refused; then nothing may have changed."""


class Move(NamedTuple):
    label: str
    fault: bool
    """The move is not needed for progress, and the number of faults is limited."""
    act: Act


class Parts(NamedTuple):
    """Connections of the parts of a system, each as its own user with least privilege."""

    everybody: Broker
    """Connection with all permissions, for external events and for observation."""
    replica: Broker
    trainer: Broker
    monitor: Broker


@asynccontextmanager
async def connect_parts(embedded: EmbeddedBroker, run_id: str) -> AsyncIterator[Parts]:
    async with AsyncExitStack() as stack:
        connected = [await stack.enter_async_context(await Broker.connect(embedded.url, run_id))]
        await connected[0].redis.acl_log_reset()
        for role in (Role.ROLLOUT, Role.TRAINER, Role.MONITOR):
            broker = await Broker.connect(embedded.url_of(role), run_id, role=role, create=False)
            connected.append(await stack.enter_async_context(broker))
        parts = Parts(*connected)
        yield parts
        assert await parts.everybody.redis.acl_log() == [], "somebody was refused what it needs"


@dataclass
class World:
    parts: Parts
    jobs: dict[str, Job]
    """The trainer's jobs by id."""
    asked: dict[str, Job]
    """A client's jobs by id."""
    replicas: list[Replica]
    faults: int
    """Number of faults that may still happen."""
    max_deliveries: int = 3
    trainers: list[Trainer] = field(default_factory=list)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """The checkpoint from which a trainer resumes."""
    superseded: frozenset[str] = frozenset()
    """Jobs that an older trainer's checkpoint covered and the newer one's does not."""
    may_fail_over: bool = False
    """A second broker may take over when the first one fails, and may lack its last writes."""
    standby: Standby | None = None
    went_back: bool = False
    """The broker has lost its last writes, or the tokens of two trainers: a trainer may know more than the broker."""

    @classmethod
    def new(
        cls, parts: Parts, jobs: list[Job], asked: list[Job], *, replicas: str, faults: int, max_deliveries: int
    ) -> World:
        world = cls(parts, _by_id(jobs), _by_id(asked), [], faults, max_deliveries)
        names = [*(replicas if jobs else ""), *(CLIENT + name for name in replicas if asked)]
        world.replicas = [Replica(name, world._queue(name)) for name in names]
        return world

    def _queue(self, name: str) -> JobQueue:
        clients = name.startswith(CLIENT)
        return JobQueue(
            self.parts.replica, name, clients=clients, lease_ms=NO_TIME_MS, max_deliveries=self.max_deliveries
        )

    @property
    def broker(self) -> Broker:
        return self.parts.everybody

    @property
    def job_ids(self) -> list[str]:
        return [*self.jobs, *self.asked]

    def fork(self) -> World:
        """A copy of every process; connections, jobs, leases and deliveries are shared."""
        leases = [lease for replica in self.replicas for lease in replica.leases]
        deliveries = [delivery for trainer in self.trainers for delivery in trainer.deliveries]
        shared = [*self.parts, self.jobs, *self.jobs.values(), self.asked, self.standby, *leases, *deliveries]
        return deepcopy(self, {id(part): part for part in shared})

    # --- what may happen ------------------------------------------------------------------------------------------

    def moves(self, seen: Seen) -> list[Move]:
        found = [
            *self._client_moves(seen),
            *(move for i, replica in enumerate(self.replicas) for move in self._replica_moves(i, replica, seen)),
            *(move for i, trainer in enumerate(self.trainers) for move in self._trainer_moves(i, trainer, seen)),
            *self._outside_moves(seen),
        ]
        return [move for move in found if self.faults > 0 or not move.fault]

    def _client_moves(self, seen: Seen) -> Iterator[Move]:
        for job_id in self.asked:
            if not seen.books[job_id].state:
                yield Move(f"client submits {job_id}", False, partial(_ask, job_id=job_id))
            elif seen.books[job_id].ends:
                yield Move(f"{job_id} is forgotten", True, partial(_forget, job_id=job_id))
            if job_id in seen.deadlines:
                yield Move(f"the deadline of {job_id} passes", True, partial(_overdue, job_id=job_id))
            if seen.books[job_id].state:
                yield Move(f"client deletes {job_id}", True, partial(_delete, job_id=job_id))

    def _replica_moves(self, i: int, replica: Replica, seen: Seen) -> Iterator[Move]:
        name = replica.name
        if len(replica.leases) < MAX_LEASES:
            if any(replica.sees(row.entry) and row.entry not in seen.owners for row in seen.jobs):
                yield Move(f"{name} claims", False, partial(_claim, i=i))
            if (entry := self._next_expired(replica, seen)) is not None:
                yield Move(f"{name} takes over", self._is_held(entry, seen), partial(_take_over, i=i))
        for number, lease in enumerate(replica.leases):
            what = f"{name} {{}} {lease.job.job_id}"
            yield Move(what.format("commits"), False, partial(_commit, i=i, number=number))
            yield Move(what.format("commits, unheard,"), True, partial(_commit, i=i, number=number, heard=False))
            yield Move(what.format("fails"), True, partial(_fail, i=i, number=number))
            yield Move(what.format("gives back"), True, partial(_release, i=i, number=number))
        if not all(replica.owns(lease, seen) for lease in replica.leases):
            yield Move(f"{name} renews", False, partial(_renew, i=i))
        if replica.leases:
            yield Move(f"{name} dies", True, partial(_die, i=i))
            yield Move(f"{name} stops", True, partial(_stop, i=i))

    def _next_expired(self, replica: Replica, seen: Seen) -> str | None:
        """The entry that `claim_expired` would take; None if there is none."""
        held = {replica.prefix + lease.entry_id for lease in replica.leases}
        return next((entry for entry in seen.owners if replica.sees(entry) and entry not in held), None)

    def _is_held(self, entry: str, seen: Seen) -> bool:
        return any(
            replica.prefix + lease.entry_id == entry and replica.owns(lease, seen)
            for replica in self.replicas
            for lease in replica.leases
        )

    def _trainer_moves(self, i: int, trainer: Trainer, seen: Seen) -> Iterator[Move]:
        yield Move(f"trainer {i} dies", True, partial(_trainer_dies, i=i))
        yield Move(f"trainer {i} stops", True, partial(_trainer_stops, i=i))
        if str(trainer.lease.token) != seen.lease:
            yield Move(f"trainer {i} renews its lease", False, partial(_trainer_renews, i=i))
        if not trainer.restored:
            yield Move(f"trainer {i} takes up its books", False, partial(_restore, i=i))
            return
        books = trainer.books
        if books.unsent:
            yield Move(f"trainer {i} submits", False, partial(_submit, i=i))
        delivered = {delivery.entry_id for delivery in trainer.deliveries}
        if any(row.entry not in seen.readers or row.entry not in delivered for row in seen.groups):
            yield Move(f"trainer {i} reads", False, partial(_read, i=i))
        if len(seen.groups) > len(seen.readers):
            yield Move(f"trainer {i} reads, unheard", True, partial(_read_unheard, i=i))
        for job_id in books.arrived:
            yield Move(f"trainer {i} trains {job_id}", False, partial(_train, i=i, job_id=job_id))
        if books.ended:
            yield Move(f"trainer {i} writes a checkpoint", False, partial(_save, i=i))
        if books.covered:
            yield Move(f"trainer {i} acknowledges", False, partial(_acknowledge, i=i))
        if seen.in_flight - books.outstanding.keys() - trainer.buried:
            yield Move(f"trainer {i} counts again", False, partial(_recount, i=i))
        if any(self._is_lost(id, seen) for id in books.missing().keys() - books.unsent.keys()):
            yield Move(f"trainer {i} hears nothing", False, partial(_recheck, i=i))

    def _is_lost(self, job_id: str, seen: Seen) -> bool:
        """Whether the trainer would wait for this job forever."""
        return not seen.books[job_id].state or (
            seen.books[job_id].state in ("done", "dead") and all(row.job_id != job_id for row in seen.groups)
        )

    def _outside_moves(self, seen: Seen) -> Iterator[Move]:
        if not seen.lease and len(self.trainers) < MAX_TRAINERS and self.jobs:
            yield Move("a trainer starts", bool(self.trainers), _start)
        elif seen.lease:
            alive = any(str(trainer.lease.token) == seen.lease for trainer in self.trainers)
            yield Move("the trainer's lease runs out", alive, _lease_runs_out)
        for number, row in enumerate(seen.dead):
            yield Move(f"operator replays {row.job_id}", True, partial(_replay, number=number))
            yield Move(f"operator drops {row.job_id}", True, partial(_drop, number=number))
        if seen.keys:
            yield Move("the broker is wiped", True, _wipe)
        if self.standby:
            yield Move("the standby takes over", True, _fail_over)
        elif self.may_fail_over and self.faults:
            yield Move("the standby falls behind", False, _fall_behind)

    # --- what must hold -------------------------------------------------------------------------------------------

    def check(self, seen: Seen) -> None:
        """Asserts everything that must hold after every step."""
        where = Counter(row.job_id for row in (*seen.jobs, *seen.groups))
        for job_id in self.job_ids:
            assert where[job_id] <= 1, f"{job_id} is there {where[job_id]} times"
            self._check_job(seen.books[job_id], seen)
        for entries, pending in ((seen.jobs, seen.owners), (seen.groups, seen.readers)):
            assert pending.keys() <= {row.entry for row in entries}, "somebody holds what does not exist"
        assert not seen.in_flight & seen.uncheckpointed, "trained, and still in flight"
        assert seen.in_flight | seen.uncheckpointed <= self.jobs.keys()
        for trainer in () if self.went_back else self.trainers:
            if trainer.restored and str(trainer.lease.token) == seen.fence == seen.lease:
                self._check_books(trainer, seen)
        self._check_memory(seen)
        self._check_keys(seen)

    def _check_job(self, books: JobBooks, seen: Seen) -> None:
        """A job is in exactly one place, and its end is deleted only once a checkpoint covers it."""
        entries = [row.entry for row in seen.jobs if row.job_id == books.job_id]
        queued = len(entries)
        assert all(entry.startswith(CLIENT) == (books.job_id in self.asked) for entry in entries), "in the wrong queue"
        kinds = [row.kind for row in seen.groups if row.job_id == books.job_id]
        if books.job_id in self.jobs:
            assert bool(books.has_result) == ("group" in kinds), f"{books}, and the trainer is told {kinds}"
        if books.state in ("queued", "running"):
            assert (queued, kinds) == (1, []), f"{books} but {queued} in the queue and {kinds} for the trainer"
        elif books.job_id in self.asked:
            assert (queued, books.has_result) == (0, int(books.state == "done")), books
        elif books.state:
            kind = "group" if books.state == "done" else "dead"
            covered = self.checkpoint.finished | (self.superseded if self.went_back else set())
            told = kinds == [kind] or (not kinds and books.job_id in covered)
            assert told, f"{books} acknowledged before a checkpoint covers it, or doubled: {kinds}"
            assert not queued, f"{books} and queued"
            assert books.state == "done" or books.job_id not in seen.in_flight, f"{books} counts as in flight"
        else:
            assert (queued, kinds) == (0, []), f"{books} is in a stream without books"

    def _check_books(self, trainer: Trainer, seen: Seen) -> None:
        """In flight = submitted - trained - dead."""
        running = {id for id in trainer.books.outstanding if seen.books[id].state in ("queued", "running", "done")}
        assert running <= seen.in_flight, f"runs uncounted: {running - seen.in_flight}"
        ghosts = seen.in_flight - trainer.books.outstanding.keys() - trainer.buried
        assert not ghosts, f"counted as in flight, and nobody waits for it: {ghosts}"
        assert not seen.uncheckpointed & trainer.books.outstanding.keys()

    def _check_memory(self, seen: Seen) -> None:
        """Clients' memory is accounted exactly as long as it is taken."""
        states = {id: seen.books[id].state for id in self.asked}
        rows = [row for row in seen.memory if row.name != ":total" and not row.over]
        reserved = {row.name: row.num_bytes for row in rows if not row.is_held}
        most = {id: self.asked[id].max_bytes for id, state in states.items() if state in ("queued", "running")}
        assert reserved == most, f"{reserved} are reserved for {states}"
        assert seen.deadlines <= most.keys(), f"{seen.deadlines} have a deadline, for {states}"
        held = {row.name: row for row in rows if row.is_held}
        letters = {f":dead:{row.entry}" for row in seen.dead if row.job_id in self.asked}
        done = {id for id, state in states.items() if state == "done"}
        assert held.keys() == done | letters, f"{held} are held for {states} and {letters}"
        assert {name for name, row in held.items() if row.ends} == done
        for is_held in (False, True):
            found = {row.name: row.num_bytes for row in seen.memory if row.is_held is is_held}
            assert found.pop(":total", 0) == sum(found.values()), found
            assert all(size > 0 for size in found.values())
        self._check_callers(seen)

    def _check_callers(self, seen: Seen) -> None:
        rows = [row for row in seen.memory if row.name != ":total"]
        expected = {row.name: ALICE for row in rows}
        if rows:
            expected[f":bytes:{ALICE}"] = str(sum(row.num_bytes for row in rows))
        if in_work := sum(not row.is_held for row in rows):
            expected[f":jobs:{ALICE}"] = str(in_work)
        assert dict(seen.callers) == expected

    def _check_keys(self, seen: Seen) -> None:
        keys = self.broker.keys
        known = {getattr(keys, name) for name in BOOKS}
        orphans = set(seen.keys) - known - {name(id) for id in self.job_ids for name in (keys.job, keys.result)}
        assert not orphans, f"nobody knows {orphans}"

    def is_done(self, seen: Seen) -> bool:
        """Every job has ended, a checkpoint covers it, and the broker's remaining data about it has a TTL."""
        ended = self.checkpoint.finished >= self.jobs.keys()
        answered = all(seen.books[job_id].state in ("done", "dead") for job_id in self.asked)
        # Jobs that only the broker counts as trained, without job or group, disappear with a resume.
        uncheckpointed = seen.uncheckpointed - (self.checkpoint.finished if self.went_back else set())
        empty = not (seen.jobs or seen.groups or seen.in_flight or uncheckpointed)
        return ended and answered and empty and all(books.ends for books in seen.books.values() if books.state)


def _by_id(jobs: list[Job]) -> dict[str, Job]:
    return {job.job_id: job for job in jobs}


# --- the client -------------------------------------------------------------------------------------------------------


async def _ask(world: World, before: Seen, job_id: str) -> None:
    job = world.asked[job_id]
    submission = Submission(world.parts.replica)
    assert await submission.submit_client(job, limit=NO_LIMIT, deadline_s=LONG_S, caller=ALICE) is Submitted.NEW


async def _forget(world: World, before: Seen, job_id: str) -> None:
    """Expires the job and its result."""
    redis, keys = world.broker.redis, world.broker.keys
    await redis.delete(keys.job(job_id), keys.result(job_id))
    await redis.zadd(keys.client_expiry, {job_id: 1}, xx=True)


async def _overdue(world: World, before: Seen, job_id: str) -> None:
    """Passes the deadline; the next submission, here by the same client, finds the job overdue."""
    await world.broker.redis.zadd(world.broker.keys.client_deadlines, {job_id: 1}, xx=True)
    again = Submission(world.parts.replica).submit_client(world.asked[job_id], limit=NO_LIMIT, caller=ALICE)
    assert await again is Submitted.DEAD


async def _delete(world: World, before: Seen, job_id: str) -> None:
    assert await Submission(world.parts.replica).delete(job_id, caller=ALICE) == before.books[job_id].state


# --- a replica --------------------------------------------------------------------------------------------------------


async def _claim(world: World, before: Seen, i: int) -> None:
    replica = world.replicas[i]
    replica.leases += await replica.queue.claim(1, 1)


async def _take_over(world: World, before: Seen, i: int) -> None:
    replica = world.replicas[i]
    replica.leases += await replica.queue.claim_expired(1)


async def _commit(world: World, before: Seen, i: int, number: int, heard: bool = True) -> bool:
    replica, lease = world.replicas[i], world.replicas[i].leases[number]
    repeated = before.books[lease.job.job_id].committed == f"{replica.queue.consumer}/{lease.entry_id}"
    return await _end(
        world,
        before,
        i,
        number,
        lambda queue: queue.commit(lease, make_group(lease.job, replica.name)),
        repeated,
        heard,
    )


async def _fail(world: World, before: Seen, i: int, number: int) -> bool:
    lease = world.replicas[i].leases[number]
    return await _end(world, before, i, number, lambda queue: queue.fail(lease, "boom"))


async def _release(world: World, before: Seen, i: int, number: int) -> bool:
    lease = world.replicas[i].leases[number]
    return await _end(world, before, i, number, lambda queue: queue.release(lease))


async def _end(
    world: World,
    before: Seen,
    i: int,
    number: int,
    call: Callable[[JobQueue], Awaitable[object]],
    repeated: bool = False,
    heard: bool = True,
) -> bool:
    """Ends a lease with `call`. Only its owner may succeed, or a retry of a call that succeeded before. If the answer
    is not `heard`, the caller continues as if it had not called."""
    replica = world.replicas[i]
    lease = replica.leases[number]
    owner = replica.owns(lease, before)
    queue = replica.queue if heard else deepcopy(replica.queue, {id(replica.queue.broker): replica.queue.broker})
    try:
        answer = await call(queue)
    except LeaseLostError:
        assert not owner, "an owner was turned away"
        assert not repeated, "what was done is told differently the second time"
    else:
        assert owner or repeated, "heard without a lease"
        assert answer is not Committed.DUPLICATE
    if heard:
        replica.leases.pop(number)
    return owner


async def _renew(world: World, before: Seen, i: int) -> bool:
    replica = world.replicas[i]
    lost = await replica.queue.renew(replica.leases)
    replica.leases = [lease for lease in replica.leases if lease not in lost]
    assert all(replica.owns(lease, before) for lease in replica.leases)
    return False


async def _die(world: World, before: Seen, i: int) -> None:
    name = world.replicas[i].name
    world.replicas[i] = Replica(name, world._queue(name))


async def _stop(world: World, before: Seen, i: int) -> None:
    await world.replicas[i].queue.close()
    await _die(world, before, i)


# --- a trainer --------------------------------------------------------------------------------------------------------


async def _start(world: World, before: Seen) -> None:
    lease = TrainerLease(world.parts.trainer, "model", ttl_s=LONG_S)
    token = await lease.acquire()
    assert all(token > trainer.lease.token for trainer in world.trainers), "a token that does not grow"
    assert token > world.checkpoint.token
    groups = GroupQueue(world.parts.trainer, fence=token)
    world.trainers.append(Trainer(lease, groups, world.checkpoint.trained, world.checkpoint.buried))


async def _as_trainer(world: World, before: Seen, i: int, call: Callable[[Trainer], Awaitable[object]]) -> bool:
    """Calls as trainer i; returns False if it was fenced off, in which case it has exited."""
    trainer = world.trainers[i]
    newest = trainer.lease.token >= int(before.fence or 0)
    try:
        await call(trainer)
    except LeaseLostError:
        assert not newest, "the newest trainer was turned away"
        del world.trainers[i]
        return False
    assert newest, "a trainer that another one replaced was heard"
    return True


async def _restore(world: World, before: Seen, i: int) -> bool:
    trainer = world.trainers[i]
    outstanding = world.jobs.keys() - set(trainer.trained) - trainer.buried
    heard = await _as_trainer(world, before, i, lambda trainer: trainer.groups.restore(sorted(outstanding)))
    trainer.books, trainer.restored = Books(cursor=len(world.jobs)), True
    for job_id in outstanding:
        trainer.books.expect(world.jobs[job_id])
    return heard


async def _submit(world: World, before: Seen, i: int) -> bool:
    async def send(trainer: Trainer) -> None:
        jobs = list(trainer.books.unsent.values())
        outcomes = await Submission(world.parts.trainer).submit(jobs, fence=trainer.lease.token, limit=len(world.jobs))
        assert Submitted.REFUSED not in outcomes, "there was room"
        trainer.books.unsent.clear()

    return await _as_trainer(world, before, i, send)


async def _read(world: World, before: Seen, i: int) -> None:
    trainer = world.trainers[i]
    try:
        deliveries = await trainer.groups.read(1, 1)
    except LeaseLostError:
        del world.trainers[i]
        return
    for delivery in deliveries:
        if trainer.books.arrive(delivery) and isinstance(delivery.item, DeadLetter):
            trainer.books.finish([delivery.job_id], Ended.DEAD)
            trainer.buried |= {delivery.job_id}


async def _read_unheard(world: World, before: Seen, i: int) -> None:
    """Reads and loses the reply; equals a trainer that is stopped between its fence check and its read."""
    reader = f"trainer/{world.trainers[i].lease.token}"
    await world.parts.trainer.read_group(world.broker.keys.groups, TRAINER, reader, 1, 1)


async def _train(world: World, before: Seen, i: int, job_id: str) -> bool:
    trainer = world.trainers[i]
    assert job_id not in trainer.trained, f"{job_id} is trained twice"
    heard = await _as_trainer(world, before, i, lambda trainer: trainer.groups.settle(trained=[job_id]))
    trainer.books.finish([job_id], Ended.TRAINED)
    trainer.trained += (job_id,)
    return heard


async def _save(world: World, before: Seen, i: int) -> None:
    """Writes a checkpoint. Nothing fences a file system: a late trainer finds a newer one's checkpoint and exits."""
    trainer = world.trainers[i]
    if world.checkpoint.token > trainer.lease.token:
        del world.trainers[i]
        return
    before_it = world.checkpoint.finished | world.superseded
    world.checkpoint = Checkpoint(trainer.lease.token, trainer.trained, trainer.buried)
    world.superseded = before_it - world.checkpoint.finished
    trainer.books.cover()


async def _acknowledge(world: World, before: Seen, i: int) -> bool:
    trainer = world.trainers[i]
    heard = await _as_trainer(world, before, i, lambda trainer: trainer.groups.acknowledge(trainer.books.covered))
    trainer.books.covered = []
    return heard


async def _recount(world: World, before: Seen, i: int) -> bool:
    return await _as_trainer(world, before, i, lambda trainer: trainer.groups.recount(trainer.books.outstanding))


async def _recheck(world: World, before: Seen, i: int) -> None:
    trainer = world.trainers[i]
    trainer.books.unsent |= trainer.books.missing()


async def _trainer_renews(world: World, before: Seen, i: int) -> bool:
    return await _as_trainer(world, before, i, lambda trainer: trainer.lease.renew())


async def _trainer_dies(world: World, before: Seen, i: int) -> None:
    del world.trainers[i]


async def _trainer_stops(world: World, before: Seen, i: int) -> None:
    trainer = world.trainers.pop(i)
    await trainer.lease.release()


# --- the rest of the world --------------------------------------------------------------------------------------------


async def _lease_runs_out(world: World, before: Seen) -> None:
    await world.broker.redis.delete(world.broker.keys.lease)


async def _replay(world: World, before: Seen, number: int) -> None:
    letters = DeadLetters(world.parts.monitor)
    letter = (await letters.page())[::-1][number]
    (outcome,) = await letters.replay([letter])
    assert (outcome is Outcome.REPLAYED) == (letter.prospect is Prospect.OPEN), outcome
    heard = [trainer for trainer in world.trainers if str(trainer.lease.token) == before.fence]
    counted = {job_id for trainer in heard for job_id in trainer.buried - world.checkpoint.buried}
    in_vain = outcome is Outcome.REPLAYED and letter.letter.job_id in counted
    assert not in_vain or world.went_back, "nobody would train on it"


async def _drop(world: World, before: Seen, number: int) -> None:
    letters = DeadLetters(world.parts.monitor)
    letter = (await letters.page())[::-1][number]
    assert await letters.drop([letter.entry_id]) == [Outcome.DROPPED]


async def _wipe(world: World, before: Seen) -> None:
    world.went_back |= len(world.trainers) > 1
    await world.broker.redis.delete(*before.keys)
    await _catch_up(world, before)


async def _fall_behind(world: World, before: Seen) -> None:
    world.standby = Standby(await dump(world.broker, before), before)


async def _fail_over(world: World, before: Seen) -> None:
    """Loses all writes since the standby fell behind; a disk that syncs once a second loses writes in the same way."""
    assert world.standby is not None
    await put_back(world.broker, world.standby.dump, world.job_ids)
    await _catch_up(world, before)
    world.standby, world.went_back = None, True


async def _catch_up(world: World, before: Seen) -> None:
    """Waits until the clock has passed all tokens and entry ids. Tokens are clock milliseconds and run ahead if
    trainers start faster than the clock ticks; a real broker does not restart before the clock has caught up."""
    while True:
        seconds, microseconds = await world.broker.redis.time()
        now = 1000 * seconds + microseconds // 1000
        if now > max(
            [
                int(before.fence or 0),
                *(
                    int(row.entry.removeprefix(CLIENT).partition("-")[0])
                    for row in (*before.jobs, *before.groups, *before.dead)
                ),
            ]
        ):
            break


class ViolationError(AssertionError):
    """A step failed or broke an invariant."""


async def step(world: World, before: Seen, move: Move) -> Seen:
    """Executes one move and returns the state after it. Raises ViolationError."""
    try:
        world.faults -= move.fault
        heard = await move.act(world, before)
        seen = await look(world.broker, world.job_ids)
        assert heard is not False or seen == before, "one who was turned away has changed something"
        world.check(seen)
    except (AssertionError, DvpError) as error:
        raise ViolationError(f"{move.label}: {error}") from error
    return seen
