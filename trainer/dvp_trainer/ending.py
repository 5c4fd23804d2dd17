"""How a run ends: with its report written, and with what it reached and how to go on from there."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from shlex import quote

from dvp_rl.contract.errors import ConfigError
from dvp_rl.settings import MASK
from dvp_rl.weights.folder import folder_name

from .report.outcome import ENDS, Outcome, outcome
from .report.page import write_report
from .report.sinks import read_metrics
from .report.starts import SETTINGS, Start, last_start
from .resume.checkpoint import PROGRESS, Checkpoints

logger = logging.getLogger(__name__)

REPORT = "report.html"


def conclude(out_dir: Path, *, html: bool) -> None:
    """Writes the report if `html`, and prints how the run stands. Failures are only logged: they must not hide what
    ended the run, nor fail a run that has trained."""
    with _logged(out_dir):
        if html:
            draw_report(out_dir)
    with _logged(out_dir):
        sys.stdout.write(standing(out_dir))
        sys.stdout.flush()


@contextmanager
def _logged(out_dir: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        trace = None if isinstance(error, ConfigError) else error
        logger.error("%s; dvp-train report %s reports on the run again", error, out_dir, exc_info=trace)


def draw_report(out_dir: Path) -> Path:
    """Writes out_dir/report.html from what the run has recorded. Raises ConfigError if `out_dir` holds no run."""
    start, file = last_start(out_dir), out_dir / "metrics.jsonl"
    write_report(file, asdict(outcome(read_metrics(file))), out_dir / REPORT, title=start.run_id)
    return out_dir / REPORT


def standing(out_dir: Path) -> str:
    """What the run has reached, where its model is and how to go on, as lines of text. Raises ConfigError if `out_dir`
    holds no run."""
    start = last_start(out_dir)
    reached = outcome(read_metrics(out_dir / "metrics.jsonl"))
    lines = [_headline(start, reached), *(f"  {name:<13} {text}" for name, text in _facts(out_dir, start, reached))]
    return "".join(f"{line}\n" for line in lines)


def _headline(start: Start, reached: Outcome) -> str:
    planned, done = start.settings["steps"], max(reached.steps, start.step)
    if done < planned:
        return f"{start.run_id}: stopped at step {done} of {planned}"
    again = ", all before this start" if start.step >= planned else ""
    return f"{start.run_id}: finished, {done} of {planned} steps{again}"


def _facts(out_dir: Path, start: Start, reached: Outcome) -> Iterator[tuple[str, str]]:
    yield from _scores(reached)
    out, command = _short(out_dir), _command()
    checkpoints = Checkpoints(out_dir / "checkpoints", keep=1)
    steps = checkpoints.steps()
    if steps:
        named = (f"{step} (best)" if step == reached.heldout_best_step else str(step) for step in steps)
        yield "checkpoints", f"{out}/checkpoints, of step{'s' * (len(steps) > 1)} {', '.join(named)}"
        yield from _weights(checkpoints.folder(steps[-1]) / PROGRESS, out_dir, start)
    if (out_dir / REPORT).exists():
        yield "report", f"{out}/{REPORT}"
    planned = start.settings["steps"]
    again = " (set its secrets again: they are not kept)" if MASK in (out_dir / SETTINGS).read_text() else ""
    if steps and steps[-1] >= planned:
        yield "train on", f"{command} {out} --steps {2 * planned}{again}"
    else:
        how = f"{command} {out}" if start.machine.get("ranks") == "1" else "the command that started it"
        since = f"continues after step {steps[-1]}" if steps else "starts over: there is no checkpoint yet"
        yield "resume", f"{how}; it {since}{again}"
    if steps:
        which = "last" if reached.heldout_best is None else "best"
        if start.settings["data"]["heldout"] is not None:
            yield "evaluate", f"{command} eval {out} --step {which}, with its broker and a replica running"
        yield "export", f"{command} export {out} --step {which} --to {out}/model"
        yield "serve", f"with Transformers, vLLM or SGLang, as {out}/model/README.md then shows"


def _scores(reached: Outcome) -> Iterator[tuple[str, str]]:
    if reached.reward_first is not None:
        yield (
            "reward",
            f"{reached.reward_first:.3f} in the first {ENDS} steps, {reached.reward_last:.3f} in the last {ENDS}",
        )
    if reached.heldout_best is not None:
        best = f"best {reached.heldout_best:.3f} at step {reached.heldout_best_step}"
        yield "held-out", f"{best}, first {reached.heldout_first:.3f}, last {reached.heldout_last:.3f}"


def _weights(progress: Path, out_dir: Path, start: Start) -> Iterator[tuple[str, str]]:
    """The published folder of a checkpoint, if it is still there and a whole model."""
    root = Path(start.settings["weights"]["folder"] or out_dir / "weights") / start.run_id
    folder = root / folder_name(json.loads(progress.read_text())["seq"])
    if any(folder.glob("model*.safetensors")):
        yield "weights", f"{_short(folder)}, as replicas load them"


def _command() -> str:
    """The program, so that the lines can be copied: by its name if a shell finds it, otherwise by its path."""
    program = Path(sys.executable).with_name("dvp-train")
    found = shutil.which(program.name)
    return program.name if (found and Path(found).samefile(program)) or not program.exists() else _short(program)


def _short(path: Path) -> str:
    """The path as a shell takes it: relative if it lies in the working directory."""
    absolute, here = Path(os.path.abspath(path)), Path.cwd()
    return quote(str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute))
