"""The environment of a rank."""

from __future__ import annotations

import bisect
import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from reasons import LOST

from agent.config import SnapshotConfig
from agent.core.model import Group, Member
from agent.workers import rank_logs
from agent.workers.environment import (
    ENDPOINTS,
    GROUP_VARIABLES,
    JobFacts,
    RankPlace,
    RankSlot,
    build_environment,
    interface_of,
    static_environment,
)
from trainer_runtime import contract

LOG = Path("/logs/rank-00002.b.log")


def member(node_id: str, nproc: int, address: str | None = None) -> Member:
    return Member(
        node_id=node_id, incarnation="i", address=address or f"10.0.0.{nproc}", nproc=nproc, port=4000, link=4001
    )


def group(*members: Member, number: int = 3) -> Group:
    return Group(
        run="r", number=number, members=members, cause="start", reason=LOST, restarts=0, step=0, reached=len(members)
    )


GROUP = group(member("a", 2), member("b", 3))
FACTS = JobFacts(
    job_id="job",
    role="default",
    run="r1",
    first_group=1,
    fresh=False,
    checkpoint_dir="/ckpt",
    handoff_wait_s=1.0,
    verdict_within_s=6.0,
    max_restarts=5,
    interface="eth7",
    snapshots=SnapshotConfig(),
    secret="the job's secret",
)


def env(base: dict[str, str] | None = None, place: RankPlace | None = None) -> dict[str, str]:
    return build_environment(base or {}, place or RankPlace(GROUP, 1, 0), FACTS, LOG)


def test_places_in_the_group() -> None:
    expected = {
        (0, 0): ("0", "0", "0", "2"),
        (0, 1): ("1", "1", "0", "2"),
        (1, 0): ("2", "0", "1", "3"),
        (1, 2): ("4", "2", "1", "3"),
    }
    for (node_rank, local_rank), wanted in expected.items():
        seen = env(place=RankPlace(GROUP, node_rank, local_rank))
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")
        assert tuple(seen[name] for name in names) == wanted
        assert seen["ROLE_RANK"] == seen["PADDLE_TRAINER_ID"] == seen["RANK"]
        assert seen["WORLD_SIZE"] == seen["ROLE_WORLD_SIZE"] == seen["PADDLE_TRAINERS_NUM"] == "5"
        assert seen["GROUP_WORLD_SIZE"] == "2"
        assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("10.0.0.2", "4000")


def of_a_world(size: int) -> dict[str, str]:
    return env(place=RankPlace(group(member("a", size, "10.0.0.1")), 0, 0))


@pytest.mark.parametrize("size", [100, 10_000])
def test_a_worker_of_any_world_can_be_started(size: int) -> None:
    """Linux starts no process with a variable of more than 128 KiB."""
    subprocess.run(["/bin/true"], env=of_a_world(size), check=True)


def test_all_endpoints_are_set_while_they_fit_into_a_variable() -> None:
    largest = bisect.bisect_left(range(1, 10_000), True, key=lambda size: ENDPOINTS not in of_a_world(size))
    told = of_a_world(largest)
    subprocess.run(["/bin/true"], env=told, check=True)
    told[ENDPOINTS] += f",10.0.0.1:{4000 + largest}"
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["/bin/true"], env=told, check=True)


def test_names_of_torchrun() -> None:
    seen = env()
    assert seen["ROLE_NAME"] == "default"
    assert seen["TORCHELASTIC_RESTART_COUNT"] == "2", "the third group is the second restart"
    assert seen["TORCHELASTIC_MAX_RESTARTS"] == "5"
    assert seen["TORCHELASTIC_RUN_ID"] == "job"
    assert seen["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert seen["TORCHELASTIC_ERROR_FILE"] == "/logs/rank-00002.b.error.json"


def test_names_of_paddle() -> None:
    seen = env(place=RankPlace(group(member("a", 2), member("b", 1, "fd00::1")), 1, 0))
    assert seen["PADDLE_TRAINER_ENDPOINTS"] == "10.0.0.2:4000,10.0.0.2:4001,[fd00::1]:4000"
    assert seen["PADDLE_CURRENT_ENDPOINT"] == "[fd00::1]:4000"
    assert seen["PADDLE_RANK_IN_NODE"] == "0"
    assert seen["TRAINING_ROLE"] == "TRAINER"


def test_names_of_the_contract() -> None:
    seen = env()
    assert seen[contract.JOB_ID] == "job"
    assert seen[contract.RUN_ID] == "r1"
    assert seen[contract.GROUP] == "3"
    assert seen[contract.NODE_ID] == "b"
    assert seen[contract.CHECKPOINT_DIR] == "/ckpt"
    assert seen[contract.FRESH] == "0"


@pytest.mark.parametrize(
    ("devices", "local_rank", "expected"),
    [(None, 0, None), ("", 0, None), ("4,5,6", 0, "0"), ("4, 5, 6", 1, "1"), ("4,5,6,7,8,9", 2, "4,5"), ("4", 0, None)],
)
def test_selected_device(devices: str | None, local_rank: int, expected: str | None) -> None:
    """Indices count the GPUs that the rank sees."""
    base = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    seen = env(base, RankPlace(GROUP, 1, local_rank))
    assert seen.get("FLAGS_selected_gpus") == expected
    assert seen.get("CUDA_VISIBLE_DEVICES") == devices


TASTE = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "GLOO_SOCKET_IFNAME": "eth7",
    "NCCL_SOCKET_IFNAME": "=eth7",
}


