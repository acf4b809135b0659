"""The records of a parameter-server job in etcd: keys, decoding, and guarded writes."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from agent.core.records import Record
from agent.errors import ConfigError, LeaseGone, RecordError, StoreUnavailable
from agent.roles.events import RoleStoreEffect, WriteRecord, WriteRoleResult, WriteShardMap
from agent.roles.model import MapRecord, RoleNode, RoleProcessRecord, RoleResult, RoleSpec, RoleView, map_record
from agent.roles.plan import RolePlan
from agent.store.api import Compare, Delete, KeyRange, KeyValue, Lease, Put, Snapshot, Store
from agent.store.keys import JobKeys, encode, value_of

R = TypeVar("R", bound=Record)
_DECODERS: dict[type[Record], msgspec.json.Decoder[Record]] = {
    kind: msgspec.json.Decoder(kind) for kind in (RoleSpec, RoleNode, RoleProcessRecord, MapRecord, RoleResult)
}


@dataclass(frozen=True)
class RoleKeys:
    """The keys of one job."""

    job_id: str

    @property
    def prefix(self) -> str:
        """Prefix of all keys."""
        return f"{JobKeys(self.job_id).prefix}roles/"

    @property
    def spec(self) -> str:
        """Key of the `RoleSpec`."""
        return f"{self.prefix}spec"

    @property
    def map(self) -> str:
        """Key of the `MapRecord`."""
        return f"{self.prefix}map"

    @property
    def result(self) -> str:
        """Key of the `RoleResult`."""
        return f"{self.prefix}result"

    @property
    def nodes(self) -> str:
        """Prefix of the `RoleNode` records."""
        return f"{self.prefix}nodes/"

    def node(self, node_id: str) -> str:
        """Return the key of an agent's `RoleNode`."""
        return self.nodes + node_id

    def process(self, name: str) -> str:
        """Return the key of a process's `RoleProcessRecord`."""
        return f"{self.prefix}processes/{name}"

    def everything(self) -> tuple[KeyRange, ...]:
        """Return the range of all keys."""
        return (KeyRange(self.prefix, is_prefix=True),)

    def view(self, snapshot: Snapshot) -> RoleView:
        """Decode a snapshot. Raises `RecordError`."""
        spec: RoleSpec | None = None
        result: RoleResult | None = None
        shards, map_revision = None, 0
        nodes: list[RoleNode] = []
        processes: dict[str, RoleProcessRecord] = {}
        for item in snapshot.items:
            if not item.key.startswith(self.prefix):
                continue  # a record of a collective job
            kind, _, name = item.key.removeprefix(self.prefix).partition("/")
            match kind:
                case "spec":
                    spec = _decode(item, RoleSpec)
                case "map":
                    shards, map_revision = _decode(item, MapRecord).shard_map(), item.mod_revision
                case "result":
                    result = _decode(item, RoleResult)
                case "nodes":
                    nodes.append(_decode(item, RoleNode))
                case "processes":
                    processes[name] = _decode(item, RoleProcessRecord)
                case _:
                    raise RecordError(f"the record at {item.key} is none of this version's")
        return RoleView(snapshot.revision, spec, tuple(nodes), processes, result, shards, map_revision)


def agree_on_spec(store: Store, keys: RoleKeys, plan: RolePlan, find_port: Callable[[str], int]) -> RoleSpec:
    """Write the spec, unless another agent has; return the spec of the job, with the ports that its writer found free.

    Raises:
        ConfigError: another agent was started with other processes.
        StoreUnavailable: etcd cannot be reached.
    """
    mine = RoleSpec(
        run=secrets.token_hex(6),
        secret=secrets.token_hex(16),
        processes=tuple(
            (process.kind, process.machine, process.port) for process in plan.with_ports(find_port).processes
        ),
        heter_device=plan.heter_device,
        http_port=plan.http_port,
        replicas=plan.replicas,
    )
    left_over = [Delete(key) for key in (keys.result, keys.map)]  # of the run before, which was reset
    store.transact([Compare(keys.spec, create_revision=0)], [Put(keys.spec, encode(mine)), *left_over])
    (item,) = store.read((KeyRange(keys.spec),)).items
    theirs = _decode(item, RoleSpec)
    if not plan.is_with_ports(theirs.plan()):
        raise ConfigError(
            f"job {keys.job_id} has other processes, servers {theirs.plan().endpoints('server')} and workers "
            f"{theirs.plan().endpoints('worker')}: give the same line on all machines, or another --job_id"
        )
    return theirs


