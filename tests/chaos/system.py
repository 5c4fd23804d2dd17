"""The system: a broker, replicas and a trainer, with operators, or with harnesses and a gateway. Processes that die are
replaced."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import ConfigError
from dvp_rl.ports import HOST
from dvp_rl.transport import roles
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.failpoints import VARIABLE as FAILPOINTS
from dvp_trainer.resume.checkpoint import Checkpoints
from tests.kit.forked import HARNESS, ROLLOUT, Service
from tests.kit.tokens import TOKEN

from . import recorder
from .traps import Role, Traps, is_at_stop, is_passed_once
from .troubles import obey_modes

POLL_S = 0.03
LEASE_S = 1.5
ENDLESS = 10**6
GROUPS = 4
"""Groups in one batch."""
TIRED_S, MOST_TIRED_S = 6.0, 30.0
"""Age in seconds at which a process that has not hit its trap is killed to make room for another. The next one with the
same trap gets 1.5 times as long, because the machine may be slow, up to MOST_TIRED_S, because the trap may be out of
reach for now."""
IDLE_S = 3.0
"""Time after which the episode of a harness that died is given to another, in seconds."""
LAST_LINES = 12
LOADED = {Role.REPLICA: " is loaded: ", Role.TRAINER: " dvp_trainer.learn.model: "}
TROUBLES = [os.strerror(number) for number in (errno.ENOSPC, errno.EACCES, errno.EMFILE)]


@asynccontextmanager
async def together(*background: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Runs the coroutines beside the body and cancels them at its end. If one of them fails, so does the body."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in background]
        yield
        await cancel(tasks)


class Layout(NamedTuple):
    """Paths and parameters of a run."""

    folder: Path
    run_id: str
    model: Path
    data: Path
    deterministic: bool
    seed: int
    reward: str = "spread"
    ports: Mapping[str, int] = {}
    """Of a gateway and of the replicas behind it, by slot. If there are any, two harnesses play the run's prompts."""

    @property
    def out(self) -> Path:
        return self.folder / "run"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def newest_step(self) -> int:
        """Step of the newest checkpoint; 0 without one, or while the folder cannot be read."""
        with suppress(ConfigError):
            return max(Checkpoints(self.out / "checkpoints", keep=1).steps(), default=0)
        return 0

    def trainer_argv(self, steps: int) -> list[str]:
        options = {
            "run-id": self.run_id,
            "out-dir": self.out,
            "steps": steps,
            "seed": self.seed,
            "model.path": self.model,
            "data.train": self.data,
            "data.heldout": self.data,
            "reward.name": "given" if self.ports else f"tests.chaos.reward:{self.reward}",
            "sampling.n": 4,
            "sampling.log-min-p": -3.0,
            "sampling.max-tokens": 8,
            "batch.groups": GROUPS,
            "batch.max-staleness": 0 if self.deterministic else 1,
            "optimizer.lr": 3e-4,
            "checkpoint.interval": 2,
            "evaluate.interval": 5,
            "evaluate.limit": 4,
            "broker.lease-s": LEASE_S,
            "broker.stall-timeout-s": 600,
            "threads": 1,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        flags += ["--episodes.harness", f"--episodes.idle-s={IDLE_S}"] if self.ports else []
        return [*flags, "--no-report.tensorboard", *["--deterministic"] * self.deterministic]

    def replica_argv(self, name: str) -> list[str]:
        options = {
            "model": self.model,
            "run-id": self.run_id,
            "replica-id": name,
            "port": self.ports.get(name, 0),
            "port-file": self.folder / f"{name}.port",
            "threads": 1,
            "max-batch": 16,
            "lease-s": LEASE_S,
            "max-deliveries": 100,
            "drain-s": 0,
        }
        return [*(f"--{key}={value}" for key, value in options.items()), *["--deterministic"] * self.deterministic]

    def harness_argv(self) -> list[str]:
        gateway = f"http://{HOST}:{self.ports['gateway']}"
        return ["--environment=tests.chaos.reward:Dialogue", f"--urls={gateway}", "--workers=4"]

    def gateway_argv(self) -> list[str]:
        return [str(self.folder), *map(str, self.ports.values())]


@dataclass
class Child:
    role: Role
    slot: str
    process: Service
    log: Path
    trap: str | None
    started: float
    killed: bool = False
    stopped: bool = False
    asked: bool = False
    """Asked to stop, by SIGTERM."""
    replaced: bool = False
    """Suspended for so long that another one has its place; must find out and end when it wakes up."""

    @property
    def last_words(self) -> list[str]:
        """Last lines of its log; none if it ended before it had one."""
        if not self.log.exists():
            return []
        return self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]

    @property
    def has_model(self) -> bool:
        """Whether its log says that the model is loaded."""
        return self.log.exists() and LOADED[self.role] in self.log.read_text(errors="replace")


