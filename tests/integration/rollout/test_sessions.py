"""Sessions over real sockets, with OpenAI's own client: what it reads, and what is recorded of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGKILL
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.rollout import sessions
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.results import ClientJob, Held, client_jobs
from tests.integration.engines.oracle import TOLERANCE, Oracle
from tests.kit import web
from tests.kit.caller import ADD
from tests.kit.chat_templates import CHATS, make_chat_tokenizer
from tests.kit.gateway import gateway, needs_haproxy
from tests.kit.models import make_model
from tests.kit.processes import ROOT
from tests.kit.replicas import ReplicaProcess, ReplicaThread
from tests.kit.tokens import TOKEN
from tests.kit.wait import WITHIN_S, until

SEED = 3
"""A seed with which the model draws neither special tokens nor its end in the turns of the tests below."""
USER = {"role": "user", "content": "1+1"}
JSON = {"Content-Type": "application/json"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def taking(parameters: object) -> dict[str, Any]:
    """A tool."""
    return {"type": "function", "function": {"name": "a", "parameters": parameters}}


class Opened:
    """A session, a plain HTTP client, and OpenAI's client for it."""

    def __init__(self, http: httpx.Client, token: str, **settings: Any) -> None:
        self.http = http
        answer = http.post("/v1/sessions", json=settings)
        assert answer.status_code == 201, answer.text
        self.id: str = answer.json()["session_id"]
        self.base_url = f"{http.base_url}/v1/sessions/{self.id}/v1"
        self.openai = openai.OpenAI(base_url=self.base_url, api_key=token, timeout=WITHIN_S, max_retries=0)
        self.model: str = self.openai.models.list().data[0].id

    def chat(self, messages: list[Any], **options: Any) -> Any:
        return self.openai.chat.completions.create(model=self.model, messages=messages, **options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/sessions/{self.id}/{path}", json=body)

    def status(self) -> dict[str, Any]:
        body: dict[str, Any] = self.http.get(f"/v1/sessions/{self.id}").json()
        return body

    def finish(self, reward: float | None = None) -> dict[str, Any]:
        answer = self.post("finish", reward=reward)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body


@contextmanager
def opened(replica: ReplicaProcess | ReplicaThread | str, *, token: str = "none", **settings: Any) -> Iterator[Opened]:
    """A session of the replica, or of the gateway with this URL."""
    url, headers = replica if isinstance(replica, str) else replica.url, {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, timeout=WITHIN_S, trust_env=False) as http:
        session = Opened(http, token, **settings)
        with session.openai:
            yield session


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("chat"), "qwen25")


def make_chat_model(folder: Path, chat: str) -> Path:
    """A random model with that chat template."""
    make_model(folder, vocab_size=320, context=512)
    make_chat_tokenizer(CHATS[chat]).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None, "pad_token_id": None}))
    return folder


@pytest.fixture(scope="module")
def talker(chat_model: Path, broker_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaProcess]:
    args = ["--model", str(chat_model), "--redis-url", broker_url, "--run-id", "talker", "--threads", "1"]
    with ReplicaProcess(tmp_path_factory.mktemp("talker"), *args) as process:
        yield process


