"""Whole parameter-server jobs in one process: the real core and records, on simulated etcd, servers and time.

What runs is `agent/roles`: `core.step`, `shards`, and the writes of `store` with their codec and their compares. Agents
die, are cut off or are asked to leave; etcd is away, or comes back empty; writes land late, after others; servers are
lost, and copies. A server is what `trainer_runtime/ps/shard_host.py` makes of it, reduced to the pushes that it has
(`Server`).

The invariants, by which a failure is named:

| name | what holds |
|---|---|
| one process | at most one incarnation of each process runs; the numbers of those that a map may name grow |
| records grow | the record of a process is never written over by an earlier one |
| over is over | a process that ended for good, and a job with a result, start nothing any more |
| one result | it is written once, all leave with it, and it follows from the records of the processes |
| told first | what is started has its record before it in the effects; nothing follows `Exit` |
| maps grow | each map is the next one, and a shard begins anew only when those who had it are lost |
| nothing lost | a primary of the newest map has every push that was answered |
| one primary | who goes by an older map answers nothing any more once another has answered by a newer one |
| it goes on | once faults have ended all servers run, shards have their copies, and the job ends with its workers |
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar, cast

from agent.core.effects import Announce, Exit
from agent.core.events import StopAsked, StoreLost, Ticked
from agent.errors import StoreUnavailable
from agent.roles import core
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
from agent.roles.model import RoleNode, RoleView
from agent.roles.plan import RolePlan, RoleProcess
from agent.roles.shards import ReplicaReport
from agent.roles.store import RoleKeys, RoleWriter, agree_on_spec
from agent.store.api import Compare, Delete, KeyRange, Lease, Put, Snapshot, TransactionResult
from agent.store.memory import MemoryStore
from trainer_runtime.contract import EXIT_NO_RESTART
from trainer_runtime.shard_map import ShardMap, ShardPlace, ShardServer

KEYS = RoleKeys("job")
TTL_S = 4.0
_LATE_S = 6.0
_LIVE_EVENTS = 6000
_MANY = 1000
"""Restarts: nobody fails so often."""

T = TypeVar("T")


class Client(MemoryStore):
    """One agent's way to etcd: its answers can be lost, and its writes can land later than others that followed."""

    def __init__(self, world: World, agent: Agent) -> None:
        super().__init__()
        self._data, self._connection.data = world.store._data, world.store._data
        self._world, self._agent = world, agent

    def read(self, ranges: Sequence[KeyRange]) -> Snapshot:
        return self._call(lambda: super(Client, self).read(ranges), is_write=False)

    def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TransactionResult:
        return self._call(lambda: self._world.land(lambda: super(Client, self).transact(compares, writes)))

    def grant(self, ttl_s: float) -> Lease:
        return self._call(lambda: super(Client, self).grant(ttl_s), is_write=False)

    def refresh(self, lease_id: int) -> float:
        return self._call(lambda: super(Client, self).refresh(lease_id), is_write=False)

    def _call(self, call: Callable[[], T], *, is_write: bool = True) -> T:
        world = self._world
        if not world.is_reached_by(self._agent):
            raise StoreUnavailable("no way to etcd")
        if is_write and world.chance.random() < world.loss:
            fate = world.chance.choice(("landed", "lost", "late"))
            if fate == "landed":
                call()
            elif fate == "late":
                world.late.append((world.now + world.chance.uniform(0.0, _LATE_S), call))
            raise StoreUnavailable("the answer was lost")
        return call()


@dataclass
class Copy:
    """One shard as one server process has it."""

    map: int = 0
    place: ShardPlace | None = None
    era: int = 0
    """Whose rows these are; 0: none, or not all."""
    rows: set[int] = field(default_factory=set)
    is_primary: bool = False
    source: object = None
    """The connection over which it is being given them."""
    source_map: int = 0
    """By which it was given."""
    line: Server | None = None
    """To a copy that has all."""
    line_to: ShardServer | None = None
    link: object = None
    promised: int = 0
    copying: tuple[ShardServer, object] | None = None

    @property
    def is_in_question(self) -> bool:
        """As `Hosted._is_in_question`."""
        return self.line is None and self.place is not None and bool(self.place.replica or self.promised == self.map)


