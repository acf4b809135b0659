"""How local workers follow a group: which failure is the cause, and how long a consequence waits for it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from reasons import LOST

from agent.core import effects as fx
from agent.core import events as ev
from agent.core.failures import Failure
from agent.core.local_workers import LocalWorkers, Patience, Place, follow_group
from agent.core.member_status import MemberStatus, WrittenStatus
from agent.core.model import Group, Member, Quiesced, Spec
from agent.core.reasons import SetUpFailed
from agent.core.records import Identity, Stored
from agent.core.saved_states import Inventory, Replica, StateId
from agent.core.transitions import WorkerObservations, due_status
from agent.core.view import ClusterView
from agent.observe.messages import how_it_ended

ME = Identity("a", "i")
GROUP = Group(
    run="r",
    number=1,
    members=(Member(node_id="a", incarnation="i", address="x", nproc=2, port=1, link=2),),
    cause="start",
    reason=LOST,
    restarts=0,
    step=0,
    reached=1,
)
AT_ONCE = Patience(grace_s=0.0, kill_timeout_s=10.0)
SPEC = Spec(run="r", np_min=1, np_max=1, secret="s", changed_by="test", changed_at=0.0)


def running() -> LocalWorkers:
    return follow_group(LocalWorkers(), Place(GROUP, ME, SPEC), 0.0, AT_ONCE)[0]


def exited(local_rank: int, code: int, tail: str) -> ev.WorkerExited:
    return ev.WorkerExited(1, local_rank, code, None, tail, 0, 0.0)


def test_a_consequence_waits_a_moment_for_its_cause() -> None:
    workers = running().apply_event(exited(1, 1, "Connection closed by peer"), 0.0)
    workers, effects = follow_group(workers, Place(GROUP, ME, SPEC), 10.0, AT_ONCE)
    assert effects == ()
    assert workers.awaits_cause(10.1)
    workers = workers.apply_event(exited(0, 93, "do not restart"), 0.0)
    assert not workers.awaits_cause(10.2), "the cause has shown itself"
    assert follow_group(workers, Place(GROUP, ME, SPEC), 10.2, AT_ONCE)[1] == (fx.KillWorkers(1),)


def test_a_cause_that_does_not_show_is_not_waited_for_long() -> None:
    workers = running().apply_event(exited(1, 1, "Connection reset by peer"), 0.0)
    workers, _ = follow_group(workers, Place(GROUP, ME, SPEC), 10.0, AT_ONCE)
    assert follow_group(workers, Place(GROUP, ME, SPEC), 11.5, AT_ONCE)[1] == (fx.KillWorkers(1),)


def test_a_cause_of_its_own_kills_the_others_at_once() -> None:
    workers = running().apply_event(exited(0, 1, "ValueError"), 0.0)
    assert follow_group(workers, Place(GROUP, ME, SPEC), 10.0, AT_ONCE)[1] == (fx.KillWorkers(1),)


@pytest.mark.parametrize(
    ("now", "step", "wait_s"),
    [(10.0, 0, 7.0), (10.0, 1, 0.0), (1000.0, 0, 0.0)],
    ids=["soon", "after a step", "late"],
)
def test_other_ranks_have_a_moment_to_fail_by_the_same_script_error_only_in_a_group_that_has_just_begun(
    now: float, step: int, wait_s: float
) -> None:
    patience = replace(AT_ONCE, same_within_s=7.0)
    raised = replace(exited(0, 1, "KeyError"), script_error="KeyError at t.py:3", step=step)
    workers, effects = follow_group(running().apply_event(raised, now), Place(GROUP, ME, SPEC), now, patience)
    assert workers.cause_until == now + wait_s
    assert effects == (() if wait_s else (fx.KillWorkers(1),))


VIEW = ClusterView(revision=9, is_whole=False, group=Stored(GROUP, 5, 5))


SEEN = WorkerObservations(group=1)


def due(workers: LocalWorkers, now: float, written: WrittenStatus | None = None) -> fx.WriteStatus | None:
    """The status that is to be written."""
    return due_status(written or WrittenStatus(), workers, SEEN, (), VIEW, ME, now)


def told(workers: LocalWorkers, now: float, written: WrittenStatus | None = None) -> Quiesced | None:
    """What it reports about ranks that stopped for a handoff."""
    write = due(workers, now, written)
    return write.status.quiesced if write is not None else None


def done(write: fx.WriteStatus | None) -> WrittenStatus:
    """What is in etcd once that was written."""
    assert write is not None
    return WrittenStatus(write.status.group, write.status, 7)


def still(number: int, *, is_shared: bool, group: int = 1) -> ev.RanksQuiesced:
    return ev.RanksQuiesced(group, number, 8, is_shared=is_shared)


def test_quiesced_ranks_are_reported_once_the_neighbours_have_their_parts() -> None:
    workers = running().note_quiesced(still(3, is_shared=False), 11.0)
    assert told(workers, 10.0) is None
    shared = workers.note_quiesced(still(3, is_shared=True), 99.0)
    assert told(shared, 10.0) == Quiesced(group=1, node_id="a", incarnation="i", number=3, step=8)
    written = done(due(shared, 10.0))
    assert due(shared, 10.0, written) is None, "once"
    assert due(shared, 99.0, written) is None, "it is not late if it was written in time"


@pytest.mark.parametrize("is_shared", [False, True])
def test_ranks_that_have_trained_on_are_reported_as_quiesced_late(*, is_shared: bool) -> None:
    workers = (
        running().note_quiesced(still(3, is_shared=False), 11.0).note_quiesced(still(3, is_shared=is_shared), 99.0)
    )
    late = told(workers, 11.0)
    assert late is not None
    assert late.is_late


def test_another_standstill_has_a_time_of_its_own() -> None:
    workers = running().note_quiesced(still(3, is_shared=True), 11.0).note_quiesced(still(4, is_shared=True), 21.0)
    first = done(due(running().note_quiesced(still(3, is_shared=True), 11.0), 10.0))
    stands = told(workers, 20.0, first)
    assert stands is not None
    assert (stands.number, stands.is_late) == (4, False)


REPLICA = Replica(copy=StateId(run="r", group=1, step=3), world_size=2, has_common=True, parts=(0,))


def status_with(written: WrittenStatus, copies: tuple[Replica, ...], now: float = 10.0) -> fx.WriteStatus | None:
    return due_status(written, running(), SEEN, copies, VIEW, ME, now)


def test_what_is_in_the_record_stays_there_and_the_next_write_compares_its_revision() -> None:
    first = status_with(WrittenStatus(), (REPLICA,))
    assert first is not None
    assert (first.group_revision, first.status_revision) == (5, 0), "there is none before"
    assert first.status.inventory == Inventory(group=1, node_id="a", incarnation="i", copies=(REPLICA,))
    assert status_with(done(first), ()) is None, "what was held is not told anew"
    ended = running().apply_event(exited(0, 7, "oops"), 0.0).apply_event(exited(1, 7, "oops"), 0.0)
    second = due(ended, 20.0, done(first))
    assert second is not None
    assert second.status_revision == 7
    assert second.status == msgspec.structs.replace(first.status, exit=second.status.exit)
    assert second.status.exit is not None
    assert due(running(), 30.0, done(second)) is None, "an exit is not withdrawn"


def test_a_record_of_another_group_or_incarnation_is_not_built_on() -> None:
    write = status_with(WrittenStatus(), (REPLICA,))
    assert write is not None
    other = msgspec.structs.replace(write.status, incarnation="j", inventory=None, transition=None)
    again = status_with(WrittenStatus(1, other, 7), ())
    assert again is not None
    assert (again.status.incarnation, again.status_revision) == ("i", 7), "it is replaced"
    older = status_with(WrittenStatus(0, other, 7), ())
    assert older is not None
    assert older.status_revision == 0


def test_a_standstill_of_an_older_group_is_none() -> None:
    assert told(running().note_quiesced(still(3, is_shared=True, group=7), 11.0), 10.0) is None


def test_a_port_that_was_taken_is_the_cause_whatever_else_the_worker_prints() -> None:
    """Where the master's store cannot listen, rank 0 also tells of a connection that it never got."""
    workers = follow_group(running(), Place(GROUP, ME, SPEC), 0.0, AT_ONCE)[0]
    workers = workers.apply_event(exited(0, 1, f"EADDRINUSE, port: {workers.master_port}, Connection refused"), 0.0)
    workers, _ = follow_group(workers, Place(GROUP, ME, SPEC), 10.0, AT_ONCE)
    workers, _ = follow_group(workers, Place(GROUP, ME, SPEC), 20.0, AT_ONCE)
    write = due(workers, 20.0)
    assert write is not None
    assert write.status.exit is not None
    failure = write.status.exit.failure
    assert failure is not None
    assert (failure.is_port_taken, failure.is_peer_lost) == (True, False)


