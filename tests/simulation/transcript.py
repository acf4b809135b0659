"""What happens in the simulation, as typed facts: a line for each record in etcd and each act of an agent.

Lines are made from records, effects and fields of the agents' states, never from sentences: a change of wording changes
none of them. They hold causes, members, steps and codes, and no times, except where a scenario asks for them.
docs/simulation.md lists them. Nodes that follow each other under one head are on one line: `start 2: a b`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from simulation.etcd import KEYS

from agent.core import effects as fx
from agent.core.failures import Failure
from agent.core.hangs import as_report, in_group
from agent.core.incident import GroupChange, Incident, StallReport, WorkerEnd
from agent.core.member_status import MemberStatus
from agent.core.model import Group, HandoffRequest, Leader, Node, Result, Spec, Suspicion
from agent.core.reasons import Requested
from agent.core.records import Record
from agent.core.saved_states import Checkpoint, RestorePoint, StateId
from agent.core.view import ClusterView
from agent.observe.messages import rivals
from agent.store.api import ChangeBatch

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.cluster import Cluster

_KINDS: dict[str, type[Record]] = {
    KEYS.spec: Spec,
    KEYS.nodes: Node,
    KEYS.leader: Leader,
    KEYS.group: Group,
    KEYS.incidents: Incident,
    KEYS.restore_point: RestorePoint,
    KEYS.handoff: HandoffRequest,
    KEYS.checkpoint: Checkpoint,
    KEYS.statuses(): MemberStatus,
    KEYS.suspects: Suspicion,
    KEYS.result: Result,
}
"""By key, or by the prefix of many. In the order of their lines, where one write has several."""


_SAME_S = 0.01
"""Times that differ by less are the same."""


class Transcript:
    """The facts of one job so far, in their order."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.lines: list[str] = []
        self.has_times = False
        """Lines of completed incidents have their phases in seconds."""
        self._last: dict[str, Record] = {}
        """By key, what was there before."""
        self._seen: dict[int, tuple[int, tuple[str, ...], float | None]] = {}
        """By agent: the group, what it saw of it as a leader, and until when it waited."""
        self._slow: dict[int, tuple[int, tuple[int, ...]]] = {}
        """By agent: a group, and its ranks that it has named as slow."""
        self._unanswered: set[int] = set()
        """Agents whose last write had no answer."""

    def note(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)
        self._cluster.tell(line)

    def name(self, head: str, name: str) -> None:
        """Add a node to the last line if that has the same head; else begin a line with it."""
        is_same = bool(self.lines) and self.lines[-1].startswith(f"{head}: ")
        self._cluster.tell(f"{head}: {name}")
        if is_same:
            self.lines[-1] += f" {name}"
        else:
            self.lines.append(f"{head}: {name}")

    def forget(self) -> None:
        """Etcd has lost its data, or has those of a backup: what is there now was not written."""
        etcd = self._cluster.etcd
        self._last.clear()
        for key in etcd.data.items:
            kind = next((kind for prefix, kind in _KINDS.items() if key.startswith(prefix)), None)
            record = etcd.record(key, kind) if kind is not None else None
            if record is not None:
                self._last[key] = record

    def on_write(self, batch: ChangeBatch) -> None:
        """Note what has landed in etcd."""
        for prefix, kind in _KINDS.items():
            for change in batch.changes:
                if change.key.startswith(prefix):
                    self._on_change(change.key, kind)

    def _on_change(self, key: str, kind: type[Record]) -> None:
        record, last = self._cluster.etcd.record(key, kind), self._last.pop(key, None)
        if record is None:
            self._on_deletion(last)
            return
        self._last[key] = record
        self._on_record(record, last)
        for line in self._lines(record, last):
            self.note(line)

    def _on_deletion(self, last: Record | None) -> None:
        match last:
            case Node():
                self.name("leave", last.node_id)
            case Suspicion(node_id=name, by_node_id=by) if KEYS.node(by) in self._cluster.etcd.data.items:
                self.name(f"clear {name}", by)  # else the node that said so is gone, and its word with it
            case _:
                pass

    def _on_record(self, record: Record, last: Record | None) -> None:
        """Note a record that each node has of its own."""
        match record:
            case Node(node_id=name):
                for head in _node(record, last if isinstance(last, Node) else None):
                    self.name(head, name)
            case Leader(node_id=name):
                self.name("leader", name)
            case MemberStatus():
                self._on_status(record, last if isinstance(last, MemberStatus) else None)
            case Suspicion(node_id=name, by_node_id=by):
                self.name(f"suspect {name} {'lost' if record.is_lost else 'silent'}", by)
            case _:
                pass

    def _on_status(self, status: MemberStatus, last: MemberStatus | None) -> None:
        """Note its parts that are new; how it moved into the group is in the incident."""
        quiesced, ended, stall = status.quiesced, status.exit, status.stall
        if quiesced is not None and (last is None or quiesced != last.quiesced):
            self.name(f"quiesced {quiesced.number}{' late' if quiesced.is_late else ''}", status.node_id)
        if ended is not None and (last is None or ended != last.exit):
            how = _end(ended.failure) if ended.failure is not None else "done"
            self.name(f"report {status.group} {how}", status.node_id)
        if stall is not None and (last is None or stall != last.stall):
            self.note(_stall(stall))

    def _lines(self, record: Record, last: Record | None) -> Iterable[str]:
        """The lines about a record of which the job has one, or of which each line stands alone."""
        found: Iterable[str] = ()
        match record:
            case Spec():
                found = _spec(record, last if isinstance(last, Spec) else None)
            case Group():
                found = [_group(record, self._failed(record))]
            case Incident():
                found = self._incident(record, last if isinstance(last, Incident) else None)
            case RestorePoint():
                found = [f"restore {record.group}: {_restored(record)}"]
            case HandoffRequest():
                found = [f"handoff {record.number} of {record.group}{', in memory' if record.in_memory else ''}"]
            case Checkpoint():
                found = [_checkpoint(record)]
            case Result():
                holders = record.reason.node_ids if isinstance(record.reason, Requested) else ()
                unsaved = f", not saved: {' '.join(holders)}" if holders else ""
                found = [f"result {record.exit_code} {record.state}{unsaved}"]
            case _:
                pass
        return found

    def _failed(self, group: Group) -> tuple[WorkerEnd, ...]:
        """How workers of the group before failed, as the leader saw it that wrote this one."""
        change = self._cluster.etcd.record(KEYS.change(group.number), GroupChange)
        writer = self._cluster.etcd.writer
        drafts = writer.recorder.drafts if writer is not None else ()
        return next((each.ended for each in drafts if each.change == change), ())

    def _incident(self, incident: Incident, last: Incident | None) -> Iterator[str]:
        """The lines of an incident that is completed, or opened by another leader than the one that wrote its group."""
        if last is None and incident.phases.detect_s is None:
            told = [_ended(incident.ended)] if incident.ended else []
            yield ", ".join([f"incident {incident.group} from records", *told])
        if not incident.phases.is_complete or (last is not None and last.phases.is_complete):
            return
        ended = f", {_ended(incident.ended)}" if last is not None and incident.ended != last.ended else ""
        times = f", {_phases(incident)}" if self.has_times else ""
        replayed = "unknown" if incident.is_at_least else incident.replayed_steps
        yield f"incident {incident.group}: replayed {replayed}{ended}{times}"

    # Agents

    def on_act(self, agent: Agent, effect: fx.Effect) -> None:
        """Note an effect that an agent carries out, unless its record says as much."""
        match effect:
            case fx.StartWorkers(group=group):
                self.name(f"start {group.number}", agent.name)
            case fx.SetUpWorkers(group=group):
                self.name(f"set up beside {group.number}", agent.name)
            case fx.MoveWorkers(group=group):
                self.name(f"move {group.number}", agent.name)
            case fx.AnswerPublish(copy=copy, checkpoint=None):
                self.note(f"refused {agent.name}: {named(copy)}")
            case fx.SaveSnapshot(copy=copy):
                self.note(f"saves {agent.name}: {named(copy)}")
            case fx.Evict(who=who):
                self.name(f"evict {who.node_id}", agent.name)
            case fx.Exit(code=code, unsaved=unsaved):
                self.name(f"exit {code}", agent.name)
                if unsaved is not None:
                    self.note(f"given up {agent.name}: steps after {unsaved.saved} up to {unsaved.reached}")
            case _:
                pass

    def on_turn(self, agent: Agent) -> None:
        """Note what a leader has come to see since its last turn, and that it waits until a certain time."""
        self._on_slow(agent)
        number, before, waited_until = self._seen.get(agent.serial, (0, (), None))
        now, until = _seen(agent)
        self._seen[agent.serial] = agent.state.seen.group or 0, now, until
        for word in now:
            if word not in before:
                self.name(word, agent.name)
        if number == agent.state.seen.group and agent.state.planned is not None:
            for word in before:
                if word not in now:
                    self.name(f"{word} no more", agent.name)
        if until is not None and (waited_until is None or abs(until - waited_until) > _SAME_S):
            self.name("waits", agent.name)

    def _on_slow(self, agent: Agent) -> None:
        (number, ranks), last = agent.recorder.announced.slow, self._slow.get(agent.serial, (0, ()))
        self._slow[agent.serial] = number, ranks
        for rank in ranks:
            if number != last[0] or rank not in last[1]:
                self.note(f"slow {number}: rank {rank}")

    def on_answer(self, agent: Agent, *, is_known: bool) -> None:
        """Note that the writes of an agent have no answers any more, or have them again."""
        was_known = agent.serial not in self._unanswered
        if is_known and not was_known:
            self._unanswered.discard(agent.serial)
            self.name("answered", agent.name)
        elif was_known and not is_known:
            self._unanswered.add(agent.serial)
            self.name("unanswered", agent.name)


