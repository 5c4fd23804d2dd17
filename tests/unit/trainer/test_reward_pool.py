"""The pool with real worker processes, and reward functions that go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dvp_rl.contract.errors import ConfigError, UnavailableError
from dvp_trainer.data.prompts import Row
from dvp_trainer.data.reward_forms import Form
from dvp_trainer.data.reward_pool import RewardPool, RewardRequest
from tests.kit.wait import until_async

TIMEOUT_S = 1.0
"""Time limit per sample, in seconds. Samples that do not hang take far less; many of these tests wait this long."""


def request(
    completion: str, row: int = 0, answer: str | None = "46", prompt: str = "", **columns: Any
) -> RewardRequest:
    return RewardRequest(Row(row, prompt, answer, columns), [completion])


@pytest.fixture
def misbehaving(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    return "misbehaving:reward"


@pytest.fixture
async def pool(misbehaving: str) -> AsyncIterator[RewardPool]:
    async with RewardPool(misbehaving, timeout_s=TIMEOUT_S) as pool:
        yield pool


async def gone(pid: int) -> None:
    """Waits until the process is gone, or is a zombie that its new parent has yet to reap."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110 - another process has no Event
            await asyncio.sleep(0.01)


async def test_results_come_in_order_from_all_workers() -> None:
    async with RewardPool("arithmetic", workers=2) as pool:
        results = await pool.score([request(str(i), i) for i in range(300)])
    assert [result.value for result in results] == [float(i == 46) for i in range(300)]
    assert all(result.error is None and result.seconds >= 0 for result in results)


async def test_nothing_to_score(pool: RewardPool) -> None:
    assert await pool.score([]) == []


async def test_the_function_sees_answer_prompt_and_extra(pool: RewardPool) -> None:
    (result,) = await pool.score([request("echo", answer="100", prompt="äö\n𝄞", more=0.5, path=Path("x"))])
    assert result.value == 104.5


@pytest.mark.parametrize(
    ("completion", "error"),
    [
        ("raise", "row 7: KeyError: 'no such field"),
        ("nan", "row 7: ValueError: returned nan, expected a finite number"),
        ("none", "row 7: TypeError: returned a NoneType, expected a number"),
        ("text", "row 7: TypeError: returned a str, expected a number"),
        ("sleep", "row 7: took longer than reward.timeout_s allows"),
        ("swallow", "row 7: took longer than reward.timeout_s allows"),
        ("deaf", "row 7: took longer than reward.timeout_s allows and had to be killed"),
        ("hoard", "row 7: needed more memory than reward.memory_mib allows"),
        ("exit", "row 7: its process ended with exit status 3"),
        ("sys.exit", "row 7: SystemExit: 4"),
        ("cancelled", "row 7: CancelledError: "),
        ("no text", "row 7: NoTextError: (it has no text)"),
        ("long", "row 7: ValueError: xxx"),
        ("crash", "row 7: its process ended by SIGSEGV"),
    ],
)
async def test_a_bad_sample_costs_only_itself(pool: RewardPool, completion: str, error: str) -> None:
    samples = [request("fine", 5), request("fine", 6), request(completion, 7), *(request("fine", 8) for _ in range(9))]
    results = await pool.score(samples)
    assert [result.value for result in results] == [0.25] * 2 + [None] + [0.25] * 9
    assert results[2].error is not None
    assert results[2].error.startswith(error)
    assert (await pool.score([request("fine")]))[0].value == 0.25


async def test_the_traceback_begins_in_the_users_function(pool: RewardPool) -> None:
    raised, slow, nan = await pool.score([request(kind) for kind in ("raise", "sleep", "nan")])
    assert raised.trace.startswith("Traceback (most recent call last):\n")
    assert raised.trace.endswith("KeyError: 'no such field\\nsecond line'\n")
    for trace, line in [(raised.trace, 'raise KeyError("no such'), (slow.trace, "wait_for_ever()")]:
        assert "misbehaving.py" in trace
        assert line in trace
    assert "reward_worker.py" not in raised.trace
    assert "expected a finite number" in nan.trace
    assert [raised.timed_out, slow.timed_out] == [False, True]


async def test_the_traceback_of_a_long_message_keeps_both_ends(pool: RewardPool) -> None:
    (long,) = await pool.score([request("long")])
    assert 'raise ValueError("x" * 100_000)' in long.trace
    assert long.trace.endswith("xxx\n")
    assert len(long.trace) < 20_000


async def test_the_traceback_of_a_coroutine_begins_in_it(misbehaving: str) -> None:
    async with RewardPool("misbehaving:awaited", timeout_s=TIMEOUT_S) as pool:
        (raised,) = await pool.score([request("x")])
    assert raised.trace.splitlines()[1].strip().startswith(f'File "{Path(__file__).with_name("misbehaving.py")}"')


async def test_values_reach_the_function_as_in_the_row(pool: RewardPool) -> None:
    row = {"number": np.int64(5), "share": np.float32(0.5), "many": np.arange(3), "when": date(2026, 1, 2)}
    (result,) = await pool.score([request("columns", **row)])
    assert (result.error, result.value) == (None, 1.0)


