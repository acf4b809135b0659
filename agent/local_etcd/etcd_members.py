"""The members of an etcd cluster: listing, adding and removing them; and the member that this machine runs.

Members keep no data between two starts of their agent. A member that comes back is removed from the cluster and added
again, empty, and receives all data from the other members. If most members are lost, those that come back start an
empty cluster, which the agents fill from their cached records, as after any loss of etcd's data
(`docs/guarantees.md`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

import grpc

from agent.endpoints import LOOPBACK
from agent.errors import StoreUnavailable
from agent.local_etcd.connection_filter import ConnectionFilter, PortForward
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.local_etcd.ensemble import Ensemble
from agent.observe.log import log
from agent.ports import hold_port
from agent.store import connections, etcd_errors
from agent.store.access import Credentials
from agent.store.api import KeyRange
from agent.store.certificates import Tls
from agent.store.etcd import EtcdStore
from agent.store.etcd_protocol import Stub, message

_T = TypeVar("_T")

_ListRequest = message("MemberListRequest")
_AddRequest = message("MemberAddRequest")
_RemoveRequest = message("MemberRemoveRequest")
_StatusRequest = message("StatusRequest")
_ANSWER_WITHIN_S = 2.0
_FIRST_TERM = 1
"""Raft term of a newly started cluster; every election increments it. etcd 3.6 answers before the first one too."""
_RETRY_S = 0.5
_JOIN_WITHIN_S = 20.0
"""etcd adds a member only after the existing members have been connected for 5 s."""
_CHECK_EVERY_S = 2.0
_CHECKS_WITHOUT_LEADER = 10
"""After this, most members must be lost, because an election takes a second. The data of this member would prevent a
new cluster from being started."""
_NO_LEADER_S = 10.0
"""When a member leaves and finds no leader for this long, most members are lost. An election takes a second, and
another member may be leaving at the same time."""
# Half of etcd's defaults, which are for members that are far apart. A lost member is replaced sooner.
_ELECTION = ("--heartbeat-interval", "50", "--election-timeout", "500")
_CA, _CERT, _KEY = "ca.pem", "cert.pem", "key.pem"
# Clients and members without a certificate of the job's authority are rejected.
_CERTIFIED = (
    *("--client-cert-auth", "--trusted-ca-file", _CA, "--cert-file", _CERT, "--key-file", _KEY),
    *("--peer-client-cert-auth", "--peer-trusted-ca-file", _CA, "--peer-cert-file", _CERT, "--peer-key-file", _KEY),
)


@dataclass(frozen=True)
class EtcdMember:
    """A member of a cluster."""

    id: int
    name: str
    """Empty: the member has not started yet."""
    peer_urls: tuple[str, ...]


class EtcdCluster:
    """Membership of a cluster. Each call goes to the first endpoint that answers and may raise `StoreUnavailable`."""

    def __init__(self, endpoints: Sequence[str], tls: Tls | None = None) -> None:
        self._connections = [connections.EtcdConnection(endpoint, tls) for endpoint in endpoints]

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.channel.close()

    def members(self) -> tuple[EtcdMember, ...]:
        """Return all members as known by the endpoint that answers; it may be behind."""
        return _members(
            self._ask(lambda channel, options: Stub(channel, "Cluster").MemberList(_ListRequest(), **options))
        )

    def add(self, peer_url: str) -> tuple[EtcdMember, ...]:
        """Add a member, which is to be started next; return all members."""
        request = _AddRequest(peerURLs=[peer_url])
        return _members(self._ask(lambda channel, options: Stub(channel, "Cluster").MemberAdd(request, **options)))

    def remove(self, member: EtcdMember) -> None:
        """Remove a member. It can never come back; only a new one can be added in its place."""
        request = _RemoveRequest(ID=member.id)
        self._ask(lambda channel, options: Stub(channel, "Cluster").MemberRemove(request, **options))

    def has_leader(self) -> bool | None:
        """Whether the endpoint that answers has a leader: then a majority is connected. None: it never had one."""
        reply = self._ask(lambda channel, options: Stub(channel, "Maintenance").Status(_StatusRequest(), **options))
        return True if reply.leader else False if reply.raftTerm > _FIRST_TERM else None

    def _ask(self, call: Callable[[grpc.Channel, dict[str, Any]], _T]) -> _T:
        reason = "there is no endpoint"
        for connection in self._connections:
            try:
                return call(connection.channel, {"timeout": _ANSWER_WITHIN_S})
            except grpc.RpcError as error:
                reason = f"etcd at {connection.endpoint}: {etcd_errors.details_of(error)}"
        raise StoreUnavailable(reason)


class EndKeys(Protocol):
    """The keys by which a job of either kind shows its nodes and its result."""

    @property
    def nodes(self) -> str:
        """Prefix of the nodes' keys."""

    @property
    def result(self) -> str:
        """Key of the job's result."""


