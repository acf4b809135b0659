"""The decisions of an agent in a parameter-server job. It has no clock and no socket: `step` is a function.

A *process* of the plan (`RoleProcess`: `server-0`, `worker-3`) is run by one operating-system process after another;
each of these is an *incarnation* of it, and has a number. The rules:

1. Each process is supervised on its own: the end of one leaves the others running.
2. A process that fails is started again at once, unless it has failed more than `max_restarts` times within the
   window. A worker's exit with "do not restart" is final. When a server has failed too often, the job ends; when a
   worker has, only this worker ends.
3. A worker that ends with 0 has done its part. The job has succeeded when no worker runs or may run any more and at
   least one of them has done its part. It has failed when none has.
4. No other machine takes over the work of a lost machine. The job waits for a lost machine's workers only while no
   worker has done its part. It always waits for lost servers.
5. After an outage of etcd, machines without a record may still be alive: for a grace period their servers keep their
   shards.
6. When there is a result, every agent terminates its processes, workers first, and exits with the result. So does an
   agent whose run is over because the job was reset.
7. Records that etcd has lost are written again by the agents that remember them, before anything else is decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from agent.core.effects import Announce, Exit
from agent.core.events import StopAsked, StoreLost, Ticked
from agent.roles.events import (
    ProcessExited,
    ReplicaReported,
    RoleEffect,
    RoleEvent,
    RoleViewChanged,
    SendShardMap,
    StartProcess,
    TerminateProcess,
    WriteRecord,
    WriteRoleResult,
    WriteShardMap,
)
from agent.roles.model import RoleProcessRecord, RoleResult, RoleView
from agent.roles.plan import RolePlan, RoleProcess
from agent.roles.shards import ReplicaReport, apply_report, first_map, next_map
from trainer_runtime.contract import EXIT_NO_RESTART
from trainer_runtime.shard_map import ShardMap

FAILED = 1
_HINT = "; elastic-agent reset lets it begin anew"


@dataclass(frozen=True)
class Local:
    """The state of one process of this machine."""

    incarnation: int = 0
    """Number of the current or last incarnation; 0: there was none."""
    is_running: bool = False
    is_ending: bool = False
    """It was terminated by this agent."""
    failures: tuple[float, ...] = ()
    """Times of its failures within the window."""
    final_record: RoleProcessRecord | None = None
    """Its record, once it is not to be started again."""


@dataclass(frozen=True)
class RoleState:
    """Everything that this core decides from."""

    plan: RolePlan
    run: str
    """Id of the run that this agent belongs to."""
    machine: str
    """This agent's machine, as the plan names it."""
    max_restarts: int
    window_s: float
    grace_s: float = 0.0
    """For how long no machine counts as lost after an outage of etcd."""
    locals: dict[RoleProcess, Local] = field(default_factory=dict)
    view: RoleView = field(default_factory=RoleView)
    stop_signal: int = 0
    """Number of the signal that asked this agent to leave; 0: none."""
    has_decided: bool = False
    """This agent has written a result."""
    is_store_lost: bool = True
    """Etcd cannot be reached, or was not reached yet."""
    grace_until: float = 0.0
    """Until then machines without a record may be alive."""
    reports: dict[int, ReplicaReport] = field(default_factory=dict)
    """The last report of this machine's servers on the replica of each shard."""
    written: tuple[int, ShardMap] | None = None
    """The last map that this agent wrote, after the revision of the map that it replaces."""
    sent: int = 0
    """Number of the newest map that was sent to all processes of this machine."""
    newest_map: ShardMap | None = None
    """The newest map that this agent has seen."""
    has_begun: bool = False
    """This agent has started a process."""


def step(state: RoleState, event: RoleEvent, now: float) -> tuple[RoleState, list[RoleEffect]]:
    """Return the next state, and the effects of an event."""
    effects: list[RoleEffect] = []
    match event:
        case RoleViewChanged(view):
            state = _apply_view(state, view, now, effects)
            if not state.locals:
                state = _adopt_records(state)
        case ProcessExited():
            state = _on_exited(state, event, now, effects)
        case StopAsked(number):
            state = replace(state, stop_signal=state.stop_signal or number)
        case ReplicaReported(report):
            state = replace(state, reports={**state.reports, report.shard: report})
        case StoreLost():
            state = replace(state, is_store_lost=True)
        case Ticked():
            pass
    state = _decide_result(state, now, effects)
    state = _supervise(state, effects)
    state = _place_shards(state, now, effects)
    return state, _exit_when_over(state, effects)


