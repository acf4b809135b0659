"""Which server has which shard when servers come and go: nothing that was answered is lost while one copy is left."""

from __future__ import annotations

import pytest

from agent.roles.shards import ReplicaReport, apply_report, first_map, next_map
from trainer_runtime.shard_map import ShardMap, ShardPlace, ShardServer, map_of


def whole(servers: int) -> ShardMap:
    """Of servers that have all had their copies."""
    made = first_map(servers, replicas=1)
    for shard in range(servers):
        made = apply_report(made, ReplicaReport(made.number, shard, is_complete=True))
    return ShardMap(1, made.places)


def test_a_map_is_sent_as_json() -> None:
    h = ShardServer
    made = ShardMap(3, (ShardPlace(1, h(0, 1)), ShardPlace(2, h(1, 2), h(0, 1)), ShardPlace(1, h(2, 1), None, h(1, 2))))
    assert map_of(made.to_json()) == made
    with pytest.raises(ValueError, match="wanted a map of shards"):
        map_of({"number": 1, "places": [[None]]})


def test_while_all_are_there_nothing_changes() -> None:
    made = whole(3)
    assert made.places[2] == ShardPlace(1, ShardServer(2, 1), ShardServer(0, 1))
    assert next_map(made, {0: 1, 1: 1, 2: 1}, replicas=1) is made


def test_a_server_alone_has_no_replica() -> None:
    assert first_map(1, replicas=1).places == (ShardPlace(1, ShardServer(0, 1)),)
    assert next_map(first_map(1, replicas=1), {0: 1}, replicas=1).number == 1


def test_a_lost_primary_is_followed_by_its_replica_and_another_joins() -> None:
    made = next_map(whole(3), {1: 1, 2: 1}, replicas=1)
    assert made.number == 2
    assert made.places[0] == ShardPlace(1, ShardServer(1, 1), None, ShardServer(2, 1))
    assert made.places[2] == ShardPlace(1, ShardServer(2, 1), None, ShardServer(1, 1)), "it has lost its replica"
    assert made.places[1] == ShardPlace(1, ShardServer(1, 1), ShardServer(2, 1))


def test_a_server_that_is_started_again_joins() -> None:
    made = next_map(whole(2), {0: 2, 1: 1}, replicas=1)
    assert made.places[0] == ShardPlace(1, ShardServer(1, 1), None, ShardServer(0, 2))
    made = apply_report(made, ReplicaReport(made.number, 0, is_complete=True))
    assert made.places[0] == ShardPlace(1, ShardServer(1, 1), ShardServer(0, 2))


def test_a_copy_that_is_not_whole_is_never_a_primary() -> None:
    made = next_map(whole(2), {0: 2, 1: 1}, replicas=1)
    made = next_map(made, {0: 2, 1: 2}, replicas=1)
    assert made.places[0].primary == ShardServer(0, 2), "its own server, with what it kept on disk"
    assert made.places[0].era == made.number, "so that nobody takes the part of a copy that it has for the whole"
    assert made.places[0].replica is None


def test_without_replicas_a_shard_waits_for_its_own_server() -> None:
    made = next_map(first_map(2, replicas=0), {1: 1}, replicas=0)
    assert made.places[0].primary == ShardServer(0, 1)
    made = next_map(made, {0: 2, 1: 1}, replicas=0)
    assert made.places[0] == ShardPlace(made.number, ShardServer(0, 2))


def test_a_report_on_an_older_map_does_not_count() -> None:
    made = next_map(whole(2), {0: 2, 1: 1}, replicas=1)
    assert apply_report(made, ReplicaReport(1, 0, is_complete=True)) is made
    assert apply_report(made, ReplicaReport(1, 0, is_complete=False)) is made


def test_a_replica_that_does_not_answer_joins_anew() -> None:
    made = apply_report(whole(2), ReplicaReport(1, 1, is_complete=False))
    assert made.places[1] == ShardPlace(1, ShardServer(1, 1), None, ShardServer(0, 1))


def test_a_report_on_no_shard_or_on_a_known_fact_changes_nothing() -> None:
    made = whole(2)
    for said in (
        ReplicaReport(1, 2, is_complete=True),
        ReplicaReport(1, -1, is_complete=False),
        ReplicaReport(1, 0, is_complete=True),
    ):
        assert apply_report(made, said) is made


def test_a_node_that_may_be_lost_keeps_its_shards_and_gets_no_more() -> None:
    made = next_map(whole(3), {0: 2, 1: 1, 2: 1}, {0, 1}, replicas=1)
    assert made.places[1] == ShardPlace(1, ShardServer(1, 1), ShardServer(2, 1))
    assert made.places[0] == ShardPlace(1, ShardServer(1, 1), None, ShardServer(0, 2))
    assert made.places[2] == ShardPlace(1, ShardServer(2, 1), None, ShardServer(0, 2))


def test_copies_are_spread_over_the_servers() -> None:
    """The first one after the shard's own server that is there is to have it."""
    alone = ShardMap(1, tuple(ShardPlace(1, ShardServer(shard, 1)) for shard in range(3)))
    made = next_map(alone, {0: 1, 1: 1, 2: 1}, replicas=1)
    assert [place.joining for place in made.places] == [ShardServer(1, 1), ShardServer(2, 1), ShardServer(0, 1)]


def test_nobody_joins_where_there_is_nobody_to_give_a_copy() -> None:
    alone = ShardMap(
        1,
        (
            ShardPlace(1, ShardServer(0, 1)),
            ShardPlace(1, ShardServer(1, 1), ShardServer(2, 1)),
            ShardPlace(1, ShardServer(2, 1)),
        ),
    )
    made = next_map(alone, {1: 1, 2: 1}, replicas=1)
    assert made.places[0] == ShardPlace(1, ShardServer(0, 1))
