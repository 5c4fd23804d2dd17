"""Both clients against a real replica; retries against a real server that fails as scripted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dvp_rl.client import AsyncClient, Client, Retry, calls
from dvp_rl.client.calls import JobFields, RolloutFields
from dvp_rl.contract.errors import (
    ConfigError,
    DvpError,
    EngineError,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
    WeightError,
)
from dvp_rl.contract.http import ANSWERED, JobRequest, RolloutRequest, SamplingBody
from dvp_rl.contract.job import JobState
from dvp_rl.contract.openai import CONTEXT_FULL, ChatCompletion
from tests.kit.ports import free_port
from tests.kit.replicas import ReplicaThread
from tests.kit.scripted import scripted
from tests.kit.tokens import TOKEN
from tests.kit.wait import WITHIN_S

QUICK = Retry(tries=4, first_s=0.01, longest_s=2.0)


@pytest.fixture
def client(server: ReplicaThread) -> Iterator[Client]:
    with Client(server.url, token=TOKEN) as connected:
        yield connected


def test_rollout(client: Client) -> None:
    answer = client.rollout(prompt="1+1=", n=3, sampling={"max_tokens": 5}, metadata={"row": 1})
    assert [len(sample.token_ids) for sample in answer.samples] == [5, 5, 5]
    assert answer.metadata == {"row": 1}
    assert isinstance(answer.samples[0].text, str)
    ids = client.rollout(prompt_ids=answer.prompt_ids, sampling=SamplingBody(max_tokens=2), return_text=False)
    assert ids.prompt_ids == answer.prompt_ids
    assert ids.samples[0].text is None
    chat = [{"role": "user", "content": "1"}]
    thinks, does_not = (
        client.rollout(messages=chat, chat_template_kwargs={"enable_thinking": value}) for value in (True, False)
    )
    assert len(does_not.prompt_ids) == len(thinks.prompt_ids) + 2


def test_jobs(client: Client) -> None:
    job_id = client.submit(prompt="1", n=2)
    group = client.wait(job_id, timeout=WITHIN_S)
    assert (group.job_id, len(group.samples)) == (job_id, 2)
    assert client.job(job_id).status is JobState.DONE
    assert client.submit(job_id=job_id, prompt="1", n=2) == job_id


def test_results_are_deleted_when_asked(client: Client) -> None:
    job_id = client.submit(prompt="1", n=2)
    assert len(client.wait(job_id, timeout=WITHIN_S).samples) == 2
    assert client.delete(job_id) is JobState.DONE
    with pytest.raises(NotFoundError, match="deleted"):
        client.job(job_id)
    assert client.delete(job_id) is None
    assert client.submit(job_id=job_id, prompt="1", n=3) == job_id
    assert len(client.wait(job_id, timeout=WITHIN_S).samples) == 3


def test_state(client: Client) -> None:
    assert client.ready().status == "ok"
    assert client.weights() == client.reload_weights()
    assert len(client.queue().replicas) == 1


async def test_async_client(server: ReplicaThread) -> None:
    async with AsyncClient(server.url, token=TOKEN) as client:
        assert len((await client.rollout(prompt="1", n=2)).samples) == 2
        job_id = await client.submit(prompt="1")
        assert (await client.wait(job_id, timeout=WITHIN_S)).job_id == job_id
        assert (await client.job(job_id)).status is JobState.DONE
        assert await client.delete(job_id) is JobState.DONE
        assert await client.delete(job_id) is None
        assert (await client.ready()).status == "ok"
        assert await client.weights() == await client.reload_weights()
        assert (await client.queue()).run_id == (await client.rollout(prompt="1")).run_id
        with pytest.raises(NotFoundError):
            await client.job("never")


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert methods(Client) == methods(AsyncClient)


def test_keyword_arguments_are_the_bodies_fields() -> None:
    assert set(RolloutFields.__annotations__) == set(RolloutRequest.model_fields)
    assert set(JobFields.__annotations__) == set(JobRequest.model_fields)


def test_a_bad_request_is_refused_before_it_is_sent() -> None:
    with Client("http://127.0.0.1:9") as client:
        with pytest.raises(RequestError, match=r"n: .*greater than or equal to 1, got 0"):
            client.rollout(prompt="1", n=0)
        with pytest.raises(RequestError, match="promt"):
            client.rollout(promt="1")  # type: ignore[call-arg]


def test_the_services_refusal_names_the_field(client: Client) -> None:
    with pytest.raises(RequestError, match="100 tokens") as caught:
        client.rollout(prompt="1" * 100)
    assert caught.value.errors[0]["field"] == "prompt"


def test_a_wrong_token(server: ReplicaThread) -> None:
    with Client(server.url, token="wrong") as client, pytest.raises(ConfigError, match="token"):
        client.weights()


@pytest.mark.parametrize(("variable", "proxy"), [("HTTP_PROXY", "http"), ("ALL_PROXY", "socks5")])
async def test_no_proxy_stands_between_us_and_this_machine(
    server: ReplicaThread, monkeypatch: pytest.MonkeyPatch, variable: str, proxy: str
) -> None:
    monkeypatch.setenv(variable, f"{proxy}://127.0.0.1:9")
    with Client(server.url, token=TOKEN, retry=QUICK) as client:
        assert client.ready().status == "ok"
    async with AsyncClient(server.url, token=TOKEN, retry=QUICK) as connected:
        assert (await connected.ready()).status == "ok"


async def test_a_proxy_that_the_environment_names_is_used_for_other_machines(
    server: ReplicaThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", server.url)
    with Client("http://replica.invalid", token=TOKEN, retry=QUICK) as client:
        assert client.ready().status == "ok"
    async with AsyncClient("http://replica.invalid", token=TOKEN, retry=QUICK) as connected:
        assert (await connected.ready()).status == "ok"


def test_nobody_there() -> None:
    port = free_port()
    with (
        Client(f"http://127.0.0.1:{port}", retry=QUICK) as client,
        pytest.raises(UnavailableError, match=f"{port}.*ConnectError"),
    ):
        client.rollout(prompt="1")


ACCEPTED = (202, {}, {"job_id": "a"})


def busy(retry_after: str) -> tuple[int, dict[str, str], object]:
    return 429, {"Retry-After": retry_after}, {"title": "t", "status": 429, "detail": "full"}


def test_a_submission_is_repeated_with_the_same_id_until_it_is_accepted() -> None:
    with scripted(None, (503, {}, {}), busy("0"), ACCEPTED) as (url, seen), Client(url, retry=QUICK) as client:
        assert client.submit(prompt="1") == "a"
    assert len(seen) == 4
    assert [request.headers.get("X-Stainless-Retry-Count") for request in seen] == [None, "1", "2", "3"]
    assert len({request.body["job_id"] for request in seen}) == 1


async def test_calls_do_not_wait_for_each_other() -> None:
    together = threading.Barrier(120, timeout=WITHIN_S)
    with scripted(*[ACCEPTED] * 120, before=together.wait) as (url, _):
        async with AsyncClient(url, retry=Retry(tries=1)) as client:
            assert await asyncio.gather(*(client.submit(prompt="1") for _ in range(120))) == ["a"] * 120


async def test_the_async_client_retries_alike() -> None:
    with scripted(None, busy("0"), ACCEPTED) as (url, seen):
        async with AsyncClient(url, retry=QUICK) as client:
            assert await client.submit(prompt="1") == "a"
    assert [request.headers.get("X-Stainless-Retry-Count") for request in seen] == [None, "1", "2"]


def test_patience_ends() -> None:
    with scripted(*[busy("0")] * 9) as (url, seen), Client(url, retry=QUICK) as client:
        with pytest.raises(OverloadedError, match="full"):
            client.submit(prompt="1")
        assert len(seen) == QUICK.tries


def test_a_long_retry_after_is_left_to_the_caller() -> None:
    with scripted(busy("3600")) as (url, seen), Client(url, retry=QUICK) as client:
        with pytest.raises(OverloadedError) as caught:
            client.submit(prompt="1")
        assert caught.value.retry_after_s == 3600
        assert len(seen) == 1


def test_a_rollout_that_was_cut_off_is_not_paid_for_twice() -> None:
    with scripted(None, None) as (url, seen), Client(url, retry=QUICK) as client:
        with pytest.raises(UnavailableError):
            client.rollout(prompt="1")
        assert len(seen) == 1


def test_a_turn_is_repeated_by_its_key() -> None:
    turn = calls.chat("a/b", {"model": "m", "messages": [{"role": "user", "content": "1"}]}, key="turn-3")
    completion = ChatCompletion.model_config["json_schema_extra"]["examples"][0]  # type: ignore[index,call-overload]
    with scripted(None, (503, {}, {}), (200, {}, completion)) as (url, seen), Client(url, retry=QUICK) as client:
        assert client.send(turn).choices[0].message.content == "85"
    assert [request.body["messages"] for request in seen] == [[{"role": "user", "content": "1"}]] * 3
    assert turn.path == "/v1/sessions/a%2Fb/v1/chat/completions"


def test_a_session_that_is_full_is_told_by_its_code() -> None:
    error = {"message": "why", "type": "t", "param": "messages", "code": CONTEXT_FULL}
    document = {"title": "t", "status": 422, "detail": "why", "error": error}
    with (
        scripted((422, {}, document)) as (url, _),
        Client(url, retry=QUICK) as client,
        pytest.raises(RequestError, match="why") as caught,
    ):
        client.weights()
    assert caught.value.code == CONTEXT_FULL


def test_there_may_be_no_episode(client: Client) -> None:
    assert client.send(calls.take_episode(0)).root is None


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestError),
        (401, ConfigError),
        (403, ConfigError),
        (404, NotFoundError),
        (405, RequestError),
        (409, WeightError),
        (413, RequestError),
        (422, RequestError),
        (500, EngineError),
        (302, DvpError),
    ],
)
def test_problems_become_the_contracts_errors(status: int, kind: type[DvpError]) -> None:
    document = {"title": "t", "status": status, "detail": "why"}
    with scripted((status, {}, document)) as (url, seen), Client(url, retry=QUICK) as client:
        with pytest.raises(kind, match="why") as caught:
            client.weights()
        assert type(caught.value) is kind
        assert len(seen) == 1


def test_an_answer_of_another_shape_is_an_error() -> None:
    with scripted((200, {}, {"hello": 1})) as (url, _), Client(url) as client, pytest.raises(DvpError, match="hello"):
        client.weights()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", ["1_0"]),
        ("token_ids", [True]),
        ("token_ids", [1.0]),
        ("token_ids", [-1]),
        ("token_ids", [2**31]),
        ("logprobs", ["-1"]),
        ("logprobs", [False]),
        ("logprobs", [None]),
        ("kept_count", [0]),
        ("versions", [1] * 9999),
    ],
)
def test_an_answer_with_other_values_is_a_short_error(field: str, value: list[object]) -> None:
    (sample,) = ANSWERED["samples"]
    answer = ANSWERED | {"samples": [sample | {field: value}] * 9999}
    with scripted((200, {}, answer)) as (url, _), Client(url) as client, pytest.raises(DvpError) as caught:
        client.rollout(prompt="1")
    assert len(caught.value.args[0]) < 1000
    assert f"samples.0.{field}.0" in caught.value.args[0]


def test_a_dead_job_and_a_late_one() -> None:
    dead = (200, {}, {"status": "dead", "error": "NaN logits"})
    running = (200, {}, {"status": "running"})
    with scripted(running, dead) as (url, _), Client(url) as client, pytest.raises(EngineError, match="NaN logits"):
        client.wait("a", timeout=5)
    with scripted(*[running] * 99) as (url, _), Client(url) as client, pytest.raises(UnavailableError, match="within"):
        client.wait("a", timeout=0.1)


def test_the_client_needs_no_extra(server: ReplicaThread) -> None:
    program = f"""
import asyncio, sys
sys.modules |= dict.fromkeys(
    ("fastapi", "numpy", "opentelemetry", "pydantic_settings", "redis", "rich", "torch", "transformers", "typer")
)
from dvp_rl.client import AsyncClient, Client
with Client({server.url!r}, token={TOKEN!r}) as client:
    sample, = client.rollout(prompt="1", sampling={{"max_tokens": 3}}).samples
    assert len(sample.token_ids) == 3 and sum(sample.logprobs) <= 0
    client.wait(client.submit(prompt="1"), timeout={WITHIN_S})
    client.queue()

async def ask():
    async with AsyncClient({server.url!r}, token={TOKEN!r}) as client:
        return await client.rollout(prompt="1", n=2)
print(len(asyncio.run(ask()).samples))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2\n", "")
