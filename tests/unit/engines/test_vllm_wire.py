"""vLLM's answers that are not as expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dvp_rl.contract.errors import EngineError
from dvp_rl.engines.vllm_wire import is_constrained, to_sample
from dvp_rl.vllm_plugin.packing import pack
from tests.integration.engines.jobs import make_job

VERSION = "run:1:aa"


def rank(mass: float = 1.0, count: int = 1) -> int:
    return int(pack(torch.tensor([[mass], [float(count)]])))


def answer(*contents: dict[str, Any], **choice: Any) -> dict[str, Any]:
    spans = [{"version": VERSION, "start": 0, "end": len(contents)}]
    usual = {"token_ids": [5] * len(contents), "finish_reason": "length", "weight_versions": spans}
    return {"choices": [usual | {"logprobs": {"content": list(contents)}} | choice]}


def test_a_server_with_the_plugin() -> None:
    assert is_constrained(answer({"logprob": 0.0, "rank": rank()}))
    assert is_constrained(answer({"logprob": -0.6931, "rank": rank(0.8, 2)}))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({"logprob": 0.0, "rank": 1}, id="an ordinary rank"),
        pytest.param({"logprob": 0.0, "rank": None}, id="no rank"),
        pytest.param({"logprob": -0.7, "rank": rank()}, id="a log-prob of the whole vocabulary"),
    ],
)
def test_a_server_without_the_plugin(content: dict[str, Any]) -> None:
    assert not is_constrained(answer(content))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (answer({"logprob": 0.0, "rank": rank()}, finish_reason="abort"), "ended sample 3 early: abort"),
        (answer({"logprob": 0.0, "rank": 0}), f"not finite at position 4 .*new token 0.* under {VERSION}"),
        (answer({"rank": rank()}), "not as expected: KeyError"),
        ({"choices": []}, "not as expected: IndexError"),
        (answer({"logprob": 0.0, "rank": rank()}, token_ids=[5, 6]), "not as expected: ValidationError"),
    ],
)
def test_answers_that_are_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineError, match=named):
        to_sample(make_job("j", n=4), 3, given)
