"""Incidents as traces, for who has OpenTelemetry: a span for each, with its phases as children.

Where its SDK is installed and OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) is set, they are sent there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agent.core.incident import Incident, Phases
from agent.observe.goodput import began_at

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Tracer

_WHERE = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

Export = Callable[[Sequence[Incident]], None]


def exporter(job_id: str) -> Export:
    """What sends incidents; nothing, if nobody asked for it or the packages are not there."""
    if not any(os.environ.get(name) for name in _WHERE):
        return lambda _incidents: None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - not ours
    except ModuleNotFoundError:
        return lambda _incidents: None
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - as above

    return exporting(job_id, BatchSpanProcessor(OTLPSpanExporter()))


def exporting(job_id: str, to: SpanProcessor) -> Export:
    """What makes spans of incidents, and hands them over."""
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
    said = {"group": incident.group, "cause": incident.cause, "reason": incident.reason, "redone": incident.redone}
    span = tracer.start_span(f"incident: {incident.cause}", start_time=_ns(start), attributes=said)
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
