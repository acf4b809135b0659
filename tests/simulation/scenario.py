"""Scenario files: the events of a job, one per line, and the transcript that they must give.

A file in `scenarios/` says in comments what it shows, then what happens, then, after `---`, the transcript: typed facts
of what is written and what agents do, and no sentence (`transcript.py`; docs/simulation.md lists its lines). Chance is
calm: every delay is the mean one, so that a transcript changes only with what agents do.

| line | what happens |
|---|---|
| `job NP [saves=N] [closes=N] [keep=N] [copies=N] [lost=SHARE] [restarts=N] [OPTION...]` | the job, first |
| `start NAME [nproc=N] [np=NP] [host=NAME] [ahead=S] [fresh] [unnamed]` | an agent starts |
| `kill NAME`, `kill-host NAME`, `pause NAME [host]`, `wake NAME`, `stop NAME [SIGNAL]`, `jump NAME S` | an agent |
| `die NAME before/after` | it is killed just before, or after, its next write lands |
| `bad NAME [CODE]` | its ranks fail at each start, as where a module is missing |
| `fail NAME`, `end NAME CODE [RANK]`, `lose-peer NAME`, `finish NAME`, `port-taken NAME`, `stuck NAME` | to workers |
| `mistake NAME` | the script has one, which ends each of its ranks |
| `hang NAME [RANK] [DOING]`, `move NAME` | this local rank makes no step any more, as `stopped`, say; they do again |
| `late-links NAME S` | what it wants of its links is done so much later |
| `slow NAME S`, `ill NAME [TROUBLE]` | its ranks take so long of each step; its health check fails, or not (any more) |
| `warming NAME`, `warm NAME` | it prepares standby processes; they are ready |
| `publish NAME GROUP STEP`, `damage` | rank 0 publishes that copy; the committed one is damaged |
| `no-save NAME` | the process that is to write its last checkpoint ends without one |
| `away NAME...`, `back NAME...` | these nodes cannot read the directory of checkpoints; they can again |
| `unread N` | while no agent lives: so many groups in a row had ended of that |
| `hide NAME [KEY]`, `show NAME` | what it watches of this range comes late; without one, all that a leader watches |
| `when NAME EFFECT LINE` | that line happens as it is given such an effect (of a status, `WriteStatus.exit`) |
| `lose NAME EFFECT landed/lost/late` | the answer to its next such effect does not come |
| `cut NAME NAME`, `cut NAME > NAME`, `cut-off NAME...`, `heal`, `reset NAME NAME` | the network; `etcd` is a name too |
| `mute NAME NAME` | the first one's link to the second gets no answer, and all else does, until `heal` |
| `freeze`, `thaw [leader]`, `restart`, `compact`, `save`, `restore`, `wipe` | etcd |
| `scale NP`, `pause-job`, `resume-job`, `restart-job`, `stop-job`, `drain NAME`, `exclude [NAME...]` | the operator |
| `hold`, `go` | nobody takes a step, until `go` |
| `run SECONDS`, `until step N`, `until group N`, `until checkpoint N`, `until exit NAME` | time passes |
| `expect training NAME...`, `expect group N`, `expect exit NAME CODE`, `expect starts NAME N` | so it is in a minute |
| `expect files N`, `expect alive NAME N` | so many names are in the directory; workers of group N live there |
| `expect recorded` | each group that has a successor, or has made its first step, has its incident |

`leader` and `rank0` stand for the node that is it. Epochs are `closes` steps long, and a save closes each. Options of a
job: with `hangs=S` somebody looks for hangs; with `handoff` ranks stop together when asked to;
with `local` checkpoints are on the own disk of the node that has rank 0; with `paced` it is told what a step takes;
with `window=S` so much time of new steps is progress; with `timeout=S` a job that waits gives up after it;
with `strange` nobody compares clocks (`ahead` sets a node's); with `mistakes` one of all ranks,
twice, ends the job; with `times` completed incidents have their phases in seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from simulation.agent import Agent
from simulation.cluster import POLICY, Cluster
from simulation.etcd import ETCD, KEYS
from simulation.ranks import PEER_LOST

from agent.core import events as ev
from agent.core.model import Leader
from agent.core.reasons import Doing
from agent.core.saved_states import StateId

END = "---"

T = TypeVar("T")


class Calm(random.Random):
    """Nothing is left to chance."""

    def random(self) -> float:
        return 0.5

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2

    def choice(self, seq: Sequence[T]) -> T:
        return seq[0]

    def randint(self, a: int, b: int) -> int:
        return (a + b) // 2


def read(path: Path) -> tuple[list[str], str]:
    """Return the events of a file, comments included, and its transcript."""
    events, _, transcript = path.read_text(encoding="utf-8").partition(f"\n{END}\n")
    return events.splitlines(), transcript


def play(events: Sequence[str]) -> str:
    """Play the events; return the transcript."""
    lines = [line for line in events if line.strip() and not line.startswith("#")]
    scenario = Scenario(lines[0].split()[1:])
    for line in lines[1:]:
        scenario.cluster.transcript.note(f"> {line}")
        try:
            scenario.do(*line.split())
        except AssertionError as error:
            error.add_note(f"at {line!r}\n{scenario.cluster.log_text()}")
            raise
    return "".join(f"{line}\n" for line in scenario.cluster.transcript.lines)


def _np(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


class Scenario:
    """One scenario as it happens."""

    def __init__(self, job: Sequence[str]) -> None:
        options = dict(word.split("=") for word in job[1:] if "=" in word)
        policy = replace(
            POLICY,
            max_restarts=int(options.get("restarts", "1000")),
            progress_window_s=float(options.get("window", "60")),
            elastic_timeout_s=float(options["timeout"]) if "timeout" in options else None,
            ends_at_script_errors="mistakes" in job,
        )
        self.cluster = Cluster(0, np=_np(job[0]), policy=policy)
        self.cluster.random = Calm()
        training = self.cluster.training
        training.hands_off, training.is_local = "handoff" in job, "local" in job
        training.hang_limit_s = float(options.get("hangs", "0"))
        training.tells_pace = "paced" in job
        training.has_large_parts = "large" in job
        training.moves = "moves" in job
        self.cluster.network.are_clocks_compared = "strange" not in job
        training.saves_every = int(options.get("saves", "0"))
        training.closes_every = int(options.get("closes", "0"))
        training.copies_every = int(options.get("copies", "1"))
        training.keep = int(options.get("keep", "2"))
        training.lost_parts = float(options.get("lost", "0"))
        self.cluster.transcript.has_times = "times" in job
        cluster, etcd = self.cluster, self.cluster.etcd
        self._verbs: dict[str, Callable[..., object]] = {
            "start": self._start,
            "kill": lambda name: cluster.kill(self._agent(name)),
            "kill-host": lambda name: cluster.kill(self._agent(name), host=True),
            "pause": lambda name, host="": self._agent(name).pause(host=bool(host)),
            "wake": lambda name: self._agent(name).wake(),
            "stop": lambda name, signal="15": cluster.ask_to_stop(self._agent(name), int(signal)),
            "jump": lambda name, seconds: self._agent(name).jump(float(seconds)),
            "die": lambda name, when: setattr(self._agent(name), "dies_at_call", when),
            "bad": lambda name, code="1": setattr(self._agent(name).ranks, "bad_code", int(code)),
            "fail": lambda name: cluster.fail_worker(self._agent(name)),
            "end": self._end,
            "port-taken": self._take_port,
            "stuck": lambda name: setattr(self._agent(name).ranks, "is_stuck", True),
            "mistake": lambda name: self._agent(name).ranks.fail_with_script_error(),
            "lose-peer": lambda name: self._agent(name).ranks.exit(0, 1, PEER_LOST),
            "publish": self._publish,
            "hide": lambda name, key="": self._agent(name).mirror.hidden.add(KEYS.prefix + key),
            "show": lambda name: self._agent(name).mirror.hidden.clear(),
            "hang": self._hang,
            "move": lambda name: self._agent(name).ranks.idle.clear(),
            "slow": lambda name, own_s: training.slow.update({name: float(own_s)}),
            "ill": lambda name, *trouble: self._agent(name).post(ev.HealthChecked(" ".join(trouble))),
            "warming": lambda name: self._agent(name).post(ev.StandbyChanged("warming up", is_warming=True)),
            "warm": lambda name: self._agent(name).post(ev.StandbyChanged("1 warm", is_warming=False)),
            "no-save": lambda name: setattr(self._agent(name).saver, "is_failing", True),
            "finish": lambda name: cluster.finish_worker(self._agent(name)),
            "damage": self._damage,
            "away": lambda *names: cluster.training.files.away.update(names),
            "back": lambda *names: cluster.training.files.away.difference_update(names),
            "unread": lambda times: cluster.note_unread(int(times)),
            "when": self._when,
            "lose": lambda name, effect, how: self._agent(name).lose(effect, how),
            "cut": self._cut,
            "cut-off": self._cut_off,
            "heal": cluster.network.heal,
            "mute": lambda one, other: cluster.network.mute(self._agent(one).serial, self._agent(other).serial),
            "late-links": lambda name, s: cluster.network.slow.update({self._agent(name).serial: float(s)}),
            "reset": lambda one, other: cluster.network.reset(self._agent(one), self._agent(other)),
            "freeze": etcd.freeze,
            "thaw": lambda leader="": etcd.thaw(is_new_leader=bool(leader)),
            "restart": etcd.break_watches,
            "compact": lambda: etcd.compact(etcd.data.revision),
            "save": etcd.save,
            "restore": cluster.restore_backup,
            "wipe": cluster.wipe,
            "scale": lambda np: cluster.scale(_np(np)),
            "pause-job": lambda: cluster.pause_job(by="the operator"),
            "resume-job": lambda: cluster.pause_job(by=""),
            "restart-job": cluster.restart_job,
            "stop-job": cluster.stop_job,
            "drain": lambda name: cluster.drain(self._agent(name)),
            "exclude": cluster.exclude,
            "hold": lambda: setattr(cluster.training, "is_held", True),
            "go": lambda: setattr(cluster.training, "is_held", False),
            "run": lambda seconds: cluster.run(float(seconds)),
            "until": self._until,
            "expect": self._until,
        }

    def do(self, verb: str, *words: str) -> None:
        self._verbs[verb](*words)

    def _agent(self, name: str) -> Agent:
        if name == "leader":
            leader = self.cluster.etcd.record(KEYS.leader, Leader)
            assert leader is not None
            name = leader.node_id
        elif name == "rank0":
            group = self.cluster.group
            assert group is not None
            name = group.members[0].node_id
        return self.cluster.agent(name)

    def _start(self, name: str, *words: str) -> None:
        options = dict(word.split("=") for word in words if "=" in word)
        self.cluster.start(
            name,
            fresh="fresh" in words,
            chosen="unnamed" not in words,
            host=options.get("host", ""),
            nproc=int(options.get("nproc", "1")),
            np=options.get("np", ""),
            domain=options.get("domain", ""),
            ahead_s=float(options.get("ahead", "0")),
        )

    def _publish(self, name: str, group: str, step: str) -> None:
        spec = self.cluster.spec
        assert spec is not None
        copy = StateId(run=spec.run, group=int(group), step=int(step))
        self.cluster.training.publish(self._agent(name), copy)

    def _end(self, name: str, code: str, local_rank: str = "") -> None:
        """With a code below zero by that signal."""
        ranks = self._agent(name).ranks
        assert ranks.living, f"{name} has no workers"
        ranks.exit(int(local_rank or min(ranks.living)), int(code), "")

    def _hang(self, name: str, local_rank: str = "0", doing: Doing = "sleeps") -> None:
        self.cluster.hang(self._agent(name), int(local_rank), doing)

    def _take_port(self, name: str) -> None:
        group = self.cluster.group
        assert group is not None
        self._agent(name).ranks.exit(0, 1, f"EADDRINUSE, port: {group.members[0].port}, in use")

    def _damage(self) -> None:
        committed = self.cluster.checkpoint
        assert committed is not None
        self.cluster.training.files.damaged.add(committed.copy)

    def _when(self, name: str, effect: str, *words: str) -> None:
        self._agent(name).hooks[effect] = lambda: self.do(*words)

    def _serial(self, name: str) -> int:
        return ETCD if name == "etcd" else self._agent(name).serial

    def _cut(self, one: str, *words: str) -> None:
        other = words[-1]
        self.cluster.network.cut(self._serial(one), self._serial(other))
        if len(words) == 1:
            self.cluster.network.cut(self._serial(other), self._serial(one))

    def _cut_off(self, *names: str) -> None:
        """These reach each other, and nobody else."""
        inside = {self._serial(name) for name in names}
        outside = {ETCD, *(agent.serial for agent in self.cluster.agents)} - inside
        for one in sorted(inside):
            for other in sorted(outside):
                self.cluster.network.cut(one, other)
                self.cluster.network.cut(other, one)

    def _until(self, what: str, *words: str) -> None:
        cluster = self.cluster
        numbers = [int(word) for word in words if word.isdecimal()]
        conditions: dict[str, Callable[[], object]] = {
            "training": lambda: cluster.training_nodes == list(words) and cluster.is_begun,
            "group": lambda: cluster.group is not None and cluster.group.number >= numbers[0],
            "step": lambda: cluster.training.newest_step >= numbers[0],
            "checkpoint": lambda: cluster.checkpoint is not None and cluster.checkpoint.number >= numbers[0],
            "exit": lambda: self._has_exited(words[0], numbers),
            "starts": lambda: self._agent(words[0]).starts == numbers[0],
            "files": lambda: len(cluster.training.files.names) == numbers[0],
            "recorded": lambda: not cluster.invariants.incidents.missing(cluster.now),
            "alive": lambda: self._agent(words[0]).running == numbers[0],
        }
        cluster.run_until(conditions[what])

    def _has_exited(self, name: str, codes: Sequence[int]) -> bool:
        exits = [agent.exit.code for agent in self.cluster.agents if agent.name == name and agent.exit is not None]
        return bool(exits) and (not codes or exits[-1] == codes[0])
