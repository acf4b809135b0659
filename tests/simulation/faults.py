"""What befalls a random cluster: one fault after another, chosen by the cluster's own chance.

Before etcd loses its data everybody is well again, and for a while afterwards nothing else happens: what no agent is
there to remember cannot come back, and is not asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.etcd import ETCD
from simulation.ranks import EXIT_TOLD

from agent.core import events as ev

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.cluster import Cluster

_QUIET_S = 12.0
"""Three leases: one to come back in, one to wait for others, one to spare."""


class Faults:
    """Chooses among all kinds of faults."""

    def __init__(self, cluster: Cluster, names: tuple[str, ...], nps: tuple[tuple[int, int], ...]) -> None:
        self._cluster = cluster
        self._chance = cluster.random
        self._names = names
        self._nps = nps
        self._quiet_until = 0.0
        self._kinds: tuple[tuple[int, Callable[[], None]], ...] = (
            (8, self._start),
            (2, self._start_again),
            (1, self._start_another),
            (2, self._kill),
            (1, self._kill_host),
            (2, self._kill_in_a_call),
            (4, self._fail_worker),
            (1, self._spoil),
            (2, self._pause),
            (2, self._pause_host),
            (5, self._recover),
            (3, self._cut_from_etcd),
            (2, self._cut_pair),
            (1, self._cut_off),
            (2, self._reset_link),
            (1, self._freeze),
            (1, self._restart_etcd),
            (1, self._change_leader),
            (1, self._compact),
            (1, self._save),
            (1, self._lose_data),
            (2, self._scale),
            (1, self._drain),
            (1, self._jump),
            (3, self._stale),
            (1, self._damage),
            (1, self._hide_files),
            (2, self._ask_for_restart),
            (3, self._hang),
            (1, self._move),
            (1, self._sicken),
            (2, self._operate),
            (2, self._warm_up),
        )
        self._total = sum(weight for weight, _ in self._kinds)

    def befall(self) -> None:
        """One random fault, unless it is quiet."""
        if self._cluster.now < self._quiet_until:
            return
        left = self._chance.randrange(self._total)
        for weight, fault in self._kinds:
            left -= weight
            if left < 0:
                fault()
                return

    def ask_all_to_leave(self) -> None:
        """As before an outage of power. Perhaps the workers get the signal too, or nobody takes a step."""
        cluster, chance = self._cluster, self._chance
        cluster.run(max(0.0, self._quiet_until - cluster.now))
        are_ranks_signalled, cluster.training.is_held = chance.choice(((False, False), (True, False), (False, True)))
        for agent in self._living:
            agent.saver.is_failing = chance.random() < 0.1
            cluster.ask_to_stop(agent)
            for local_rank in sorted(agent.ranks.living) if are_ranks_signalled else ():
                agent.ranks.exit(local_rank, -15, "")
            cluster.run(chance.uniform(0.0, 0.5))
        cluster.run(chance.uniform(0.0, 15.0))
        cluster.training.is_held = False

    def end(self) -> None:
        """Everybody is well again."""
        cluster = self._cluster
        cluster.loss = cluster.drop = 0.0
        self._recover_all()
        for agent in self._living:
            agent.ranks.bad_code = 0
        self.let_operator(cluster.exclude)

    def let_operator(self, give_order: Callable[[], None]) -> None:
        """An order is given to the job as it is, not to what an old backup shows."""
        self._cluster.run(max(0.0, self._quiet_until - self._cluster.now))
        give_order()

    @property
    def _living(self) -> list[Agent]:
        return [agent for agent in self._cluster.agents if not agent.is_gone]

    def _one(self) -> Agent | None:
        living = self._living
        return self._chance.choice(living) if living else None

    def _start(self) -> None:
        taken = {agent.state.me.node_id for agent in self._living}
        free = [name for name in self._names if name not in taken]
        if free:
            ahead_s = self._chance.choice((0.0, self._chance.uniform(-3600.0, 3600.0)))
            nproc = self._chance.choice((1, 1, 2))
            self._cluster.start(self._chance.choice(free), nproc=nproc, ahead_s=ahead_s)

    def _start_again(self) -> None:
        """The old one is dead, and its place still held."""
        agent = self._one()
        if agent is not None:
            self._cluster.kill(agent)
            self._cluster.start(agent.state.me.node_id, host=self._chance.choice(("", "elsewhere")))

    def _start_another(self) -> None:
        """Under the node id of one that lives."""
        agent = self._one()
        if agent is not None and len(self._living) < len(self._names):
            self._cluster.start(
                agent.state.me.node_id,
                chosen=self._chance.random() < 0.5,
                host=self._chance.choice(("", "elsewhere")),
            )

    def _kill(self) -> None:
        agent = self._one()
        if agent is not None:
            self._cluster.kill(agent)

    def _kill_host(self) -> None:
        agent = self._one()
        if agent is not None:
            self._cluster.kill(agent, host=True)

    def _kill_in_a_call(self) -> None:
        agent = self._one()
        if agent is not None:
            agent.dies_at_call = self._chance.choice(("before", "after"))

    def _spoil(self) -> None:
        """Its ranks fail at each start, until its agent is started again."""
        agent = self._one()
        if agent is not None:
            agent.ranks.bad_code = 1

    def _fail_worker(self) -> None:
        agent = self._one()
        if agent is not None:
            self._cluster.fail_worker(agent)

    def _ask_for_restart(self) -> None:
        agent = self._one()
        if agent is not None and agent.ranks.living:
            agent.ranks.exit(min(agent.ranks.living), EXIT_TOLD, "")

    def _hang(self) -> None:
        agent = self._one()
        if agent is not None and agent.ranks.living and self._cluster.training.hang_limit_s:
            local_rank = self._chance.choice(sorted(agent.ranks.living))
            self._cluster.hang(agent, local_rank, self._chance.choice(("sleeps", "runs", "stopped", "disk")))

    def _move(self) -> None:
        """Quiesced ranks continue training."""
        for agent in self._living:
            agent.ranks.idle.clear()

    def _sicken(self) -> None:
        agent = self._one()
        if agent is not None:
            agent.post(ev.HealthChecked("it smells of smoke"))

    def _warm_up(self) -> None:
        agent = self._one()
        if agent is not None:
            agent.post(ev.StandbyChanged("perhaps", is_warming=self._chance.random() < 0.5))

    def _operate(self) -> None:
        agent = self._one()
        if agent is not None:
            cluster, name = self._cluster, agent.name
            commands = (
                lambda: cluster.drain(agent),
                lambda: cluster.exclude(name),
                cluster.exclude,
                cluster.restart_job,
            )
            self._chance.choice(commands)()

    def _pause(self) -> None:
        agent = self._one()
        if agent is not None:
            agent.pause()

    def _pause_host(self) -> None:
        agent = self._one()
        if agent is not None:
            agent.pause(host=True)

    def _recover(self) -> None:
        """Everything that can be mended is."""
        self._recover_all()

    def _recover_all(self) -> None:
        cluster = self._cluster
        cluster.network.heal()
        cluster.training.files.away.clear()
        if cluster.etcd.is_frozen:
            cluster.etcd.thaw(is_new_leader=self._chance.random() < 0.5)
        for agent in self._living:
            agent.dies_at_call = None
            agent.ranks.idle.clear()
            agent.post(ev.HealthChecked(""))
            agent.post(ev.StandbyChanged("warm", is_warming=False))
            if agent.is_paused:
                agent.wake()

    def _cut_from_etcd(self) -> None:
        agent = self._one()
        if agent is not None:
            ways = ((agent.serial, ETCD), (ETCD, agent.serial))
            for way in self._chance.choice((ways, ways[:1], ways[1:])):
                self._cluster.network.cut(*way)

    def _cut_pair(self) -> None:
        one, other = self._one(), self._one()
        if one is not None and other is not None and one is not other:
            self._cluster.network.cut(one.serial, other.serial)
            if self._chance.random() < 0.5:
                self._cluster.network.cut(other.serial, one.serial)

    def _cut_off(self) -> None:
        agent = self._one()
        if agent is not None:
            self._cluster.network.cut_off(agent, from_etcd=self._chance.random() < 0.7)

    def _reset_link(self) -> None:
        one, other = self._one(), self._one()
        if one is not None and other is not None and one is not other:
            self._cluster.network.reset(one, other)

    def _freeze(self) -> None:
        self._cluster.etcd.freeze()

    def _restart_etcd(self) -> None:
        self._cluster.etcd.renew_all()
        self._cluster.etcd.break_watches()

    def _change_leader(self) -> None:
        self._cluster.etcd.renew_all()

    def _compact(self) -> None:
        self._cluster.etcd.compact(self._cluster.etcd.data.revision)

    def _save(self) -> None:
        self._cluster.etcd.save()

    def _lose_data(self) -> None:
        self._recover_all()
        cluster = self._cluster
        cluster.loss = 0.0
        self._quiet_until = cluster.now + _QUIET_S
        cluster.run(self._chance.uniform(0.0, 1.0))
        if not cluster.invariants.is_known():
            return  # nobody is there to remember
        if self._chance.random() < 0.5:
            cluster.wipe()
        else:
            cluster.restore_backup()

    def _scale(self) -> None:
        self._cluster.scale(self._chance.choice(self._nps))

    def _drain(self) -> None:
        agent = self._one()
        if agent is not None:
            self._cluster.ask_to_stop(agent, self._chance.choice((15, 15, 2)))

    def _jump(self) -> None:
        agent = self._one()
        if agent is not None:
            agent.jump(self._chance.uniform(0.1, 20.0))

    def _stale(self) -> None:
        """News of a group that is long gone, a view shown again, a turn for nothing."""
        agent = self._one()
        if agent is None:
            return
        old = agent.state.workers.group - self._chance.randint(1, 3)
        events: tuple[ev.Event, ...] = (
            ev.WorkerExited(old, 0, 1, None, "stale", 0, 0.0),
            ev.WorkersGone(old),
            ev.Ticked(),
            *((ev.ViewChanged(agent.state.view),) if agent.state.view is not None else ()),
        )
        agent.post(self._chance.choice(events))

    def _hide_files(self) -> None:
        """A node loses the directory of checkpoints, until all is mended."""
        agent = self._one()
        if agent is not None:
            self._cluster.training.files.away.add(agent.name)

    def _damage(self) -> None:
        """The committed checkpoint cannot be read any more, and an older one can."""
        training = self._cluster.training
        committed = self._cluster.checkpoint if not training.is_local else None  # the older ones may be elsewhere
        kept = [training.files.copy_of(private) for private in committed.kept] if committed is not None else []
        if committed is not None and any(copy is not None and copy not in training.files.damaged for copy in kept):
            training.files.damaged.add(committed.copy)
