"""Parameter-server jobs: the processes that are described, what each is told, and what follows when one ends."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from agent.cli.command_line import run
from agent.cli.run_options import FOR_RANKS
from agent.config import AgentConfig, JobConfig, NodeConfig, TimingConfig, WorkerConfig
from agent.core.effects import Announce, Exit
from agent.core.events import StopAsked, StoreLost, Ticked
from agent.errors import ConfigError
from agent.roles.core import Local, RoleState, step
from agent.roles.events import (
    ProcessExited,
    ReplicaReported,
    RoleEffect,
    RoleEvent,
    RoleViewChanged,
    StartProcess,
    TerminateProcess,
    WriteRecord,
    WriteRoleResult,
    WriteShardMap,
)
from agent.roles.model import RoleNode, RoleProcessRecord, RoleResult, RoleSpec, RoleView
from agent.roles.plan import OPTIONS, RolePlan, RoleProcess, is_asked_for, plan
from agent.roles.shards import ReplicaReport, first_map
from agent.roles.store import RoleKeys, RoleWriter, agree_on_spec
from agent.runtime import parameter_servers, runtime
from agent.runtime.loop import Inbox
from agent.runtime.parameter_servers import ParameterServerRuntime
from agent.store.api import Put
from agent.store.keys import encode
from agent.store.memory import MemoryStore
from agent.store.mirror import Mirror
from agent.workers.role_environment import RoleFacts, role_environment
from trainer_runtime.contract import EXIT_NO_RESTART
from trainer_runtime.shard_map import ShardMap, ShardPlace, ShardServer

NONE: dict[str, Any] = dict.fromkeys(OPTIONS)


def plan_of(**options: Any) -> RolePlan:  # noqa: ANN401 - as click gives them
    return plan({**NONE, **options})


# What the command line describes


def test_one_machine_has_so_many_of_each() -> None:
    made = plan_of(server_num=1, worker_num=4)
    assert [process.name for process in made.of("worker")] == ["worker-0", "worker-1", "worker-2", "worker-3"]
    assert made.machines == ("127.0.0.1",)
    assert is_asked_for({**NONE, "worker_num": 1})
    assert not is_asked_for(NONE)


def test_several_machines_have_the_processes_that_are_listed() -> None:
    made = plan_of(
        servers="10.0.0.1:6170,10.0.0.2:6171", workers="10.0.0.1,10.0.0.1,10.0.0.2:6180,[fd00::3]:6180,fd00::3"
    )
    assert made.machines == ("10.0.0.1", "10.0.0.2", "fd00::3")
    assert made.endpoints("server") == "10.0.0.1:6170,10.0.0.2:6171"
    workers = "10.0.0.1:6171,10.0.0.1:6172,10.0.0.2:6180,[fd00::3]:6180,[fd00::3]:6170"
    assert made.endpoints("worker") == workers, "those without a port get one that nobody has"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"server_num": 1}, "say how many with --worker_num, or which with --workers"),
        ({"worker_num": 1}, "say how many with --server_num, or which with --servers"),
        ({"servers": "10.0.0.1:70000", "worker_num": 1}, "'10.0.0.1:70000' is no address"),
        ({"servers": "10.0.0.1:", "worker_num": 1}, "has no port after its colon"),
        ({"servers": ":6170", "worker_num": 1}, "':6170' is no address"),
        ({"servers": "10.0.0.1:1", "workers": "10.0.0.1:1"}, "10.0.0.1:1 is given to server-0 and to worker-0"),
        ({"servers": "10.0.0.1:1", "worker_num": 1}, "do not reach a loopback address"),
        (
            {"servers": "10.0.0.1:1", "server_num": 2, "workers": "10.0.0.1"},
            "--server_num=2 is not the number of those",
        ),
    ],
)
def test_what_describes_no_job_is_refused_in_one_line(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of(**options)
    assert why in str(refused.value)


def test_a_plan_is_written_as_a_record() -> None:
    made = plan_of(servers="10.0.0.1:6170", workers="10.0.0.1,10.0.0.2", heter_workers="10.0.0.2", http_port=1234)
    processes = tuple((process.kind, process.machine, process.port) for process in made.processes)
    spec = RoleSpec(run="r", secret="s", processes=processes, heter_device=made.heter_device, http_port=made.http_port)
    assert spec.plan() == made


def test_ports_that_are_not_given_are_found_if_there_is_one_machine() -> None:
    made = plan_of(server_num=1, worker_num=2)
    free = iter(range(40000, 41000))
    found = made.with_ports(lambda machine: next(free) + 1000 * (machine != "127.0.0.1"))
    assert found.endpoints("server") == "127.0.0.1:40000"
    assert found.endpoints("worker") == "127.0.0.1:40001,127.0.0.1:40002"
    assert made.is_with_ports(found), "an agent that follows another takes the ports that were found"
    assert not made.is_with_ports(plan_of(server_num=1, worker_num=3).with_ports(lambda _: 1))
    assert not plan_of(servers="127.0.0.1:7000", worker_num=2).is_with_ports(found)


def test_options_that_mean_nothing_to_servers_are_some_that_there_are() -> None:
    assert {*FOR_RANKS} <= {parameter.name for parameter in run.params}
    assert not {*FOR_RANKS} & {*OPTIONS}


# What a process is told


def told(made: RolePlan, name: str, *gpus: str, **base: str) -> dict[str, str]:
    (process,) = [process for process in made.processes if process.name == name]
    facts = RoleFacts(made, "job", "run", "node", "secret", Path("/checkpoints"), fresh=False, gpus=gpus)
    return role_environment(base, process, 1, facts)


def test_a_server_and_a_worker_find_each_other_as_with_paddles_launcher() -> None:
    made = plan_of(servers="10.0.0.1:6170,10.0.0.2:6171", workers="10.0.0.1:6172,10.0.0.2:6173", http_port=9000)
    server, worker = told(made, "server-1", RANK="9"), told(made, "worker-1")
    both = {
        "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:6170,10.0.0.2:6171",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6172,10.0.0.2:6173",
        "PADDLE_TRAINERS_NUM": "2",
        "POD_IP": "10.0.0.2",
    }
    assert both.items() <= server.items()
    assert both.items() <= worker.items()
    assert (server["TRAINING_ROLE"], server["PADDLE_PORT"]) == ("PSERVER", "6171")
    assert (worker["TRAINING_ROLE"], worker["PADDLE_TRAINER_ID"]) == ("TRAINER", "1")
    meeting = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "9000", "RANK": "1", "WORLD_SIZE": "2"}
    assert meeting.items() <= worker.items()
    assert not server.keys() & meeting.keys(), "of another job's launcher neither"


def test_gpus_are_the_workers_which_share_them_if_there_are_fewer() -> None:
    made = plan_of(server_num=2, worker_num=3)
    assert [told(made, f"worker-{n}", "4", "7")["CUDA_VISIBLE_DEVICES"] for n in range(3)] == ["4", "7", "4"]
    assert told(made, "worker-1", "4", "7")["FLAGS_selected_gpus"] == "0"
    assert told(made, "server-0", "4", "7")["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in told(made, "worker-0")


def test_heterogeneous_workers_have_the_gpus_and_are_workers_like_others() -> None:
    made = plan_of(server_num=2, worker_num=2, heter_worker_num=2)
    assert [told(made, f"heter-{n}", "0", "1")["CUDA_VISIBLE_DEVICES"] for n in range(2)] == ["0", "1"]
    assert told(made, "worker-0", "0", "1")["CUDA_VISIBLE_DEVICES"] == ""
    heter = told(made, "heter-1", "0", "1")
    assert heter["TRAINING_ROLE"] == "HETER_TRAINER"
    assert heter["PADDLE_HETER_TRAINER_DEVICE"] == "gpu"
    assert (heter["PADDLE_TRAINER_ID"], heter["PADDLE_TRAINERS_NUM"]) == ("3", "4")


def test_the_credentials_of_etcd_are_shown_nowhere() -> None:
    assert "ELASTIC_AGENT_ETCD_PASSWORD" not in told(
        plan_of(server_num=1, worker_num=1), "worker-0", ELASTIC_AGENT_ETCD_PASSWORD="x"
    )


# What follows from what happens

PLAN = plan_of(servers="10.0.0.1:1", workers="10.0.0.1:2,10.0.0.2:3")
SERVER, MINE, OTHER = PLAN.processes
SPEC = RoleSpec(run="r", secret="s", processes=(), heter_device="gpu", http_port=0)
HERE = tuple(RoleNode(machine=machine, incarnation="1") for machine in PLAN.machines)
DONE = RoleProcessRecord(incarnation=1, code=0)


class Agent:
    """The core on the first machine, and an etcd that has all that it wrote."""

    def __init__(self, max_restarts: int = 2, grace_s: float = 0.0, **processes: RoleProcessRecord) -> None:
        self.state = RoleState(PLAN, "r", "10.0.0.1", max_restarts, window_s=60.0, grace_s=grace_s)
        self.view = RoleView(1, SPEC, HERE, {name.replace("_", "-"): record for name, record in processes.items()})
        self.now = 0.0
        self.last = self.do(RoleViewChanged(self.view))

    def do(self, event: Any) -> list[RoleEffect]:  # noqa: ANN401 - one of the core's
        self.state, effects = step(self.state, event, self.now)
        for effect in effects:
            if isinstance(effect, WriteRecord):
                self.view = replace(self.view, processes={**self.view.processes, effect.process.name: effect.record})
        self.last = effects
        return effects

    def see(self, **changed: Any) -> list[RoleEffect]:  # noqa: ANN401 - parts of a view
        self.view = replace(self.view, **changed)
        return self.do(RoleViewChanged(self.view))

    def end(self, process: RoleProcess, code: int, why: str = "ended") -> list[RoleEffect]:
        return self.do(ProcessExited(process, self.state.locals[process].incarnation, code, why))

    def starts(self) -> list[tuple[str, int]]:
        return [(effect.process.name, effect.incarnation) for effect in self.last if isinstance(effect, StartProcess)]

    def result(self) -> RoleResult | None:
        return next((effect.result for effect in self.last if isinstance(effect, WriteRoleResult)), None)


def test_an_agent_starts_what_is_its_machines_servers_first() -> None:
    assert Agent().starts() == [("server-0", 1), ("worker-0", 1)]


def test_nothing_is_started_before_etcd_was_seen() -> None:
    state = RoleState(PLAN, "r", "10.0.0.1", 2, 60.0)
    assert step(state, Ticked(), 0.0)[1] == []


def test_only_a_process_that_fails_is_restarted() -> None:
    agent = Agent()
    agent.end(SERVER, 137, "was killed by SIGKILL")
    assert agent.starts() == [("server-0", 2)]
    assert Announce("server-0 was killed by SIGKILL; it is started again") in agent.last
    agent.end(MINE, 1)
    assert agent.starts() == [("worker-0", 2)]


def test_a_server_that_fails_too_often_ends_the_job() -> None:
    agent = Agent()
    for _ in range(2):
        agent.end(SERVER, 3)
        assert agent.result() is None
    agent.end(SERVER, 3, "ended with 3")
    assert agent.result() == RoleResult(code=3, sentence="server-0 failed too often: ended with 3")


def test_failures_that_are_long_ago_do_not_count() -> None:
    agent = Agent()
    for _ in range(10):
        agent.now += 40
        agent.end(SERVER, 3)
        assert agent.starts(), "two within a minute are not too many"


def test_a_worker_that_fails_too_often_is_given_up_and_the_others_go_on() -> None:
    agent = Agent(max_restarts=0)
    agent.end(MINE, 5, "ended with 5")
    assert agent.result() is None
    agent.see(processes={**agent.view.processes, "worker-1": DONE})
    assert agent.result() == RoleResult(code=0, sentence="the job is done, without worker-0")


def test_heterogeneous_workers_are_waited_for_too() -> None:
    made = plan_of(servers="10.0.0.1:1", workers="10.0.0.1:2", heter_workers="10.0.0.1:3")
    shown = RoleView(1, SPEC, HERE, {"worker-0": DONE})
    state, effects = step(RoleState(made, "r", "10.0.0.1", 2, 60.0), RoleViewChanged(shown), 0.0)
    assert not any(isinstance(effect, WriteRoleResult) for effect in effects)
    _, effects = step(state, ProcessExited(made.of("heter")[0], 1, 0, ""), 1.0)
    assert any(isinstance(effect, WriteRoleResult) for effect in effects)


def test_all_workers_failing_is_a_failed_job_with_their_code() -> None:
    agent = Agent(max_restarts=0)
    agent.end(MINE, 5)
    agent.see(processes={**agent.view.processes, "worker-1": RoleProcessRecord(incarnation=1, code=6)})
    assert agent.result() == RoleResult(code=5, sentence="all workers failed: worker-0, worker-1")


def test_a_worker_that_asks_not_to_be_restarted_is_not() -> None:
    agent = Agent()
    agent.end(MINE, EXIT_NO_RESTART)
    assert agent.starts() == []


def test_with_the_result_workers_are_ended_before_servers_and_then_the_agent_leaves() -> None:
    agent = Agent(worker_1=DONE)
    agent.end(MINE, 0)
    result = agent.result()
    assert result == RoleResult(code=0, sentence="the job is done")
    assert agent.see(result=result) == [TerminateProcess(SERVER, is_done=True)]
    assert agent.end(SERVER, 143) == [Exit(0, "the job is done")]


def test_workers_that_still_run_are_ended_first() -> None:
    agent = Agent()
    assert agent.see(result=RoleResult(code=3, sentence="s")) == [TerminateProcess(MINE)]
    assert agent.end(MINE, 143) == [TerminateProcess(SERVER)]
    assert agent.end(SERVER, 0) == [Exit(3, "s")]


def test_one_that_is_stopped_is_not_done_and_goes_on_later_with_its_rows() -> None:
    agent = Agent()
    assert agent.see(result=RoleResult(code=0, sentence="stopped by u", is_stopped=True)) == [TerminateProcess(MINE)]
    assert agent.end(MINE, 143) == [TerminateProcess(SERVER)]
    assert agent.end(SERVER, 0) == [Exit(0, "stopped by u")]


def test_a_signal_ends_the_local_processes_and_does_not_end_the_job() -> None:
    agent = Agent()
    assert agent.do(StopAsked(15)) == [TerminateProcess(MINE)]
    agent.end(MINE, 143)
    assert agent.end(SERVER, 143) == [Exit(143, "left, as it was asked to")]
    assert "worker-0" in agent.view.processes
    assert agent.view.processes["worker-0"].code is None, "another agent may take its place"


def test_a_lost_machines_workers_are_waited_for_only_while_nobody_has_done_its_part() -> None:
    agent = Agent(max_restarts=0)
    agent.see(nodes=HERE[:1])
    agent.end(MINE, 5)
    assert agent.result() is None
    agent = Agent()
    agent.see(nodes=HERE[:1])
    agent.end(MINE, 0)
    assert agent.result() == RoleResult(code=0, sentence="the job is done, without worker-1")


def test_workers_of_machines_that_are_there_are_waited_for() -> None:
    agent = Agent()
    agent.end(MINE, 0)
    assert agent.result() is None
    agent.see(processes={**agent.view.processes, "worker-1": DONE})
    assert agent.result() == RoleResult(code=0, sentence="the job is done")


def test_workers_of_machines_that_may_be_there_are_waited_for_in_the_grace_period() -> None:
    agent = Agent(grace_s=5.0)
    agent.see(nodes=HERE[:1])
    agent.end(MINE, 0)
    assert agent.result() is None
    agent.now = 5.0
    agent.do(Ticked())
    assert agent.result() == RoleResult(code=0, sentence="the job is done, without worker-1")


def test_an_agents_own_workers_are_waited_for_whatever_the_records_in_etcd_are() -> None:
    agent = Agent()
    agent.see(nodes=(), processes={**agent.view.processes, "worker-1": DONE})
    assert agent.result() is None


def test_an_agent_that_returns_after_the_job_was_restarted_ends_its_workers_and_leaves() -> None:
    agent = Agent()
    other = RoleSpec(run="another", secret="s", processes=(), heter_device="gpu", http_port=0)
    assert agent.see(spec=other, processes={}) == [TerminateProcess(MINE)]
    agent.end(MINE, 143)
    assert agent.end(SERVER, 143) == [Exit(1, "the job was begun anew, without this agent")]


def test_what_etcd_has_lost_is_written_again() -> None:
    agent = Agent(worker_0=DONE)
    effects = agent.see(spec=None, processes={}, nodes=(), revision=1)
    assert [effect for effect in effects if isinstance(effect, WriteRecord)] == [
        WriteRecord(SERVER, RoleProcessRecord(incarnation=1)),
        WriteRecord(MINE, DONE),
    ]


def test_a_process_that_was_never_started_has_no_record_to_write_again() -> None:
    state = RoleState(PLAN, "r", "10.0.0.1", 2, 60.0, stop_signal=15)
    shown = RoleView(9, SPEC, HERE)
    state, _ = step(state, RoleViewChanged(shown), 0.0)
    assert [local.incarnation for local in state.locals.values()] == [0, 0]
    _, effects = step(state, RoleViewChanged(replace(shown, revision=1, spec=None)), 1.0)
    assert not [effect for effect in effects if isinstance(effect, WriteRecord)]


def test_agents_that_were_started_with_other_processes_do_not_take_part() -> None:
    store, keys = MemoryStore(), RoleKeys("job")
    store.transact([], [Put(keys.result, encode(RoleResult(code=0, sentence="done"))), Put(keys.map, b"")])
    spec = agree_on_spec(store, keys, PLAN, lambda _: 7)
    assert [item.key for item in store.read(keys.everything()).items] == [keys.spec], "what is left of the last run"
    assert agree_on_spec(store, keys, PLAN, lambda _: 8) == spec
    other = plan_of(servers="10.0.0.1:1", workers="10.0.0.1:2,10.0.0.3:3")
    with pytest.raises(ConfigError, match="job job has other processes"):
        agree_on_spec(store, keys, other, lambda _: 7)


def test_a_spec_that_was_reset_is_not_written_again() -> None:
    """A job that is begun anew has its old result and no spec: an agent of the last run leaves both as they are."""
    store, keys = MemoryStore(), RoleKeys("job")
    store.transact([], [Put(keys.result, encode(RoleResult(code=0, sentence="done")))])
    records = RoleWriter(store, keys, SPEC, "a", HERE[0], 5.0, lambda _: None)
    records.register()
    assert [item.key for item in store.read(keys.everything()).items] == [keys.result]
    following = RoleSpec(run="next", secret="s", processes=(), heter_device="gpu", http_port=0)
    store.transact([], [Put(keys.spec, encode(following))])
    records.register()
    shown = store.read(keys.everything()).items
    assert [item.key for item in shown] == [keys.result, keys.spec], "it is another's job"
    records.write(WriteRoleResult(RoleResult(code=1, sentence="failed")))
    records.write(WriteShardMap(first_map(1, replicas=0), 0))
    assert store.read(keys.everything()).items == shown


def test_an_agent_of_a_job_that_has_ended_reports_how() -> None:
    state = RoleState(PLAN, "r", "10.0.0.1", 2, 60.0)
    ended = RoleView(1, SPEC, HERE, {}, RoleResult(code=3, sentence="all workers failed"))
    _, effects = step(state, RoleViewChanged(ended), 0.0)
    said = "the job has ended before: all workers failed; elastic-agent reset lets it begin anew"
    assert effects == [Exit(3, said)]


def test_an_agent_that_follows_another_goes_on_where_that_one_was() -> None:
    agent = Agent(server_0=RoleProcessRecord(incarnation=4), worker_0=DONE)
    assert agent.starts() == [("server-0", 5)]


def test_an_event_of_a_process_that_is_gone_changes_nothing() -> None:
    agent = Agent()
    agent.end(SERVER, 1)
    before = agent.state
    assert agent.do(ProcessExited(SERVER, 1, 1, "again")) == []
    assert agent.state == before


@pytest.mark.parametrize("code", [0, EXIT_NO_RESTART])
def test_a_server_that_ends_on_its_own_is_restarted_whatever_its_exit_code(code: int) -> None:
    """SIGTERM by somebody else ends it with 0, and the workers still need it."""
    agent = Agent(max_restarts=1)
    agent.end(SERVER, code, "")
    assert agent.starts() == [("server-0", 2)]
    assert Announce("server-0 ended, although the job has not; it is started again") in agent.last
    agent.end(SERVER, 0, "")
    assert agent.result() == RoleResult(code=1, sentence="server-0 failed too often: ended, although the job has not")


def test_a_server_that_ends_before_its_turn_does_not_decide_the_result() -> None:
    """Who ends the agent may end its processes too."""
    agent = Agent(max_restarts=0)
    agent.do(StopAsked(15))
    assert agent.end(SERVER, 1) == []
    assert agent.view.processes["server-0"].code is None
    assert agent.end(MINE, 143) == [Exit(143, "left, as it was asked to")]


def test_an_agents_own_workers_are_waited_for_although_its_lease_has_ended() -> None:
    agent = Agent(worker_1=DONE)
    agent.see(nodes=HERE[1:])
    assert agent.result() is None
    agent.end(MINE, 0)
    assert agent.result() == RoleResult(code=0, sentence="the job is done")


# Where shards are

COPIED = plan_of(servers="10.0.0.1:1,10.0.0.2:1", workers="10.0.0.1:2", ps_replicas=1)
RUNS = RoleProcessRecord(incarnation=1)
WHOLE = ShardMap(
    4, (ShardPlace(1, ShardServer(0, 1), ShardServer(1, 1)), ShardPlace(1, ShardServer(1, 1), ShardServer(0, 1)))
)


def placing(state: RoleState, event: RoleEvent, now: float) -> tuple[RoleState, ShardMap | None]:
    state, effects = step(state, event, now)
    return state, next((effect.map for effect in effects if isinstance(effect, WriteShardMap)), None)


def copied(nodes: tuple[RoleNode, ...] = HERE, **changed: Any) -> RoleViewChanged:  # noqa: ANN401 - parts of a view
    view = RoleView(9, SPEC, nodes, {"server-0": RUNS, "server-1": RUNS}, None, WHOLE, 5)
    return RoleViewChanged(replace(view, **changed))


def test_the_first_map_waits_until_all_its_servers_have_records() -> None:
    state = RoleState(COPIED, "r", "10.0.0.1", 2, 60.0, 5.0)
    state, made = placing(state, copied(map=None, processes={"server-0": RUNS}), 0.0)
    assert made is None
    assert placing(state, copied(map=None), 1.0)[1] == first_map(2, replicas=1)


def test_a_server_whose_machine_is_lost_is_followed_by_its_copy() -> None:
    state, made = placing(RoleState(COPIED, "r", "10.0.0.1", 2, 60.0, 5.0), copied(), 0.0)
    assert made is None
    made = placing(state, copied(HERE[:1]), 6.0)[1]
    assert made is not None
    assert [place.primary for place in made.places] == [ShardServer(0, 1), ShardServer(0, 1)]


@pytest.mark.parametrize("finds", ["an outage", "that its lease is gone", "what was before it"])
def test_after_an_outage_nobody_is_taken_for_lost_for_a_while(finds: str) -> None:
    """Leases of machines that live have ended too, and they are about to come back."""
    state = RoleState(COPIED, "r", "10.0.0.1", 2, 60.0, 5.0)
    if finds != "what was before it":
        state, _ = placing(state, copied(), 0.0)
    if finds == "an outage":
        state, made = placing(state, StoreLost(), 20.0)
        assert made is None
    if finds == "that its lease is gone":
        state, made = placing(state, copied(()), 20.0)
        assert made is None
    state, made = placing(state, copied(HERE[:1]), 21.0)
    assert made is None
    back_at = 20.0 if finds == "that its lease is gone" else 21.0
    state, made = placing(state, Ticked(), back_at + 4.9)
    assert made is None
    assert placing(state, Ticked(), back_at + 5.1)[1] is not None


def test_a_node_that_may_be_lost_is_not_asked_to_join() -> None:
    plan = replace(COPIED, processes=(*COPIED.processes, RoleProcess("server", 2, "10.0.0.3", 1)))
    state = RoleState(plan, "r", "10.0.0.1", 2, 60.0, 5.0)
    alone = ShardMap(
        4, (ShardPlace(1, ShardServer(0, 1)), ShardPlace(1, ShardServer(1, 1)), ShardPlace(1, ShardServer(2, 1)))
    )
    processes = {f"server-{server}": RUNS for server in range(3)}
    made = placing(state, copied(HERE[:2], processes=processes, map=alone), 0.0)[1]
    assert made is not None
    assert [place.joining for place in made.places] == [ShardServer(1, 1), ShardServer(0, 1), ShardServer(0, 1)]


def test_a_server_whose_record_was_lost_is_the_last_one_that_the_map_names() -> None:
    """In whatever part: the shards of the one before it are not its own."""
    for place in (
        ShardPlace(1, ShardServer(0, 1), ShardServer(1, 2)),
        ShardPlace(1, ShardServer(0, 1), None, ShardServer(1, 2)),
    ):
        named = ShardMap(4, (place, ShardPlace(1, ShardServer(1, 1), ShardServer(0, 1))))
        state = RoleState(COPIED, "r", "10.0.0.1", 2, 60.0, 5.0)
        made = placing(state, copied(map=named, processes={"server-0": RUNS}), 0.0)[1]
        assert made is not None
        assert made.places[0] == place, "it may live"
        assert made.places[1].primary == ShardServer(0, 1)


def test_a_server_whose_record_was_lost_is_not_asked_to_join() -> None:
    alone = ShardMap(4, (ShardPlace(1, ShardServer(0, 1)), ShardPlace(1, ShardServer(1, 1))))
    state = RoleState(COPIED, "r", "10.0.0.1", 2, 60.0, 5.0)
    made = placing(state, copied(map=alone, processes={"server-0": RUNS}), 0.0)[1]
    assert made is not None
    assert [place.joining for place in made.places] == [None, ShardServer(0, 1)]


def test_a_servers_report_on_a_replica_counts_once_for_the_map_that_it_uses() -> None:
    state, _ = placing(RoleState(COPIED, "r", "10.0.0.1", 2, 60.0, 5.0), copied(), 0.0)
    assert placing(state, ReplicaReported(ReplicaReport(4, 7, is_complete=True)), 1.0)[1] is None, (
        "there is no such shard"
    )
    state, made = placing(state, ReplicaReported(ReplicaReport(4, 0, is_complete=False)), 0.0)
    assert made is not None
    assert made.places[0] == ShardPlace(1, ShardServer(0, 1), None, ShardServer(1, 1))
    assert placing(state, Ticked(), 1.0)[1] is None, "it is under way"
    assert placing(state, ReplicaReported(ReplicaReport(4, 1, is_complete=False)), 1.0)[1] is None, (
        "one after the other"
    )


def test_a_map_that_etcd_has_lost_is_written_again_as_it_was() -> None:
    view = copied()
    state, _ = placing(RoleState(COPIED, "r", "10.0.0.1", 2, 60.0, 5.0), view, 0.0)
    state, made = placing(state, RoleViewChanged(replace(view.view, revision=1, map=None, map_revision=0)), 10.0)
    assert made == view.view.map


# The agent


def test_an_agent_ends_with_any_of_its_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that sees nothing any more would keep its place, and its servers, for ever."""

    def fail(_mirror: Mirror) -> None:
        raise UnicodeError("nobody foresaw this")

    monkeypatch.setattr(Mirror, "_run", fail)
    agent = an_agent(monkeypatch, tmp_path)
    with capture_logs() as said:
        assert agent.run() == 1
    assert said[-1]["event"] == "internal error in the thread store-mirror: UnicodeError('nobody foresaw this')"


