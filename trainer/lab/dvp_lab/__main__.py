"""`dvp-lab`: how an engine and a trainer differ, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dvp_rl.contract.errors import ConfigError
from dvp_rl.cpus import usable_cpus
from dvp_rl.extras import print_version
from dvp_rl.settings import forget_variables, user_errors
from dvp_trainer.patience import patient

from .engines import Engine
from .page import write_page
from .study import Study

# torch and transformers load inside the commands, so that --help and a mistyped option do not wait for them.
if TYPE_CHECKING:
    import torch

    from .subject import Progress as Tell
    from .subject import Subject

CPUS = usable_cpus()
DEFAULT_OUT = Path("runs/lab")
TEXT_MODEL = DEFAULT_OUT / "text-model"
COLLAPSE_RUNS, RHO_RUNS = DEFAULT_OUT / "collapse", DEFAULT_OUT / "rho"
TYPICAL = (Engine.BF16, Engine.FP8, Engine.FP8_WEIGHTS, Engine.SGLANG_BF16)
"""Default engines of `overlap`, which takes minutes for each."""

app = typer.Typer(
    help="How an engine and a trainer differ, and what to do about it. Every study writes JSON, PNG and a page.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)

Model = Annotated[Path | None, typer.Option(help="Hugging Face folder. Default: a small language model, made once.")]
Prompts = Annotated[Path | None, typer.Option(help="JSONL file with a prompt per row; requires --model.")]
Engines = Annotated[
    list[Engine] | None,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help=f"Repeatable: {', '.join(Engine)}. Default: all that suit the device; overlap: typical ones.",
    ),
]
Device = Annotated[str, typer.Option(help="Device of the trainer's side and of all engines but SGLang, e.g. cuda.")]
Sequences = Annotated[int, typer.Option(min=2, help="Number of prompts; each is sampled once.")]
Tokens = Annotated[int, typer.Option(min=1, help="Longest sample, in tokens.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of prompts, samples and noise.")]
Jobs = Annotated[int, typer.Option(min=1, help="Parallel runs.")]
Out = Annotated[Path, typer.Option(help="Folder for the JSON, PNG and HTML files.")]


def main() -> None:
    with user_errors("dvp-lab"):
        app()


@app.callback()
def settings(
    context: typer.Context,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of both sides.")] = 1,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    forget_variables()
    context.obj = threads


@app.command(name="signature")
def signature_command(
    context: typer.Context,
    run: Annotated[Path | None, typer.Option(help="out_dir of a recorded run, analysed instead of engines.")] = None,
    model: Model = None,
    prompts: Prompts = None,
    engine: Engines = None,
    device: Device = "cpu",
    sequences: Sequences = 96,
    tokens: Tokens = 160,
    seed: Seed = 0,
    out: Out = DEFAULT_OUT,
) -> None:
    """Measure an engine's mismatch: by bucket of pi_train, against its bounds, and along a sequence."""
    from .recorded import recorded_signature
    from .signature import signature

    _use_threads(context)
    with progress() as tell:
        if run is not None:
            study = recorded_signature(run)
        else:
            where = _usable(device, engine or ())
            subject = _subject(model, prompts, sequences, seed, tell)
            study = signature(subject, engine or available(where), tokens, seed, tell, where)
    _write(study, out)


@app.command(name="overlap")
def overlap_command(
    context: typer.Context,
    model: Model = None,
    prompts: Prompts = None,
    engine: Engines = None,
    device: Device = "cpu",
    sequences: Sequences = 96,
    tokens: Tokens = 96,
    seed: Seed = 0,
    out: Out = DEFAULT_OUT,
) -> None:
    """Compare the two safe sets by rho and by entropy, and count the sequences vetoed for tokens outside."""
    from .overlap import overlap

    _use_threads(context)
    with progress() as tell:
        where = _usable(device, engine or ())
        subject = _subject(model, prompts, sequences, seed, tell)
        engines = engine or [e for e in available(where) if e in TYPICAL]
        study = overlap(subject, engines, tokens, seed, tell, where)
    _write(study, out)