def test_conversations_are_recorded_token_for_token(replica: ReplicaProcess, model: Path) -> None:
    """A random model draws special tokens too, which no answer shows: then the history drifts."""
    oracle, branches, before = Oracle(model), [], replica.session_turns()
    for seed in range(8):
        sampling = {"max_tokens": 8, "seed": seed, "temperature": 0.7}
        with opened(replica, sampling=sampling, metadata={"row": seed}) as session:
            messages: list[Any] = [USER]
            answers = []
            for question in ("2+2", "3+3", None):
                answers.append(session.chat(messages, logprobs=True, temperature=0.7))
                messages += [answers[-1].choices[0].message, {"role": "user", "content": question}]
            body = session.finish(0.5)
        assert (body["turns"], body["reward"], body["metadata"]) == (3, 0.5, {"row": seed})
        assert body["drifted"] == body["branches"] - 1
        assert [answer.model_extra["recording"]["turn"] for answer in answers] == [0, 1, 2]
        samples = body["group"]["samples"]
        told = [token.logprob for answer in answers for token in answer.choices[0].logprobs.content]
        assert sum(answer.usage.completion_tokens for answer in answers) == len(told)
        assert told == [logprob for sample in samples for logprob in sample["logprobs"]]
        for sample in samples:
            check_logprobs(oracle, sample["prompt_ids"] or body["group"]["prompt_ids"], sample, temperature=0.7)
        last, length = samples[-1], len(samples[-1]["prompt_ids"] or body["group"]["prompt_ids"])
        assert answers[-1].usage.total_tokens == length + len(last["token_ids"])
        branches.append(body["branches"])
    assert {1, 2} <= {*branches}, "with and without drift"
    counted = {fork: number - before.get(fork, 0) for fork, number in replica.session_turns().items()}
    assert counted["drift"] == sum(branches) - 8
    assert sum(counted.values()) == 3 * 8


def check_logprobs(oracle: Oracle, prompt_ids: list[int], sample: dict[str, Any], **sampling: Any) -> None:
    """The log-probs of the model's tokens are those of a float64 forward over all tokens."""
    expected = expected_logprobs(oracle, prompt_ids, sample, **sampling)
    np.testing.assert_allclose(sample["logprobs"], expected, atol=TOLERANCE, rtol=0)


def expected_logprobs(
    oracle: Oracle, prompt_ids: list[int], sample: dict[str, Any], **sampling: Any
) -> NDArray[np.float64]:
    """The log-probs of the model's tokens in a float64 forward over all tokens."""
    ids = np.asarray(sample["token_ids"], np.int32)
    is_model = np.ones(len(ids), bool)
    for span in sample["environment"]:
        is_model[span["start"] : span["end"]] = False
    job = Job(job_id="a", run_id="a", prompt_ids=prompt_ids, sampling=Sampling(**sampling), sink=Sink.CLIENT)
    return oracle.expect(job, ids).logprobs[is_model]


def test_the_same_seed_draws_the_same_episode(replica: ReplicaProcess) -> None:
    drawn = []
    for _ in range(2):
        with opened(replica, sampling={"max_tokens": 6, "seed": 11}) as session:
            first = session.chat([USER]).choices[0].message
            session.chat([USER, first, USER])
            drawn.append(session.finish()["group"]["samples"][0]["token_ids"])
    assert drawn[0] == drawn[1]
    with opened(replica, sampling={"max_tokens": 6}) as session:
        assert session.chat([USER], seed=5).choices[0].message == session.chat([USER], seed=5).choices[0].message
        assert session.finish()["branches"] == 2


def test_a_text_is_continued_and_streamed(replica: ReplicaProcess) -> None:
    with opened(replica, sampling={"max_tokens": 5, "seed": SEED}) as session:
        create = session.openai.completions.create
        first = create(model=session.model, prompt="1+1=", logprobs=1)
        text = first.choices[0].text
        assert "".join(first.choices[0].logprobs.tokens).startswith(text)
        options = {"include_usage": True}
        second = list(create(model=session.model, prompt=f"1+1={text};", stream=True, stream_options=options))
        assert second[-1].usage.completion_tokens == 5
        assert [chunk.choices[0].finish_reason for chunk in second[:-1]] == ["length"]
        assert second[0].model_extra["recording"] == {"turn": 1, "parent": 0, "fork": None}
        third = create(model=session.model, prompt=f"1+1={text};{second[0].choices[0].text}")
        assert third.model_extra["recording"]["fork"] is None
        (sample,) = session.finish()["group"]["samples"]
    assert [span["end"] - span["start"] for span in sample["environment"]] == [1]