class Process:
    """One incarnation of a planned process."""

    def __init__(self, world: World, agent: Agent, planned: RoleProcess, incarnation: int) -> None:
        self.world, self.agent, self.planned, self.incarnation = world, agent, planned, incarnation
        self.is_alive = True
        self.is_ending = False
        self.was_asked = False
        """It ended since it was to."""
        self.map_number = 0
        """Number of the last map that it was told."""

    def end(self, code: int) -> None:
        self.is_alive, self.was_asked = False, self.is_ending
        self.agent.inbox.append(
            ProcessExited(self.planned, self.incarnation, code, f"ended with {code}" if code else "")
        )

    def receive(self, told: ShardMap) -> None:
        self.map_number = told.number


class Server(Process):
    """As `trainer_runtime/ps/shard_host.py`, where a push is a number."""

    def __init__(self, world: World, agent: Agent, planned: RoleProcess, incarnation: int) -> None:
        super().__init__(world, agent, planned, incarnation)
        self.me = ShardServer(planned.index, incarnation)
        self.copies = [Copy() for _ in world.plan.of("server")]
        self.told: deque[ShardMap] = deque()

    def receive(self, told: ShardMap) -> None:
        super().receive(told)
        self.told.append(told)

    def take_map(self) -> None:
        """The oldest one that it was told."""
        told = self.told.popleft()
        for shard, (copy, place) in enumerate(zip(self.copies, told.places, strict=True)):
            if told.number > copy.map and told.number >= copy.source_map:
                copy.map, copy.place = told.number, place
                (self._be_primary if place.primary == self.me else self._be_none)(shard, copy, place)

    def _be_primary(self, shard: int, copy: Copy, place: ShardPlace) -> None:
        copy.source = None
        if not copy.is_primary or copy.era != place.era:
            copy.is_primary = True
            if copy.era != place.era:
                self._drop_line(copy)
                copy.rows, copy.era = set(), place.era
        if copy.line_to != (place.replica or place.joining):
            self._drop_line(copy)
        if copy.line is not None and place.joining == copy.line_to:
            self._promise(shard, copy, is_complete=True)
        elif copy.line is None and place.replica is not None:
            self._promise(shard, copy, is_complete=False)

    def _be_none(self, _shard: int, copy: Copy, place: ShardPlace) -> None:
        if copy.is_primary:
            copy.is_primary, copy.era, copy.rows = False, 0, set()
            self._drop_line(copy)
        if self.me not in (place.replica, place.joining) and copy.source is not None:
            copy.source, copy.era = None, 0

    def _drop_line(self, copy: Copy) -> None:
        copy.line = copy.line_to = copy.link = None

    def _promise(self, shard: int, copy: Copy, *, is_complete: bool) -> None:
        if is_complete:
            copy.promised = copy.map
        self.agent.inbox.append(ReplicaReported(ReplicaReport(copy.map, shard, is_complete=is_complete)))

    def lose_line(self, shard: int) -> None:
        """The copy does not answer."""
        copy = self.copies[shard]
        if copy.line is not None:
            copy.line = copy.link = None
            if copy.place is not None and copy.place.replica == copy.line_to:
                self._promise(shard, copy, is_complete=False)

    def push(self, shard: int, number: int) -> bool:
        """A worker pushes; return whether it is answered. One that is not comes again, as another here."""
        copy = self.copies[shard]
        if not copy.is_primary or copy.is_in_question:
            return False
        if copy.line is not None and not copy.line.has(shard, copy.link):
            self.lose_line(shard)
        copy.rows.add(number)
        if copy.line is not None:
            copy.line.copies[shard].rows.add(number)
        return not copy.is_in_question

    def has(self, shard: int, link: object) -> bool:
        """Whether this is the copy at the end of that connection."""
        return self.is_alive and self.copies[shard].source is link

    def copy_on(self, shard: int) -> None:
        """Begin to give a copy to who joins, or come to the end of it."""
        copy = self.copies[shard]
        is_asked = copy.is_primary and copy.line is None and copy.promised < copy.map
        if not is_asked or copy.place is None or copy.place.joining is None:
            copy.copying = None
            return
        other = self.world.servers.get(copy.place.joining)
        if other is None or not other.is_alive:
            copy.copying = None
        elif copy.copying is None or copy.copying[0] != copy.place.joining:
            theirs = other.copies[shard]
            if copy.map >= max(theirs.map, theirs.source_map) and not theirs.is_primary:
                theirs.source = link = object()
                theirs.source_map = copy.map
                theirs.era, theirs.rows = 0, set()
                copy.copying = (copy.place.joining, link)
        elif other.has(shard, copy.copying[1]):
            theirs = other.copies[shard]
            theirs.rows, theirs.era = set(copy.rows), copy.era
            copy.line, copy.line_to, copy.link = other, copy.place.joining, copy.copying[1]
            copy.copying = None
            self._promise(shard, copy, is_complete=True)
        else:
            copy.copying = None