@contextmanager
def run_member(
    ensemble: Ensemble | None, on_trouble: Callable[[str], None], keys: EndKeys, *, leave_within_s: float
) -> Iterator[Callable[[], None]]:
    """Run this machine's member inside a `with` block, if the machine is to run one.

    Args:
        ensemble: the machines of the job; None: nothing is run.
        on_trouble: called on another thread, with the reason, when the member cannot be kept alive. It is retried.
        keys: show whether other agents still need the member.
        leave_within_s: how long to keep the member running for other agents after this agent has ended.

    Yields:
        A function to call once this agent is sure to take part in the job. Before that, the member does not join a
        cluster that already exists.

    Raises:
        ConfigError: no etcd is installed, or a port is taken.
    """
    if ensemble is None or ensemble.own not in ensemble.members:
        yield lambda: None
        return
    with closing(_Member(ensemble)) as member:
        tls_files = {_CA: tls.ca, _CERT: tls.cert, _KEY: tls.key} if (tls := ensemble.tls) else {}
        files = {name: content for name, content in tls_files.items() if content is not None}
        etcd = EmbeddedEtcd(port=member.client_port, on_given_up=on_trouble, join=member.join, files=files)
        forwards = [
            PortForward(ensemble.own, ensemble.port, member.client_port),
            PortForward(ensemble.own, ensemble.port + 1, member.peer_port),
        ]
        with ConnectionFilter(forwards, ensemble.machine_ips), etcd, _MemberMonitor(member.own, etcd):
            yield member.may_join.set
            etcd.stop_restarting()  # a member that is removed ends by itself, and would join again
            member.leave(keys, leave_within_s)


