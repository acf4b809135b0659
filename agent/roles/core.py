"""The decisions of an agent in a parameter-server job. It has no clock and no socket: `step` is a function.

The rules:

1. Each process is supervised for itself: that one ends is nobody else's concern, as far as this core goes.
2. One that fails is started again, at once, as long as it has failed at most `max_restarts` times within the window; a
   worker's exit with "do not restart" is final. A server's last failure ends the job; a worker's only its post.
3. A worker that ends with 0 has done its part. The job has succeeded when no worker runs or may run any more, and one
   of them has done its part; it has failed when none has.
4. What a machine that is lost would have had to do, nobody else does: its workers are waited for only while none has
   done its part. Its servers are waited for.
5. After an outage of etcd machines that are not there may live: for a while their servers keep their shards.
6. When there is a result every agent ends what it has, workers first, and leaves with it. So does one whose run is over
   since the job was begun anew.
7. What etcd has lost is written again by those who know it, before anything else is decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from agent.core.effects import Announce, Exit
from agent.core.events import StopAsked, StoreLost, Ticked
from agent.roles.model import RoleProcessRecord, RoleResult, RoleView
from agent.roles.plan import RolePlan, RoleProcess
from agent.roles.shards import ReplicaReport, first_map, heard, next_map
from trainer_runtime.contract import EXIT_NO_RESTART
from trainer_runtime.shard_map import ShardMap

FAILED = 1
_HINT = "; elastic-agent reset lets it begin anew"


# Events


@dataclass(frozen=True)
class RoleViewChanged:
    """What etcd has."""

    view: RoleView


@dataclass(frozen=True)
class ProcessExited:
    """Nothing is left of a post's process."""

    post: RoleProcess
    incarnation: int
    code: int
    """As a shell counts: 128 + the signal's number, of one that was killed."""
    why: str
    """In words; empty: it ended with 0."""


@dataclass(frozen=True)
class ReplicaReported:
    """A server here says whether the copy of a shard is whole."""

    said: ReplicaReport


Event = RoleViewChanged | ReplicaReported | ProcessExited | StopAsked | StoreLost | Ticked


# Effects, in the order in which they are to be done


@dataclass(frozen=True)
class StartProcess:
    """Let a process begin at a post."""

    post: RoleProcess
    incarnation: int


@dataclass(frozen=True)
class TerminateProcess:
    """Ask a post's process to end; SIGKILL after the usual time."""

    post: RoleProcess
    is_done: bool = False
    """The job has succeeded: the next run is not to go on with what a server keeps on disk."""


@dataclass(frozen=True)
class WriteRecord:
    """Say what has become of a post."""

    post: RoleProcess
    record: RoleProcessRecord


@dataclass(frozen=True)
class WriteShardMap:
    """Say which server has which shard, unless somebody has since this revision; 0: unless somebody ever has."""

    map: ShardMap
    after_revision: int


@dataclass(frozen=True)
class SendShardMap:
    """Tell all processes here."""

    map: ShardMap


@dataclass(frozen=True)
class Decide:
    """Say how the job ended, if nobody has said so before."""

    result: RoleResult


StoreEffect = WriteRecord | WriteShardMap | Decide

Effect = StoreEffect | StartProcess | TerminateProcess | SendShardMap | Announce | Exit


@dataclass(frozen=True)
class Local:
    """A post of this agent's."""

    incarnation: int = 0
    """Of the process that is there, or was; 0: there was none."""
    is_there: bool = False
    is_ending: bool = False
    """It was asked to."""
    failures: tuple[float, ...] = ()
    """When processes failed, within the window."""
    last: RoleProcessRecord | None = None
    """What has become of it, if there is to be no other process."""


@dataclass(frozen=True)
class RoleState:
    """What an agent knows."""

    plan: RolePlan
    run: str
    """Which it belongs to."""
    machine: str
    max_restarts: int
    window_s: float
    patience_s: float = 0.0
    """After an outage of etcd nobody is taken for lost for so long."""
    locals: dict[RoleProcess, Local] = field(default_factory=dict)
    view: RoleView = field(default_factory=RoleView)
    asked_by: int = 0
    """The signal that asks this agent to leave; 0: none."""
    decided: bool = False
    is_cut_off: bool = True
    """Etcd cannot be reached, or was not yet."""
    patient_until: float = 0.0
    """Machines that are not in the view may live."""
    said: dict[int, ReplicaReport] = field(default_factory=dict)
    """What servers here have said of copies, by shard."""
    written: tuple[int, ShardMap] | None = None
    """The map that was written last, and the revision that it was to follow."""
    told: int = 0
    """Number of the newest map that all processes here were told."""
    newest: ShardMap | None = None
    """The newest map that was ever seen."""
    has_begun: bool = False
    """A process was started here."""


