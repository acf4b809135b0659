"""An etcd that the agents of a job bring with them, where all machines are named and nobody runs one.

Three machines run a member each, so any one of them may be lost; of two, one alone runs it. Members
keep nothing between two starts of their agent: one that comes back is taken out of the cluster and put in again, empty,
and is sent everything by the others. If most of them are lost, those that come back begin an empty cluster, which the
agents fill from what they remember, as after any loss of etcd's data (`docs/guarantees.md`).

Who is let in: `connection_filter.py` asks from which address somebody calls. Where the machines share a secret, members
and clients also show each other certificates that are made from it (`etcd_certificates.py`), and what they say is
encrypted.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from agent.endpoints import endpoint_of, hold_port
from agent.errors import StoreUnavailable
from agent.local_etcd.connection_filter import AllowedAddresses, ConnectionFilter
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.local_etcd.etcd_members import EtcdCluster, EtcdMember
from agent.observe.log import log
from agent.runtime import node_facts
from agent.store.access import Credentials
from agent.store.api import KeyRange
from agent.store.certificates import Tls
from agent.store.etcd import EtcdStore

_MOST_MEMBERS = 3
_TRY_AGAIN_S = 0.5
_CHANGE_WITHIN_S = 20.0
"""etcd wants its members to have been connected for 5 s before it takes another one in."""
_LOOK_EVERY_S = 2.0
_LOOKS_IN_VAIN = 10
"""Most members are lost then, for an election takes a second: what this one knows would keep a new cluster from
beginning."""
_NO_LEADER_S = 10.0
"""Most members are lost then, for one that leaves. An election takes a second, and another one may leave just then."""
_ANSWER_WITHIN_S = 0.5
# Members on one network: half of etcd's defaults, which are for members far apart. A lost one is followed sooner.
_ELECTION = ("--heartbeat-interval", "50", "--election-timeout", "500")
_CA, _CERT, _KEY = "ca.pem", "cert.pem", "key.pem"
# Nobody is served, as a client or as a member, without a certificate of the job's authority.
_CERTIFIED = (
    *("--client-cert-auth", "--trusted-ca-file", _CA, "--cert-file", _CERT, "--key-file", _KEY),
    *("--peer-client-cert-auth", "--peer-trusted-ca-file", _CA, "--peer-cert-file", _CERT, "--peer-key-file", _KEY),
)


@dataclass(frozen=True)
class Ensemble:
    """Which machines run a member, and whether this is one of them."""

    job_id: str
    machines: tuple[str, ...]
    """All of the job's, by IP address, or name, as the operator lists them."""
    own: str
    """Which of the machines this is."""
    port: int
    """For clients, the same on all machines; members meet at the next one."""
    tls: Tls | None = None
    """What this machine shows the others, and wants of them, where they share a secret."""

    @property
    def scheme(self) -> str:
        """Of the members' URLs."""
        return "http" if self.tls is None else "https"

    @property
    def members(self) -> tuple[str, ...]:
        """The machines that run one, in whatever order all are listed. Two would be lost with either of them."""
        return tuple(
            sorted(self.machines, key=_by_number)[: _MOST_MEMBERS if len(self.machines) >= _MOST_MEMBERS else 1]
        )

    @property
    def node_ids(self) -> tuple[str, ...]:
        """What the nodes on all machines are called, unless they are told otherwise."""
        return tuple(map(node_id_of, self.machines))

    @property
    def position(self) -> int:
        """Of this machine among all, from 1."""
        return self.machines.index(self.own) + 1

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where clients reach the members."""
        return tuple(map(self.endpoint, self.members))

    def endpoint(self, machine: str) -> str:
        """Where clients reach one."""
        return endpoint_of(machine, self.port)

    @property
    def note(self) -> str:
        """What an operator should know of it."""
        where = f"etcd runs on {', '.join(self.members)}, port {self.port}"
        if len(self.members) == 1:
            return f"{where}: while that machine is lost, the job waits for it"
        return f"{where}: any one of them may be lost"

    def peer_url(self, machine: str) -> str:
        """Where the others reach a member."""
        return f"{self.scheme}://{endpoint_of(machine, self.port + 1)}"

    def guests(self) -> set[str]:
        """The addresses of all machines, as their names lead there now. May wait for DNS."""
        return {ip for machine in self.machines for ip in node_facts.resolve_if_there(machine)}

    def silent(self) -> list[str]:
        """The machines with a member that do not answer. Waits for them, a moment each."""
        return [machine for machine in self.members if not _answers(machine, self.port)]


class EndKeys(Protocol):
    """Where a job of either kind says who is there, and how it ended."""

    @property
    def nodes(self) -> str:
        """Prefix of all nodes."""

    @property
    def result(self) -> str:
        """How the job ended."""


@contextmanager
def brought_along(
    ensemble: Ensemble | None, on_trouble: Callable[[str], None], keys: EndKeys, *, leave_within_s: float
) -> Iterator[Callable[[], None]]:
    """Run this machine's member inside a `with` block, if it is to have one.

    Yields what to call when this agent surely takes part in the job: before, it joins none that is there.

    Args:
        ensemble: None: there is nothing to run.
        on_trouble: called on another thread, with the reason, when the member cannot be kept alive. It is tried again.
        keys: by which it is known whether others still need it.
        leave_within_s: how long others may need it after this agent's end.

    Raises:
        ConfigError: no etcd is installed, or a port is taken.
    """
    if ensemble is None or ensemble.own not in ensemble.members:
        yield lambda: None
        return
    with closing(_Member(ensemble)) as member:
        files = {_CA: tls.ca, _CERT: tls.cert, _KEY: tls.key} if (tls := ensemble.tls) else {}
        held = {name: content for name, content in files.items() if content is not None}
        etcd = EmbeddedEtcd(port=member.client_port, on_given_up=on_trouble, join=member.join, files=held)
        passages = [
            AllowedAddresses(ensemble.own, ensemble.port, member.client_port),
            AllowedAddresses(ensemble.own, ensemble.port + 1, member.peer_port),
        ]
        with ConnectionFilter(passages, ensemble.guests), etcd, _MemberMonitor(member.itself, etcd):
            yield member.may_join.set
            etcd.let_end()  # one that is taken out ends by itself, and would join again
            member.leave(keys, leave_within_s)


class _Member:
    """This machine's member: how it comes into the cluster, and how it leaves."""

    def __init__(self, ensemble: Ensemble) -> None:
        self._ensemble = ensemble
        self._held = [hold_port("127.0.0.1") for _ in range(2)]
        self.client_port, self.peer_port = (held.getsockname()[1] for held in self._held)
        itself = f"127.0.0.1:{self.client_port}"
        self._others = [machine for machine in ensemble.members if machine != ensemble.own]
        self._endpoints = [itself, *map(ensemble.endpoint, self._others)]
        tls = ensemble.tls
        self.itself, self._rest = EtcdCluster([itself], tls), EtcdCluster(self._endpoints[1:], tls)
        self._all = EtcdCluster(self._endpoints, tls)
        self.may_join = threading.Event()
        """Into a cluster that is there. One that is put in counts at once, so it must be sure to stay: beside one that
        goes again, the last of the others, who could go on alone, cannot."""

    def close(self) -> None:
        """Let go of what it holds."""
        for held in self._held:
            held.close()
        for cluster in (self.itself, self._rest, self._all):
            cluster.close()

    def join(self, is_over: threading.Event) -> Sequence[str] | None:
        """The arguments to start etcd with, once it has a place: in the cluster that is there, else in a new one.

        None: it is over before that.
        """
        give_up_at = time.monotonic() + _CHANGE_WITHIN_S
        while True:
            if is_over.is_set():
                return None
            try:
                members = self._rest.members()
            except StoreUnavailable:
                break  # nobody is there, or all just begin, too
            why = "this agent could not ask it whether it may join"
            try:
                if self.may_join.is_set():
                    return self._arguments("existing", self._replace(members))
            except StoreUnavailable as error:  # most of them are lost, or have just met
                why = str(error)
            if time.monotonic() > give_up_at:
                log.warning("the job's etcd takes nobody in: beginning a new one", reason=why)
                break
            is_over.wait(_TRY_AGAIN_S)
        machines = self._ensemble.members
        return self._arguments("new", [f"{machine}={self._ensemble.peer_url(machine)}" for machine in machines])

    def leave(self, keys: EndKeys, within_s: float) -> None:
        """End in order: when the others know how the job ended, or go on without this member."""
        told = (KeyRange(keys.nodes, is_prefix=True), KeyRange(keys.result))
        heard_at = time.monotonic()
        give_up_at = heard_at + within_s
        # Another one may leave at the same time. Who has taken no part yet need not wait for that.
        patience_s = _NO_LEADER_S if self.may_join.is_set() else 0.0
        with closing(EtcdStore(self._endpoints, Credentials(self._ensemble.tls), retry_for_s=1.0)) as store:
            while time.monotonic() < give_up_at:
                try:
                    there = {item.key for item in store.read(told).items}
                    heard_at = time.monotonic()
                    if there == {keys.result} or (keys.result not in there and self._is_out()):
                        return
                except StoreUnavailable as error:
                    if {*self._others} <= {*self._ensemble.silent()}:
                        return  # the others have gone before
                    if time.monotonic() > heard_at + patience_s:
                        log.warning("the job's etcd is left as it is", reason=str(error))
                        return
                time.sleep(_TRY_AGAIN_S)

    def _is_out(self) -> bool:
        """Whether the others can go on without this member. False: they take no change now, and may a little later."""
        try:
            members = self._all.members()
            if len(members) == 1:
                return True  # it goes with the machine
            # The dead one first: etcd lets nobody go whom it needs for a majority. As long as it has one, one is dead.
            for machine in (*islice(filter(self._is_dead, self._others), 1), self._ensemble.own):
                self._take_out(self._all, members, machine)
        except StoreUnavailable:
            return False
        return True

    def _is_dead(self, machine: str) -> bool:
        """Whether another one's member does not serve. One that only seems so joins again by itself."""
        with closing(EtcdCluster([self._ensemble.endpoint(machine)], self._ensemble.tls)) as cluster:
            try:
                cluster.has_leader()
            except StoreUnavailable:
                return True
            return False

    def _take_out(self, cluster: EtcdCluster, members: Sequence[EtcdMember], machine: str) -> None:
        for member in members:
            if self._ensemble.peer_url(machine) in member.peer_urls:
                cluster.remove(member)

    def _replace(self, members: Sequence[EtcdMember]) -> list[str]:
        """Take out what was here before, and put in what comes; return the cluster in etcd's notation."""
        own, own_url = self._ensemble.own, self._ensemble.peer_url(self._ensemble.own)
        self._take_out(self._rest, members, own)
        members = self._rest.add(own_url)
        return [f"{member.name or own}={url}" for member in members for url in member.peer_urls]

    def _arguments(self, state: str, cluster: Sequence[str]) -> Sequence[str]:
        own, scheme = self._ensemble.own, self._ensemble.scheme
        return (
            *("--name", own, "--initial-cluster-token", self._ensemble.job_id),
            *("--listen-client-urls", f"{scheme}://127.0.0.1:{self.client_port}"),
            *("--advertise-client-urls", f"{scheme}://{self._ensemble.endpoint(own)}"),
            *("--listen-peer-urls", f"{scheme}://127.0.0.1:{self.peer_port}"),
            *("--initial-advertise-peer-urls", self._ensemble.peer_url(own)),
            *("--initial-cluster", ",".join(cluster), "--initial-cluster-state", state),
            *_ELECTION,
            *(_CERTIFIED if self._ensemble.tls else ()),
        )


