"""Scenarios of a job, each played with many seeds: the order of events differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import some
from simulation.cluster import POLICY, Cluster

seeds = pytest.mark.parametrize("seed", some(range(5), range(30)))
few_seeds = pytest.mark.parametrize("seed", some(range(2), range(6)))
"""For scenarios that take seconds."""


@seeds
def test_agents_meet_and_finish(seed: int) -> None:
    cluster = Cluster(seed, np=(3, 3))
    for name in ("c", "a", "b"):
        cluster.start(name)
    cluster.run_until(lambda: len(cluster.training_nodes) == 3)
    cluster.finish_workers()
    cluster.run_until(lambda: all(agent.exit for agent in cluster.agents))
    assert {agent.exit.code for agent in cluster.agents} == {0}


@seeds
def test_a_fixed_job_waits_for_a_replacement_under_another_name(seed: int) -> None:
    cluster = Cluster(seed, np=(2, 2))
    a, _b = cluster.start("a"), cluster.start("b")
    cluster.run_until(lambda: len(cluster.training_nodes) == 2)
    cluster.kill(a)
    cluster.run_until(lambda: cluster.group.members == ())
    assert cluster.group.cause == "wait"
    cluster.start("0")
    cluster.run_until(lambda: cluster.training_nodes == ["b", "0"])


@seeds
def test_an_elastic_job_goes_on_and_takes_newcomers_last(seed: int) -> None:
    cluster = Cluster(seed, np=(1, 3))
    agents = {name: cluster.start(name) for name in ("x", "y", "z")}
    cluster.run_until(lambda: len(cluster.training_nodes) == 3)
    first = cluster.training_nodes
    cluster.kill(agents[first[0]])
    cluster.run_until(lambda: cluster.training_nodes == first[1:])
    cluster.start("a")
    cluster.run_until(lambda: cluster.training_nodes == [*first[1:], "a"])


@seeds
def test_a_failed_worker_restarts_the_group_once(seed: int) -> None:
    cluster = Cluster(seed, np=(2, 2))
    a, b = cluster.start("a"), cluster.start("b")
    cluster.run_until(lambda: len(cluster.training_nodes) == 2)
    members = cluster.training_nodes
    cluster.fail_worker(a)
    cluster.run(0.3)
    if b.running == 1:
        cluster.fail_worker(b, peer_lost=True)
    cluster.run_until(lambda: cluster.group.number == 2 and cluster.training_nodes == members)
    assert cluster.group.restarts == 1
    cluster.run(10)
    assert cluster.group.number == 2, "one failure, one restart"


@seeds
def test_scale_up_and_down_while_training(seed: int) -> None:
    cluster = Cluster(seed, np=(2, 2))
    for name in ("a", "b"):
        cluster.start(name)
    cluster.run_until(lambda: len(cluster.training_nodes) == 2)
    pair = cluster.training_nodes
    cluster.scale((3, 3))
    cluster.run(5)
    assert cluster.training_nodes == pair, "np is a goal, not a stop"
    cluster.start("c")
    cluster.run_until(lambda: cluster.training_nodes == [*pair, "c"])
    cluster.scale((2, 2))
    cluster.run_until(lambda: cluster.training_nodes == pair)


@seeds
def test_an_agent_restarted_under_its_name_takes_its_place_back(seed: int) -> None:
    cluster = Cluster(seed, np=(2, 2))
    agents = [cluster.start("a"), cluster.start("b")]
    cluster.run_until(lambda: len(cluster.training_nodes) == 2)
    cluster.kill(agents[seed % 2])
    before = cluster.now
    second = cluster.start(agents[seed % 2].name)
    cluster.run_until(lambda: second.state.registered is not None)
    assert cluster.now - before < 3.5, "without waiting for the old lease"
    cluster.run_until(lambda: len(cluster.training_nodes) == 2 and cluster.group.number > 1)


@seeds
def test_an_agent_paused_past_its_lease_joins_again(seed: int) -> None:
    cluster = Cluster(seed, np=(1, 2))
    agents = [cluster.start("a"), cluster.start("b")]
    cluster.run_until(lambda: len(cluster.training_nodes) == 2)
    sleeper = agents[seed % 2]
    sleeper.pause()
    cluster.run_until(lambda: len(cluster.training_nodes) == 1)
    sleeper.wake()
    cluster.run_until(lambda: len(cluster.training_nodes) == 2)


@seeds
def test_a_second_agent_on_a_host_gets_a_name_of_its_own(seed: int) -> None:
    cluster = Cluster(seed, np=(2, 2))
    cluster.start("host", chosen=False)
    cluster.start("host", chosen=False)
    cluster.run_until(lambda: sorted(cluster.training_nodes) == ["host", "host-2"])


@seeds
def test_a_chosen_name_that_is_taken_is_refused(seed: int) -> None:
    cluster = Cluster(seed, np=(1, 1))
    cluster.start("a")
    cluster.run_until(lambda: len(cluster.training_nodes) == 1)
    second = cluster.start("a")
    cluster.run_until(lambda: second.exit is not None)
    assert second.exit.code == 2
    assert cluster.training_nodes == ["a"]


@seeds
def test_a_finished_job_stays_finished_until_started_fresh(seed: int) -> None:
    cluster = Cluster(seed, np=(1, 1))
    cluster.start("a")
    cluster.run_until(lambda: len(cluster.training_nodes) == 1)
    cluster.finish_workers()
    cluster.run_until(lambda: cluster.agents[0].exit is not None)
    cluster.kill(cluster.agents[0])
    late = cluster.start("b")
    cluster.run_until(lambda: late.exit is not None)
    assert late.exit.code == 0
    cluster.kill(late)
    cluster.start("c", fresh=True)
    cluster.run_until(lambda: cluster.training_nodes == ["c"])
    assert (cluster.group.number, cluster.group.cause) == (3, "start"), "after a record that nobody trains"
    assert cluster.spec.first_group == 3


@seeds
def test_an_outage_longer_than_the_lease_changes_nothing(seed: int) -> None:
    cluster = Cluster(seed, np=(1, 3) if seed % 2 else (2, 2))
    for name in ("a", "b"):
        cluster.start(name)
    cluster.run_until(lambda: len(cluster.training_nodes) == 2)
    cluster.freeze(3 * POLICY.lease_ttl_s)
    cluster.run(20)
    assert cluster.group.number == 1, cluster.log_text()
    assert len(cluster.training_nodes) == 2
    assert all(agent.starts == 1 for agent in cluster.agents), "no worker was touched"
    cluster.fail_worker(cluster.agents[seed % 2])
    cluster.run_until(lambda: cluster.group.number == 2 and len(cluster.training_nodes) == 2)


@pytest.mark.parametrize("seed", some(range(40), range(300)))
def test_an_outage_about_as_long_as_the_lease_changes_nothing(seed: int) -> None:
    cluster = Cluster(seed, np=(1, 3))
    for name in ("a", "b", "c"):
        cluster.start(name)
    cluster.run_until(lambda: len(cluster.training_nodes) == 3)
    cluster.run(cluster.random.uniform(1.0, 3.0))
    cluster.freeze(cluster.random.uniform(0.7, 1.6) * POLICY.lease_ttl_s)
    cluster.run(10)
    assert cluster.group.number == 1, cluster.log_text()
    assert all(agent.starts == 1 for agent in cluster.agents), "no worker was touched"


@seeds
def test_a_member_lost_while_etcd_is_away_every_other_moment_is_missed(seed: int) -> None:
    """The only survivor is a spare: nobody has a link to the lost one."""
    cluster = Cluster(seed, np=(1, 1))
    for name in ("a", "b"):
        cluster.start(name)
    cluster.run_until(lambda: len(cluster.training_nodes) == 1)
    cluster.run(3)
    [trains] = (each for each in cluster.agents if [each.name] == cluster.training_nodes)
    trains.pause(host=True)
    for _ in range(12):
        cluster.freeze(2.5)
        cluster.run(0.9)
    assert cluster.group.number > 1, cluster.log_text()


@seeds
def test_a_member_lost_in_an_outage_is_missed_after_one_lease(seed: int) -> None:
    cluster = Cluster(seed, np=(1, 3))
    agents = [cluster.start(name) for name in ("a", "b", "c")]
    cluster.run_until(lambda: len(cluster.training_nodes) == 3)
    number = cluster.group.number
    cluster.etcd.freeze()
    cluster.run(5)
    cluster.kill(agents[seed % 3])
    cluster.run(5)
    cluster.etcd.thaw(is_new_leader=False)
    cluster.run_until(lambda: len(cluster.training_nodes) == 2 and cluster.group.number == number + 1)


@seeds
def test_a_wiped_etcd_is_refilled_and_the_running_group_goes_on(seed: int) -> None:
    cluster = Cluster(seed, np=(2, 2))
    for name in ("a", "b"):
        cluster.start(name)
    cluster.run_until(lambda: len(cluster.training_nodes) == 2)
    cluster.fail_worker(cluster.agents[0])
    cluster.run_until(lambda: cluster.group.number == 2 and len(cluster.training_nodes) == 2)
    cluster.scale((1, 2))
    cluster.run(3)
    cluster.wipe()
    cluster.run_until(lambda: cluster.group is not None)
    cluster.run(10)
    assert cluster.group.number == 2, cluster.log_text()
    assert cluster.spec.np == "1:2", "np survives"
    assert all(agent.starts == 2 for agent in cluster.agents), "no worker was touched"
    cluster.finish_workers()
    cluster.run_until(lambda: all(agent.exit for agent in cluster.agents))


@seeds
def test_a_wiped_etcd_and_a_lost_member_give_the_next_number(seed: int) -> None:
    cluster = Cluster(seed, np=(1, 2))
    agents = [cluster.start(name) for name in ("a", "b")]
    cluster.run_until(lambda: len(cluster.training_nodes) == 2)
    number = cluster.group.number
    cluster.wipe()
    cluster.kill(agents[seed % 2])
    cluster.run_until(lambda: cluster.group is not None and len(cluster.training_nodes) == 1)
    assert cluster.group.number == number + 1


@seeds
def test_a_newcomer_to_a_wiped_etcd_does_not_found_another_job(seed: int) -> None:
    cluster = Cluster(seed, np=(1, 2))
    cluster.start("a")
    cluster.run_until(lambda: len(cluster.training_nodes) == 1)
    cluster.fail_worker(cluster.agents[0])
    cluster.run_until(lambda: cluster.group.number == 2 and len(cluster.training_nodes) == 1)
    run = cluster.spec.run
    cluster.wipe()
    cluster.start("b")
    cluster.run_until(
        lambda: cluster.group is not None and cluster.group.number > 2 and len(cluster.training_nodes) == 2
    )
    assert cluster.spec.run == run


@seeds
def test_work_reported_before_a_wipe_is_reported_again(seed: int) -> None:
    cluster = Cluster(seed, np=(2, 2))
    for name in ("a", "b"):
        cluster.start(name)
    cluster.run_until(lambda: len(cluster.training_nodes) == 2)
    cluster.finish_worker(cluster.agents[0])
    cluster.run(3)
    cluster.wipe()
    cluster.run(10)
    cluster.finish_workers()
    cluster.run_until(lambda: all(agent.exit for agent in cluster.agents))
    assert cluster.max_group == 1


@seeds
def test_an_agent_can_leave_while_etcd_is_empty(seed: int) -> None:
    cluster = Cluster(seed, np=(1, 1))
    agent = cluster.start("a")
    cluster.run_until(lambda: len(cluster.training_nodes) == 1)
    cluster.wipe()
    cluster.run(cluster.random.uniform(0.0, 2.0))
    cluster.ask_to_stop(agent)
    cluster.run_until(lambda: agent.exit is not None)
    assert agent.exit.code == 0


@seeds
def test_answers_that_are_lost_are_neither_yes_nor_no(seed: int) -> None:
    cluster = Cluster(seed, np=(3, 3), loss=0.4)
    for name in ("a", "b", "c"):
        cluster.start(name)
    cluster.run_until(lambda: sorted(cluster.training_nodes) == ["a", "b", "c"])
    assert not any(agent.exit for agent in cluster.agents), "nobody may take its own late write for another's"
    cluster.fail_worker(cluster.agents[seed % 3])
    cluster.run_until(lambda: cluster.group.number >= 2 and len(cluster.training_nodes) == 3)
    cluster.finish_workers()
    cluster.run_until(lambda: all(agent.exit for agent in cluster.agents))


@seeds
def test_a_node_that_joins_and_dies_again_and_again_is_let_in_ever_more_slowly(seed: int) -> None:
    cluster = Cluster(seed, np=(1, 3))
    cluster.start("a")
    cluster.start("b")
    cluster.run_until(lambda: len(cluster.training_nodes) == 2)
    before, since = cluster.group.number, cluster.now
    while cluster.now - since < 300:
        flapping = cluster.start("x")
        cluster.run(6)
        cluster.kill(flapping)
        cluster.run(5)
    assert cluster.group.number - before <= 10, (
        "two for each doubling of the wait, one more if its lease outlives it; then it is never there long enough"
    )


@few_seeds
def test_a_node_that_is_lost_now_and_then_is_let_in_soon(seed: int) -> None:
    """Always the same one: 40 s later all train again, however often it has happened."""
    cluster = Cluster(seed, np=(2, 3))
    for name in ("a", "b"):
        cluster.start(name)
    lost = cluster.start("c")
    cluster.run_until(lambda: len(cluster.training_nodes) == 3)
    for _ in range(12):
        cluster.kill(lost)
        cluster.run(5)
        lost = cluster.start("c")
        cluster.run(40)
        assert len(cluster.training_nodes) == 3, cluster.log_text()


@seeds
def test_if_a_different_node_is_lost_each_time_returning_nodes_are_let_in_at_once(seed: int) -> None:
    """However soon the next one is lost."""
    cluster = Cluster(seed, np=(2, 3))
    agents = {name: cluster.start(name) for name in ("a", "b", "c")}
    cluster.run_until(lambda: len(cluster.training_nodes) == 3)
    for number in range(15):
        name = "abc"[number % 3]
        cluster.kill(agents[name])
        cluster.run_until(lambda: len(cluster.training_nodes) == 2)
        agents[name] = cluster.start(name)
        cluster.run_until(lambda: len(cluster.training_nodes) == 3, 15.0)
        cluster.run(2)


def hand_over(cluster: Cluster, names: tuple[str, ...]) -> None:
    """A job whose only copies are checkpoints made for handoffs: what is not handed over is lost."""
    training = cluster.training
    training.hands_off, training.copies_every, training.misses, training.speed_s = True, 0, 0.1, 0.1
    for name in names:
        cluster.start(name)
    cluster.run_until(lambda: sorted(cluster.training_nodes) == sorted(names) and cluster.is_begun)
    cluster.run(2)


def assert_no_step_was_replayed(cluster: Cluster) -> None:
    """Each step was taken once; but where the next group came too late, and the ranks had trained on."""
    history = cluster.training.history
    world = cluster.training.world_of(cluster.group)
    assert world is not None
    assert world.copy is not None
    has_gone_on = any(line.startswith("train on ") for line in cluster.transcript.lines)
    assert len(history) == history.depth(world.copy) or has_gone_on, cluster.log_text()


@seeds
def test_planned_changes_lose_no_step(seed: int) -> None:
    cluster = Cluster(seed, np=(1, 3))
    hand_over(cluster, ("a", "b"))
    cluster.start("c")
    cluster.run_until(lambda: len(cluster.training_nodes) == 3 and cluster.is_begun)
    cluster.run(2)
    cluster.ask_to_stop(cluster.agents[seed % 3])
    cluster.run_until(lambda: cluster.agents[seed % 3].exit is not None)
    cluster.run_until(lambda: len(cluster.training_nodes) == 2 and cluster.is_begun)
    cluster.run(2)
    cluster.scale((1, 1))
    cluster.run_until(lambda: len(cluster.training_nodes) == 1 and cluster.is_begun)
    cluster.run(2)
    assert cluster.group.number >= 4
    assert_no_step_was_replayed(cluster)


@seeds
def test_a_job_whose_agents_are_all_asked_to_leave_goes_on_later_where_it_was(seed: int) -> None:
    cluster = Cluster(seed, np=(2, 2))
    hand_over(cluster, ("a", "b"))
    for agent in cluster.agents:
        cluster.ask_to_stop(agent)
    cluster.run_until(lambda: all(agent.exit for agent in cluster.agents))
    assert {agent.exit.code for agent in cluster.agents} == {0}
    assert (cluster.group.members, cluster.group.cause) == ((), "drain")
    for name in ("b", "c"):
        cluster.start(name)
    cluster.run_until(lambda: len(cluster.training_nodes) == 2 and cluster.is_begun)
    cluster.run(2)
    assert_no_step_was_replayed(cluster)


def train_on(cluster: Cluster, steps: int) -> None:
    """So many more steps, in the group that is."""
    cluster.run_until(lambda: len(cluster.training_nodes) == 2 and cluster.is_begun)
    goal = cluster.training.newest_step + steps
    cluster.run_until(lambda: cluster.training.newest_step >= goal, within_s=300.0)


def test_a_hundred_failures_do_not_end_a_job_that_makes_progress() -> None:
    """At the defaults: ten restarts, and a minute of training to refill them."""
    cluster = Cluster(0, np=(2, 2), policy=replace(POLICY, max_restarts=10))
    cluster.training.tells_pace, cluster.training.speed_s = True, 5.0
    agents = [cluster.start("a"), cluster.start("b")]
    for count in range(100):
        train_on(cluster, 4)
        cluster.fail_worker(agents[count % 2])
        cluster.run_until(lambda number=count + 2: cluster.max_group >= number)
    train_on(cluster, 1)
    assert cluster.max_group == 101
    assert cluster.invariants.result is None


def test_a_crash_loop_ends_whatever_it_does_again() -> None:
    """It trains for longer than the window each time, and the steps are always the same ones."""
    cluster = Cluster(0, np=(2, 2), policy=replace(POLICY, max_restarts=10))
    cluster.training.tells_pace, cluster.training.speed_s, cluster.training.copies_every = True, 5.0, 0
    agents = [cluster.start("a"), cluster.start("b")]
    for count in range(11):
        train_on(cluster, 30)
        cluster.fail_worker(agents[0])
        cluster.run_until(lambda number=count + 2: cluster.max_group >= number)
    cluster.run_until(lambda: cluster.invariants.result)
    assert cluster.group is not None
    assert (cluster.group.number, cluster.group.members) == (12, ())
    assert cluster.invariants.result is not None
    assert cluster.invariants.result.exit_code == 76
