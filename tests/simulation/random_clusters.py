"""Random clusters: faults for a number of steps; then, once they end, the job trains again and finishes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

from simulation.cluster import Cluster
from simulation.faults import Faults

from agent.core.reasons import Requested
from agent.errors import EXIT_UNSAVED
from agent.store import listed_members
from trainer_runtime.contract import EXIT_NO_RESTART

_LIVE_S = 180.0
"""A handoff that was not completed is requested again after 120 s."""
_ALL_LEAVE_EVERY = 8
"""In one of so many clusters all agents are asked to leave, before new ones start."""
_STOPPED_EVERY = 16
"""In one of so many clusters an operator stops the job while things go wrong; in as many its script asks for it."""
_RECORD_S = 5.0
"""An incident is recorded so much later at the latest: answers may be lost, and leaders may leave with the job."""


@dataclass(frozen=True)
class Size:
    """How large a cluster is: by default as small as shows most races."""

    names: tuple[str, ...] = ("a", "b", "c", "d", "e")
    first: int = 3
    """So many nodes begin, and are there at the end."""
    nps: tuple[tuple[int, int], ...] = ((1, 4), (2, 2), (3, 3), (1, 2))
    """What an operator asks for; the job begins with one of the first two, and ends with the second."""

    @classmethod
    def of(cls, nodes: int) -> Size:
        """A size in the same proportions, with so many nodes."""
        names = tuple(f"n{number:0{len(str(nodes))}}" for number in range(nodes))
        half, most = nodes // 2, nodes * 4 // 5
        return cls(names, nodes * 3 // 5, ((half // 2, most), (half, half), (nodes * 3 // 5,) * 2, (half // 2, half)))


def play(seed: int, *, steps: int, is_traced: bool = False, size: Size | None = None) -> Cluster:
    """A cluster's whole life. A failure is an AssertionError, to which its seed and log are added."""
    size = size or Size()
    cluster = Cluster(seed, np=size.nps[0] if seed % 2 else size.nps[1], loss=(0.0, 0.0, 0.3, 0.1)[seed % 4])
    cluster.is_traced = is_traced
    listed_from, listed_members.LISTED_FROM = listed_members.LISTED_FROM, 2 if seed % 3 == 0 else 64
    try:
        _play(cluster, steps, size)
    except AssertionError as error:
        error.add_note(f"seed {seed}, steps {steps}, {len(size.names)} nodes:\n{cluster.log_text()}")
        raise
    finally:
        listed_members.LISTED_FROM = listed_from
    return cluster


def _play(cluster: Cluster, steps: int, size: Size) -> None:
    chance, training = cluster.random, cluster.training
    cluster.drop = chance.choice((0.0, 0.02))
    training.copies_every = chance.choice((0, 1, 2))
    training.saves_every = chance.choice((0, 2, 4))
    training.speed_s = 1.0
    training.keep = chance.choice((1, 1, 2))
    training.lost_parts = chance.choice((0.0, 0.3))
    training.closes_every = chance.choice((0, 0, 3, 4))
    training.goal = chance.choice((None, None, None, 20))
    training.hands_off = training.saves_every > 0 and chance.random() < 0.8
    training.is_local = chance.random() < 0.15
    training.has_large_parts = chance.random() < 0.3
    training.moves = training.hands_off and chance.random() < 0.5
    training.misses = chance.choice((0.0, 0.3))
    training.tells_pace = chance.random() < 0.5
    training.hang_limit_s = chance.choice((0.0, 1.5, 6.0))
    cluster.network.are_clocks_compared = chance.random() < 0.7
    faults = Faults(cluster, size.names, size.nps)
    domains = chance.choice(("", "", "xy", "xxyy"))
    for name, domain in zip(size.names[: size.first], cycle(domains or " "), strict=False):
        cluster.start(name, domain=domain.strip())
    cluster.run(chance.uniform(0.0, 3.0))
    for _ in range(steps):
        if chance.random() < 0.12:
            faults.befall()
        cluster.run(chance.uniform(0.0, 0.25))
    if cluster.seed % _ALL_LEAVE_EVERY == 0:
        faults.ask_all_to_leave()
    if cluster.seed % _STOPPED_EVERY == 1:
        _stop(cluster, faults)
    elif cluster.seed % _STOPPED_EVERY == 2:
        _fail(cluster, size, faults)
    else:
        faults.end()
        _live(cluster, size)


def _stop(cluster: Cluster, faults: Faults) -> None:
    """The operator ends the job at any moment, and more goes wrong meanwhile."""
    faults.let_operator(cluster.stop_job)
    for _ in range(20):
        if cluster.random.random() < 0.2:
            faults.befall()
        cluster.run(cluster.random.uniform(0.0, 0.25))
    faults.end()
    cluster.run(6.0)  # those whose leases ran out unseen are noticed
    cluster.stop_job()  # again: an old backup may not have the order
    cluster.run_until(lambda: all(agent.is_gone for agent in cluster.agents), within_s=_LIVE_S)