async def test_the_asynchronous_client_streams(talker: ReplicaProcess) -> None:
    with opened(talker, sampling={"max_tokens": 6, "seed": SEED}) as session:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=session.model, messages=[USER], stream=True, tools=[ADD], logprobs=True
            )
            chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert len(chunks[0].choices[0].logprobs.content) <= 6
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_a_rewritten_history_opens_a_branch(replica: ReplicaProcess) -> None:
    with opened(replica, sampling={"max_tokens": 6, "seed": SEED}) as session:
        first = session.chat([USER]).choices[0].message
        session.chat([USER, first, USER])
        edited = session.chat([USER, {"role": "assistant", "content": "2"}, USER])
        shorter = session.chat([USER, first, {"role": "user", "content": "again"}])
        body = session.finish()
    assert edited.model_extra["recording"] == {"turn": 2, "parent": None, "fork": "rewritten"}
    assert shorter.model_extra["recording"] == {"turn": 3, "parent": 0, "fork": "rewritten"}
    assert (body["turns"], body["branches"], body["drifted"]) == (4, 3, 0)
    main, other, last = body["group"]["samples"]
    assert main["prompt_ids"] is None
    assert last["prompt_ids"][: len(body["group"]["prompt_ids"]) + 6] == [
        *body["group"]["prompt_ids"],
        *main["token_ids"][:6],
    ]
    assert len(other["token_ids"]) == len(last["token_ids"]) == 6


def test_any_replica_goes_on_after_one_died(
    model: Path, broker_url: str, shared_run_id: str, replica: ReplicaProcess, tmp_path: Path
) -> None:
    args = ["--model", str(model), "--redis-url", broker_url, "--run-id", shared_run_id]
    args += ["--engine", "fake", "--fake.service-time-s", "600"]
    with opened(replica, sampling={"max_tokens": 4, "seed": SEED}) as session:
        first = session.chat([USER]).choices[0].message
        base_url = f"/v1/sessions/{session.id}/v1"
        with (
            ReplicaProcess(tmp_path / "other", *args) as other,
            openai.OpenAI(base_url=other.url + base_url, api_key="none", max_retries=0) as client,
            ThreadPoolExecutor(1) as pool,
        ):
            ask = client.chat.completions.create
            asked = pool.submit(ask, model=session.model, messages=[USER, first, USER])
            until(lambda: other.in_flight() == 1)
            os.kill(other.pid, SIGKILL)
            with pytest.raises(openai.APIConnectionError):
                asked.result(WITHIN_S)
        answer = session.chat([USER, first, USER])
        body = session.finish()
    assert answer.model_extra["recording"] == {"turn": 1, "parent": 0, "fork": None}
    assert (body["turns"], body["branches"]) == (2, 1)


@needs_haproxy
def test_behind_a_gateway_a_full_replica_is_asked_once(model: Path, broker_url: str, tmp_path: Path) -> None:
    """A client that counts its retries gets to another one."""
    args = ["--model", str(model), "--redis-url", broker_url, "--run-id", "full", "--engine", "fake"]
    small = [*args, "--max-batch", "1", "--max-waiting", "0", "--fake.service-time-s", "600"]
    given = {"DVP_ROLLOUT__TOKEN": TOKEN}
    with ExitStack() as stack:
        full = stack.enter_context(ReplicaProcess(tmp_path / "full", *small, token=TOKEN, variables=given))
        other = stack.enter_context(ReplicaProcess(tmp_path / "other", *args, token=TOKEN, variables=given))
        url = stack.enter_context(gateway(tmp_path, full.port, other.port))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(full.stop, SIGKILL)  # ends the turn that never ends
        while not full.in_flight():
            web.get(f"{url}/v1/weights", auth=("", TOKEN))  # without it, all sessions might begin at the other replica
            session = stack.enter_context(opened(url, token=TOKEN, sampling={"max_tokens": 4}))
            first = pool.submit(session.chat, [USER])
            until(lambda first=first: first.done() or full.in_flight(), "a replica draws the turn")
        with pytest.raises(openai.RateLimitError):
            session.chat([USER])
        session.openai.max_retries = 2
        session.chat([USER])
        session.openai.max_retries = 0
        session.chat([USER])
        assert drawn_turns([full])[0] == 0
        assert session.status()["turns"] == 2


