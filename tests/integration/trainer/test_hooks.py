"""The functions of trainer/HOOKS.md run in a real replica and a real trainer."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dvp_rl.harness import Endpoint, Step
from dvp_rl.harness.process import EnvironmentProcess
from dvp_rl.hooks import load_hook
from dvp_rl.workers.limits import Limits
from dvp_trainer.data.prompts import Row, load_prompts
from dvp_trainer.data.reward_forms import RewardFunction
from dvp_trainer.data.reward_pool import RewardRequest
from dvp_trainer.report.sinks import read_metrics
from tests.kit.forked import ROLLOUT, run
from tests.kit.processes import ROOT
from tests.kit.runs import HELDOUT, MODEL, TRAIN, config, replica, run_trainer
from tests.kit.scripted import scripted
from tests.kit.wait import WITHIN_S

PAGE = ROOT / "trainer" / "HOOKS.md"


def write_hooks(folder: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    (folder / "my_hooks.py").write_text("\n\n".join(blocks))


def documented_options(program: str) -> list[str]:
    """Options that the page passes to the program."""
    (block,) = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (line,) = (line for line in block.replace("\\\n", "").splitlines() if line.startswith(program))
    return [f"--{name}={hook}" for name, hook in re.findall(r"--(\S+) (my_hooks:\w+)", line)]


@pytest.mark.slow
def test_a_run_of_the_users_own_functions(tmp_path: Path, broker_url: str, run_id: str) -> None:
    write_hooks(tmp_path)
    evaluation = {"evaluate__interval": "1", "evaluate__limit": "4", "data__heldout": str(HELDOUT)}
    fixed = {"steps": "2", "batch__max_staleness": "0"}
    flags = config(tmp_path, run_id, broker_url, **fixed, **evaluation) + documented_options("dvp-train")
    options = documented_options("dvp-rollout")
    assert len(options) == 1
    with replica(tmp_path, run_id, broker_url, *options, PYTHONPATH=str(tmp_path)):
        done = run_trainer(flags, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    seen = [line.split(",") for line in (tmp_path / "run" / "reward.csv").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2], "the first one is the evaluation before any training"
    trained = records[1:]
    assert [(int(step), float(reward)) for step, reward in seen] == [(r["step"], r["reward/mean"]) for r in trained]
    assert all(record["optimizer/updates"] for record in trained)
    shown = {record["step"]: record["completions"] for record in read_metrics(tmp_path / "run" / "completions.jsonl")}
    assert sorted(shown) == [1, 2]
    for completion in shown[1] + shown[2]:
        assert completion["reward"] == float("".join(completion["tokens"]) == f"{completion['answer']}<eos>")
    assert all(record["mismatch/outside_rate"] == 0 for record in trained), "the engine prunes as the trainer does"


def test_the_documented_reward_in_trls_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hooks(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    request = RewardRequest(Row(0, "1+1=", "2", {"answer": 2}, "answer"), ["2", " 3"], [[1], [2, 3]])
    for columns, worth in [({"answer": "2"}, [1.0, 0.0]), ({"answer": "3"}, [0.0, 1.0])]:
        with closing(RewardFunction("it", load_hook("reward.name", "my_hooks:trl_reward"))) as reward:
            assert reward(request.to_json() | {"columns": columns}) == worth


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (
            "--correction.baseline=my_hook:advantages",
            "correction.baseline 'my_hook:advantages': my_hook has no",
        ),
        (
            "--correction.objective=nowhere_at_all:f",
            "'nowhere_at_all:f': importing nowhere_at_all failed",
        ),
        ("--correction.objective=ppo", "correction.objective: expected module:function, got 'ppo'"),
        (
            "--correction.baseline=ppo",
            "correction.baseline: allowed are rloo, rloo_weighted, grpo, grpo_std, or",
        ),
        ("--report.sinks=my_hook:sink", "report.sinks 'my_hook:sink': my_hook has no function"),
        ("--data.train=my_hook:empty", "my_hook:empty: the data set is empty"),
        (
            "--data.train=my_hook:number",
            "'my_hook:number': your function returned an object of type int without",
        ),
        ("--data.train=my_hook:texts", "my_hook:texts: row 0 is of type str, expected a dict of columns"),
        ("--data.train=my_hook:broken", "data.train 'my_hook:broken': your function failed (OSError: no network)"),
        ("--data.heldout=my_hook:lazy", "data.heldout 'my_hook:lazy': your function failed (OSError: gone)"),
        ("--data.train=my_hook:leave", "data.train 'my_hook:leave': your function failed (SystemExit: 0)"),
        ("--data.train=my_hook:later", "data.train 'my_hook:later': your function is a coroutine"),
        (
            "--reward.name=brief",
            "reward.name: allowed are math, exact_match, arithmetic, given, or your own as",
        ),
        (
            "--reward.name=my_hook:short",
            "reward.name 'my_hook:short' takes (completion), expected (completion, answer, *",
        ),
        (
            "--reward.name=my_hook:raises",
            "reward.name 'my_hook:raises' failed for the answers of 4 rows, tried as completions before the run: "
            "{train}, row {row}: KeyError: 'level'. {out}/reward_error.txt has the traceback",
        ),
        ("--reward.name=my_hook:none", "row {row}: TypeError: returned a NoneType, expected a number. "),
        ("--reward.name=my_hook:nan", "row {row}: ValueError: returned nan, expected a finite number. "),
        (
            "--reward.name=my_hook:slow --reward.timeout-s=0.01",
            "row {row}: took longer than reward.timeout_s allows (it is 0.01 s). ",
        ),
        (
            "--reward.name=my_hook:trl",
            "row {row}: TypeError: trl() missing 1 required positional argument: 'solution'. ",
        ),
        ("--report.sinks=half:sink", "'half:sink': importing half failed (NameError: name 'nothing' is not defined)"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(tmp_path: Path, flag: str, said: str) -> None:
    """There is no broker, so a trainer that got that far would wait for it."""
    (tmp_path / "my_hook.py").write_text(
        """