def _fail(cluster: Cluster, size: Size, faults: Faults) -> None:
    """A rank asks for no restart at any moment, and more goes wrong meanwhile."""
    _ask_for_no_restart(cluster)
    for _ in range(20):
        if cluster.random.random() < 0.2:
            faults.befall()
        cluster.run(cluster.random.uniform(0.0, 0.25))
    faults.end()
    if cluster.invariants.result is None:
        _bring_back(cluster, size)
    until = cluster.now + _LIVE_S
    while cluster.invariants.result is None:  # a newcomer may have asked that the others can do without
        assert cluster.now < until
        _ask_for_no_restart(cluster)
        cluster.run(6.0)
    cluster.run_until(lambda: all(agent.is_gone for agent in cluster.agents), within_s=_LIVE_S)


def _ask_for_no_restart(cluster: Cluster) -> None:
    at_work = [agent for agent in cluster.agents if not agent.is_gone and agent.ranks.is_at_work(cluster.max_group)]
    if at_work:
        cluster.random.choice(at_work).ranks.exit(0, EXIT_NO_RESTART, "")


def _live(cluster: Cluster, size: Size) -> None:
    """Nothing is wrong any more: the job trains, is left alone, and finishes."""
    _bring_back(cluster, size)
    cluster.training.goal = None if cluster.invariants.result is None else cluster.training.goal
    cluster.run_until(lambda: cluster.invariants.result is not None or _trains(cluster, size), within_s=_LIVE_S)
    if cluster.invariants.result is None:
        number = cluster.max_group
        cluster.run(6.0)
        assert cluster.max_group == number, "and then it is left alone"
        _are_recorded(cluster, cluster.now - _RECORD_S)
        _end(cluster)
    cluster.run_until(lambda: all(agent.exit for agent in cluster.agents), within_s=_LIVE_S)
    result = cluster.invariants.result
    assert result is not None
    assert result.succeeded or cluster.is_stopped, result
    is_unsaved = isinstance(result.reason, Requested) and result.reason.saved is not None
    assert result.exit_code == (EXIT_UNSAVED if is_unsaved else 0), result
    _are_recorded(cluster, cluster.invariants.ended_at - _RECORD_S)


def _bring_back(cluster: Cluster, size: Size) -> None:
    """Start the nodes that the job needs."""
    cluster.run_until(lambda: _all_stay(cluster))
    cluster.run(6.0)  # failures of before are reported, and nodes left out because of them
    # By the ids that they have got: an agent that had to step aside does not stand for the node of its name, whose own
    # disk may have the checkpoint.
    left_out = cluster.group.left_out if cluster.group is not None else ()
    for agent in [each for each in cluster.agents if each.state.identity in left_out and not each.is_gone]:
        cluster.kill(agent)  # whoever has mended the node starts it again
    here = {agent.state.node_id for agent in cluster.agents if not agent.is_gone}
    committed = cluster.checkpoint
    disk = committed.node if committed is not None else ""
    wanted = size.names[: size.first]
    for name in (*wanted, *([disk] if disk and disk not in wanted else [])):
        if name not in here:
            cluster.start(name)
    cluster.run(6.0)  # those whose leases ran out unseen are noticed
    cluster.scale(size.nps[1])


def _are_recorded(cluster: Cluster, until: float) -> None:
    """Each change of group that was over by then has its incident."""
    missing = cluster.invariants.incidents.missing(until)
    assert not missing, missing


def _end(cluster: Cluster) -> None:
    """The training reaches its goal, or the operator ends it."""
    if cluster.random.random() < 0.2:
        cluster.stop_job()
    else:
        cluster.training.goal = 0


def _all_stay(cluster: Cluster) -> bool:
    """Whether everybody has a place, nobody was asked to leave it, and none has to give way to another of its id."""
    living = [agent for agent in cluster.agents if not agent.is_gone]
    here = [agent.state for agent in living]
    leaving = cluster.spec.drained if cluster.spec is not None else ()
    have_places = all(
        state.registered is not None and state.drain_until is None and state.identity not in leaving for state in here
    )
    is_nobody_leaving = not any(agent.is_asked_to_stop for agent in living)
    return have_places and is_nobody_leaving and len({state.node_id for state in here}) == len(here)


def _trains(cluster: Cluster, size: Size) -> bool:
    asked_after = cluster.spec.restart_after if cluster.spec is not None else 0  # an operator's, which may be due yet
    return len(cluster.training_nodes) == size.nps[1][0] and cluster.is_begun and asked_after < cluster.max_group
