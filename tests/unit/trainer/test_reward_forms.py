"""Rewards in this project's form and in TRL's, plain and async; and those that fit neither."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.data.reward_forms import Form, Request, RewardFunction, form_of

PLAIN = Request(
    completions=["45", "46"],
    completion_ids=[[1, 2], [1, 3]],
    prompt="40+6=",
    messages=None,
    answer="46",
    columns={"answer": 46, "level": 3},
    answer_column="answer",
)
CHAT = PLAIN | {"messages": [{"role": "user", "content": "40+6="}]}


def call(function: Callable[..., Any], request: Request) -> list[Any]:
    with closing(RewardFunction("my:reward", function)) as reward:
        return list(reward(request))


def test_the_own_form_takes_one_completion() -> None:
    def reward(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> Any:
        return (completion, answer, prompt, extra)

    assert form_of("my:reward", reward) is Form.OWN
    assert call(reward, PLAIN | {"completions": ["45"]}) == [("45", "46", "40+6=", {"level": 3})]


def test_trl_gets_the_group_in_lists_and_original_values() -> None:
    def reward(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **kwargs: Any) -> Any:
        assert kwargs == {"level": [3, 3]}
        return list(zip(prompts, completions, completion_ids, answer, strict=True))

    assert form_of("my:reward", reward) is Form.TRL
    assert call(reward, PLAIN) == [("40+6=", "45", [1, 2], 46), ("40+6=", "46", [1, 3], 46)]
    chat = CHAT["messages"]
    assert call(reward, CHAT) == [
        (chat, [{"role": "assistant", "content": "45"}], [1, 2], 46),
        (chat, [{"role": "assistant", "content": "46"}], [1, 3], 46),
    ]


def test_a_function_of_any_keywords_has_trls_form() -> None:
    def reward(**kwargs: Any) -> list[float]:
        return [float(text) for text in kwargs["completions"]]

    assert call(reward, PLAIN) == [45.0, 46.0]


def test_trl_also_gets_the_answer_by_that_name() -> None:
    def reward(completions: list[str], answer: list[str], solution: list[int], **kwargs: Any) -> list[float]:
        return [float(a == str(s)) for a, s in zip(answer, solution, strict=True)]

    assert call(reward, PLAIN | {"columns": {"solution": 46}, "answer_column": "solution"}) == [1.0, 1.0]


def test_none_counts_as_zero_as_in_trl() -> None:
    def reward(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None, 1.0]

    assert call(reward, PLAIN) == [0.0, 1.0]


def test_a_wrong_number_of_rewards_is_refused() -> None:
    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match="returned 1 rewards for 2 completions"):
        call(reward, PLAIN)


class Judge:
    """An object with an async call, as clients of a judging model often are."""

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return list(await asyncio.gather(*(self._one(completion) for completion in completions)))

    async def _one(self, completion: str) -> float:
        await asyncio.sleep(0)
        return float(completion)


async def own(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return float(completion == answer)


def test_async_functions_are_awaited() -> None:
    assert call(Judge(), PLAIN) == [45.0, 46.0]
    assert call(own, PLAIN | {"completions": ["46"]}) == [1.0]


def test_tasks_of_a_failed_call_do_not_reach_the_next() -> None:
    left: list[str] = []

    async def reward(completions: list[str], **kwargs: Any) -> list[float]:
        async def slow() -> None:
            try:
                await asyncio.sleep(600)
            finally:
                left.append("cancelled")

        task = asyncio.create_task(slow())
        await asyncio.sleep(0)
        if completions[0] == "raise":
            raise KeyError("judge")
        task.cancel()
        return [1.0]

    with closing(RewardFunction("my:reward", reward)) as called:
        with pytest.raises(KeyError, match="judge"):
            called(PLAIN | {"completions": ["raise"]})
        assert left == ["cancelled"]
        assert called(PLAIN | {"completions": ["fine"]}) == [1.0]
    gc.collect()


def test_what_is_bound_to_the_event_loop_outlives_a_failed_call() -> None:
    """A judge's client and locks are made once, with the module."""
    two_at_once = asyncio.Semaphore(2)

    async def reward(completions: list[str], **kwargs: Any) -> list[float]:
        async def one(completion: str) -> float:
            async with two_at_once:
                await asyncio.sleep(0.001)
                return float(completion)

        return await asyncio.gather(*(one(completion) for completion in completions))

    with closing(RewardFunction("my:reward", reward)) as called:
        four = ["1", "2", "3", "4"]
        for _ in range(3):
            assert called(PLAIN | {"completions": four}) == [1.0, 2.0, 3.0, 4.0]
            with pytest.raises(ValueError, match="could not convert"):
                called(PLAIN | {"completions": ["1", "HTTP 502", "3", "4"]})


def unusable() -> Iterator[tuple[Callable[..., Any], str]]:
    yield (
        lambda completion: 1.0,
        r"takes \(completion\), expected .completion, answer, \*, prompt, extra. or, as in TRL",
    )
    yield lambda completion, answer: 1.0, "got an unexpected keyword argument 'prompt'"
    yield lambda completion, **kwargs: 1.0, "too many positional arguments"
    yield lambda a, b, c, *, prompt, extra: 1.0, "missing a required argument: 'c'"


@pytest.mark.parametrize(("function", "said"), list(unusable()))
def test_a_function_that_fits_neither_form_is_refused(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        form_of("my:reward", function)


def test_a_function_without_a_signature_is_taken_on_trust() -> None:
    assert form_of("builtins:type", type) is Form.OWN
