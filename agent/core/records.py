"""What all records in etcd have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Literal, TypeVar

import msgspec

from agent.core.bounds import NodeId


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all records: the version of the format."""

    v: Literal[1] = 1


class Identity(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, cache_hash=True, gc=False):
    """(node_id, incarnation)."""

    node_id: NodeId
    incarnation: str


class MemberRecord(Record, frozen=True, kw_only=True, dict=True):
    """Base of the records about one member."""

    node_id: NodeId
    incarnation: str

    @cached_property
    def identity(self) -> Identity:
        """The member's identity: the same node id with another incarnation is another member."""
        return Identity(self.node_id, self.incarnation)


T = TypeVar("T")


@dataclass(frozen=True)
class Stored(Generic[T]):
    """A record, with its revisions and its lease in etcd."""

    value: T
    create_revision: int
    mod_revision: int
    lease_id: int = 0
    """0: none."""