def _seen(agent: Agent) -> tuple[tuple[str, ...], float | None]:
    """What the agent sees as a leader, as heads of lines; and until when it waits."""
    seen, planned = agent.state.seen, agent.state.planned
    if planned is None:
        return (), None
    idle = _idle(agent.state.view)
    told = {
        "sees lost data": seen.data_lost_since is not None,
        "sees a partition": seen.partitioned_since is not None,
        f"sees a standstill of {idle}": bool(idle),
        "sees a hang": seen.stalled_since is not None,
    }
    until = planned.wake_at if planned.action is None else None
    is_waiting = until is not None and until > agent.clock()
    return tuple(word for word, holds in told.items() if holds), until if is_waiting else None


def _idle(view: ClusterView | None) -> str:
    """The rank that the leader would blame for a standstill; empty: there is none."""
    group = view.group.value if view is not None and view.group is not None else None
    stalls = in_group(group, view.stalls, view.exits) if view is not None and group is not None else ()
    if group is None or not stalls:
        return ""
    accused = as_report(group, stalls)
    return f"rank {accused.failure.rank if accused.failure is not None else 0} on {accused.node_id}"


def named(copy: StateId | None) -> str:
    """`step 5 of group 2`."""
    if copy is None:
        return "nothing"
    return f"step {copy.step}{f' save {copy.save}' if copy.save else ''} of group {copy.group}"


