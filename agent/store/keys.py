"""The layout of a job's keys, and the codec of their records.

All keys of a job lie under `/elastic-agent/{job_id}/`. The prefix ends with a slash, so that job `a` never sees
the keys of job `ab`. Values are JSON with a version field `v`, decoded strictly: an unknown version, an unknown
field or a wrong type is a `RecordError` that names the key. Large ones are compressed (zlib): every agent reads the
group's record, and etcd takes requests of 1.5 MB. A large group's members are in a list: see `listed_members.py`.

All agents follow what is under `shared/`. It is one range, so its changes arrive in the order in which they were made.

| key | lease | record |
|---|---|---|
| `shared/spec` | no | `Spec` |
| `shared/leader` | yes | `Leader` |
| `shared/group` | no | `Group` |
| `shared/members` | no | `MemberList` |
| `shared/restore_point` | no | `RestorePoint` |
| `shared/handoff` | no | `HandoffRequest` |
| `shared/checkpoint` | no | `Checkpoint` |
| `shared/suspects/{node_id}/{by_node_id}` | of the neighbour | `Suspicion` |
| `shared/result` | no | `Result` |
| `nodes/{node_id}` | yes | `Node` |
| `status/{number}/{node_id}` | no | `MemberStatus` |
| `changes/{number}` | no | `GroupChange` |
| `incidents/{number}` | no | `Incident` |
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Generic, TypeVar, cast

import msgspec

from agent.core.incident import GroupChange, Incident
from agent.core.member_status import MemberStatus
from agent.core.model import Group, HandoffRequest, Leader, Node, Result, Spec, Suspicion
from agent.core.proposals import of_members
from agent.core.records import Record, Stored
from agent.core.saved_states import Checkpoint, RestorePoint
from agent.core.view import Backlog, ClusterView
from agent.errors import ConfigError, RecordError
from agent.store.api import KeyRange, KeyValue, Snapshot
from agent.store.listed_members import ListedGroup, MemberList, unpack

ROOT = "/elastic-agent/"
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LARGE_BYTES = 16 << 10
"""Records from this size on are compressed; smaller ones can be read with etcdctl."""
_COMPRESSED = b"\x78"
"""With this byte zlib's format begins, and no JSON."""
_MOST_BYTES = 64 << 20
_LISTED = b'"listed_by":'
_HEAD_BYTES = 32
"""Within so many bytes a record of a large group says that it is one."""

R = TypeVar("R", bound=Record)

_KINDS = (
    *(Spec, Node, Leader, Group, MemberStatus),
    *(GroupChange, Incident, RestorePoint, HandoffRequest, Checkpoint, Suspicion, Result, ListedGroup, MemberList),
)
_DECODERS: dict[type[Record], msgspec.json.Decoder[Record]] = {kind: msgspec.json.Decoder(kind) for kind in _KINDS}
"""Made here, and so on one thread: msgspec crashes where two threads meet a kind of record for the first time."""


def check_id(what: str, value: str) -> str:
    """Return a valid job or node id as it is; raise `ConfigError` otherwise."""
    if not _ID.fullmatch(value) or value in {".", ".."}:
        raise ConfigError(f"{what} must be 1 to 128 letters, digits, '.', '_' or '-', not {value!r}")
    return value


