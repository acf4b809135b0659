"""Metrics of the job, and its incidents as traces."""

from __future__ import annotations

import msgspec
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from records import RESTART, Run, ended

from agent.core.incident import Incident, Phases
from agent.core.model import Spec
from agent.core.records import Stored
from agent.core.view import ClusterView
from agent.web.events import FinishedIncidents
from agent.web.hub import KnownJobState
from agent.web.metrics import Metrics
from agent.web.page_data import past, present
from agent.web.traces import exporting

GOING_ON = Phases(detect_s=0.5, agree_s=0.5, stop_s=0.25)


def known(run: Run, number: int, name: str = "r1") -> KnownJobState:
    """The state of the job after `number` incidents."""
    spec = Spec(run=name, np_min=1, np_max=9, secret="s3cret", changed_by="", changed_at=0.0)
    view = ClusterView(revision=1, is_whole=True, spec=Stored(spec, 1, 1))
    incidents = (msgspec.structs.replace(each, run=name) for each in run.incidents[:number])
    return KnownJobState("job", view, tuple(incidents))


def scraped(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """The samples of a scrape by name and label values; all have the job's id."""
    families = text_string_to_metric_families(metrics.text().decode())
    samples = [sample for each in families for sample in each.samples]
    assert all(sample.labels.pop("job_id") == "job" for sample in samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def run_of_four() -> Run:
    run = Run("a", "b")
    failed = ended("b", 1, error="ValueError: no", traceback="Traceback (most recent call last):\nValueError: no")
    run.add("failed", 60.0, ("a", "b"), ended=(failed,), replayed_steps=3, step_s=0.5, step=12)
    run.add("lost", 90.0, ("a",))
    run.add("failed", 120.0, ("a",), phases=GOING_ON)
    return run


def test_each_incident_is_returned_once_when_it_is_over() -> None:
    finished, run = FinishedIncidents(0.0), run_of_four()
    assert [each.group for each in finished.of(known(run, 1))] == [1]
    assert [each.group for each in finished.of(known(run, 4))] == [2, 3]
    assert finished.of(known(run, 4)) == []
    run.add("failed", 130.0, ("a",))
    assert [each.group for each in finished.of(known(run, 5))] == [4, 5], "4 was cut short by 5"


def test_incidents_that_were_over_before_are_not_returned_and_those_of_a_new_run_are() -> None:
    run = run_of_four()
    finished = FinishedIncidents(run.incidents[2].at)
    assert [each.group for each in finished.of(known(run, 4))] == [3]
    assert [each.group for each in FinishedIncidents(0.0).of(known(run, 3, "r2"))] == [1, 2, 3]
    both = FinishedIncidents(0.0)
    both.of(known(run, 3))
    assert [each.group for each in both.of(known(run, 2, "r2"))] == [1, 2]


def test_incidents_are_counted_by_cause_and_phase() -> None:
    metrics, run = Metrics("job"), run_of_four()
    before = scraped(metrics)
    assert before["elastic_agent_incidents_total", "lost"] == 0, "so that the first one is an increase"
    assert before["elastic_agent_phase_seconds_count", "detect"] == 0
    metrics.count(run.incidents[:3])
    found = scraped(metrics)
    assert found["elastic_agent_incidents_total", "failed"] == 1
    assert found["elastic_agent_incidents_total", "lost"] == 1
    assert found["elastic_agent_incidents_total", "start"] == 0
    assert found["elastic_agent_replayed_steps_total",] == 3
    assert found["elastic_agent_downtime_seconds_total", "failed"] == RESTART.total_s + 1.5
    assert found["elastic_agent_phase_seconds_count", "detect"] == 2
    assert found["elastic_agent_phase_seconds_sum", "detect"] == 2 * 0.5
    assert found["elastic_agent_recovery_seconds_count", "lost"] == 1


def test_the_page_has_the_same_incidents() -> None:
    run = run_of_four()
    history = run.history(130.0)
    drawn, now = past(history), present(history, known(run, 4).view)
    assert [each.group for each in drawn.incidents] == [4, 3, 2, 1]
    assert (now.incidents, now.replayed_steps) == (3, 3)
    assert "ValueError: no" in "\n".join(drawn.incidents[2].sentences)
    assert drawn.rows == ["a", "b"]
    assert {each.group for each in drawn.faults} >= {2, 3}
    assert drawn.spans[-1].ended_at is None
    assert drawn.spans[1].rows == [(0, 1)], "both have trained"


def test_an_incident_is_a_span_and_its_phases_are_children() -> None:
    sink, run = InMemorySpanExporter(), run_of_four()
    incidents: list[Incident] = run.incidents[1:2]
    exporting("job", SimpleSpanProcessor(sink))(incidents)
    spans = {span.name: span for span in sink.get_finished_spans()}
    whole = spans.pop("incident: failed")
    assert whole.attributes["group"] == 2
    assert (whole.end_time - whole.start_time) / 1e9 == RESTART.total_s
    assert list(spans) == ["detect", "agree", "stop", "start", "join", "set_up", "load", "first_step"]
    assert all(span.parent.span_id == whole.context.span_id for span in spans.values())
    assert spans["detect"].start_time == whole.start_time
    assert spans["first_step"].end_time == whole.end_time
