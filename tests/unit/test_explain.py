"""Incidents as text: in one line, in a table, and explained."""

from __future__ import annotations

import io

import msgspec
import pytest
from reasons import lost

from agent.core.failures import Failure
from agent.core.incident import Incident, IncidentMember, Phases, Totals, WorkerEnd
from agent.core.reasons import FailedWorker, Hang, NodesThere, WorkersFailed
from agent.observe.incidents import explain, incident_json, print_history
from agent.observe.messages import cause_of, how_it_ended, how_near, listed, one_line, signal_name


def failure(rank: int = 1, **changed: object) -> Failure:
    plain = Failure(rank=rank, local_rank=0, exit_code=None, signal=9, is_peer_lost=False, tail="", at=0.0)
    return msgspec.structs.replace(plain, **changed)


RAISED = failure(
    exit_code=1,
    signal=None,
    error="ValueError: bad batch [/x]",
    traceback="Traceback (most recent call last):\n  File train.py\nValueError: bad batch [/x]\n",
)
KILLED = WorkerEnd(node_id="node-b", failure=failure())
PEER = WorkerEnd(node_id="node-a", failure=failure(0, exit_code=1, signal=None, is_peer_lost=True), after_s=0.1)
FIRST = Incident(
    run="r",
    group=3,
    cause="start",
    reason=NodesThere(nodes=3, np="3", is_all=True),
    at=1000.0,
    began_at=1000.0,
    members=(
        IncidentMember(node_id="node-a", nproc=2),
        IncidentMember(node_id="node-b", nproc=1),
        IncidentMember(node_id="node-c", nproc=1),
    ),
    phases=Phases(agree_s=0.5, stop_s=0.0, start_s=1.5, join_s=0.4, load_s=0.1, first_step_s=0.2),
)
CRASH = Incident(
    run="r",
    group=4,
    cause="failed",
    reason=WorkersFailed(first=FailedWorker(node_id="node-b", rank=1, signal=9)),
    at=1100.0,
    began_at=1000.0,
    members=(IncidentMember(node_id="node-a", nproc=2), IncidentMember(node_id="node-d", nproc=2)),
    ended=(KILLED, PEER),
    phases=Phases(detect_s=0.02, agree_s=0.01, stop_s=0.1, start_s=1.9, join_s=0.5, load_s=0.2, first_step_s=0.7),
    step=120,
    trained_before=3,
    reached=123,
    replayed_steps=3,
    step_s=0.5,
    before=Totals(incidents=2, downtime_s=10.0, replayed_steps=4),
)


def crash(*ended: WorkerEnd, **changed: object) -> Incident:
    return msgspec.structs.replace(CRASH, ended=ended or CRASH.ended, **changed)


def rival(**changed: object) -> WorkerEnd:
    return msgspec.structs.replace(
        WorkerEnd(node_id="node-c", failure=failure(3, signal=None, exit_code=1), after_s=0.004, error_s=0.0073),
        **changed,
    )


def said(incident: Incident, before: Incident | None = FIRST) -> str:
    return "\n".join(explain(incident, before))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, "rank 1 on node-b was killed by SIGKILL"),
        ({"signal": 11}, "rank 1 on node-b was killed by SIGSEGV"),
        ({"signal": 40}, "rank 1 on node-b was killed by signal 40"),
        ({"why": "memory ran out"}, "rank 1 on node-b was killed by SIGKILL: memory ran out"),
        ({"signal": None, "exit_code": 7}, "rank 1 on node-b exited with code 7"),
        (
            {"signal": None, "exit_code": 1, "error": "KeyError: 3"},
            "rank 1 on node-b exited with code 1 (KeyError: 3)",
        ),
        (
            {"signal": None, "hang": Hang(doing="sleeps", step=9, for_s=70)},
            "rank 1 on node-b made no step after step 9 for 70 s: it sleeps",
        ),
        (
            {"signal": None, "exit_code": 0, "last_step": 9},
            "rank 1 on node-b exited with code 0: it ended after step 9, before the other ranks were done",
        ),
        (
            {"signal": None, "exit_code": 0},
            "rank 1 on node-b exited with code 0: it ended, before the other ranks were done",
        ),
        ({"unreadable": "step 5: EIO"}, "rank 1 on node-b could not read step 5: EIO"),
        ({"is_port_taken": True}, "rank 1 on node-b found the master's port taken"),
    ],
)
def test_the_end_of_a_worker_is_described(changed: dict[str, object], sentence: str) -> None:
    assert how_it_ended("node-b", failure(**changed)) == sentence


