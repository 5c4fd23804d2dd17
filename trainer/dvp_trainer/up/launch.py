"""`dvp-train up`: a broker, replicas and a monitor on this machine, for as long as the trainer runs.

broker (embedded, or broker.redis_url)  <-->  replica-1 .. replica-N  <--  harness (up.environment)
        ^----------------------------------->  monitor
        ^----------------------------------->  the trainer: this process
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from dvp_rl.client import Client, Retry
from dvp_rl.contract.completions import COMPLETIONS
from dvp_rl.contract.engine import EngineName
from dvp_rl.contract.errors import ConfigError, DvpError, UnavailableError
from dvp_rl.contract.weights import WeightVersion
from dvp_rl.cpus import usable_cpus
from dvp_rl.ports import HOST, ReservedPort
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.roles import Role
from dvp_trainer.config import TrainSettings
from dvp_trainer.disk import writing
from dvp_trainer.programs import program

from .fleet import Child, Fleet
from .harness import harness_command
from .replica import flags, options_of_replica

logger = logging.getLogger(__name__)

WATCH_S = 0.5
CALL_TIMEOUT_S = 5.0
OPERATOR_URL = "broker/operator.url"
"""File in out_dir, readable by its owner only, while an embedded broker runs."""


@dataclass
class Program:
    """A program in a process of its own."""

    name: str
    command: list[str]
    env: Mapping[str, str]
    child: Child


@dataclass
class Server(Program):
    """A service. Its port is reserved, so that it keeps it when it starts again."""

    port: ReservedPort
    started: float = field(default_factory=time.monotonic)
    has_served: bool = False
    """Since it was started last."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port.number}"

    def is_ready(self) -> bool:
        with self.client() as client, suppress(DvpError):
            return client.ready().status == "ok"
        return False

    def version(self) -> str:
        """The weight version that a replica serves; "" if it does not say."""
        with self.client() as client, suppress(DvpError):
            return client.weights().version
        return ""

    def client(self) -> Client:
        return Client(self.url, timeout=CALL_TIMEOUT_S, retry=Retry(tries=1))


