"""The same server with and without the plugin, and what holds only without overlap scheduling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.sglang_server import Remote
from tests.integration.engines.oracle import Oracle

from .checks import Answer, check_constrained, check_unconstrained, read
from .server import API_KEY, Server, Servers

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8]
# One request at a time and no step in flight: tokens and rounding depend only on the seed.
FLAGS = ("--disable-overlap-schedule", "--random-seed", "7")
RHO = {"min_p": math.exp(-3), "max_new_tokens": 48}
WITHOUT_MIN_P: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.4, "top_p": 0.8},
    {"top_k": 5},
    {"temperature": 0},
    {"frequency_penalty": 0.5, "temperature": 0.9},
    {"min_p": 0.0},
]
"""Settings of requests with one sample each, because several would share steps by chance."""
TIMES = ("id", "e2e_latency", "response_sent_to_client_ts")


def ask(server: Server) -> list[Answer]:
    answers = []
    for setting in WITHOUT_MIN_P:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 40, "ignore_eos": True} | setting,
            "return_logprob": True,
            "top_logprobs_num": 3,
        }
        answer = server.post("/generate", body)
        answers += answer if isinstance(answer, list) else [answer]
    for answer in answers:
        for name in TIMES:
            answer["meta_info"].pop(name)
    return answers


@pytest.fixture(scope="module")
def with_plugin(servers: Servers, folders: dict[str, Path]) -> list[Answer]:
    """The answers to the first requests of a fresh server."""
    servers.stop()
    return ask(servers.get(folders["qwen3"], *FLAGS))


def test_penalties_and_biases_come_first(
    with_plugin: list[Answer], servers: Servers, folders: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    """The set is taken from the logits that SGLang samples from. (With overlap, SGLang's penalties lag by a token.)"""
    bias = {20: 2.5, 21: -30.0}
    penalties = {"frequency_penalty": 0.7, "presence_penalty": -0.4, "logit_bias": {str(k): v for k, v in bias.items()}}
    (answer,) = servers.get(folders["qwen3"], *FLAGS).generate([PROMPT], [RHO | penalties])
    token_ids = read(answer).token_ids
    logits = oracles["qwen3"].logits(np.array(PROMPT), token_ids)
    for t, row in enumerate(logits):
        counts = np.bincount(token_ids[:t], minlength=len(row))
        row -= 0.7 * counts - 0.4 * (counts > 0)
        row[list(bias)] += list(bias.values())
    check_constrained(answer, logits, -3.0, 1.0, at_least=0.8)


def test_requests_without_min_p_are_the_same_to_the_last_bit(
    with_plugin: list[Answer], servers: Servers, folders: dict[str, Path]
) -> None:
    """This covers tokens, log-probs, top log-probs and the names in `meta_info`."""
    servers.stop()
    stock = ask(servers.get(folders["qwen3"], *FLAGS, SGLANG_PLUGINS="none"))
    assert stock == with_plugin
    assert len({tuple(answer["output_ids"]) for answer in stock}) == len(stock)
    assert not any("kept_mass" in answer["meta_info"] for answer in stock)


def test_stock_server_has_no_constrained_log_probs(
    servers: Servers, folders: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    """A client can tell by the missing kept mass. The checks for constrained log-probs fail here."""
    server = servers.get(folders["qwen3"], *FLAGS, SGLANG_PLUGINS="none")
    (answer,) = server.generate([PROMPT], [RHO])
    logits = oracles["qwen3"].logits(np.array(PROMPT), read(answer).token_ids)
    check_unconstrained(answer, logits, 1.0)
    with pytest.raises(AssertionError):
        check_constrained(answer, logits, -3.0, 1.0)


@pytest.mark.parametrize(
    ("api_key", "named"),
    [("", r"sglang\.api_key"), (API_KEY, r"lacks the dvp-sglang plugin.*pip install dvp-sglang")],
)
async def test_a_replica_refuses_a_stock_server(
    api_key: str, named: str, servers: Servers, folders: dict[str, Path]
) -> None:
    """The key is checked first, then the plugin."""
    server = servers.get(folders["qwen3"], *FLAGS, SGLANG_PLUGINS="none")
    engine = SglangEngine(folders["qwen3"], Remote(server.url, api_key, admin_key="not the admin key"))
    with pytest.raises(ConfigError, match=named):
        await engine.start()
    await engine.close()
