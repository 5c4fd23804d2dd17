"""Every route and every bad input over a real socket, against the Transformers engine and a real broker."""

from __future__ import annotations

import json
import math
import secrets
from typing import Any

import httpx
import numpy as np
import pytest

from dvp_rl.client import Client
from dvp_rl.contract.errors import NotFoundError
from dvp_rl.contract.http import MAX_BODY_BYTES, JobStatus, RolloutResponse
from dvp_rl.contract.sampling import MIN_P
from tests.kit import web
from tests.kit.replicas import ReplicaProcess
from tests.kit.wait import WITHIN_S, until
from tests.kit.web import problem


def post(replica: ReplicaProcess, path: str, body: Any) -> httpx.Response:
    return web.post(replica.url + path, json=body)


def test_a_rollout_is_exactly_the_documented_document(replica: ReplicaProcess, shared_run_id: str) -> None:
    body = {"prompt": "2+2=", "n": 4, "sampling": {"max_tokens": 12, "seed": 7}, "metadata": {"row": 3}}
    response = post(replica, "/v1/rollouts", body)
    assert response.status_code == 200
    raw = response.json()
    assert set(raw) == {"job_id", "run_id", "prompt_ids", "engine", "samples", "metadata"}
    assert raw["run_id"] == shared_run_id
    assert raw["metadata"] == {"row": 3}
    assert set(raw["engine"]) == {"name", "version", "dtype", "fp32_head", "logprob_kind"}
    assert raw["engine"]["logprob_kind"] == "constrained"
    assert len(raw["samples"]) == 4
    arrays = {"token_ids", "logprobs", "kept_mass", "kept_count"}
    for sample in raw["samples"]:
        assert set(sample) == arrays | {"finish_reason", "versions", "seed", "text", "environment", "prompt_ids"}
        assert (sample["environment"], sample["prompt_ids"]) == ([], None)
        assert len({len(sample[name]) for name in arrays}) == 1
        assert sample["versions"][0]["version"].startswith(f"{shared_run_id}:")
    assert RolloutResponse.model_validate(raw)


def test_the_seed_decides_and_samples_differ(replica: ReplicaProcess) -> None:
    body = {"prompt": "1+1=", "n": 2, "sampling": {"max_tokens": 16, "seed": 11}}
    first, again = (post(replica, "/v1/rollouts", body).json()["samples"] for _ in range(2))
    assert [s["token_ids"] for s in first] == [s["token_ids"] for s in again]
    assert first[0]["token_ids"] != first[1]["token_ids"]


def test_ids_text_and_chat_say_the_same(replica: ReplicaProcess) -> None:
    sampling = {"max_tokens": 1}
    by_text = post(replica, "/v1/rollouts", {"prompt": "7*8=", "sampling": sampling}).json()
    by_ids = post(replica, "/v1/rollouts", {"prompt_ids": by_text["prompt_ids"], "sampling": sampling}).json()
    chat = post(
        replica, "/v1/rollouts", {"messages": [{"role": "user", "content": "7*8="}], "sampling": sampling}
    ).json()
    assert by_ids["prompt_ids"] == by_text["prompt_ids"]
    # <user> 7*8= <assistant>
    assert chat["prompt_ids"][1:-1] == by_text["prompt_ids"]
    assert len(chat["prompt_ids"]) == len(by_text["prompt_ids"]) + 2


def test_arguments_of_the_chat_template(replica: ReplicaProcess) -> None:
    chat = {"messages": [{"role": "user", "content": "7*8="}], "sampling": {"max_tokens": 1}}
    lengths = [
        len(post(replica, "/v1/rollouts", chat | {"chat_template_kwargs": kwargs}).json()["prompt_ids"])
        for kwargs in ({}, {"enable_thinking": True}, {"enable_thinking": False})
    ]
    assert lengths == [6, 6, 8]
    for path in ("/v1/rollouts", "/v1/jobs"):
        answer = post(replica, path, chat | {"chat_template_kwargs": {"enable_thinkin": False}})
        error = problem(answer, 422).errors[0]
        assert (error.field, error.allowed) == ("chat_template_kwargs.enable_thinkin", "enable_thinking")