@dataclass
class System:
    layout: Layout
    broker: EmbeddedBroker
    traps: Traps
    rng: Random
    num_replicas: int = 2
    steps: int = ENDLESS
    children: list[Child] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    tired: Counter[str] = field(default_factory=Counter)
    """Processes that did not hit their trap in time, by trap."""
    faults: list[str] = field(default_factory=list)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the trainer has completed its steps."""
    troubles: int = 0
    """Number of troubles in progress that a process may name as the reason for its end."""
    last_trouble: float = -math.inf

    @property
    def slots(self) -> list[tuple[Role, str]]:
        slots = [(Role.REPLICA, f"replica-{i}") for i in range(self.num_replicas)]
        if self.layout.ports:
            slots += [(Role.GATEWAY, "gateway"), (Role.HARNESS, "harness-0"), (Role.HARNESS, "harness-1")]
        return slots if self.finished.is_set() else [*slots, (Role.TRAINER, "trainer")]

    async def keep(self) -> None:
        """Replaces processes that died, forever."""
        while True:
            self.bury()
            taken = {child.slot for child in self.children if not child.replaced}
            for role, slot in self.slots:
                if slot not in taken:
                    self.start(role, slot, self.traps.take(role))
            self.prod()
            await asyncio.sleep(POLL_S)

    def start(self, role: Role, slot: str, trap: str | None, argv: list[str] | None = None) -> Child:
        self.counts[f"starts {role}"] += 1
        log = self.layout.logs / f"{slot}-{self.counts[f'starts {role}']:04d}.log"
        folder = self.layout.folder
        variables = {
            "DVP_ROLLOUT__REDIS_URL": self.broker.url_of(roles.Role.ROLLOUT),
            "DVP_TRAIN__BROKER__REDIS_URL": self.broker.url_of(roles.Role.TRAINER),
            "DVP_QUEUE__REDIS_URL": self.broker.url_of(roles.Role.OPERATOR),
            recorder.VARIABLE: str(folder / "evidence"),
            FAILPOINTS: "" if trap is None else f"{trap}:{self.nth_pass(trap)}=kill",
        }
        if self.layout.ports:  # without a token, replicas refuse the gateway, which calls them by another host's name
            variables |= {f"DVP_{service}__TOKEN": TOKEN for service in ("ROLLOUT", "HARNESS")}
        match role:
            case Role.REPLICA:
                (folder / f"{slot}.port").unlink(missing_ok=True)
                module, argv = ROLLOUT, self.layout.replica_argv(slot)
            case Role.TRAINER:
                module, argv = "tests.chaos.recorder", self.layout.trainer_argv(self.steps)
            case Role.HARNESS:
                module, argv = HARNESS, self.layout.harness_argv()
            case Role.GATEWAY:
                module, argv = "tests.kit.gateway", self.layout.gateway_argv()
            case Role.OPERATOR:
                module = "dvp_rl.monitor.cli"
        process = Service(module, argv or [], log, before=obey_modes, **variables)
        child = Child(role, slot, process, log, trap, time.monotonic())
        self.children.append(child)
        return child

    def nth_pass(self, trap: str) -> int:
        """The pass at which the trap kills: the first if there is only one or an earlier process missed the trap."""
        return 1 if is_passed_once(trap) or self.tired[trap] else self.rng.choice((1, 1, 2, 4))

    def bury(self) -> None:
        for child in [*self.children]:
            code = child.process.poll()
            if code is None:
                continue
            self.children.remove(child)
            hit = code == -signal.SIGKILL and not child.killed
            self.traps.give_back(child.trap, hit=hit and child.trap is not None)
            self.judge(child, code, hit)

    def judge(self, child: Child, code: int, hit: bool) -> None:
        """Counts how a process ended; an unexplained end is a fault."""
        if hit and child.trap is None:
            self.faults.append(f"{child.slot} was killed by something else")
        elif child.killed or hit:
            self.counts[f"fail points {child.role}" if hit else f"ends by kill {child.role}"] += 1
        elif child.replaced:
            self.counts["woken trainers that gave up"] += 1
            if code == 0:
                self.faults.append(f"{child.slot} had been replaced and yet finished the run: {child.log}")
        elif child.role is Role.TRAINER and code == 0:
            self.finished.set()
        elif child.asked or child.role is Role.OPERATOR:
            self.counts[f"ends when asked {child.role}"] += 1
        elif child.role is Role.TRAINER and code == 2 and "is being trained by" in "".join(child.last_words):
            self.counts["trainers that woke up in time"] += 1
            for other in self.children:
                other.replaced = False
        elif child.role is Role.TRAINER and code == 2 and (woken := self.woken_instead_of(child)):
            self.counts["trainers overtaken by one that woke up"] += 1
            woken.replaced = False
        elif child.role is Role.TRAINER and code == 2 and (reason := self.named_trouble(child)):
            self.counts[f"trainers that ended by name: {reason}"] += 1
        else:
            self.faults.append(f"{child.slot} ended with exit code {code}:\n  " + "\n  ".join(child.last_words))

    def woken_instead_of(self, child: Child) -> Child | None:
        """The trainer that was replaced by `child` and woke up just when the lease of `child` had run out, as in an
        outage of the broker. It goes on, and `child` gives up."""
        if "another trainer took over" not in "".join(child.last_words):
            return None
        return next((other for other in self.children if other.replaced and not other.stopped), None)

    def named_trouble(self, child: Child) -> str | None:
        """The trouble that the last line of the log names, if there was any trouble during the process's life."""
        if not self.troubles and self.last_trouble < child.started:
            return None
        return next((name for name in TROUBLES if any(name in line for line in child.last_words[-1:])), None)

    @contextmanager
    def trouble(self) -> Iterator[None]:
        self.troubles += 1
        try:
            yield
        finally:
            self.troubles -= 1
            self.last_trouble = time.monotonic()

    def port(self, slot: int) -> int | None:
        """Port of the replica, if it has written it."""
        try:
            return int((self.layout.folder / f"replica-{slot}.port").read_text())
        except (OSError, ValueError):
            return None

    def prod(self) -> None:
        """Asks processes to stop whose trap lies in their stop; kills those that do not hit their trap in time."""
        now = time.monotonic()
        for child in self.children:
            age = now - child.started
            if child.stopped or child.killed or child.replaced:
                continue
            if child.trap is None and not self.traps.missing_of(child.role):
                continue
            if is_at_stop(child.trap) and not child.asked and age > self.rng.uniform(1.5, 4):
                child.asked = True
                child.process.send_signal(signal.SIGTERM)
            elif age > self.patience_s(child.trap):
                self.counts[f"tired {child.role}"] += 1
                if child.trap is not None:
                    self.tired[child.trap] += 1
                self.kill(child)

    def patience_s(self, trap: str | None) -> float:
        return TIRED_S if trap is None else min(MOST_TIRED_S, TIRED_S * 1.5 ** self.tired[trap])

    # --- harm -----------------------------------------------------------------------------------------------------

    def victims(self, role: Role) -> list[Child]:
        return [c for c in self.children if c.role is role and not (c.killed or c.stopped or c.replaced)]

    async def gone(self, child: Child) -> None:
        while child in self.children:  # noqa: ASYNC110 - ends are polled for
            await asyncio.sleep(POLL_S)

    async def victim(self, role: Role, *, loaded: bool = False) -> Child:
        """A random running process of the role, as soon as there is one; with `loaded`, one that has its model."""
        while True:
            victims = [child for child in self.victims(role) if not loaded or child.has_model]
            if victims:
                return self.rng.choice(victims)
            await asyncio.sleep(POLL_S)

    def kill(self, child: Child) -> None:
        child.killed = True
        child.process.send_signal(signal.SIGKILL)

    async def stop(self, child: Child, seconds: float, *, replace: bool) -> None:
        """Suspends a process for a while. `replace`: another one takes its place meanwhile."""
        child.stopped = True
        child.process.send_signal(signal.SIGSTOP)
        child.replaced = replace
        await asyncio.sleep(seconds)
        child.stopped = False
        child.process.send_signal(signal.SIGCONT)

    async def stop_broker(self, seconds: float) -> None:
        assert self.broker.pid is not None
        os.kill(self.broker.pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(self.broker.pid, signal.SIGCONT)

    async def kill_broker(self, seconds: float, *, wipe: bool = False) -> None:
        self.broker.kill()
        if wipe:
            shutil.rmtree(self.broker.folder)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self.broker.start)

    # --- the end --------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Sends SIGTERM to all; each must end within 120 s."""
        for child in self.children:
            child.asked = True
            child.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            while self.children:
                self.bury()
                await asyncio.sleep(POLL_S)