@pytest.mark.parametrize(("number", "is_told"), [(2, True), (3, False)])
def test_the_end_of_workers_is_reported_in_the_next_group_only(number: int, *, is_told: bool) -> None:
    """In a later one it would be taken for what ended the group before that."""
    workers = running().apply_event(exited(0, 7, "oops"), 0.0)
    workers = workers.apply_event(ev.WorkersGone(1), 1.0)
    following = msgspec.structs.replace(GROUP, number=number)
    workers, effects = follow_group(workers, Place(following, ME, SPEC), 2.0, AT_ONCE)
    assert [type(effect) for effect in effects] == [fx.StartWorkers]
    assert [failure.exit_code for failure in workers.ended_before] == ([7] if is_told else [])


def test_the_time_of_a_failure_is_that_of_the_first() -> None:
    workers = running().apply_event(exited(0, 1, "oops"), 10.0).apply_event(exited(1, 1, "oops"), 12.0)
    write = due(workers, 13.0)
    assert write is not None
    assert write.status.exit is not None
    assert write.status.exit.after_s == 3.0


GLOO = "RuntimeError: [/src/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"


def left(local_rank: int, at: float, code: int = 0, error: str = "", step: int = 33) -> ev.WorkerExited:
    return ev.WorkerExited(1, local_rank, code, None, error, step, at, error=error)