def drawn_turns(replicas: list[ReplicaProcess]) -> NDArray[np.int64]:
    """Turns that each has drawn since its start."""
    return np.array([sum(replica.session_turns().values()) for replica in replicas], np.int64)


def test_a_request_sent_again_gets_the_recorded_answer(replica: ReplicaProcess) -> None:
    with opened(replica, sampling={"max_tokens": 6, "seed": SEED}) as session:
        first = session.chat([USER], extra_headers={"Idempotency-Key": "a"})
        assert session.chat([USER], extra_headers={"Idempotency-Key": "a"}) == first
        assert session.chat([USER], extra_headers={"Idempotency-Key": "b"}) != first
        assert session.chat([USER]) != session.chat([USER]), "without a key, each request draws"
        assert session.finish()["turns"] == 4
        assert session.chat([USER], extra_headers={"Idempotency-Key": "a"}) == first, "after the end, too"


def test_sessions_with_the_same_key_draw_their_own(replica: ReplicaProcess) -> None:
    drawn = []
    for _ in range(2):
        with opened(replica, sampling={"max_tokens": 32}) as session:
            session.chat([USER], extra_headers={"Idempotency-Key": "turn-0"})
            drawn.append(session.finish()["group"]["samples"][0]["token_ids"])
    assert drawn[0] != drawn[1]


def test_turns_at_once_are_all_recorded(replica: ReplicaProcess) -> None:
    with opened(replica, sampling={"max_tokens": 6, "seed": SEED}) as session:
        first = session.chat([USER]).choices[0].message
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: session.chat([USER, first, USER]), range(4)))
            same = list(pool.map(lambda _: session.chat([USER], extra_headers={"Idempotency-Key": "one"}), range(4)))
        body = session.finish()
    assert {answer.model_extra["recording"]["turn"] for answer in answers} == {1, 2, 3, 4}
    assert len({answer.id for answer in answers}) == 4
    assert len({answer.id for answer in same}) == 1
    assert (body["turns"], body["branches"]) == (6, 5)
    assert sum(len(sample["logprobs"]) for sample in body["group"]["samples"]) == 6 * 6


