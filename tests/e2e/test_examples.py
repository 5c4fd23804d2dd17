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
# Plays with verifiers' client for training: it renders and parses by itself, and sends and reads token ids.
WITH_TOKENS = """
import verifiers.v1 as vf
from renderers.configs import DefaultRendererConfig
from renderers.parsers import TOOL_PARSERS, Qwen3ToolParser

class DemoParser(Qwen3ToolParser):
    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._tc_id, self._tc_end_id = tokenizer.convert_tokens_to_ids(["<call>", "</call>"])

def client(**where):
    renderer = DefaultRendererConfig(tool_parser="demo")
    return vf.TrainClientConfig(renderer_model_name="deploy/demo/calculator/model", renderer=renderer, **where)

TOOL_PARSERS["demo"], vf.EvalClientConfig = DemoParser, client
from verifiers_agent import Verifiers, rows
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
@pytest.mark.parametrize(
    ("module", "groups"), [(RESTARTING, 1), (WITH_TOKENS, 2)], ids=["tools that start again", "token ids"]
)
def test_a_taskset_of_verifiers_is_played(module: str, groups: int, tmp_path: Path) -> None:
    """One worker plays all episodes."""
    (tmp_path / "changed.py").write_text(module)
    named = ("--up.environment=changed:Verifiers", "--data.train=changed:rows")
    workers = '--up.harness-options={"workers": 1, "timeout_s": 120}'
    fewer = (f"--batch.groups={groups}", "--sampling.n=4")
    (step,) = train(TRAINING[1], tmp_path / "run", *FEW, *fewer, *named, workers, PYTHONPATH=str(tmp_path))
    assert step["episodes/turns_mean"] >= 1
    assert module == RESTARTING or step["length/environment_mean"] > 0, "tools answered"
    assert (step["episodes/forks_mean"], step["episodes/drifted_mean"]) == (0, 0)


@pytest.mark.long
@pytest.mark.parametrize("command", TRAINING)
def test_the_reward_rises(command: str, tmp_path: Path) -> None:
    rewards = [step["reward/mean"] for step in train(command, tmp_path, timeout_s=LONG_S)]
    assert len(rewards) == 20
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.2, rewards
