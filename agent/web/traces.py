"""Incidents as OpenTelemetry traces: a span per incident, with a child span per phase.

They are sent if OpenTelemetry's SDK is installed and OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agent.core.incident import Incident, Phases
from agent.observe.goodput import began_at
from agent.observe.messages import describe

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Tracer

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

Export = Callable[[Sequence[Incident]], None]


def exporter(job_id: str) -> Export:
    """Return a function that sends incidents; it does nothing without an endpoint or without the packages."""
    if not any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
        return lambda _incidents: None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - optional
    except ModuleNotFoundError:
        return lambda _incidents: None
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - as above

    return exporting(job_id, BatchSpanProcessor(OTLPSpanExporter()))


def exporting(job_id: str, to: SpanProcessor) -> Export:
    """Return a function that makes spans of incidents and passes them to a span processor."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an optional package
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - as above

    provider = TracerProvider(resource=Resource.create({"service.name": "elastic-agent", "job.id": job_id}))
    provider.add_span_processor(to)
    tracer = provider.get_tracer("elastic-agent")

    def export(incidents: Sequence[Incident]) -> None:
        for incident in incidents:
            _trace(tracer, incident)

    return export


def _trace(tracer: Tracer, incident: Incident) -> None:
    from opentelemetry.trace import set_span_in_context  # noqa: PLC0415 - as above

    start = began_at(incident)
    attributes = {
        "group": incident.group,
        "cause": incident.cause,
        "reason": describe(incident.reason),
        "replayed_steps": incident.replayed_steps,
    }
    span = tracer.start_span(f"incident: {incident.cause}", start_time=_ns(start), attributes=attributes)
    within = set_span_in_context(span)
    at = start
    for name in Phases.__struct_fields__:
        seconds = getattr(incident.phases, name) or 0.0
        child = tracer.start_span(name.removesuffix("_s"), context=within, start_time=_ns(at))
        at += seconds
        child.end(_ns(at))
    span.end(_ns(at))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