def test_text_is_optional_and_cut_before_a_stop_string_while_ids_keep_it(replica: ReplicaProcess) -> None:
    free = {"prompt": "9-4=", "n": 1, "sampling": {"max_tokens": 40, "seed": 5}}
    text = post(replica, "/v1/rollouts", free).json()["samples"][0]["text"]
    stop = text[4:6]
    stopped = {**free, "sampling": {**free["sampling"], "stop": [stop]}}  # type: ignore[dict-item]
    sample = post(replica, "/v1/rollouts", stopped).json()["samples"][0]
    assert sample["finish_reason"] == "stop"
    assert sample["text"] == text[: text.index(stop)]
    silent = post(replica, "/v1/rollouts", {**stopped, "return_text": False}).json()
    assert silent["samples"][0]["text"] is None
    assert silent["samples"][0]["token_ids"] == sample["token_ids"]
    assert silent["metadata"] == {}
    assert len(sample["token_ids"]) >= text.index(stop) + 1


def test_greedy_is_served_and_has_probability_one(replica: ReplicaProcess) -> None:
    sample = post(replica, "/v1/rollouts", {"prompt": "1", "sampling": {"temperature": 0, "max_tokens": 4}}).json()[
        "samples"
    ][0]
    assert sample["logprobs"] == [0.0] * len(sample["token_ids"])
    assert sample["kept_count"] == [1] * len(sample["token_ids"])


def test_min_p_prunes(replica: ReplicaProcess) -> None:
    def kept(min_p: float) -> float:
        body = {"prompt": "1", "n": 4, "sampling": {"min_p": min_p, "max_tokens": 8, "seed": 3}}
        samples = post(replica, "/v1/rollouts", body).json()["samples"]
        return float(np.mean([count for sample in samples for count in sample["kept_count"]]))

    assert kept(MIN_P) > kept(math.exp(-2)) > kept(1.0) >= 1


