"""`dvp-lab`: how an engine and a trainer differ, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dvp_rl.contract.errors import ConfigError
from dvp_rl.cpus import usable_cpus
from dvp_rl.settings import forget_variables, user_errors

from .engines import Engine

# torch and transformers load inside the commands, so that --help and a mistyped option do not wait for them.
if TYPE_CHECKING:
    from .study import Study
    from .subject import Progress as Tell
    from .subject import Subject

CPUS = usable_cpus()
DEFAULT_OUT = Path("runs/lab")
TEXT_MODEL = DEFAULT_OUT / "text-model"
COLLAPSE_RUNS, RHO_RUNS = DEFAULT_OUT / "collapse", DEFAULT_OUT / "rho"
TYPICAL = (Engine.BF16, Engine.FP8_WEIGHTS, Engine.SGLANG_BF16)
"""What is looked at where each engine takes minutes."""

app = typer.Typer(
    help="How an engine and a trainer differ, and what to do about it. Every command writes JSON, PNG and a page.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)

Model = Annotated[Path | None, typer.Option(help="Hugging Face folder. Default: a small language model, made once.")]
Prompts = Annotated[Path | None, typer.Option(help="With --model: JSONL file with a prompt per row.")]
Engines = Annotated[list[Engine] | None, typer.Option("--engine", help="Repeat it for several. Default: all.")]
Sequences = Annotated[int, typer.Option(min=2, help="Prompts, one sample of each.")]
Tokens = Annotated[int, typer.Option(min=1, help="Longest sample.")]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts, samples and noise.")]
Jobs = Annotated[int, typer.Option(min=1, help="Runs at a time.")]
Out = Annotated[Path, typer.Option(help="Folder for the three files.")]


def main() -> None:
    with user_errors("dvp-lab"):
        app()


@app.callback()
def settings(
    context: typer.Context,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of both sides.")] = 1,
) -> None:
    forget_variables()
    context.obj = threads


@app.command(name="signature")
def signature_command(
    context: typer.Context,
    run: Annotated[Path | None, typer.Option(help="A recorded run's out_dir, instead of engines.")] = None,
    model: Model = None,
    prompts: Prompts = None,
    engine: Engines = None,
    sequences: Sequences = 96,
    tokens: Tokens = 160,
    seed: Seed = 0,
    out: Out = DEFAULT_OUT,
) -> None:
    """The mismatch of an engine: by bucket of pi_train, against the bounds on it, along a sequence."""
    from .recorded import recorded_signature
    from .signature import signature

    _use_threads(context)
    with progress() as tell:
        if run is not None:
            study = recorded_signature(run)
        else:
            subject = _subject(model, prompts, sequences, seed, tell)
            study = signature(subject, engine or available(), tokens, seed, tell)
    _write(study, out)


@app.command(name="overlap")
def overlap_command(
    context: typer.Context,
    model: Model = None,
    prompts: Prompts = None,
    engine: Engines = None,
    sequences: Sequences = 96,
    tokens: Tokens = 96,
    seed: Seed = 0,
    out: Out = DEFAULT_OUT,
) -> None:
    """What the two safe sets have in common, by rho and by entropy, and how many sequences are vetoed for the rest."""
    from .overlap import overlap

    _use_threads(context)
    with progress() as tell:
        subject = _subject(model, prompts, sequences, seed, tell)
        engines = engine or [e for e in available() if e in TYPICAL]
        study = overlap(subject, engines, tokens, seed, tell)
    _write(study, out)


@app.command(name="rho")
def rho_command(
    context: typer.Context,
    model: Model = None,
    prompts: Prompts = None,
    engine: Annotated[Engine, typer.Option(help="One that shows its logits.")] = Engine.FP8_WEIGHTS,
    sequences: Sequences = 96,
    tokens: Tokens = 96,
    steps: Annotated[int, typer.Option(min=0, help="Budget of training under each rule; 0 trains nothing.")] = 40,
    jobs: Jobs = CPUS,
    work: Annotated[Path, typer.Option(help="Folder of the runs; what is there is not run again.")] = RHO_RUNS,
    seed: Seed = 0,
    out: Out = DEFAULT_OUT,
) -> None:
    """Which rho: what it removes of the mismatch, what it costs, what is left of a batch. Proposes one."""
    from .budget import Budget
    from .rho import rho

    _use_threads(context)
    if engine.is_sglang:
        raise ConfigError(f"--engine {engine}: SGLang shows no logits where it prunes; choose a transformers engine")
    with progress() as tell:
        budget = Budget(work, steps, jobs=jobs) if steps else None
        study = rho(_subject(model, prompts, sequences, seed, tell), engine, tokens, seed, budget, tell)
    _write(study, out)


@app.command(name="collapse")
def collapse_command(
    context: typer.Context,
    small: Annotated[bool, typer.Option("--small", help="A sketch of it, to see that it runs.")] = False,
    seeds: Annotated[int, typer.Option(min=1, max=5, help="Of the table; the map has one of its own.")] = 5,
    jobs: Jobs = CPUS,
    work: Annotated[Path, typer.Option(help="Folder of the runs; what is there is not run again.")] = COLLAPSE_RUNS,
    out: Out = DEFAULT_OUT,
) -> None:
    """Where mismatch makes training collapse, and what holds there: a map, then all arms and seeds at one place."""
    from .collapse import SMALL, Plan, collapse

    _use_threads(context)
    plan = replace(SMALL, jobs=jobs) if small else Plan(seeds=Plan.seeds[:seeds], jobs=jobs)
    with progress() as tell:
        study = collapse(work, plan, tell)
    _write(study, out)


@app.command(name="page")
def page_command(
    files: Annotated[list[Path], typer.Argument(help="JSON files of studies.", metavar="FILE.json...")],
    out: Out = DEFAULT_OUT,
) -> None:
    """Draw the PNG and the page of a study again, from its JSON."""
    from .page import write_page
    from .study import Study

    for study in map(Study.load, files):
        Console().print(f"written: {write_page(study, out)}", highlight=False, soft_wrap=True)


def available() -> list[Engine]:
    """All engines that can run here: SGLang only where `make sglang-cpu` has built one."""
    from dvp_rl.engines.sglang_server import CHECKOUT_PYTHON

    return [engine for engine in Engine if CHECKOUT_PYTHON.exists() or not engine.is_sglang]


def _use_threads(context: typer.Context) -> None:
    import torch

    torch.set_num_threads(context.obj)


def _subject(model: Path | None, prompts: Path | None, count: int, seed: int, tell: Tell) -> Subject:
    from .subject import file_subject, text_subject

    if model is None and prompts is None:
        return text_subject(TEXT_MODEL, count, seed, tell)
    if model is None or prompts is None:
        raise ConfigError("--model and --prompts belong together: give both, or none for the built-in language model")
    return file_subject(model, prompts, count, seed)


def _write(study: Study, folder: Path) -> None:
    from .page import write_page
    from .study import Study

    study = Study.load(study.save(folder))
    for finding in study.findings:
        verdict = {True: "[green]holds[/]", False: "[red]does not hold[/]", None: "figure"}[finding.holds]
        Console().print(f"{verdict}  {finding.statement}  [bold]{finding.figures}[/]", highlight=False, soft_wrap=True)
    Console().print(f"written: {write_page(study, folder)}", highlight=False, soft_wrap=True)


@contextmanager
def progress() -> Iterator[Tell]:
    """A bar on a terminal, a line per new thing to do elsewhere."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task, said = bar.add_task(""), ""

        def tell(done: int, total: int, what: str) -> None:
            nonlocal said
            bar.update(task, completed=done, total=total, description=what)
            if not console.is_terminal and what.partition(",")[0] != said:
                said = what.partition(",")[0]
                console.print(said, highlight=False)

        yield tell


if __name__ == "__main__":
    main()
