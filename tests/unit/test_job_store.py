"""What a job's store compares: a write is refused once anything that its decision rested on has changed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from nodes import NODE
from reasons import FINISHED, LOST

from agent.core import effects as fx
from agent.core.events import Outcome
from agent.core.failures import ExitReport
from agent.core.incident import Incident, IncidentWrite, Phases
from agent.core.member_status import MemberStatus, WrittenStatus
from agent.core.model import Group, HandoffRequest, Leader, Result, Spec
from agent.core.saved_states import Checkpoint, RestorePoint, StateId
from agent.store.api import Delete, KeyRange, Put
from agent.store.job_writer import JobWriter
from agent.store.keys import JobKeys, encode
from agent.store.memory import MemoryStore

KEYS = JobKeys("job")
COPY = StateId(run="r", group=1, step=3)
GROUP = Group(run="r", number=2, members=(), cause="wait", reason=LOST, restarts=0, step=0, reached=0)
INCIDENT = Incident(run="r", group=1, cause="start", reason=LOST, members=(), phases=Phases())
CHECKPOINT = Checkpoint(copy=COPY, name="n", private="", manifest_sha256="", kept=(), superseded=())
BY = {"group": 1, "node_id": "a", "incarnation": "i1"}
STATUS = MemberStatus(exit=ExitReport(step=3, failure=None, **BY), **BY)  # type: ignore[arg-type]
SPEC = Spec(run="r", np_min=1, np_max=1, secret="s", changed_by="test", changed_at=0.0)
SEEN = {
    "group": KEYS.group,
    "leader": KEYS.leader,
    "spec": KEYS.spec,
    "checkpoint": KEYS.checkpoint,
    "result": KEYS.result,
    "incident": KEYS.incident(1),
    "node": KEYS.node(NODE.node_id),
    "status": KEYS.status(STATUS),
}
"""Records that were there when the decisions were made."""


def write(store: MemoryStore, name: str) -> int:
    """Write a record in the place of the one that is there, and return its revision."""
    store.transact([], [Delete(SEEN[name])])
    return store.transact([], [Put(SEEN[name], b"{}")]).revision


def effects(at: dict[str, int]) -> dict[str, tuple[fx.StoreEffect, set[str]]]:
    """Each write, as decided from these revisions, with the records that it rests on."""
    led = {"group_revision": at["group"], "leader_revision": at["leader"]}
    told = {"group_revision": at["group"]}
    lead = {"group", "leader", "result"}
    group = fx.WriteGroup(GROUP, None, None, spec_revision=at["spec"], **led)
    restore_point = RestorePoint(group=2, copy=None, lineage=(), checkpoint=None)
    result = Result(run="r", group=1, succeeded=True, exit_code=0, reason=FINISHED)
    return {
        "group": (group, lead | {"spec"}),
        "resume": (fx.WriteRestorePoint(restore_point, **led), lead),
        "handoff": (fx.WriteHandoff(HandoffRequest(group=1, after=0, reason=LOST), **led), lead),
        "result": (fx.WriteResult(result, **led), lead),
        "checkpoint": (
            fx.WriteCheckpoint(CHECKPOINT, checkpoint_revision=at["checkpoint"], **told),
            {"group", "checkpoint"},
        ),
        "status": (fx.WriteStatus(STATUS, status_revision=at["status"], **told), {"group", "status"}),
        "first status": (fx.WriteStatus(STATUS, status_revision=0, **told), {"group", "status"}),
        "start over": (fx.StartOver(SPEC, GROUP, at["result"]), {"result"}),
        "spec": (fx.CreateSpec(SPEC), {"spec"}),
        "campaign": (fx.Campaign(Leader(node_id="a", incarnation="i1")), {"leader"}),
        "node": (fx.UpdateNode(NODE, at["node"]), {"node"}),
    }


def new_store_of_job(store: MemoryStore) -> JobWriter:
    """One whose agent has just begun."""
    return JobWriter(
        store,
        KEYS,
        SimpleNamespace(has_run_out=lambda: False, hold=lambda *_: None, drop=lambda: None),  # type: ignore[arg-type]
        lease_ttl_s=4.0,
        followed=SimpleNamespace(catch_up=lambda: None, refresh=lambda: None, show=lambda *_: None),
        is_process_alive=lambda _: None,
    )


def store_of_job(store: MemoryStore) -> JobWriter:
    """One whose agent has its place."""
    job = new_store_of_job(store)
    assert job.run(fx.Register(NODE)).outcome is Outcome.DONE
    return job


@pytest.mark.parametrize("what", list(effects(dict.fromkeys(SEEN, 0))))
@pytest.mark.parametrize("changed", [*SEEN, "nothing"])
def test_a_write_rests_on_what_was_seen(what: str, changed: str) -> None:
    store = MemoryStore()
    job = store_of_job(store)
    of_leader = dict.fromkeys(("group", "resume", "handoff", "result"), "result")  # the job is to have none yet
    absent = {**of_leader, "spec": "spec", "campaign": "leader", "first status": "status"}.get(what)
    at = {name: 0 if name == absent else write(store, name) for name in SEEN}
    effect, rests_on = effects(at)[what]
    if changed != "nothing":
        write(store, changed)
    assert job.run(effect).outcome is (Outcome.REFUSED if changed in rests_on else Outcome.DONE)


@pytest.mark.parametrize("changed", ["leader", "incident", "group", "nothing"])
def test_an_incident_is_written_by_the_leader_and_once(changed: str) -> None:
    """Also once another group has followed."""
    store = MemoryStore()
    job = store_of_job(store)
    at = {name: write(store, name) for name in SEEN}
    if changed != "nothing":
        write(store, changed)
    outcome, _ = job.write_incidents(IncidentWrite(((INCIDENT, at["incident"]),), at["leader"]))
    assert outcome is (Outcome.REFUSED if changed in {"leader", "incident"} else Outcome.DONE)


def test_incidents_are_written_together_or_not_at_all() -> None:
    store = MemoryStore()
    job = store_of_job(store)
    at = {name: write(store, name) for name in SEEN}
    next_one = msgspec.structs.replace(INCIDENT, group=2)
    write_both = IncidentWrite(((INCIDENT, at["incident"]), (next_one, 7)), at["leader"])
    assert job.write_incidents(write_both)[0] is Outcome.REFUSED
    assert [item.mod_revision for item in store.read((KeyRange(KEYS.incident(1)),)).items] == [at["incident"]]


def test_incidents_are_not_written_once_the_lease_has_run_out() -> None:
    store = MemoryStore()
    job = store_of_job(store)
    at = {name: write(store, name) for name in SEEN}
    told = IncidentWrite(((INCIDENT, at["incident"]),), at["leader"])
    job._keeper = SimpleNamespace(has_run_out=lambda: True)  # type: ignore[assignment]
    assert job.write_incidents(told) == (Outcome.UNKNOWN, 0)


def kept(store: MemoryStore) -> list[str]:
    ranges = [KeyRange(prefix, is_prefix=True) for prefix in (KEYS.statuses(), KEYS.changes, KEYS.incidents)]
    return [item.key.removeprefix(KEYS.prefix) for item in store.read(ranges).items]


def test_with_its_incident_goes_what_that_was_made_from() -> None:
    """And with the completed one nothing more."""
    store = MemoryStore()
    job = store_of_job(store)
    leader = write(store, "leader")
    old = [Put(KEYS.statuses(number) + "a", b"{}") for number in range(2, 5)]
    store.transact([], [*old, *(Put(KEYS.change(number), b"{}") for number in range(2, 5))])
    incident = msgspec.structs.replace(INCIDENT, group=3)
    outcome, revision = job.write_incidents(IncidentWrite(((incident, 0),), leader))
    left = ["changes/2", "changes/4", "incidents/3", "status/3/a", "status/4/a"]
    assert (outcome, kept(store)) == (Outcome.DONE, left)
    assert job.write_incidents(IncidentWrite(((incident, revision),), leader))[0] is Outcome.DONE
    assert kept(store) == left


def test_nothing_is_kept_without_end() -> None:
    """Even if no incident is ever written."""
    store = MemoryStore()
    job = store_of_job(store)
    at = {name: write(store, name) for name in SEEN}
    store.transact([], [Delete(KEYS.status(STATUS)), Delete(KEYS.incident(1)), Delete(KEYS.result)])
    for number in (3, 4):
        keys = (KEYS.statuses(number) + "a", KEYS.change(number), KEYS.incident(number))
        store.transact([], [Put(key, b"{}") for key in keys])
    effect, _ = effects(at)["group"]
    assert isinstance(effect, fx.WriteGroup)
    assert job.run(replace(effect, group=msgspec.structs.replace(GROUP, number=203))).outcome is Outcome.DONE
    assert kept(store) == ["changes/4", "incidents/4", "status/4/a"]


def test_a_job_that_is_started_over_keeps_only_incidents() -> None:
    store = MemoryStore()
    job = store_of_job(store)
    at = {name: write(store, name) for name in SEEN}
    store.transact([], [Put(KEYS.change(1), b"{}")])
    assert job.run(effects(at)["start over"][0]).outcome is Outcome.DONE
    assert kept(store) == ["incidents/1"]


@pytest.mark.parametrize("key", [KEYS.result, KEYS.restore_point, KEYS.checkpoint, KEYS.handoff])
def test_a_job_that_is_started_over_has_nothing_of_the_run_before(key: str) -> None:
    store = MemoryStore()
    job = store_of_job(store)
    there = store.transact([], [Put(key, b"{}")]).revision
    effect = fx.StartOver(SPEC, GROUP, there if key == KEYS.result else 0)
    assert job.run(effect).outcome is Outcome.DONE
    assert store.read((KeyRange(key),)).items == ()


def test_a_refused_status_comes_back_with_the_record_that_is_there() -> None:
    """None, another than was known, or one that cannot be read."""
    store = MemoryStore()
    job = store_of_job(store)
    group_revision = write(store, "group")
    effect = fx.WriteStatus(STATUS, group_revision, status_revision=99)
    refused = job.run(effect)
    assert (refused.outcome, refused.status) == (Outcome.REFUSED, WrittenStatus(1, None, 0))
    done = job.run(replace(effect, status_revision=0))
    assert (done.outcome, done.status) == (Outcome.DONE, None)
    other = msgspec.structs.replace(STATUS, has_failed_to_save=True)
    refused = job.run(replace(effect, status=other))
    assert (refused.outcome, refused.status) == (Outcome.REFUSED, WrittenStatus(1, STATUS, done.revision))
    damaged = write(store, "status")
    assert job.run(effect).status == WrittenStatus(1, None, damaged)
    assert job.run(replace(effect, status_revision=damaged)).outcome is Outcome.DONE, "it is replaced"


def test_a_status_that_is_there_already_counts_as_written() -> None:
    """As after an outage: an agent does not know if what it wrote before has been lost."""
    store = MemoryStore()
    job = store_of_job(store)
    effect = fx.WriteStatus(STATUS, write(store, "group"), status_revision=0)
    revision = job.run(effect).revision
    store.transact([], [Put("other", b"")])
    again = job.run(effect)
    assert (again.outcome, again.status) == (Outcome.DONE, WrittenStatus(1, STATUS, revision))


@pytest.mark.parametrize("is_own", [True, False])
def test_an_agent_takes_up_the_record_of_its_own_earlier_try(*, is_own: bool) -> None:
    """That try was not answered. Another agent's record stays its own, and the answer has who holds the node id."""
    store = MemoryStore()
    lease_id = store.grant(4.0).lease_id
    there = NODE if is_own else msgspec.structs.replace(NODE, incarnation="i2")
    store.transact([], [Put(KEYS.node(NODE.node_id), encode(there), lease_id)])
    answer = new_store_of_job(store).run(fx.Register(NODE))
    if is_own:
        assert (answer.outcome, answer.holder) == (Outcome.DONE, None)
    else:
        assert (answer.outcome, answer.holder) == (Outcome.REFUSED, fx.NodeIdHolder(there, lease_id, None))
    (kept_record,) = store.read((KeyRange(KEYS.node(NODE.node_id)),)).items
    assert kept_record.lease_id == lease_id
