"""Commands on single nodes: drain, exclude, include."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from agent.core.proposals import required
from agent.core.records import Identity
from agent.core.view import ClusterView
from agent.errors import ConfigError, NotInTime
from agent.observe.messages import listed
from agent.observe.quantities import count
from agent.operate.jobs import follow_job, open_job, read_incidents
from agent.operate.prompts import confirm, print_result
from agent.operate.target import Target
from agent.store.api import Store
from agent.store.keys import JobKeys
from agent.store.spec import SpecView, change_spec, live_spec, pause_note


def drain_nodes(target: Target, names: Sequence[str], *, wait_s: float | None, is_agreed: bool, as_json: bool) -> int:
    """Ask agents to leave after a handoff; with `wait_s` wait until they are gone.

    Raises:
        ConfigError: there is no such job, it has no such node, or it is paused.
        NotInTime: the agents had not left after `wait_s` seconds.
    """
    with open_job(target, only_live=True) as (store, keys):
        seen = live_spec(store, keys)
        asked = _registered(seen, keys, names)
        if seen.spec.paused_by:  # a paused job forms no group without them
            raise ConfigError(f"job {keys.job_id!r} is paused by {seen.spec.paused_by}: resume it first")
        _confirm_if_it_stops(seen, keys, names, "without", is_agreed=is_agreed)
        change_spec(store, keys, lambda now: {"drained": _with(now.spec.drained, asked)})
        if wait_s is not None:
            _wait_until_gone(store, keys, asked, wait_s)
    is_gone = wait_s is not None
    done = "gone" if is_gone else "asked to leave; it ends once the next group is formed without it"
    return print_result(
        keys.job_id, "drain", f"{listed(names)}: {done}", as_json=as_json, nodes=list(names), is_gone=is_gone
    )


def _registered(seen: SpecView, keys: JobKeys, names: Sequence[str]) -> list[Identity]:
    registered = {node.value.node_id: node.value.member.identity for node in seen.view.nodes}
    _check_known(names, registered, f"job {keys.job_id!r} has no node {{}}; its nodes: {{}}")
    return [registered[name] for name in names]


def _check_known(names: Sequence[str], known: Collection[str], message: str) -> None:
    """Raise `ConfigError` for unknown names; they and the known ones are filled into `message`."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(message.format(" and no ".join(map(repr, unknown)), ", ".join(sorted(known)) or "none"))


def _with(known: tuple[Identity, ...], more: Sequence[Identity]) -> tuple[Identity, ...]:
    return tuple(dict.fromkeys((*known, *more)))


def _confirm_if_it_stops(seen: SpecView, keys: JobKeys, names: Sequence[str], how: str, *, is_agreed: bool) -> None:
    """Ask for confirmation if the job trains, and would have too few nodes afterwards."""
    spec, view = seen
    group = view.group.value if view.group is not None else None
    if group is None or not group.members:
        return
    out = {*names, *spec.excluded}
    able = [n.value for n in view.nodes if n.value.is_eligible and n.value.node_id not in out]
    left = sum(node.member.identity not in spec.drained for node in able)
    needed = required(spec, group)
    if left < needed:
        has = f"{count(left, 'node')} left" if left else "none left"
        confirm(
            f"Job {keys.job_id} needs {count(needed, 'node')} to train, and {how} {listed(names)} has {has}: "
            "it will stop training and wait for others. Continue?",
            is_agreed=is_agreed,
        )


def _wait_until_gone(store: Store, keys: JobKeys, asked: Sequence[Identity], wait_s: float) -> None:
    give_up_at = time.monotonic() + wait_s
    with follow_job(store, keys) as follower:
        remaining = list(asked)
        while remaining:
            view = follower.next(max(0.0, give_up_at - time.monotonic()))
            if view is None:
                names = listed([each.node_id for each in remaining])
                raise NotInTime(f"job {keys.job_id}: {names} had not left after {wait_s:g} s; see elastic-agent status")
            remaining = _still_registered(view, asked)


def _still_registered(view: ClusterView, asked: Sequence[Identity]) -> list[Identity]:
    return [node.value.member.identity for node in view.nodes if node.value.member.identity in asked]


def exclude_nodes(target: Target, names: Sequence[str], *, is_agreed: bool, as_json: bool) -> int:
    """Exclude nodes from later groups. Raises `ConfigError` if there is no such job, or it never had such a node."""
    with open_job(target, only_live=True) as (store, keys):
        seen = live_spec(store, keys)
        known = _ever_registered(store, keys, seen.view)
        _check_known(names, known, f"job {keys.job_id!r} never had a node {{}}; known nodes: {{}}")
        _confirm_if_it_stops(seen, keys, names, "with the exclusion of", is_agreed=is_agreed)
        _, new, _ = change_spec(store, keys, lambda now: {"excluded": tuple(sorted({*now.spec.excluded, *names}))})
    message = f"{listed(names)}: excluded from later groups until included again{pause_note(new)}"
    return print_result(
        keys.job_id, "exclude", message, as_json=as_json, nodes=list(names), excluded=list(new.excluded)
    )


def _ever_registered(store: Store, keys: JobKeys, view: ClusterView) -> set[str]:
    """Return present and former nodes: a node that crashes again and again may be away at the moment."""
    present = {node.value.node_id for node in view.nodes}
    return present | {member.node_id for incident in read_incidents(store, keys) for member in incident.members}


def include_nodes(target: Target, names: Sequence[str], *, as_json: bool) -> int:
    """Include excluded nodes again. Raises `ConfigError` if there is no such job, or they are not excluded."""

    def edit(seen: SpecView) -> dict[str, tuple[str, ...]]:
        excluded = seen.spec.excluded
        _check_known(names, excluded, f"job {keys.job_id!r} does not exclude {{}}; excluded: {{}}")
        return {"excluded": tuple(each for each in excluded if each not in names)}

    with open_job(target, only_live=True) as (store, keys):
        _, new, _ = change_spec(store, keys, edit)
    message = f"{listed(names)}: included again"
    return print_result(
        keys.job_id, "include", message, as_json=as_json, nodes=list(names), excluded=list(new.excluded)
    )