def _apply_view(state: RoleState, view: RoleView, now: float, effects: list[RoleEffect]) -> RoleState:
    """Take over a new view.

    In an outage of etcd the leases of live machines run out. A grace period lets these machines register again. An
    agent does not notice every outage: it may be new, or see only that its own record is gone.
    """
    is_registered = any(node.machine == state.machine for node in view.nodes)
    if state.is_store_lost or not is_registered:
        state = replace(state, grace_until=now + state.grace_s, is_store_lost=False)
    if view.spec is not None and view.spec.run != state.run:
        view = replace(
            state.view, result=RoleResult(code=FAILED, sentence="the job was begun anew, without this agent")
        )
    elif view.revision < state.view.revision or (view.spec is None and view.result is None):
        # Etcd came back empty, or from an old backup. `_place_shards` writes the map again.
        known = ((process, local) for process, local in state.locals.items() if local.incarnation)
        effects += [
            WriteRecord(process, local.final_record or RoleProcessRecord(incarnation=local.incarnation))
            for process, local in known
        ]
        state = replace(state, written=None, has_decided=False, grace_until=now + state.grace_s)
    newest_map = max(
        (each for each in (state.newest_map, view.map) if each), key=lambda each: each.number, default=None
    )
    return replace(state, view=view, newest_map=newest_map)


def _adopt_records(state: RoleState) -> RoleState:
    """Continue from the records of an earlier agent of this machine."""
    known = state.view.processes
    mine = [process for process in state.plan.processes if process.machine == state.machine]
    found = {
        process: known.get(process.name, RoleProcessRecord(incarnation=_last_named(state.view, process)))
        for process in mine
    }
    locals_ = {
        process: Local(record.incarnation, final_record=record if record.code is not None else None)
        for process, record in found.items()
    }
    return replace(state, locals=locals_)


def _last_named(view: RoleView, process: RoleProcess) -> int:
    """Return the highest incarnation that the map names: etcd may have lost the record, and the number must grow."""
    places = view.map.places if view.map is not None and process.kind == "server" else ()
    holders = [holder for place in places for holder in (place.primary, place.replica, place.joining) if holder]
    return max((holder.incarnation for holder in holders if holder.server == process.index), default=0)


def _on_exited(state: RoleState, exited: ProcessExited, now: float, effects: list[RoleEffect]) -> RoleState:
    local = state.locals[exited.process]
    if exited.incarnation != local.incarnation or not local.is_running:
        return state
    local = replace(local, is_running=False)
    if local.is_ending:
        pass  # this agent terminated it: its exit code says nothing
    elif exited.process.kind == "server" and (state.stop_signal or state.view.result):
        pass  # the signal that ends the job may have reached it, too
    elif exited.code in {0, EXIT_NO_RESTART} and exited.process.kind != "server":
        local = replace(local, final_record=_final_record(exited))
    else:
        failures = (*(at for at in local.failures if at > now - state.window_s), now)
        is_last = len(failures) > state.max_restarts
        local = replace(local, failures=failures, final_record=_final_record(exited) if is_last else None)
        effects.append(
            Announce(
                f"{exited.process.name} {_reason(exited)}; "
                f"{'it has failed too often' if is_last else 'it is started again'}"
            )
        )
    if local.final_record is not None:
        effects.append(WriteRecord(exited.process, local.final_record))
    return _with(state, exited.process, local)


def _final_record(exited: ProcessExited) -> RoleProcessRecord:
    if exited.process.kind == "server":
        return RoleProcessRecord(incarnation=exited.incarnation, code=exited.code or FAILED, reason=_reason(exited))
    return RoleProcessRecord(incarnation=exited.incarnation, code=exited.code, reason=exited.reason)


def _reason(exited: ProcessExited) -> str:
    return exited.reason or "ended, although the job has not"


def _decide_result(state: RoleState, now: float, effects: list[RoleEffect]) -> RoleState:
    """Write the result, if the job has ended."""
    result = None if state.has_decided or state.view.result else _result(state, now)
    if result is None:
        return state
    effects.append(WriteRoleResult(result))
    return replace(state, has_decided=True)


def _result(state: RoleState, now: float) -> RoleResult | None:
    records = dict(state.view.processes)
    for process, local in state.locals.items():
        if local.final_record is not None:  # it may not be in the view yet
            records[process.name] = local.final_record
    for process in state.plan.of("server"):
        record = records.get(process.name)
        if record is not None and record.code:
            return RoleResult(code=record.code, sentence=f"{process.name} failed too often: {record.reason}")
    # This machine is present, whatever etcd has: its lease may have run out, or its record may not be written yet.
    here = {state.machine, *(state.plan.machines if _is_within_grace(state, now) else _present_machines(state.view))}
    workers = [process for kind in ("worker", "heter") for process in state.plan.of(kind)]
    ended = {
        process: records[process.name]
        for process in workers
        if process.name in records and records[process.name].code is not None
    }
    done = [process for process, record in ended.items() if record.code == 0]
    if any(process not in ended and (process.machine in here or not done) for process in workers):
        return None
    failed = [process.name for process in workers if process not in done]
    if done:
        return RoleResult(code=0, sentence=_success(failed))
    codes = [record.code for record in ended.values() if record.code]
    return RoleResult(code=codes[0] if codes else FAILED, sentence=f"all workers failed: {', '.join(failed)}")