class _Member:
    """This machine's member: how it joins the cluster, and how it leaves."""

    def __init__(self, ensemble: Ensemble) -> None:
        self._ensemble = ensemble
        self._reserved_ports = [hold_port(LOOPBACK) for _ in range(2)]
        self.client_port, self.peer_port = (held.getsockname()[1] for held in self._reserved_ports)
        own_endpoint = f"{LOOPBACK}:{self.client_port}"
        self._others = [machine for machine in ensemble.members if machine != ensemble.own]
        self._endpoints = [own_endpoint, *map(ensemble.endpoint, self._others)]
        tls = ensemble.tls
        self.own, self._others_cluster = EtcdCluster([own_endpoint], tls), EtcdCluster(self._endpoints[1:], tls)
        self._all = EtcdCluster(self._endpoints, tls)
        self.may_join = threading.Event()
        """Set when the member may join an existing cluster.

        An added member counts for the majority at once, so it must be sure to stay: if it left again, the last other
        member, which could have continued alone, could not.
        """

    def close(self) -> None:
        """Release ports and connections."""
        for held in self._reserved_ports:
            held.close()
        for cluster in (self.own, self._others_cluster, self._all):
            cluster.close()

    def join(self, is_over: threading.Event) -> Sequence[str] | None:
        """Wait until the member can join the existing cluster, or a new one if there is none.

        Returns:
            The arguments to start etcd with. None: `is_over` was set first.
        """
        give_up_at = time.monotonic() + _JOIN_WITHIN_S
        while True:
            if is_over.is_set():
                return None
            try:
                members = self._others_cluster.members()
            except StoreUnavailable:
                break  # no other member runs, or all are just starting
            reason = "this agent did not learn whether it may take part in the job"
            try:
                if self.may_join.is_set():
                    return self._arguments("existing", self._replace(members))
            except StoreUnavailable as error:  # most members are lost, or have just connected
                reason = str(error)
            if time.monotonic() > give_up_at:
                log.warning("the job's etcd accepts no new member: starting a new cluster", reason=reason)
                break
            is_over.wait(_RETRY_S)
        machines = self._ensemble.members
        return self._arguments("new", [f"{machine}={self._ensemble.peer_url(machine)}" for machine in machines])

    def leave(self, keys: EndKeys, within_s: float) -> None:
        """Leave in order: wait until all know the job's result, or the others can continue without this member."""
        ranges = (KeyRange(keys.nodes, is_prefix=True), KeyRange(keys.result))
        answered_at = time.monotonic()
        give_up_at = answered_at + within_s
        # Another member may be leaving at the same time. An agent that took no part in the job need not wait for it.
        no_leader_s = _NO_LEADER_S if self.may_join.is_set() else 0.0
        with closing(EtcdStore(self._endpoints, Credentials(self._ensemble.tls), retry_for_s=1.0)) as store:
            while time.monotonic() < give_up_at:
                try:
                    present = {item.key for item in store.read(ranges).items}
                    answered_at = time.monotonic()
                    if present == {keys.result} or (keys.result not in present and self._try_to_remove_own()):
                        return
                except StoreUnavailable as error:
                    if {*self._others} <= {*self._ensemble.unreachable_members()}:
                        return  # the others have ended before
                    if time.monotonic() > answered_at + no_leader_s:
                        log.warning("leaving the job's etcd without removing this member", reason=str(error))
                        return
                time.sleep(_RETRY_S)

    def _try_to_remove_own(self) -> bool:
        """Remove this member, so that the others can continue without it.

        Returns:
            False: the cluster accepts no change now; it may do so later.
        """
        try:
            members = self._all.members()
            if len(members) == 1:
                return True  # the cluster ends with this machine
            # First a dead member: etcd removes no member that it needs for a majority. While there is a majority, at
            # most one member is dead.
            for machine in (*islice(filter(self._is_dead, self._others), 1), self._ensemble.own):
                self._remove(self._all, members, machine)
        except StoreUnavailable:
            return False
        return True

    def _is_dead(self, machine: str) -> bool:
        """Whether another machine's member does not serve. If it is removed by mistake, it joins again by itself."""
        with closing(EtcdCluster([self._ensemble.endpoint(machine)], self._ensemble.tls)) as cluster:
            try:
                cluster.has_leader()
            except StoreUnavailable:
                return True
            return False

    def _remove(self, cluster: EtcdCluster, members: Sequence[EtcdMember], machine: str) -> None:
        for member in members:
            if self._ensemble.peer_url(machine) in member.peer_urls:
                cluster.remove(member)

    def _replace(self, members: Sequence[EtcdMember]) -> list[str]:
        """Replace this machine's former member by a new one; return the members in the notation of etcd's options."""
        own, own_url = self._ensemble.own, self._ensemble.peer_url(self._ensemble.own)
        self._remove(self._others_cluster, members, own)
        members = self._others_cluster.add(own_url)
        return [f"{member.name or own}={url}" for member in members for url in member.peer_urls]

    def _arguments(self, state: str, cluster: Sequence[str]) -> Sequence[str]:
        own, scheme = self._ensemble.own, self._ensemble.scheme
        return (
            *("--name", own, "--initial-cluster-token", self._ensemble.job_id),
            *("--listen-client-urls", f"{scheme}://{LOOPBACK}:{self.client_port}"),
            *("--advertise-client-urls", f"{scheme}://{self._ensemble.endpoint(own)}"),
            *("--listen-peer-urls", f"{scheme}://{LOOPBACK}:{self.peer_port}"),
            *("--initial-advertise-peer-urls", self._ensemble.peer_url(own)),
            *("--initial-cluster", ",".join(cluster), "--initial-cluster-state", state),
            *_ELECTION,
            *(_CERTIFIED if self._ensemble.tls else ()),
        )


class _MemberMonitor:
    """Detects that a member has lost its leader, and restarts it empty. Runs inside a `with` block."""

    def __init__(self, member: EtcdCluster, etcd: EmbeddedEtcd) -> None:
        self._member = member
        self._etcd = etcd
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ensemble", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        checked_pid: int | None = None
        without_leader = 0
        while not self._is_over.wait(_CHECK_EVERY_S):  # etcd sends no notification when it loses its leader
            pid, has_leader = self._etcd.pid, self._has_leader()
            if pid is None or pid != checked_pid:
                # It has just started, and may wait for other members without a limit.
                checked_pid, without_leader = (pid if has_leader is not None else None), 0
                continue
            # Counts checks instead of seconds: a machine that was suspended has lost no member.
            without_leader = 0 if has_leader else without_leader + 1
            if without_leader == _CHECKS_WITHOUT_LEADER:
                log.warning("most members of the job's etcd are lost: restarting this one empty")
                checked_pid = None
                self._etcd.rejoin_empty()

    def _has_leader(self) -> bool | None:
        """Whether the member has a leader. None: it does not answer, or never had one."""
        try:
            return self._member.has_leader()
        except StoreUnavailable:
            return None


def _members(reply: Any) -> tuple[EtcdMember, ...]:  # noqa: ANN401 - a message without a type
    return tuple(EtcdMember(each.ID, each.name, tuple(each.peerURLs)) for each in reply.members)