@pytest.mark.parametrize("name", sorted(TASTE))
def test_tuning_variables_of_the_user_win(name: str) -> None:
    assert env()[name] == TASTE[name]
    assert env({name: "mine"})[name] == "mine"


def test_threads_are_not_limited_for_a_single_rank() -> None:
    assert "OMP_NUM_THREADS" not in env(place=RankPlace(group(member("a", 1)), 0, 0))


def test_the_user_s_environment_passes_but_the_place_in_the_group_is_set_by_the_agent() -> None:
    seen = env({"MINE": "x", "RANK": "77", "PADDLE_ELASTIC_SERVER": "etcd:2379"})
    assert (seen["MINE"], seen["RANK"], seen["PADDLE_ELASTIC_SERVER"]) == ("x", "2", "etcd:2379")


@pytest.mark.parametrize(
    "name",
    ["ELASTIC_AGENT_ETCD_USER", "ELASTIC_AGENT_ETCD_KEY", "ELASTIC_AGENT_PASSWORD", "ELASTIC_AGENT_X_PASSWORD_FILE"],
)
def test_credentials_do_not_pass(name: str) -> None:
    assert name not in env({name: "secret"})


def test_interface_of() -> None:
    loopback = interface_of(["127.0.0.1"])
    assert loopback is not None
    assert loopback == interface_of(["127.0.1.1"]) == interface_of(["192.0.2.1", "::1"])
    assert interface_of(["192.0.2.1"]) is None
    assert interface_of(["fe80::1234%nowhere0"]) is None


def test_rank_logs_follow_the_history_and_sort_by_rank() -> None:
    directory = rank_logs.group_dir(Path("/logs"), "job", "r1", 3)
    assert str(rank_logs.log_path(directory, "node.b", 12)) == "/logs/job/r1/group-000003/rank-00012.node.b.log"
    assert rank_logs.error_path(rank_logs.log_path(directory, "node.b", 12)).name == "rank-00012.node.b.error.json"


def test_every_name_that_torchrun_sets_is_set(tmp_path: Path) -> None:
    script = tmp_path / "names.py"
    script.write_text("import json, os, sys; json.dump(sorted(os.environ), open(sys.argv[1], 'w'))")
    # If an outer torchrun or test runner has set these, the comparison would miss that torchrun sets them.
    before = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(script),
            str(tmp_path / "names"),
        ],
        env=before,
        check=True,
        capture_output=True,
        timeout=170,
    )
    theirs = set(json.loads((tmp_path / "names").read_text())) - set(before)
    assert {"RANK", "TORCHELASTIC_RUN_ID"} <= theirs
    assert theirs - set(env(before)) <= {"LC_CTYPE"}, "Python itself sets this one"


def test_the_group_variables_are_all_that_depends_on_the_group() -> None:
    """A standby has all other variables: it may become the rank only if they are equal."""
    base = {"RANK": "77", "MINE": "x", "CUDA_VISIBLE_DEVICES": "4,5", "OMP_NUM_THREADS": "3"}
    elsewhere = Group(
        run="r2", number=9, members=(member("c", 3),), cause="lost", reason=LOST, restarts=1, step=5, reached=3
    )
    facts = dataclasses.replace(FACTS, run="r2", first_group=4, fresh=True, max_restarts=1, handoff_wait_s=9)
    one = build_environment(base, RankPlace(GROUP, 1, 1), FACTS, LOG)
    other = build_environment(base, RankPlace(elsewhere, 0, 1), facts, Path("/other.log"))
    standing = static_environment(base, RankSlot(3, 1, FACTS.interface, FACTS.snapshots))
    assert {name: value for name, value in one.items() if name not in GROUP_VARIABLES} == standing
    assert {name: value for name, value in other.items() if name not in GROUP_VARIABLES} == standing
    assert set(one) >= GROUP_VARIABLES - {contract.PS_INCARNATION, contract.SETUP}, "the first is of parameter servers"


def test_a_rank_is_told_how_to_set_up() -> None:
    assert contract.SETUP not in build_environment({contract.SETUP: "alone"}, RankPlace(GROUP, 1, 1), FACTS, LOG)
    facts = replace(FACTS, setup="wait")
    assert build_environment({}, RankPlace(GROUP, 1, 1), facts, LOG)[contract.SETUP] == "wait"


def test_a_rank_gets_the_limits_of_snapshots() -> None:
    place = RankPlace(GROUP, 1, 0)
    told = build_environment({}, place, replace(FACTS, snapshots=SnapshotConfig(2.5, 1 << 30)), LOG)
    assert told[contract.SNAPSHOT_OVERHEAD] == "2.5"
    assert told[contract.SNAPSHOT_MEMORY] == str(1 << 30)


def test_a_rank_finds_out_itself_how_much_memory_is_free() -> None:
    assert env()[contract.SNAPSHOT_OVERHEAD] == "1"
    assert contract.SNAPSHOT_MEMORY not in env()


def test_without_snapshots_their_variables_are_not_set() -> None:
    told = build_environment({}, RankPlace(GROUP, 1, 0), replace(FACTS, snapshots=SnapshotConfig(0, 1 << 30)), LOG)
    assert not {contract.SNAPSHOT_OVERHEAD, contract.SNAPSHOT_MEMORY, contract.SNAPSHOT_FD} & told.keys()