class RoleWriter:
    """Writes the records of one agent, as long as its run is the current one of the job.

    A spec that etcd has lost is written again. Each call may raise `StoreUnavailable`; then call again.

    Args:
        store: the job's etcd.
        keys: of the job.
        spec: of this agent's run.
        node_id: of this agent.
        node: record of this agent.
        lease_ttl_s: length of the lease of that record.
        hold: keeps a lease alive from now on.
    """

    def __init__(
        self,
        store: Store,
        keys: RoleKeys,
        spec: RoleSpec,
        node_id: str,
        node: RoleNode,
        lease_ttl_s: float,
        hold: Callable[[Lease], None],
    ) -> None:
        self._store = store
        self._keys = keys
        self._spec = spec
        self._node_id = node_id
        self._node = node
        self._lease_ttl_s = lease_ttl_s
        self._hold = hold
        self._lease: Lease | None = None

    def register(self) -> None:
        """Write this agent's record. Retries use the same lease: an earlier attempt may still commit."""
        if self._lease is None:
            self._lease = self._store.grant(self._lease_ttl_s)
            self._hold(self._lease)
        try:
            self._put(self._keys.node(self._node_id), encode(self._node), self._lease.lease_id)
        except LeaseGone:
            self._lease = None
            raise

    def leave(self) -> None:
        """Revoke the lease, which deletes this agent's record. Nothing may renew the lease after this."""
        if self._lease is not None:
            self._store.revoke(self._lease.lease_id)

    def write(self, effect: RoleStoreEffect) -> None:
        """Carry out an effect of the core."""
        match effect:
            case WriteRecord(process, record):
                self._put(self._keys.process(process.name), encode(record))
            case WriteShardMap(made, after_revision):
                compare = self._follows(made.number, after_revision)
                if compare is not None:
                    self._transact(self._read_spec(), compare, Put(self._keys.map, encode(map_record(made))))
            case WriteRoleResult(result):
                compare = Compare(self._keys.result, create_revision=0)
                self._transact(self._read_spec(), compare, Put(self._keys.result, encode(result)))

    def _put(self, key: str, value: bytes, lease_id: int = 0) -> None:
        """Replace the record as it is now, and no other: an attempt that commits late changes nothing."""
        spec = self._read_spec()
        (known,) = self._store.read((KeyRange(key),)).items or (None,)
        compare = (
            Compare(key, mod_revision=known.mod_revision) if known is not None else Compare(key, create_revision=0)
        )
        if spec is not None and not self._transact(spec, compare, Put(key, value, lease_id)):
            raise StoreUnavailable(f"{key} has changed meanwhile")

    def _follows(self, number: int, after_revision: int) -> Compare | None:
        """Return the condition that the map is the one that the core saw; None: it is not.

        The number is compared, too: an etcd that came back empty counts its revisions from 1 again.
        """
        (known,) = self._store.read((KeyRange(self._keys.map),)).items or (None,)
        if known is None:
            return None if after_revision else Compare(self._keys.map, create_revision=0)
        is_older = _decode(known, MapRecord).number < number
        return Compare(self._keys.map, mod_revision=after_revision) if is_older else None

    def _transact(self, spec: Compare | None, compare: Compare, write: Put) -> bool:
        return spec is not None and self._store.transact([spec, compare], [write]).succeeded

    def _read_spec(self) -> Compare | None:
        """Return the condition that the job's spec is this run's; None: it is another run's, or this run was reset."""
        keys = self._keys
        items = {item.key: item for item in self._store.read((KeyRange(keys.spec), KeyRange(keys.result))).items}
        item = items.get(keys.spec)
        if item is not None:
            is_mine = _decode(item, RoleSpec).run == self._spec.run
            return Compare(keys.spec, mod_revision=item.mod_revision) if is_mine else None
        if keys.result in items:
            return None
        self._store.transact([Compare(keys.spec, create_revision=0)], [Put(keys.spec, encode(self._spec))])
        raise StoreUnavailable("etcd had lost what the job is")


def _decode(item: KeyValue, kind: type[R]) -> R:
    return value_of(item, kind, _DECODERS)
