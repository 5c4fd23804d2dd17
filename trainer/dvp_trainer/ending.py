"""How a run ends: with its report written, and with what it reached and how to go on from there."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from shlex import quote

from dvp_rl.contract.errors import ConfigError
from dvp_rl.settings import MASK
from dvp_rl.weights.folder import folder_name

from .programs import in_shell, program
from .report.outcome import ENDS, Outcome, outcome
from .report.page import write_report
from .report.sinks import read_metrics
from .report.starts import SETTINGS, Start, last_start
from .resume.checkpoint import Checkpoints

logger = logging.getLogger(__name__)

REPORT = "report.html"


def conclude(start: Start, out_dir: Path, *, html: bool) -> None:
    """Ends what `start` began: writes the report if `html`, and prints how the run stands. Does nothing if another
    trainer has started the run since. Failures are only logged: they must not hide what ended the run, nor fail a run
    that has trained."""
    with _logged(out_dir):
        if last_start(out_dir) != start:
            return
        if html:
            draw_report(out_dir)
    with _logged(out_dir):
        sys.stdout.write("".join(f"{line}\n" for line in standing(out_dir, ended=True)))
        sys.stdout.flush()


@contextmanager
def _logged(out_dir: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        trace = None if isinstance(error, (ConfigError, OSError)) else error
        logger.error("%s; dvp-train report %s reports on the run again", error, out_dir, exc_info=trace)


def draw_report(out_dir: Path) -> None:
    """Writes out_dir/report.html from what the run has recorded. Raises ConfigError if `out_dir` holds no run."""
    start, file = last_start(out_dir), out_dir / "metrics.jsonl"
    write_report(file, asdict(outcome(read_metrics(file))), out_dir / REPORT, title=start.run_id)


def standing(out_dir: Path, *, ended: bool = False) -> Iterator[str]:
    """Lines that tell what the run has reached, where its model is and how to go on. `ended`: it is known not to be in
    progress. Raises ConfigError if `out_dir` holds no run."""
    start = last_start(out_dir)
    reached = outcome(read_metrics(out_dir / "metrics.jsonl"))
    planned, done = start.settings["steps"], max(reached.steps, start.step)
    if done < planned:
        yield f"{start.run_id}: {'stopped at' if ended else 'at'} step {done} of {planned}"
    else:
        yield f"{start.run_id}: finished, {done} of {planned} steps"
    for name, text in _facts(out_dir, start, reached):
        yield f"  {name:<13} {text}"


def _facts(out_dir: Path, start: Start, reached: Outcome) -> Iterator[tuple[str, str]]:
    yield from _scores(reached)
    out, root = shown(out_dir, start), out_dir / "checkpoints"
    checkpoints = Checkpoints(root, keep=1, create=False)
    steps = checkpoints.steps() if root.is_dir() else []
    if steps:
        named = (f"{step} (best)" if step == reached.heldout_best_step else str(step) for step in steps)
        yield "checkpoints", f"{out}/checkpoints, of step{'s' * (len(steps) > 1)} {', '.join(named)}"
        yield from _weights(checkpoints.seq(steps[-1]), out_dir, start)
    if (out_dir / REPORT).exists():
        yield "report", f"{out}/{REPORT}"
    own, train, planned = _program(start), _train(start), start.settings["steps"]
    kept = out_dir / SETTINGS
    again = " (set its secrets again: they are not kept)" if kept.exists() and MASK in kept.read_text() else ""
    if steps and steps[-1] >= planned:
        yield "train on", f"{train} {out} --steps {2 * steps[-1]}{again}"
    else:
        since = f"continues after step {steps[-1]}" if steps else "starts over: there is no checkpoint yet"
        yield "resume", f"{train} {out}; it {since}{again}"
    if steps:
        which = "last" if reached.heldout_best is None else "best"
        if start.settings["data"]["heldout"] is not None:
            needs = "" if start.up else ", with its broker and a replica running"
            yield "evaluate", f"{train} eval {out} --step {which}{needs}{again}"
        yield "export", f"{own} export {out} --step {which} --to {out}/model"
        yield "serve", "with dvp-rollout, vLLM or SGLang: `export` prints how"


def _scores(reached: Outcome) -> Iterator[tuple[str, str]]:
    if reached.reward_first is not None:
        ends = min(ENDS, reached.steps)
        yield "reward", f"first {reached.reward_first:.3f}, last {reached.reward_last:.3f}, over {ends} steps each"
    if reached.heldout_best is not None:
        score = f"{reached.heldout_best:.3f}"
        error = "" if reached.heldout_best_stderr is None else f" ± {reached.heldout_best_stderr:.3f}"
        share = score if reached.heldout_best_correct is None else f"{reached.heldout_best_correct:.3f}"
        correct = "" if share == score else f" ({share} correct)"  # they are equal if rewards are 0 and 1
        best = f"best {score}{error}{correct} at step {reached.heldout_best_step}"
        yield "held-out", f"{best}, first {reached.heldout_first:.3f}, last {reached.heldout_last:.3f}"


def _weights(seq: int, out_dir: Path, start: Start) -> Iterator[tuple[str, str]]:
    """The published folder of a checkpoint, if it is still there and a whole model."""
    root = Path(start.settings["weights"]["folder"] or out_dir / "weights") / start.run_id
    folder = root / folder_name(seq)
    if any(folder.glob("model*.safetensors")):
        yield "weights", f"{shown(folder, start)}, as replicas load them"


def _train(start: Start) -> str:
    """The command that trains and evaluates. It runs in the working directory of the start, for relative paths."""
    ranks = start.machine.get("ranks", "1")
    torchrun = f"torchrun --nproc-per-node {ranks} -m dvp_trainer"
    command = (_program(start) if ranks == "1" else torchrun) + " up" * start.up
    return command if _is_here(start) else f"cd {quote(start.folder)} && {command}"


def _program(start: Start) -> str:
    return program("dvp-train", here=_is_here(start))


def shown(path: Path, start: Start) -> str:
    """The path as a shell in the working directory of the start takes it."""
    return in_shell(path, here=_is_here(start))


def _is_here(start: Start) -> bool:
    return Path(start.folder) == Path.cwd()
