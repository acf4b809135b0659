"""Reasons made by hand, for tests that are about something else."""

from __future__ import annotations

from agent.core.reasons import FailedWorker, Finished, NodesLost, Requested, WorkersFailed

LOST = NodesLost(node_ids=("x",))
"""Of a group or a handoff: `lost x`."""
FINISHED = Finished(ranks=2, group=1)
"""Of a result: `all 2 ranks finished in group 1`."""
NEW_NP = Requested(what="np", np="2")


def lost(*node_ids: str) -> NodesLost:
    return NodesLost(node_ids=node_ids)


def left(*node_ids: str) -> Requested:
    return Requested(what="leave", node_ids=node_ids)


def failed(node_id: str, rank: int, **told: object) -> WorkersFailed:
    return WorkersFailed(first=FailedWorker(node_id=node_id, rank=rank, **told))  # type: ignore[arg-type] - its fields
