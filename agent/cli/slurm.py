"""Reads from the environment of an `srun` task what options would say: the machines, this machine, its GPUs.

`srun elastic-agent train.py`, with one task per node, needs no option: the nodes of the allocation are the job's
machines. Options about the job (`--job_id`, `--elastic_server`, `--ips`, `--standalone`) win over the allocation.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent.errors import ConfigError

_RANGES = re.compile(r"\[([^\]]*)\]")
_SWITCH = re.compile(r"[A-Za-z0-9_-]{1,128}")
_PORTS = range(20_000, 30_000)
"""A job's port follows from its id. Ids increase by one, so jobs that share a machine have different ports."""


@dataclass(frozen=True)
class Allocation:
    """The machines of a Slurm job, as one of its tasks sees them."""

    job_id: str
    machines: tuple[str, ...]
    own: str
    """The machine of this task."""
    port: int
    """Port of the job's etcd. Its members talk to each other on the next port."""


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Read the allocation from the environment. None: this process is no task of Slurm's. Raises `ConfigError`."""
    if not {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"} <= environ.keys():
        return None
    machines = tuple(hostnames(environ["SLURM_STEP_NODELIST"]))
    tasks = environ.get("SLURM_STEP_NUM_TASKS", str(len(machines)))
    if tasks != str(len(machines)):
        raise ConfigError(
            f"srun starts {tasks} tasks on {len(machines)} nodes: wanted one agent a node; give srun "
            "--ntasks-per-node=1, and the agent --nproc_per_node"
        )
    job = environ["SLURM_JOB_ID"]
    number = int(job) if job.isdigit() else 0
    return Allocation(
        job_id=f"slurm-{job}",
        machines=machines,
        own=environ.get("SLURMD_NODENAME") or machines[int(environ.get("SLURM_NODEID", "0"))],
        port=_PORTS[2 * number % len(_PORTS)],
    )


def allotted_gpus(environ: Mapping[str, str]) -> str | None:
    """How many GPUs this task has, if Slurm gave it some and does not say so in CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in environ or "SLURM_STEP_ID" not in environ or not environ.get("SLURM_STEP_GPUS"):
        return None
    return str(len(environ["SLURM_STEP_GPUS"].split(",")))


def leaf_switch(environ: Mapping[str, str]) -> str:
    """The network switch that this task's node is at, if Slurm knows the topology and names one. Empty: it does not.

    Slurm's topology plugins give the names on the way to a node, and what each of them is: `s0.s4.gpu3` and
    `switch.switch.node` (`SLURM_TOPOLOGY_ADDR` in the manual of srun).
    """
    names = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    is_known = "SLURM_STEP_ID" in environ and len(names) == len(kinds) and kinds[-2:] == ["switch", "node"]
    return names[-2] if is_known and _SWITCH.fullmatch(names[-2]) else ""


def hostnames(text: str) -> Iterator[str]:
    """Expand Slurm's notation: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7, login. Raises `ConfigError`."""
    for part in re.split(r",(?![^\[]*\])", text):
        pieces = _RANGES.split(part)
        if not part or any(set(piece) & set("[]") for piece in pieces):
            raise ConfigError(f"a list of nodes of Slurm's was expected, as gpu[01-03],login, not {text!r}")
        choices = [[piece] if number % 2 == 0 else _numbers(piece, text) for number, piece in enumerate(pieces)]
        yield from map("".join, itertools.product(*choices))


def _numbers(ranges: str, text: str) -> list[str]:
    found = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdigit() and (last.isdigit() if dash else True)):
            raise ConfigError(f"a list of nodes of Slurm's was expected, as gpu[01-03],login, not {text!r}")
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return found