def test_signals_have_names() -> None:
    assert [signal_name(number) for number in (6, 9, 15, 50)] == ["SIGABRT", "SIGKILL", "SIGTERM", "signal 50"]


def test_an_incident_fits_on_a_line() -> None:
    assert one_line(CRASH) == (
        "group 4 after 3.4 s: rank 1 on node-b was killed by SIGKILL; detect 0.02, agree 0.01, stop 0.1, start 1.9, "
        "join 0.5, load 0.2, first step 0.7 s; 3 replayed steps"
    )


def test_a_line_contains_only_what_is_known() -> None:
    wait = msgspec.structs.replace(
        CRASH, cause="wait", reason=lost("node-b"), members=(), phases=Phases(), replayed_steps=0
    )
    assert one_line(wait) == "group 4: lost node-b"
    running = msgspec.structs.replace(wait, phases=Phases(detect_s=0.5), replayed_steps=1)
    assert one_line(running) == "group 4: lost node-b; detect 0.5 s; 1 replayed step"


def test_all_workers_that_may_have_failed_first_are_named() -> None:
    assert cause_of(crash(KILLED, rival(), PEER)) == (
        "rank 1 on node-b was killed by SIGKILL (or rank 3 on node-c first, within 12 ms)"
    )


@pytest.mark.parametrize(
    "other",
    [rival(after_s=0.5), rival(failure=failure(3, is_peer_lost=True)), rival(after_s=0.001, error_s=0.0)],
)
def test_a_worker_that_certainly_failed_later_or_lost_its_connection_is_not_named_as_first(other: WorkerEnd) -> None:
    assert cause_of(crash(KILLED, other)) == "rank 1 on node-b was killed by SIGKILL"


def test_the_time_between_two_failures_is_as_precise_as_the_clocks() -> None:
    assert how_near([rival(), rival(after_s=0.02, error_s=0.0301)]) == "within 51 ms"
    assert how_near([rival(after_s=0.6, error_s=0.2)]) == "within 800 ms"
    assert how_near([rival(after_s=2.0, error_s=3.0)]) == "within 5.0 s"
    assert how_near([rival(), rival(error_s=None)]) == "by clocks that were never compared"


def test_a_long_list_is_shortened() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(list("abcde"), most=3) == "a, b, c and 2 more"


def test_the_first_start_is_explained() -> None:
    spent = (
        "0.5 s to agree on the new group, 1.5 s to start the new workers, "
        "0.4 s for all ranks to join the process group, 0.1 s to load the restore point and 0.2 s for the first step"
    )
    sentences = explain(FIRST, None)
    assert sentences[0].startswith("Group 3 was formed at 1970-01-01 ")
    assert sentences[0].endswith(", because enough nodes were there.")
    assert sentences[1:] == [
        "Reason: all of 3 nodes there.",
        "The group has 4 ranks on 3 nodes: node-a (0-1), node-b (2) and node-c (3).",
        f"It took 2.7 s until every rank had made a step: {spent}.",
        "Training began at the start.",
    ]


def test_a_first_start_may_begin_where_an_earlier_run_ended() -> None:
    told = explain(msgspec.structs.replace(FIRST, step=60), None)[-1]
    assert told == "Training resumed after step 60; what happened before is in no record of this run."


