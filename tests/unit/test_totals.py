"""What a run's incidents have cost."""

from __future__ import annotations

import pytest
from reasons import LOST

from agent.core.incident import Incident, IncidentMember, Phases, Totals
from agent.observe.goodput import goodput, summary, training_since
from agent.observe.quantities import duration, percent


def _incident(*, at: float, phases: Phases, before: Totals = Totals(), began_at: float = 100.0) -> Incident:  # noqa: B008
    return Incident(
        run="r",
        group=2,
        cause="failed",
        reason=LOST,
        at=at,
        began_at=began_at,
        members=(IncidentMember(node_id="a", nproc=1),),
        phases=phases,
        trained_before=1,
        reached=3,
        replayed_steps=3,
        step_s=0.5,
        before=before,
    )


def test_a_job_without_incidents_has_lost_nothing() -> None:
    assert summary(Totals(), 0.0, 50.0) == "no incidents; goodput 100.0 %"


def test_the_sentence_names_incidents_time_goodput_and_steps() -> None:
    totals = Totals(incidents=3, downtime_s=14.2, replayed_steps=12)
    assert summary(totals, 0.0, 500.0) == "3 incidents cost 14.2 s; goodput 97.1 %; 12 replayed steps"


def test_one_is_not_many() -> None:
    totals = Totals(incidents=1, downtime_s=1.0, replayed_steps=1)
    assert summary(totals, 0.0, 100.0) == "1 incident cost 1.0 s; goodput 99.0 %; 1 replayed step"


def test_an_incident_that_cost_no_step_says_so() -> None:
    assert summary(Totals(incidents=1, downtime_s=1.0), 0.0, 10.0).endswith("; no step was replayed")


def test_what_a_script_without_commits_did_again_is_not_known() -> None:
    told = summary(Totals(incidents=1, downtime_s=1.0), 0.0, 10.0, commits=False)
    assert told == (
        "1 incident cost 1.0 s; goodput 90.0 % at most; replayed steps are not known: no step was committed"
    )


def test_what_nobody_could_count_is_at_least() -> None:
    why = "since after an incident nobody could count them"
    totals = Totals(incidents=1, downtime_s=1.0, is_at_least=True)
    assert summary(totals, 0.0, 10.0) == (
        f"1 incident cost at least 1.0 s; goodput 90.0 % at most; replayed steps are not known, {why}"
    )
    counted = Totals(incidents=2, downtime_s=1.0, replayed_steps=3, is_at_least=True)
    assert summary(counted, 0.0, 10.0).endswith(f"; at least 3 replayed steps, {why}")


def test_a_run_that_resumed_claims_nothing_of_what_was_before() -> None:
    """After all agents with an etcd of their own have ended, the next ones begin another run at its checkpoint."""
    assert summary(Totals(), 0.0, 50.0, resumed_after=350) == "no incidents since it resumed after step 350"


def test_a_failed_job_has_no_goodput() -> None:
    """What its last group lost is counted nowhere."""
    assert summary(Totals(), 0.0, 50.0, has_failed=True) == "no incidents before that"
    told = summary(Totals(incidents=2, downtime_s=1.0, replayed_steps=3), 0.0, 10.0, has_failed=True)
    assert told == "2 incidents before that cost 1.0 s; 3 replayed steps"


def test_an_incident_adds_its_phases_and_the_steps_that_were_done_again() -> None:
    before = Totals(incidents=1, downtime_s=2.0, replayed_steps=4)
    totals = _incident(at=200.0, phases=Phases(detect_s=0.5, first_step_s=1.0), before=before).totals
    assert totals == Totals(incidents=2, downtime_s=2.0 + 1.5 + 3 * 0.5, replayed_steps=7)
    assert goodput(totals, 100.0, 200.0) == pytest.approx(0.95)


def test_the_time_counts_from_the_first_step_and_the_first_start_costs_nothing() -> None:
    """What passed before the first group was written, and until its first step, was never training."""
    first = _incident(at=100.0, phases=Phases(detect_s=None, agree_s=9.0, start_s=2.0, join_s=1.0, first_step_s=0.5))
    assert first.totals == Totals()
    assert training_since(first) == 103.5
    assert training_since(_incident(at=200.0, phases=Phases(start_s=2.0), began_at=103.5)) == 103.5


def test_goodput_stays_between_none_and_all() -> None:
    """Records of several clocks may claim more than there was."""
    assert goodput(Totals(incidents=1, downtime_s=50.0), 0.0, 10.0) == 0.0
    assert goodput(Totals(), 10.0, 10.0) == 1.0


def test_nearly_all_is_not_all() -> None:
    assert [percent(share) for share in (1.0, 0.9999, 0.971, 0.29, 0.0)] == [
        "100.0 %",
        "99.9 %",
        "97.1 %",
        "29.0 %",
        "0.0 %",
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0.00 s"),
        (0.04, "0.04 s"),
        (14.2, "14.2 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (125.0, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3720.0, "1 h 02 min"),
        (86399.0, "1 d 00 h"),
        (273600.0, "3 d 04 h"),
    ],
)
def test_durations_are_printed_in_the_unit_that_fits(seconds: float, said: str) -> None:
    assert duration(seconds) == said
