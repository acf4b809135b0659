"""The members of an etcd cluster: who they are, taking one out, putting one in. Raises `StoreUnavailable`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from agent.errors import StoreUnavailable
from agent.store import connections, etcd_errors
from agent.store.certificates import Tls
from agent.store.etcd_protocol import Stub, message

_T = TypeVar("_T")

_ListRequest = message("MemberListRequest")
_AddRequest = message("MemberAddRequest")
_RemoveRequest = message("MemberRemoveRequest")
_StatusRequest = message("StatusRequest")
_ANSWER_WITHIN_S = 2.0
_FIRST_TERM = 1
"""Of raft, in which a cluster begins: each election is in a later one. etcd 3.6 answers before the first, too."""


@dataclass(frozen=True)
class EtcdMember:
    """One of a cluster."""

    id: int
    name: str
    """Empty: it has not started yet."""
    peer_urls: tuple[str, ...]


class EtcdCluster:
    """A cluster, asked at any of its endpoints: the first that answers."""

    def __init__(self, endpoints: Sequence[str], tls: Tls | None = None) -> None:
        self._links = [connections.EtcdConnection(endpoint, tls) for endpoint in endpoints]

    def close(self) -> None:
        """End the connections."""
        for link in self._links:
            link.channel.close()

    def members(self) -> tuple[EtcdMember, ...]:
        """All of them, as an endpoint knows them: it may be behind."""
        return _members(self._ask(lambda channel, how: Stub(channel, "Cluster").MemberList(_ListRequest(), **how)))

    def add(self, peer_url: str) -> tuple[EtcdMember, ...]:
        """Put one in, which is to be started next; return all."""
        request = _AddRequest(peerURLs=[peer_url])
        return _members(self._ask(lambda channel, how: Stub(channel, "Cluster").MemberAdd(request, **how)))

    def remove(self, member: EtcdMember) -> None:
        """Take one out. It can never come back: only another in its place."""
        request = _RemoveRequest(ID=member.id)
        self._ask(lambda channel, how: Stub(channel, "Cluster").MemberRemove(request, **how))

    def has_leader(self) -> bool | None:
        """Whether the endpoint that answers knows one: most members hear each other then. None: it never had one."""
        reply = self._ask(lambda channel, how: Stub(channel, "Maintenance").Status(_StatusRequest(), **how))
        return True if reply.leader else False if reply.raftTerm > _FIRST_TERM else None

    def _ask(self, call: Callable[[grpc.Channel, dict[str, Any]], _T]) -> _T:
        why = "there is none to ask"
        for link in self._links:
            try:
                return call(link.channel, {"timeout": _ANSWER_WITHIN_S})
            except grpc.RpcError as error:
                why = f"etcd at {link.endpoint}: {etcd_errors.details_of(error)}"
        raise StoreUnavailable(why)


def _members(reply: Any) -> tuple[EtcdMember, ...]:  # noqa: ANN401 - a message of etcd's
    return tuple(EtcdMember(each.ID, each.name, tuple(each.peerURLs)) for each in reply.members)
