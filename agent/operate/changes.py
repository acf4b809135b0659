"""Commands that change a whole job: scale, pause, resume, restart, stop, reset."""

from __future__ import annotations

import time

from agent.core.model import Group, Result
from agent.core.reasons import Requested
from agent.core.view import ClusterView
from agent.errors import ConfigError, NotInTime
from agent.local_etcd.kept_records import KeptStore
from agent.observe.messages import describe
from agent.observe.quantities import count
from agent.operate import roles
from agent.operate.jobs import follow_job, open_job, read_roles, read_view
from agent.operate.prompts import confirm, print_result
from agent.operate.target import Target
from agent.store.api import Compare, Put, Store
from agent.store.keys import JobKeys, encode
from agent.store.spec import SpecView, change_spec, current_user, live_spec, pause_note


def scale_job(target: Target, np: tuple[int, int], *, as_json: bool) -> int:
    """Change a live job's desired number of nodes. Raises `ConfigError` if there is no such job."""
    with open_job(target, only_live=True) as (store, keys):
        old, new, view = change_spec(store, keys, lambda _seen: {"np_min": np[0], "np_max": np[1]})
    registered = len(view.nodes)
    missing = max(0, np[0] - registered)
    more = f"; {missing} more needed" if missing else ""
    message = f"np {old.np} -> {new.np} ({count(registered, 'node')} there{more})"
    details = {"np_before": old.np, "np": new.np, "nodes_there": registered, "nodes_missing": missing}
    return print_result(keys.job_id, "scale", message, as_json=as_json, **details)


def pause_job(target: Target, *, is_paused: bool, as_json: bool) -> int:
    """Suspend a live job's changes of group, or resume them. Raises `ConfigError` if there is no such job."""
    with open_job(target, only_live=True) as (store, keys):
        old, new, _ = change_spec(store, keys, _pause if is_paused else _resume)
    if new == old:
        message = f"already paused by {old.paused_by}" if is_paused else "was not paused"
    else:
        message = (
            "paused: training continues, and the group does not change until the job is resumed"
            if is_paused
            else "resumed"
        )
    command = "pause" if is_paused else "resume"
    return print_result(keys.job_id, command, message, as_json=as_json, paused_by=new.paused_by)


def _pause(seen: SpecView) -> dict[str, str]:
    return {} if seen.spec.paused_by else {"paused_by": current_user()}


def _resume(_seen: SpecView) -> dict[str, str]:
    return {"paused_by": ""}


def restart_job(target: Target, *, is_agreed: bool, as_json: bool) -> int:
    """Restart a live job's workers in a new group. Raises `ConfigError` if none train."""
    with open_job(target, only_live=True) as (store, keys):
        view = live_spec(store, keys).view
        group = view.group.value if view.group is not None else None
        if group is None or not group.members:
            raise ConfigError(f"job {keys.job_id!r} is not training: there is nothing to restart")
        confirm(f"Restart all workers of job {keys.job_id} ({_size(group)})?", is_agreed=is_agreed)
        # By the group's number: if the group is replaced for another reason first, the request is fulfilled as well.
        _, new, _ = change_spec(store, keys, lambda _seen: {"restart_after": group.number})
    message = f"group {group.number} will be replaced by a new group of the same nodes after a handoff{pause_note(new)}"
    return print_result(keys.job_id, "restart", message, as_json=as_json, group=group.number)


def _size(group: Group) -> str:
    return f"{count(group.world_size, 'rank')} on {count(len(group.members), 'node')}"