@dataclass(frozen=True)
class JobKeys:
    """Where a job's records lie."""

    job_id: str

    @property
    def prefix(self) -> str:
        """Of all keys of the job; ends with a slash."""
        return f"{ROOT}{self.job_id}/"

    @property
    def shared(self) -> str:
        """Prefix of what all agents of the job follow."""
        return self.prefix + "shared/"

    @property
    def spec(self) -> str:
        """What the job is asked to be."""
        return self.shared + "spec"

    @property
    def leader(self) -> str:
        """Who writes the next group."""
        return self.shared + "leader"

    @property
    def group(self) -> str:
        """Who trains together."""
        return self.shared + "group"

    @property
    def members(self) -> str:
        """The list that a large group's record refers to."""
        return self.shared + "members"

    @property
    def result(self) -> str:
        """How the job ended."""
        return self.shared + "result"

    @property
    def restore_point(self) -> str:
        """Where the current group begins."""
        return self.shared + "restore_point"

    @property
    def checkpoint(self) -> str:
        """The committed checkpoint."""
        return self.shared + "checkpoint"

    @property
    def handoff(self) -> str:
        """The request that all ranks of the group stop after a common step."""
        return self.shared + "handoff"

    @property
    def suspects(self) -> str:
        """Prefix of all suspicions."""
        return self.shared + "suspects/"

    def suspect(self, suspect: Suspicion) -> str:
        """One neighbour's suspicion of one member."""
        return f"{self.suspects}{suspect.node_id}/{suspect.by_node_id}"

    @property
    def nodes(self) -> str:
        """Prefix of all nodes."""
        return self.prefix + "nodes/"

    def node(self, node_id: str) -> str:
        """One agent's place."""
        return self.nodes + node_id

    def statuses(self, group: int | None = None) -> str:
        """Prefix of what members report about one group, or about any."""
        return self.prefix + ("status/" if group is None else f"status/{group}/")

    def status(self, status: MemberStatus) -> str:
        """What one member reports about one group."""
        return self.statuses(status.group) + status.node_id

    @property
    def changes(self) -> str:
        """Prefix of all changes of group whose incident is not written yet."""
        return self.prefix + "changes/"

    def change(self, group: int) -> str:
        """Why and when one group was formed."""
        return f"{self.changes}{group}"

    @property
    def incidents(self) -> str:
        """Prefix of all incidents."""
        return self.prefix + "incidents/"

    def incident(self, group: int) -> str:
        """What made one group."""
        return f"{self.incidents}{group}"

    def whole(self) -> tuple[KeyRange, ...]:
        """What a leader, or a person, looks at."""
        return (KeyRange(self.prefix, is_prefix=True),)

    def followed(self, node_id: str) -> tuple[KeyRange, ...]:
        """What every other agent looks at: one change then costs N events, not N squared."""
        return (KeyRange(self.shared, is_prefix=True), KeyRange(self.node(node_id)))


def encode(record: Record) -> bytes:
    """A record as it is stored: JSON, compressed if it is large, as one about a thousand nodes is."""
    plain = msgspec.json.encode(record)
    return plain if len(plain) < _LARGE_BYTES else zlib.compress(plain, level=1)


def decode(item: KeyValue, kind: type[R]) -> Stored[R]:
    """A stored record. Raises `RecordError` naming the key."""
    return Stored(value_of(item, kind, _DECODERS), item.create_revision, item.mod_revision, item.lease_id)


def value_of(item: KeyValue, kind: type[R], decoders: Mapping[type[Record], msgspec.json.Decoder[Record]]) -> R:
    """What a stored record says, by one of these decoders. Raises `RecordError` naming the key."""
    try:
        return cast("R", decoders[kind].decode(as_json(item.value)))
    except (msgspec.DecodeError, ValueError) as error:
        raise RecordError(
            f"the record at {item.key} cannot be read as version 1 of {kind.__name__}: {error}; "
            "it was written by another version of elastic-agent, or by hand"
        ) from error


def group_in(items: Mapping[str, KeyValue], keys: JobKeys, listed: MemberList | None = None) -> Stored[Group] | None:
    """Return the group among these items; None if there is none.

    Args:
        items: by key.
        keys: of the job.
        listed: the list of members among them, if it was decoded already.

    Raises:
        RecordError: it, or the list that it refers to, cannot be read.
    """
    item = items.get(keys.group)
    if item is None:
        return None
    try:
        is_listed = _LISTED in as_json(item.value)[:_HEAD_BYTES]
    except ValueError:
        is_listed = False  # `decode` says why
    if not is_listed:
        return decode(item, Group)
    stored = decode(item, ListedGroup)
    if listed is None and keys.members in items:
        listed = decode(items[keys.members], MemberList).value
    try:
        group = unpack(stored.value, listed)
    except ValueError as error:
        raise RecordError(f"the record at {item.key} cannot be read: {error}") from None
    return Stored(group, stored.create_revision, stored.mod_revision, stored.lease_id)


