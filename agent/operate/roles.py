"""`stop` and `reset` for jobs with parameter servers."""

from __future__ import annotations

import time

from agent.errors import ConfigError, NotInTime
from agent.operate.jobs import Follower, read_roles, started
from agent.operate.prompts import confirm, print_result
from agent.roles.model import RoleResult
from agent.roles.store import RoleKeys
from agent.store.api import Compare, Delete, Put, Store
from agent.store.keys import JobKeys, encode
from agent.store.spec import current_user


def stop(store: Store, keys: JobKeys, *, wait_s: float | None, is_agreed: bool, as_json: bool) -> int:
    """End the job: workers at once, then the servers, which keep their rows; with `wait_s` wait for the end.

    Raises:
        ConfigError: none of the job's agents is running.
        NotInTime: some agents were still running after `wait_s` seconds.
    """
    view = read_roles(store, keys)
    if view.result is not None or not view.nodes:
        raise ConfigError(f"no agent of job {keys.job_id!r} is running: there is nothing to stop")
    confirm(f"Stop job {keys.job_id}? Its servers keep their rows.", is_agreed=is_agreed)
    result = RoleResult(code=0, sentence=f"stopped by {current_user()}", is_stopped=True)
    roles = RoleKeys(keys.job_id)
    store.transact([Compare(roles.result, create_revision=0)], [Put(roles.result, encode(result))])
    if wait_s is None:
        return print_result(
            keys.job_id, "stop", "stopping; its servers keep their rows", as_json=as_json, has_ended=False
        )
    _wait_for_end(store, keys, wait_s)
    return print_result(keys.job_id, "stop", f"has ended: {result.sentence}", as_json=as_json, has_ended=True)


def _wait_for_end(store: Store, keys: JobKeys, wait_s: float) -> None:
    give_up_at = time.monotonic() + wait_s
    roles = RoleKeys(keys.job_id)
    with started(Follower(store, roles.everything(), roles.view)) as follower:
        while (view := follower.next(max(0.0, give_up_at - time.monotonic()))) is not None:
            if not view.nodes:
                return
    raise NotInTime(f"job {keys.job_id} had not ended after {wait_s:g} s; see elastic-agent status")


def reset(store: Store, keys: JobKeys, *, is_agreed: bool, as_json: bool) -> int:
    """Allow a new run of a job that has ended or was abandoned. Raises `ConfigError` if it is running."""
    view = read_roles(store, keys)
    if view.nodes:
        machines = ", ".join(node.machine for node in view.nodes)
        raise ConfigError(
            f"job {keys.job_id!r} is running: stop it first with elastic-agent stop (machines: {machines})"
        )
    how = (
        f"has ended: {view.result.sentence}"
        if view.result
        else "was abandoned: all of its agents left before it had ended"
    )
    confirm(f"Job {keys.job_id} {how}. Reset it, so that its next agents begin a new run?", is_agreed=is_agreed)
    roles = RoleKeys(keys.job_id)
    # The result is kept as a tombstone, so that a partitioned agent of the old run cannot revive it.
    ended = RoleResult(code=1, sentence=f"reset by {current_user()}", is_reset=True)
    gone = [Delete(roles.spec), Delete(roles.map), Delete(roles.process(""), is_prefix=True)]
    store.transact([], [Put(roles.result, encode(ended)), *gone])
    message = "reset; its next agents begin a new run with the rows that its servers kept"
    return print_result(keys.job_id, "reset", message, as_json=as_json)