class _MemberMonitor:
    """Notices that a member hears of no leader any more, once it had one. Runs inside a `with` block."""

    def __init__(self, member: EtcdCluster, etcd: EmbeddedEtcd) -> None:
        self._member = member
        self._etcd = etcd
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="ensemble", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        looked_for: int | None = None
        in_vain = 0
        while not self._is_over.wait(_LOOK_EVERY_S):  # etcd tells nobody when it loses its leader
            pid, has_leader = self._etcd.pid, self._has_leader()
            if pid is None or pid != looked_for:
                # It begins, and may wait for others as long as it takes.
                looked_for, in_vain = (pid if has_leader is not None else None), 0
                continue
            # Looks are counted, not seconds: a machine that stood still has lost nobody.
            in_vain = 0 if has_leader else in_vain + 1
            if in_vain == _LOOKS_IN_VAIN:
                log.warning("most members of the job's etcd are lost: this one begins anew")
                looked_for = None
                self._etcd.start_over()

    def _has_leader(self) -> bool | None:
        """None: it does not answer, or never had one."""
        try:
            return self._member.has_leader()
        except StoreUnavailable:
            return None


def node_id_of(machine: str) -> str:
    """What the node on a machine is called: ids have no colons."""
    return machine.partition("%")[0].replace(":", "-")


def _answers(machine: str, port: int) -> bool:
    try:
        with socket.create_connection((machine, port), _ANSWER_WITHIN_S):
            return True
    except (OSError, UnicodeError):  # the latter of what can be no name, like 10.0.0..3
        return False


def _by_number(machine: str) -> tuple[bool, int, str]:
    try:
        return False, int(ipaddress.ip_address(machine)), ""
    except ValueError:
        return True, 0, machine
