"""What a fault is: it strikes, and yields what is to be waited for; then it makes good what it did, or strikes again.

`play.py` waits, measures, and checks. The faults themselves: `faults/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from chaos.cluster import Cluster

UNDISTURBED_S = 2.0
"""No pause is longer where the others have no part in it, on a machine that has nothing else to do."""
KILLED_S = 2.0
"""Connections close at once."""
COLD_S = 20.0
"""Nodes begin from nothing, Python and torch as well."""


@dataclass(frozen=True)
class Recovery:
    """Wait until a group that is newer than those before the strike has finished a step."""

    world: int | None = None
    """So many ranks; None: any number."""
    soon_s: float = KILLED_S
    """The longest pause that is no fault of ours."""
    within_s: float = 60.0


@dataclass(frozen=True)
class Hold:
    """Keep it like this for so long, while the others train on."""

    seconds: float
    soon_s: float = UNDISTURBED_S
    """As in `Recovery`."""


@dataclass(frozen=True)
class Undisturbed:
    """Keep it like this for so long, while no process of the group changes and steps go on being made."""

    seconds: float


Wait = Recovery | Hold | Undisturbed
Strike = Callable[[Cluster, Random], Iterator[Wait]]


@dataclass(frozen=True)
class Fault:
    """One kind."""

    name: str
    title: str
    strike: Strike
    most_lost: int
    """Steps that it may cost."""
    most_groups: int
    """That may come of it."""
    failures: int
    """Of its workers, that it may cost."""
    is_damage: bool
    """The committed checkpoint cannot be read."""


SAVE_EVERY = 20
"""Steps. What a copy in memory costs where all of this shares a machine says how often one is taken, so a crash that
leaves a survivor costs a step or some; never more than the newest checkpoint does."""
SILENT_S = 6.0
"""The node is silent: `--detect_within` and a second."""
PAST_ITS_LEASE_S = 8.0
LONG_S = 15.0


def fault(
    name: str,
    title: str,
    *,
    most_lost: int = SAVE_EVERY,
    most_groups: int = 2,
    failures: int = 0,
    is_damage: bool = False,
) -> Callable[[Strike], Fault]:
    """Make a fault of how it strikes. A node that goes and comes back makes two groups."""
    return lambda strike: Fault(name, title, strike, most_lost, most_groups, failures, is_damage)


def some(cluster: Cluster, chance: Random, count: int) -> list[str]:
    """Nodes that are drawn by rank, so that a seed strikes the same again: names of containers are drawn anew."""
    return chance.sample([host for _, (host, _) in sorted(cluster.ledger.pids().items())], count)


def one(cluster: Cluster, chance: Random) -> str:
    """A node, drawn likewise."""
    return some(cluster, chance, 1)[0]
