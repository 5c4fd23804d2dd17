"""`dvp-train CONFIG [options]` trains, `dvp-train up CONFIG` trains with a broker and replicas of its own, `dvp-train
[up] eval CONFIG` scores a checkpoint, `dvp-train doctor CONFIG` says what would stop a run; CONFIG is a TOML file, or
the out_dir of a run. `check`, `export`, `report` and `compare` need no broker."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dvp_rl import tracing
from dvp_rl.contract.errors import ConfigError
from dvp_rl.logs import configure
from dvp_rl.settings import user_errors

from .config import CheckSettings, CompareSettings, EvalSettings, ExportSettings, ReportSettings, TrainSettings
from .patience import patient
from .report.starts import SETTINGS, last_start

if TYPE_CHECKING:
    from .learn.world import World
    from .up.launch import Local

logger = logging.getLogger(__name__)

RANK_TIMEOUT_S = 600.0
"""Longest time that one rank may be ahead of another, in seconds."""


def main() -> None:
    with user_errors("dvp-train"):
        argv = sys.argv[1:]
        if argv and (answer := ANSWERS.get(argv[0])):
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what is half-written is removed
            for line in answer(argv[1:]):
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
        else:
            start(argv)


def start(argv: list[str]) -> None:
    """Trains or evaluates."""
    up = argv[:1] == ["up"]
    if up:
        argv = argv[1:]
    evaluates = argv[:1] == ["eval"]
    if up and argv and argv[0] in ANSWERS:
        raise ConfigError(f"`up` goes with CONFIG or eval; `dvp-train {argv[0]}` starts nothing")
    settings = load(EvalSettings, argv[1:]) if evaluates else load(TrainSettings, argv)
    configure(settings.log_format, settings.log_level).run = settings.run_id
    if up and leads():
        from .up.fleet import interruptible
        from .up.launch import launched

        with interruptible(), launched(settings) as local:
            run(settings, local)
    else:
        run(settings)


def leads() -> bool:
    """Whether this process is the only one of the run, or the first of those that torchrun started."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK") == "0"


def load(kind: type[TrainSettings], argv: list[str]) -> TrainSettings:
    """The settings. The configuration may come first: a TOML file, or the out_dir of a run. Raises ConfigError."""
    file = Path(argv.pop(0)) if argv and not argv[0].startswith("-") else None
    if file is not None and file.is_dir():
        argv = [f"--out-dir={file}", *argv]
        file = file / SETTINGS
    return kind.load(argv, file)


def doctor(argv: list[str]) -> Iterator[object]:
    """What would stop a run. Raises ConfigError if anything would."""
    settings = load(TrainSettings, argv)
    from .doctor import examine

    yield from examine(settings)


def check(argv: list[str]) -> Iterator[object]:
    """What `check_model` finds. Raises ConfigError if a run would."""
    if argv and not argv[0].startswith("-"):
        argv = ["--model.path", *argv]
    settings = CheckSettings.load(argv)
    from .check import check_model

    yield from check_model(settings)


def export(argv: list[str]) -> Iterator[str]:
    """Writes a checkpoint's model, and describes it."""
    settings = ExportSettings.load(argv)
    last_start(settings.run)  # before PyTorch is loaded
    from .export import export

    yield from export(settings)


def report(argv: list[str]) -> Iterator[str]:
    """Writes a run's report, and describes the run."""
    settings = ReportSettings.load(argv)
    from .ending import draw_report, standing

    draw_report(settings.run)
    yield from standing(settings.run)


def compare(argv: list[str]) -> Iterator[str]:
    """Writes the page that compares runs, and prints its tables."""
    settings = CompareSettings.load(argv)
    from .report.compare import comparison, read_runs, to_text, write_comparison

    runs = read_runs(settings.runs)
    tables = comparison(runs)
    write_comparison(runs, tables, settings.to)
    for table in tables:
        yield from to_text(table)
    yield f"Curves: {settings.to}"


ANSWERS: dict[str, Callable[[list[str]], Iterator[object]]] = {
    "doctor": doctor,
    "check": check,
    "export": export,
    "report": report,
    "compare": compare,
}
"""Commands that print lines."""


def run(settings: TrainSettings, local: Local | None = None) -> None:
    logger.info("%s in %s: loading PyTorch", settings.run_id, settings.out_dir)
    # torch and transformers are imported here, so that --help and a mistyped option answer at once.
    with patient("loading PyTorch"):
        from .learn.world import World
        from .setup import follow

    # A rank may wait for orders as long as the leader waits for the broker and then for groups.
    with World.joined(settings.model.device, 2 * settings.broker.stall_timeout_s + RANK_TIMEOUT_S) as world:
        if not world.leads:
            follow(settings, world)
        elif isinstance(settings, EvalSettings):
            asyncio.run(_stoppable(_evaluate(settings, world, local)))
        else:
            asyncio.run(_stoppable(_train(settings, world, local)))


async def _train(settings: TrainSettings, world: World, local: Local | None) -> None:
    from .loop import train
    from .setup import open_run

    with tracing.configured("dvp-train", settings.trace_url, **{"service.instance.id": settings.run_id}):
        async with open_run(settings, world, local) as run:
            await train(run)


async def _evaluate(settings: EvalSettings, world: World, local: Local | None) -> None:
    from .setup import open_evaluation

    async with open_evaluation(settings, world, local) as run:
        metrics = await run.evaluate()
    lines = [f"step {run.step}", *(f"{name} {value:.4f}" for name, value in metrics.items() if "time/" not in name)]
    sys.stdout.write("\n".join(lines) + "\n")


async def _stoppable(command: Coroutine[Any, Any, None]) -> None:
    """Runs `command`. SIGTERM, Ctrl-C and the end of the terminal end it cleanly; a resumed run repeats what followed
    the last checkpoint."""
    task = asyncio.ensure_future(command)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    loop, numbers = asyncio.get_running_loop(), [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        raise SystemExit(128 + received[0] if received else 1) from None
    except BaseExceptionGroup as group:
        raise _first(group) from group
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The innermost first exception of a task group, which is the cause that a user needs to see."""
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


if __name__ == "__main__":
    main()