def _success(failed: list[str]) -> str:
    return f"the job is done, without {', '.join(failed)}" if failed else "the job is done"


def _supervise(state: RoleState, effects: list[RoleEffect]) -> RoleState:
    """Start the processes that should run, and terminate those that should not."""
    is_over = bool(state.view.result or state.stop_signal)
    workers_are_there = any(local.is_running and process.kind != "server" for process, local in state.locals.items())
    for process, local in sorted(state.locals.items(), key=lambda item: (item[0].kind != "server", item[0])):
        if is_over:
            if local.is_running and not local.is_ending and (process.kind != "server" or not workers_are_there):
                is_done = state.view.result is not None and state.view.result.has_succeeded
                effects.append(TerminateProcess(process, is_done))
                state = _with(state, process, replace(local, is_ending=True))
        elif not local.is_running and local.final_record is None:
            incarnation = local.incarnation + 1
            effects += [
                WriteRecord(process, RoleProcessRecord(incarnation=incarnation)),
                StartProcess(process, incarnation),
            ]
            state = replace(state, has_begun=True)
            state = _with(state, process, replace(local, incarnation=incarnation, is_running=True))
    return state


def _place_shards(state: RoleState, now: float, effects: list[RoleEffect]) -> RoleState:
    """Write the map of shards if it is to change, and send the current one to this machine's processes."""
    view = state.view
    if view.spec is None or view.result is not None:
        return state
    made = _next_map(state, now)
    if made is not None and made != view.map and state.written != (view.map_revision, made):
        effects.append(WriteShardMap(made, view.map_revision))
        state = replace(state, written=(view.map_revision, made))
    started = any(isinstance(effect, StartProcess) for effect in effects)
    if view.map is not None and (started or view.map.number > state.sent):
        effects.append(SendShardMap(view.map))
        state = replace(state, sent=view.map.number)
    return state


def _next_map(state: RoleState, now: float) -> ShardMap | None:
    """Return the map that should be in etcd; None: it is too early for one."""
    plan, view, newest_map = state.plan, state.view, state.newest_map
    servers = plan.of("server")
    if newest_map is not None and (view.map is None or view.map.number < newest_map.number):
        return newest_map  # etcd has lost it
    if view.map is None:
        have_begun = all(process.name in view.processes for process in servers)
        return first_map(len(servers), replicas=plan.replicas) if have_begun else None
    # A server without a record: etcd has lost it, and the server's agent will write it again.
    records = {
        process: view.processes.get(process.name, RoleProcessRecord(incarnation=_last_named(view, process)))
        for process in servers
    }
    not_ended = {process: record.incarnation for process, record in records.items() if record.code is None}
    here = _present_machines(view)
    may_live = state.plan.machines if _is_within_grace(state, now) else here
    running = {process.index: number for process, number in not_ended.items() if process.machine in may_live}
    joinable = {process.index for process in not_ended if process.machine in here and process.name in view.processes}
    made = next_map(view.map, running, joinable, replicas=plan.replicas)
    for report in state.reports.values():
        if made is view.map:
            made = apply_report(made, report)
    return made


def _is_within_grace(state: RoleState, now: float) -> bool:
    """Whether machines without a record may be alive."""
    return state.is_store_lost or now < state.grace_until


def _present_machines(view: RoleView) -> set[str]:
    """Return the machines whose agents are registered."""
    return {node.machine for node in view.nodes}


def _exit_when_over(state: RoleState, effects: list[RoleEffect]) -> list[RoleEffect]:
    if any(local.is_running for local in state.locals.values()) or not (state.view.result or state.stop_signal):
        return effects
    result = state.view.result
    if result is not None:
        how = result.sentence if state.has_begun else f"the job has ended before: {result.sentence}{_HINT}"
        return [*effects, Exit(result.code, how)]
    return [*effects, Exit(128 + state.stop_signal, "left, as it was asked to")]


def _with(state: RoleState, process: RoleProcess, local: Local) -> RoleState:
    return replace(state, locals={**state.locals, process: local})
