"""The records of a parameter-server job in etcd: their keys, their codec, and how they are written."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from agent.core.model import Record
from agent.errors import ConfigError, LeaseGone, RecordError, StoreUnavailable
from agent.roles import core
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
    """Where they lie."""

    job_id: str

    @property
    def prefix(self) -> str:
        """Of all of them."""
        return f"{JobKeys(self.job_id).prefix}roles/"

    @property
    def spec(self) -> str:
        """Which processes there are."""
        return f"{self.prefix}spec"

    @property
    def map(self) -> str:
        """Which server has which shard."""
        return f"{self.prefix}map"

    @property
    def result(self) -> str:
        """How it ended."""
        return f"{self.prefix}result"

    @property
    def nodes(self) -> str:
        """Prefix of all agents that are here."""
        return f"{self.prefix}nodes/"

    def node(self, node_id: str) -> str:
        """An agent that is here."""
        return self.nodes + node_id

    def post(self, name: str) -> str:
        """What has become of a post."""
        return f"{self.prefix}posts/{name}"

    def everything(self) -> tuple[KeyRange, ...]:
        """What an agent follows."""
        return (KeyRange(self.prefix, is_prefix=True),)

    def view(self, snapshot: Snapshot) -> RoleView:
        """Raises `RecordError`."""
        spec: RoleSpec | None = None
        result: RoleResult | None = None
        shards, map_revision = None, 0
        nodes: list[RoleNode] = []
        posts: dict[str, RoleProcessRecord] = {}
        for item in snapshot.items:
            if not item.key.startswith(self.prefix):
                continue  # of a job of ranks
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
                case "posts":
                    posts[name] = _decode(item, RoleProcessRecord)
                case _:
                    raise RecordError(f"the record at {item.key} is none of this version's")
        return RoleView(snapshot.revision, spec, tuple(nodes), posts, result, shards, map_revision)


def agree(store: Store, keys: RoleKeys, plan: RolePlan, find_port: Callable[[str], int]) -> RoleSpec:
    """Which processes the job has: as the first agent wrote it, with ports that it has found free.

    Raises:
        ConfigError: another agent was started with others.
        StoreUnavailable: etcd cannot be reached.
    """
    mine = RoleSpec(
        run=secrets.token_hex(6),
        secret=secrets.token_hex(16),
        posts=tuple((post.kind, post.machine, post.port) for post in plan.with_ports(find_port).posts),
        heter_device=plan.heter_device,
        http_port=plan.http_port,
        replicas=plan.replicas,
    )
    of_the_last = [Delete(key) for key in (keys.result, keys.map)]  # it was reset
    store.transact([Compare(keys.spec, create_revision=0)], [Put(keys.spec, encode(mine)), *of_the_last])
    (item,) = store.read((KeyRange(keys.spec),)).items
    theirs = _decode(item, RoleSpec)
    if not plan.is_with_ports(theirs.plan()):
        raise ConfigError(
            f"job {keys.job_id} has other processes, servers {theirs.plan().endpoints('server')} and workers "
            f"{theirs.plan().endpoints('worker')}: give the same line on all machines, or another --job_id"
        )
    return theirs


class RoleRecords:
    """What one agent writes, as long as its run is the job's. A spec that etcd has lost is written again.

    Each call may raise `StoreUnavailable`, and is to be made again then.

    Args:
        store: where.
        keys: of the job.
        spec: of its run.
        node_id: of this agent.
        node: its record.
        lease_ttl_s: how long that lives without being renewed.
        hold: renews a lease from now on.
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
        """Be there, under one lease however often it is tried: a try that lands late must not be under another one."""
        if self._lease is None:
            self._lease = self._store.grant(self._lease_ttl_s)
            self._hold(self._lease)
        try:
            self._put(self._keys.node(self._node_id), encode(self._node), self._lease.lease_id)
        except LeaseGone:
            self._lease = None
            raise

    def leave(self) -> None:
        """Be there no more. Nobody may renew the lease after this."""
        if self._lease is not None:
            self._store.revoke(self._lease.lease_id)

    def write(self, effect: core.StoreEffect) -> None:
        """Write what the core says."""
        match effect:
            case core.WriteRecord(post, record):
                self._put(self._keys.post(post.name), encode(record))
            case core.WriteShardMap(made, after_revision):
                compare = self._follows(made.number, after_revision)
                if compare is not None:
                    self._transact(self._read_spec(), compare, Put(self._keys.map, encode(map_record(made))))
            case core.Decide(result):
                compare = Compare(self._keys.result, create_revision=0)
                self._transact(self._read_spec(), compare, Put(self._keys.result, encode(result)))

    def _put(self, key: str, value: bytes, lease_id: int = 0) -> None:
        """Write over what is there now, and over nothing else: a try that lands late changes nothing."""
        spec = self._read_spec()
        (known,) = self._store.read((KeyRange(key),)).items or (None,)
        compare = (
            Compare(key, mod_revision=known.mod_revision) if known is not None else Compare(key, create_revision=0)
        )
        if spec is not None and not self._transact(spec, compare, Put(key, value, lease_id)):
            raise StoreUnavailable(f"{key} has changed meanwhile")

    def _follows(self, number: int, after_revision: int) -> Compare | None:
        """That the map is the one that was seen; an etcd that was empty counts its revisions from 1 again."""
        (known,) = self._store.read((KeyRange(self._keys.map),)).items or (None,)
        if known is None:
            return None if after_revision else Compare(self._keys.map, create_revision=0)
        is_older = _decode(known, MapRecord).number < number
        return Compare(self._keys.map, mod_revision=after_revision) if is_older else None

    def _transact(self, spec: Compare | None, compare: Compare, write: Put) -> bool:
        return spec is not None and self._store.transact([spec, compare], [write]).succeeded

    def _read_spec(self) -> Compare | None:
        """That the job's is still this run's. None: it is another's, or this run was reset."""
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
