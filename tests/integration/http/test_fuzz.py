"""Whatever is sent over a real socket, nothing answers 5xx, crashes, hangs, or deviates from its OpenAPI document."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from dvp_rl.contract.http import Problem
from dvp_rl.http import guard
from tests.integration.monitor.process import Monitor
from tests.kit import web
from tests.kit.replicas import ReplicaProcess, ReplicaThread
from tests.kit.tokens import TOKEN
from tests.kit.wait import WITHIN_S

MAX_GROWTH = 256 * 2**20
"""Memory that a service may gain while it is fuzzed, in bytes."""
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
FEW = 60
"""Cases up to which every run uses the same ones."""
UNLISTED = {400, 405, 408, 413, 431}
"""Refusals of calls that no client makes on purpose: in the document, they are `default`."""
ENDLESS = "/v1/events"
JSON_HEADERS = {"Content-Type": "application/json"}
BODIES = ("/v1/rollouts", "/v1/jobs")
HOSTILE = {
    "half a surrogate pair": rb'{"prompt": "\ud800"}',
    "in a field that nobody knows": rb'{"prompt": "1", "\ud800": 1}',
    "in metadata": rb'{"prompt": "1", "metadata": {"a": ["\ud800"]}}',
    "in a key of metadata": rb'{"prompt": "1", "metadata": {"\udfff": 1}}',
    "in a stop string": rb'{"prompt": "1", "sampling": {"stop": ["\ud800"]}}',
    "in a role": rb'{"messages": [{"role": "\ud800", "content": "1"}]}',
    "in a string that is the body": rb'"\ud800"',
    "an integer of 70 bits in metadata": b'{"prompt": "1", "metadata": {"a": %d}}' % 2**70,
    "an integer of 70 bits as token": b'{"prompt": "1", "sampling": {"stop_token_ids": [%d]}}' % 2**70,
    "an integer of 70 bits as count": b'{"prompt": "1", "n": %d}' % 2**70,
    "an integer of 5000 digits": b'{"prompt": "1", "n": 1%s}' % (b"0" * 5000),
    "more than a float": b'{"prompt": "1", "metadata": {"a": 1e999}}',
    "NaN in metadata": b'{"prompt": "1", "metadata": {"a": NaN}}',
    "lists 800 deep in metadata": b'{"prompt": "1", "metadata": {"a": %s%s}}' % (b"[" * 800, b"]" * 800),
    "lists 100000 deep": b"[" * 100_000,
    "objects 5000 deep": b'{"prompt": "1", "metadata": %s1%s}' % (b'{"a":' * 5000, b"}" * 5000),
}


@pytest.fixture(scope="session")
def fuzzed_monitor(broker_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitor]:
    with Monitor(tmp_path_factory.mktemp("monitor"), broker_url, "fuzz-monitor", token=TOKEN) as monitor:
        monitor.until_ready()
        yield monitor


def _fuzz(url: str, count: int, headers: dict[str, str]) -> int:
    """Sends valid and invalid requests, checks every answer against the OpenAPI document, and returns how many were
    sent."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    operations = [found.ok() for found in schema.get_all_operations() if found.ok().path != ENDLESS]
    cases: st.SearchStrategy[Any] = st.one_of(
        [operation.as_strategy(generation_mode=mode) for operation in operations for mode in GenerationMode]
    )
    made = 0
    with requests.Session() as session:

        @settings(
            max_examples=count,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=count <= FEW,
        )
        @given(cases)
        def answers(case: Any) -> None:
            nonlocal made
            made += 1
            response = case.call(session=session, headers=headers, timeout=WITHIN_S)
            case.validate_response(response, checks=CHECKS)
            listed = case.operation.definition.raw["responses"]
            assert str(response.status_code) in listed or response.status_code in UNLISTED

        answers()
    return made


def _fuzz_replica(replica: ReplicaProcess, count: int) -> int:
    process = psutil.Process(replica.pid)
    before = process.memory_info().rss
    made = _fuzz(replica.url, count, {})
    assert process.memory_info().rss - before < MAX_GROWTH
    assert web.get(f"{replica.url}/readyz").status_code == 200
    assert "Traceback" not in replica.log
    return made


def test_the_replica_answers_anything_as_documented(fake_replica: ReplicaProcess) -> None:
    _fuzz_replica(fake_replica, FEW)


def test_the_monitor_answers_anything_as_documented(fuzzed_monitor: Monitor) -> None:
    _fuzz(fuzzed_monitor.url, 40, {"Authorization": f"Bearer {TOKEN}"})


@pytest.mark.long
def test_both_answer_thousands_of_requests(
    fake_replica: ReplicaProcess, fuzzed_monitor: Monitor, record_cases: Any
) -> None:
    record_cases("replica", _fuzz_replica(fake_replica, 1500))
    record_cases("monitor", _fuzz(fuzzed_monitor.url, 300, {"Authorization": f"Bearer {TOKEN}"}))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_what_fuzzing_found(fake_replica: ReplicaProcess, path: str, content: bytes) -> None:
    response = web.post(fake_replica.url + path, content=content, headers=JSON_HEADERS)
    assert response.status_code in (400, 422), response.text
    assert Problem.model_validate_json(response.content).detail


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: abc",
        b"Content-Length: -5",
        b"Content-Length: 99999999999999999999999",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Content-Length: 17000000",
    ],
)
def test_lengths_that_cannot_be(fake_replica: ReplicaProcess, head: bytes) -> None:
    assert _raw(fake_replica.port, b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\nhello") in (
        400,
        413,
    )


@pytest.mark.parametrize(
    "hosts", [b"Host: evil.example\r\nHost: localhost", b"Host: localhost\r\nHost: evil.example", b""]
)
def test_every_host_must_be_loopback(fake_replica: ReplicaProcess, hosts: bytes) -> None:
    assert _raw(fake_replica.port, b"GET /v1/weights HTTP/1.0\r\n" + hosts + b"\r\n\r\n") == 403


@pytest.mark.parametrize("framing", [b"Content-Length: 50", b"Transfer-Encoding: chunked"])
def test_a_body_that_never_ends_is_not_waited_for(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framing: bytes
) -> None:
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 0.2)
    head = b"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with ReplicaThread(tmp_path, "--model", str(small_model), "--engine", "fake") as replica:
        assert _raw(replica.port, head + framing + b"\r\n\r\n5\r\n{") == 408
        # A request whose body is complete may take as long as it likes.
        monkeypatch.setattr(guard, "BODY_TIMEOUT_S", WITHIN_S)
        body = json.dumps({"prompt": "1"})
        assert web.post(f"{replica.url}/v1/rollouts", content=body, headers=JSON_HEADERS).status_code == 200


def _raw(port: int, request: bytes) -> int:
    """Sends the request as it is, and returns the status of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S) as peer:
        peer.sendall(request)
        with peer.makefile("rb") as reply:
            return int(reply.readline().split()[1])
