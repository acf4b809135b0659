"""The state of a parameter-server job in one look, for people and for programs."""

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
    """As `server-0`, `worker-3`, `heter-1`."""
    endpoint: str
    state: State
    """Away: its machine is not there. Waiting: none was ever started."""
    restarts: int
    reason: str
    """Why it failed."""
    shards: list[int]
    """That workers reach at this server."""
    copies: list[int]
    """Shards of which this server has a whole copy."""


class RoleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `elastic-agent status --json` prints of a job with servers."""

    job_id: str
    run: str
    state: Literal["training", "waiting", "succeeded", "failed"]
    reason: str
    exit_code: int | None
    replicas: int
    """Copies that each shard is to have."""
    map: int
    """Number of the map of shards."""
    posts: list[RoleProcessStatus]


def role_status(job_id: str, view: RoleView) -> RoleStatus:
    """Summarise a view that has a spec."""
    assert view.spec is not None  # noqa: S101 - a job without one is not found in the first place
    plan, result = view.spec.plan(), view.result
    posts = [_post(view, post) for post in plan.posts]
    away = [post.name for post in posts if post.state in {"away", "waiting"}]
    if result is not None:
        state: Literal["training", "waiting", "succeeded", "failed"] = "failed" if result.code else "succeeded"
        reason = result.sentence
    else:
        state = "training" if any(post.state == "running" for post in posts) else "waiting"
        reason = f"not there: {', '.join(away)}" if away else "all are there"
    return RoleStatus(
        job_id=job_id,
        run=view.spec.run,
        state=state,
        reason=reason,
        exit_code=result.code if result is not None else None,
        replicas=plan.replicas,
        map=view.map.number if view.map is not None else 0,
        posts=posts,
    )


def render(status: RoleStatus) -> list[RenderableType]:
    """A line, and the table."""
    first = Text.assemble("job ", (status.job_id, "bold"), f"  {status.state}: {status.reason}")
    table = Table("process", "address", "", "restarts", "shards", "copies")
    for post in status.posts:
        state = f"{post.state}: {post.reason}" if post.reason else post.state
        numbers = [" ".join(map(str, shards)) for shards in (post.shards, post.copies)]
        table.add_row(*map(Text, (post.name, post.endpoint, state, str(post.restarts), *numbers)))
    return [first, table]


def _post(view: RoleView, post: RoleProcess) -> RoleProcessStatus:
    record = view.posts.get(post.name)
    places = view.map.places if view.map is not None and post.kind == "server" else ()
    holder = ShardServer(post.index, record.incarnation if record is not None else 0)
    return RoleProcessStatus(
        name=post.name,
        endpoint=post.endpoint,
        state=_state(view, post),
        restarts=max(0, record.incarnation - 1) if record is not None else 0,
        reason=record.reason if record is not None else "",
        shards=[shard for shard, place in enumerate(places) if place.primary == holder],
        copies=[shard for shard, place in enumerate(places) if place.replica == holder],
    )


def _state(view: RoleView, post: RoleProcess) -> State:
    record = view.posts.get(post.name)
    if record is None:
        return "waiting"
    if record.code is not None:
        return "failed" if record.code else "done"
    return "running" if post.machine in {node.machine for node in view.nodes} else "away"
