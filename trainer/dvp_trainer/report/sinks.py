"""Sinks for the metrics of a run: every sink gets one record per step.

Keys are `namespace/name`. A key without a value in a step is absent; the sinks here require none of them.

Metrics of the update, from services/dvp_rl/dvp/metrics.py, over the batch before rejection:
    mismatch/*            kl, k3_kl, chi2_*, ppl_*, ratio_*, skew*, outside_rate
    weight/*              ess, mean, min, max
    veto/*                outside, numerical, nan: share of sequences dropped, by reason; total: for any reason
    mis/*                 fraction: share that importance masking drops; kept_weight; predicted_*
    kept/*                mass_mean_*, mass_min_*, count_mean_* of train and infer
    entropy/*, bias/*     entropy/constrained; bias/bound, bias/bound_measured

Metrics of the trainer:
    reward/mean, reward/std, reward/failed         after overlong shaping; samples whose reward function failed
    heldout/score                                  avg@n of the held-out set, on the steps that evaluate
    heldout/stderr                                 its standard error, were the held-out prompts drawn anew
    heldout/avg_at_*, heldout/pass_at_*[_from_*], heldout/truncated_share
    groups/*                                       no_signal: groups with equal rewards; the rest: how jobs ended
    length/mean, length/max, length/truncated_share      model tokens per episode; share that max_tokens cut off
    pruned/share, pruned/mass                      share of positions that lost >= 1e-3 of probability; mean loss
    logprob/{train,infer}_{constrained,full}       mean log-prob of the tokens inside, with pruning and without
    mismatch/kl_unmasked                           the same tokens under both full softmaxes
    drift/kl                                       KL added by further updates of a batch
    grad/norm, loss/surrogate, optimizer/lr, optimizer/updates
    staleness/mean, staleness/max                  batches that changed the weights since sampling
    staleness/groups_0 .. groups_8                 number of groups of that staleness; the last includes older ones
    time/step_s and its parts time/wait_s, time/train_s, time/publish_s, time/eval_s
    time/generate_s, time/reward_s                 outside the trainer: replica per group; all reward workers per batch
    idle/generate, idle/reward, idle/train, idle/publish, idle/swap    share of the step in which the side was idle:
                                                   averages of replicas and reward workers; swap: between beats
    throughput/samples_per_second, throughput/tokens_per_second

Metrics of episodes that a harness played, per episode:
    length/environment_mean                        tokens of the environment
    episodes/turns_mean, episodes/forks_mean, episodes/drifted_mean
                                                   turns; earlier versions of a rewritten history; turns that drifted
    episodes/tool_calls_mean, episodes/tool_errors_mean      calls of tools, and those that failed
    episodes/*_mean                                what else the harness counted, over the episodes that have it
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dvp_rl.contract.completions import Completion, completion_lines
from dvp_rl.contract.errors import ConfigError
from dvp_rl.hooks import call_hook, check_members, load_hook
from dvp_trainer.disk import AppendedFile, writing

from .starts import Start, flat
from .terminal import completions_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

COMPARED = ("reward/mean", "heldout/score", "mismatch/kl", "throughput/samples_per_second")
"""Metrics beside the settings in TensorBoard's table of hyperparameters."""
COMPLETION_COLUMNS = (
    "row",
    "prompt",
    "text",
    "answer",
    "reward",
    "advantage",
    "fate",
    "weight",
    "finish_reason",
    "num_tokens",
)
"""Fields of a Completion in a table of Weights & Biases."""
HEADLINES = {
    "reward/mean": "reward",
    "heldout/score": "held-out",
    "mismatch/kl": "kl",
    "veto/total": "veto",
    "mis/fraction": "mis",
    "pruned/share": "pruned",
    "throughput/samples_per_second": "samples/s",
}
"""Metrics shown on a console per step, with their labels."""


class Sink:
    """Takes what a run reports; each method does nothing unless a sink has a use for it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called once per step, in ascending order."""

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        """Called before `log` on the steps that show completions."""

    def close(self) -> None:
        """Called once, at the end."""


class OwnSink(Sink):
    """A user's sink (trainer/HOOKS.md), which need not show completions. An error in it ends the run, which can be
    resumed."""

    def __init__(self, name: str, out_dir: Path, *, run_id: str, resumed_step: int | None) -> None:
        self._setting = f"report.sinks {name!r}"
        opened = call_hook(
            self._setting, load_hook("report.sinks", name), out_dir, run_id=run_id, resumed_step=resumed_step
        )
        check_members(self._setting, opened, methods=("log", "close"))
        self._sink: Sink = opened
        self._shows = callable(getattr(opened, "log_completions", None))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        call_hook(self._setting, self._sink.log, step, dict(metrics))

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        if self._shows:
            call_hook(self._setting, self._sink.log_completions, step, completions)

    def close(self) -> None:
        with suppress(ConfigError):  # logged; it must not hide the error that ends the run
            call_hook(self._setting, self._sink.close)