def test_a_crash_is_explained_from_its_first_cause_to_its_cost() -> None:
    spent = (
        "0.02 s to detect it, 0.01 s to agree on the new group, 0.1 s to stop the old workers, 1.9 s to start the new "
        "workers, 0.5 s for all ranks to join the process group, 0.2 s to load the restore point "
        "and 0.7 s for the first step"
    )
    assert explain(CRASH, FIRST)[1:] == [
        "First failure: rank 1 on node-b was killed by SIGKILL.",
        "Failed as a result: rank 0 on node-a (0.1 s later: its connection broke).",
        "No longer in the group: node-b and node-c.",
        "node-d joined.",
        "The group has 4 ranks on 2 nodes: node-a (0-1) and node-d (2-3).",
        f"It took 3.4 s until every rank had made a step: {spent}.",
        "Training resumed after step 120; 3 replayed steps (1.5 s of work).",
        "The run so far: 3 incidents, 14.9 s of downtime and 7 replayed steps.",
    ]


def test_the_traceback_is_quoted_or_else_the_last_lines() -> None:
    quoted = said(crash(msgspec.structs.replace(KILLED, failure=RAISED)))
    assert "exited with code 1 (ValueError: bad batch [/x]).\n    Traceback (most recent call last):\n" in quoted
    tail = msgspec.structs.replace(KILLED, failure=failure(tail="loading\nkilled\n"))
    assert "was killed by SIGKILL.\n    loading\n    killed\n" in said(crash(tail))


def test_failures_whose_order_is_unknown_may_both_be_the_cause() -> None:
    text = said(crash(KILLED, rival(), rival(node_id="node-d", error_s=None, after_s=9.0)))
    assert "\nRank 3 on node-c exited with code 1, within 12 ms of the first; either may be the cause.\n" in text
    assert "exited with code 1, by clocks that were never compared of the first" not in text
    assert (
        "\nRank 3 on node-d exited with code 1 too; the clocks were never compared, so either may be the cause.\n"
        in text
    )


def test_workers_that_certainly_failed_later_are_consequences_with_their_output() -> None:
    assert "Failed as a result: rank 3 on node-c exited with code 1 (0.5 s later)" not in said(
        crash(KILLED, rival(after_s=0.5))
    )
    assert "\nRank 3 on node-c exited with code 1, 0.5 s later.\n" in said(crash(KILLED, rival(after_s=0.5)))


def test_the_loss_of_a_node_comes_before_the_failures_of_its_peers() -> None:
    text = said(crash(PEER, cause="lost", reason=lost("node-b")))
    assert "Reason: lost node-b.\nFailed as a result: rank 0 on node-a (0.1 s later: its connection broke)." in text


def test_a_failure_beside_a_lost_node_has_no_order() -> None:
    text = said(crash(KILLED, PEER, cause="lost", reason=lost("node-c")))
    assert "Reason: lost node-c.\nFailed as a result: rank 0 on node-a" in text
    assert "\nRank 1 on node-b was killed by SIGKILL too.\n" in text


def test_a_wait_says_that_nobody_trained() -> None:
    text = said(crash(PEER, cause="wait", reason=lost("node-b"), members=(), phases=Phases()))
    assert (
        "No longer in the group: node-a, node-b and node-c.\nThe group has no members: the job waits for nodes.\n"
        "The run so far:" in text
    )


def test_what_only_a_lost_leader_saw_is_reported_as_unknown() -> None:
    known = Phases(stop_s=1.0, start_s=1.0, join_s=0.0, load_s=0.0, first_step_s=2.0)
    (told,) = [each for each in explain(crash(phases=known), FIRST) if each.startswith("It took")]
    assert told.startswith("It took 4.0 s until every rank had made a step: ")
    assert told.endswith(". How long it took to detect it and to agree on the new group is not known.")


def test_unknown_phases_are_reported_as_unknown() -> None:
    assert "The duration is not known." in explain(crash(phases=Phases()), FIRST)
    text = said(crash(phases=Phases(detect_s=2.0), replayed_steps=0))
    assert "Not every rank has been seen to make a step (yet); 2.0 s are known: 2.0 s to detect it." in text
    assert "resumed" not in text


