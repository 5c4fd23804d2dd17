"""Traces as a collector receives them: OTLP over HTTP from a real replica and a real trainer."""

from __future__ import annotations

import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dvp_rl import tracing
from dvp_rl.contract.errors import ConfigError
from dvp_rl.extras import pip_install
from tests.kit.runs import config, replica, train

WAY = ["submit", "wait in queue", "generate", "commit", "reward", "train", "publish"]


class Received(NamedTuple):
    service: str
    name: str
    trace: bytes
    id: bytes
    parent: bytes
    start: int
    attributes: dict[str, str]


@contextmanager
def collector() -> Iterator[tuple[str, list[Received]]]:
    """A running collector's URL, and the spans that it has received."""
    received: list[Received] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.extend(_spans(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def _spans(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for resource in request.resource_spans:
        facts = {fact.key: fact.value.string_value for fact in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                attributes = {fact.key: fact.value.string_value for fact in span.attributes}
                yield Received(
                    facts["service.name"],
                    span.name,
                    span.trace_id,
                    span.span_id,
                    span.parent_span_id,
                    span.start_time_unix_nano,
                    attributes,
                )


@pytest.mark.slow
def test_a_samples_way_is_one_trace(broker_url: str, run_id: str, tmp_path: Path) -> None:
    with collector() as (url, received), replica(tmp_path, run_id, broker_url, f"--trace-url={url}"):
        train([*config(tmp_path, run_id, broker_url, steps="3"), f"--trace-url={url}"])
    traces = defaultdict(list)
    for span in sorted(received, key=lambda span: span.start):
        traces[span.trace].append(span)
    trained = [spans for spans in traces.values() if spans[0].attributes.get("dvp.outcome") == "trained"]
    assert len(trained) == 3 * 4
    for root, *rest in trained:
        assert (root.name, root.service, root.parent) == ("sample", "dvp-train", b"")
        assert root.attributes["dvp.job_id"].startswith(f"{run_id}:")
        assert {span.parent for span in rest} == {root.id}
        services = {span.name: span.service for span in rest}
        assert set(services) >= set(WAY[:-1])
        assert {name for name, service in services.items() if service == "dvp-rollout"} == set(WAY[1:4])
        order = {span.name: span.start for span in rest}
        # The wait begins when the job is made, a moment before it is sent.
        assert order["generate"] <= order["commit"] <= order["reward"] <= order["train"]
    assert any(span.name == "publish" for spans in trained for span in spans)


def test_without_a_collector_nothing_is_carried_or_recorded() -> None:
    with tracing.configured("test", None):
        trace = tracing.Trace("run:000000000:0")
        assert trace.carrier == {}
        with tracing.span("generate", [trace.carrier]):
            pass
        trace.end("trained")


def test_only_jobs_of_a_trace_are_recorded() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with collector() as (url, received):
        with (
            tracing.configured("test", url),
            tracing.span("generate", [{}, {"traceparent": 7}, {"traceparent": "00-zz"}, {"traceparent": parent}]),
        ):
            pass
        (span,) = received
    assert (span.trace.hex(), span.parent.hex()) == (parent.split("-")[1], parent.split("-")[2])


def test_the_extra_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=re.escape(pip_install("otel"))), tracing.configured("test", "http://x:1"):
        pass