class Reporter:
    """Passes each step's metrics to every sink. `log` is called once per step, in ascending order."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._last_step = -1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert step > self._last_step, (
            f"step {step} logged after step {self._last_step}: merge what belongs to one step"
        )
        self._last_step = step
        for sink in self._sinks:
            sink.log(step, metrics)

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        for sink in self._sinks:
            sink.log_completions(step, completions)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class JsonlSink(Sink):
    """One JSON object per step: {"step", "time" (unix seconds), metrics...}. Values that are not finite become null."""

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        """`resumed_step`: keeps the lines up to this step and appends to them. None starts a new file."""
        kept = [] if resumed_step is None else [r for r in read_metrics(path) if r["step"] <= resumed_step]
        self._file = AppendedFile(path)
        self._file.replace(json.dumps(record).encode() + b"\n" for record in kept)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.append(json.dumps({"step": step, "time": time.time(), **values}).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class CompletionsSink(Sink):
    """A line of JSON per step that shows completions, in a file that only its owner can read."""

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        """As for JsonlSink. Damaged lines are dropped: no run should end for them."""
        kept = (line for step, line in completion_lines(path) if resumed_step is not None and step <= resumed_step)
        self._file = AppendedFile(path, private=True)
        self._file.replace(kept)

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        record = {"step": step, "completions": [asdict(completion) for completion in completions]}
        self._file.append(json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; empty if there is no file. A last line that a crash cut short is skipped.

    Raises ConfigError naming the line if any other line is damaged.
    """
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: line {number} is not JSON ({error}); repair or move the file") from None
    return records


class TensorboardSink(Sink):
    """Scalars, and the settings as hyperparameters."""

    def __init__(self, folder: Path, start: Start, *, resumed_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        purge_step = None if resumed_step is None else resumed_step + 1
        self._folder = folder
        with self._writing():
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)
            # SummaryWriter.add_hparams would write them to a run of their own.
            made = hparams(_scalars(start.config()), dict.fromkeys(COMPARED, 0.0))  # type: ignore[no-untyped-call]
            file: Any = self._writer.file_writer
            for summary in made:
                file.add_summary(summary)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._writing():
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        with suppress(OSError):  # everything is flushed, or `log` has raised the same error
            self._writer.close()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"out_dir: {self._folder}", self._folder.parent)


def _scalars(config: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """The settings that have a value, flat, as TensorBoard takes them."""
    return {
        name: value if isinstance(value, (str, int, float)) else json.dumps(value)
        for name, value in flat(config)
        if value is not None
    }


def import_tracker(library: str, project: str) -> Any:
    """The module `library`. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"report.{library}_project is {project!r}, but {library} cannot be imported ({error}): pip install "
            f"{library}, or leave it unset"
        ) from None


class TrackerSink(Sink):
    """A tracker of experiments with the interface of `wandb`. It gets the settings as the run's configuration."""

    def __init__(self, library: str, project: str, start: Start, **options: object) -> None:
        """`options` go to its `init`. Raises ConfigError if it is not installed, or refuses (not logged in)."""
        self._library = import_tracker(library, project)
        options |= {"project": project, "name": start.run_id, "resume": "allow", "config": start.config()}
        try:
            self._run = self._library.init(**options)
        except Exception as error:
            raise ConfigError(f"report.{library}_project {project!r}: {error}") from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        rows = [[getattr(completion, name) for name in COMPLETION_COLUMNS] for completion in completions]
        self._run.log({"completions": self._library.Table(columns=list(COMPLETION_COLUMNS), data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


def wandb_sink(project: str, start: Start, folder: Path) -> TrackerSink:
    """Weights & Biases. It ignores the steps that a resumed run repeats, and writes to `folder`/wandb."""
    folder.mkdir(parents=True, exist_ok=True)
    return TrackerSink("wandb", project, start, id=start.run_id, dir=str(folder), allow_val_change=True)


def trackio_sink(project: str, start: Start) -> TrackerSink:
    """Trackio, where `trackio show` looks. It shows the steps that a resumed run repeats twice."""
    return TrackerSink("trackio", project, start)


def headline(metrics: Mapping[str, float]) -> str:
    """The headline metrics that are present, as `reward 0.412  kl 0.00031  ...`."""
    shown = [f"{label} {_short(metrics[name])}" for name, label in HEADLINES.items() if name in metrics]
    return "  ".join(shown)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class PlainSink(Sink):
    """One line per step, for logs and pipes."""

    def __init__(self, total_steps: int, console: Console) -> None:
        self._total_steps, self._console = total_steps, console

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line = f"step {step}/{self._total_steps}  {headline(metrics)}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class ProgressSink(Sink):
    """A live progress bar on a terminal, with the newest headline metrics under it."""

    def __init__(self, total_steps: int, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = _progress(columns, console)
        self._task = self._progress.add_task("", total=total_steps, headline="")
        self._shown: dict[str, float] = {}
        self._progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._shown |= {name: metrics[name] for name in HEADLINES if name in metrics}
        self._progress.update(self._task, completed=step, headline=headline(self._shown))

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        console = self._progress.console
        if console.file.isatty():  # FORCE_COLOR makes a terminal of any log
            console.print(completions_table(step, completions, width=console.width, encoding=console.encoding))

    def close(self) -> None:
        self._progress.stop()


def _progress(columns: Sequence[Any], console: Console) -> Progress:
    from rich.console import Group
    from rich.progress import Progress
    from rich.text import Text

    class TwoLines(Progress):
        def get_renderables(self) -> Any:
            table = self.make_tasks_table(self.tasks)
            yield Group(table, *(Text(task.fields["headline"], style="dim") for task in self.tasks))

    return TwoLines(*columns, console=console)


def console_sink(total_steps: int, console: Console | None = None) -> Sink:
    """A live bar if the console is a terminal, plain lines otherwise."""
    from rich.console import Console

    console = console or Console()
    return ProgressSink(total_steps, console) if console.is_terminal else PlainSink(total_steps, console)
