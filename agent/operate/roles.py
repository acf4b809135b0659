"""What the operator's commands do with a job that has parameter servers."""

from __future__ import annotations

import time

from agent.errors import ConfigError, NotInTime
from agent.operate.follow import Follower, started
from agent.operate.jobs import read_roles
from agent.operate.prompts import confirm, tell
from agent.operate.spec import who
from agent.roles.model import RoleResult
from agent.roles.store import RoleKeys
from agent.store.api import Compare, Delete, Put, Store
from agent.store.keys import JobKeys, encode


def stop(store: Store, keys: JobKeys, *, wait_s: float | None, is_agreed: bool, as_json: bool) -> int:
    """End it: workers at once, then servers, which keep their rows; with `wait_s` wait for that.

    Raises:
        ConfigError: no agent of it lives.
        NotInTime: there were some after `wait_s` seconds.
    """
    view = read_roles(store, keys)
    if view.result is not None or not view.nodes:
        raise ConfigError(f"no agent of job {keys.job_id!r} lives: there is nothing to stop")
    confirm(f"Stop job {keys.job_id}? Its servers keep their rows.", is_agreed=is_agreed)
    result = RoleResult(code=0, sentence=f"stopped by {who()}", is_stopped=True)
    roles = RoleKeys(keys.job_id)
    store.transact([Compare(roles.result, create_revision=0)], [Put(roles.result, encode(result))])
    if wait_s is None:
        return tell(keys.job_id, "stop", "is to stop; its servers keep their rows", as_json=as_json, has_ended=False)
    _wait_for_end(store, keys, wait_s)
    return tell(keys.job_id, "stop", f"has ended: {result.sentence}", as_json=as_json, has_ended=True)


def _wait_for_end(store: Store, keys: JobKeys, wait_s: float) -> None:
    give_up_at = time.monotonic() + wait_s
    roles = RoleKeys(keys.job_id)
    with started(Follower(store, roles.everything(), roles.view)) as follower:
        while (view := follower.next(max(0.0, give_up_at - time.monotonic()))) is not None:
            if not view.nodes:
                return
    raise NotInTime(f"job {keys.job_id} had not ended after {wait_s:g} s; see elastic-agent status")


def reset(store: Store, keys: JobKeys, *, is_agreed: bool, as_json: bool) -> int:
    """Forget one that has ended, or that its agents have left. Raises `ConfigError` if it lives."""
    view = read_roles(store, keys)
    if view.nodes:
        machines = ", ".join(node.machine for node in view.nodes)
        raise ConfigError(f"job {keys.job_id!r} is alive: stop it first, by elastic-agent stop (machines: {machines})")
    how = f"has ended: {view.result.sentence}" if view.result else "was left by all of its agents before it had ended"
    confirm(f"Job {keys.job_id} {how}. Forget that, and let its next agents begin a new run?", is_agreed=is_agreed)
    roles = RoleKeys(keys.job_id)
    # The result stays, as a tombstone: an agent of the old run that was cut off must not revive it.
    ended = RoleResult(code=1, sentence=f"reset by {who()}", is_reset=True)
    gone = [Delete(roles.spec), Delete(roles.map), Delete(roles.process(""), is_prefix=True)]
    store.transact([], [Put(roles.result, encode(ended)), *gone])
    sentence = "reset; its next agents begin a new run, with the rows that its servers kept"
    return tell(keys.job_id, "reset", sentence, as_json=as_json)
