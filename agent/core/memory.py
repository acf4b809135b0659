"""What agents remember of a job, so that etcd may lose its data (wiped, or restored from an old backup).

Each agent keeps the newest spec and group that it has seen. When etcd shows less than that, data was lost. The agent
then says what it knows in its own node record, and its workers go on by what it remembers, not by what etcd shows. The
leader waits for one lease length, so that all who know something can say so, takes the newest of each, and writes both
in one transaction: the running group as it was if all of its members are back, else the one that follows it.
"""

from __future__ import annotations

from agent.core.model import ClusterView, Known


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


def lost_data(view: ClusterView) -> Known | None:
    """The newest of what the nodes remember; None if etcd shows all of it (again)."""
    told = [node.value.known for node in view.nodes if node.value.known is not None]
    if not told:
        return None
    group = max(told, key=lambda known: known.number)
    same_run = [known.spec for known in told if known.spec.run == group.spec.run]
    known = Known(spec=max(same_run, key=lambda spec: spec.revision), group=group.group)
    # Nodes go on telling for a moment after it was written: writing again could change a record under its number.
    return known if has_lost_data(known, view) else None
