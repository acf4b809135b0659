"""How local workers follow a group: which failure is the cause, and how long a consequence waits for it."""

from __future__ import annotations

from agent.core import events as ev
from agent.core.local import LocalWorkers, Patience, follow_group
from agent.core.model import Group, Identity, Member, Spec

ME = Identity("a", "i")
GROUP = Group(
    run="r",
    number=1,
    members=(Member(node_id="a", incarnation="i", address="x", nproc=2, port=1, link=2),),
    cause="start",
    reason="",
    restarts=0,
    step=0,
    reached=1,
)
AT_ONCE = Patience(grace_s=0.0, kill_timeout_s=10.0)
SPEC = Spec(run="r", np_min=1, np_max=1, secret="s", changed_by="test", changed_at=0.0)


def running() -> LocalWorkers:
    return follow_group(LocalWorkers(), GROUP, ME, SPEC, 0.0, AT_ONCE)[0]


def exited(local_rank: int, code: int, tail: str) -> ev.WorkerExited:
    return ev.WorkerExited(1, local_rank, code, None, tail, 0, 0.0)


def test_a_consequence_waits_a_moment_for_its_cause() -> None:
    workers = running().absorb(exited(1, 1, "Connection closed by peer"), 0.0)
    workers, effects = follow_group(workers, GROUP, ME, SPEC, 10.0, AT_ONCE)
    assert effects == ()
    assert workers.awaits_cause(10.1)
    workers = workers.absorb(exited(0, 93, "do not restart"), 0.0)
    assert not workers.awaits_cause(10.2), "the cause has shown itself"
    assert follow_group(workers, GROUP, ME, SPEC, 10.2, AT_ONCE)[1] == (ev.KillWorkers(1),)


def test_a_cause_that_does_not_show_is_not_waited_for_long() -> None:
    workers = running().absorb(exited(1, 1, "Connection reset by peer"), 0.0)
    workers, _ = follow_group(workers, GROUP, ME, SPEC, 10.0, AT_ONCE)
    assert follow_group(workers, GROUP, ME, SPEC, 11.5, AT_ONCE)[1] == (ev.KillWorkers(1),)


def test_a_cause_of_its_own_kills_the_others_at_once() -> None:
    workers = running().absorb(exited(0, 1, "ValueError"), 0.0)
    assert follow_group(workers, GROUP, ME, SPEC, 10.0, AT_ONCE)[1] == (ev.KillWorkers(1),)
