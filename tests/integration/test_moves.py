"""Ranks of a script with `State.run` keep their processes in planned changes, and train on as if nothing happened."""

from __future__ import annotations

import json
import signal
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import some
from integration.conftest import PATIENCE_S, Job
from integration.moving_job import SAMPLES, STEPS_PER_EPOCH, THAWS_AT

from agent.rehearse.cluster import read_trace, wait_for

Make = Callable[..., Job]
SETUP_S = 2.0
WARM_WITHIN_S = 240.0
"""Standbys import and set up beside ranks that train, with a fraction of their CPU share."""
SCRIPT = Path(__file__).with_name("moving_job.py")


def command(job: Job, *, setup_s: float = 0.0) -> list[str]:
    return [str(SCRIPT), str(job.directory), str(job.epochs), str(job.step_time_s), str(setup_s)]


def ledgers(job: Job) -> dict[int, list[dict[str, Any]]]:
    """What each process has trained, by pid."""
    found = {int(path.suffix[1:]): path for path in job.directory.glob("ledger.*")}
    return {pid: [json.loads(line) for line in path.read_text().splitlines()] for pid, path in found.items()}


def pid_of(job: Job, node: str) -> int:
    (worker,) = job.nodes[node].workers()
    return worker.pid


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, etcd: Any) -> Callable[[int], dict[str, torch.Tensor]]:  # noqa: ANN401
    """The weights of a run of one node, by number of epochs."""

    def weights(epochs: int) -> dict[str, torch.Tensor]:
        directory = tmp_path_factory.mktemp("undisturbed")
        with Job(directory, etcd.endpoint, directory.name) as alone:
            alone.epochs = epochs
            alone.start("a", "1", command(alone))
            alone.finish()
            return dict(torch.load(alone.weights))

    return weights


def assert_result(job: Job, weights: dict[str, torch.Tensor]) -> None:
    """The result is that of an undisturbed run."""
    for name, tensor in torch.load(job.weights).items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-5)


def assert_right(job: Job, weights: dict[str, torch.Tensor]) -> None:
    """Each step was taken once, each sample counted once an epoch, and the result is that of an undisturbed run."""
    steps: dict[int, Counter[int]] = defaultdict(Counter)
    taken = Counter[int]()
    for lines in ledgers(job).values():
        for line in lines:
            steps[line["epoch"]].update(line["indices"])
    for line in read_trace(job.trace):
        taken[line.step] += 1
    assert set(taken) == set(range(1, STEPS_PER_EPOCH * job.epochs + 1))
    assert max(taken.values()) == 1
    assert all(counts == Counter(range(SAMPLES)) for counts in steps.values())
    assert_result(job, weights)


def longest_pause_s(job: Job) -> float:
    """The longest time between two steps of the job, if rank 0 was always on the same node."""
    times = [line.t for line in read_trace(job.trace)]
    return max(later - earlier for earlier, later in pairwise(times))


def test_ranks_that_stay_keep_their_processes(job: Make, undisturbed: Callable[[int], dict[str, torch.Tensor]]) -> None:
    """Three nodes, then two, then three again, each newcomer set up before; then a node is asked to leave."""
    running = job()
    running.epochs = 80
    for name in ("a", "b", "c"):
        running.start(name, "1:3", command(running, setup_s=SETUP_S))
    group = running.wait_for_step(3, world=3)
    pids = {name: pid_of(running, name) for name in ("a", "b", "c")}
    running.scale("2")
    group = running.wait_for_step(1, after_group=group, world=2)
    left = next(node["node_id"] for node in running.status()["nodes"] if not node["ranks"])
    running.scale("1:3")
    group = running.wait_for_step(1, after_group=group, world=3)
    newcomer = pid_of(running, left)
    assert (running.directory / f"setup.{newcomer}").read_text() == "False 1", "it has set up alone"
    stayers = {name: pid for name, pid in pids.items() if name != left}
    assert {name: pid_of(running, name) for name in stayers} == stayers
    leaver = min(stayers)
    running.nodes[leaver].terminate()
    assert running.nodes[leaver].wait(PATIENCE_S) == 0
    running.wait_for_step(1, after_group=group, world=2)
    assert longest_pause_s(running) < SETUP_S
    (last,) = stayers.keys() - {leaver}
    assert pid_of(running, last) == stayers[last]
    assert pid_of(running, left) == newcomer
    running.finish()
    assert len(ledgers(running)) == 4, "three at first, and one newcomer"
    places = ledgers(running)[stayers[last]][-1]["places"]
    assert [world for _, world in places] == [3, 2, 3, 2]
    assert_right(running, undisturbed(running.epochs))