@pytest.mark.parametrize(
    ("body", "field", "value", "allowed"),
    [
        ({"prompt": "1", "n": 0}, "n", 0, "integer in [1, 1024]"),
        ({"prompt": "1", "n": 1025}, "n", 1025, "integer in [1, 1024]"),
        ({"prompt": "1", "n": "many"}, "n", "many", "integer in [1, 1024]"),
        ({"prompt": "1", "sampling": {"min_p": 0}}, "sampling.min_p", 0, "number in (0, 1]"),
        ({"prompt": "1", "sampling": {"min_p": 1.5}}, "sampling.min_p", 1.5, "number in (0, 1]"),
        ({"prompt": "1", "sampling": {"min_p": -0.1}}, "sampling.min_p", -0.1, "number in (0, 1]"),
        ({"prompt": "1", "sampling": {"temperature": -1}}, "sampling.temperature", -1, "number in [0, 100]"),
        ({"prompt": "1", "sampling": {"max_tokens": 0}}, "sampling.max_tokens", 0, "integer in [1, 1000000]"),
        (
            {"prompt": "1", "sampling": {"max_tokens": 10**6 + 1}},
            "sampling.max_tokens",
            10**6 + 1,
            "integer in [1, 1000000]",
        ),
        ({"prompt": "1", "sampling": {"stop": ["a"] * 17}}, "sampling.stop", None, "list of 0 to 16 items"),
        ({"prompt": "1", "sampling": {"stop_token_ids": [1] * 65}}, "sampling.stop_token_ids", None, "0 to 64 items"),
        ({"prompt": "1", "sampling": {"top_p": 0.9}}, "sampling.top_p", 0.9, "only 1"),
        ({"prompt": "1", "sampling": {"top_k": 50}}, "sampling.top_k", 50, "only null"),
        ({"prompt": "1", "metadata": {"a": "x" * 20_000}}, "metadata", None, "at most 16384 bytes as JSON, not 20009"),
        (
            {"messages": [{"role": "user", "content": "1"}], "chat_template_kwargs": {"a": 2**64}},
            "chat_template_kwargs",
            None,
            "plain JSON: ",
        ),
        ({"prompt": "1", "sampling": {"penalty": 1}}, "sampling.penalty", 1, "only the fields min_p, temperature"),
        ({"promt": "1"}, "promt", "1", "only the fields prompt_ids, prompt, messages"),
        ({"prompt": ""}, "prompt", "", "1 to 4000000 characters"),
        ({"prompt": "1" * 4_000_001}, "prompt", None, "1 to 4000000 characters"),
        ({"messages": [{"role": "user", "content": "1"}] * 1025}, "messages", None, "list of 1 to 1024 items"),
        ({"prompt_ids": []}, "prompt_ids", "[]", "list of 1 to"),
        ({"prompt_ids": [5, -1]}, "prompt_ids.1", -1, "integer in [0, 2147483648)"),
        ({"prompt_ids": [5, 96]}, "prompt_ids", "token id 96", "ids in [0, 96)"),
        ({"prompt_ids": [5] * 256}, "prompt_ids", "256 tokens", "1 to 255 tokens"),
        ({"prompt": "1" * 300}, "prompt", "300 tokens", "1 to 255 tokens"),
        ({"prompt": "1", "prompt_ids": [5]}, "body", None, "exactly one of prompt_ids, prompt and messages"),
        ({}, "body", None, "exactly one of prompt_ids, prompt and messages"),
        ({"prompt": "1", "chat_template_kwargs": {"a": 1}}, "body", None, "chat_template_kwargs are for messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", None, "string of 0 to"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/rollouts", "/v1/jobs"])
def test_bad_fields_are_named_with_value_and_range(
    path: str, body: Any, field: str, value: Any, allowed: str, replica: ReplicaProcess
) -> None:
    document = problem(post(replica, path, body), 422)
    error = document.errors[0]
    assert error.field == field
    assert allowed in error.allowed
    assert value is None or error.value == value
    assert field in document.detail


def test_all_bad_fields_come_at_once_and_never_a_flood(replica: ReplicaProcess) -> None:
    body = {"prompt": "1", "n": 0, "sampling": {"min_p": 2, "top_k": 1}}
    fields = [error.field for error in problem(post(replica, "/v1/rollouts", body), 422).errors]
    assert fields == ["n", "sampling.min_p", "sampling.top_k"]
    flood = {"prompt": "1", **{f"k{i}": 0 for i in range(50_000)}}
    answer = post(replica, "/v1/rollouts", flood)
    assert len(problem(answer, 422).errors) == 1
    assert len(answer.content) < 2_000


def test_job_id_belongs_to_jobs_only(replica: ReplicaProcess) -> None:
    error = problem(post(replica, "/v1/rollouts", {"prompt": "1", "job_id": "a"}), 422).errors[0]
    assert error.field == "job_id"
    assert "job_id" not in error.allowed
    error = problem(post(replica, "/v1/jobs", {"prompt": "1", "job_id": "a b"}), 422).errors[0]
    assert (error.field, error.value) == ("job_id", "a b")


@pytest.mark.parametrize("deadline_s", [0, -1, 1e9])
def test_a_deadline_belongs_to_jobs_and_is_within_a_month(replica: ReplicaProcess, deadline_s: float) -> None:
    error = problem(post(replica, "/v1/jobs", {"prompt": "1", "deadline_s": deadline_s}), 422).errors[0]
    assert (error.field, error.value, error.allowed) == ("deadline_s", deadline_s, "number in (0, 2592000]")
    error = problem(post(replica, "/v1/rollouts", {"prompt": "1", "deadline_s": 1}), 422).errors[0]
    assert error.field == "deadline_s"


def test_the_ids_of_the_trainer_are_not_for_clients(replica: ReplicaProcess, shared_run_id: str) -> None:
    own = f"{shared_run_id}:000000100:0"
    error = problem(post(replica, "/v1/jobs", {"prompt": "1", "job_id": own}), 422).errors[0]
    assert (error.field, error.value) == ("job_id", own)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b'{"prompt": "1"', b"[" * 100_000])
def test_a_body_that_is_no_json(content: bytes, replica: ReplicaProcess) -> None:
    headers = {"Content-Type": "application/json"}
    response = web.post(f"{replica.url}/v1/rollouts", content=content, headers=headers)
    assert response.status_code in (400, 422)
    problem(response, response.status_code)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_must_be_finite(number: str, replica: ReplicaProcess) -> None:
    content = f'{{"prompt": "1", "sampling": {{"temperature": {number}}}}}'
    headers = {"Content-Type": "application/json"}
    response = web.post(f"{replica.url}/v1/rollouts", content=content, headers=headers)
    assert problem(response, 422).errors[0].field == "sampling.temperature"


@pytest.mark.parametrize("path", ["/v1/rollouts", "/v1/jobs"])
@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (None, "there is no Content-Type"),
        ("application/x-www-form-urlencoded", "Content-Type is 'application/x-www-form-urlencoded'"),  # curl -d
        ("text/json; charset=utf-8", "Content-Type is 'text/json; charset=utf-8'"),
    ],
)
def test_json_that_is_not_declared_as_such(replica: ReplicaProcess, path: str, sent: str | None, said: str) -> None:
    headers = {"Content-Type": sent} if sent else {}
    response = web.post(replica.url + path, content=json.dumps({"prompt": "1"}), headers=headers)
    assert problem(response, 415).detail == f"{said}: send Content-Type: application/json"


