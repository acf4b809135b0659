"""The environment of a process in a parameter-server job: Paddle's variables, and the address for a process group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.roles.plan import RolePlan, RoleProcess
from agent.workers.devices import VISIBLE
from agent.workers.environment import GROUP_VARIABLES, without_secrets
from trainer_runtime import contract
from trainer_runtime.tls import NAMES, VARIABLE, TlsFiles

_ROLES = {"server": "PSERVER", "worker": "TRAINER", "heter": "HETER_TRAINER"}
SECRET = "ELASTIC_AGENT_PS_SECRET"  # noqa: S105 - a name


@dataclass(frozen=True)
class RoleFacts:
    """What all processes of a machine share."""

    plan: RolePlan
    job_id: str
    run: str
    node_id: str
    secret: str
    checkpoint_dir: Path
    """Directory in which servers persist their rows."""
    fresh: bool
    """Ignore what an earlier run left in `checkpoint_dir`."""
    gpus: tuple[str, ...]
    """GPUs that the processes of this machine may use."""
    tls: TlsFiles | None = None
    """Certificates for connections between processes. None: they are not encrypted."""


def role_environment(
    base: Mapping[str, str], process: RoleProcess, incarnation: int, facts: RoleFacts
) -> dict[str, str]:
    """Return the complete environment of one process. `base`: the environment that the user gave to the agent."""
    plan = facts.plan
    workers = plan.of("worker")
    env = {name: value for name, value in without_secrets(base).items() if name not in GROUP_VARIABLES}
    env = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"} | env
    env |= {
        "TRAINING_ROLE": _ROLES[process.kind],
        "PADDLE_PSERVERS_IP_PORT_LIST": plan.endpoints("server"),
        "PADDLE_TRAINER_ENDPOINTS": plan.endpoints("worker"),
        "PADDLE_HETER_TRAINER_IP_PORT_LIST": plan.endpoints("heter"),
        "PADDLE_HETER_TRAINER_DEVICE": plan.heter_device,
        "PADDLE_TRAINERS_NUM": str(len(workers) + len(plan.of("heter"))),
        "PADDLE_CURRENT_ENDPOINT": process.endpoint,
        "POD_IP": process.machine,
        "PADDLE_PORT": str(process.port),
        contract.JOB_ID: facts.job_id,
        contract.RUN_ID: facts.run,
        contract.NODE_ID: facts.node_id,
        contract.CHECKPOINT_DIR: str(facts.checkpoint_dir / facts.run if facts.fresh else facts.checkpoint_dir),
        SECRET: facts.secret,
        contract.PS_INCARNATION: str(incarnation),
    }
    for name in NAMES:  # `facts.tls` has what the agent took from these variables: all of them, or none
        env.pop(VARIABLE.format(name.upper()), None)
    if facts.tls is not None:
        env |= {VARIABLE.format(name.upper()): getattr(facts.tls, name) for name in NAMES}
    if process.kind != "server":
        number = process.index + (len(workers) if process.kind == "heter" else 0)
        env["PADDLE_TRAINER_ID"] = str(number)
        env |= {"MASTER_ADDR": workers[0].machine, "RANK": str(number), "WORLD_SIZE": env["PADDLE_TRAINERS_NUM"]}
        if plan.http_port:
            env |= {
                "MASTER_PORT": str(plan.http_port),
                "PADDLE_GLOO_HTTP_ENDPOINT": f"{workers[0].machine}:{plan.http_port}",
            }
    return env | _devices(process, facts)


def _devices(process: RoleProcess, facts: RoleFacts) -> dict[str, str]:
    """Return the variables that give each worker of the machine one GPU, and servers none.

    Workers share GPUs if there are fewer GPUs than workers. Heterogeneous workers, if there are any, get all GPUs.
    """
    kinds_with = ("heter",) if facts.plan.of("heter") else ("worker",)
    if process.kind not in kinds_with:
        return {VISIBLE: "", "FLAGS_selected_gpus": ""} if facts.gpus else {}
    if not facts.gpus:
        return {}
    here = [other for other in facts.plan.of(process.kind) if other.machine == process.machine]
    return {VISIBLE: facts.gpus[here.index(process) % len(facts.gpus)], "FLAGS_selected_gpus": "0"}
