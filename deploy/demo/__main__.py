"""`python -m deploy.demo`: watch a small language model learn to add, with every part of the system real.

embedded Valkey  <-->  replica-1, replica-2 (dvp-rollout, bf16)  <-->  harness (only `--task calculator`)
        ^-------------->  trainer (dvp-train, fp32)
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from dvp_rl.contract.engine import EngineName
from dvp_rl.settings import forget_variables, user_errors
from dvp_trainer.__main__ import run
from dvp_trainer.config import TrainSettings
from dvp_trainer.report.page import write_report
from dvp_trainer.report.sinks import read_metrics
from dvp_trainer.up.fleet import interruptible
from dvp_trainer.up.launch import launched
from dvp_trainer.up.replica import flags

from .run_folder import RunFolder, claim
from .summary import Replica, Summary, find_faults, reconcile, summarize, to_table

HERE = Path(__file__).parent
SWAP_TIMEOUT_S = 20.0
ZERO_MISMATCH = {"batch.max_staleness": 0, "up.dtype": "float32"}
"""Trainer options of --zero-mismatch, besides `Task.fixed_shape`."""


class TaskName(StrEnum):
    SUMS = "sums"
    CALCULATOR = "calculator"


class Task(NamedTuple):
    config: Path
    title: str
    fixed_shape: str
    """model.fixed_shape of --zero-mismatch: sequences at the same time x tokens of the longest one."""


TASKS = {
    TaskName.SUMS: Task(HERE / "config.toml", "learning to add", "64x16"),
    TaskName.CALCULATOR: Task(HERE / "calculator" / "config.toml", "learning to use a calculator", "16x192"),
}


def main(
    name: Annotated[
        TaskName, typer.Option("--task", help="sums: answer at once; calculator: call tools over two to four turns.")
    ] = TaskName.SUMS,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts' order and of all samples.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; default: see config.toml.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run; an earlier one is moved aside. Default: runs/demo, or runs/calculator."),
    ] = None,
    engine: Annotated[EngineName, typer.Option(help="Engine of the replicas.")] = EngineName.TRANSFORMERS,
    replicas: Annotated[int, typer.Option(min=1, max=16)] = 2,
    device: Annotated[str, typer.Option(help="Device of the trainer and of every replica: cpu, cuda.")] = "cpu",
    zero_mismatch: Annotated[
        bool, typer.Option("--zero-mismatch", help="Bit-identical log-probs on both sides, at one forward per token.")
    ] = False,
) -> None:
    """Trains a small language model on sums, with two rollout replicas, a broker and a trainer on this machine."""
    with user_errors("demo"), interruptible():
        forget_variables()
        task = TASKS[name]
        options = {
            "seed": seed,
            "model.device": device,
            "up.engine": engine,
            "up.replicas": replicas,
            **({} if out is None else {"out_dir": out.absolute()}),
            **({} if steps is None else {"steps": steps}),
            **(ZERO_MISMATCH | {"model.fixed_shape": task.fixed_shape} if zero_mismatch else {}),
        }
        raise SystemExit(run_demo(TrainSettings.load(flags(options), task.config), task.title, Console()))


def run_demo(settings: TrainSettings, title: str, console: Console) -> int:
    """Runs the demo and returns its exit code: 0 if `find_faults` finds no fault in the summary."""
    started = time.monotonic()
    with claim(settings.out_dir) as folder:
        announce(settings, folder, console)
        replicas = train(settings, folder)
        summary = conclude(settings, title, folder, replicas, time.monotonic() - started)
    console.print(to_table(summary))
    console.print(f"report: {folder.report}\nnumbers: {folder.summary}", highlight=False, soft_wrap=True)
    faults = find_faults(summary, zero_mismatch=settings.model.fixed_shape is not None)
    for fault in faults:
        console.print(f"[red]FAILED[/] {fault}", highlight=False, soft_wrap=True)
    return 1 if faults else 0


def announce(settings: TrainSettings, folder: RunFolder, console: Console) -> None:
    lines = [
        f"[bold]dvp-rl demo[/]: {settings.up.replicas} replicas in {settings.up.dtype}, one trainer in float32; "
        f"{settings.steps} steps of {settings.batch.groups} x {settings.sampling.n} "
        f"{'episodes' if settings.episodes.harness else 'samples'}, seed {settings.seed}.",
        f"rho = e^{settings.sampling.log_min_p:g} instead of the paper's e^-13: the vocabulary is small, and e^-13 "
        "would prune next to nothing.",
    ]
    if folder.earlier is not None:
        lines.append(f"The run before this one is kept in {folder.earlier}.")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def train(settings: TrainSettings, folder: RunFolder) -> list[Replica]:
    """Trains with everything that `dvp-train up` starts. Returns what each replica served last."""
    with launched(settings) as local:
        run(settings, local)
        served = local.await_version(folder.progress()["seq"], SWAP_TIMEOUT_S)
        return [Replica(server.name, version) for server, version in zip(local.replicas, served, strict=True)]


def conclude(
    settings: TrainSettings, title: str, folder: RunFolder, replicas: Sequence[Replica], wall_s: float
) -> Summary:
    metrics, progress = read_metrics(folder.metrics), folder.progress()
    books = reconcile(folder.submitted(progress), folder.consumed(progress), progress["outstanding"])
    summary = summarize(
        metrics,
        progress,
        books,
        replicas,
        seed=settings.seed,
        log_min_p=settings.sampling.log_min_p,
        wall_s=wall_s,
    )
    folder.summary.write_text(json.dumps(summary.to_json(), indent=2) + "\n")
    write_report(folder.metrics, summary.to_json(), folder.report, title=f"Demo: {title}")
    return summary


if __name__ == "__main__":
    typer.run(main)
