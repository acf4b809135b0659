"""What standbys that set up ahead are started with."""

from __future__ import annotations

from pathlib import Path

import pytest
from reasons import LOST

from agent.config import AgentConfig, JobConfig, NodeConfig, StandbyMode, TimingConfig, WorkerConfig
from agent.core import effects as fx
from agent.core.model import Cause, Group, Member, Spec
from agent.workers.launch_plan import Launch, plan_launch
from trainer_runtime import contract

SPEC = Spec(run="r", np_min=1, np_max=2, secret="s", changed_by="test", changed_at=0.0)


def member(node_id: str) -> Member:
    return Member(node_id=node_id, incarnation="i", address="127.0.0.1", nproc=2, port=4000, link=1)


def launch(
    *names: str, node_rank: int, standby: StandbyMode = "hot", cause: Cause = "failed", in_place: bool = True
) -> Launch:
    members = tuple(map(member, names))
    group = Group(
        run="r", number=3, members=members, cause=cause, reason=LOST, restarts=0, step=0, reached=2, in_place=in_place
    )
    config = AgentConfig(
        endpoints=("127.0.0.1:2379",),
        store_timeout_s=1.0,
        job=JobConfig("job", 1, 2),
        node=NodeConfig(names[node_rank], is_node_id_chosen=True, address="h", ips=("127.0.0.1",), nproc=2),
        timing=TimingConfig(),
        workers=WorkerConfig(("train.py",), Path("log"), Path("checkpoints"), max_restarts=0, standby=standby),
    )
    return plan_launch(fx.StartWorkers(group, node_rank, SPEC), config, {})


@pytest.mark.parametrize(
    ("names", "node_rank", "ranks", "world"),
    [(("a", "b"), 1, [2, 3], "4"), (("a", "b"), 0, [2, 3], "4"), (("a",), 0, [2, 3], "4")],
)
def test_a_process_that_sets_up_beside_living_ranks_is_never_rank_0(
    names: tuple[str, ...], node_rank: int, ranks: list[int], world: str
) -> None:
    planned = launch(*names, node_rank=node_rank)
    assert [command.rank for command in planned.ahead] == ranks
    for local_rank, command in enumerate(planned.ahead):
        assert (command.local_rank, command.env["LOCAL_RANK"]) == (local_rank, str(local_rank))
        assert (command.env["RANK"], command.env["WORLD_SIZE"]) == (str(ranks[local_rank]), world)
        assert command.env[contract.SETUP] == "wait"


def test_what_it_prints_and_records_is_kept_apart_from_the_living_rank() -> None:
    planned = launch("a", "b", node_rank=1)
    for own, ahead in zip(planned.commands, planned.ahead, strict=True):
        assert ahead.console_prefix is None
        assert ahead.log_path != own.log_path
        assert ahead.env["TORCHELASTIC_ERROR_FILE"] != own.env["TORCHELASTIC_ERROR_FILE"]
        assert ahead.standby_command == own.standby_command


@pytest.mark.parametrize(
    ("cause", "in_place", "takes"), [("failed", True, True), ("restart", True, False), ("failed", False, False)]
)
def test_it_becomes_a_rank_only_of_a_group_that_is_entered_in_place(
    cause: Cause, *, in_place: bool, takes: bool
) -> None:
    """An operator who asks for a restart wants the script to be read again."""
    assert launch("a", "b", node_rank=1, cause=cause, in_place=in_place).takes_set_up is takes


def test_other_standbys_do_not_set_up() -> None:
    assert not launch("a", "b", node_rank=1, standby="learned").ahead
