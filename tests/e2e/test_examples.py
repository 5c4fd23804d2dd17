"""The commands of deploy/examples/README.md, in the environment that `make examples` makes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dvp_trainer.report.sinks import read_metrics
from tests.kit.processes import ROOT, run

BIN = ROOT / ".examples/bin"
PAGE = ROOT / "deploy/examples/README.md"
DOCTOR, *TRAINING = re.findall(r"^    (\.examples/bin/.+)$", PAGE.read_text(), re.MULTILINE)
FEW = ("--steps=1", "--batch.groups=4", "--batch.max-staleness=0")
# Starts the tools anew for each episode. The example does so after many of them.
RESTARTING = """
import verifiers_agent
from verifiers_agent import Verifiers, rows
verifiers_agent.EPISODES_PER_START = 1
"""
LONG_S = 3600

pytestmark = pytest.mark.skipif(
    not (ROOT / ".examples/.installed").exists(),
    reason="`make examples` makes .examples, which downloads reasoning-gym and verifiers",
)


def run_example(command: str, *options: str, **given: Any) -> str:
    """What the command prints."""
    done = run([*shlex.split(command), *options], **given)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(command: str, out: Path, *options: str, **given: Any) -> Sequence[dict[str, Any]]:
    """The metrics of each step."""
    run_example(command, f"--out-dir={out}", *options, **given)
    return read_metrics(out / "metrics.jsonl")


@pytest.fixture
def _index() -> None:
    """verifiers lets uv fetch what its programs need."""
    fetch = [BIN / "uv", "run", "--no-project", "--with=mcp==2.0.0", "python", "-c", ""]
    done = run(fetch)
    if done.returncode:
        pytest.skip(f"NOT TESTED: uv reaches no package index: {done.stderr[-500:]}")


def test_both_examples_are_trained() -> None:
    assert [Path(command).stem for command in TRAINING] == ["gym_sums", "verifiers_sums"]
    assert TRAINING[0].replace(" up ", " doctor ") == DOCTOR


@pytest.mark.slow
def test_the_puzzles_answer_gets_its_reward() -> None:
    said = run_example(DOCTOR)
    assert "gym_sums:GymSums, tools: add, sub" in said
    assert re.search(r"the answer '-?\d+' gets reward 1, and the episode ends", said)


@pytest.mark.slow
def test_a_puzzle_of_reasoning_gym_is_played_with_tools(tmp_path: Path) -> None:
    (step,) = train(TRAINING[0], tmp_path, *FEW)
    assert step["episodes/tool_calls_mean"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("_index")
def test_a_taskset_of_verifiers_is_played_with_tools_that_start_again(tmp_path: Path) -> None:
    """One worker plays all episodes."""
    (tmp_path / "restarting.py").write_text(RESTARTING)
    named = ("--up.environment=restarting:Verifiers", "--data.train=restarting:rows")
    workers = '--up.harness-options={"workers": 1, "timeout_s": 120}'
    fewer = ("--batch.groups=1", "--sampling.n=4")
    (step,) = train(TRAINING[1], tmp_path / "run", *FEW, *fewer, *named, workers, PYTHONPATH=str(tmp_path))
    assert step["episodes/turns_mean"] >= 1


@pytest.mark.long
@pytest.mark.parametrize("command", TRAINING)
def test_the_reward_rises(command: str, tmp_path: Path) -> None:
    rewards = [step["reward/mean"] for step in train(command, tmp_path, timeout_s=LONG_S)]
    assert len(rewards) == 20
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.2, rewards