async def test_a_column_that_cannot_be_passed_is_named(pool: RewardPool) -> None:
    with pytest.raises(ConfigError, match="rows 7 to 7: a column cannot be passed to the reward as JSON: keys must be"):
        await pool.score([request("fine", 7, bad={(1, 2): 3})])


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("raise", "row 1: KeyError: 'no such field"),
        ("sleep", "row 1: took longer than reward.timeout_s allows"),
        ("deaf", "row 1: took longer than reward.timeout_s allows and had to be killed"),
        ("exit", "row 1: its process ended with exit status 3"),
    ],
)
async def test_a_bad_completion_costs_its_group_in_trls_form(misbehaving: str, bad: str, error: str) -> None:
    async with RewardPool("misbehaving:group", timeout_s=TIMEOUT_S) as pool:
        assert pool.form is Form.TRL
        groups = [["fine", "fine"], ["fine", bad], ["fine"], ["fine", "nan"]]
        requests = [
            request for row, group in enumerate(groups) for request in pool.requests(Row(row, ""), group, [[1]] * 2)
        ]
        results = await pool.score(requests)
    assert [result.value for result in results] == [0.25, 0.25, None, None, 0.25, 0.25, None]
    assert all(str(results[i].error).startswith(error) for i in (2, 3))


async def test_several_bad_samples_in_one_chunk(misbehaving: str) -> None:
    async with RewardPool(misbehaving, timeout_s=TIMEOUT_S) as pool:
        kinds = ["exit", "fine", "crash", "sleep", "exit", "raise", "fine", "exit"] * 8
        results = await pool.score([request(kind, i) for i, kind in enumerate(kinds) if kind != "sleep" or i < 8])
    kept = [kind for i, kind in enumerate(kinds) if kind != "sleep" or i < 8]
    assert [result.value for result in results] == [0.25 if kind == "fine" else None for kind in kept]


async def test_a_worker_lost_between_samples_costs_none(pool: RewardPool) -> None:
    (result,) = await pool.score([request("pid")])
    worker = psutil.Process(int(result.value or 0))
    worker.kill()
    await gone(worker.pid)
    assert (await pool.score([request("fine")]))[0].value == 0.25


async def test_children_of_a_killed_worker_die_with_it(pool: RewardPool, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    (result,) = await pool.score([request("deaf parent", pid_file=str(pid_file))])
    assert result.value is None
    await gone(int(pid_file.read_text()))


async def test_prints_and_reads_do_not_disturb_the_pipes(pool: RewardPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert [result.value for result in await pool.score([request("print")] * 3)] == [1.0] * 3


async def test_workers_import_no_torch(pool: RewardPool) -> None:
    assert (await pool.score([request("modules")]))[0].value == 0.0


async def test_a_busy_event_loop_is_no_time_out(pool: RewardPool) -> None:
    """The results wait in the pipe while the loop is blocked for longer than the limit and the grace together."""
    scoring = asyncio.create_task(pool.score([request("fine")]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    time.sleep(TIMEOUT_S + 1.2)  # noqa: ASYNC251 - the point of the test
    assert (await scoring)[0].value == 0.25


async def test_a_cancelled_score_leaves_the_pool_usable(pool: RewardPool) -> None:
    scoring = asyncio.create_task(pool.score([request("sleep")] * 3))
    await asyncio.sleep(0.05)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert (await pool.score([request("fine")]))[0].value == 0.25


async def test_a_score_cancelled_while_it_waits_for_room_leaves_no_error_behind(misbehaving: str) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with RewardPool(misbehaving, timeout_s=60) as pool:
        scoring = asyncio.create_task(pool.score([request("sleep")] * 100))
        await asyncio.sleep(0.05)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
    gc.collect()
    assert errors == []


async def test_close_ends_every_process_and_every_wait(misbehaving: str) -> None:
    pool = RewardPool(misbehaving, workers=2, timeout_s=60)
    await pool.start()
    workers = [process for process in psutil.Process().children() if "reward_worker" in " ".join(process.cmdline())]
    scoring = asyncio.create_task(pool.score([request("sleep")] * 100))  # more chunks than the queue holds
    await asyncio.sleep(0.05)
    await pool.close()
    with pytest.raises(UnavailableError, match="closed"):
        await scoring
    assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)
    await pool.close()


TRAINER = """
import asyncio, sys
from dvp_trainer.data.prompts import Row
from dvp_trainer.data.reward_pool import RewardPool, RewardRequest

async def main():
    async with RewardPool("misbehaving:reward", timeout_s=600) as pool:
        print(int((await pool.score([RewardRequest(Row(0, ""), ["pid"])]))[0].value), flush=True)
        await pool.score([RewardRequest(Row(0, "", columns={"mark": sys.argv[1]}), ["deaf"])])

asyncio.run(main())
"""


async def test_workers_end_when_the_trainer_is_killed(misbehaving: str, tmp_path: Path) -> None:
    """Workers end even if they are busy in code that checks neither pipes nor signals."""
    path, mark = os.pathsep.join(sys.path), tmp_path / "busy"
    command = (sys.executable, "-c", TRAINER, str(mark))
    trainer = await asyncio.create_subprocess_exec(*command, stdout=PIPE, env=os.environ | {"PYTHONPATH": path})
    assert trainer.stdout is not None
    worker = int(await trainer.stdout.readline())
    await until_async(mark.exists)
    trainer.kill()
    await trainer.wait()
    await gone(worker)


async def test_an_unusable_reward_is_refused_at_start(misbehaving: str) -> None:
    for name, message in [("maths", "allowed are"), ("misbehaving:absent", "no function 'absent'")]:
        with pytest.raises(ConfigError, match=message):
            await RewardPool(name).start()


async def test_a_reward_that_kills_its_process_on_import_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly_reward.py").write_text("import os; os._exit(9)\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(ConfigError, match="did not start: its process ended with exit status 9"):
        await RewardPool("deadly_reward:f").start()