def step(state: RoleState, event: Event, now: float) -> tuple[RoleState, list[Effect]]:
    """What follows from an event."""
    effects: list[Effect] = []
    match event:
        case RoleViewChanged(view):
            state = _see(state, view, now, effects)
            if not state.locals:
                state = _take_up(state)
        case ProcessExited():
            state = _on_gone(state, event, now, effects)
        case StopAsked(number):
            state = replace(state, asked_by=state.asked_by or number)
        case ReplicaReported(said):
            state = replace(state, said={**state.said, said.shard: said})
        case StoreLost():
            state = replace(state, is_cut_off=True)
        case Ticked():
            pass
    state = _decide(state, now, effects)
    state = _supervise(state, effects)
    state = _place_shards(state, now, effects)
    return state, _end(state, effects)


def _see(state: RoleState, view: RoleView, now: float, effects: list[Effect]) -> RoleState:
    """A new view. After an outage leases have ended of machines that live: they are given the time to come back.

    That there was one is not always known: an agent may be new, or find no more than that its own lease has ended.
    """
    is_there = any(node.machine == state.machine for node in view.nodes)
    if state.is_cut_off or not is_there:
        state = replace(state, patient_until=now + state.patience_s, is_cut_off=False)
    if view.spec is not None and view.spec.run != state.run:
        view = replace(
            state.view, result=RoleResult(code=FAILED, sentence="the job was begun anew, without this agent")
        )
    elif view.revision < state.view.revision or (view.spec is None and view.result is None):
        # It came back empty, or from an old backup. The map is written again in its turn.
        known = ((post, local) for post, local in state.locals.items() if local.incarnation)
        effects += [
            WriteRecord(post, local.last or RoleProcessRecord(incarnation=local.incarnation)) for post, local in known
        ]
        state = replace(state, written=None, decided=False, patient_until=now + state.patience_s)
    newest = max((each for each in (state.newest, view.map) if each), key=lambda each: each.number, default=None)
    return replace(state, view=view, newest=newest)


def _take_up(state: RoleState) -> RoleState:
    """Find out what has become of this machine's posts before: an agent may follow another."""
    known = state.view.posts
    mine = [post for post in state.plan.posts if post.machine == state.machine]
    found = {post: known.get(post.name, RoleProcessRecord(incarnation=_last_named(state.view, post))) for post in mine}
    locals_ = {
        post: Local(record.incarnation, last=record if record.code is not None else None)
        for post, record in found.items()
    }
    return replace(state, locals=locals_)


def _last_named(view: RoleView, post: RoleProcess) -> int:
    """The last process that the map knows at a post whose record etcd has lost: another must not be taken for it."""
    places = view.map.places if view.map is not None and post.kind == "server" else ()
    holders = [holder for place in places for holder in (place.primary, place.replica, place.joining) if holder]
    return max((holder.incarnation for holder in holders if holder.server == post.index), default=0)


def _on_gone(state: RoleState, gone: ProcessExited, now: float, effects: list[Effect]) -> RoleState:
    local = state.locals[gone.post]
    if gone.incarnation != local.incarnation or not local.is_there:
        return state
    local = replace(local, is_there=False)
    if local.is_ending:
        pass  # it was asked to: what it ended with says nothing
    elif gone.post.kind == "server" and (state.asked_by or state.view.result):
        pass  # it ends before its turn, since somebody told it as well
    elif gone.code in {0, EXIT_NO_RESTART} and gone.post.kind != "server":
        local = replace(local, last=_last(gone))
    else:
        failures = (*(at for at in local.failures if at > now - state.window_s), now)
        is_last = len(failures) > state.max_restarts
        local = replace(local, failures=failures, last=_last(gone) if is_last else None)
        effects.append(
            Announce(
                f"{gone.post.name} {_why(gone)}; {'that was once too often' if is_last else 'it is started again'}"
            )
        )
    if local.last is not None:
        effects.append(WriteRecord(gone.post, local.last))
    return _with(state, gone.post, local)


def _last(gone: ProcessExited) -> RoleProcessRecord:
    if gone.post.kind == "server":
        return RoleProcessRecord(incarnation=gone.incarnation, code=gone.code or FAILED, reason=_why(gone))
    return RoleProcessRecord(incarnation=gone.incarnation, code=gone.code, reason=gone.why)


def _why(gone: ProcessExited) -> str:
    return gone.why or "ended, although the job has not"


def _decide(state: RoleState, now: float, effects: list[Effect]) -> RoleState:
    """How the job ended, if it has."""
    result = None if state.decided or state.view.result else _result(state, now)
    if result is None:
        return state
    effects.append(Decide(result))
    return replace(state, decided=True)