def cause(*exits: ev.WorkerExited) -> Failure:
    """What is reported of these ends."""
    workers = running()
    for each in exits:
        workers = workers.apply_event(each, 0.0)
    write = due(workers, 99.0)
    assert write is not None
    assert write.status.exit is not None
    assert write.status.exit.failure is not None
    return write.status.exit.failure


def test_a_rank_that_ended_well_is_the_cause_of_connections_that_broke_then() -> None:
    found = cause(left(1, 5.0), left(0, 6.0, 1, GLOO))
    assert (found.rank, found.exit_code, found.is_peer_lost) == (1, 0, False)
    assert how_it_ended("a", found) == (
        "rank 1 on a exited with code 0: it ended after step 33, before the other ranks were done"
    )


@pytest.mark.parametrize(
    ("ended_at", "error"),
    [
        (7.0, GLOO),  # it was lost to somebody else: this one ended later
        (5.0, "requests.exceptions.ConnectionError: Connection refused"),  # not to a rank
        (5.0, "RuntimeError: upload of results failed: Connection reset by peer"),  # likewise
        (5.0, "ValueError: no such thing"),
    ],
)
def test_a_rank_that_ended_well_is_not_to_blame_for_other_failures(ended_at: float, error: str) -> None:
    assert cause(left(1, ended_at), left(0, 6.0, 1, error)).rank == 0


def test_only_a_rank_that_ended_well_is_told_with_its_last_step() -> None:
    assert cause(left(1, 5.0), left(0, 6.0, 1, GLOO)).last_step == 33
    assert cause(left(0, 6.0, 1, "ValueError: no such thing")).last_step == 0


def test_a_status_has_only_parts_about_its_own_member_and_group() -> None:
    stands = Quiesced(group=1, node_id="a", incarnation="i", number=3, step=8)
    assert MemberStatus(group=1, node_id="a", incarnation="i", quiesced=stands).quiesced == stands
    for group, incarnation in ((2, "i"), (1, "j")):
        with pytest.raises(ValueError, match="wanted parts about group"):
            MemberStatus(group=group, node_id="a", incarnation=incarnation, quiesced=stands)


