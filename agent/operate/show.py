"""Commands that show a job and change nothing: status, page, history, explain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live

from agent.errors import ConfigError
from agent.observe.incidents import explain, incident_json, print_history
from agent.observe.status import JobStatus, job_status, render
from agent.operate.jobs import (
    Follower,
    open_job,
    read_history,
    read_incidents,
    read_roles,
    read_view,
    started,
)
from agent.operate.prompts import print_json
from agent.operate.target import Target
from agent.roles.status import RoleStatus, role_status
from agent.roles.status import render as render_roles
from agent.roles.store import RoleKeys
from agent.store.api import KeyRange, Snapshot, Store
from agent.store.keys import JobKeys, view_of
from agent.web.access import token_of


class _Status(Protocol):
    @property
    def exit_code(self) -> int | None: ...


S = TypeVar("S", bound=_Status)


@dataclass(frozen=True)
class _Kind(Generic[S]):
    """How one kind of job is shown.

    `status` returns None if etcd has lost the job's records, until the agents have written them again.
    """

    ranges: tuple[KeyRange, ...]
    status: Callable[[Snapshot], S | None]
    render: Callable[[S], list[RenderableType]]


def show_status(target: Target, *, watch: bool, as_json: bool) -> int:
    """Print a job's state; with `watch` at each change until it ends. Raises `ConfigError` if there is no such job."""
    with open_job(target, only_live=False, may_have_servers=True) as (store, keys):
        show = _watch if watch else _show_once
        if read_roles(store, keys).spec is None:
            show(store, _of_ranks(keys), as_json=as_json)
        else:
            show(store, _with_servers(keys), as_json=as_json)
    return 0


def _of_ranks(keys: JobKeys) -> _Kind[JobStatus]:
    def status(snapshot: Snapshot) -> JobStatus | None:
        view = view_of(snapshot, keys, is_whole=True)
        return job_status(keys.job_id, view) if view.spec is not None else None

    return _Kind(keys.whole(), status, render)


def _with_servers(keys: JobKeys) -> _Kind[RoleStatus]:
    roles = RoleKeys(keys.job_id)

    def status(snapshot: Snapshot) -> RoleStatus | None:
        view = roles.view(snapshot)
        return role_status(keys.job_id, view) if view.spec is not None else None

    return _Kind(roles.everything(), status, render_roles)


def show_pages(target: Target, *, as_json: bool) -> int:
    """Print the addresses of a job's web page, and the token. Raises `ConfigError` if no agent serves one."""
    with open_job(target, only_live=True) as (store, keys):
        view = read_view(store, keys)
    served = [node.value for node in view.nodes if node.value.about.page]
    if not served or view.spec is None:
        raise ConfigError(f"no agent of job {keys.job_id!r} serves a web page: start one with --http=HOST:PORT")
    token = token_of(view.spec.value.secret)
    if as_json:
        pages = [
            {"node_id": node.node_id, "url": node.about.page, "has_own_token": node.about.page_has_own_token}
            for node in served
        ]
        print_json({"job_id": keys.job_id, "token": token, "pages": pages})
        return 0
    for node in served:
        note = "  (the token is in its --http_token_file)" if node.about.page_has_own_token else f"/#token={token}"
        click.echo(f"{node.about.page}{note}")
    return 0


def _show_once(store: Store, kind: _Kind[S], *, as_json: bool) -> None:
    status = kind.status(store.read(kind.ranges))
    if status is not None:
        _show(status, kind, as_json=as_json)


def _show(status: S, kind: _Kind[S], *, as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    console = Console(highlight=False)
    for part in kind.render(status):
        console.print(part, soft_wrap=True)


def _watch(store: Store, kind: _Kind[S], *, as_json: bool) -> None:
    if as_json:
        _show_each(store, kind, lambda status: click.echo(msgspec.json.encode(status)))
    elif sys.stdout.isatty():
        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            _show_each(store, kind, lambda status: live.update(Group(*kind.render(status)), refresh=True))
    else:
        _show_each(store, kind, lambda status: _show_block(status, kind))


def _show_block(status: S, kind: _Kind[S]) -> None:
    _show(status, kind, as_json=False)
    click.echo()  # also flushes


def _show_each(store: Store, kind: _Kind[S], show: Callable[[S], object]) -> None:
    """Show each status that differs from the previous one, until the job has ended."""
    shown: S | None = None
    with started(Follower(store, kind.ranges, kind.status)) as follower:
        while shown is None or shown.exit_code is None:
            status = follower.next()
            if status is not None and status != shown:
                show(status)
                shown = status


def show_history(target: Target, *, with_phases: bool, as_json: bool) -> int:
    """Print the incidents of a job's current run. Raises `ConfigError` if there is no such job."""
    with open_job(target, only_live=False) as (store, keys):
        incidents = read_history(store, keys)
    if as_json:
        print_json([incident_json(incident) for incident in incidents])
    elif incidents:
        print_history(incidents, sys.stdout, with_phases=with_phases)
    else:
        click.echo(f"job {keys.job_id}: no incidents yet in this run")
    return 0


def explain_group(target: Target, group: int | None, *, as_json: bool) -> int:
    """Explain why a group was formed. Raises `ConfigError` if there is no record of it.

    Args:
        target: the job.
        group: number of the group. None: the newest.
        as_json: print JSON.
    """
    with open_job(target, only_live=False) as (store, keys):
        incidents = {incident.group: incident for incident in read_incidents(store, keys)}
    if not incidents:
        raise ConfigError(f"job {keys.job_id!r} has no incidents yet: there is nothing to explain")
    number = max(incidents) if group is None else group
    if number not in incidents:
        raise ConfigError(
            f"job {keys.job_id!r} has no record of group {number}; recorded groups: {_numbers(list(incidents))}"
        )
    incident = incidents[number]
    sentences = explain(incident, incidents.get(number - 1))
    if as_json:
        print_json({"job_id": keys.job_id, "sentences": sentences, "incident": incident_json(incident)})
    else:
        click.echo("\n".join(sentences))
        faults = [number for number, each in incidents.items() if each.cause in {"failed", "lost"}]
        if group is None and faults and max(faults) < number:
            click.echo(f"The last failure or loss led to group {max(faults)}: elastic-agent explain {max(faults)}")
    return 0


def _numbers(groups: list[int]) -> str:
    """`1-4, 7`."""
    ranges: list[tuple[int, int]] = []
    for group in groups:
        if ranges and ranges[-1][1] == group - 1:
            ranges[-1] = (ranges[-1][0], group)
        else:
            ranges.append((group, group))
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
