"""OpenTelemetry traces of each sample's path. They need a collector in `trace_url` and the extra `otel`.

    sample (trainer)
      submit -> wait in queue -> generate -> commit -> reward -> train -> publish

A job's metadata carries the trace as W3C `traceparent`, and its group returns it; a client may supply its own.
OTEL_TRACES_SAMPLER=parentbased_traceidratio with OTEL_TRACES_SAMPLER_ARG=0.01 traces one sample in a hundred. Each
machine takes the times from its own clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from opentelemetry.trace import get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pydantic import Field

from dvp_rl.contract.errors import ConfigError
from dvp_rl.extras import pip_install

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

TIMEOUT_S = 5
"""Timeout of one export to the collector, in seconds. Only the last one delays anything: the end of the process."""

PROPAGATOR = TraceContextTextMapPropagator()

TraceUrl = Annotated[str, Field(pattern=r"^https?://[^\s]+$")]

_provider: TracerProvider | None = None


@contextmanager
def configured(service: str, url: str | None, **attributes: str) -> Iterator[None]:
    """Sends this process's spans to the collector at `url` (OTLP over HTTP) until the block ends. None: no tracing.

    Raises ConfigError if the extra is not installed.
    """
    global _provider
    if url is None:
        yield
        return
    _provider = _make_provider(service, url, attributes)
    try:
        yield
    finally:
        _provider.shutdown()
        _provider = None


def _make_provider(service: str, url: str, attributes: Mapping[str, str]) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            f"trace_url is {url!r}, but OpenTelemetry is not installed: {pip_install('otel')}, or leave it unset"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": service, **attributes}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Trace:
    """The trace of one job, from construction until `end`."""

    def __init__(self, job_id: str) -> None:
        self._span: Span | None = None
        if _provider is not None:
            self._span = _provider.get_tracer(__name__).start_span("sample", attributes={"dvp.job_id": job_id})

    @property
    def carrier(self) -> dict[str, str]:
        """Entries for the job's metadata; empty if tracing is disabled."""
        carrier: dict[str, str] = {}
        if self._span is not None:
            PROPAGATOR.inject(carrier, set_span_in_context(self._span))
        return carrier

    def end(self, outcome: str) -> None:
        if self._span is not None:
            self._span.set_attribute("dvp.outcome", outcome)
            self._span.end()


@contextmanager
def span(name: str, carriers: Iterable[Mapping[str, Any]], *, since: float | None = None) -> Iterator[None]:
    """Records the block as one span in each trace named by the metadata in `carriers`. `since`: earlier start of the
    span, in Unix seconds."""
    if _provider is None:
        yield
        return
    tracer, start_ns = _provider.get_tracer(__name__), int((since or time.time()) * 1e9)
    parents = [parent for carrier in carriers if (parent := _parent(carrier))]
    spans = [tracer.start_span(name, context=parent, start_time=start_ns) for parent in parents]
    try:
        yield
    finally:
        for started in spans:
            started.end()


def _parent(carrier: Mapping[str, Any]) -> Context | None:
    """The trace named by the metadata, None if it is missing or invalid: anybody can write metadata."""
    traceparent = carrier.get("traceparent")
    if not isinstance(traceparent, str):
        return None
    context = PROPAGATOR.extract({"traceparent": traceparent})
    return context if get_current_span(context).get_span_context().is_valid else None