def stop_job(target: Target, *, wait_s: float | None, is_agreed: bool, as_json: bool) -> int:
    """End a live job once its training is saved; with `wait_s` wait for the end.

    Returns:
        0, or `EXIT_UNSAVED` if the job has ended without saving all steps.

    Raises:
        ConfigError: there is no such job, or none of its agents is running.
        NotInTime: the job had not ended after `wait_s` seconds.
    """
    with open_job(target, only_live=True, may_have_servers=True) as (store, keys):
        if read_roles(store, keys).spec is not None:
            return roles.stop(store, keys, wait_s=wait_s, is_agreed=is_agreed, as_json=as_json)
        ended = read_view(store, keys).result
        if ended is not None and ended.value.state == "stopped":  # by another user, a moment ago
            return _print_end(keys, ended.value, as_json=as_json)
        view = live_spec(store, keys).view
        if not view.nodes:
            raise ConfigError(f"no agent of job {keys.job_id!r} is running: there is nothing to stop")
        group = view.group.value if view.group is not None else None
        size = _size(group) if group is not None and group.members else "not training"
        confirm(
            f"Stop job {keys.job_id} ({size}), once it has saved the steps that its script commits?",
            is_agreed=is_agreed,
        )
        order = Requested(what="stop", by=current_user())
        change_spec(store, keys, lambda seen: {"ending": seen.spec.ending or order})
        result = _wait_for_end(store, keys, wait_s) if wait_s is not None else None
    if result is None:
        message = "stopping: it saves the steps that its script commits, then its agents exit; `reset` allows a new run"
        return print_result(keys.job_id, "stop", message, as_json=as_json, has_ended=False)
    return _print_end(keys, result, as_json=as_json)


def _print_end(keys: JobKeys, result: Result, *, as_json: bool) -> int:
    print_result(keys.job_id, "stop", f"has ended: {describe(result.reason)}", as_json=as_json, has_ended=True)
    return result.exit_code if result.state == "stopped" else 0


def _wait_for_end(store: Store, keys: JobKeys, wait_s: float) -> Result:
    give_up_at = time.monotonic() + wait_s
    with follow_job(store, keys) as follower:
        while (view := follower.next(max(0.0, give_up_at - time.monotonic()))) is not None:
            if view.result is not None:
                return view.result.value
    raise NotInTime(f"job {keys.job_id} had not ended after {wait_s:g} s; see elastic-agent status")


def reset_job(target: Target, *, is_agreed: bool, as_json: bool) -> int:
    """Allow a new run of a job that has ended or was abandoned. Raises `ConfigError` if it is running, or unknown."""
    with open_job(target, only_live=False, may_have_servers=True) as (store, keys):
        if read_roles(store, keys).spec is not None:
            return roles.reset(store, keys, is_agreed=is_agreed, as_json=as_json)
        if isinstance(store, KeptStore):
            store.transact([], [])  # says why not, before anything is asked
        how = _how_it_ended(read_view(store, keys), keys)
        question = f"Job {keys.job_id} {how}. Reset it, so that its next agents begin a new run?"
        confirm(question, is_agreed=is_agreed)
        while not _reset(store, keys):
            pass
    message = "reset; its next agents begin a new run (from the newest checkpoint, if any)"
    return print_result(keys.job_id, "reset", message, as_json=as_json)


def _how_it_ended(view: ClusterView, keys: JobKeys) -> str:
    """Describe how a job has ended. Raises `ConfigError` if it has not."""
    if view.spec is None:
        raise ConfigError(f"job {keys.job_id!r} has no records: there is nothing to reset")
    if view.nodes:
        running = ", ".join(node.value.node_id for node in view.nodes)
        raise ConfigError(f"job {keys.job_id!r} is running: stop it first with elastic-agent stop (nodes: {running})")
    if view.result is None:
        return "was abandoned: all of its agents left before it had ended"
    return f"has ended: {describe(view.result.value.reason)}"


def _reset(store: Store, keys: JobKeys) -> bool:
    """Write the reset. Return False if another client changed the job in the meantime."""
    view = read_view(store, keys)
    _how_it_ended(view, keys)
    assert view.spec is not None  # noqa: S101 - `_how_it_ended` has checked it
    # The result is kept as a tombstone, so that a partitioned agent of the old run cannot revive it.
    ended = Result(
        run=view.spec.value.run,
        group=view.group.value.number if view.group is not None else 0,
        succeeded=False,
        exit_code=1,
        reason=Requested(what="reset", by=current_user()),
        is_reset=True,
    )
    unchanged = [
        Compare(keys.spec, mod_revision=view.spec.mod_revision),
        Compare(keys.result, mod_revision=view.result.mod_revision if view.result is not None else 0),
    ]
    return store.transact(unchanged, [Put(keys.result, encode(ended))]).succeeded