@app.command(name="rho")
def rho_command(
    context: typer.Context,
    model: Model = None,
    prompts: Prompts = None,
    engine: Annotated[Engine, typer.Option(help="A transformers engine.")] = Engine.FP8_WEIGHTS,
    sequences: Sequences = 96,
    tokens: Tokens = 96,
    steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Training steps of the lab's own small model under each rule; 0 trains nothing. Default: 40; 0 with "
            "--model.",
        ),
    ] = None,
    jobs: Jobs = CPUS,
    work: Annotated[Path, typer.Option(help="Folder of the runs; runs found there are not repeated.")] = RHO_RUNS,
    seed: Seed = 0,
    out: Out = DEFAULT_OUT,
) -> None:
    """Compare values of rho: mismatch removed, cost, and what is left of a batch. Propose one."""
    from .budget import Budget
    from .rho import rho

    _use_threads(context)
    if engine.is_sglang:
        raise ConfigError(f"--engine {engine}: SGLang returns no logits under pruning; choose a transformers engine")
    _usable("cpu", [engine])
    if steps is None:
        steps = Budget.steps if model is None else 0
    with progress() as tell:
        budget = Budget(work, steps, jobs=jobs) if steps else None
        study = rho(_subject(model, prompts, sequences, seed, tell), engine, tokens, seed, budget, tell)
    _write(study, out)


@app.command(name="collapse")
def collapse_command(
    context: typer.Context,
    small: Annotated[bool, typer.Option("--small", help="Run a small version, to see that it works.")] = False,
    seeds: Annotated[int, typer.Option(min=1, max=5, help="Number of seeds in the table; the map has its own.")] = 5,
    jobs: Jobs = CPUS,
    work: Annotated[Path, typer.Option(help="Folder of the runs; runs found there are not repeated.")] = COLLAPSE_RUNS,
    out: Out = DEFAULT_OUT,
) -> None:
    """Find where mismatch makes training collapse and what holds there: a map, then all arms and seeds at one cell."""
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
    """Redraw a study's PNG and page from its JSON."""
    for study in map(Study.load, files):
        Console().print(f"written: {write_page(study, out)}", highlight=False, soft_wrap=True)


def available(device: torch.device) -> list[Engine]:
    """The default engines on the device: on the CPU, SGLang if `make sglang-cpu` has built one; elsewhere, fp8 products
    if the device has them."""
    from dvp_rl.engines.sglang_server import CHECKOUT_PYTHON

    from .precision import multiplies_fp8

    on_cpu = device.type == "cpu"
    sglang, fp8 = on_cpu and CHECKOUT_PYTHON.exists(), not on_cpu and multiplies_fp8(device)
    return [engine for engine in Engine if (sglang or not engine.is_sglang) and (fp8 or engine is not Engine.FP8)]


def _usable(name: str, engines: Sequence[Engine]) -> torch.device:
    """The device. Raises ConfigError before any work if it or an engine on it cannot be used."""
    from dvp_rl.engines.transformers import usable_device

    from .precision import check_fp8

    device = usable_device(name)
    if Engine.FP8 in engines:
        check_fp8(device)
    return device


def _use_threads(context: typer.Context) -> None:
    import torch

    torch.set_num_threads(context.obj)


def _subject(model: Path | None, prompts: Path | None, count: int, seed: int, tell: Tell) -> Subject:
    from .subject import file_subject, text_subject

    if model is None and prompts is None:
        return text_subject(TEXT_MODEL, count, seed, tell)
    if model is None or prompts is None:
        raise ConfigError(
            "--model and --prompts belong together: give both, or neither for the built-in language model"
        )
    return file_subject(model, prompts, count, seed)


def _write(study: Study, folder: Path) -> None:
    study = Study.load(study.save(folder))
    for sentence in study.conclusion:
        Console().print(f"[bold]{escape(sentence)}[/]", highlight=False, soft_wrap=True)
    for finding in study.findings:
        verdict = {True: "[green]holds[/]  ", False: "[red]does not hold[/]  ", None: ""}[finding.holds]
        line = f"{verdict}{escape(finding.statement)}  [bold]{escape(finding.figures)}[/]"
        Console().print(line, highlight=False, soft_wrap=True)
    Console().print(f"written: {write_page(study, folder)}", highlight=False, soft_wrap=True)


@contextmanager
def progress() -> Iterator[Tell]:
    """Shows a progress bar on a terminal; elsewhere a line per stage, and then how far it is."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar, ExitStack() as stack:
        task, stage, so_far = bar.add_task(""), "", ""

        def say(text: str) -> None:
            console.print(text, highlight=False, soft_wrap=True)

        def tell(done: int, total: int, what: str) -> None:
            nonlocal stage, so_far
            bar.update(task, completed=done, total=total, description=what)
            so_far = f"{what}: {done} of {total}"
            if not console.is_terminal and what.partition(",")[0] != stage:
                stage = what.partition(",")[0]
                say(stage)
                stack.close()
                stack.enter_context(patient(lambda: so_far, say))

        yield tell


if __name__ == "__main__":
    main()