import time
def empty(**_): return []
def number(**_): return 3
def texts(**_): return ["1+1="]
def broken(**_): raise OSError("no network")
def leave(**_): raise SystemExit(0)
async def later(**_): return []
class Lazy(list):
    def __getitem__(self, index): raise OSError("gone")
def lazy(**_): return Lazy([1])
def short(completion): return 1.0
def raises(completion, answer, *, prompt, extra): return extra["level"]
def none(completion, answer, *, prompt, extra): print("no result")
async def nan(completion, answer, *, prompt, extra): return float("nan")
def slow(completion, answer, *, prompt, extra): time.sleep(600)
def trl(completions, solution, **kwargs): return [1.0]
"""
    )
    (tmp_path / "half.py").write_text("def sink(): pass\n\nnothing\n")
    flags = [*config(tmp_path, "run", "redis://127.0.0.1:1/0"), *flag.split()]
    done = run_trainer(flags, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    tried = load_prompts(str(TRAIN)).first(1)[0].index
    assert said.format(train=TRAIN, row=tried, out=tmp_path / "run") in done.stderr
    assert done.stderr.splitlines()[-1].startswith("dvp-train: error: ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tgi", "engine: allowed are transformers, sglang, vllm, fake, or your own as module:function, got 'tgi'"),
        (
            "my_engine:nothing",
            "engine: your function returned an object of type NoneType without capacity,",
        ),
        ("my_engine:broken", "engine: your function failed (RuntimeError: no GPU)"),
    ],
)
def test_an_unusable_engine_is_refused(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "my_engine.py").write_text(
        """
def nothing(settings, *, version): return None
def broken(settings, *, version): raise RuntimeError("no GPU")
"""
    )
    done = run(ROLLOUT, f"--model={MODEL}", f"--engine={name}", "--port=0", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert said in done.stderr


async def test_the_documented_environment_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hooks(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (option,) = documented_options("dvp-harness")
    calculator = EnvironmentProcess(option.removeprefix("--environment="), Limits(WITHIN_S, 1024))
    await calculator.start()
    try:
        messages, tools = await calculator.reset({"row": 0, "prompt": "3+4=", "answer": "7", "columns": {}})
        assert messages == [{"role": "user", "content": "3+4="}]
        assert [tool["function"]["name"] for tool in tools] == ["add"]
        function = {"name": "add", "arguments": '{"a": 3, "b": 4}'}
        call = {"id": "c1", "type": "function", "function": function}
        observed = [{"role": "tool", "tool_call_id": "c1", "content": "7"}]
        asked = await calculator.step({"role": "assistant", "content": None, "tool_calls": [call]})
        assert asked == Step(observed, metrics={"tool_calls": 1, "tool_errors": 0})
        told = await calculator.step({"role": "assistant", "content": "7"})
        assert told == Step([], 1.0, True, {"tool_calls": 0, "tool_errors": 0})
    finally:
        await calculator.stop()


async def test_the_documented_agent_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hooks(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    agent = EnvironmentProcess("my_hooks:Asker", Limits(WITHIN_S, 1024))
    await agent.start()
    assert agent.is_agent
    row = {"row": 0, "prompt": "3+4=", "answer": "7", "columns": {}}
    answers = [(200, {}, {"choices": [{"index": 0, "message": {"content": text}}]}) for text in ("7", "8")]
    try:
        with scripted(*answers) as (url, seen):
            endpoint = Endpoint(f"{url}/v1", "secret", "run")
            assert await agent.play(row, endpoint, pieces=1) == Step([], 1.0, True)
            assert await agent.play(row, endpoint, pieces=1) == Step([], 0.0, True)
    finally:
        await agent.stop()
    for request in seen:
        assert request.body == {"model": "run", "messages": [{"role": "user", "content": "3+4="}]}
        assert request.headers["Authorization"] == "Bearer secret"
