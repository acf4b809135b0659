"""Parts of snapshots on a link: how they are verified, and which are kept."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.saved_states import StateId
from agent.links.frames import LINK_PART_BYTES, LinkBroken
from agent.links.handshake import LinkSession, ProofRefused, Role
from agent.links.snapshot_parts import SnapshotPart, add_newest, decode_part, encode_part

SESSION = LinkSession(b"what the agents of a job know", b"n" * 64)


def part(step: int, *, group: int = 1, rank: int = 0, data: bytes = b"random states") -> SnapshotPart:
    copy = StateId(run="r", group=group, step=step)
    return SnapshotPart(copy=copy, world_size=2, rank=rank, checksum=2**64 - 1, data=data)


def test_a_part_arrives_as_it_was() -> None:
    assert decode_part(encode_part(part(5), SESSION), SESSION) == part(5)


def test_the_largest_part_fits_into_a_frame() -> None:
    large = msgspec.structs.replace(
        part(2**63, data=bytes(LINK_PART_BYTES)),
        copy=StateId(run="r" * 64, group=2**63, step=2**63),
        world_size=2**63,
    )
    assert len(encode_part(large, SESSION)) < LINK_PART_BYTES + 1024


@pytest.mark.parametrize("other", [LinkSession(b"a guess", b"n" * 64), LinkSession(SESSION.secret, b"m" * 64)])
def test_a_part_of_another_connection_is_refused(other: LinkSession) -> None:
    with pytest.raises(ProofRefused):
        decode_part(encode_part(part(5), other), SESSION)


@pytest.mark.parametrize("role", ["dial", "read", "accept", "goodbye"])
def test_a_proof_of_another_role_is_refused(role: Role) -> None:
    payload = SESSION.prove(role.encode(), encode_part(part(5), SESSION)[32:])  # type: ignore[attr-defined,arg-type]
    with pytest.raises(ProofRefused):
        decode_part(payload, SESSION)


def test_invalid_text_breaks_the_connection() -> None:
    words = encode_part(part(5), SESSION)[32:].replace(b"run", b"r\x80n")
    with pytest.raises(LinkBroken):
        decode_part(SESSION.prove(b"keep", words), SESSION)


@settings(deadline=None)
@given(words=st.binary(max_size=100))
def test_an_invalid_part_breaks_the_connection(words: bytes) -> None:
    with pytest.raises(LinkBroken):
        decode_part(SESSION.prove(b"keep", words), SESSION)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_its_world_breaks_the_connection(rank: int) -> None:
    with pytest.raises(LinkBroken):
        decode_part(encode_part(part(5, rank=rank), SESSION), SESSION)


@settings(deadline=None)
@given(order=st.permutations([(1, 5), (1, 9), (2, 3), (2, 4)]))
def test_the_newest_two_are_kept_in_whichever_order_they_come(order: list[tuple[int, int]]) -> None:
    kept: tuple[SnapshotPart, ...] = ()
    for group, step in order:
        kept = add_newest(kept, part(step, group=group))
    assert kept == (part(3, group=2), part(4, group=2))


def test_a_repeated_part_is_stored_once() -> None:
    assert add_newest(add_newest((), part(5)), part(5)) == (part(5),)