@pytest.mark.parametrize(
    ("options", "param", "allowed"),
    [
        ({"temperature": 0.5}, "temperature", "the session's"),
        ({"top_p": 0.9}, "top_p", "only 1"),
        ({"presence_penalty": 0.5}, "presence_penalty", "only 0"),
        ({"n": 2}, "n", "only 1"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", 'only "text"'),
        ({"tool_choice": "required"}, "tool_choice", 'only "auto" or "none"'),
        ({"top_logprobs": 3}, "top_logprobs", "only 0"),
        ({"logit_bias": {"5": 1}}, "logit_bias", ""),
        ({"extra_body": {"min_p": 0.1}}, "min_p", "the session's"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex", "only the fields"),
        ({"stop": [str(i) for i in range(17)]}, "stop", ""),
        ({"tools": [taking({"type": "array"})]}, "tools.0.function", '"type" must be "object"'),
        ({"tools": [taking({"type": "objects"})]}, "tools.0.function", "parameters in JSON schema: type.0: "),
        ({"tools": [taking("a: int")]}, "tools.0.function.parameters", ""),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "only true"),
        ({"messages": [{"role": "alien", "content": "1"}]}, "messages.0.role", ""),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content", ""),
    ],
)
def test_what_would_change_the_policy_is_refused(
    talker: ReplicaProcess, options: dict[str, Any], param: str, allowed: str
) -> None:
    with opened(talker, sampling={"max_tokens": 4, "seed": SEED}) as session:
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            session.chat(**({"messages": [USER]} | options))
        assert caught.value.param is not None
        assert caught.value.param.startswith(param)
        assert allowed in caught.value.body["message"]
        assert session.status()["turns"] == 0


def test_refusals_name_what_is_wrong(replica: ReplicaProcess) -> None:
    with opened(replica, sampling={"max_tokens": 4, "seed": SEED}) as session:
        long = {"role": "user", "content": "1" * 300}
        with pytest.raises(openai.UnprocessableEntityError) as full:
            session.chat([long])
        assert (full.value.code, full.value.param) == ("context_length_exceeded", "messages")
        assert session.openai.models.retrieve(session.model).max_model_len == 256  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError, match="has only"):
            session.openai.models.retrieve("gpt")
        with pytest.raises(openai.NotFoundError, match="has only"):
            session.openai.chat.completions.create(model="gpt", messages=[USER])
        with pytest.raises(openai.UnprocessableEntityError, match="calls none"):
            session.chat([USER], tools=[ADD])
        half = rb'{"model": "a", "messages": [{"role": "user", "content": "\ud800"}]}'
        answer = session.http.post(f"{session.base_url}/chat/completions", content=half, headers=JSON)
        assert (answer.status_code, "messages.0.content" in answer.json()["error"]["message"]) == (422, True)
        assert "delete it" in web.problem(session.post("finish"), 422).detail
        session.chat([USER])
        session.finish(1.0)
        assert session.finish(1.0)["reward"] == 1.0
        assert "was finished with reward 1.0" in web.problem(session.post("finish", reward=0.5), 422).detail
        with pytest.raises(openai.UnprocessableEntityError, match="finished"):
            session.chat([USER])
        assert "is finished" in web.problem(session.post("heartbeat"), 422).detail
        assert session.http.delete(f"/v1/sessions/{session.id}").json()["turns"] == 1
        with pytest.raises(openai.NotFoundError, match="never opened"):
            session.chat([USER])
        assert "never opened" in web.problem(session.post("heartbeat"), 404).detail


def test_a_session_is_opened_once(replica: ReplicaProcess) -> None:
    with opened(replica, session_id="once", metadata={"a": 1}) as session:
        session.chat([USER], max_tokens=2)
        with opened(replica, session_id="once", metadata={"a": 1}) as again:
            assert again.status()["turns"] == 1
        answer = session.http.post("/v1/sessions", json={"session_id": "once"})
        assert "exists with other settings" in web.problem(answer, 422).detail


def test_what_no_turn_could_use_opens_no_session(replica: ReplicaProcess) -> None:
    answer = httpx.post(f"{replica.url}/v1/sessions", json={"chat_template_kwargs": {"enable_thinkin": False}})
    assert "did you mean enable_thinking?" in web.problem(answer, 422).detail


