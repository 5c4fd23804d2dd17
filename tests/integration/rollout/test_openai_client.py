"""OpenAI's own client: plain and asynchronous, streamed and not, with a model that calls a tool or answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from dvp_rl.contract.http import MAX_BODY_BYTES
from dvp_rl.http.api_tokens import Scope
from tests.integration.engines.oracle import TOLERANCE, Oracle
from tests.integration.rollout.test_sessions import (
    USER,
    Opened,
    check_logprobs,
    drawn_turns,
    expected_logprobs,
    make_chat_model,
    opened,
)
from tests.kit.caller import ADD, ANSWER, ARGUMENTS, make_caller
from tests.kit.gateway import gateway, needs_haproxy
from tests.kit.replicas import ReplicaProcess, ReplicaThread
from tests.kit.tokens import TOKEN, write_token
from tests.kit.wait import WITHIN_S

CALLERS: dict[str, Scope] = {"alice": Scope.ROLLOUT, "bob": Scope.ROLLOUT, "carol": Scope.READ}
"""Scopes of their tokens."""
MAX_SEEDS = 32
"""Most sessions until each way to ask has got both kinds of answers."""
Way = Callable[[Opened, dict[str, Any]], Any]
"""Asks for a turn and returns the whole answer."""


def plain(session: Opened, request: dict[str, Any]) -> Any:
    return session.openai.chat.completions.create(**request)


def streamed(session: Opened, request: dict[str, Any]) -> Any:
    state = ChatCompletionStreamState()
    for chunk in session.openai.chat.completions.create(**request, stream=True):
        state.handle_chunk(chunk)
    return state.get_final_completion()


def asynchronous(session: Opened, request: dict[str, Any]) -> Any:
    async def ask() -> Any:
        async with client(session) as own:
            return await own.chat.completions.create(**request)

    return asyncio.run(ask())


def streamed_asynchronously(session: Opened, request: dict[str, Any]) -> Any:
    async def ask() -> Any:
        state = ChatCompletionStreamState()
        async with client(session) as own:
            async for chunk in await own.chat.completions.create(**request, stream=True):
                state.handle_chunk(chunk)
        return state.get_final_completion()

    return asyncio.run(ask())


def client(session: Opened) -> openai.AsyncOpenAI:
    key, retries = session.openai.api_key, session.openai.max_retries
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=key, timeout=WITHIN_S, max_retries=retries)


WAYS: tuple[Way, ...] = (plain, streamed, asynchronous, streamed_asynchronously)


class Dialogue:
    """One conversation, whose tool answers 2."""

    def __init__(self, session: Opened) -> None:
        self.session = session
        self.messages: list[Any] = [USER]
        self.logprobs: list[float] = []
        """What the client was told of all tokens."""

    def turn(self, way: Way) -> str:
        """Returns why the answer ended."""
        request = {"model": self.session.model, "messages": self.messages, "tools": [ADD], "logprobs": True}
        (choice,) = way(self.session, request).choices
        self.logprobs += [token.logprob for token in choice.logprobs.content]
        self.messages.append(choice.message)
        if choice.finish_reason == "tool_calls":
            (call,) = choice.message.tool_calls
            assert (call.type, call.function.name) == ("function", "add")
            assert json.loads(call.function.arguments) == ARGUMENTS
            assert not choice.message.content
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
        else:
            assert choice.message.content == ANSWER
            assert not choice.message.tool_calls
            self.messages.append(USER)
        reason: str = choice.finish_reason
        return reason

    def finish(self, oracle: Oracle) -> None:
        """All turns are one sample, which holds what the client was told, given all that was read."""
        body = self.session.finish(1.0)
        assert body["drifted"] == 0
        (sample,) = body["group"]["samples"]
        assert sample["logprobs"] == self.logprobs
        prompt_ids = body["group"]["prompt_ids"]
        check_logprobs(oracle, prompt_ids, sample)
        otherwise = expected_logprobs(oracle, prompt_ids[len(prompt_ids) // 2 :], sample)
        assert np.abs(otherwise - self.logprobs).max() > 10 * TOLERANCE, "what was read can be told from these"


def check_client(replica: ReplicaProcess, oracle: Oracle) -> None:
    """Plays sessions until each way to ask has got a call and an answer. Most of what the turns read is cached."""
    got, wanted = set(), {(way, reason) for way in WAYS for reason in ("stop", "tool_calls")}
    for seed in range(MAX_SEEDS):
        with opened(replica, sampling={"max_tokens": 8, "seed": seed}) as session:
            dialogue = Dialogue(session)
            got |= {(way, dialogue.turn(way)) for way in WAYS}
            dialogue.finish(oracle)
        if got == wanted:
            break
    assert got == wanted
    tokens = replica.prompt_tokens()
    assert tokens["cached"] > 3 * tokens["read"]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_caller(tmp_path_factory.mktemp("caller"))


@pytest.fixture(scope="module")
def oracle(caller: Path) -> Oracle:
    return Oracle(caller)


@pytest.fixture(scope="module")
def calling(caller: Path, broker_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaProcess]:
    args = ["--model", str(caller), "--redis-url", broker_url, "--run-id", "calling", "--threads", "1"]
    with ReplicaProcess(tmp_path_factory.mktemp("calling"), *args) as process:
        yield process


def test_what_the_client_reads_is_what_is_recorded(calling: ReplicaProcess, oracle: Oracle) -> None:
    check_client(calling, oracle)


def test_a_turn_has_limits_of_its_own(calling: ReplicaProcess) -> None:
    with opened(calling, sampling={"max_tokens": 8}) as session:
        cut = session.chat([USER], tools=[ADD], max_completion_tokens=1)
        assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 1)
        stopped = session.chat([USER], tools=[ADD], stop=[ANSWER, "<tool_call>"])
        assert (stopped.choices[0].finish_reason, stopped.usage.completion_tokens) == ("stop", 1)
        assert not stopped.choices[0].message.content


def test_refusals_have_openais_shape_and_lose_nothing(broker_url: str, run_id: str, tmp_path: Path) -> None:
    folder, tokens = make_chat_model(tmp_path / "model", "gemma"), tmp_path / "tokens"
    keys = {name: write_token(tokens, scope, name) for name, scope in CALLERS.items()}
    args = ["--model", str(folder), "--engine", "fake", "--redis-url", broker_url, "--run-id", run_id]
    with (
        ReplicaThread(tmp_path / "replica", *args, "--token-folder", str(tokens), token=keys["alice"]) as replica,
        opened(replica, token=keys["alice"]) as session,
    ):

        def refused(error: type[openai.APIStatusError], **request: Any) -> Any:
            """Asks for a turn, with one's own `api_key` if it is given. Returns the error's body."""
            own = session.openai.with_options(api_key=request.pop("api_key", keys["alice"]))
            with pytest.raises(error) as caught:
                own.chat.completions.create(**({"model": session.model, "messages": [USER]} | request))
            assert set(caught.value.body) == {"message", "type", "param", "code"}
            answer, problem = caught.value.response, caught.value.response.json()
            assert answer.headers["content-type"] == "application/problem+json"
            assert (problem["status"], problem["detail"]) == (answer.status_code, caught.value.body["message"])
            return caught.value.body

        first = session.chat([USER]).choices[0].message
        refused(openai.AuthenticationError, api_key="a-stranger")
        refused(openai.PermissionDeniedError, api_key=keys["carol"])
        assert "never opened" in refused(openai.NotFoundError, api_key=keys["bob"])["message"]
        large = {"role": "user", "content": "1" * MAX_BODY_BYTES}
        too_large = refused(openai.APIStatusError, messages=[large])
        assert (too_large["type"], str(MAX_BODY_BYTES) in too_large["message"]) == ("Body too large", True)
        assert refused(openai.UnprocessableEntityError, messages=[USER, USER])["param"] == "messages.1"
        assert refused(openai.UnprocessableEntityError, tools=[ADD])["param"] == "tools"
        assert session.chat([USER, first, USER]).model_extra["recording"]["turn"] == 1
        assert session.finish(1.0)["turns"] == 2


@needs_haproxy
def test_behind_a_gateway_a_session_stays_with_a_replica_until_it_is_gone(
    caller: Path, oracle: Oracle, broker_url: str, tmp_path: Path
) -> None:
    args = ["--model", str(caller), "--redis-url", broker_url, "--run-id", "gateway", "--threads", "1"]
    given, homes, reasons = {"DVP_ROLLOUT__TOKEN": TOKEN}, set[int](), set[str]()
    with ExitStack() as stack:
        started = (ReplicaProcess(tmp_path / name, *args, token=TOKEN, variables=given) for name in "abc")
        replicas = [stack.enter_context(replica) for replica in started]
        url = stack.enter_context(gateway(tmp_path, *(replica.port for replica in replicas)))
        for seed in range(6):
            before = drawn_turns(replicas)
            with opened(url, token=TOKEN, sampling={"max_tokens": 8, "seed": seed}) as session:
                dialogue = Dialogue(session)
                reasons |= {dialogue.turn(way) for way in WAYS}
                dialogue.finish(oracle)
            gained = drawn_turns(replicas) - before
            assert sorted(gained) == [0, 0, len(WAYS)]
            homes.add(gained.argmax())
        assert len(homes) > 1, "sessions go to the replica with the fewest requests in flight"
        assert reasons == {"stop", "tool_calls"}

        before = drawn_turns(replicas)
        with opened(url, token=TOKEN, sampling={"max_tokens": 8}) as session:
            dialogue = Dialogue(session)
            dialogue.turn(streamed)
            replicas[(drawn_turns(replicas) - before).argmax()].stop(SIGKILL)
            session.openai.max_retries = 2
            for way in WAYS:
                dialogue.turn(way)
            dialogue.finish(oracle)
