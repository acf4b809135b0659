"""Commands that change what a whole job is asked to be, or let it begin anew."""

from __future__ import annotations

import time

from agent.core.model import ClusterView, Group, Result
from agent.core.proposals import nodes
from agent.core.totals import count
from agent.errors import ConfigError, NotInTime
from agent.operate import roles
from agent.operate.follow import following
from agent.operate.jobs import opened, read_roles, read_view
from agent.operate.prompts import confirm, tell
from agent.operate.spec import SpecView, change_spec, if_paused, live_spec, who
from agent.operate.target import Target
from agent.store.api import Compare, Put, Store
from agent.store.keys import JobKeys, encode


def scale_job(target: Target, np: tuple[int, int], *, as_json: bool) -> int:
    """Change a live job's desired number of nodes. Raises `ConfigError` if there is no such job."""
    with opened(target, only_live=True) as (store, keys):
        old, new, view = change_spec(store, keys, lambda _seen: {"np_min": np[0], "np_max": np[1]})
    have = len(view.nodes)
    missing = max(0, np[0] - have)
    more = f"; {missing} more needed" if missing else ""
    sentence = f"np {old.np} -> {new.np} ({nodes(have)} there{more})"
    details = {"np_before": old.np, "np": new.np, "nodes_there": have, "nodes_missing": missing}
    return tell(keys.job_id, "scale", sentence, as_json=as_json, **details)


def pause_job(target: Target, *, is_paused: bool, as_json: bool) -> int:
    """Stop a live job's changes of group, or let them go on. Raises `ConfigError` if there is no such job."""
    with opened(target, only_live=True) as (store, keys):
        old, new, _ = change_spec(store, keys, _pause if is_paused else _resume)
    if new == old:
        sentence = f"is paused already, by {old.paused_by}" if is_paused else "was not paused"
    else:
        sentence = "paused: it trains on, and nothing changes until it is resumed" if is_paused else "resumed"
    command = "pause" if is_paused else "resume"
    return tell(keys.job_id, command, sentence, as_json=as_json, paused_by=new.paused_by)


def _pause(seen: SpecView) -> dict[str, str]:
    return {} if seen.spec.paused_by else {"paused_by": who()}


def _resume(_seen: SpecView) -> dict[str, str]:
    return {"paused_by": ""}


def restart_job(target: Target, *, is_agreed: bool, as_json: bool) -> int:
    """Have a live job's workers started anew, in the next group. Raises `ConfigError` if none train."""
    with opened(target, only_live=True) as (store, keys):
        view = live_spec(store, keys).view
        group = view.group.value if view.group is not None else None
        if group is None or not group.members:
            raise ConfigError(f"job {keys.job_id!r} does not train at the moment: there is nothing to restart")
        confirm(f"Restart all workers of job {keys.job_id} ({_size(group)})?", is_agreed=is_agreed)
        # By its number: should it be replaced for another reason by then, all is done.
        _, new, _ = change_spec(store, keys, lambda _seen: {"restart_after": group.number})
    sentence = f"group {group.number} is to be replaced by another of the same nodes, after a handoff{if_paused(new)}"
    return tell(keys.job_id, "restart", sentence, as_json=as_json, group=group.number)


def _size(group: Group) -> str:
    return f"{count(group.world_size, 'rank')} on {nodes(len(group.members))}"


def stop_job(target: Target, *, wait_s: float | None, is_agreed: bool, as_json: bool) -> int:
    """End a live job once its training is saved; with `wait_s` wait for that.

    Raises:
        ConfigError: there is no such job, or no agent of it lives.
        NotInTime: it had not ended after `wait_s` seconds.
    """
    with opened(target, only_live=True, may_have_servers=True) as (store, keys):
        if read_roles(store, keys).spec is not None:
            return roles.stop(store, keys, wait_s=wait_s, is_agreed=is_agreed, as_json=as_json)
        view = live_spec(store, keys).view
        if not view.nodes:
            raise ConfigError(f"no agent of job {keys.job_id!r} lives: there is nothing to stop")
        group = view.group.value if view.group is not None else None
        trains = _size(group) if group is not None and group.members else "nobody trains"
        confirm(f"Stop job {keys.job_id}, once its training is saved ({trains})?", is_agreed=is_agreed)
        change_spec(store, keys, lambda seen: {"stopped_by": seen.spec.stopped_by or who()})
        result = _wait_for_end(store, keys, wait_s) if wait_s is not None else None
    if result is None:
        sentence = "is to stop: it saves its training, then its agents end with code 0; reset lets it begin again"
        return tell(keys.job_id, "stop", sentence, as_json=as_json, has_ended=False)
    return tell(keys.job_id, "stop", f"has ended: {result.reason}", as_json=as_json, has_ended=True)


def _wait_for_end(store: Store, keys: JobKeys, wait_s: float) -> Result:
    give_up_at = time.monotonic() + wait_s
    with following(store, keys) as follower:
        while (view := follower.next(max(0.0, give_up_at - time.monotonic()))) is not None:
            if view.result is not None:
                return view.result.value
    raise NotInTime(f"job {keys.job_id} had not ended after {wait_s:g} s; see elastic-agent status")


def reset_job(target: Target, *, is_agreed: bool, as_json: bool) -> int:
    """Let an ended, or abandoned, job begin anew. Raises `ConfigError` if it is alive, or not there."""
    with opened(target, only_live=False, may_have_servers=True) as (store, keys):
        if read_roles(store, keys).spec is not None:
            return roles.reset(store, keys, is_agreed=is_agreed, as_json=as_json)
        how = _how_it_ended(read_view(store, keys), keys)
        question = f"Job {keys.job_id} {how}. Forget that, and let its next agents begin a new run?"
        confirm(question, is_agreed=is_agreed)
        while not _reset(store, keys):
            pass
    sentence = "reset; its next agents begin a new run (from the newest checkpoint, if any)"
    return tell(keys.job_id, "reset", sentence, as_json=as_json)


def _how_it_ended(view: ClusterView, keys: JobKeys) -> str:
    """How a job has ended. Raises `ConfigError` if it has not."""
    if view.spec is None:
        raise ConfigError(f"job {keys.job_id!r} is gone: there is nothing to reset")
    if view.nodes:
        alive = ", ".join(node.value.node_id for node in view.nodes)
        raise ConfigError(f"job {keys.job_id!r} is alive: stop it first, by elastic-agent stop (nodes: {alive})")
    if view.result is None:
        return "was left by all of its agents before it had ended"
    return f"has ended: {view.result.value.reason}"


def _reset(store: Store, keys: JobKeys) -> bool:
    """Whether it was done; if not, somebody else was first."""
    view = read_view(store, keys)
    _how_it_ended(view, keys)
    assert view.spec is not None  # noqa: S101 - else there would be no way it ended
    # The record stays, as a tombstone: an agent of the old run that was cut off must not revive it.
    ended = Result(
        run=view.spec.value.run,
        group=view.group.value.number if view.group is not None else 0,
        succeeded=False,
        exit_code=1,
        reason=f"reset by {who()}",
        is_reset=True,
    )
    unchanged = [
        Compare(keys.spec, mod_revision=view.spec.mod_revision),
        Compare(keys.result, mod_revision=view.result.mod_revision if view.result is not None else 0),
    ]
    return store.transact(unchanged, [Put(keys.result, encode(ended))]).succeeded