def test_a_session_has_a_limit_on_what_its_branches_repeat(
    monkeypatch: pytest.MonkeyPatch, model: Path, broker_url: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(sessions, "MAX_GROUP_TOKENS", 200)
    args = ["--model", str(model), "--engine", "fake", "--redis-url", broker_url, "--run-id", "limited"]
    with ReplicaThread(tmp_path, *args) as limited, opened(limited, sampling={"max_tokens": 4}) as session:
        asked = {"role": "user", "content": "1" * 48}
        for _ in range(3):
            session.chat([asked])
        with pytest.raises(openai.UnprocessableEntityError, match="at most 200 allowed: finish it"):
            session.chat([asked])
        assert session.finish()["branches"] == 3


def test_an_idle_session_is_forgotten(replica: ReplicaProcess) -> None:
    with httpx.Client(base_url=replica.url, timeout=WITHIN_S, trust_env=False) as http:
        session_id = http.post("/v1/sessions", json={"idle_s": 0.05}).json()["session_id"]
        until(lambda: http.get(f"/v1/sessions/{session_id}").status_code == 404)


async def test_a_heartbeat_keeps_a_session(replica: ReplicaProcess, broker_url: str) -> None:
    with opened(replica) as session:
        async with await Broker.connect(broker_url, session.model) as broker:
            record = broker.keys.session(session.id)
            await broker.redis.pexpire(record, 600_000)
            kept = session.post("heartbeat").json()
            assert (kept["session_id"], kept["state"], kept["turns"]) == (session.id, "open", 0)
            assert await broker.redis.pttl(record) > 600_000


def test_nothing_is_drawn_for_a_session_that_was_deleted(
    monkeypatch: pytest.MonkeyPatch, model: Path, broker_url: str, run_id: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(sessions, "beat_every", lambda idle_s: 0.1)
    args = ["--model", str(model), "--engine", "fake", "--fake.service-time-s=600"]
    args += ["--redis-url", broker_url, "--run-id", run_id]
    with ReplicaThread(tmp_path, *args) as slow, opened(slow) as session, ThreadPoolExecutor() as pool:
        turn = pool.submit(session.chat, [USER])
        until(lambda: slow.in_flight() == 1)
        session.http.delete(f"/v1/sessions/{session.id}")
        with pytest.raises(openai.NotFoundError, match="deleted"):
            turn.result()
        until(lambda: slow.in_flight() == 0)


def test_without_a_queue_there_are_no_sessions(model: Path, tmp_path: Path) -> None:
    with ReplicaThread(tmp_path, "--model", str(model), "--engine", "fake") as replica:
        assert "no job queue" in web.problem(httpx.post(f"{replica.url}/v1/sessions", json={}), 503).detail


async def test_sessions_count_as_memory_of_their_caller(
    model: Path, own_broker: EmbeddedBroker, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    (tokens / "rollout").mkdir(parents=True)
    for name in ("alice", "bob"):
        (tokens / "rollout" / name).write_text(name * 8)
    args = ["--model", str(model), "--engine", "fake", "--redis-url", own_broker.url, "--run-id", "shared"]
    args += ["--token-folder", str(tokens)]
    with ReplicaThread(tmp_path / "replica", *args, token="alice" * 8) as replica:

        def of(name: str) -> httpx.Client:
            return httpx.Client(base_url=replica.url, headers={"Authorization": f"Bearer {name * 8}"}, timeout=WITHIN_S)

        with of("alice") as alice, of("bob") as bob:
            assert alice.post("/v1/sessions", json={"session_id": "hers"}).status_code == 201
            turn = {"model": "shared", "prompt": "1+1="}
            assert alice.post("/v1/sessions/hers/v1/completions", json=turn).status_code == 200
            for call in (
                ("GET", "/v1/sessions/hers", None),
                ("DELETE", "/v1/sessions/hers", None),
                ("POST", "/v1/sessions/hers/finish", {}),
                ("POST", "/v1/sessions/hers/heartbeat", None),
                ("POST", "/v1/sessions/hers/v1/completions", turn),
            ):
                assert bob.request(call[0], call[1], json=call[2]).status_code == 404, call
            assert "another caller's" in bob.post("/v1/sessions", json={"session_id": "hers"}).json()["detail"]
            (held,) = await _held(own_broker)
            assert (held.name, held.held, held.caller) == ("hers", Held.SESSION, "alice")
            assert held.num_bytes > 32 * 16
            assert 3_000 < (held.expires_s or 0) <= 3_600
            assert alice.delete("/v1/sessions/hers").json()["turns"] == 1
            assert await _held(own_broker) == []


async def _held(broker: EmbeddedBroker) -> list[ClientJob]:
    async with await Broker.connect(broker.url, "shared") as connected:
        return await client_jobs(connected)


def examples() -> list[str]:
    """The Python code of the rollout service's README."""
    page = (ROOT / "services" / "dvp_rl" / "rollout" / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_the_example_of_the_readme_runs(talker: ReplicaProcess, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = examples()
    names: dict[str, Any] = {}
    exec(code.replace("http://127.0.0.1:8000", talker.url), names)
    names["client"].close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == names["episode"]["branches"]
    assert all("tokens, drawn: " in line for line in lines)