def _spec(spec: Spec, last: Spec | None) -> Iterator[str]:
    if last is None or last.run != spec.run:
        yield f"job {spec.run} np={spec.np}{' fresh' if spec.fresh else ''}"
        return
    if spec.np != last.np:
        yield f"spec np={spec.np}"
    if spec.in_place != last.in_place:
        yield "spec in place"
    if spec.paused_by != last.paused_by:
        yield "spec paused" if spec.paused_by else "spec resumed"
    if spec.ending != last.ending:
        yield "spec stopped" if isinstance(spec.ending, Requested) else "spec to end"
    if spec.restart_after != last.restart_after:
        yield f"spec restart {spec.restart_after}"
    if spec.excluded != last.excluded:
        yield f"spec excluded {' '.join(spec.excluded) or 'nobody'}"
    if spec.drained != last.drained:
        yield f"spec drained {' '.join(who.node_id for who in spec.drained)}"


def _node(node: Node, last: Node | None) -> Iterator[str]:
    """Heads of lines about it."""
    if last is not None and last.incarnation != node.incarnation:
        yield "leave"
    if last is None or last.incarnation != node.incarnation:
        yield "join"
        last = None
    now, before = _reported(node), _reported(last) if last is not None else (False, False, False, 0, 0)
    heads = (("", "draining"), ("fit", "unfit"), ("warm", "warming"), "cached", "reaches")
    for head, value, was in zip(heads, now, before, strict=True):
        if value != was:
            yield head[bool(value)] if isinstance(head, tuple) else f"{head} {value}"