@pytest.mark.parametrize("content", ["", "null", "[]", '"1"', "7"])
@pytest.mark.parametrize("kind", ["application/json", "application/vnd.dvp+json; charset=utf-8"])
def test_a_body_that_is_no_object(replica: ReplicaProcess, content: str, kind: str) -> None:
    response = web.post(f"{replica.url}/v1/rollouts", content=content, headers={"Content-Type": kind})
    (error,) = problem(response, 422).errors
    assert error.field == "body"
    assert error.allowed.startswith("a JSON object with the fields prompt_ids, prompt, messages,")


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        ("POST /v1/chat/completions", 'POST /v1/rollouts takes {"messages": [{"role": "user", "content": "..."}]}'),
        ("POST /v1/chat/completions/", 'POST /v1/rollouts takes {"messages": '),
        ("POST /v1/completions", 'POST /v1/rollouts takes {"prompt": "..."}'),
        ("GET /models", "GET /v1/models names the run"),
        ("GET /health", "GET /readyz answers 200"),
        ("POST /v1/rollout", "did you mean /v1/rollouts?"),
        ("GET /v1/job/abc", "did you mean /v1/jobs?"),
        ("POST /v1/rollouts/", "did you mean /v1/rollouts?"),
        ("GET /models/qwen3", "GET /v1/models names the run"),
        ("GET /nothing/like/it", "Not Found; GET /docs shows all paths"),
    ],
)
def test_an_unknown_path_is_answered_with_a_hint(replica: ReplicaProcess, call: str, hint: str) -> None:
    method, path = call.split()
    detail = problem(web.request(method, replica.url + path, json={}), 404).detail
    assert detail.startswith(f"{call}: Not Found")
    assert hint in detail
    assert detail.endswith("GET /docs shows all paths")


@pytest.mark.parametrize("path", ["/v1/rollouts", "/v1/jobs"])
def test_examples_of_the_document_are_answered(replica: ReplicaProcess, path: str) -> None:
    operation = web.get(f"{replica.url}/openapi.json").json()["paths"][path]["post"]
    examples = operation["requestBody"]["content"]["application/json"]["examples"]
    assert len(examples) == 3
    for example in examples.values():
        answer = post(replica, path, example["value"])
        assert answer.is_success
        if answer.status_code == 202:
            with replica.client() as client:
                assert client.wait(answer.json()["job_id"]).samples


@pytest.mark.parametrize("stated", [True, False])
def test_a_huge_body_is_refused_before_it_is_parsed(stated: bool, replica: ReplicaProcess) -> None:
    chunk = b" " * 65_536
    num_chunks = MAX_BODY_BYTES // len(chunk) + 2
    content = chunk * num_chunks if stated else (chunk for _ in range(num_chunks))
    response = web.post(
        f"{replica.url}/v1/rollouts", content=content, headers={"Content-Type": "application/json"}, timeout=WITHIN_S
    )
    assert f"at most {MAX_BODY_BYTES}" in problem(response, 413).detail


def test_unknown_paths_and_methods_are_problems(replica: ReplicaProcess) -> None:
    assert "/v1/nothing" in problem(web.get(f"{replica.url}/v1/nothing"), 404).detail
    refused = web.delete(f"{replica.url}/v1/queue")
    assert "GET" in problem(refused, 405).detail
    assert refused.headers["allow"] == "GET"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "10.0.0.1", "127.0.0.1.evil.example", ""])
def test_a_host_that_is_not_loopback_is_refused(host: str, replica: ReplicaProcess) -> None:
    response = web.get(f"{replica.url}/v1/weights", headers={"Host": host})
    assert "loopback" in problem(response, 403).detail


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:80", "[::1]"])
def test_loopback_hosts_are_served(host: str, replica: ReplicaProcess) -> None:
    assert web.get(f"{replica.url}/v1/weights", headers={"Host": host}).status_code == 200


def test_health_readiness_and_openapi(replica: ReplicaProcess) -> None:
    for path in ("/healthz", "/readyz"):
        assert web.get(replica.url + path).json() == {"status": "ok", "detail": ""}
    paths = web.get(f"{replica.url}/openapi.json").json()["paths"]
    assert {"/v1/rollouts", "/v1/jobs", "/v1/jobs/{job_id}", "/v1/queue", "/v1/weights", "/metrics"} <= set(paths)


