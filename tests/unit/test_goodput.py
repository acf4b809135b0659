"""The statistics of a run, and what each node did over time."""

from __future__ import annotations

import pytest
from reasons import FINISHED, lost
from records import BEGAN_AT, Run, ended

from agent.core.incident import Phases
from agent.core.model import Result
from agent.observe.goodput import DOWNTIME_PHASES, REPLAY, summary, training_since


def test_downtime_is_summed_by_phase_and_by_cause() -> None:
    run = Run("a", "b")
    run.add("failed", 50.0, ("a", "b"), replayed_steps=4, step_s=0.5)
    run.add("lost", 100.0, ("a",), replayed_steps=2, step_s=0.5)
    run.add("failed", 150.0, ("a",))
    statistics = run.history(203.0).statistics
    assert [(each.cause, each.incidents, each.downtime_s, each.replayed_steps) for each in statistics.by_cause] == [
        ("failed", 2, 9.0, 4),
        ("lost", 1, 4.5, 2),
    ]
    assert statistics.downtime_by_phase == {
        **dict(zip(DOWNTIME_PHASES, (1.5, 1.5, 0.75, 3.0, 1.5, 0.0, 0.75, 1.5), strict=False)),
        REPLAY: 3.0,
    }
    assert sum(statistics.downtime_by_phase.values()) == statistics.downtime_s
    assert statistics.goodput == pytest.approx(1 - 13.5 / 200), "since the first step, 3 s after the first group"


def test_the_first_start_costs_nothing() -> None:
    statistics = Run("a").history(50.0).statistics
    assert (statistics.incidents, statistics.downtime_s, statistics.goodput) == (0, 0.0, 1.0)
    assert statistics.by_cause == ()


def test_the_statistics_equal_those_in_the_summary_of_the_result() -> None:
    run = Run("a", "b")
    last = run.add("failed", 50.0, ("a", "b"), replayed_steps=4, step_s=0.5)
    said = summary(last.totals, training_since(run.incidents[0]), BEGAN_AT + 103.0)
    result = Result(run="r1", group=2, succeeded=True, exit_code=0, reason=FINISHED, summary=said, at=BEGAN_AT + 103.0)
    statistics = run.history(5000.0, result=result).statistics
    assert said == "1 incident cost 5.5 s; goodput 94.5 %; 4 replayed steps"
    assert statistics.goodput == pytest.approx(0.945), "it does not change after the end"


@pytest.mark.parametrize("is_last", [True, False])
def test_where_no_first_step_was_reported_the_downtime_is_a_lower_bound(*, is_last: bool) -> None:
    """The job had ended by then, or the script commits no steps."""
    run = Run("a", "b")
    last = run.add("failed", 50.0, ("a", "b"), phases=Phases(detect_s=0.5, agree_s=0.5, stop_s=1.0))
    if not is_last:
        last = run.add("failed", 60.0, ("a", "b"))
    assert last.totals.is_at_least
    said = summary(last.totals, training_since(run.incidents[0]), BEGAN_AT + 103.0)
    assert " cost at least " in said
    assert said.partition("; ")[2].startswith("goodput 98.0 % at most" if is_last else "goodput 94.5 % at most")


def test_the_downtime_of_an_open_incident_grows() -> None:
    run = Run("a", "b")
    run.add("failed", 50.0, ("a", "b"), phases=Phases(detect_s=0.5, agree_s=0.5, stop_s=1.0))
    statistics = run.history(61.0).statistics
    assert statistics.downtime_s == pytest.approx(12.0)
    assert statistics.downtime_by_phase["start_s"] == pytest.approx(10.0), "what it waits for now"


def test_a_fault_before_the_first_step_ends_the_incident_before_it() -> None:
    run = Run("a", "b")
    run.add("failed", 50.0, ("a", "b"), phases=Phases(detect_s=0.5, agree_s=0.5, stop_s=1.0))
    run.add("failed", 56.0, ("a", "b"))
    first = run.history(100.0).outages[1]
    assert first.ended_at == BEGAN_AT + 55.0
    assert first.downtime_s == pytest.approx(6.0)