@pytest.mark.parametrize(
    ("what", "who"),
    some(
        [("worker", "rank 0"), ("node", "rank 2")],
        of=[("worker", "rank 0"), ("worker", "rank 2"), ("node", "rank 0"), ("node", "rank 2")],
    ),
)
def test_ranks_that_lose_another_keep_their_processes(
    job: Make, undisturbed: Callable[[int], dict[str, torch.Tensor]], what: str, who: str
) -> None:
    """With four ranks, one has nothing to do with the lost one in the operation under way, and waits for the others."""
    running = job("--detect_within=5")
    running.epochs = 80
    for name in ("a", "b", "c", "d"):
        running.start(name, "1:4", command(running, setup_s=SETUP_S))
    group = running.wait_for_step(8, world=4)
    lost = next(node["node_id"] for node in running.status()["nodes"] if node["ranks"] == [int(who[-1])])
    stayers = {name: pid_of(running, name) for name in "abcd" if name != lost}
    if what == "worker":
        running.nodes[lost].kill_worker()
        back = running.wait_for_step(1, after_group=group, world=3)
        running.wait_for_step(1, after_group=back, world=4)
    else:
        running.nodes[lost].kill()
        running.wait_for_step(1, after_group=group, world=3)
    assert {name: pid_of(running, name) for name in stayers} == stayers
    running.finish()
    assert_result(running, undisturbed(running.epochs))


@pytest.mark.parametrize("which", some(["the leader's"], of=["the leader's", "another"]))
def test_an_agent_that_stops_does_not_take_the_steps_since_the_last_checkpoint_with_it(
    job: Make, undisturbed: Callable[[int], dict[str, torch.Tensor]], which: str
) -> None:
    """Its rank, which runs on, waits for it: so the others keep a snapshot of which they have that rank's part."""
    running = job("--detect_within=4", "--snapshot_overhead=100")
    running.epochs, running.step_time_s = 80, 0.05
    for name in ("a", "b"):
        running.start(name, "1:2", command(running))
    group = running.wait_for_step(40, world=2)
    leads = {node["node_id"]: node["is_leader"] for node in running.status()["nodes"]}
    stopped, stays = sorted(leads, key=lambda name: leads[name] != (which == "the leader's"))
    pid = pid_of(running, stays)
    running.nodes[stopped].process.send_signal(signal.SIGSTOP)
    following = running.wait_for_step(1, after_group=group, world=1)
    assert pid_of(running, stays) == pid
    assert min(line.step for line in read_trace(running.trace) if line.group == following) > 20, running.log_text()
    assert running.status()["restarts"] == 0
    running.nodes[stopped].process.send_signal(signal.SIGCONT)
    running.wait_for_step(1, after_group=following, world=2)
    assert pid_of(running, stays) == pid
    running.finish()
    assert_result(running, undisturbed(running.epochs))


def test_what_is_frozen_as_ranks_move_is_averaged_again_once_it_trains(job: Make, tmp_path: Path, etcd: Any) -> None:  # noqa: ANN401
    """DistributedDataParallel looks at what is to be trained when it is made, and it is made again in each group."""
    with Job(tmp_path, etcd.endpoint, tmp_path.name) as alone:
        alone.epochs, alone.environ["MISDEED"] = 2 * THAWS_AT, "freeze"
        alone.start("a", "1", command(alone))
        alone.finish()
        weights = dict(torch.load(alone.weights))
    running = job()
    running.epochs, running.environ["MISDEED"] = 2 * THAWS_AT, "freeze"
    for name in ("a", "b", "c"):
        running.start(name, "1:3", command(running))
    group = running.wait_for_step(3, world=3)
    pids = {name: pid_of(running, name) for name in ("a", "b", "c")}
    running.scale("2")
    running.wait_for_step(1, after_group=group, world=2)
    assert read_trace(running.trace)[-1].step < STEPS_PER_EPOCH * THAWS_AT, "it was frozen then"
    stayers = [node["node_id"] for node in running.status()["nodes"] if node["ranks"]]
    assert len(stayers) == 2
    assert {name: pid_of(running, name) for name in stayers} == {name: pids[name] for name in stayers}
    running.finish()
    assert_result(running, weights)


@pytest.mark.parametrize("misdeed", some(["hold"], of=["sleep", "stop", "hold", "stick"]))
def test_a_rank_that_does_not_notice_is_replaced_and_the_others_keep_their_processes(
    job: Make, undisturbed: Callable[[int], dict[str, torch.Tensor]], misdeed: str
) -> None:
    """It sleeps, is stopped, or is stuck in C with or without the interpreter's lock, as another rank is killed."""
    running = job("--detect_within=5")
    running.epochs = 80
    running.environ["MISDEED"] = misdeed
    for name in ("a", "b", "c"):
        running.start(name, "1:3", command(running))
    group = running.wait_for_step(8, world=3)
    nodes = {node["ranks"][0]: node["node_id"] for node in running.status()["nodes"]}
    pids = {rank: pid_of(running, name) for rank, name in nodes.items()}
    wait_for((running.directory / "misdeed").exists, PATIENCE_S, "the misdeed")
    running.nodes[nodes[2]].kill()
    running.wait_for_step(1, after_group=group, world=2)
    assert pid_of(running, nodes[0]) == pids[0]
    assert pid_of(running, nodes[1]) != pids[1]
    running.finish()
    assert_result(running, undisturbed(running.epochs))