def test_steps_that_nobody_could_count_are_not_known() -> None:
    incident = crash(reached=None, replayed_steps=0)
    why = "how many steps were replayed is not known, since no node is left that had trained"
    text = said(incident)
    assert f"Training resumed after step 120; {why}.\n" in text
    assert "downtime and at least 4 replayed steps." in text
    assert one_line(incident).endswith(f"; {why}")


def test_a_planned_change_may_cost_no_step_and_no_time() -> None:
    text = said(crash(phases=Phases(detect_s=0.0, first_step_s=0.0), replayed_steps=0))
    assert (
        "It took 0.00 s until every rank had made a step.\nTraining resumed after step 120; no step was replayed.\n"
        in text
    )


def test_a_group_after_a_wait_names_what_was_waited_for() -> None:
    wait = msgspec.structs.replace(FIRST, group=3, cause="wait", reason=lost("node-c"), members=())
    text = said(crash(phases=Phases(detect_s=0.0, agree_s=7.6, first_step_s=0.4)), wait)
    assert "\nSince group 3 no node had trained: lost node-c.\n" in text
    assert "7.6 s until enough nodes were there and 0.4 s for the first step" in text


def test_members_of_an_earlier_run_do_not_count_as_having_left() -> None:
    text = said(CRASH, msgspec.structs.replace(FIRST, run="before"))
    assert "No longer in the group" not in text
    assert " joined." not in text


def shown(*incidents: Incident, with_phases: bool = False) -> str:
    out = io.StringIO()
    print_history(incidents, out, with_phases=with_phases)
    return out.getvalue()


def test_the_table_has_a_row_per_incident() -> None:
    lines = shown(FIRST, CRASH).splitlines()
    assert [len(line) for line in lines] == [len(lines[0])] * 6
    cells = [cell.strip() for cell in lines[4].split("│")]
    assert cells[1] == "4"
    assert cells[3:8] == ["failed", "rank 1 on node-b was killed by SIGKILL", "3.43", "3", "node-a, node-d"]


def test_the_table_shows_phases_on_request_and_marks_open_incidents() -> None:
    table = shown(crash(phases=Phases(detect_s=2.0)), with_phases=True)
    assert "first step" in table
    row = [cell.strip() for cell in table.splitlines()[3].split("│")]
    assert row[5:14] == ["2.00", "", "", "", "", "", "", "", "2.00+"]


def test_a_reason_is_never_markup_and_many_members_are_counted() -> None:
    many = tuple(IncidentMember(node_id=f"n{i}", nproc=1) for i in range(5))
    table = shown(crash(msgspec.structs.replace(KILLED, failure=RAISED), members=many))
    assert "(ValueError: bad batch [/x])" in table
    assert "5 nodes" in table


def test_json_has_all_fields_of_the_record_and_derived_values() -> None:
    data = incident_json(CRASH)
    assert (data["replayed_steps"], data["before"]) == (
        3,
        {"incidents": 2, "downtime_s": 10.0, "replayed_steps": 4, "is_at_least": False},
    )
    plain = msgspec.to_builtins(CRASH)
    assert {key: data[key] for key in plain} | {"reason": plain["reason"], "ended": plain["ended"]} == plain
    assert data["reason"] == "rank 1 on node-b was killed by SIGKILL"


def test_json_has_sentences_for_reasons_and_failures() -> None:
    hang, early = (
        WorkerEnd(node_id="node-b", failure=failure(signal=None, hang=Hang(doing="runs", step=9, for_s=70))),
        WorkerEnd(node_id="node-b", failure=failure(signal=None, exit_code=0, last_step=9)),
    )
    first, second, third = (each["failure"] for each in incident_json(crash(hang, early, KILLED))["ended"])
    assert (first["hang"], first["why"]) == ("made no step after step 9 for 70 s: it computes", "")
    assert (second["hang"], second["why"]) == ("", "it ended after step 9, before the other ranks were done")
    assert (third["hang"], third["why"]) == ("", "")


def test_json_has_values_that_follow_from_the_record() -> None:
    data = incident_json(CRASH)
    assert (round(data["seconds"], 2), data["is_complete"]) == (3.43, True)