class Agent:
    """A machine's agent, with the real core."""

    def __init__(self, world: World, machine: str, serial: int, max_restarts: int) -> None:
        self.world, self.machine, self.serial = world, machine, serial
        self.state = core.RoleState(world.plan, world.spec.run, machine, max_restarts, window_s=30.0, grace_s=TTL_S)
        self.inbox: deque[RoleEvent] = deque()
        self.writes: deque[Callable[[], object]] = deque()
        self.processes: dict[RoleProcess, Process] = {}
        self.lease: Lease | None = None
        self.refresh_at = 0.0
        self.is_alive = True
        self.exit: Exit | None = None
        self.cut_until = 0.0
        self.is_lost = False
        """It was cut off alone, or has left, and others may take it for gone."""
        self.back_at = -_LATE_S
        self.is_out = False
        self._seen = 0
        self.client = Client(world, self)
        node = RoleNode(machine=machine, incarnation=str(serial))
        self.writer = RoleWriter(self.client, KEYS, world.spec, machine, node, TTL_S, self._hold)
        self.writes.append(self.writer.register)

    def _hold(self, lease: Lease) -> None:
        self.lease, self.refresh_at = lease, self.world.now

    def keep_lease(self) -> None:
        """As the keeper does."""
        if self.lease is None or self.world.now < self.refresh_at:
            return
        self.refresh_at = self.world.now + TTL_S / 4
        try:
            if not self.client.refresh(self.lease.lease_id):
                self.lease = None
                self.writes.append(self.writer.register)
        except StoreUnavailable:
            self.refresh_at = self.world.now + 0.25

    def look(self) -> None:
        """What is in etcd now will be seen, after what came before."""
        try:
            snapshot = self.client.read(KEYS.everything())
        except StoreUnavailable:
            if not self.is_out:
                self.is_out = True
                self.inbox.append(StoreLost())
            return
        if snapshot.revision != self._seen or self.is_out:
            self._seen, self.is_out = snapshot.revision, False
            self.inbox.append(RoleViewChanged(KEYS.view(snapshot)))

    def write(self) -> None:
        """The first of what is to be written, until etcd has it."""
        if self.writes:
            try:
                self.writes[0]()
            except StoreUnavailable:
                return
            self.writes.popleft()

    def think(self) -> None:
        """One event."""
        event = self.inbox.popleft() if self.inbox else Ticked()
        self.state, effects = core.step(self.state, event, self.world.now)
        for effect in effects:
            assert self.exit is None, f"told first: {effect} follows an exit"
            self._act(effect, effects)
        if self.exit is not None:
            self._leave()

    def _act(self, effect: RoleEffect, effects: list[RoleEffect]) -> None:
        world = self.world
        match effect:
            case StartProcess(planned, incarnation):
                before = effects[: effects.index(effect)]
                assert any(isinstance(each, WriteRecord) and each.process == planned for each in before), "told first"
                self.processes[planned] = world.start(self, planned, incarnation)
            case TerminateProcess(planned):
                self.processes[planned].is_ending = True
            case SendShardMap(told):
                for process in self.processes.values():
                    process.receive(told)
            case WriteRoleResult(result):
                own = [local for planned, local in self.state.locals.items() if planned.kind != "server"]
                assert result.code or all(local.final_record for local in own), "one result: own workers are waited for"
                self.writes.append(lambda: self.writer.write(effect))
            case WriteRecord() | WriteShardMap():
                self.writes.append(lambda: self.writer.write(effect))
            case Exit():
                self.exit = effect
            case Announce():
                pass

    def _leave(self) -> None:
        assert not any(process.is_alive for process in self.processes.values()), "told first: a process is left"
        while self.writes and self.world.is_reached_by(self):
            before = len(self.writes)
            self.write()
            if len(self.writes) == before:
                break
        self.is_alive, self.is_lost = False, True

    def die(self) -> None:
        """Its processes die with it."""
        self.is_alive, self.is_lost = False, True
        for process in self.processes.values():
            process.is_alive = False


