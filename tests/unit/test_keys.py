"""The codec: what is written comes back; what is foreign is named."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Iterator

import msgspec
import pytest
from msgspec import inspect
from msgspec.structs import replace
from reasons import FINISHED, LOST, NEW_NP
from statuses import statuses

from agent.core.incident import GroupChange, Incident, Phases
from agent.core.member_status import MemberStatus
from agent.core.model import Group, HandoffRequest, Leader, Member, Node, Quiesced, Result, Spec, Timing
from agent.core.records import Record
from agent.core.saved_states import Checkpoint, RestorePoint, StateId
from agent.core.view import Backlog
from agent.errors import RecordError
from agent.roles import store as roles
from agent.store import keys
from agent.store.api import KeyValue, Snapshot
from agent.store.keys import JobKeys, Views, decode, encode, jobs_in, view_of

KEYS = JobKeys("job")
TIMING = Timing(detect_within_s=5.0, lease_ttl_s=4.0, link_heartbeat_s=0.5, settle_s=1.0)
NODE = Node(
    node_id="a",
    incarnation="i",
    address="::1",
    nproc=2,
    port=9,
    link=10,
    host="h",
    pid=1,
    pid_started=2,
    timing=TIMING,
)
COPY = StateId(run="r", group=2, step=5)
CHECKPOINT = Checkpoint(
    number=5,
    run="r",
    copy=COPY,
    name="r-2-5",
    private=".r-2-5~x",
    manifest_sha256="0",
    kept=(".r-1-3~x",),
    superseded=(),
    handoff=4,
    is_late=True,
    node="a",
)
RECORDS: list[Record] = [
    Spec(run="r", np_min=1, np_max=3, secret="s", changed_by="me", changed_at=1.5),
    NODE,
    Leader(node_id="a", incarnation="i"),
    Group(
        run="r",
        number=3,
        members=(Member(node_id="a", incarnation="i", address="x", nproc=1, port=2, link=3),),
        cause="join",
        reason=LOST,
        restarts=1,
        step=7,
        reached=2,
    ),
    Result(run="r", group=3, succeeded=False, exit_code=7, reason=FINISHED),
    RestorePoint(group=3, copy=COPY, lineage=(COPY,), checkpoint=CHECKPOINT),
    CHECKPOINT,
    HandoffRequest(group=3, after=4, reason=NEW_NP, in_memory=True),
    *statuses(Quiesced(group=3, node_id="a", incarnation="i", number=5, step=8, is_late=True)),
]


def item(key: str, value: bytes) -> KeyValue:
    return KeyValue(key=key, value=value, create_revision=4, mod_revision=5, lease_id=0)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_was_written(record: Record) -> None:
    stored = decode(item("k", encode(record)), type(record))
    assert (stored.value, stored.create_revision, stored.mod_revision) == (record, 4, 5)


@pytest.mark.parametrize(
    "value",
    [
        b'{"v":2,"node_id":"a","incarnation":"i"}',
        b'{"v":1,"node_id":"a"}',
        b'{"v":1,"node_id":"a","incarnation":"i","more":1}',
        b'{"v":1,"node_id":1,"incarnation":"i"}',
        b"not json",
        b"\xff",
        b'{"v":1,"node_id":"\xff"}',
        b"",
    ],
)
def test_a_foreign_record_is_an_error_that_names_the_key(value: bytes) -> None:
    with pytest.raises(RecordError, match="/elastic-agent/job/shared/leader"):
        decode(item("/elastic-agent/job/shared/leader", value), Leader)


@pytest.mark.parametrize(
    "number", ["-1", str(2**62 + 1), str(2**70), "9" * 400, "1e400", "2.5", '"3"', '"\u0663"', "\u0663", "+3", "true"]
)
def test_a_number_that_cannot_be_is_refused_by_its_key(number: str) -> None:
    raw = encode(RECORDS[3]).replace(b'"number":3', f'"number":{number}'.encode())
    with pytest.raises(RecordError, match="/elastic-agent/job/shared/group"):
        decode(item(KEYS.group, raw), Group)


def of_many() -> Group:
    members = tuple(replace(NODE.member, node_id=f"node-{number}", port=1000 + number) for number in range(1000))
    return replace(RECORDS[3], members=members)


def test_a_large_record_is_compressed_and_a_damaged_one_is_named() -> None:
    """Every agent reads the group's; etcd takes requests of 1.5 MB."""
    raw = encode(of_many())
    assert len(raw) < len(msgspec.json.encode(of_many())) / 5
    assert decode(item(KEYS.group, raw), Group).value == of_many()
    for damaged in (raw[:-1], raw[:500], raw[:500] + b"!" + raw[501:], b"x", b"x\x01"):
        with pytest.raises(RecordError, match="/elastic-agent/job/shared/group"):
            decode(item(KEYS.group, damaged), Group)