def test_a_lost_rank_is_replaced_by_a_process_that_has_set_up(
    job: Make, undisturbed: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    """Two nodes that must both be there: first rank 1 is killed, then rank 0."""
    running = job("--standby=hot")
    running.epochs, running.step_time_s = 400, 0.1
    for name in ("a", "b"):
        running.start(name, "2", command(running, setup_s=SETUP_S))
    group = running.wait_for_step(8, world=2)
    nodes = {node["ranks"][0]: node["node_id"] for node in running.status()["nodes"]}
    for lost in (1, 0):
        wait_for(lambda: are_set_up(running), WARM_WITHIN_S, "processes that have set up")
        pids = {name: pid_of(running, name) for name in nodes.values()}
        running.nodes[nodes[lost]].kill_worker()
        group = running.wait_for_step(1, after_group=group, world=2)
        assert pid_of(running, nodes[1 - lost]) == pids[nodes[1 - lost]]
        assert pid_of(running, nodes[lost]) != pids[nodes[lost]]
    assert longest_pause_s(running) < SETUP_S
    is_main, _ = (running.directory / f"setup.{pid_of(running, nodes[0])}").read_text().split()
    assert is_main == "False"
    running.finish()
    assert_result(running, undisturbed(running.epochs))


@pytest.mark.long("test_a_newcomer_whose_set_up_fails_disturbs_nobody")
def test_a_standby_whose_set_up_fails_disturbs_nobody(job: Make) -> None:
    """The next one stays as warm as others are."""
    running = job("--standby=hot")
    running.epochs, running.step_time_s = 400, 0.1
    node = running.start("a", "1", command(running))
    running.wait_for_step(8)
    (running.directory / "bad").touch()
    wait_for(lambda: "standbys do not set up the script any more" in node.text(), WARM_WITHIN_S, "the line")
    wait_for(lambda: "1 of 1 warm" in running.status()["nodes"][0]["standby"], WARM_WITHIN_S, "a warm standby")
    (running.directory / "bad").unlink()
    group = running.status()["group"]
    node.kill_worker()
    running.wait_for_step(1, after_group=group)
    running.finish()


def are_set_up(job: Job) -> bool:
    return all("1 of 1 set up" in node["standby"] for node in job.status()["nodes"])


def test_an_error_of_the_script_ends_its_rank_at_once(
    job: Make, undisturbed: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    """It is not held: nothing says that the group is over."""
    running = job("--detect_within=20")
    running.epochs = 80
    running.environ["MISDEED"] = "raise"
    for name in ("a", "b"):
        running.start(name, "2", command(running))
    group = running.wait_for_step(8, world=2)
    nodes = {node["ranks"][0]: node["node_id"] for node in running.status()["nodes"]}
    stays = pid_of(running, nodes[0])
    running.wait_for_step(21, after_group=group, world=2)
    assert pid_of(running, nodes[0]) == stays
    assert longest_pause_s(running) < 20, "as long as a rank would wait for a verdict"
    (first,) = [entry for entry in running.history() if entry["group"] == group + 1]
    assert "ValueError: a mistake of the script" in str(first)
    running.finish()
    assert_result(running, undisturbed(running.epochs))


def test_a_script_that_catches_every_error_is_stopped_between_its_steps(
    job: Make, undisturbed: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    running = job("--detect_within=5")
    running.epochs = 80
    running.environ["MISDEED"] = "catch"
    for name in ("a", "b"):
        running.start(name, "1:2", command(running))
    group = running.wait_for_step(8, world=2)
    nodes = {node["ranks"][0]: node["node_id"] for node in running.status()["nodes"]}
    stays = pid_of(running, nodes[0])
    running.nodes[nodes[1]].kill()
    running.wait_for_step(1, after_group=group, world=1)
    assert pid_of(running, nodes[0]) == stays
    running.finish()
    assert_result(running, undisturbed(running.epochs))


def test_ranks_that_follow_other_learning_rates_do_not_train_on(job: Make) -> None:
    """A newcomer has set up in a world of one, and the function of its schedule has kept that."""
    running = job()
    running.epochs = 80
    running.environ["MISDEED"] = "rate"
    nodes = [running.start(name, "2:3", command(running)) for name in ("a", "b")]
    running.wait_for_step(8, world=2)
    nodes.append(running.start("c", "2:3", command(running)))
    assert {node.wait(PATIENCE_S) for node in nodes} == {93}
    said = "".join(node.text() for node in nodes)
    assert "the learning rates in State are not the same on all ranks" in said
    assert "state.on_regroup" in said


def test_a_newcomer_whose_set_up_fails_disturbs_nobody(job: Make) -> None:
    running = job()
    running.epochs = 80
    running.start("a", "1:2", command(running))
    group = running.wait_for_step(8, world=1)
    (running.directory / "bad").touch()
    newcomer = running.start("b", "1:2", command(running))
    line = "the set-up of the script ended with FileNotFoundError"
    wait_for(lambda: line in newcomer.text(), PATIENCE_S, "the line")
    here = read_trace(running.trace)[-1].step
    running.wait_for_step(here + 10, world=1)
    assert running.status()["group"] == group
    (unfit,) = [node for node in running.status()["nodes"] if node["node_id"] == "b"]
    assert "set-up of the script" in str(unfit)
    running.finish()