def test_waiting_for_nodes_is_a_part_of_agreeing_on_the_next_group() -> None:
    run = Run("a", "b", np=(2, 2))
    run.add("wait", 50.0, (), phases=Phases(detect_s=1.0, agree_s=0.0), reason=lost("b"))
    assert run.history(90.0).statistics.downtime_by_phase["agree_s"] == pytest.approx(40.0)
    run.add("start", 90.0, ("a", "b"), phases=Phases(agree_s=40.0, stop_s=0.0, start_s=1.0, first_step_s=1.0))
    statistics = run.history(100.0).statistics
    assert statistics.downtime_by_phase["agree_s"] == pytest.approx(40.0), "once, whichever of the two records has it"


def test_only_the_phases_up_to_the_stop_are_counted_for_a_script_without_commits() -> None:
    """It may be training, which cannot be observed. So the rest is not counted as downtime."""
    run = Run("a", "b", phases=Phases(agree_s=0.0, stop_s=0.0))
    run.add("failed", 50.0, ("a", "b"), phases=Phases(detect_s=0.5, agree_s=0.5, stop_s=1.0))
    statistics = run.history(102.0).statistics
    assert statistics.downtime_s == 2.0
    assert spans(run, 102.0)["a"] == [("training", 0.0, 49.0), ("stopped", 49.0, 51.0), ("training", 51.0, 102.0)]


def spans(run: Run, now_s: float, **told: object) -> dict[str, list[tuple[str, float, float]]]:
    """Return by node its states with their begin and end."""
    history = run.history(now_s, **told)
    found: dict[str, list[tuple[str, float, float]]] = {name: [] for name in history.rows}
    for span in history.spans:
        found[span.node_id].append((span.state, span.began_at - BEGAN_AT, span.ended_at - BEGAN_AT))
    return found


def test_each_node_has_a_row_of_spans() -> None:
    run = Run("a", "b")
    run.add("failed", 50.0, ("a", "b"), ended=(ended("b", 1),))
    run.add("lost", 100.0, ("a",))
    run.add("join", 150.0, ("a", "c"))
    assert spans(run, 200.0) == {
        "a": [
            ("recovering", 0.0, 3.0),
            ("training", 3.0, 49.0),
            ("stopped", 49.0, 50.25),
            ("recovering", 50.25, 52.5),
            ("training", 52.5, 99.0),
            ("stopped", 99.0, 100.25),
            ("recovering", 100.25, 102.5),
            ("training", 102.5, 149.0),
            ("stopped", 149.0, 150.25),
            ("recovering", 150.25, 152.5),
            ("training", 152.5, 200.0),
        ],
        "b": [
            ("recovering", 0.0, 3.0),
            ("training", 3.0, 49.0),
            ("stopped", 49.0, 50.25),
            ("recovering", 50.25, 52.5),
            ("training", 52.5, 99.0),
        ],
        "c": [("recovering", 150.0, 152.5), ("training", 152.5, 200.0)],
    }
    history = run.history(200.0)
    assert [(mark.node_id, mark.incident.group) for mark in history.fault_marks] == [("b", 2), ("b", 3)]


def test_remaining_nodes_wait_while_others_are_missing() -> None:
    run = Run("a", "b", np=(2, 2))
    run.add("wait", 50.0, (), phases=Phases(detect_s=1.0, agree_s=0.0), reason=lost("b"))
    assert spans(run, 60.0, present=frozenset({"a"}))["a"][-1] == ("waiting", 49.0, 60.0)
    assert spans(run, 60.0, present=frozenset({"a"}))["b"][-1] == ("training", 3.0, 49.0)
    run.add("start", 90.0, ("a", "c"), phases=Phases(agree_s=30.0, stop_s=0.0, start_s=1.0, first_step_s=1.0))
    assert spans(run, 100.0)["a"][-3:] == [
        ("waiting", 49.0, 90.0),
        ("recovering", 90.0, 92.0),
        ("training", 92.0, 100.0),
    ]
    assert [mark.node_id for mark in run.history(100.0).fault_marks] == ["b"]


def test_a_job_that_failed_shows_no_time_after_its_end() -> None:
    run = Run("a")
    result = Result(run="r1", group=1, succeeded=False, exit_code=1, reason=FINISHED)
    history = run.history(5000.0, result=result)
    assert history.end == BEGAN_AT + 3.0, "the last that is known of it"
    assert history.state == "failed"