def test_metrics_count_what_happened(replica: ReplicaProcess) -> None:
    def metric(name: str) -> float:
        lines = web.get(f"{replica.url}/metrics").text.splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))

    before = metric("dvp_rollout_tokens_total")
    answer = post(replica, "/v1/rollouts", {"prompt": "1", "n": 3, "sampling": {"max_tokens": 5}}).json()
    num_tokens = sum(len(sample["token_ids"]) for sample in answer["samples"])
    assert metric("dvp_rollout_tokens_total") - before >= num_tokens
    until(lambda: metric("dvp_rollout_in_flight_samples") == 0, "nothing is left of any test's requests")
    text = web.get(f"{replica.url}/metrics").text
    assert 'dvp_rollout_requests_total{route="/v1/rollouts",status="200"}' in text
    assert "dvp_rollout_generate_seconds_bucket" in text
    assert "dvp_rollout_version_seq" in text


def test_a_job_goes_through_the_queue(replica: ReplicaProcess) -> None:
    with replica.client() as client:
        job_id = client.submit(prompt="3+4=", n=2, sampling={"max_tokens": 6}, metadata={"k": [1, None]})
        group = client.wait(job_id, timeout=WITHIN_S)
        assert (group.job_id, len(group.samples), group.metadata) == (job_id, 2, {"k": [1, None]})
        assert all(isinstance(sample.text, str) for sample in group.samples)
        status = web.get(f"{replica.url}/v1/jobs/{job_id}").json()
        assert set(status) == {"status", "group", "error"}
        assert JobStatus.model_validate(status).status == "done"


def test_submitting_twice_is_one_job(replica: ReplicaProcess) -> None:
    job_id = f"twice-{secrets.token_hex(4)}"
    with replica.client() as client:
        assert {client.submit(job_id=job_id, prompt="1", sampling={"max_tokens": 2}) for _ in range(3)} == {job_id}
        first = client.wait(job_id, timeout=WITHIN_S)
        client.submit(job_id=job_id, prompt="1", sampling={"max_tokens": 2})
        again = client.wait(job_id, timeout=WITHIN_S)
    assert [s.token_ids for s in first.samples] == [s.token_ids for s in again.samples]


def test_return_text_false_holds_for_queued_jobs_too(replica: ReplicaProcess) -> None:
    with replica.client() as client:
        job_id = client.submit(prompt="1", sampling={"max_tokens": 2}, return_text=False, metadata={"a": 1})
        group = client.wait(job_id, timeout=WITHIN_S)
    assert group.samples[0].text is None
    assert group.metadata == {"a": 1}


def test_a_job_is_deleted(replica: ReplicaProcess) -> None:
    with replica.client() as client:
        job_id = client.submit(prompt="1", sampling={"max_tokens": 2})
        client.wait(job_id, timeout=WITHIN_S)
    url = f"{replica.url}/v1/jobs/{job_id}"
    assert web.delete(url).json() == {"status": "done", "group": None, "error": None}
    problem(web.get(url), 404)
    problem(web.delete(url), 404)


def test_unknown_jobs_are_not_found(replica: ReplicaProcess) -> None:
    problem(web.get(f"{replica.url}/v1/jobs/never"), 404)
    with replica.client() as client, pytest.raises(NotFoundError, match="never"):
        client.job("never")


def test_the_queue_page_knows_this_replica(replica: ReplicaProcess, shared_run_id: str) -> None:
    raw = web.get(f"{replica.url}/v1/queue").json()
    assert {"run_id", "jobs", "groups", "uncheckpointed", "dead", "duplicates", "replicas", "trainer"} <= set(raw)
    assert raw["run_id"] == shared_run_id
    (own,) = (found for found in raw["replicas"] if found["id"] == "shared")  # other tests' replicas join the run
    assert own["state"] == "serving"
    assert set(raw["jobs"]) == {"backlog", "pending", "oldest_age_s", "redelivered"}


def test_without_an_announcement_a_reload_changes_nothing(replica: ReplicaProcess) -> None:
    with Client(replica.url) as client:
        assert client.reload_weights() == client.weights()


def test_prompts_never_reach_the_log(replica: ReplicaProcess) -> None:
    secret = "Xq7Zw9Kj2Vb4"
    post(replica, "/v1/rollouts", {"prompt": secret, "sampling": {"max_tokens": 2}})
    post(replica, "/v1/rollouts", {"prompt": secret, "sampling": {"min_p": 7}})
    post(replica, "/v1/rollouts", {"prompt": secret * 50})
    assert secret not in replica.log