def test_a_record_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(RecordError, match="larger than 67108864 bytes"):
        decode(item(KEYS.group, zlib.compress(b" " * (100 << 20))), Group)


@pytest.mark.parametrize("run", ["", "../../x", "a/b", ".hidden", "a\\n"])
def test_a_run_that_cannot_be_part_of_a_path_is_refused(run: str) -> None:
    raw = encode(RECORDS[3]).replace(b'"run":"r"', f'"run":"{run}"'.encode())
    with pytest.raises(RecordError, match="/elastic-agent/job/shared/group"):
        decode(item(KEYS.group, raw), Group)


@pytest.mark.parametrize(
    "reason",
    [
        b'"lost x"',
        b"null",
        b"{}",
        b'{"kind":"another","node_ids":["x"]}',
        b'{"kind":"finished","ranks":1,"group":1}',
        b'{"kind":"nodes lost"}',
        b'{"kind":"nodes lost","node_ids":["../x"]}',
        b'{"kind":"nodes lost","node_ids":["x"],"more":1}',
        b'{"kind":"nodes there","nodes":-1,"np":"2"}',
        b'{"kind":"nodes there","nodes":1,"np":"two"}',
        b'{"kind":"workers failed","first":{"node_id":"a","rank":0,"hang":"it hangs"}}',
    ],
)
def test_a_reason_that_is_none_is_refused_by_its_key(reason: bytes) -> None:
    """Also one that only another kind of record may have."""
    raw = encode(RECORDS[3]).replace(b'{"kind":"nodes lost","node_ids":["x"]}', reason)
    assert raw != encode(RECORDS[3])
    with pytest.raises(RecordError, match="/elastic-agent/job/shared/group"):
        decode(item(KEYS.group, raw), Group)


def unbounded(kind: inspect.Type, where: str) -> Iterator[str]:
    """Name the numbers in a type that have no bounds."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            if kind.ge is None or kind.le is None:
                yield where
        case inspect.StructType() | inspect.DataclassType():
            for each in kind.fields:
                yield from unbounded(each.type, f"{where}.{each.name}")
        case inspect.UnionType():
            for each_type in kind.types:
                yield from unbounded(each_type, where)
        case inspect.TupleType():
            for each_type in kind.item_types:
                yield from unbounded(each_type, where)
        case inspect.VarTupleType():
            yield from unbounded(kind.item_type, where)
        case _:
            assert isinstance(kind, inspect.StrType | inspect.BoolType | inspect.NoneType | inspect.LiteralType), kind


@pytest.mark.parametrize("kind", [*keys._DECODERS, *roles._DECODERS], ids=lambda kind: kind.__name__)
def test_all_numbers_in_records_have_bounds(kind: type[Record]) -> None:
    assert not [*unbounded(inspect.type_info(kind), kind.__name__)]


FIRST_MEETING = """
import os, sys, threading
from agent.core import incident, member_status, model
from agent.errors import RecordError
from agent.store.api import KeyValue
from agent.store.keys import decode

sys.setswitchinterval(1e-6)
all_there = threading.Barrier(8)

def meet() -> None:
    all_there.wait()
    for kind in (model.Node, model.Group, model.Spec, member_status.MemberStatus, incident.Incident):
        last_field = kind.__struct_fields__[-1]
        try:
            decode(KeyValue("k", b'{"%s":null}' % last_field.encode(), 1, 1, 0), kind)
        except RecordError:
            pass