IN_PLACE = msgspec.structs.replace(GROUP, number=2, cause="scale", in_place=True)


def about_to_move() -> LocalWorkers:
    """Workers that are quiesced for a handoff, and were asked to move into the next group at second 1."""
    quiesced = replace(running(), can_move=True, sent_handoff=1)
    moving, effects = follow_group(quiesced, Place(IN_PLACE, ME, SPEC), 1.0, AT_ONCE)
    assert effects == (fx.MoveWorkers(1, IN_PLACE, 0, SPEC, is_planned=True),)
    assert follow_group(moving, Place(IN_PLACE, ME, SPEC), 2.0, AT_ONCE) == (moving, ()), "they are asked once"
    return moving


def test_workers_that_have_moved_are_those_of_the_next_group() -> None:
    moved = about_to_move().apply_event(ev.WorkersMoved(1, 7, 2.5), 3.0)
    assert (moved.group, moved.before, moved.started_at, moved.is_alive) == (2, (1, 7), 2.5, True)
    assert follow_group(moved, Place(IN_PLACE, ME, SPEC), 99.0, AT_ONCE) == (moved, ())


@pytest.mark.parametrize("why", ["they cannot", "one has ended", "another group is wanted", "they are late"])
def test_workers_that_do_not_move_are_ended(why: str) -> None:
    workers, wanted, now = about_to_move(), IN_PLACE, 2.0
    if why == "they cannot":
        workers = workers.apply_event(ev.WorkersCannotMove(1), 1.5)
    elif why == "one has ended":
        workers = workers.apply_event(exited(0, 101, ""), 1.5)
    elif why == "another group is wanted":
        wanted = msgspec.structs.replace(IN_PLACE, number=3)
    else:
        now = 30.0
    workers, effects = follow_group(workers, Place(wanted, ME, SPEC), now, replace(AT_ONCE, grace_s=5.0))
    assert effects == (fx.TerminateWorkers(1),)
    workers = workers.apply_event(ev.WorkersGone(1), now + 1)
    _, effects = follow_group(workers, Place(wanted, ME, SPEC), now + 1, AT_ONCE)
    assert effects == (fx.StartWorkers(wanted, 0, SPEC),)


@pytest.mark.parametrize("why", ["no handoff", "they have not said that they can", "all start anew"])
def test_workers_are_not_asked_to_move(why: str) -> None:
    workers = replace(running(), can_move=why != "they have not said that they can")
    workers = replace(workers, sent_handoff=0 if why == "no handoff" else 1)
    wanted = msgspec.structs.replace(IN_PLACE, in_place=why != "all start anew")
    _, effects = follow_group(workers, Place(wanted, ME, SPEC), 1.0, replace(AT_ONCE, grace_s=5.0))
    assert effects == (fx.TerminateWorkers(1),)


JOINED = msgspec.structs.replace(GROUP, in_place=True)


def waiting() -> LocalWorkers:
    """Workers of a node that is no member: they set up the script."""
    place = Place(None, ME, SPEC, joined=JOINED, may_wait=True)
    started, effects = follow_group(LocalWorkers(), place, 1.0, AT_ONCE)
    assert effects == (fx.SetUpWorkers(JOINED, 0, SPEC),)
    assert follow_group(started, place, 2.0, AT_ONCE) == (started, ()), "they are left alone"
    assert started.set_up_failure is None
    return started


@pytest.mark.parametrize("is_ready", [True, False])
def test_workers_that_have_set_up_are_let_in(*, is_ready: bool) -> None:
    workers = waiting()
    if is_ready:
        workers = workers.apply_event(ev.WorkersReady(1), 5.0)
    workers, effects = follow_group(workers, Place(IN_PLACE, ME, SPEC), 6.0, AT_ONCE)
    assert effects == (fx.MoveWorkers(1, IN_PLACE, 0, SPEC, is_planned=True),)
    assert follow_group(workers, Place(IN_PLACE, ME, SPEC), 15.0, AT_ONCE) == (workers, ()), "a set-up may take long"
    entered = workers.apply_event(ev.WorkersMoved(1, 0, 14.0), 15.0)
    assert (entered.group, entered.is_waiting, entered.is_alive) == (2, False, True)


