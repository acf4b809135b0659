"""What a shell may suggest: ids of jobs and nodes. Silent and quick, whatever is wrong."""

from __future__ import annotations

from agent.errors import ElasticAgentError
from agent.operate.jobs import all_jobs, connect, opened, read_view
from agent.operate.target import Target
from agent.store.access import Access

_TIMEOUT_S = 1.0


def job_ids(server: Access) -> list[str]:
    """Of the jobs that are there."""
    try:
        store = connect(Target(server, None, _TIMEOUT_S))
        try:
            return list(all_jobs(store))
        finally:
            store.close()
    except ElasticAgentError:
        return []


def node_ids(server: Access, job_id: str | None) -> list[str]:
    """Of a job's nodes, and of those that are excluded."""
    try:
        with opened(Target(server, job_id, _TIMEOUT_S), only_live=True) as (store, keys):
            view = read_view(store, keys)
    except ElasticAgentError:
        return []
    excluded = view.spec.value.excluded if view.spec is not None else ()
    return sorted({*excluded, *(node.value.node_id for node in view.nodes)})
