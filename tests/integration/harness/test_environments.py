"""Environments in real worker processes: what they answer, and every way in which they fail."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

import psutil
import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.harness import Endpoint, Step
from dvp_rl.harness.__main__ import main
from dvp_rl.harness.process import EnvironmentFailedError, EnvironmentProcess
from dvp_rl.workers.limits import Limits
from tests.kit.wait import WITHIN_S, until_async

MODULE = "tests.integration.harness.environments"
SAID = {"role": "assistant", "content": "2"}
PATIENT = Limits(WITHIN_S, 1024)
HASTY = Limits(0.5, 1024)
"""For what hangs. Anything else is tried again under it: this machine may be slow for a moment."""
NOWHERE = Endpoint("http://127.0.0.1:1/v1", "none", "run")
Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def started(name: str, limits: Limits = PATIENT) -> EnvironmentProcess:
            process = EnvironmentProcess(f"{MODULE}:{name}", limits)
            stack.push_async_callback(process.stop)
            await process.start()
            return process

        yield started


async def ready(process: EnvironmentProcess, prompt: str) -> list[Any]:
    """Begins an episode, however often the time limit is too short for that; returns the tools."""

    async def reset() -> tuple[list[Any], list[Any]] | None:
        with suppress(EnvironmentFailedError):
            return await process.reset({"prompt": prompt})
        return None

    _, tools = await until_async(reset)
    return tools


async def is_well(process: EnvironmentProcess) -> bool:
    with suppress(EnvironmentFailedError):
        await process.reset({"prompt": "good"})
        return await process.step(SAID) == Step([], 1.0, True)
    return False


async def test_an_episode(start: Start) -> None:
    sums = await start("Sums")
    for _ in range(2):  # each with an object of its own
        assert await sums.reset({"prompt": "3+4="}) == ([{"role": "user", "content": "3+4="}], [])
        again = [{"role": "user", "content": "2+2="}]
        assert await sums.step(SAID) == Step(again, 0.5, metrics={"second": 0})
        assert await sums.step(SAID) == Step(again, 0.5, True, {"second": 1})
        await sums.close()


@pytest.mark.parametrize("name", ["Plain", "made"])
async def test_plain_methods_plain_tuples_and_factories(start: Start, name: str) -> None:
    plain = await start(name)
    assert await plain.reset({}) == ([{"role": "user", "content": "1+1="}], [])
    assert await plain.step(SAID) == Step([], None, True)


@pytest.mark.parametrize(
    ("mood", "error"),
    [
        ("raise", "step: ValueError: no more sums"),
        ("exit", "step: SystemExit: "),
        ("nothing", "step: TypeError: returned an object of type NoneType, expected a Step"),
        ("other", "step: TypeError: returned an object of type dict, expected a Step"),
        ("base", "step: Uncaught: from below"),
        ("surrogate", r"step: ValueError: not \ud800 text"),
        ("nan", "step: ValueError: returned nan, expected a finite number"),
        ("unnamed", "step: ValueError: metrics: Tool errors.[key]: String should match pattern"),
        ("uncounted", "step: ValueError: metrics: luck: Input should be a valid number, got 'much'"),
        (
            "recounted",
            "step: ValueError: metrics: record: other names than turns, which the replica counts",
        ),
        ("endless", "step: ValueError: metrics: luck: Input should be a valid number, got 1000"),
        ("scored", "step: TypeError: metrics: expected numbers by name, got an object of type float"),
        ("role", "step: ValueError: messages: 0.role: Input should be 'system'"),
        ("grow", "step: needed more memory than memory_mib allows"),
    ],
)
async def test_a_failure_costs_the_episode_but_not_the_process(start: Start, mood: str, error: str) -> None:
    moody = await start("Moody")
    await moody.reset({"prompt": mood})
    with pytest.raises(EnvironmentFailedError) as failed:
        await moody.step(SAID)
    assert str(failed.value).startswith(error)
    if mood == "raise":
        assert failed.value.trace.splitlines()[1].endswith("in step"), "the traceback begins with the user's code"
    await moody.close()
    assert (await moody.reset({"prompt": "good"}))[0]
    assert await moody.step(SAID) == Step([], 1.0, True)


@pytest.mark.parametrize(
    ("mood", "error"),
    [
        ("die", "step: its process ended with exit status 3"),
        ("wait", "step: took longer than timeout_s allows"),
        ("hang", "step: took longer than timeout_s allows and had to be killed"),
    ],
)
async def test_a_process_that_ends_or_hangs_is_replaced(start: Start, mood: str, error: str) -> None:
    moody = await start("Moody", HASTY if mood != "die" else PATIENT)
    await ready(moody, mood)
    with pytest.raises(EnvironmentFailedError, match=f"^{error}"):
        await moody.step(SAID)
    await until_async(lambda: is_well(moody))


async def test_a_fork_that_returns_answers_nothing(start: Start) -> None:
    moody = await start("Moody")
    await moody.reset({"prompt": "fork"})
    assert await moody.step(SAID) == Step([], 1.0, True)
    assert await moody.step(SAID) == Step([], 1.0, True), "not the second answer to the first call"


async def test_processes_that_an_environment_leaves_behind_hold_nothing_up(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    moody = await start("Moody", Limits(3.0, 1024))

    async def has_escaped() -> bool:
        await ready(moody, "escape")
        with pytest.raises(EnvironmentFailedError, match="had to be killed"):
            await moody.step(SAID)
        return (tmp_path / "escaped").exists()

    await until_async(has_escaped)
    os.kill(int((tmp_path / "escaped").read_text()), SIGKILL)
    moody = await start("Moody")
    await moody.reset({"prompt": "leave"})
    with pytest.raises(EnvironmentFailedError, match="its process ended with exit status 3"):
        await moody.step(SAID)
    left = int((tmp_path / "left").read_text())
    await until_async(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE)


async def test_tools_that_are_none_are_refused(start: Start) -> None:
    unwrapped = await start("Unwrapped")
    with pytest.raises(
        EnvironmentFailedError, match=r"reset: ValueError: tools: 0: Input should be a valid dictionary"
    ):
        await unwrapped.reset({})


async def test_the_end_of_an_episode(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    moody = await start("Moody")
    await moody.reset({"prompt": "open"})
    await moody.step(SAID)
    closed = tmp_path / "closed"
    assert closed.read_text() == "no"
    await moody.close()
    assert closed.read_text() == "yes"
    await moody.reset({"prompt": "stuck"})
    with pytest.raises(EnvironmentFailedError, match="close: ValueError: will not close"):
        await moody.close()
    await moody.close()


async def test_what_an_environment_counts(start: Start) -> None:
    """Its own numbers replace those that are counted for it."""
    process = await start("Counting")
    call = {"id": "1", "type": "function", "function": {"name": "gently", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call, call]}
    for _ in range(2):  # the first episode's errors are not the second's
        await process.reset({})
        for found in ({"tool_calls": 2, "tool_errors": 2, "luck": 0.5}, {"tool_calls": 2, "tool_errors": 9, "luck": 1}):
            assert (await process.step(said)).metrics == found


async def test_a_tool_that_hangs_is_an_observation(start: Start) -> None:
    process = await start("WithTools", HASTY)
    tools = await ready(process, "")
    assert [tool["function"]["name"] for tool in tools] == ["slow", "gently"]
    calls = [
        {"id": str(at), "type": "function", "function": {"name": name, "arguments": json.dumps({"seconds": seconds})}}
        for at, (name, seconds) in enumerate([("slow", 600), ("gently", 600), ("slow", 0), ("gently", 0)])
    ]
    late = "error: this took too long"
    observed = [
        {"role": "tool", "tool_call_id": str(at), "content": content}
        for at, content in enumerate([late, late, "done", "done"])
    ]

    async def is_observed() -> bool:
        await ready(process, "")
        with suppress(EnvironmentFailedError):
            said = {"role": "assistant", "content": None, "tool_calls": calls}
            return await process.step(said) == Step(observed, 1.0, True, {"tool_calls": 4, "tool_errors": 2})
        return False

    await until_async(is_observed)


async def test_an_agent_may_take_the_time_of_many_turns(start: Start) -> None:
    agent, row = await start("Napping", HASTY), {"prompt": "1+1="}

    async def played() -> Step | None:
        with suppress(EnvironmentFailedError):
            return await agent.play(row, NOWHERE, pieces=600)
        return None

    assert await until_async(played) == Step([], 0.25, True)
    with pytest.raises(EnvironmentFailedError, match=r"^play: took longer than timeout_s allows"):
        await agent.play(row, NOWHERE, pieces=1)


async def test_an_agent_may_use_tools_in_threads(start: Start) -> None:
    agent = await start("Threaded")
    assert await agent.play({"prompt": "1+1="}, NOWHERE, pieces=1) == Step([], 1.0, True)


@pytest.mark.parametrize("name", ["Tupled", "Talking"])
async def test_an_agent_says_plainly_how_its_episode_ended(start: Start, name: str) -> None:
    agent = await start(name)
    with pytest.raises(
        EnvironmentFailedError, match="TypeError: returned a tuple, expected a number or a Step without"
    ):
        await agent.play({"prompt": "1+1="}, NOWHERE, pieces=1)


async def test_an_environment_may_have_a_method_play(start: Start) -> None:
    assert not (await start("Game")).is_agent


def test_an_error_that_shows_the_endpoint_keeps_its_key_secret() -> None:
    assert "none" not in f"{NOWHERE}"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("NoStep", "the class has no method step, and no play"),
        ("WithArguments", r"must be created without arguments \(missing a required argument: 'size'\)"),
        ("Absent", "has no function 'Absent'"),
    ],
)
async def test_what_is_no_environment_is_refused(start: Start, name: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        await start(name)


@pytest.fixture
def row(tmp_path: Path) -> Path:
    file = tmp_path / "row.json"
    file.write_text(json.dumps({"prompt": "3+4=", "answer": "7"}))
    return file


def try_out(capsys: pytest.CaptureFixture[str], row: Path, name: str, *options: str) -> tuple[int, str]:
    """Exit code and output of `dvp-harness --trial`."""
    code = 0
    try:
        main([f"--environment={MODULE}:{name}", f"--trial={row}", *options])
    except SystemExit as end:
        code = int(str(end.code))
    out, err = capsys.readouterr()
    return code, out + err


def test_a_trial_needs_no_replica(capsys: pytest.CaptureFixture[str], row: Path) -> None:
    code, printed = try_out(capsys, row, "Sums")
    said = json.loads(printed)
    assert (code, said["answer"]) == (0, "7")
    asked, again = [{"role": "user", "content": "3+4="}], [{"role": "user", "content": "2+2="}]
    answer = {"role": "assistant", "content": "7"}
    assert [request["messages"] for request in said["requests"]] == [asked, [*asked, answer, *again]]
    assert said["step"] == {"messages": again, "reward": 0.5, "done": False, "metrics": {"second": 0.0}}
    _, printed = try_out(capsys, row, "WithTools")
    (request,) = json.loads(printed)["requests"]
    assert [tool["function"]["name"] for tool in request["tools"]] == ["slow", "gently"]


def test_a_trial_without_a_model_asks_no_agent(capsys: pytest.CaptureFixture[str], row: Path) -> None:
    code, printed = try_out(capsys, row, "Failing")
    assert (code, json.loads(printed)["requests"]) == (0, [])


def test_a_trial_says_what_is_wrong(capsys: pytest.CaptureFixture[str], row: Path) -> None:
    row.write_text('{"prompt": "raise", "answer": null}')
    code, printed = try_out(capsys, row, "Moody")
    assert code == 2
    assert f"environment '{MODULE}:Moody': step: ValueError: no more sums\nTraceback" in printed
    assert "messages: List should have at least 1 item" in try_out(capsys, row, "Silent")[1]
    row.write_text('{"prompt": "1+1=", "answer": 2, "level": 3}')
    printed = try_out(capsys, row, "Sums")[1]
    assert "answer: Input should be a valid string" in printed
    assert "level: Extra inputs are not permitted" in printed
    row.write_text("[]")
    assert "row: record: Input should be an object" in try_out(capsys, row, "Sums")[1]
    assert "cannot be read: No such file" in try_out(capsys, row.with_name("absent"), "Sums")[1]


def test_without_a_trial_there_must_be_a_replica(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--environment={MODULE}:Sums"])
    assert "urls: needs at least one URL" in capsys.readouterr().err
