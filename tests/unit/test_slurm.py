"""What the agent reads from an allocation of Slurm's."""

from __future__ import annotations

import pytest

from agent.cli.slurm import allotted_gpus, hostnames, leaf_switch, read_allocation
from agent.errors import ConfigError

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[01-03]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURMD_NODENAME": "gpu02",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("rack-1[3-4]-ib,x[5]y", ["rack-13-ib", "rack-14-ib", "x5y"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_names_in_slurms_notation(text: str, names: list[str]) -> None:
    assert list(hostnames(text)) == names


@pytest.mark.parametrize("text", ["", "a,,b", "n[1-", "n[a-b]", "n[]", "n]1["])
def test_another_notation_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a list of nodes of Slurm's was expected, as gpu\[01-03\],login, not"):
        list(hostnames(text))


def test_a_task_knows_the_machines_and_which_it_is() -> None:
    found = read_allocation(TASK)
    assert found is not None
    assert (found.job_id, found.machines, found.own) == ("slurm-4711", ("gpu01", "gpu02", "gpu03"), "gpu02")
    unnamed = read_allocation({name: value for name, value in TASK.items() if name != "SLURMD_NODENAME"})
    assert unnamed == found


def test_jobs_on_one_machine_have_ports_of_their_own() -> None:
    ports = set()
    for job in range(4711, 4811):
        found = read_allocation({**TASK, "SLURM_JOB_ID": str(job)})
        assert found is not None
        ports |= {found.port, found.port + 1}
    assert len(ports) == 200


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"])
def test_outside_of_srun_there_is_no_task(missing: str) -> None:
    assert read_allocation({name: value for name, value in TASK.items() if name != missing}) is None


def test_several_agents_on_a_node_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"srun starts 12 tasks on 3 nodes: wanted one agent a node"):
        read_allocation({**TASK, "SLURM_STEP_NUM_TASKS": "12"})


def test_gpus_are_counted_where_nobody_names_them() -> None:
    assert allotted_gpus({**TASK, "SLURM_STEP_GPUS": "2,3"}) == "2"
    assert allotted_gpus({**TASK, "SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}) is None
    assert allotted_gpus({**TASK, "SLURM_JOB_GPUS": "0,1"}) is None, "of the job, and not of this step"
    assert allotted_gpus(TASK) is None


@pytest.mark.parametrize(
    ("names", "kinds", "switch"),
    [
        ("s0.s4.gpu3", "switch.switch.node", "s4"),
        ("s4.gpu3", "switch.node", "s4"),
        ("gpu3", "node", ""),
        ("s[0-1].gpu3", "switch.node", ""),
        ("s4.gpu3", "switch.switch.node", ""),
        ("b1.gpu3", "block.node", ""),
    ],
)
def test_the_switch_of_a_node_is_that_which_slurm_names(names: str, kinds: str, switch: str) -> None:
    topology = {"SLURM_TOPOLOGY_ADDR": names, "SLURM_TOPOLOGY_ADDR_PATTERN": kinds}
    assert leaf_switch({**TASK, **topology}) == switch
    assert leaf_switch(topology) == "", "no task of Slurm's"
    assert leaf_switch(TASK) == ""
