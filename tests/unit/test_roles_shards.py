"""Which server has which shard when servers come and go: nothing that was answered is lost while one copy is left."""

from __future__ import annotations

import pytest

from agent.roles.shards import ReplicaSaid, first_map, heard, next_map
from trainer_runtime.shard_map import Holder, Place, ShardMap, map_of


def whole(servers: int) -> ShardMap:
    """Of servers that have all had their copies."""
    made = first_map(servers, replicas=1)
    for shard in range(servers):
        made = heard(made, ReplicaSaid(made.number, shard, is_whole=True))
    return ShardMap(1, made.places)


def test_a_map_is_told_in_json() -> None:
    h = Holder
    made = ShardMap(3, (Place(1, h(0, 1)), Place(2, h(1, 2), h(0, 1)), Place(1, h(2, 1), None, h(1, 2))))
    assert map_of(made.to_json()) == made
    with pytest.raises(ValueError, match="no map of shards"):
        map_of({"number": 1, "places": [[None]]})


def test_while_all_are_there_nothing_changes() -> None:
    made = whole(3)
    assert made.places[2] == Place(1, Holder(2, 1), Holder(0, 1))
    assert next_map(made, {0: 1, 1: 1, 2: 1}, replicas=1) is made


def test_a_server_alone_has_no_replica() -> None:
    assert first_map(1, replicas=1).places == (Place(1, Holder(0, 1)),)
    assert next_map(first_map(1, replicas=1), {0: 1}, replicas=1).number == 1


def test_a_lost_primary_is_followed_by_its_replica_and_another_joins() -> None:
    made = next_map(whole(3), {1: 1, 2: 1}, replicas=1)
    assert made.number == 2
    assert made.places[0] == Place(1, Holder(1, 1), None, Holder(2, 1))
    assert made.places[2] == Place(1, Holder(2, 1), None, Holder(1, 1)), "it has lost its replica"
    assert made.places[1] == Place(1, Holder(1, 1), Holder(2, 1))


def test_a_server_that_is_started_again_joins() -> None:
    made = next_map(whole(2), {0: 2, 1: 1}, replicas=1)
    assert made.places[0] == Place(1, Holder(1, 1), None, Holder(0, 2))
    made = heard(made, ReplicaSaid(made.number, 0, is_whole=True))
    assert made.places[0] == Place(1, Holder(1, 1), Holder(0, 2))


def test_a_copy_that_is_not_whole_is_never_a_primary() -> None:
    made = next_map(whole(2), {0: 2, 1: 1}, replicas=1)
    made = next_map(made, {0: 2, 1: 2}, replicas=1)
    assert made.places[0].primary == Holder(0, 2), "its own server, with what it kept on disk"
    assert made.places[0].era == made.number, "so that nobody takes the part of a copy that it has for the whole"
    assert made.places[0].replica is None


def test_without_replicas_a_shard_waits_for_its_own_server() -> None:
    made = next_map(first_map(2, replicas=0), {1: 1}, replicas=0)
    assert made.places[0].primary == Holder(0, 1)
    made = next_map(made, {0: 2, 1: 1}, replicas=0)
    assert made.places[0] == Place(made.number, Holder(0, 2))


def test_what_is_said_of_an_older_map_does_not_count() -> None:
    made = next_map(whole(2), {0: 2, 1: 1}, replicas=1)
    assert heard(made, ReplicaSaid(1, 0, is_whole=True)) is made
    assert heard(made, ReplicaSaid(1, 0, is_whole=False)) is made


def test_a_replica_that_does_not_answer_joins_anew() -> None:
    made = heard(whole(2), ReplicaSaid(1, 1, is_whole=False))
    assert made.places[1] == Place(1, Holder(1, 1), None, Holder(0, 1))


def test_what_is_said_of_no_shard_or_of_what_is_known_changes_nothing() -> None:
    made = whole(2)
    for said in (
        ReplicaSaid(1, 2, is_whole=True),
        ReplicaSaid(1, -1, is_whole=False),
        ReplicaSaid(1, 0, is_whole=True),
    ):
        assert heard(made, said) is made


def test_who_may_be_lost_keeps_what_it_has_and_gets_no_more() -> None:
    made = next_map(whole(3), {0: 2, 1: 1, 2: 1}, {0, 1}, replicas=1)
    assert made.places[1] == Place(1, Holder(1, 1), Holder(2, 1))
    assert made.places[0] == Place(1, Holder(1, 1), None, Holder(0, 2))
    assert made.places[2] == Place(1, Holder(2, 1), None, Holder(0, 2))


def test_copies_are_spread_over_the_servers() -> None:
    """The first one after the shard's own server that is there is to have it."""
    alone = ShardMap(1, tuple(Place(1, Holder(shard, 1)) for shard in range(3)))
    made = next_map(alone, {0: 1, 1: 1, 2: 1}, replicas=1)
    assert [place.joining for place in made.places] == [Holder(1, 1), Holder(2, 1), Holder(0, 1)]


def test_nobody_joins_where_there_is_nobody_to_give_a_copy() -> None:
    alone = ShardMap(1, (Place(1, Holder(0, 1)), Place(1, Holder(1, 1), Holder(2, 1)), Place(1, Holder(2, 1))))
    made = next_map(alone, {1: 1, 2: 1}, replicas=1)
    assert made.places[0] == Place(1, Holder(0, 1))