def _result(state: RoleState, now: float) -> RoleResult | None:
    records = dict(state.view.posts)
    for post, local in state.locals.items():
        if local.last is not None:  # it may not be in the view yet
            records[post.name] = local.last
    for post in state.plan.of("server"):
        record = records.get(post.name)
        if record is not None and record.code:
            return RoleResult(code=record.code, sentence=f"{post.name} failed too often: {record.reason}")
    # Its own machine is here, whatever etcd says: its lease may have ended, or its record may not be there yet.
    here = {state.machine, *(state.plan.machines if _is_patient(state, now) else _machines(state.view))}
    workers = [post for kind in ("worker", "heter") for post in state.plan.of(kind)]
    ended = {
        post: records[post.name] for post in workers if post.name in records and records[post.name].code is not None
    }
    done = [post for post, record in ended.items() if record.code == 0]
    if any(post not in ended and (post.machine in here or not done) for post in workers):
        return None
    failed = [post.name for post in workers if post not in done]
    if done:
        return RoleResult(code=0, sentence=_success(failed))
    codes = [record.code for record in ended.values() if record.code]
    return RoleResult(code=codes[0] if codes else FAILED, sentence=f"all workers failed: {', '.join(failed)}")


def _success(failed: list[str]) -> str:
    return f"the job is done, without {', '.join(failed)}" if failed else "the job is done"


def _supervise(state: RoleState, effects: list[Effect]) -> RoleState:
    """Start what should run, and end what should not."""
    is_over = bool(state.view.result or state.asked_by)
    workers_are_there = any(local.is_there and post.kind != "server" for post, local in state.locals.items())
    for post, local in sorted(state.locals.items(), key=lambda item: (item[0].kind != "server", item[0])):
        if is_over:
            if local.is_there and not local.is_ending and (post.kind != "server" or not workers_are_there):
                is_done = state.view.result is not None and state.view.result.has_succeeded
                effects.append(TerminateProcess(post, is_done))
                state = _with(state, post, replace(local, is_ending=True))
        elif not local.is_there and local.last is None:
            incarnation = local.incarnation + 1
            effects += [WriteRecord(post, RoleProcessRecord(incarnation=incarnation)), StartProcess(post, incarnation)]
            state = replace(state, has_begun=True)
            state = _with(state, post, replace(local, incarnation=incarnation, is_there=True))
    return state


def _place_shards(state: RoleState, now: float, effects: list[Effect]) -> RoleState:
    """Say which server has which shard, where that has changed; and tell those who are here."""
    view = state.view
    if view.spec is None or view.result is not None:
        return state
    made = _next_map(state, now)
    if made is not None and made != view.map and state.written != (view.map_revision, made):
        effects.append(WriteShardMap(made, view.map_revision))
        state = replace(state, written=(view.map_revision, made))
    started = any(isinstance(effect, StartProcess) for effect in effects)
    if view.map is not None and (started or view.map.number > state.told):
        effects.append(SendShardMap(view.map))
        state = replace(state, told=view.map.number)
    return state


def _next_map(state: RoleState, now: float) -> ShardMap | None:
    """None: there is none yet."""
    plan, view, newest = state.plan, state.view, state.newest
    servers = plan.of("server")
    if newest is not None and (view.map is None or view.map.number < newest.number):
        return newest  # it was lost
    if view.map is None:
        have_begun = all(post.name in view.posts for post in servers)
        return first_map(len(servers), replicas=plan.replicas) if have_begun else None
    # One without a record was lost with etcd's data: its agent will write it again.
    records = {
        post: view.posts.get(post.name, RoleProcessRecord(incarnation=_last_named(view, post))) for post in servers
    }
    running = {post: record.incarnation for post, record in records.items() if record.code is None}
    here = _machines(view)
    may_live = state.plan.machines if _is_patient(state, now) else here
    there = {post.index: number for post, number in running.items() if post.machine in may_live}
    may_join = {post.index for post in running if post.machine in here and post.name in view.posts}
    made = next_map(view.map, there, may_join, replicas=plan.replicas)
    for said in state.said.values():
        if made is view.map:
            made = heard(made, said)
    return made


def _is_patient(state: RoleState, now: float) -> bool:
    """Whether machines that are not in the view may live."""
    return state.is_cut_off or now < state.patient_until


def _machines(view: RoleView) -> set[str]:
    """Those that are there."""
    return {node.machine for node in view.nodes}


def _end(state: RoleState, effects: list[Effect]) -> list[Effect]:
    if any(local.is_there for local in state.locals.values()) or not (state.view.result or state.asked_by):
        return effects
    result = state.view.result
    if result is not None:
        how = result.sentence if state.has_begun else f"the job has ended before: {result.sentence}{_HINT}"
        return [*effects, Exit(result.code, how)]
    return [*effects, Exit(128 + state.asked_by, "left, as it was asked to")]


def _with(state: RoleState, post: RoleProcess, local: Local) -> RoleState:
    return replace(state, locals={**state.locals, post: local})
