"""Breadth-first walk of every state that a small world can reach: it finds shortest counterexamples first.

States differ only in data on which scripts and processes base decisions; of entry ids and tokens, only the order
counts. The broker is put back into a state with DUMP and RESTORE.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from tests.integration.transport.world import Dump, Seen, Trainer, ViolationError, World, dump, look, put_back, step

ENTRY = re.compile(r"\d{13}-\d+")
TOKEN = re.compile(r"(?<![\d-])\d{13}(?![\d-])")


@dataclass
class Node:
    world: World
    seen: Seen
    dump: Dump
    story: tuple[str, ...]
    next: set[str] = field(default_factory=set)
    """States reached by steps without a fault."""
    done: bool = False


async def walk(world: World, max_states: int = 10**6) -> dict[str, Node]:
    """All states by their canonical text. Raises ViolationError with the steps that led to the violation."""
    broker = world.broker
    if keys := (await look(broker, world.job_ids)).keys:
        await broker.redis.delete(*keys)
    await broker.ensure_groups()
    start = await look(broker, world.job_ids)
    first = Node(world, start, await dump(broker, start), ())
    nodes, queue = {canonical(world, start): first}, deque([first])
    while queue:
        node = queue.popleft()
        node.done = node.world.is_done(node.seen)
        for move in node.world.moves(node.seen):
            await put_back(broker, node.dump, node.world.job_ids)
            after = node.world.fork()
            story = (*node.story, move.label)
            try:
                seen = await step(after, node.seen, move)
            except ViolationError as violation:
                raise ViolationError("\n".join([str(violation), *story])) from violation
            name = canonical(after, seen)
            if name not in nodes:
                assert len(nodes) < max_states, f"more than {max_states} states"
                nodes[name] = Node(after, seen, await dump(broker, seen), story)
                queue.append(nodes[name])
            if not move.fault:
                node.next.add(name)
        node.dump = {}
    return nodes


def stuck(nodes: dict[str, Node]) -> list[Node]:
    """States from which no fault-free path leads to the end of all jobs."""
    before: dict[str, list[str]] = {name: [] for name in nodes}
    for name, node in nodes.items():
        for later in node.next:
            before[later].append(name)
    reached = {name for name, node in nodes.items() if node.done}
    queue = deque(reached)
    while queue:
        for name in before[queue.popleft()]:
            if name not in reached:
                reached.add(name)
                queue.append(name)
    return [node for name, node in nodes.items() if name not in reached]


def canonical(world: World, seen: Seen) -> str:
    """Canonical text of a state; equal for states that differ only in names that nothing compares."""
    state = (
        _broker(world, seen),
        [(r.name, [lease.entry_id for lease in r.leases], sorted(r.queue._held)) for r in world.replicas],
        [_trainer(trainer) for trainer in world.trainers],
        (_token(world, seen, str(world.checkpoint.token)), *_books(world.checkpoint)),
        world.faults,
        world.standby and _broker(world, world.standby.seen),
        world.went_back,
        sorted(world.superseded),
    )
    return _ranked(TOKEN, _ranked(ENTRY, repr(state)))


def _broker(world: World, seen: Seen) -> tuple[object, ...]:
    names = {replica.queue.consumer: replica.name for replica in world.replicas}
    living = {lease.entry_id for replica in world.replicas for lease in replica.leases}
    return (
        [row[:3] for row in seen.jobs],
        [(entry, names.get(owner, "gone")) for entry, owner in seen.owners.items()],
        [row[:3] for row in seen.groups],
        [(entry, _reader(world, seen, reader)) for entry, reader in seen.readers.items()],
        [row[2:] for row in seen.dead],
        sorted(seen.in_flight),
        sorted(seen.uncheckpointed),
        _token(world, seen, seen.fence),
        _token(world, seen, seen.lease),
        [
            (b.state, b.deliveries, _committer(b.committed, names, living), b.has_result, b.ends)
            for b in seen.books.values()
        ],
        seen.readable,
        sorted(seen.memory),
        sorted(seen.deadlines),
    )


def _committer(committed: str, names: dict[str, str], living: set[str]) -> str:
    """The committer; "" unless it may commit again, because only then its identity matters."""
    consumer, _, entry = committed.rpartition("/")
    return f"{names[consumer]}/{entry}" if consumer in names and entry in living else ""


def _token(world: World, seen: Seen, token: str) -> str:
    known = {seen.fence, seen.lease, *(str(trainer.lease.token) for trainer in world.trainers)}
    return token if token in known else ("gone" if token and token != "0" else "")


def _reader(world: World, seen: Seen, reader: str) -> str:
    return _token(world, seen, reader.removeprefix("trainer/"))


def _books(books: Trainer | object) -> tuple[object, ...]:
    return sorted(getattr(books, "trained")), sorted(getattr(books, "buried"))  # noqa: B009


def _trainer(trainer: Trainer) -> tuple[object, ...]:
    inboxes = [
        (box.recovering, box.cursor, sorted(box.delivered)) for box in list(trainer.groups._inboxes.values())[:1]
    ]
    return (
        str(trainer.lease.token),
        trainer.restored,
        *_books(trainer),
        sorted(trainer.books.outstanding),
        sorted(trainer.books.unsent),
        sorted(trainer.books.arrived),
        sorted(delivery.entry_id for delivery in trainer.books.ended),
        sorted(delivery.entry_id for delivery in trainer.books.covered),
        inboxes,
    )


def _ranked(pattern: re.Pattern[str], text: str) -> str:
    """Replaces each match by its rank among all matches."""
    found = sorted(set(pattern.findall(text)), key=lambda name: [int(part) for part in name.split("-")])
    places = {name: f"#{place}" for place, name in enumerate(found)}
    return pattern.sub(lambda match: places[match[0]], text)
