"""The status of a parameter-server job, as a table for people and as JSON for programs."""

from __future__ import annotations

from typing import Literal

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from agent.roles.model import RoleView
from agent.roles.plan import RoleProcess
from trainer_runtime.shard_map import ShardServer

State = Literal["running", "away", "done", "failed", "waiting"]


class RoleProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the job."""

    name: str
    """Kind and index: `server-0`, `worker-3`, `heter-1`."""
    endpoint: str
    state: State
    """Away: its machine's agent is not registered. Waiting: it was never started."""
    restarts: int
    reason: str
    """Why it failed."""
    shards: list[int]
    """Shards whose primary is this server."""
    copies: list[int]
    """Shards whose replica is this server."""


class RoleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `elastic-agent status --json` prints for a parameter-server job."""

    job_id: str
    run: str
    state: Literal["training", "waiting", "succeeded", "failed"]
    reason: str
    exit_code: int | None
    replicas: int
    """Replicas that each shard is to have."""
    map: int
    """Number of the current map of shards; 0: there is none."""
    processes: list[RoleProcessStatus]


def role_status(job_id: str, view: RoleView) -> RoleStatus:
    """Summarise a view that has a spec."""
    assert view.spec is not None  # noqa: S101 - a job without a spec is not found in the first place
    plan, result = view.spec.plan(), view.result
    processes = [_process(view, process) for process in plan.processes]
    away = [process.name for process in processes if process.state in {"away", "waiting"}]
    if result is not None:
        state: Literal["training", "waiting", "succeeded", "failed"] = "failed" if result.code else "succeeded"
        reason = result.sentence
    else:
        state = "training" if any(process.state == "running" for process in processes) else "waiting"
        reason = f"not there: {', '.join(away)}" if away else "all are there"
    return RoleStatus(
        job_id=job_id,
        run=view.spec.run,
        state=state,
        reason=reason,
        exit_code=result.code if result is not None else None,
        replicas=plan.replicas,
        map=view.map.number if view.map is not None else 0,
        processes=processes,
    )


def render(status: RoleStatus) -> list[RenderableType]:
    """Return a line about the job, and the table of its processes."""
    first = Text.assemble("job ", (status.job_id, "bold"), f"  {status.state}: {status.reason}")
    table = Table("process", "address", "", "restarts", "shards", "copies")
    for process in status.processes:
        state = f"{process.state}: {process.reason}" if process.reason else process.state
        numbers = [" ".join(map(str, shards)) for shards in (process.shards, process.copies)]
        table.add_row(*map(Text, (process.name, process.endpoint, state, str(process.restarts), *numbers)))
    return [first, table]


def _process(view: RoleView, process: RoleProcess) -> RoleProcessStatus:
    record = view.processes.get(process.name)
    places = view.map.places if view.map is not None and process.kind == "server" else ()
    holder = ShardServer(process.index, record.incarnation if record is not None else 0)
    return RoleProcessStatus(
        name=process.name,
        endpoint=process.endpoint,
        state=_state(view, process),
        restarts=max(0, record.incarnation - 1) if record is not None else 0,
        reason=record.reason if record is not None else "",
        shards=[shard for shard, place in enumerate(places) if place.primary == holder],
        copies=[shard for shard, place in enumerate(places) if place.replica == holder],
    )


def _state(view: RoleView, process: RoleProcess) -> State:
    record = view.processes.get(process.name)
    if record is None:
        return "waiting"
    if record.code is not None:
        return "failed" if record.code else "done"
    return "running" if process.machine in {node.machine for node in view.nodes} else "away"