def as_json(value: bytes) -> bytes:
    """Return the JSON of a stored record. Raises `ValueError` if it was compressed, and is damaged or too large."""
    if value[:1] != _COMPRESSED:
        return value
    reader = zlib.decompressobj()
    try:
        plain = reader.decompress(value, _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not reader.eof:
        raise ValueError(f"it is cut off, or larger than {_MOST_BYTES} bytes")
    return plain


class Views:
    """The views of one job's snapshots, one after another.

    What a snapshot has in common with the one before is not decoded again, nor sorted. For one thread at a time.
    """

    def __init__(self, keys: JobKeys, *, is_whole: bool) -> None:
        self._keys = keys
        self._is_whole = is_whole
        self._items: Mapping[str, KeyValue] = {}
        """Those of the last snapshot."""
        self._known: dict[str, Stored[Any]] = {}
        """What was decoded of them, except the records that are kept under a prefix."""
        self._nodes = _Prefix(keys.nodes, Node, lambda each: (each.create_revision, each.value.node_id))
        self._statuses = _Prefix(keys.statuses(), MemberStatus, lambda each: (each.value.group, each.value.node_id))
        self._suspects = _Prefix(keys.suspects, Suspicion, lambda each: (each.value.node_id, each.value.by_node_id))
        self._changes = _Prefix(keys.changes, GroupChange, lambda each: each.value.group)
        self._reporting: tuple[MemberStatus, ...] = ()
        """The statuses of members of the current group."""
        self._unread: dict[str, str] = {}

    @property
    def unread(self) -> dict[str, str]:
        """What the last view lacks, for it cannot be read: by key, why. One node's word keeps nobody from the rest."""
        found = dict(self._unread)
        for records in (self._nodes, self._statuses, self._suspects, self._changes):
            found.update(records.unread)
        return found

    def of(self, snapshot: Snapshot) -> ClusterView:
        """Decode a snapshot. Raises `RecordError` if a record cannot be read that is not one node's."""
        before, self._items, self._unread = self._items, snapshot.by_key, {}
        get = before.get
        changed = [item for key, item in snapshot.by_key.items() if get(key) is not item]
        new = sum(item.key not in before for item in changed)
        gone = before.keys() - snapshot.by_key.keys() if len(before) + new > len(snapshot.by_key) else set()
        for key in (*gone, *(item.key for item in changed)):
            self._known.pop(key, None)
        for records in (self._nodes, self._suspects, self._changes):
            records.update(changed, gone)
        has_reports = self._statuses.update(changed, gone)
        return self._view(snapshot, are_statuses_new=has_reports or self._keys.group not in self._known)

    def _view(self, snapshot: Snapshot, *, are_statuses_new: bool) -> ClusterView:
        keys, one = self._keys, self._one
        group = self._group()
        number = group.value.number if group is not None else 0
        if are_statuses_new:
            found = (each.value for each in self._statuses.stored)
            self._reporting = of_members(group.value, found) if group is not None and self._statuses.stored else ()
        backlog = self._backlog(number)
        handoff = one(keys.handoff, HandoffRequest)
        if group is None or (handoff is not None and handoff.value.group != group.value.number):
            handoff = None
        return ClusterView(
            revision=snapshot.revision,
            is_whole=self._is_whole,
            own_revision=snapshot.own_revision,
            spec=one(keys.spec, Spec),
            leader=one(keys.leader, Leader),
            group=group,
            result=one(keys.result, Result),
            restore_point=one(keys.restore_point, RestorePoint),
            checkpoint=one(keys.checkpoint, Checkpoint),
            handoff=handoff,
            suspects=self._suspects.stored,
            nodes=self._nodes.stored,
            statuses=self._reporting,
            incident=next((each for each in backlog.incidents if each.value.group == number), None),
            backlog=backlog,
        )

    def _group(self) -> Stored[Group] | None:
        key = self._keys.group
        if key not in self._known:
            listed = self._one(self._keys.members, MemberList)
            found = group_in(self._items, self._keys, listed.value if listed is not None else None)
            if found is None:
                return None
            self._known[key] = found
        return self._known[key]

    def _one(self, key: str, kind: type[R]) -> Stored[R] | None:
        if key not in self._items:
            return None
        if key not in self._known:
            self._known[key] = decode(self._items[key], kind)
        return self._known[key]

    def _backlog(self, number: int) -> Backlog:
        """What the incidents of the current group, of this number, and of earlier ones are made from."""
        if number == 0:
            return Backlog()
        changes = tuple(each.value for each in self._changes.stored)
        numbers = {number, *(each.group for each in changes), *(each.group - 1 for each in changes)}
        incidents = (self._incident(each) for each in sorted(numbers))
        earlier = takewhile(lambda each: each.group < number, (each.value for each in self._statuses.stored))
        return Backlog(
            changes=changes,
            statuses=tuple(earlier),
            incidents=tuple(each for each in incidents if each is not None),
        )

    def _incident(self, number: int) -> Stored[Incident] | None:
        key = self._keys.incident(number)
        try:
            return self._one(key, Incident)
        except RecordError as error:
            self._unread[key] = str(error)
            return None


class _Prefix(Generic[R]):
    """The records under one prefix, in order.

    Args:
        prefix: of their keys.
        kind: of the records.
        order: the key to sort them by.
    """

    def __init__(self, prefix: str, kind: type[R], order: Callable[[Stored[R]], Any]) -> None:
        self.stored: tuple[Stored[R], ...] = ()
        """Those that can be read."""
        self.unread: dict[str, str] = {}
        """Why the others cannot."""
        self._prefix = prefix
        self._kind = kind
        self._order = order
        self._by_key: dict[str, Stored[R]] = {}

    def update(self, changed: Iterable[KeyValue], gone: Iterable[str]) -> bool:
        """Take up what has changed; return whether anything did here."""
        mine = [item for item in changed if item.key.startswith(self._prefix)]
        left = [key for key in gone if key.startswith(self._prefix)]
        if not mine and not left:
            return False
        for key in (*left, *(item.key for item in mine)):
            self.unread.pop(key, None)
        for key in left:
            self._by_key.pop(key, None)
        for item in mine:
            try:
                self._by_key[item.key] = decode(item, self._kind)
            except RecordError as error:
                self._by_key.pop(item.key, None)
                self.unread[item.key] = str(error)
        self.stored = tuple(sorted(self._by_key.values(), key=self._order))
        return True


def view_of(snapshot: Snapshot, keys: JobKeys, *, is_whole: bool) -> ClusterView:
    """Decode one snapshot of a job's keys. Raises `RecordError` if any cannot be read."""
    views = Views(keys, is_whole=is_whole)
    view = views.of(snapshot)
    for why in views.unread.values():
        raise RecordError(why)
    return view


def jobs_in(snapshot: Snapshot) -> dict[str, Snapshot]:
    """Split a snapshot of `ROOT` into jobs, by id in order."""
    jobs: dict[str, list[KeyValue]] = {}
    for item in snapshot.items:
        job_id, slash, _ = item.key.removeprefix(ROOT).partition("/")
        if slash:
            jobs.setdefault(job_id, []).append(item)
    return {job_id: Snapshot.of(snapshot.revision, items) for job_id, items in sorted(jobs.items())}