def test_workers_that_wait_end_with_their_agent_or_before_others_start() -> None:
    for place in (Place(None, ME, SPEC), Place(msgspec.structs.replace(IN_PLACE, in_place=False), ME, SPEC)):
        _, effects = follow_group(waiting(), place, 3.0, replace(AT_ONCE, grace_s=5.0))
        assert effects == (fx.TerminateWorkers(1),)


def test_a_set_up_that_fails_is_tried_again_in_the_next_group_or_after_a_while() -> None:
    """The job may wait for this node: then no other group comes."""
    failed = waiting().apply_event(exited(1, 3, "No such file"), 4.0)
    assert failed.set_up_failure == SetUpFailed(exit_code=3, signal=None, error="")
    both = failed.apply_event(exited(0, 9, ""), 5.0)
    assert (both.set_up_failure, both.set_ups_failed) == (failed.set_up_failure, 1), "the first one is the cause"
    place = Place(None, ME, SPEC, joined=JOINED, may_wait=True)
    ended, effects = follow_group(failed, place, 4.0, replace(AT_ONCE, grace_s=5.0))
    assert effects == (fx.TerminateWorkers(1),)
    gone = ended.apply_event(ev.WorkersGone(1), 5.0)
    assert gone.set_up_failure is not None
    assert follow_group(gone, place, 13.9, AT_ONCE) == (gone, ())
    again, effects = follow_group(gone, place, 14.0, AT_ONCE)
    assert [type(effect) for effect in effects] == [fx.SetUpWorkers]
    failed = again.apply_event(exited(1, 3, "No such file"), 20.0)
    assert failed.set_up_again_at == 40.0
    assert replace(again, is_waiting=True).apply_event(ev.WorkersReady(1), 21.0).set_ups_failed == 0
    next_place = replace(place, joined=msgspec.structs.replace(JOINED, number=2))
    again, effects = follow_group(gone, next_place, 7.0, AT_ONCE)
    assert [type(effect) for effect in effects] == [fx.SetUpWorkers]
    assert again.set_up_failure is None


def test_ranks_that_have_lost_another_go_on_in_the_next_group() -> None:
    """No handoff was asked for."""
    wanted = msgspec.structs.replace(IN_PLACE, cause="lost")
    workers, effects = follow_group(replace(running(), can_move=True), Place(wanted, ME, SPEC), 1.0, AT_ONCE)
    assert effects == (fx.MoveWorkers(1, wanted, 0, SPEC, is_planned=False),)
    _, effects = follow_group(workers, Place(wanted, ME, SPEC), 12.0, AT_ONCE)
    assert effects == (fx.KillWorkers(1),), "they do not answer in time"
    restart = msgspec.structs.replace(IN_PLACE, cause="restart")
    _, effects = follow_group(replace(running(), can_move=True, sent_handoff=1), Place(restart, ME, SPEC), 1.0, AT_ONCE)
    assert effects == (fx.KillWorkers(1),), "new processes were asked for"


def test_a_set_up_that_this_agent_has_ended_begins_again_once_it_may() -> None:
    ready = waiting().apply_event(ev.WorkersReady(1), 4.0)
    assert ready.has_set_up
    ended, effects = follow_group(ready, Place(None, ME, SPEC), 5.0, replace(AT_ONCE, grace_s=5.0))
    assert effects == (fx.TerminateWorkers(1),)
    assert not ended.has_set_up
    gone = ended.apply_event(ev.WorkersGone(1), 6.0)
    assert not gone.has_set_up
    again, effects = follow_group(gone, Place(None, ME, SPEC, joined=JOINED, may_wait=True), 7.0, AT_ONCE)
    assert [type(effect) for effect in effects] == [fx.SetUpWorkers]
    assert not again.has_set_up
