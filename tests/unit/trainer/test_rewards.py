from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dvp_rl.contract.errors import ConfigError
from dvp_rl.hooks import as_number
from dvp_trainer.data import rewards
from dvp_trainer.data.rewards import needs_answer, overlong_penalty, resolve_reward, stated_result


def worth(name: str, completion: str, answer: str | None) -> float:
    return resolve_reward(name)(completion, answer, prompt="", extra={})


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so it is \boxed{34}.", "34", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{ \frac{\sqrt{3}}{2} }", r"\frac{\sqrt{3}}{2}", 1.0),
        (r"\boxed{2x+2}", "2(x+1)", 1.0),
        ("Steps.\nAnswer: 34", "34", 1.0),
        ("Steps.\nAnswer: $34$.", "34", 1.0),
        ("**Answer:** 34", "34", 1.0),
        ("**Answer**: 34", "34", 1.0),
        ("__Answer__ : **34**", "34", 1.0),
        ("Steps.\nAnswer:\n34", "34", 1.0),
        ("Steps.\n**Answer:**\n\n$34$\n", "34", 1.0),
        ("Answer: 34\nAnswer:\n", "34", 1.0),
        ("Answer:\n35", "34", 0.0),
        (r"Answer: 12\,345", "12345", 1.0),
        (r"\boxed{1\,234\;567}", "1234567", 1.0),
        ("Answer: 12 345", "12345", 1.0),
        (r"\boxed{12345}", r"12\,345", 1.0),
        (r"\boxed{(1,\,200)}", "(1, 200)", 1.0),
        (r"\boxed{2\,34}", "234", 0.0),
        (r"Answer: \boxed{34}", "34", 1.0),
        ("Answer: 12\nNo, wait.\nAnswer: 34", "34", 1.0),
        ("Answer: 34\nNo, wait.\nAnswer: 12", "34", 0.0),
        (r"\boxed{34} but then Answer: 12", "34", 0.0),
        (r"Answer: 12, I mean \boxed{34}", "34", 1.0),
        (r"\boxed{35}", "34", 0.0),
        ("the numbers 33, 34 and 35 occur", "34", 0.0),
        (r"cut off at \boxed{3", "3", 0.0),
        (r"\boxed{}", "34", 0.0),
        ("", "34", 0.0),
        (r"\boxed{\frac{1}{0}}", "34", 0.0),
    ],
)
def test_math(completion: str, answer: str, expected: float) -> None:
    assert worth("math", completion, answer) == expected


def test_stated_result_keeps_nested_braces() -> None:
    assert stated_result(r"\boxed{\frac{a}{b_{1}}} and text}") == r"\frac{a}{b_{1}}"
    assert stated_result("nothing") is None


@pytest.mark.parametrize(
    ("name", "completion", "expected"),
    [
        ("exact_match", " 46\n", 1.0),
        ("exact_match", "046", 0.0),
        ("arithmetic", "46", 1.0),
        ("arithmetic", " 046", 1.0),
        ("arithmetic", "46.0", 0.0),
        ("arithmetic", "4_6", 0.0),
        ("arithmetic", "٤٦", 0.0),
        ("arithmetic", "", 0.0),
        ("arithmetic", "46 ", 1.0),
        ("arithmetic", "47", 0.0),
        ("arithmetic", "9" * 5000, 0.0),
    ],
)
def test_plain_rewards(name: str, completion: str, expected: float) -> None:
    assert worth(name, completion, "46") == expected


def test_a_reward_that_the_harness_owes_fails() -> None:
    assert not needs_answer("given")
    with pytest.raises(ValueError, match="the harness finished the episode without a reward"):
        worth("given", "7", "7")


@pytest.mark.parametrize("name", [name for name in rewards.NAMED if name != "given"])
def test_named_rewards_need_an_answer(name: str) -> None:
    assert needs_answer(name)
    with pytest.raises(ValueError, match="has none"):
        worth(name, r"\boxed{1}", None)


def test_own_rewards_come_from_the_working_directory_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward_of_this_test.py").write_text("def half(completion, answer, *, prompt, extra): return 0.5\n")
    (tmp_path / "math.py").write_text("raise RuntimeError('a user file shadows the standard library')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert worth("my_reward_of_this_test:half", "", None) == 0.5
    assert sys.path[-1] == str(tmp_path)
    assert not needs_answer("my_reward_of_this_test:half")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", "allowed are math, exact_match, arithmetic"),
        ("module:", "module:function"),
        ("no_such_module_anywhere:f", "importing no_such_module_anywhere failed"),
        ("json:no_such_function", "json has no function 'no_such_function'"),
        ("json:__name__", "no function"),
    ],
)
def test_unusable_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_reward(name)


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), torch.tensor(0.5)])
def test_numbers_of_any_kind_are_rewards(value: Any) -> None:
    assert as_number(value) == float(value)


@pytest.mark.parametrize("value", [None, "1", [1.0], math.nan, math.inf])
def test_anything_else_is_a_failure(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="expected a"):
        as_number(value)


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (101, -1.0)]
)
def test_overlong_penalty(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_tokens=100, buffer=20) == pytest.approx(penalty)


def test_overlong_penalty_without_buffer_punishes_only_beyond() -> None:
    assert [overlong_penalty(length, 100, 0) for length in (99, 100, 101)] == [0.0, 0.0, -1.0]
