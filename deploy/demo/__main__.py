"""`python -m deploy.demo`: watch a small language model learn to add, with every part of the system real.

embedded Valkey  <-->  replica-1, replica-2 (dvp-rollout, bf16)
        ^-------------->  trainer (dvp-train, fp32)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dvp_rl.client import Client, Retry
from dvp_rl.contract.errors import DvpError, UnavailableError
from dvp_rl.rollout.settings import EngineName
from dvp_rl.settings import forget_variables, user_errors
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.roles import Role
from dvp_trainer.config import TrainSettings
from dvp_trainer.report.page import write_report
from dvp_trainer.report.sinks import read_metrics

from .fleet import Child, Fleet, interruptible
from .run_folder import RunFolder, claim
from .summary import Replica, Summary, find_faults, reconcile, summarize, to_table

REPOSITORY = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("config.toml")
READY_TIMEOUT_S = 300.0
"""Longest wait for all replicas, in seconds. An SGLang server alone takes a minute on a busy machine."""
SWAP_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 5.0
MAX_BATCH = 256
ZERO_MISMATCH = {"model.fixed_shape": "64x16", "batch.max_staleness": 0}
"""Trainer options of --zero-mismatch. A sum with its answer has at most 12 tokens."""


@dataclass(frozen=True)
class Server:
    """A replica process and where it listens."""

    child: Child
    port_file: Path

    def is_ready(self) -> bool:
        if not self.port_file.exists():
            return False
        with self.client() as client, suppress(DvpError):
            return client.ready().status == "ok"
        return False

    def replica(self) -> Replica:
        with self.client() as client, suppress(DvpError):
            return Replica(self.child.name, client.weights().version)
        return Replica(self.child.name, "")

    def client(self) -> Client:
        url = f"http://127.0.0.1:{self.port_file.read_text().strip()}"
        return Client(url, timeout=CALL_TIMEOUT_S, retry=Retry(tries=1))


def main(
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts' order and of all samples.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; default: see config.toml.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run; an earlier one is moved aside.")] = Path("runs/demo"),
    engine: Annotated[EngineName, typer.Option(help="Engine of the replicas.")] = EngineName.TRANSFORMERS,
    replicas: Annotated[int, typer.Option(min=1, max=16)] = 2,
    device: Annotated[str, typer.Option(help="Device of the trainer and of every replica: cpu, cuda.")] = "cpu",
    zero_mismatch: Annotated[
        bool, typer.Option("--zero-mismatch", help="Bit-identical log-probs on both sides, at one forward per token.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=1, help="Timeout of the training, in seconds.")] = 1800.0,
) -> None:
    """Trains a small language model on sums, with two rollout replicas, a broker and a trainer on this machine."""
    with user_errors("demo"), interruptible():
        forget_variables()
        options = {"model.device": device} | (ZERO_MISMATCH if zero_mismatch else {})
        settings = load_settings(seed, steps, out, options=options)
        demo = Demo(settings, engine, replicas, timeout_s, Console(), options=options)
        raise SystemExit(demo.run())


def load_settings(
    seed: int, steps: int | None, out: Path, *, config: Path = CONFIG, options: Mapping[str, object] | None = None
) -> TrainSettings:
    """The settings that the trainer will load, so that replicas are started to match."""
    own = {"seed": seed, "out_dir": out.absolute()} | ({} if steps is None else {"steps": steps})
    return TrainSettings.load(flags(own | dict(options or {})), config)


@dataclass(frozen=True)
class Demo:
    settings: TrainSettings
    engine: EngineName
    num_replicas: int
    timeout_s: float
    console: Console
    config: Path = CONFIG
    options: Mapping[str, object] = field(default_factory=dict)
    """Trainer options beside `config`."""

    @property
    def zero_mismatch(self) -> bool:
        return self.settings.model.fixed_shape is not None

    @property
    def dtype(self) -> str:
        """dtype of the replicas."""
        return "float32" if self.zero_mismatch else "bfloat16"

    def run(self) -> int:
        """Runs the demo and returns its exit code: 0 if `find_faults` finds no fault in the summary."""
        started = time.monotonic()
        with claim(self.settings.out_dir) as folder:
            replicas = self.train(folder)
            summary = self.conclude(folder, replicas, time.monotonic() - started)
        self.console.print(to_table(summary))
        self.console.print(f"report: {folder.report}\nnumbers: {folder.summary}", highlight=False, soft_wrap=True)
        faults = find_faults(summary, zero_mismatch=self.zero_mismatch)
        for fault in faults:
            self.console.print(f"[red]FAILED[/] {fault}", highlight=False, soft_wrap=True)
        return 1 if faults else 0

    def train(self, folder: RunFolder) -> list[Replica]:
        """Starts everything, waits for the trainer to end, stops everything. Returns what each replica served last."""
        self.announce(folder)
        with EmbeddedBroker(folder.path / "broker") as broker, Fleet(folder.logs) as fleet:
            names = [f"replica-{number}" for number in range(1, self.num_replicas + 1)]
            servers = [self.start_replica(fleet, folder, broker.url_of(Role.ROLLOUT), name) for name in names]
            trainer = self.start_trainer(fleet, broker.url_of(Role.TRAINER))
            fleet.wait_until(lambda: all(s.is_ready() for s in servers), "every replica is ready", READY_TIMEOUT_S)
            fleet.wait_for(trainer, self.timeout_s)
            newest = folder.progress()["seq"]
            with suppress(UnavailableError):  # the summary says which replica serves what
                fleet.wait_until(
                    lambda: all(s.replica().seq == newest for s in servers),
                    "every replica serves the newest weights",
                    SWAP_TIMEOUT_S,
                )
            return [server.replica() for server in servers]

    def announce(self, folder: RunFolder) -> None:
        settings = self.settings
        lines = (
            f"[bold]dvp-rl demo[/]: {self.num_replicas} rollout replicas in {self.dtype}, one trainer in float32; "
            f"{settings.steps} steps of {settings.batch.groups} x {settings.sampling.n} samples, seed {settings.seed}.",
            f"rho = e^{settings.sampling.log_min_p:g} instead of the paper's e^-13: the vocabulary is small, and e^-13 "
            "would prune next to nothing.",
            f"Logs: {folder.logs}. Loading models ...",
        )
        self.console.print("\n".join(lines), highlight=False, soft_wrap=True)

    def start_replica(self, fleet: Fleet, folder: RunFolder, broker_url: str, name: str) -> Server:
        port_file = folder.path / f"{name}.port"
        command = argv(
            "dvp_rl.rollout",
            model=self.settings.model.path,
            engine=self.engine,
            run_id=self.settings.run_id,
            replica_id=name,
            port=0,
            port_file=port_file,
            dtype=self.dtype,
            device=self.settings.model.device,
            threads=1,
            max_batch=MAX_BATCH,
            **({"fixed_shape": self.settings.model.fixed_shape} if self.zero_mismatch else {}),
            **({"sglang.log_file": folder.logs / f"{name}-sglang.log"} if self.engine is EngineName.SGLANG else {}),
        )
        return Server(fleet.start(name, command, cwd=REPOSITORY, env={"DVP_ROLLOUT__REDIS_URL": broker_url}), port_file)

    def start_trainer(self, fleet: Fleet, broker_url: str) -> Child:
        """Starts the trainer. Its standard output is the launcher's, where the user watches its progress."""
        settings = self.settings
        own = {name: getattr(settings, name) for name in ("seed", "steps", "out_dir")}
        command = argv("dvp_trainer", self.config, **own, **self.options)
        return fleet.start(
            "trainer", command, cwd=REPOSITORY, env={"DVP_TRAIN__BROKER__REDIS_URL": broker_url}, show=True
        )

    def conclude(self, folder: RunFolder, replicas: list[Replica], wall_s: float) -> Summary:
        metrics, progress = read_metrics(folder.metrics), folder.progress()
        books = reconcile(folder.submitted(progress), folder.consumed(progress), progress["outstanding"])
        summary = summarize(
            metrics,
            progress,
            books,
            replicas,
            seed=self.settings.seed,
            log_min_p=self.settings.sampling.log_min_p,
            wall_s=wall_s,
        )
        folder.summary.write_text(json.dumps(summary.to_json(), indent=2) + "\n")
        write_report(folder.metrics, summary.to_json(), folder.report, title="Demo: learning to add")
        return summary


def argv(module: str, *positional: object, **options: object) -> list[str]:
    """The command line of a module of this repository in this interpreter."""
    return [sys.executable, "-m", module, *map(str, positional), *flags(options)]


def flags(options: Mapping[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


if __name__ == "__main__":
    typer.run(main)