for _ in range(20):
    if (pid := os.fork()) == 0:  # where nobody has met any
        threads = [threading.Thread(target=meet) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def test_threads_may_meet_a_kind_of_record_for_the_first_time_at_once() -> None:
    """msgspec, asked by several threads what a type looks like, crashes the process about every second time."""
    subprocess.run([sys.executable, "-c", FIRST_MEETING], check=True, timeout=60)


def test_a_view_has_nodes_by_age_and_only_reports_on_the_current_group() -> None:
    group = RECORDS[3]
    young = encode(replace(NODE, node_id="a", nproc=1))
    old = KeyValue(KEYS.node("z"), young.replace(b'"a"', b'"z"'), 1, 1, 0)
    status = b'{"v":1,"group":%d,"node_id":"a","incarnation":"i"}'
    items = (
        item(KEYS.group, encode(group)),
        item(KEYS.node("a"), young),
        old,
        item(KEYS.statuses(2) + "a", status % 2),
        item(KEYS.statuses(3) + "a", status % 3),
    )
    view = view_of(Snapshot.of(9, items), KEYS, is_whole=True)
    assert [node.value.node_id for node in view.nodes] == ["z", "a"]
    assert [each.group for each in view.statuses] == [3]


def incident_item(number: int) -> KeyValue:
    incident = Incident(run="r", group=number, cause="lost", reason=LOST, members=(), phases=Phases())
    return item(KEYS.incident(number), encode(incident))


def backlog_items(group: Group) -> list[KeyValue]:
    change = GroupChange(run="r", group=2, cause="lost", reason=LOST, at=1.0, members=())
    status = b'{"v":1,"group":%d,"node_id":"a","incarnation":"i"}'
    told = [item(KEYS.statuses(number) + "a", status % number) for number in (1, 2, 3)]
    incidents = [incident_item(number) for number in (1, 3, 7)]
    items = [item(KEYS.group, encode(group)), *told, *incidents]
    return [*items, *(item(KEYS.change(each), encode(replace(change, group=each))) for each in (2, 3))]


def snapshot(items: list[KeyValue]) -> Snapshot:
    return Snapshot.of(9, tuple(sorted(items, key=lambda each: each.key)))


def test_a_view_has_what_incidents_that_are_not_written_yet_are_made_from() -> None:
    view = view_of(snapshot(backlog_items(RECORDS[3])), KEYS, is_whole=True)
    assert [each.group for each in view.backlog.changes] == [2, 3]
    assert [each.group for each in view.backlog.statuses] == [1, 2]
    assert [each.value.group for each in view.backlog.incidents] == [1, 3]
    assert view.incident == view.backlog.incidents[1]
    nothing_yet = view_of(snapshot(backlog_items(RECORDS[3])[1:]), KEYS, is_whole=True)
    assert (nothing_yet.backlog, nothing_yet.incident) == (Backlog(), None)


def test_an_incident_that_nobody_can_read_keeps_no_leader_from_deciding() -> None:
    """No decision rests on it."""
    views = Views(KEYS, is_whole=True)
    damaged = item(KEYS.incident(3), b"{}")
    items = [each for each in backlog_items(RECORDS[3]) if each.key != damaged.key]
    view = views.of(snapshot([*items, damaged]))
    assert (view.group is not None, view.incident) == (True, None)
    assert list(views.unread) == [damaged.key]


def test_a_status_with_a_part_about_another_member_or_group_is_an_error_that_names_the_key() -> None:
    quiesced = b'{"v":1,"group":%d,"node_id":"%b","incarnation":"i","number":5,"step":8}'
    status = b'{"v":1,"group":3,"node_id":"a","incarnation":"i","quiesced":%b}'
    assert decode(item(KEYS.statuses(3) + "a", status % (quiesced % (3, b"a"))), MemberStatus).value.quiesced
    for part in (quiesced % (2, b"a"), quiesced % (3, b"b")):
        with pytest.raises(RecordError, match=r"status/3/a.*wanted parts about group 3"):
            decode(item(KEYS.statuses(3) + "a", status % part), MemberStatus)


def test_what_a_snapshot_has_again_is_not_decoded_again() -> None:
    """What was written again or came back is, and a record that was deleted is forgotten."""
    views = Views(KEYS, is_whole=True)
    first, second = item(KEYS.node("a"), encode(NODE)), item(KEYS.node("b"), encode(replace(NODE, node_id="b")))
    once = views.of(Snapshot.of(5, (first, second))).nodes
    again = views.of(Snapshot.of(6, (first, item(KEYS.node("b"), encode(replace(NODE, node_id="b", nproc=3)))))).nodes
    assert again[0] is once[0]
    assert [node.value.nproc for node in again] == [2, 3]
    assert views.of(Snapshot.of(7, (second,))).nodes == once[1:]
    back = views.of(Snapshot.of(8, (first, second))).nodes
    assert back == once
    assert back[0] is not once[0]


def test_an_unreadable_record_of_one_node_does_not_hide_the_other_records() -> None:
    """It is of another version. Who asks for the job, rather than follows it, is told."""
    views = Views(KEYS, is_whole=True)
    foreign = item(KEYS.node("b"), b'{"v":2}')
    snapshot = Snapshot.of(5, (item(KEYS.node("a"), encode(NODE)), foreign))
    assert [node.value for node in views.of(snapshot).nodes] == [NODE]
    assert [*views.unread] == [foreign.key]
    with pytest.raises(RecordError, match=foreign.key):
        view_of(snapshot, KEYS, is_whole=True)
    assert views.of(Snapshot.of(6, snapshot.items[:1])).nodes
    assert not views.unread


def test_jobs_whose_names_begin_alike_are_distinguished() -> None:
    items = tuple(item(JobKeys(name).spec, b"{}") for name in ("job", "job2", "job.1"))
    assert list(jobs_in(Snapshot.of(1, items))) == ["job", "job.1", "job2"]


def test_the_handoff_request_of_an_older_group_is_not_shown() -> None:
    for number, is_shown in ((2, False), (3, True)):
        request = HandoffRequest(group=number, after=1, reason=LOST)
        items = (item(KEYS.group, encode(RECORDS[3])), item(KEYS.handoff, encode(request)))
        view = view_of(Snapshot.of(9, items), KEYS, is_whole=True)
        assert (view.handoff is not None) is is_shown
    assert view_of(Snapshot.of(9, items[1:]), KEYS, is_whole=True).handoff is None