class Local:
    """What runs beside the trainer."""

    def __init__(self, settings: TrainSettings, broker: EmbeddedBroker | None, fleet: Fleet, logs: Path) -> None:
        """Starts replicas, harness and monitor. `broker`: None is that of broker.redis_url."""

        def url_of(role: Role) -> str:
            return settings.broker.url if broker is None else broker.url_of(role)

        self._broker, self._fleet, self.broker_url = broker, fleet, url_of(Role.TRAINER)
        up = settings.up
        self.replicas = []
        for number in range(up.replicas):
            name = f"replica-{number + 1}"
            env = {"DVP_ROLLOUT__REDIS_URL": url_of(Role.ROLLOUT)}
            if up.gpus:
                env["CUDA_VISIBLE_DEVICES"] = up.gpus[number % len(up.gpus)]
            options = options_of_replica(settings) | {"replica_id": name}
            if settings.model.device == "cpu":  # all processes of the run compute at the same time
                options["threads"] = max(1, usable_cpus() // (up.replicas + 1))
            if up.engine in (EngineName.SGLANG, EngineName.VLLM):
                options[f"{up.engine}.log_file"] = logs / f"{name}-{up.engine}.log"
            self.replicas.append(self._start(name, "dvp_rl.rollout", options | up.options, env))
        self.harness = None
        if up.environment is not None:
            command = harness_command(settings, urls=",".join(replica.url for replica in self.replicas))
            self.harness = Program("harness", command, {}, fleet.start("harness", command, {}))
        self.monitor = None
        if up.monitor_port is not None:
            shown = {"run_id": settings.run_id, "metrics_file": settings.out_dir / "metrics.jsonl"}
            if up.show_completions:
                shown["completions_file"] = settings.out_dir / COMPLETIONS
            env = {"DVP_MONITOR__REDIS_URL": url_of(Role.MONITOR)}
            self.monitor = self._start("monitor", "dvp_rl.monitor", shown, env, up.monitor_port)

    def _start(
        self, name: str, module: str, options: Mapping[str, object], env: Mapping[str, str], port: int = 0
    ) -> Server:
        try:
            reserved = ReservedPort(port)
        except OSError as error:
            raise ConfigError(
                f"{name}: port {port} cannot be taken: {error.strerror}; set up.monitor_port to another one, or to 0"
            ) from None
        command = [sys.executable, "-m", module, *flags({"port": reserved.number} | dict(options))]
        return Server(name, command, env, self._fleet.start(name, command, env), reserved)

    async def watch(self) -> None:
        """Starts a replica again that served and ended, and a harness that was killed, until cancelled. Raises
        UnavailableError if one ends before it served, or by itself, as the next would, or if the broker ends."""
        while True:
            if self._broker is not None and self._broker.has_ended():
                raise UnavailableError(
                    f"the broker has ended, see {self._broker.log}; the same command resumes the run"
                )
            for server in self.replicas:
                await self._look_at(server)
            if self.harness is not None and self.harness.child.has_ended():
                if not self.harness.child.was_killed():
                    raise UnavailableError(self.harness.child.obituary())
                self._start_again(self.harness)
            if self.monitor is not None and self.monitor.child.has_ended():
                logger.warning("the run goes on without its monitor: %s", self.monitor.child.obituary())
                self.monitor = None
            await asyncio.sleep(WATCH_S)

    async def _look_at(self, server: Server) -> None:
        if server.child.has_ended():
            if not server.has_served:
                raise UnavailableError(server.child.obituary())
            self._start_again(server)
            server.started, server.has_served = time.monotonic(), False
        elif not server.has_served and await asyncio.to_thread(server.is_ready):
            server.has_served = True
            logger.info("%s serves, %.0f s after its start", server.name, time.monotonic() - server.started)

    def _start_again(self, program: Program) -> None:
        logger.warning("%s is started again: %s", program.name, program.child.obituary())
        program.child = self._fleet.start(program.name, program.command, program.env)

    def await_version(self, seq: int, timeout_s: float) -> list[str]:
        """What each replica serves, once all serve version `seq`, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            served = [replica.version() for replica in self.replicas]
            is_there = all(version and WeightVersion.parse(version).seq == seq for version in served)
            if is_there or time.monotonic() > deadline:
                return served
            time.sleep(WATCH_S)


@contextmanager
def launched(settings: TrainSettings) -> Iterator[Local]:
    """Starts everything, and stops it when the block ends. Raises ConfigError if that cannot be, or if another one has
    its `out_dir`."""
    out = settings.out_dir
    with ExitStack() as stack:
        logs = out / "logs"
        with writing(f"out_dir: {out}", out):
            logs.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(out))
            for log in logs.glob("*.log"):
                log.replace(log.with_suffix(".log.previous"))
        broker = None
        if settings.broker.redis_url is None:
            broker = stack.enter_context(_embedded(settings, logs / "broker.log"))
        local = Local(settings, broker, stack.enter_context(Fleet(logs)), logs)
        for line in _described(settings, local):
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        yield local


def _described(settings: TrainSettings, local: Local) -> Iterator[str]:
    up, dtype = settings.up, options_of_replica(settings)["dtype"]
    broker = "an embedded broker" if settings.broker.redis_url is None else "the broker of broker.redis_url"
    noun = "replica" if up.replicas == 1 else "replicas"
    yield f"{settings.run_id}: {up.replicas} {noun} ({up.engine}, {dtype}) on {broker}, logs in {settings.out_dir}/logs"
    for server in (*local.replicas, *filter(None, [local.monitor])):
        yield f"  {server.name:<10} {server.url}"
    if up.environment is not None:
        yield f"  harness    {up.environment}"
    if settings.broker.redis_url is None:
        url = quote(str(settings.out_dir / OPERATOR_URL))
        status = f"{program('dvp-queue')} --run-id {settings.run_id} status"
        yield f'  queue      DVP_QUEUE__REDIS_URL="$(cat {url})" {status}'


@contextmanager
def _embedded(settings: TrainSettings, log: Path) -> Iterator[EmbeddedBroker]:
    """A broker that keeps nothing: a resumed run finds an empty one. Its operator's URL lies in OPERATOR_URL."""
    with EmbeddedBroker(settings.out_dir / "broker", log=log, tethered=True) as broker:
        secret = settings.out_dir / OPERATOR_URL
        secret.touch(mode=0o600)
        secret.write_text(broker.url_of(Role.OPERATOR))
        try:
            yield broker
        finally:
            secret.unlink(missing_ok=True)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keeps another `dvp-train up` out of the folder: the lease cannot, because each has a broker of its own. The
    kernel releases the lock however this process ends. Raises ConfigError if it is taken."""
    with (out / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"out_dir {out}: another `dvp-train up` runs there; stop it or name another") from None
        yield