def an_agent(monkeypatch: pytest.MonkeyPatch, directory: Path) -> ParameterServerRuntime:
    """One whose job is on one machine. The test's process keeps its signal handlers and its hook."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(runtime, "SIGNALS", ())
    config = AgentConfig(
        endpoints=("127.0.0.1:2379",),
        store_timeout_s=1.0,
        job=JobConfig("job", 1, 1),
        node=NodeConfig("a", is_node_id_chosen=True, address="127.0.0.1", ips=("127.0.0.1",), nproc=1),
        timing=TimingConfig(),
        workers=WorkerConfig(("true",), directory, directory, max_restarts=0),
        roles=plan_of(server_num=1, worker_num=1),
    )
    store: Any = MemoryStore()  # keeps etcd's promises
    return ParameterServerRuntime(config, {}, store, Inbox())


def test_an_outage_is_logged_once_and_not_while_etcd_was_never_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    agent = an_agent(monkeypatch, tmp_path)
    state = RoleState(PLAN, "r", "10.0.0.1", 2, 60.0)
    with capture_logs() as said:
        agent._look(state, 0.0)
        assert not said, "it has just begun, and has seen nothing yet"
        agent._client.outage = "it did not answer"
        agent._look(state, 1.0)
        agent._look(state, 2.0)
        agent._look(replace(state, is_store_lost=False), 3.0)
        agent._look(replace(state, locals={MINE: Local(1, is_running=True)}), 4.0)
        agent._look(replace(state, is_store_lost=False), 5.0)
        agent._look(replace(state, stop_signal=15), 6.0)
    agent._close()
    assert [line["event"] for line in said] == [
        "etcd cannot be reached (it did not answer)",
        "etcd cannot be reached; the ranks run on (it did not answer)",
    ]


def test_a_servers_port_that_another_program_has_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_servers, "_FREE_WITHIN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"server-1 cannot listen on 127.0.0.1:{port}: the port is taken; "):
            parameter_servers.require_free([RoleProcess("server", 1, "127.0.0.1", port)])
    parameter_servers.require_free(
        [RoleProcess("server", 1, "127.0.0.1", port), RoleProcess("server", 2, "no.such.host.invalid", 1)]
    )
