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
from agent.core.incident import Incident, Phases
from agent.core.member_status import MemberStatus, WrittenStatus
from agent.core.model import (
    Checkpoint,
    ExitReport,
    Group,
    HandoffRequest,
    Leader,
    RestorePoint,
    Result,
    Spec,
    StateId,
)
from agent.store.api import Delete, KeyRange, Put
from agent.store.job_writer import JobWriter
from agent.store.keys import JobKeys
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
    last = SimpleNamespace(value=INCIDENT, mod_revision=at["incident"])
    lead = {"group", "leader"}
    group = fx.WriteGroup(GROUP, None, None, last, spec_revision=at["spec"], **led)  # type: ignore[arg-type]
    resume = RestorePoint(group=2, copy=None, lineage=(), checkpoint=None)
    result = Result(run="r", group=1, succeeded=True, exit_code=0, reason=FINISHED)
    return {
        "group": (group, lead | {"spec", "incident"}),
        "first group": (replace(group, last=None), lead | {"spec"}),
        "incident": (fx.WriteIncident(INCIDENT, **led), lead),
        "resume": (fx.WriteRestorePoint(resume, **led), lead),
        "handoff": (fx.WriteHandoff(HandoffRequest(group=1, after=0, reason=LOST), **led), lead),
        "result": (fx.WriteResult(result, **led), lead | {"result"}),
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


def store_of_job(store: MemoryStore) -> JobWriter:
    """One whose agent has its place."""
    job = JobWriter(
        store,
        KEYS,
        SimpleNamespace(has_run_out=lambda: False, hold=lambda _: None),  # type: ignore[arg-type]
        lease_ttl_s=4.0,
        catch_up=lambda: None,
        refresh_view=lambda: None,
        is_process_alive=lambda _: None,
    )
    assert job.run(fx.Register(NODE)).outcome is Outcome.DONE
    return job


@pytest.mark.parametrize("what", list(effects(dict.fromkeys(SEEN, 0))))
@pytest.mark.parametrize("changed", [*SEEN, "nothing"])
def test_a_write_rests_on_what_was_seen(what: str, changed: str) -> None:
    store = MemoryStore()
    job = store_of_job(store)
    absent = {"result": "result", "spec": "spec", "campaign": "leader", "first status": "status"}.get(
        what
    )  # it is to be the first
    at = {name: 0 if name == absent else write(store, name) for name in SEEN}
    effect, rests_on = effects(at)[what]
    if changed != "nothing":
        write(store, changed)
    assert job.run(effect).outcome is (Outcome.REFUSED if changed in rests_on else Outcome.DONE)


def test_with_a_group_goes_what_was_told_of_the_one_before_the_last() -> None:
    """The last one's is needed still, and without end nothing may be kept."""
    store = MemoryStore()
    job = store_of_job(store)
    at = {name: write(store, name) for name in SEEN}
    store.transact([], [Put(KEYS.statuses(number) + "a", b"{}") for number in range(2, 8)])
    effect, _ = effects(at)["group"]
    assert isinstance(effect, fx.WriteGroup)
    assert job.run(replace(effect, group=msgspec.structs.replace(GROUP, number=5))).outcome is Outcome.DONE
    left = [item.key for item in store.read((KeyRange(KEYS.statuses(), is_prefix=True),)).items]
    assert left == [KEYS.statuses(number) + "a" for number in range(1, 8) if number != 3]


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
    assert job.run(effect).status == WrittenStatus(1, STATUS, done.revision)
    damaged = write(store, "status")
    assert job.run(effect).status == WrittenStatus(1, None, damaged)
    assert job.run(replace(effect, status_revision=damaged)).outcome is Outcome.DONE, "it is replaced"