class World:
    """A job, and whatever befalls it."""

    def __init__(self, seed: int, *, wipes: bool = False) -> None:
        self.chance = random.Random(seed)
        self.accidents = random.Random(f"accidents of {seed}") if wipes else None
        self.is_wiped = False
        """Etcd has lost its data, and the map is not there again: nothing else happens till then."""
        chance = self.chance
        self.now = 1000.0
        self.events = 0
        self.loss = chance.choice((0.0, 0.05, 0.2))
        self.away_until = 0.0
        self.late: list[tuple[float, Callable[[], object]]] = []
        machines = [f"10.0.0.{number}" for number in range(1, chance.randint(1, 3) + 1)]
        servers = max(chance.randint(1, 4), len(machines))
        self.plan = _plan(chance, machines, servers)
        self.max_restarts = chance.choice((2, _MANY, _MANY))
        self.are_workers_busy = True
        self.store = MemoryStore(lambda: self.now)
        self.spec = agree_on_spec(self.store, KEYS, self.plan, lambda _machine: 0)
        self.agents: list[Agent] = []
        self.servers: dict[ShardServer, Server] = {}
        self.living: dict[str, Process] = {}
        self.answered: list[set[int]] = [set() for _ in range(servers)]
        self.last_answer: dict[tuple[int, int], tuple[int, ShardServer]] = {}
        self.pushes = 0
        self.view = self._now()
        self.known = RoleView()
        """What was lost with etcd's data."""
        for machine in machines:
            self.begin(machine)

    def _now(self) -> RoleView:
        return KEYS.view(self.store.read(KEYS.everything()))

    def is_reached_by(self, agent: Agent) -> bool:
        return self.now >= max(self.away_until, agent.cut_until)

    def begin(self, machine: str) -> None:
        """Start an agent there."""
        self.agents.append(Agent(self, machine, len(self.agents), self.max_restarts))

    @property
    def here(self) -> list[Agent]:
        """The living."""
        return [agent for agent in self.agents if agent.is_alive]

    @property
    def processes(self) -> list[Process]:
        """The living."""
        return [process for process in self.living.values() if process.is_alive]

    # What happens

    def happen(self, *, with_faults: bool) -> None:
        """One event, and what falls due."""
        chance = self.chance
        self.events += 1
        self.now += chance.uniform(0.0, 0.1)
        self.check_due()
        self._wipe()
        if with_faults and not self.is_wiped and chance.random() < 0.03:
            self._befall()
        agents = self.here
        if not agents:
            return
        agent = chance.choice(agents)
        chance.choice((agent.think, agent.think, agent.look, agent.write, agent.write))()
        self._serve()

    def _wipe(self) -> None:
        """Etcd loses its data now and then, when all agents reach it and know the same map: others may not be lost."""
        if self.is_wiped:
            assert self.known.map is not None
            self.is_wiped = self.view.map is None or self.view.map.number < self.known.map.number
        elif self.accidents is not None and self.accidents.random() < 0.01 and self._is_known_to_all():
            self.is_wiped = True
            self.late.clear()
            self.store.wipe()
            self.known, self.view = self.view, self._now()

    def _is_known_to_all(self) -> bool:
        view, here = self.view, self.here
        if view.map is None or view.result is not None or len(here) < len(self.plan.machines):
            return False
        return all(
            self.is_reached_by(agent) and not agent.is_lost and agent.state.newest_map == view.map for agent in here
        )

    def check_due(self) -> None:
        due = [call for at, call in self.late if at <= self.now]
        self.late = [(at, call) for at, call in self.late if at > self.now]
        for call in due:
            with suppress(StoreUnavailable):  # its lease is gone
                call()
        for agent in self.here:
            agent.keep_lease()
        self.land(lambda: None)

    def _serve(self) -> None:
        processes = self.processes
        if not processes:
            return
        process = self.chance.choice(processes)
        if process.is_ending and self.chance.random() < 0.5:
            process.end(self.chance.choice((0, 143, 137)))
        elif isinstance(process, Server):
            if process.told and self.chance.random() < 0.7:
                process.take_map()
            shard = self.chance.randrange(len(process.copies))
            process.copy_on(shard)
            self._push(process, shard)
        elif not self.are_workers_busy and self.chance.random() < 0.2:
            process.end(0)

    def _push(self, server: Server, shard: int) -> None:
        self.pushes += 1
        copy = server.copies[shard]
        if not server.push(shard, self.pushes):
            return
        number, holder = self.last_answer.get((shard, copy.era), (0, server.me))
        assert copy.map >= number or holder == server.me, f"one primary: {server.me}, and {holder}, of shard {shard}"
        self.last_answer[shard, copy.era] = (copy.map, server.me)
        current = self.view.map
        if current is not None and current.places[shard].era == copy.era:
            self.answered[shard].add(self.pushes)
        self._check_rows(server, shard)

    def _befall(self) -> None:
        chance = self.chance
        agents, processes = self.here, self.processes
        what = chance.random()
        if what < 0.45 and processes:
            process = chance.choice(processes)
            is_worker = not isinstance(process, Server)
            codes = (1, 137, 137, 137, 0, EXIT_NO_RESTART) if is_worker else (1, 137, 137, 137, 0)
            process.end(chance.choice(codes))
        elif what < 0.55 and processes:
            process = chance.choice(processes)
            if isinstance(process, Server):
                process.lose_line(chance.randrange(len(process.copies)))
        elif what < 0.65 and agents:
            chance.choice(agents).die()
        elif what < 0.7 and agents:
            chance.choice(agents).inbox.append(StopAsked(15))
        elif what < 0.8 and agents:
            agent = chance.choice(agents)
            agent.cut_until, agent.is_lost = self.now + chance.uniform(0.5, 3 * TTL_S), True
        elif what < 0.85:
            self.away_until = self.now + chance.uniform(0.5, 3 * TTL_S)
        else:
            machine = chance.choice(self.plan.machines)
            if all(agent.machine != machine for agent in self.here):
                self.begin(machine)

    # What must hold

    def start(self, agent: Agent, planned: RoleProcess, incarnation: int) -> Process:
        before = self.living.get(planned.name)
        assert before is None or not before.is_alive, f"one process: two at {planned.name}"
        assert agent.is_alive
        record = self.view.processes.get(planned.name)
        assert record is None or record.code is None, f"over is over: {planned.name} starts after {record}"
        is_named = ShardServer(planned.index, incarnation) in self.servers and self._is_named(
            ShardServer(planned.index, incarnation)
        )
        assert planned.kind != "server" or not is_named, f"one process: {planned.name} has had number {incarnation}"
        process = (Server if planned.kind == "server" else Process)(self, agent, planned, incarnation)
        self.living[planned.name] = process
        if isinstance(process, Server):
            self.servers[process.me] = process
        return process

    def _is_named(self, holder: ShardServer) -> bool:
        """Whether a copy of a shard is at this process, by the newest map."""
        places = self.view.map.places if self.view.map else ()
        return any(holder in (place.primary, place.replica) for place in places) and self.view.map.number > 1

    def land(self, call: Callable[[], T]) -> T:
        """Something may be written: look at what has changed."""
        answer = call()
        if self.store._data.revision == self.view.revision:
            return answer
        before, self.view = self.view, self._now()
        for name, record in before.processes.items():
            now = self.view.processes[name]
            assert (now.incarnation, now.code is not None) >= (record.incarnation, record.code is not None), (
                f"records grow: {name} has {record}, then {now}"
            )
        for name, record in self.view.processes.items():
            if record != before.processes.get(name) and record.code is not None:
                assert not self.living[name].was_asked, f"over is over: {name} was asked to end"
        assert before.result in (None, self.view.result), "one result"
        if before.result is None and self.view.result is not None:
            self._check_result()
        if self.view.map != before.map:
            self._check_map(before.map, cast("ShardMap", self.view.map))
        present = {node.incarnation for node in self.view.nodes}
        for agent in self.here:
            if agent.is_lost and str(agent.serial) in present and self.is_reached_by(agent):
                agent.is_lost, agent.back_at = False, self.now
        return answer

    def _check_result(self) -> None:
        result = self.view.result
        assert result is not None
        records = {**self.known.processes, **self.view.processes}
        codes = {planned.name: record.code for planned in self.plan.processes if (record := records.get(planned.name))}
        workers = [codes.get(planned.name) for planned in self.plan.processes if planned.kind != "server"]
        servers = [codes.get(planned.name) for planned in self.plan.of("server")]
        if result.code == 0:
            assert 0 in workers, f"one result: {result} while {codes}"
        else:
            assert any(servers) or all(workers), f"one result: {result} while {codes}"
            assert self.max_restarts < _MANY or not any(servers), f"one result: no server failed so often, {codes}"

    def _check_map(self, before: ShardMap | None, made: ShardMap) -> None:
        if self.is_wiped:
            # A first map that somebody had not been able to write may come before the one that was lost.
            if made.number == 1 and not any(agent.state.newest_map == self.known.map for agent in self.here):
                self._forget()
            return
        assert made.number == (before.number if before else 0) + 1, f"maps grow: {before}, then {made}"
        for shard, place in enumerate(made.places):
            holders = [
                place.primary,
                *([place.replica] if place.replica else []),
                *([place.joining] if place.joining else []),
            ]
            assert len({holder.server for holder in holders}) == len(holders), f"maps grow: {place}"
            was = before.places[shard] if before else place
            if place.era == was.era:
                assert place.primary in (was.primary, was.replica), f"maps grow: {was}, then {place}"
                continue
            assert place.era == made.number
            left = [holder for holder in (was.primary, was.replica) if holder and not self._is_lost(holder)]
            assert not left, f"nothing lost: shard {shard} begins anew while {left} live: {was}, then {place}"
            self.answered[shard] = set()

    def _forget(self) -> None:
        """Nobody is left who knew: the job begins as a new one."""
        self.is_wiped, self.known = False, RoleView()
        self.answered = [set() for _ in self.answered]
        self.last_answer.clear()

    def _is_lost(self, holder: ShardServer) -> bool:
        """Whether it has ended, or its agent was away just now: a map may have been decided on meanwhile."""
        server = self.servers.get(holder)
        if server is None or not server.is_alive:
            return True
        return server.agent.is_lost or self.now < server.agent.back_at + _LATE_S

    def _check_rows(self, server: Server, shard: int) -> None:
        copy, current = server.copies[shard], self.view.map
        if current is not None and current.places[shard] == copy.place:
            missing = self.answered[shard] - copy.rows
            assert not missing, f"nothing lost: {server.me} has shard {shard} without {len(missing)} pushes"

    def digest(self) -> str:
        """Of what has come of it; the same for the same seed."""
        told = f"{self.events} {self.now} {self.pushes} {self.view.processes} {self.view.map} {self.view.result}"
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    # How it ends

    def end(self) -> None:
        """Faults have ended: it goes on, and the job ends when its workers do."""
        self.loss = self.away_until = 0.0
        for agent in self.here:
            agent.cut_until = 0.0
        self._run_until(self._is_whole, "servers and their copies")
        self.are_workers_busy = False
        self._run_until(lambda: self.view.result is not None and not self.here, "an end")
        exits = {agent.exit for agent in self.agents[-len(self.plan.machines) :] if agent.exit}
        result = self.view.result
        assert result is not None
        codes = {each.code for each in exits if each.code != 128 + 15}
        assert codes <= {result.code}, f"one result: {exits}"

    def _run_until(self, is_so: Callable[[], bool], what: str) -> None:
        for _ in range(_LIVE_EVENTS):
            if is_so() or (self.view.result is not None and not self.here):
                return
            machines = {agent.machine for agent in self.here}
            if self.view.result is None:
                for machine in self.plan.machines:
                    if machine not in machines:
                        self.begin(machine)
            self.happen(with_faults=False)
        raise AssertionError(f"it goes on: no {what}\n{self.view}\n{[agent.state.locals for agent in self.here]}")

    def _is_whole(self) -> bool:
        current = self.view.map
        if current is None or len(self.view.nodes) < len(self.plan.machines) or self.late:
            return False
        there = {process.me for process in self.processes if isinstance(process, Server)}
        if any(process.map_number != current.number for process in self.processes):
            return False
        wants = self.plan.replicas and len(there) > 1
        return len(there) == len(self.plan.of("server")) and all(
            place.primary in there
            and self._has_all(place.primary, shard, place)
            and (not wants or (place.replica in there and self._has_all(place.replica, shard, place)))
            for shard, place in enumerate(current.places)
        )

    def _has_all(self, holder: ShardServer | None, shard: int, place: ShardPlace) -> bool:
        copy = self.servers[cast("ShardServer", holder)].copies[shard]
        is_calm = copy.place == place and not (copy.is_primary and copy.is_in_question)
        return is_calm and copy.era == place.era and copy.rows >= self.answered[shard]


def _plan(chance: random.Random, machines: Sequence[str], servers: int) -> RolePlan:
    processes = [
        RoleProcess("server", number, machines[number % len(machines)], 1000 + number) for number in range(servers)
    ]
    workers = chance.randint(1, 3)
    processes += [
        RoleProcess("worker", number, machines[number % len(machines)], 2000 + number) for number in range(workers)
    ]
    replicas = 1 if servers > 1 and chance.random() < 0.8 else 0
    return RolePlan(tuple(processes), replicas=replicas)


def play(seed: int, events: int = 400, *, wipes: bool = False) -> World:
    """A job's whole life. A failure is an AssertionError, to which its seed is added."""
    world = World(seed, wipes=wipes)
    try:
        for _ in range(events):
            world.happen(with_faults=True)
        world.end()
    except AssertionError as error:
        error.add_note(f"seed {seed}, events {events}")
        raise
    return world