def _reported(node: Node) -> tuple[bool, bool, bool, int, int]:
    """The fields of a node that decisions rest on, besides its place."""
    cached = node.cached.number if node.cached is not None else 0
    return node.is_draining, bool(node.unfit), node.is_warming, cached, node.reachable_group


def _group(group: Group, ended: tuple[WorkerEnd, ...]) -> str:
    members = " ".join(member.node_id for member in group.members) or "nobody"
    cause = f"{group.cause}: {_ended(ended)}" if ended else group.cause
    counted = [("restarts", group.restarts), ("flaps", group.flaps), ("failed reads", group.failed_reads)]
    told = [f"{name} {value}" for name, value in counted if value]
    if group.placed_last:
        told.append(f"last {' '.join(group.placed_last)}")
    return ", ".join([f"group {group.number}: {members} ({cause})", *told])


def _restored(restore_point: RestorePoint) -> str:
    if restore_point.copy is None:
        return "nothing"
    committed = restore_point.checkpoint
    is_saved = committed is not None and committed.copy == restore_point.copy
    return f"{named(restore_point.copy)} from {f'checkpoint {committed.number}' if is_saved else 'memory'}"


def _checkpoint(committed: Checkpoint) -> str:
    told = [
        "rollback" if committed.is_rollback else "",
        f"handoff {committed.handoff}" if committed.handoff else "",
        "late" if committed.is_late else "",
        f"on {committed.node}" if committed.node else "",
    ]
    return ", ".join([f"checkpoint {committed.number}: {named(committed.copy)}", *filter(None, told)])


def _end(failure: Failure) -> str:
    if failure.hang:
        return "hang"
    if failure.unreadable:
        return "unreadable"
    if failure.is_port_taken:
        return "port taken"
    if failure.is_peer_lost:
        return "peer lost"
    return f"exit {failure.exit_code}" if failure.signal is None else f"signal {failure.signal}"


def _ended(ended: tuple[WorkerEnd, ...]) -> str:
    either = rivals(ended)
    told = [f"rank {each.failure.rank} on {each.node_id} {_end(each.failure)}" for each in ended]
    links = ["", *("or " if each in either else "then " for each in ended[1:])]
    return ", ".join(link + each for link, each in zip(links, told, strict=True))


def _stall(stall: StallReport) -> str:
    idle = [f"rank {each.rank} {each.doing} after step {each.step}" for each in stall.ranks if each.doing != "waits"]
    return ", ".join([f"stall {stall.node_id}: {stall.stage}", *(idle if stall.stage != "over" else ())])


def _phases(incident: Incident) -> str:
    phases = incident.phases
    spent = [(name.removesuffix("_s"), getattr(phases, name) or 0.0) for name in phases.__struct_fields__]
    return " ".join(f"{name}={seconds:.2f}" for name, seconds in spent if seconds >= 0.005)
