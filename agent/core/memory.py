"""What agents remember of a job, so that etcd may lose its data (wiped, or restored from an old backup).

Each agent keeps the newest spec and group that it has seen. When etcd shows less than that, data was lost. The agent
then says what it knows in its own node record, and its workers go on by what it remembers, not by what etcd shows. The
leader waits for one lease length, so that all who know something can say so, takes the newest of each, and writes both
in one transaction: the running group as it was if all of its members are back, else the one that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.core.model import ClusterView, Known, Node, Stored


def has_lost_data(known: Known | None, view: ClusterView) -> bool:
    """Whether etcd shows less than was seen before. A job that was started over has a higher group number."""
    if known is None:
        return False
    number = view.group.value.number if view.group is not None else 0
    if view.spec is None or number < known.number:
        return True
    return view.spec.value.run == known.spec.run and view.spec.value.revision < known.spec.revision


def remember(known: Known | None, view: ClusterView) -> Known | None:
    """What is known once this view has been seen."""
    if view.spec is None or has_lost_data(known, view):
        return known
    return Known(spec=view.spec.value, group=view.group.value if view.group is not None else None)


def newest(nodes: Sequence[Stored[Node]]) -> Known | None:
    """The newest of what these nodes remember; None if none of them misses anything."""
    told = [node.value.known for node in nodes if node.value.known is not None]
    if not told:
        return None
    group = max(told, key=lambda known: known.number)
    same_run = [known.spec for known in told if known.spec.run == group.spec.run]
    return Known(spec=max(same_run, key=lambda spec: spec.revision), group=group.group)
