"""What a shell may suggest: ids of jobs and nodes. Silent and quick, whatever is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent.cli.options import read_server
from agent.errors import ElasticAgentError
from agent.local_etcd.known_jobs import known_jobs
from agent.operate.jobs import all_jobs, connect, opened, read_view
from agent.operate.target import Target, read_target

_TIMEOUT_S = 1.0


def job_ids(options: dict[str, Any]) -> list[str]:
    """Of the jobs that are there, and of those on this machine, where etcd is not named."""
    here = [] if options["elastic_server"] else [each.job.job_id for each in known_jobs()]
    try:
        store = connect(Target(read_server(options), None, _TIMEOUT_S))
        try:
            return list(dict.fromkeys([*here, *all_jobs(store)]))
        finally:
            store.close()
    except ElasticAgentError:
        return here


def node_ids(options: dict[str, Any]) -> list[str]:
    """Of a job's nodes, and of those that are excluded."""
    try:
        target = replace(read_target(options, is_silent=True), timeout_s=_TIMEOUT_S)
        with opened(target, only_live=True) as (store, keys):
            view = read_view(store, keys)
    except ElasticAgentError:
        return []
    excluded = view.spec.value.excluded if view.spec is not None else ()
    return sorted({*excluded, *(node.value.node_id for node in view.nodes)})
